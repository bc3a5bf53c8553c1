"""One daemon in real processes: what systemd hears, how it leaves, what ends it, what a wrong machine says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agora.node import daemon_registry, paths
from agora.node.control.control_client import DaemonRefused
from tests.process.forked import Forked
from tests.process.harness import LEAVE_S, WAIT_S, Daemon, Swarm, fired, p2pd_of, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


class Manager:
    """The service manager's end of sd_notify: reads all the time, since a full queue makes datagrams get lost."""

    def __init__(self, path: Path) -> None:
        self.lines: list[str] = []
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while data := self._channel.recv(65536):
            self.lines += data.decode().splitlines()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self._channel.getsockname())
        self._thread.join(5)
        self._channel.close()


def test_a_daemon_that_stands_by_notices_that_p2pd_has_died(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(1)) as made:
        both = made.start("first", "0"), made.start("second", "0")

        def say_how_fast_they_are() -> bool:
            asked = [daemon.try_ask("status") for daemon in both]
            return all(one is not None and sum(p["capacity"] > 0 for p in one["peers"]) == 2 for one in asked)

        made.until(say_how_fast_they_are, "both to claim what they have measured: slow is who is slower than others")
        idle = made.start("idle", slowdown=1_000_000.0)

        def stands_by() -> bool:
            asked = idle.try_ask("status")
            return asked is not None and "standing by" in asked["health"]["why"]

        made.until(stands_by, "the slow one to stand by")
        killed = p2pd_of(idle)
        killed.kill()
        assert idle.process.wait(WAIT_S) == 1
        idle.end_is_intended = True
        assert [event["task"] for event in idle.events("TaskFailed")] == ["p2pd"]
        assert "p2pd ended by itself" in idle.log().splitlines()[-1]
        assert not killed.is_running()
        assert made.stop() == {"first": 0, "second": 0, "idle": 1}


def test_a_daemons_life_from_ready_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY comes after the first hop served and not before; SIGTERM leaves in order; a dead p2pd is a clean end."""
    manager = Manager(tmp_path / "notify")
    lines = manager.lines
    with contextlib.closing(manager), swarm(tmp_path, tiny(2)) as made:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        first = made.start("first", "0")
        monkeypatch.delenv("NOTIFY_SOCKET")
        made.serving()
        stated = "waiting for a peer of stage 1"
        made.until(lambda: any(line.startswith("STATUS=") and stated in line for line in lines), stated)
        made.until(lambda: "WATCHDOG=1" in lines, "the watchdog to be fed")
        made.until(lambda: first.ask("status")["health"]["state"] == "STALLED", "the health to say so")
        assert "READY=1" not in lines

        second = made.start("second", "1")
        made.until(lambda: "READY=1" in lines, "READY after the first hop")
        assert first.events("FirstHopServed") and first.events("MicrobatchCounted")
        a_second_daemon_on_the_directory_is_refused(made, first)

        p2pd_of(second).kill()
        assert second.process.wait(WAIT_S) == 1
        assert "p2pd ended by itself" in second.log().splitlines()[-1]
        second.end_is_intended = True
        assert not daemon_registry.socket_of(paths.Home(second.root)).exists()

        leaves_in_order(first)
        made.until(lambda: "STOPPING=1" in lines, "the manager to hear of the end")
        assert first.events("StateChanged", state="left")


def a_second_daemon_on_the_directory_is_refused(made: Swarm, daemon: Daemon) -> None:
    command = [sys.executable, "-m", "agora.cli.main_node", "join", str(made.file), "--dir", str(daemon.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert f"in use by the daemon with pid {daemon.process.pid}" in done.stderr


def leaves_in_order(daemon: Daemon) -> None:
    """With microbatches in flight that nobody downstream will ever answer: it gives them up, and is soon gone."""
    daemon.kill(signal.SIGTERM)
    assert daemon.process.wait(LEAVE_S) == 0
    home = {event["microbatch"] for event in daemon.events("MicrobatchCompleted")}
    given_up = {event["microbatch"] for event in daemon.events("MicrobatchDropped")}
    assert {event["microbatch"] for event in daemon.events("MicrobatchStarted")} == home | given_up
    assert not daemon_registry.socket_of(paths.Home(daemon.root)).exists()


def test_a_second_signal_leaves_at_once_and_pauses_are_kept(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        daemon = made.start("whole", "0-1", flags=["--link", "9Mbit,1ms"], faults="daemon.leaving:hang:1")
        made.until(lambda: made.completed(daemon) > 3, "it to train alone, holding both stages")
        assert daemon.ask("evaluate", batches=2)["loss"] > 0
        assert daemon.ask("link", rate="2Mbit") == {"link": "2Mbit,1ms"}
        with pytest.raises(DaemonRefused, match="not a valid rate like 20Mbit"):
            daemon.ask("link", rate="fast")
        assert daemon.ask("drain", WAIT_S) == {"in_flight": 0}
        drained_at = made.completed(daemon)
        daemon.ask("refill")
        made.until(lambda: made.completed(daemon) > drained_at, "a drained origin to go on")
        daemon.ask("pause")
        made.until(lambda: daemon.ask("report")["in_progress"] == 0, "open work to be finished")
        assert daemon.ask("status")["health"]["state"] == "PAUSED"
        before = made.completed(daemon)
        daemon.ask("resume")
        made.until(lambda: made.completed(daemon) > before, "it to go on after the pause")
        report = daemon.ask("report")
        assert report["microbatches"]["dropped"] == 0 and report["bytes"]["boundary"] == 0
        assert sum(report["staleness"]["0"]) > 0 and 0 < report["busy_fraction"] <= 1
        daemon.end_is_intended = True
        daemon.process.send_signal(signal.SIGTERM)
        made.until(lambda: fired(daemon), "it to hang while it leaves")
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(LEAVE_S) == 1, "an ordered end would be 0"
        assert not daemon.events("StateChanged", state="left")


def test_a_daemon_that_hangs_while_it_leaves_ends_by_itself_and_leave_waits_for_that(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        hangs = made.start("hangs", "0-1", faults="daemon.leaving:hang:1")
        made.until(lambda: made.completed(hangs) > 3, "it to train")
        hangs.end_is_intended = True
        command = [sys.executable, "-m", "agora.cli.main_node", "leave", "--dir", str(hangs.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.stderr.splitlines()[-1:] == ["it has left."], done.stderr
        assert hangs.process.wait(WAIT_S) == 1
        assert [entry[1:3] for entry in fired(hangs)] == [["daemon.leaving", "hang"]]
        assert "not everything could be ended in time" in hangs.log()


def test_a_device_job_that_hangs_holds_up_nobodys_goodbye(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        hangs = made.start("hangs", "0-1", faults="device.job:hang:20")
        made.until(lambda: fired(hangs), "a job to hang")
        hangs.end_is_intended = True
        network = p2pd_of(hangs)
        command = [sys.executable, "-m", "agora.cli.main_node", "leave", "--dir", str(hangs.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.stderr.splitlines()[-1:] == ["it has left."], done.stderr
        hangs.process.wait(WAIT_S)
        assert not network.is_running()
        assert [entry[1:3] for entry in fired(hangs)] == [["device.job", "hang"]]
        late = [event["error"] for event in hangs.events("TaskFailed", task="close")]
        assert not [why for why in late if "local peer" in why], late


def refused(made: Swarm, name: str, *flags: str, run: str = "", file_bytes: int | None = None) -> str:
    """The last line of a join that is expected to fail."""
    arguments = ["join", run or str(made.file), "--dir", str(made.directory / name)]
    arguments += ["--listen", "/ip4/127.0.0.1/tcp/0", "--stages", "0", *flags]
    log = made.directory / f"{name}.txt"
    process = Forked(arguments, os.environ, log, file_bytes=file_bytes)
    try:
        code = process.wait(WAIT_S)
    finally:
        process.send_signal(signal.SIGKILL)
    said = log.read_text()
    assert code == 1 and "Traceback" not in said, said
    return said.strip().splitlines()[-1]


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(made, "taken", "--listen", f"127.0.0.1:{port}")
        assert str(port) in said and "--listen" in said


def test_an_unreadable_corpus_is_one_sentence(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2, data={"corpus": [str(tmp_path / "poems.txt")]})) as made:
        said = refused(made, "corpus")
        assert "poems.txt" in said
        assert not list(paths.runtime_directory().glob(f"{paths.Home(tmp_path / 'corpus').socket_stem}*"))


def test_an_invite_may_not_make_this_machine_read_its_files(tmp_path: Path) -> None:
    (tmp_path / "poems.txt").write_text("so much depends upon a red wheel barrow\n" * 200)
    with swarm(tmp_path, tiny(2, data={"corpus": [str(tmp_path / "poems.txt")], "heldout": 0.1})) as made:
        founder = made.start("founder", "0")
        made.serving()
        said = refused(made, "guest", run=made.take_invite(founder))
        assert "poems.txt" in said and "--allow-files" in said
        made.start("trusting", "0-1", flags=["--allow-files"])
        made.serving("trusting")
        assert set(made.stop().values()) == {0}


def test_a_disk_that_fills_up_is_one_sentence(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        said = refused(made, "full", file_bytes=200_000)
        assert "corpus" in said and ("space" in said or "--dir" in said), said


@pytest.fixture(autouse=True)
def private_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Daemons of these tests are not found by others of this user."""
    directory = Path("/tmp") / f"agora-test-{os.getpid()}"
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(directory))
    yield
    if directory.exists():
        assert not list(directory.glob("*.sock"))
