"""The package is light: the data plane's messages need no tensor library, no DHT, no network stack, and no pydantic."""

from __future__ import annotations

import json
import subprocess
import sys

LIGHT = "errors limits base58 ids fields packing addresses tensors messages frames identity records invite".split()
HEAVY = ["torch", "hivemind", "libp2p", "numpy", "trio", "asyncio", "socket", "multiprocessing"]
SAY = "import json, sys; print(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"


def loaded_by(*modules: str) -> set[str]:
    program = "\n".join([*(f"import agora_protocol.{name}" for name in modules), SAY])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


def test_light_modules_load_nothing_heavy() -> None:
    loaded = loaded_by(*LIGHT)
    assert "msgpack" in loaded and "agora_protocol" in loaded
    assert not loaded & {*HEAVY, "pydantic", "agora"}


def test_the_manifest_loads_pydantic_and_nothing_heavier() -> None:
    loaded = loaded_by("manifest")
    assert "pydantic" in loaded and not loaded & {"torch", "hivemind", "libp2p", "numpy", "trio", "agora"}
