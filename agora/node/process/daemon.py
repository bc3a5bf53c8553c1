"""Runs a daemon as a process: data directory, lock, log, signals, event loop, exit code."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from agora_protocol.errors import DiskError, LocalError
from agora_protocol.identity import Identity

from agora.core.clock import boot_time
from agora.node import paths, runs, settings
from agora.node.process.incarnations import next_incarnation
from agora.node.process.startup import StartSteps, Startup
from agora.node.process.watchdog import Notifier
from agora.node.span.base_model_folder import names_hub_model, with_fetched_base_model
from agora.observe import faults
from agora.observe.journal import Journal
from agora.observe.log import EventLog
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock


def run(text: str, home: paths.Home, flags: Mapping[str, Any]) -> None:
    """Runs the daemon of the run `text` in this process until it leaves; locks its data directory meanwhile.

    text: a manifest file, an invite, or the name or id of a run. flags: the settings given on the command line. Creates
    the key at the first start, and fetches a base model that is named by its Hub id. Raises an AgoraError that says
    what to do when the daemon cannot begin, or when an error ends it.
    """
    faults.set_active_faults(faults.from_environment())
    faults.reach_blocking("daemon.started")
    began_ns = time.time_ns()
    began_s = boot_time()
    clock = SwarmClock(time.time(), boot_time)
    chosen = settings.load(home.root / "agora.toml", flags)
    reference = runs.resolve(text, home)
    with _open_directory(home.root) as journal:
        reporter = Reporter([journal, EventLog(level=chosen.log_level)], clock.unix)
        notifier = Notifier()
        incarnation = next_incarnation(home.incarnation, began_ns)
        steps = StartSteps(reporter.report, notifier)
        with steps.step("identity") as note:
            identity = Identity.load_or_create(home.identity)
            note.text = identity.peer
        if names_hub_model(chosen):
            with steps.step("hub") as note:
                chosen = with_fetched_base_model(chosen, functools.partial(setattr, note, "text"))
        with steps.step("imports"):
            import agora.node.process.lifecycle  # noqa: F401
        startup = Startup(reference, home, chosen, identity, incarnation, clock, reporter, notifier, steps, began_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_daemon(startup))


@contextmanager
def _open_directory(root: Path) -> Iterator[Journal]:
    with ExitStack() as closing:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            closing.enter_context(lock_file(root / "daemon.lock"))
            journal = Journal(root)
        except OSError as error:
            reason = f"Cannot make or write {root} ({error.strerror})"
            raise DiskError(f"{reason}; free some space, or choose another directory with --dir.") from error
        yield journal


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Creates and locks a file, and writes this process' id into it; unlocks but keeps the file when the block ends.

    If another process has the lock, raises LocalError, which names that process, without waiting. The kernel frees a
    dead process' lock. Raises OSError if the file cannot be written.
    """
    with path.open("a+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise LocalError(
                f"{path.parent} is in use by the daemon with pid {file.read(32).strip() or 'unknown'}; "
                f"stop it with `agora-node leave --dir {path.parent}`, or give this one its own --dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield  # the file stays: one that is removed can be locked twice


async def _run_daemon(startup: Startup) -> None:
    from agora.node.process.lifecycle import Daemon

    daemon = Daemon(startup)

    def leave_or_exit() -> None:
        if daemon.stop.is_set():
            paths.unregister(paths.socket_of(startup.home))
            os._exit(1)
        daemon.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, leave_or_exit)
    await daemon.run()
