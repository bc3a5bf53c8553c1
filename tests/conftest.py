"""What every test shares: the slow tier's switch, and nothing that a room could own itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agora.node import paths

# One thread for arithmetic here: the tests' tensors are tiny, and threads that spin at barriers starve the daemons.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Daemons find others of their run on this machine: here only those of this session, not of tests that run beside it.
RUNTIME = Path(f"/tmp/agora-test-{os.getpid()}")
os.environ[paths.RUNTIME_VARIABLE] = str(RUNTIME)


def pytest_unconfigure() -> None:
    shutil.rmtree(RUNTIME, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", default=False, help="also run the slow tier (docs/reference/testing.md)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow tier: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
