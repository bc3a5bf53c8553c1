"""Which signals end a daemon, and that log and journal name the cause of every end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from agora_protocol.errors import LocalError

from agora.node.process.main import SIGNALS, EndedBySignal, end_on_signals, handled_signals, reporting_the_end
from agora.observe import journal
from agora.observe.events import Event, StateChanged

ALL = list(SIGNALS)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Whatever a test does to the handlers of this process, they are as before afterwards."""
    former = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", [[signal.SIGHUP], [signal.SIGINT], [signal.SIGTERM, signal.SIGHUP], []])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored: list[signal.Signals], handlers: None) -> None:
    """`nohup` ignores SIGHUP; a shell without job control ignores SIGINT for what it starts with `&`."""
    for number in ALL:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    end_on_signals()
    assert handled_signals() == [number for number in ALL if number not in ignored]
    for number in ignored:
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", ALL)
def test_a_signal_before_the_start_is_over_is_named_and_ends_with_the_shells_exit_code(
    number: signal.Signals, handlers: None
) -> None:
    for each in ALL:
        signal.signal(each, signal.SIG_DFL)
    told: list[Event] = []
    with pytest.raises(EndedBySignal) as ended:
        with reporting_the_end(told.append):
            end_on_signals()
            os.kill(os.getpid(), number)
            signal.pause()
    assert ended.value.code == 128 + number
    (left,) = told
    assert isinstance(left, StateChanged) and left.state == "left"
    assert number.name in left.reason and "before it had started" in left.reason


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (LocalError("the port is taken; choose another"), "the daemon has ended: the port is taken; choose another"),
        (ValueError("seven"), "the daemon has ended: ValueError: seven"),
        (KeyboardInterrupt(), "the daemon has ended: KeyboardInterrupt"),
        (MemoryError(), "the daemon has ended: MemoryError"),
    ],
)
def test_an_error_that_ends_a_daemon_is_named(error: BaseException, named: str) -> None:
    told: list[Event] = []
    with suppress(type(error)), reporting_the_end(told.append):
        raise error
    (left,) = told
    assert isinstance(left, StateChanged) and left.reason.startswith(named)


def test_a_start_that_fails_has_its_cause_in_the_journal(tmp_path: Path) -> None:
    """Here the key cannot be read: the daemon ends before there is an event loop."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "identity.key").write_text("not a key")
    (tmp_path / "run.toml").write_text('name = "short"\n')
    command = ["-m", "agora.cli.main_node", "join", str(tmp_path / "run.toml"), "--dir", str(tmp_path / "data")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    lines = (tmp_path / "data" / journal.FILE_NAME).read_text().splitlines()
    ends = [event for event in map(json.loads, lines) if event["event"] == "StateChanged"]
    assert ends and ends[-1]["state"] == "left"
    assert ends[-1]["reason"].removeprefix("the daemon has ended: ")[:20] in done.stderr
