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
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}
