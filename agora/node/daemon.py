"""Runs a daemon as a process: data directory, lock, log, signals, event loop, exit code.

Knows: the process. Must not know: what the daemon does inside its loop (lifecycle.py), which is imported here, late and
timed, because it brings torch and hivemind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from agora_protocol.errors import DiskError, LocalError
from agora_protocol.identity import Identity

from agora.node import paths, runs, settings
from agora.node.lock import DirectoryLock
from agora.node.startup import StartSteps, Startup
from agora.node.systemd import Notifier
from agora.observe import faults, log
from agora.observe.journal import Journal
from agora.observe.reporter import Reporter

if TYPE_CHECKING:
    from agora.node.lifecycle import Ending


def run(text: str, home: paths.Home, flags: Mapping[str, Any]) -> int:
    """Runs the daemon of the run `text` until it leaves; returns its exit code.

    text: a manifest file, an invite, or the name of a run. flags: the settings given on the command line. Raises an
    AgoraError that says what to do when the daemon cannot begin, or ends by an error.
    """
    incarnation = time.time_ns()
    chosen = settings.load(home.settings, flags)
    reference = runs.resolve(text, home)
    _make_directory(home)
    lock = DirectoryLock(home.lock)
    reporter = Reporter([_open_journal(home), log.choose_log(chosen.log_level)])
    try:
        _activate_faults()
        notifier = Notifier()
        steps = StartSteps(reporter.report, notifier)
        with steps.step("identity") as note:
            identity = Identity.load_or_create(home.identity)
            note.text = identity.peer
        with steps.step("imports"):
            import agora.node.lifecycle  # noqa: F401
        startup = Startup(reference, home, chosen, identity, incarnation, reporter.report, steps)
        ending = _run_in_loop(_run_node(startup, reporter, notifier))
    finally:
        lock.release()
    if ending.code:
        raise LocalError(ending.reason)
    return ending.code


def _make_directory(home: paths.Home) -> None:
    """Makes the data directory if there is none. Raises DiskError."""
    try:
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"Cannot make {home.root} ({error.strerror}); choose another directory with --dir.") from error


def _open_journal(home: paths.Home) -> Journal:
    """Opens the journal in the data directory. Raises DiskError."""
    try:
        return Journal(home.root)
    except OSError as error:
        raise DiskError(
            f"Cannot write the journal in {home.root} ({error.strerror}); free some space, or choose another --dir."
        ) from error


def _activate_faults() -> None:
    """Activates the faults that AGORA_FAULTS asks for. Raises LocalError for a malformed value."""
    try:
        faults.activate(faults.from_environment())
    except faults.FaultSpecError as error:
        raise LocalError(f"{error}; correct it, or unset AGORA_FAULTS.") from None


async def _run_node(startup: Startup, reporter: Reporter, notifier: Notifier) -> Ending:
    """Runs the node in the event loop, with the signals that make it leave."""
    from agora.node.lifecycle import Node

    node = Node(startup, reporter, notifier)
    with _leave_at_signals(node.stop, lambda: paths.unregister(paths.socket_of(startup.home))):
        return await node.run()


@contextlib.contextmanager
def _leave_at_signals(stop: asyncio.Event, clean: Callable[[], None]) -> Any:
    """Sets `stop` at SIGTERM, SIGINT or SIGHUP; at a second signal, calls `clean` and ends the process at once."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        """Asks the daemon to leave, or ends the process at the second signal."""
        if stop.is_set():
            clean()
            os._exit(1)
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _run_in_loop(coroutine: Coroutine[Any, Any, Ending]) -> Ending:
    """Runs the coroutine on uvloop, or on asyncio's loop where uvloop is not installed."""
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)
