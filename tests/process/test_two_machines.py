"""The tutorial of tuning, on two folders that stand for two machines: no path of one is on the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agora.data.tokenizer import byte_tokenizer_json
from tests.model.tiny_models import make_model, save

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "use" / "tuning.md"
PROGRAMS = {"swarm": "agora.cli.main_swarm", "agora-node": "agora.cli.main_node"}
STAGES = {"first": "1", "second": "0"}
"""The founder holds no data's stage, and the one that joins reads its own copy of the data."""
WAIT_S = 240.0


class Machine:
    """A folder with spaces and letters beyond ASCII, and what was started in it."""

    def __init__(self, root: Path, runtime: Path, stages: str) -> None:
        self.root = root
        self.outputs: list[str] = []
        self.daemons: list[subprocess.Popen[bytes]] = []
        root.mkdir(parents=True)
        own = {
            "AGORA_RUNTIME_DIR": str(runtime),
            "AGORA_STAGES": stages,
            "AGORA_HOME": str(root / "home"),
            "HOME": str(root),
        }
        self.environment = {**os.environ, **own, "AGORA_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}

    def run(self, command: str) -> str:
        """What the command prints; one that joins goes on in the background, and prints to log.txt."""
        if command.startswith("export "):
            self.environment |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
            return ""
        program, *arguments = shlex.split(command)
        line = [sys.executable, "-m", PROGRAMS[program], *arguments]
        if arguments[0] == "join":
            with (self.root / "log.txt").open("ab") as log:
                self.daemons.append(
                    subprocess.Popen(
                        line, cwd=self.root, env=self.environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
            return ""
        done = subprocess.run(line, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)
        self.outputs += [done.stdout, done.stderr]
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def log(self) -> str:
        """All that its daemons have printed."""
        return (self.root / "log.txt").read_text() if (self.root / "log.txt").exists() else ""

    def await_text(self, pattern: str) -> str:
        """Waits until the daemons have printed that; returns the first group."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.log())):
            assert time.monotonic() < deadline and all(d.poll() is None for d in self.daemons), self.log()
            time.sleep(0.1)
        return found[1]

    def texts(self) -> bytes:
        """Everything that is written on it or was printed there."""
        files = [path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()]
        return b"\n".join([*files, *(text.encode() for text in self.outputs)])


@contextlib.contextmanager
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Two machines whose daemons are gone afterwards. They have sockets of their own, as two computers would."""
    places = {"first": "ann\u00e9 zq1/w\u00f6rk dir", "second": "ben zq2/else where"}
    made = {name: Machine(tmp_path / place, tmp_path / name[0], STAGES[name]) for name, place in places.items()}
    try:
        yield made
    finally:
        for daemon in (daemon for machine in made.values() for daemon in machine.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def provide(first: Machine, second: Machine) -> None:
    """The base model and its data, at other places and of other names on the second machine."""
    samples = "".join(json.dumps({"prompt": f"{n} is ", "completion": f"no {n}."}) + "\n" for n in range(100, 400))
    for base, data in (("base", "base/data/sft.jsonl"), ("models/tiny", "texts/chats.jsonl")):
        root = (first if base == "base" else second).root
        save(make_model("qwen2"), root / base)
        (root / base / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
        (root / data).parent.mkdir(parents=True, exist_ok=True)
        (root / data).write_text(samples)


def test_the_tutorial_of_tuning_works_as_it_is_written_on_two_machines(tmp_path: Path) -> None:
    page = re.search(r"## Two machines, step by step\n(.*?)\n## ", PAGE.read_text(), re.S)
    assert page is not None
    steps = re.findall(r"^    (first|second)\$ (.+)$", page[1], re.M)
    assert len(steps) == 12, "none is passed over"
    with machines(tmp_path) as made:
        first, second = made["first"], made["second"]
        provide(first, second)
        for name, command in steps:
            if "agora://..." in command:
                command = command.replace("agora://...", first.await_text(r"invite (agora://\S+)"))
            if command.startswith("swarm status"):
                first.await_text(r"(the run's result is in )")
            shown = made[name].run(command.replace("0.0.0.0:31330", "127.0.0.1:0"))
            if command.startswith("swarm status"):
                assert "health  COMPLETED" in shown
                status = json.loads(first.run("swarm status tune.toml --json"))
                there = second.run("swarm status tune --json --dir two")
        for daemon in (*first.daemons, *second.daemons):
            assert daemon.wait(WAIT_S) == 0
        assert "stages 0" in second.log() and "samples" in second.log()
        result = Path(status["result"]["folder"])
        assert result.is_relative_to(first.root / "one") and json.loads(there)["result"]["state"] == "none"
        for folder in (result, first.root / "adapter", second.root / "mine"):
            assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
            assert load_file(folder / "adapter_model.safetensors")
        assert "lora" not in " ".join(load_file(first.root / "model" / "model-00001-of-00001.safetensors"))
        assert b"zq1" in first.texts() and b"zq1" not in second.texts(), "a founder's path is on another machine"
        assert b"zq2" in second.texts() and b"zq2" not in first.texts(), "a joiner's path is on the founder's machine"
        for file in (first.root / "tune.toml", *result.iterdir(), *(first.root / "adapter").iterdir()):
            assert b"zq1" not in file.read_bytes(), f"{file.name} may be given away"
