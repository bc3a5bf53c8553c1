"""The demo as a user runs it: a command line, a JSON object, an exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import preset

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

DEMO = [sys.executable, "-m", "agora.cli.main_swarm", "demo", "--peers", "2", "--stages", "2"]


def daemons_of(directory: Path) -> list[int]:
    """Processes whose command line names the directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory) in part for part in process.info["cmdline"] or []) and "join" in process.info["cmdline"]:
            found.append(process.pid)
    return found


def test_a_small_demo_trains_and_prints_the_contracts_object(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    command = [*DEMO, "--steps", "3", "--seed", "1", "--dir", str(directory), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    value = json.loads(done.stdout)
    assert (value["schema"], value["peers"], value["stages"], value["steps"]) == (1, 2, 2, 3)
    assert len(value["run_id"]) == 64 and value["steps_taken"] == min(value["optimizer_steps"])
    assert value["optimizer_steps"][0] >= 3 and 3 * 16384 <= value["tokens_counted"] <= value["tokens"]
    assert value["tokens"] >= 3 * 16384
    assert value["tokens_per_second"] == pytest.approx(value["tokens"] / value["seconds"], rel=0.01)
    loss = value["loss"]
    assert 4.5 < loss["first"] < 7 and loss["eval"] < loss["first"]
    microbatches = value["microbatches"]
    assert microbatches["completed"] == value["tokens"] // 1024
    assert (microbatches["dropped"], microbatches["counted_twice"], microbatches["abandoned_by_killed_origin"]) == (
        0,
        0,
        0,
    )
    assert (value["peers_killed"], value["peers_joined"]) == (0, 2)
    assert set(value["averaging"]) == {"rounds", "participation", "failed_parts"}
    # Every microbatch crosses once forward and once back; evaluations cross once.
    codec, shape = parse_codec(preset("tiny").boundary.codec), preset("tiny").boundary_shape()
    both_ways = codec.bytes_of(shape, "forward") + codec.bytes_of(shape, "backward")
    assert value["bytes"]["boundary"] >= both_ways * microbatches["completed"]
    assert 0 < value["first_microbatch_seconds"] < value["total_seconds"]
    origin = next(peer for peer, span in value["spans"].items() if span == [0, 0])  # the founder takes either stage
    assert {step["name"] for step in value["start_steps"][origin]} == {
        *("identity", "imports", "manifest", "host", "bootstrap", "doctor", "clock"),
        *("directory", "placement", "corpus", "model", "confirm", "state", "serve"),
    }
    assert sorted(value["spans"].values()) == [[0, 0], [1, 1]]
    assert not daemons_of(directory)
    assert (directory / "run.toml").exists() and (directory / "peer-1" / "events.jsonl").exists()
    assert 1 <= len(value["sample"]) <= 3 and all(line.isprintable() for line in value["sample"])
    printed = done.stderr.splitlines()
    assert [line.removeprefix("              | ") for line in printed if line.startswith("     ")] == value["sample"]
    (export,) = [line.removeprefix("export ") for line in printed if line.startswith("export ")]
    exported = subprocess.run(shlex.split(export), cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert exported.returncode == 0 and (tmp_path / "model" / "config.json").exists(), exported.stderr


def test_ctrl_c_stops_the_demo_and_every_daemon(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    process = subprocess.Popen([*DEMO, "--steps", "100000", "--dir", str(directory)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 180
        while not (directory / "peer-0" / "events.jsonl").exists():  # that daemon is surely one that the demo knows of
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(180) == 1
        assert process.stderr is not None and "stopped" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert not daemons_of(directory)


def test_a_daemon_that_ends_by_itself_ends_the_demo_with_its_words(tmp_path: Path) -> None:
    damaged = tmp_path / "poems.txt"
    damaged.write_bytes(b"\xff\xfe\xff" * 100)
    command = [*DEMO, "--steps", "3", "--data", str(damaged), "--dir", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search("peer-[01] ended by itself with exit code 1", done.stderr), "whichever was first"
    assert str(damaged) in done.stderr
    assert not daemons_of(tmp_path / "demo")
