"""What every test shares: the slow tier's switch, and nothing that a room could own itself."""

from __future__ import annotations

import os

import pytest

# One thread for arithmetic here: the tests' tensors are tiny, and threads that spin at barriers starve the daemons.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=False, help="also run the slow tier (docs/testing.md)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow tier: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
