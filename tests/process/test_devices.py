"""Claims about the daemons of all devices of a machine: one command starts, pauses, ends them; dead ones return."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agora.node import daemon_registry
from tests.process.harness import LEAVE_S, WAIT_S, Daemon, Swarm, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def tell(command: str, directory: Path) -> dict[str, object]:
    """Runs an `agora-node` command as the machine's owner does."""
    arguments = [sys.executable, "-m", "agora.cli.main_node", command, "--dir", str(directory), "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def entries(directory: Path) -> dict[str, daemon_registry.DaemonEntry]:
    """Returns the running daemons of a machine by the name of their data directory."""
    found = [entry for entry in daemon_registry.find_running_daemons() if Path(entry.root).is_relative_to(directory)]
    return {Path(entry.root).name: entry for entry in found}


def second_of(made: Swarm, machine: Daemon) -> Daemon:
    """Returns the second device's daemon, to read its journal and to ask it; its process is the supervisor's child."""
    return Daemon("second", machine.root / "devices" / "cpu.1", machine.process)


def states(machine: Daemon) -> list[str]:
    """Returns the states of the peers that the first device's daemon sees, its own included."""
    answer = machine.try_ask("status")
    return sorted(peer["state"] for peer in answer["peers"]) if answer else []


def test_one_command_runs_pauses_and_ends_a_daemon_for_each_device_and_restarts_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.setblocking(False)
    notices.bind(str(tmp_path / "notify"))
    heard: set[str] = set()

    def systemd_heard(text: str) -> bool:
        while True:
            try:
                heard.update(notices.recv(4096).decode().splitlines())
            except BlockingIOError:
                return any(text in line for line in heard)

    with swarm(tmp_path, tiny(2)) as made:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        machine = made.start("machine", flags=["--device", "cpu,cpu"])
        monkeypatch.delenv("NOTIFY_SOCKET")
        second = second_of(made, machine)
        made.until(lambda: states(machine) == ["training", "training"], "both devices to train")
        held = [peer["span"] for peer in machine.ask("status")["peers"]]
        assert sorted(held) == [[0, 0], [1, 1]]
        made.until(lambda: systemd_heard("READY=1"), "systemd to be told that both are ready")
        assert systemd_heard("WATCHDOG=1") and systemd_heard("cpu: ")

        before = entries(machine.root)["cpu.1"]
        os.kill(before.pid, signal.SIGKILL)
        made.until(lambda: entries(machine.root).get("cpu.1", before).pid != before.pid, "the killed one to return")
        assert entries(machine.root)["cpu.1"].peer == before.peer
        counted = made.completed(machine)
        made.until(lambda: made.completed(machine) > counted + 10, "the pipeline to go on")

        tell("pause", machine.root)
        made.until(lambda: all(d.ask("report")["paused"] for d in (machine, second)), "both to be paused")
        tell("resume", machine.root)
        made.until(lambda: states(machine) == ["training", "training"], "both to train again")

        processes = [psutil.Process(entry.pid) for entry in entries(machine.root).values()]
        assert len(processes) == 2
        machine.end_is_intended = True
        tell("leave", machine.root)
        assert machine.process.wait(LEAVE_S) == 0
        assert not any(daemon_registry.is_alive(process.pid) for process in processes)
    notices.close()


def test_a_hanging_daemon_is_started_again_and_a_killed_supervisor_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm(tmp_path, tiny(1)) as made:
        monkeypatch.setenv("WATCHDOG_USEC", "8000000")
        machine = made.start("machine", flags=["--device", "cpu,cpu"])
        monkeypatch.delenv("WATCHDOG_USEC")
        made.until(lambda: states(machine) == ["training", "training"], "both devices to train")
        before = entries(machine.root)["cpu.1"]
        os.kill(before.pid, signal.SIGSTOP)
        made.until(lambda: entries(machine.root).get("cpu.1", before).pid != before.pid, "the hanging one to return")
        told = (machine.root / "devices" / "events.jsonl").read_text()
        assert "no sign of progress for 8 s" in told

        left = [psutil.Process(entry.pid) for entry in entries(machine.root).values()]
        machine.kill(signal.SIGKILL)
        made.until(lambda: not any(daemon_registry.is_alive(process.pid) for process in left), "its daemons to leave")


def test_a_run_that_admits_nobody_ends_the_command_as_a_single_daemon_would(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("nonsense = 1\n")
    command = [sys.executable, "-m", "agora.cli.main_node", "join", str(tmp_path / "run.toml")]
    done = [
        subprocess.run([*command, "--device", device, "--dir", str(tmp_path / "home")], capture_output=True, text=True)
        for device in ("cpu", "cpu,cpu")
    ]
    assert done[0].returncode == done[1].returncode == 1
    assert done[0].stderr.splitlines()[-1] == done[1].stderr.splitlines()[-1]
