"""What the owner of a machine can say to a real daemon, and what it then does to the machine and its line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from agora.net.shaping.bandwidth_limiter import CarriedBytes, SocketCounter
from tests.process.harness import LEAVE_S, Daemon, nothing_lost, p2pd_of, swarm, tiny

NOTHING = CarriedBytes()
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def is_silent(daemon: Daemon) -> bool:
    """Whether no process of the daemon has a network socket, the daemon's own included."""
    own = psutil.Process(daemon.process.pid)
    return not own.children(recursive=True) and not own.net_connections(kind="inet")


def sees(daemon: Daemon, other: Daemon) -> str:
    """In which state the daemon's view has the other one, "" for none."""
    return next((str(p["state"]) for p in daemon.ask("status")["peers"] if p["peer"] == other.peer), "")


def test_a_pause_leaves_no_traffic_survives_a_restart_and_ends_with_resume(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        origin, stays, guest = made.start("origin", "0"), made.start("stays", "1"), made.start("guest", "1")
        made.serving()
        made.until(lambda: guest.events("MicrobatchCounted"), "the guest to work")
        guest.ask("pause")
        made.until(lambda: is_silent(guest), "everything but the control socket to be closed")
        at_rest = guest.ask("report")
        assert at_rest["paused"] and at_rest["bytes"]["sent"] > 0
        made.until(lambda: sees(origin, guest) != "training", "its claim to be withdrawn")
        before = made.completed(origin)
        made.until(lambda: made.completed(origin) > before + 10, "the others to go on")
        assert guest.ask("status")["health"]["state"] == "PAUSED"
        assert "agora-node resume" in guest.ask("status")["health"]["do"]
        assert guest.ask("report")["bytes"] == at_rest["bytes"] and is_silent(guest)

        guest.kill(signal.SIGTERM)
        assert guest.process.wait(LEAVE_S) == 0
        guest = made.start("guest", "1")
        made.until(lambda: guest.try_ask("status"), "it to answer after its restart")
        assert guest.ask("status")["health"]["state"] == "PAUSED" and is_silent(guest)
        assert not guest.events("PeerStarted", pid=guest.process.pid)

        guest.ask("resume")
        made.until(lambda: guest.events("PeerStarted", pid=guest.process.pid), "it to serve again")
        counted = len(guest.events("MicrobatchCounted"))
        made.until(lambda: len(guest.events("MicrobatchCounted")) > counted, "the guest to work again")
        assert p2pd_of(guest).is_running()
        made.until(lambda: sees(stays, guest) == "training", "the others to see it again")
        nothing_lost(made, origin)


def test_a_daemon_that_works_when_idle_makes_way_for_the_machines_user_and_comes_back(tmp_path: Path) -> None:
    """Two uses: each pauses it once, with the reason for its owner and no name for the others, and it resumes twice."""
    in_use = tmp_path / "in-use"
    idle = {"AGORA_IDLE_OBSERVERS": "command", "AGORA_IDLE_MINUTES": "0.05"}
    idle["AGORA_IN_USE_COMMAND"] = f"cat {in_use} 2>&-"
    with swarm(tmp_path, tiny(2)) as made:
        origin, _ = made.start("origin", "0"), made.start("stays", "1")
        guest = made.start("guest", "1", flags=["--when-idle"], settings=idle)
        made.serving()
        for times in (1, 2):
            counted = len(guest.events("MicrobatchCounted"))
            made.until(lambda n=counted: len(guest.events("MicrobatchCounted")) > n, "the guest to work")
            in_use.write_text("alice plays chess\n")
            made.until(lambda: is_silent(guest), "everything but the control socket to be closed")
            status = guest.ask("status")
            assert status["health"]["state"] == "PAUSED" and "(alice plays chess)" in status["health"]["why"]
            assert status["machine"]["when_idle"]["in_use"] == "alice plays chess"
            assert status["machine"]["when_idle"]["observers"] == {"command": "watched"}
            made.until(lambda: sees(origin, guest) != "training", "its claim to be withdrawn")
            assert "alice" not in str(origin.ask("status"))
            in_use.unlink()
            made.until(lambda n=times: len(guest.events("PeerStarted")) > n, "it to serve again")
            paused = guest.events("StateChanged", state="paused")
            assert len(paused) == times and all("alice plays chess" in event["reason"] for event in paused)
        made.until(lambda: sees(origin, guest) == "training", "the others to see it again")
        nothing_lost(made, origin)


@pytest.mark.slow
def test_an_upload_limit_holds_within_a_tenth_while_state_is_served(tmp_path: Path) -> None:
    """All that the kernel saw of the source's p2pd: state, gossip, averaging and the directory together."""
    model = {"width": 192, "heads": 4, "key_value_heads": 4, "feed_forward": 768, "subspace": 192, "context": 64}
    with swarm(tmp_path, tiny(1, model=model)) as made:
        source = made.start("source", "0", flags=["--upload-limit", "1MB/s"])
        made.until(lambda: source.events("StepTaken"), "a first step")
        counter = SocketCounter(p2pd_of(source).pid)
        joiner = made.start("joiner", "0")
        made.until(lambda: (counter.read() or NOTHING).sent > 2_000_000, "the state to flow")
        began, first = time.monotonic(), counter.read()
        made.until(lambda: joiner.events("StateFetched") or time.monotonic() - began > 10, "the state", 60)
        seconds, latest = time.monotonic() - began, counter.read()
        assert first is not None and latest is not None
        rate = (latest.sent - first.sent) / seconds
        print(f"{rate:.0f} bytes/s over {seconds:.1f} s; state {joiner.events('StateFetched')}")
        assert seconds > 5 and 0.9e6 < rate < 1.1e6, (rate, seconds)


@pytest.mark.slow
def test_near_its_memory_limit_a_daemon_gives_up_slots_and_goes_on(tmp_path: Path) -> None:
    """Graphs of 16 microbatches take 100 MiB more than the limit leaves; it holds within a tenth, nobody is killed."""
    model = {"width": 256, "heads": 4, "key_value_heads": 4, "feed_forward": 1024, "subspace": 256, "context": 256}
    schedule = {"microbatch": 8, "max_in_flight": 16, "activations": "keep"}
    many = tiny(1, model=model | {"layers": 4}, schedule=schedule, optimizer={"target_tokens": 65_536})
    with swarm(tmp_path, many) as made:
        daemon = made.start("daemon", "0", flags=["--memory", "0.65"])
        made.serving()
        process, peaks = psutil.Process(daemon.process.pid), [0]

        def is_short_and_works() -> bool:
            """Notes the resident memory, whether slots were given up and microbatches came home."""
            family = [process, *process.children()]
            peaks.append(sum(each.memory_info().rss for each in family))
            return bool(daemon.events("SlotsChanged")) and made.completed(daemon) >= 3

        made.until(is_short_and_works, "slots to be given up, and work to go on")
        print(f"{max(peaks) / 2**20:.0f} MiB of {0.65 * 1024:.0f} MiB at most")
        assert max(peaks) < 1.1 * 0.65 * 2**30


def test_a_pause_during_the_start_takes_hold_and_resume_serves(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(1)) as made:
        first = made.start("first", "0")
        joiner = made.start("joiner", "0")
        made.until(lambda: joiner.try_ask("report"), "its control socket")
        joiner.ask("pause")
        made.until(lambda: is_silent(joiner) and joiner.ask("report")["paused"], "it to rest")
        assert joiner.ask("status")["health"]["state"] == "PAUSED"
        joiner.ask("resume")
        made.serving(joiner.name, first.name)


def test_what_a_daemon_writes_is_for_its_user_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    """In a data directory that others may look into."""
    with swarm(tmp_path, tiny(1, checkpoint={"every": 1})) as made:
        before = os.umask(0)
        try:
            (tmp_path / "alone").mkdir(mode=0o755)
            daemon = made.start("alone", "0", settings={"AGORA_METRICS": "127.0.0.1:0"})
        finally:
            os.umask(before)
        made.until(lambda: daemon.events("CheckpointWritten"), "a checkpoint")
        own = {tmp_path / "alone" / name for name in ("log.txt", "faults.log")}  # of this test, not of the daemon
        open_to_others = [
            path.relative_to(daemon.root)
            for path in daemon.root.rglob("*")
            if path not in own and not path.is_symlink() and path.stat().st_mode & 0o077
        ]
        assert not open_to_others
        assert (daemon.root / "identity.key").stat().st_mode & 0o777 == 0o600
