"""What every test shares: the switches of the quick and the slow tier, and what no single folder could own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from agora.node import paths

# One thread for arithmetic here: the tests' tensors are tiny, and threads that spin at barriers starve the daemons.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A machine that others keep busy fails no test: hypothesis would time each example.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# Daemons find others of their run on this machine: here only those of this session, not of tests that run beside it.
RUNTIME = Path(f"/tmp/agora-test-{os.getpid()}")
os.environ[paths.RUNTIME_VARIABLE] = str(RUNTIME)

TESTS = Path(__file__).resolve().parent
# What `./scripts/check` leaves out, besides tests that start daemons: folders and files that take more than two or
# three seconds of a processor, and the linters, which it runs itself.
NOT_QUICK = (
    "bench",
    "cli",
    "codec/test_boundary_codec.py",
    "conformance",
    "cost/test_manifest_cost.py",
    "cost/test_tuning_memory.py",
    "data",
    "examples",
    "house/test_house_rules.py::test_mypy_strict_finds_nothing",
    "house/test_house_rules.py::test_packages_import_only_what_they_may",
    "house/test_house_rules.py::test_ruff_finds_nothing",
    "model",
    "net",
    "node",
    "page/test_browser.py",
    "pipeline/test_chaos.py",
    "pipeline/test_long_links.py",
    "planning/test_search.py",
    "planning/test_simulation.py",
    "process",
    "protocol/test_fuzz.py",
    "replica/test_divergence.py",
    "replica/test_gossip.py",
    "replica/test_stage_replicas.py",
    "replica/test_shard_codec.py",
    "state",
    "swarm/test_directory_shards.py",
    "swarm/test_unverified_dials.py",
    "swarm/test_rebalancing.py",
    "tiny_base",
    "train",
    "tuning",
)


def pytest_unconfigure() -> None:
    shutil.rmtree(RUNTIME, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", default=False, help="also run the slow tier (docs/reference/testing.md)"
    )
    parser.addoption(
        "--quick", action="store_true", default=False, help="only tests without daemons, and none that takes long"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = config.getoption("--quick") and is_not_quick(collection_path.relative_to(TESTS).as_posix())
    return True if is_left_out else None


def is_not_quick(name: str) -> bool:
    """Whether a file, a folder or a test, named from tests/ on, is too slow for the quick tier."""
    return any(name == entry or name.startswith((f"{entry}/", f"{entry}::")) for entry in NOT_QUICK)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if "process" in item.keywords or is_not_quick(item.nodeid[len("tests/") :])]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow tier: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
