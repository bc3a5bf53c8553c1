"""docs/reference/contributing.md names the files that a change touches: they exist, and what it says of them holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agora_protocol.manifest_model import MODEL_SECTIONS

from agora.model import FAMILIES
from agora.observe.faults import POINTS
from agora.train.optimizer import UPDATES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "contributing.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## Add an? ([\w ]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize(
    "what", ["codec", "message", "optimizer", "model family", "fault point", "event", "data format", "launch tool"]
)
def test_every_usual_addition_lists_the_files_that_it_touches(what: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", SECTIONS[what], re.M)
    assert rows, "a table whose first column is a file"
    assert not [path for path in rows if not (ROOT / path).exists()]


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:agora|protocol|scripts|tests|docs)/[^`* ]*)`", PAGE) + re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(paths) > 30
    missing = [
        path for path in paths if not (ROOT / path).exists() and not (ROOT / "docs" / "reference" / path).exists()
    ]
    assert not missing


def test_the_tables_that_the_page_names_are_the_ones_that_are_used() -> None:
    assert set(UPDATES) >= {"adamw"} and set(FAMILIES) == set(MODEL_SECTIONS)


def test_every_fault_point_is_reached_by_the_product() -> None:
    product = [path.read_text(encoding="utf-8") for path in (ROOT / "agora").rglob("*.py") if path.name != "faults.py"]
    assert not [point for point in POINTS if not any(f'"{point}"' in text for text in product)]
