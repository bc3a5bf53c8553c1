"""What the protocol's tests share: two keys, a signed manifest, the vectors, and how many cases a fuzz runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest, preset

PROTOCOL = Path(__file__).resolve().parents[2] / "protocol"
FUZZ_CASES = 10_000
SLOW_FUZZ_CASES = 1_000_000


@pytest.fixture
def fuzz_cases(request: pytest.FixtureRequest) -> int:
    """Cases of one fuzz test: ten thousand, or a million with --slow."""
    return SLOW_FUZZ_CASES if request.config.getoption("--slow", default=False) else FUZZ_CASES


@pytest.fixture(scope="session")
def alice() -> Identity:
    return Identity(bytes(range(32)))


@pytest.fixture(scope="session")
def bob() -> Identity:
    return Identity(bytes(range(1, 33)))


@pytest.fixture(scope="session")
def signed(alice: Identity) -> SignedManifest:
    return SignedManifest.sign(preset("tiny"), alice)


def unjson(value: Any) -> Any:
    """A vector's value as Python has it: {"hex": ...} as bytes, lists as tuples."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else {k: unjson(v) for k, v in value.items()}
    return tuple(unjson(item) for item in value) if isinstance(value, list) else value


def load_vectors(name: str) -> Any:
    return unjson(json.loads((PROTOCOL / "vectors" / f"{name}.json").read_text(encoding="ascii")))


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], Any]:
    return load_vectors


def script(path: Path) -> ModuleType:
    """A script of protocol/ as a module; what lies beside it can be imported, as when it is run."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"protocol_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_make_script() -> ModuleType:
    return script(PROTOCOL / "vectors" / "make.py")


@pytest.fixture(scope="session")
def make_script() -> ModuleType:
    return load_make_script()


@pytest.fixture(scope="session")
def tables_script() -> ModuleType:
    return script(PROTOCOL / "tables.py")
