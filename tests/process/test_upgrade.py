"""A run of four whose daemons are restarted one after another, as for a new version: it trains on and loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from agora.cli.local_swarm import LocalDaemon, start_interpreter
from tests.process.harness import ENOUGH, LEAVE_S, Swarm, drained, last_step, nothing_lost, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"first": "0", "second": "1", "third": "0", "fourth": "1"}
# What peers exchange, byte by byte: states of the program that have the same files here work together.
WIRE = [f"protocol/vectors/{name}.json" for name in ("frames", "records", "manifests", "tickets")]


def earlier_state(folder: Path) -> tuple[Path, str]:
    """The files of an earlier state of the program, and its name: the newest release, by its tag; while there is none,
    the state of 20 commits ago if it has the same wire; AGORA_EARLIER names another commit.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    if shutil.which("git") is None or git("rev-parse", "HEAD").returncode:
        pytest.skip("this folder is no clone with its history, from which an earlier state could be taken")
    released = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD").stdout.strip()
    name = os.environ.get("AGORA_EARLIER") or released or "HEAD~20"
    if name == "HEAD~20" and git("diff", "--quiet", name, "HEAD", "--", *WIRE).returncode:
        pytest.skip("nothing was released, and the state of 20 commits ago is not there or has another wire")
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(archive), name, "agora", "protocol"], check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder, name


def start_earlier(
    tree: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    # Safe path: the folder in which the tests run has the present state, and would come first.
    its_own = {"PYTHONPATH": f"{tree}:{tree / 'protocol'}", "PYTHONSAFEPATH": "1"}
    return start_interpreter(arguments, {**environment, **its_own}, log)


def trained(made: Swarm, origin: LocalDaemon) -> None:
    goal = made.completed(origin) + ENOUGH
    made.until(lambda: made.completed(origin) >= goal, f"{ENOUGH} more microbatches of {origin.name}")


@pytest.mark.parametrize("before", ["present", pytest.param("earlier", marks=pytest.mark.slow)])
def test_a_run_of_four_is_restarted_one_after_another_and_drops_no_microbatch(before: str, tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        present = made.launch
        if before == "earlier":
            tree, name = earlier_state(tmp_path / "earlier")
            made.launch = partial(start_earlier, tree)
            print(f"beside {name}")
        for name, stages in STAGES.items():
            made.start(name, stages)
        made.serving()
        origins = [name for name, stages in STAGES.items() if stages == "0"]
        for name in origins:
            trained(made, made.daemons[name])
        made.launch = present
        for name, stages in STAGES.items():
            daemon = made.daemons[name]
            peer, step = daemon.peer, last_step(daemon)
            daemon.end_is_intended = True
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(LEAVE_S) == 0, daemon.log()
            again = made.start(name, stages, run=str(made.file))  # as its service does
            made.serving(name)
            assert again.peer == peer and last_step(again) >= step > 0
            for origin in origins:  # old and new, beside each other
                trained(made, made.daemons[origin])
        running = [made.daemons[name] for name in origins]
        drained(made, *running)
        made.stop()
        nothing_lost(made, *made.daemons.values())
        for daemon in running:
            # Of both lives: the journal is one.
            started = {event["microbatch"] for event in daemon.events("MicrobatchStarted")}
            completed = {event["microbatch"] for event in daemon.events("MicrobatchCompleted")}
            assert len(started) > 4 * ENOUGH and started == completed
        offences = [event for daemon in made.daemons.values() for event in daemon.events("OffenceRecorded")]
        assert not offences, "no version blames another for what it does not know"
