"""Claims about a local swarm, on processes that are shell commands instead of daemons."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from agora.cli.local_swarm import Launch, LocalSwarm, SwarmFailed
from agora.observe import events
from agora.observe.journal import Journal

Make = Callable[[str], LocalSwarm]


def running(script: str, started: list[tuple[list[str], Mapping[str, str]]]) -> Launch:
    """Starts a Python script in place of a daemon, and keeps the arguments and environment that a daemon would get."""

    def launch(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        started.append((list(arguments), environment))
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", script], stdout=output, stderr=output, start_new_session=True
            )

    return launch


@pytest.fixture
def started() -> list[tuple[list[str], Mapping[str, str]]]:
    return []


@pytest.fixture
def make(tmp_path: Path, started: list[tuple[list[str], Mapping[str, str]]]) -> Make:
    def make(script: str) -> LocalSwarm:
        swarm = LocalSwarm(tmp_path, "name = 'test'\n", threads=2, flags=["--flag"], launch=running(script, started))
        swarm.invite = "agora://invite"
        return swarm

    return make


def test_a_daemon_gets_the_invite_its_own_directory_and_the_flags_of_all_and_its_own(
    make: Make, started: list[tuple[list[str], Mapping[str, str]]], tmp_path: Path
) -> None:
    swarm = make("pass")
    swarm.start("first", flags=["--own"], environment={"MORE": "1"})
    arguments, environment = started[0]
    assert arguments[:4] == ["join", "agora://invite", "--dir", str(tmp_path / "first")]
    assert {"--flag", "--own", str(tmp_path / "corpus"), "/ip4/127.0.0.1/tcp/0"} <= set(arguments)
    assert (environment["OMP_NUM_THREADS"], environment["MORE"]) == ("2", "1")
    swarm.start("second", run="run.toml")
    assert started[1][0][1] == "run.toml" and "MORE" not in started[1][1]
    assert (tmp_path / "run.toml").read_text() == "name = 'test'\n"
    swarm.kill_all()


def test_a_daemon_that_ends_by_itself_fails_the_swarm_with_its_words(make: Make) -> None:
    swarm = make("print('1\\nerror: no disk\\n2'); raise SystemExit(3)")
    swarm.start("first")
    with pytest.raises(SwarmFailed, match="first ended by itself with exit code 3: no disk"):
        swarm.until(lambda: None, "the end of the world", 20.0)


def test_what_does_not_happen_in_time_fails_with_what_was_waited_for_and_the_last_lines(make: Make) -> None:
    swarm = make("import time; print('so far so good', flush=True); time.sleep(60)")
    daemon = swarm.start("first")
    swarm.until(lambda: daemon.log(), "its first line", 20.0)
    with pytest.raises(SwarmFailed, match=r"Waited 0 s for rain; the last lines are: first: so far so good"):
        swarm.until(lambda: None, "rain", 0.1)
    swarm.kill_all()
    assert not daemon.is_alive


def test_a_daemon_that_was_killed_on_purpose_fails_nothing(make: Make) -> None:
    swarm = make("import time; time.sleep(60)")
    first, second = swarm.start("first"), swarm.start("second")
    first.kill()
    second.kill_group()
    swarm.check_alive()
    assert (first.process.poll(), second.process.poll()) == (-9, -9)


def test_stopping_asks_first_and_kills_what_does_not_listen(make: Make) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    swarm = make(deaf)
    daemon = swarm.start("deaf")
    swarm.until(lambda: "up" in daemon.log(), "it to be up", 20.0)
    assert swarm.stop(within_s=0.5) == {"deaf": None}
    assert daemon.process.poll() == -9


def test_events_are_read_once_by_whoever_counts_and_kept_for_whoever_searches(make: Make, tmp_path: Path) -> None:
    swarm = make("pass")
    daemon = swarm.start("first")
    journal = Journal(daemon.root)
    journal.take(events.StateChanged("serving", ""), 1.0)
    assert (
        daemon.events("StateChanged", state="serving")
        and not daemon.events("StateChanged", state="left")
        and daemon.new_events() == []
    )
    journal.take(events.Traffic(1, 2, 3), 2.0)
    assert [event["event"] for event in daemon.new_events()] == ["Traffic"] and not daemon.events("Traffic")
    assert daemon.try_ask("status") is None, "nobody answers on its socket"
    swarm.kill_all()


def test_a_daemon_answers_peers_once_this_start_of_it_is_in_the_directory(make: Make) -> None:
    swarm = make("pass")
    daemon = swarm.start("first")
    journal = Journal(daemon.root)
    for name in ("identity", "host", "directory", "serve", "identity", "host"):
        journal.take(events.StartStep(name, 0.1, ""), 1.0)
    assert not daemon.answers_peers(), "an earlier start of it was in the directory"
    journal.take(events.StartStep("directory", 0.1, ""), 2.0)
    assert daemon.answers_peers()
    swarm.kill_all()


def test_a_daemon_serves_once_its_own_process_has_said_so(make: Make) -> None:
    swarm = make("import time; time.sleep(60)")
    daemon = swarm.start("first")
    journal = Journal(daemon.root)
    journal.take(events.PeerStarted("P", "R", 0, 0, 1, daemon.process.pid + 1, ()), 1.0)
    assert not daemon.is_serving and daemon.peer == "P", "that was an earlier process of the same peer"
    journal.take(events.PeerStarted("P", "R", 0, 0, 2, daemon.process.pid, ()), 2.0)
    assert daemon.is_serving
    swarm.kill_all()
