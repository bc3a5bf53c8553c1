"""`./scripts/bench`: names, exit codes, one JSON object on standard output, and that it is not part of the product."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks import machine
from benchmarks.__main__ import BENCHES, PAGE, WITH_OPTIONS, run
from benchmarks.children import BenchFailed
from benchmarks.report import Ratio, Report

ROOT = Path(__file__).resolve().parents[2]
FOLDERS: list[Path] = []
FAKES = {"fake": f"{__name__}:fake", "failing": f"{__name__}:failing"}


def fake(quick: bool, folder: Path) -> Report:
    FOLDERS.append(folder)
    rows = [{"name": "a", "quick": str(quick)}]
    return Report("fake", "Fake", machine.describe(), rows, {"r": Ratio(2.0, "> 1", "x")})


def failing(quick: bool, folder: Path) -> Report:
    raise BenchFailed("the trainer ended by itself; the end of its log:\n  boom")


@pytest.fixture(autouse=True)
def nothing_measured_yet() -> None:
    FOLDERS.clear()


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake", True, True, False, benches=FAKES) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ratios"] == {"r": 2.0} and value["rows"][0]["quick"] == "True"
    assert not FOLDERS[-1].exists()


def test_the_table_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake", False, False, False, benches=FAKES) == 0
    assert "Fake" in capsys.readouterr().out


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pipelin", False, False, False) == 2
    printed = capsys.readouterr()
    assert "did you mean 'pipeline'" in printed.err and not printed.out


def test_a_failure_is_printed_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("failing", False, True, False, benches=FAKES) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: the trainer ended by itself") and not printed.out


def test_write_renews_the_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    assert run("fake", True, True, True, benches=FAKES, page=page) == 0
    assert "./scripts/bench fake --quick --write" in page.read_text()
    assert "swarm bench" not in page.read_text()


def test_the_page_is_the_checkouts_own() -> None:
    assert PAGE == ROOT / "docs" / "reference" / "benchmarks.md" and PAGE.exists()


def test_every_benchmark_can_be_imported_by_its_name() -> None:
    assert set(BENCHES) == {
        "gpu",
        "learning",
        "pipeline",
        "averaging",
        "join",
        "agreement",
        "codecs",
        "optimizer",
        "activations",
        "wan",
        "tuning",
        "simulate",
        "plan",
        "uneven",
        "journeys",
        "scaling",
    }
    for function in BENCHES.values():
        module, _, name = function.partition(":")
        source = ROOT / "scripts" / Path(*module.split(".")).with_suffix(".py")
        assert f"\ndef {name}(quick: bool, folder: Path) -> Report:" in source.read_text()
    for benchmark in WITH_OPTIONS:
        source = ROOT / "scripts" / "benchmarks" / f"{benchmark}.py"
        declared = "\ndef run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:"
        assert WITH_OPTIONS[benchmark].endswith(":run_with_options") and declared in source.read_text()


def test_options_are_of_those_benchmarks_that_have_some() -> None:
    command = [sys.executable, "-m", "benchmarks", "pipeline", "--peers", "2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}:{ROOT / 'protocol'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "unrecognized arguments: --peers 2" in done.stderr


def test_the_benchmarks_are_not_part_of_the_installed_package() -> None:
    """The wheel holds agora and agora_protocol, and the `swarm` command knows no `bench`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["agora", "protocol/agora_protocol"]
    assert not (ROOT / "agora" / "bench").exists()
    product = [*(ROOT / "agora").rglob("*.py"), *(ROOT / "protocol").rglob("*.py")]
    assert not [path for path in product if re.search(r"(from|import) benchmarks", path.read_text())]


def test_help_is_had_from_the_scripts_folder_alone(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}:{ROOT / 'protocol'}"}
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "./scripts/bench pipeline --quick --json" in done.stdout, done.stderr
