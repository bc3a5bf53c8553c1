"""torch's CUDA allocator may grow its segments: set before torch is imported, and unless the user has set something."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agora.cli.console import ALLOCATOR_SETTINGS, prefer_expandable_segments

PROGRAM = """
import os, sys
for name in {names}:
    os.environ.pop(name, None)
from agora.cli import {module}

@{module}.app.command("look")
def look():
    assert "torch" not in sys.modules
    print(os.environ["PYTORCH_ALLOC_CONF"])

{module}.app(["look"])
"""


@pytest.mark.parametrize("module", ["main_node", "main_swarm"])
def test_commands_set_it_before_they_import_torch(module: str) -> None:
    program = PROGRAM.format(names=ALLOCATOR_SETTINGS, module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "expandable_segments:True\n"


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
def test_what_the_user_has_set_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:512"}
    prefer_expandable_segments(environment, "2.13.0+cpu")
    assert environment == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.6.0+cu124", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_it_is_set_where_the_installed_torch_reads_it(version: str, name: str) -> None:
    environment: dict[str, str] = {}
    prefer_expandable_segments(environment, version)
    assert environment == {name: "expandable_segments:True"}
