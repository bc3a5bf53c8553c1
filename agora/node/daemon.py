"""Runs a daemon as a process: data directory, lock, log, signals, event loop, exit code.

Knows: the process. Must not know: what the daemon does inside its loop (lifecycle.py), which is imported here, late and
timed, because it brings torch and hivemind.
"""

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

from agora.clock import boot_time
from agora.node import paths, runs, settings
from agora.node.base_model_place import names_hub_model, with_base_model_place
from agora.node.incarnations import next_incarnation
from agora.node.startup import StartSteps, Startup
from agora.node.watchdog import Notifier
from agora.observe import faults
from agora.observe.journal import Journal
from agora.observe.log import EventLog
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock


def run(text: str, home: paths.Home, flags: Mapping[str, Any]) -> None:
    """Runs the daemon of the run `text` in this process until it leaves; locks its data directory meanwhile.

    text: a manifest file, an invite, or the name of a run. flags: the settings given on the command line. Raises an
    AgoraError that says what to do when the daemon cannot begin, or ends by an error.
    """
    faults.activate(faults.from_environment())
    faults.reach_blocking("daemon.started")
    clock, began_ns, began_s = SwarmClock(time.time(), boot_time), time.time_ns(), boot_time()
    chosen = settings.load(home.root / "agora.toml", flags)
    reference = runs.resolve(text, home)
    with _open_directory(home.root) as journal:
        reporter, notifier = Reporter([journal, EventLog(level=chosen.log_level)], clock.unix), Notifier()
        incarnation = next_incarnation(home.incarnation, began_ns)
        steps = StartSteps(reporter.report, notifier)
        with steps.step("identity") as note:
            identity = Identity.load_or_create(home.identity)
            note.text = identity.peer
        if names_hub_model(chosen):
            with steps.step("hub") as note:
                chosen = with_base_model_place(chosen, functools.partial(setattr, note, "text"))
        with steps.step("imports"):
            import agora.node.lifecycle  # noqa: F401
        startup = Startup(reference, home, chosen, identity, incarnation, clock, reporter, notifier, steps, began_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_node(startup))


@contextmanager
def _open_directory(root: Path) -> Iterator[Journal]:
    """Makes the data directory if there is none, locks it while the block runs, and yields its journal.

    Raises DiskError, or LocalError when another daemon has locked it.
    """
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
    """Locks a file and writes this process' id into it, while the block runs; the kernel frees a dead process' lock.

    Raises OSError, or LocalError that names the process that has locked it.
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


async def _run_node(startup: Startup) -> None:
    """Runs the node; the first SIGTERM, SIGINT or SIGHUP makes it leave, a second one ends the process at once."""
    from agora.node.lifecycle import Node

    node = Node(startup)

    def leave_or_exit() -> None:
        """Signal handler: makes the daemon leave; called again, removes the socket and ends the process at once."""
        if node.stop.is_set():
            paths.unregister(paths.socket_of(startup.home))
            os._exit(1)
        node.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, leave_or_exit)
    await node.run()
