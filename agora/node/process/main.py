"""Turns a process into a daemon: its directory, lock, key and settings; signals, event loop, phases of the start."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from agora_protocol.errors import AgoraError, DiskError, LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.core.clock import boot_time
from agora.core.tasks import BackgroundTasks
from agora.node import daemon_registry, paths, runs, settings
from agora.node.control import control_client
from agora.node.daemon_context import DaemonContext, StartPhases, SystemdNotifier, next_incarnation
from agora.node.process import run_queue
from agora.observe import events, faults
from agora.observe.journal import Journal
from agora.observe.log import EventLog
from agora.observe.metrics import EventMetrics
from agora.observe.notifications import DesktopNotifier, find_notifier
from agora.observe.reporter import Reporter, Sink
from agora.swarm.key_use import KeyInUse, key_in_use_text
from agora.swarm.swarm_clock import SwarmClock

# The signals that make a daemon leave, and the cause that its log then names.
SIGNALS: Final[Mapping[signal.Signals, str]] = {
    signal.SIGTERM: "asked to leave by SIGTERM, from `kill` or the service manager",
    signal.SIGINT: "asked to leave by SIGINT, from Ctrl-C",
    signal.SIGHUP: "asked to leave by SIGHUP: its terminal was closed (start it with `nohup` or as a service to go on)",
    signal.SIGQUIT: "asked to leave by SIGQUIT, from Ctrl-\\ or a container's stop signal",
    # Batch systems send these some time before they kill.
    signal.SIGUSR1: "asked to leave by SIGUSR1, as from a batch system whose time ends",
    signal.SIGUSR2: "asked to leave by SIGUSR2, as from a batch system whose time ends",
}
# Seconds after which a leaving process ends itself, even if a device, a disk or a thread hangs. In order it takes 9.
END_TIMEOUT_S: Final = 9.4
# What a daemon writes is for its user alone: with a umask of 0, others could give it manifests and checkpoints.
PRIVATE: Final = 0o077


def run_daemon(text: str, home: paths.Home, flags: Mapping[str, Any]) -> int:
    """Runs the daemon of the run `text` in this process until it leaves; locks its data directory meanwhile.

    Returns 0; with several devices the supervisor's exit code; as the daemon of one of them EXIT_FOR_NEXT_RUN where the
    supervisor is to join the next run. If other runs are queued, it does not return when this one is over, or does not
    take this machine: the process becomes the daemon of the next run, see join_next.
    text: a manifest file, an invite, or the name or id of a run. flags: the settings given on the command line. Raises
    an AgoraError that says what to do when the daemon cannot begin, or when an error ends it. Once the
    data directory is locked, log and journal name the cause of whatever ends it, unless the kernel kills it.
    """
    os.umask(PRIVATE)
    end_on_signals()
    faults.set_active_faults(faults.from_environment())
    faults.inject_fault_blocking("daemon.started")
    began_ns = time.time_ns()
    began_s = boot_time()
    clock = SwarmClock(time.time(), boot_time)
    chosen = settings.load(home.root / "agora.toml", flags)
    queued = run_queue.check_queue(chosen.queue, home)
    reference = runs.resolve(text, home)
    why_next = "it has taken its steps"
    try:
        code = _run_one(reference, home, chosen, queued, clock, began_ns, began_s)
    except AgoraError as error:
        if not queued or not run_queue.another_run_may_succeed(error):
            raise
        code, why_next = run_queue.EXIT_FOR_NEXT_RUN, str(error)
    if code != run_queue.EXIT_FOR_NEXT_RUN or os.environ.get(daemon_registry.SUPERVISOR_VARIABLE):
        return code
    return run_queue.join_next(
        home, chosen, (*run_queue.runs_left_before(), (reference.name or reference.run[:12], why_next))
    )


def _run_one(
    reference: runs.RunReference,
    home: paths.Home,
    chosen: settings.Settings,
    queued: tuple[str, ...],
    clock: SwarmClock,
    began_ns: int,
    began_s: float,
) -> int:
    # Returns EXIT_FOR_NEXT_RUN if the run is over while others are queued.
    if chosen.names_several_devices:
        from agora.node.process import supervisor

        devices = supervisor.find_devices() if chosen.device == "all" else chosen.device.replace(" ", "").split(",")
        if len(devices) > 1:
            return supervisor.run_daemons(reference, home, chosen, devices)
        chosen = chosen.model_copy(update={"device": devices[0]})
    with ExitStack() as closing:
        journal = closing.enter_context(_open_directory(home.root))
        # Beside the daemons of other devices, which write to the same terminal.
        prefix = f"{chosen.device} " if os.environ.get(daemon_registry.SUPERVISOR_VARIABLE) else ""
        counted = EventMetrics()
        sinks: list[Sink] = [journal, EventLog(level=chosen.log_level, prefix=prefix), counted]
        compose, why_silent = find_notifier() if chosen.notify else (None, "")
        if compose is not None:
            sinks.append(DesktopNotifier(reference.name, compose))
        reporter = Reporter(sinks, clock.unix)
        if why_silent:
            reporter.report(events.OwnerTold(f"no notification can be shown: {why_silent}"))
        closing.enter_context(reporting_the_end(reporter.report))
        notifier = SystemdNotifier()
        incarnation = next_incarnation(home.incarnation, began_ns)
        phases = StartPhases(reporter.report, notifier)
        with phases.enter("identity") as note:
            identity = Identity.load_or_create(home.identity)
            note.text = identity.peer
            refuse_copied_key(home, identity.peer)
        if chosen.names_hub_files:
            found = list[str]()
            with phases.enter("hub") as note:
                chosen = chosen.with_fetched_base_model(found.append).with_fetched_adapter(found.append)
                note.text = "; ".join(found)
        with phases.enter("imports"):  # torch and hivemind take seconds
            import agora.node.process.control_api
            import agora.node.process.daemon  # noqa: F401
        context = DaemonContext(
            reference=reference,
            home=home,
            settings=chosen,
            identity=identity,
            incarnation=incarnation,
            clock=clock,
            reporter=reporter,
            notifier=notifier,
            phases=phases,
            began_s=began_s,
            queued=queued,
            queue_done=run_queue.runs_left_before(),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            is_over = runner.run(_run_until_left(context, counted, partial(_end_if_late, context)))
    return run_queue.EXIT_FOR_NEXT_RUN if is_over and queued else 0


def _end_if_late(context: DaemonContext) -> None:
    # A thread, since the event loop may hang as well as what it waits for, and so may the interpreter's end.
    timer = threading.Timer(END_TIMEOUT_S, _end_at_once, (context, "not everything could be ended in time"))
    timer.daemon = True
    timer.start()


def _end_at_once(context: DaemonContext, why: str) -> None:
    context.report_event(events.OwnerTold(f"ended at once: {why}; what was open is lost"))
    daemon_registry.unregister(daemon_registry.socket_of(context.home))
    os._exit(1)


async def _run_until_left(context: DaemonContext, counted: EventMetrics, on_leave: Callable[[], None]) -> bool:
    # Returns whether it has left because the run is over.
    from agora.node.control.control_socket import ControlSocket
    from agora.node.process.control_api import ControlApi
    from agora.node.process.daemon import Daemon
    from agora.node.process.metrics import DaemonMetrics, serve_metrics
    from agora.node.process.page import serve_page

    daemon = Daemon(context, on_leave)

    def leave_or_exit(number: signal.Signals) -> None:
        if daemon.is_leaving:
            _end_at_once(context, f"a second signal, {number.name}")
        daemon.leave(SIGNALS[number])

    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, leave_or_exit, number)
    # Open from the first moment to the last, so that a starting, paused or leaving daemon can be asked, too.
    control = ControlSocket(daemon_registry.socket_of(context.home), ControlApi(daemon).questions())
    metrics = DaemonMetrics(counted, context.home.root, daemon.sample_node_report, context.report_event)
    tasks = BackgroundTasks(daemon.fail_since_task_ended)
    page_tasks = BackgroundTasks(daemon.report_task_end)
    await control.start()
    try:
        tasks.start("metrics", metrics.run())
        serve_metrics(daemon.context, metrics, tasks)
        serve_page(daemon, page_tasks)
        await daemon.run()
    finally:
        await page_tasks.close()
        await tasks.close()
        await control.close()
    context.report_event(events.StateChanged("left", f"the daemon has ended: {daemon.leave_reason}"))
    return daemon.run_is_over


def refuse_copied_key(home: paths.Home, me: PeerId) -> None:
    """Raises KeyInUse when another data directory of this machine has a running daemon with the same key, and tells it.

    On another machine the directory of the run shows that, see agora.swarm.key_use.
    """
    for entry in daemon_registry.find_running_daemons():
        if entry.peer == me and Path(entry.root).resolve() != home.root.resolve():
            with suppress(control_client.DaemonRefused, control_client.DaemonUnreachable):
                control_client.ask(Path(entry.socket), "copied_key", root=str(home.root), pid=os.getpid())
            raise KeyInUse(key_in_use_text(me, f"in {entry.root} (pid {entry.pid})"))


def handled_signals() -> list[signal.Signals]:
    """Returns which of SIGNALS make the daemon leave: not those that it was started to ignore, as by `nohup`."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class EndedBySignal(SystemExit):
    """Raised by a signal while no event loop runs yet; its text says which. The exit code is the shell's, 128 + N."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(128 + number)
        self.text = f"{SIGNALS[number]} before it had started"

    def __str__(self) -> str:
        return self.text


def end_on_signals() -> None:
    """Makes each heeded signal raise EndedBySignal, so that the code runs that cleans up and reports the cause."""

    def end(number: int, _frame: object) -> None:
        raise EndedBySignal(signal.Signals(number))

    for number in handled_signals():
        signal.signal(number, end)


@contextmanager
def reporting_the_end(report_event: events.Report) -> Iterator[None]:
    """Context manager: reports an error or a signal that ends the block, as the reason why the daemon has ended."""
    try:
        yield
    except BaseException as error:
        is_known = isinstance(error, AgoraError | EndedBySignal)
        why = str(error) if is_known else f"{type(error).__name__}: {error}"
        report_event(events.StateChanged("left", f"the daemon has ended: {why}"))
        raise


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

    If another process has the lock, raises LocalError, which names that process, without waiting; also on a file system
    without locks. The kernel frees a dead process' lock. Raises OSError if the file cannot be written.
    """
    with path.open("a+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise LocalError(
                f"{path.parent} is in use by the daemon with pid {file.read(32).strip() or 'unknown'}; "
                f"stop it with `agora-node leave --dir {path.parent}`, or give this one its own --dir."
            ) from None
        except OSError as error:
            raise LocalError(
                f"{path.parent} is on a file system without locks ({error.strerror}), where nobody notices a second "
                "daemon; give a directory on a disk of this machine with --dir."
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield  # the file stays: one that is removed can be locked twice
