"""Runs one daemon for each device of a machine, as one: it starts them, restarts those that die, and ends them all.

The first device's daemon uses the data directory itself, with its key; the others DIR/devices/NAME. They are peers of
the run like any others, and meet over loopback by their registry files.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agora_protocol.errors import DeviceError, DiskError, LocalError
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_ADDRESSES

from agora.core.clock import loop_time
from agora.core.machine_limits import least_memory, usable_threads
from agora.net.shaping.bandwidth import MIN_RATE, parse_rate
from agora.node import daemon_registry, paths, runs
from agora.node.daemon_context import SystemdNotifier
from agora.node.process.main import SIGNALS, handled_signals, lock_file
from agora.node.process.run_queue import EXIT_FOR_NEXT_RUN
from agora.node.settings import Settings, without_settings
from agora.observe import events
from agora.observe.journal import Journal
from agora.observe.log import EventLog
from agora.observe.reporter import Reporter

FIND_TIMEOUT_S: Final = 120.0  # for torch to say which devices there are
POLL_INTERVAL_S: Final = 0.2
FIRST_RESTART_DELAY_S: Final = 5.0  # doubled with each further end within RESTART_WINDOW_S
MAX_RESTART_DELAY_S: Final = 300.0
RESTART_WINDOW_S: Final = 3600.0
# A daemon that has not fed its watchdog for this long is killed and started again; under systemd its interval.
WATCHDOG_TIMEOUT_S: Final = 60.0
# Seconds after which daemons that were told to leave are killed. They usually end before: see END_TIMEOUT_S in main.py.
LEAVE_TIMEOUT_S: Final = 9.5
# Exit codes: it has left in order, its arguments are wrong, or its run is over or refuses it and another one follows.
NEVER_RESTARTED: Final = (0, 2, EXIT_FOR_NEXT_RUN)
MAX_NOTICE_BYTES: Final = 4096


def find_devices() -> list[str]:
    """Returns the names of all GPUs that torch sees and has kernels for, or ["cpu"]. Blocks for seconds.

    Asks a process of its own: torch would take memory here that nobody gives back. Raises DeviceError.
    """
    code = "from agora.train.device import all_devices; print(*all_devices())"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=FIND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        text = f"torch does not say which devices there are ({''.join(told)}); name them: --device cuda:0,cuda:1"
        raise DeviceError(text) from None
    return asked.stdout.split()


def restart_delay_s(ends: Sequence[float], now: float) -> float:
    """Returns the seconds to wait before a daemon is started again. ends: the times at which it has ended."""
    recent = sum(now - ended < RESTART_WINDOW_S for ended in ends)
    return float(min(MAX_RESTART_DELAY_S, FIRST_RESTART_DELAY_S * 2 ** (max(1, recent) - 1)))


def homes_of(home: paths.Home, devices: Sequence[str]) -> list[paths.Home]:
    """Returns the data directory of each device's daemon. A name that occurs again, as in "cpu,cpu", gets a number."""
    seen = [f"{name}.{devices[:at].count(name)}" if name in devices[:at] else name for at, name in enumerate(devices)]
    return [home, *(home.of_device(name.replace(":", "-")) for name in seen[1:])]


def settings_per_device(
    chosen: Settings, devices: Sequence[str], home: paths.Home, free_bytes: float
) -> list[Settings]:
    """Returns the settings of each device's daemon: equal shares of what the machine and its owner have for all.

    free_bytes: the machine's free memory. Each daemon gets the next port, also for metrics. Only the first one
    announces the owner's addresses, since each leads to one daemon, and shows the page.
    """
    count = len(devices)
    host_gib = (chosen.host_memory_gib or chosen.memory_gib or free_bytes / 2**30) / count
    shared = {
        "threads": max(1, (chosen.threads or usable_threads()) // count),
        "upload_limit": _share_of_rate(chosen.upload_limit, count),
        "download_limit": _share_of_rate(chosen.download_limit, count),
        "corpus_cache": chosen.corpus_cache or str(home.root / "corpus"),
    }
    return [
        chosen.model_copy(
            update=shared
            # The first one's directory holds those of the others.
            | {"disk_gib": chosen.disk_gib / count if at else chosen.disk_gib}
            | {"device": name, "listen": tuple(_port_plus(address, at) for address in chosen.listen)}
            | {"metrics": _metrics_plus(chosen.metrics, at)}
            | {"watts": chosen.watts / count}
            | ({"announce": (), "page": False, "notify": False} if at else {})
            | ({"memory_gib": host_gib} if name == "cpu" else {"host_memory_gib": host_gib})
        )
        for at, name in enumerate(devices)
    ]


def _share_of_rate(limit: str, count: int) -> str:
    return f"{max(MIN_RATE, parse_rate(limit) / count):.0f}B/s" if limit else ""


def _port_plus(address: str, more: int) -> str:
    start, tcp, rest = address.partition("/tcp/")
    port, *others = rest.split("/")
    return "/".join([f"{start}{tcp}{int(port) + more}", *others]) if port.isdecimal() and int(port) else address


def _metrics_plus(endpoint: str, more: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + more}" if port and int(port) else endpoint


@dataclass(slots=True)
class _Child:
    device: str
    home: paths.Home
    settings: Settings
    process: subprocess.Popen[bytes] | None = None
    ends: list[float] = field(default_factory=list)  # loop times
    restart_at: float | None = None  # loop time
    exit_code: int | None = None  # of its last end
    is_ready: bool = False
    status: str = "starting"
    fed_at: float | None = None  # loop time when it last fed its watchdog; None before the first time

    @property
    def is_open(self) -> bool:
        return self.process is not None or self.restart_at is not None


class Supervisor:
    """Runs the daemons of several devices until all have left. Use `run` once, in an event loop."""

    def __init__(
        self,
        reference: runs.RunReference,
        home: paths.Home,
        settings: Sequence[Settings],
        report_event: events.Report,
        notifier: SystemdNotifier,
    ) -> None:
        """home: the data directory of all. settings: of each daemon, see settings_per_device."""
        self._reference = reference
        homes = homes_of(home, [each.device for each in settings])
        self._children = [_Child(each.device, place, each) for place, each in zip(homes, settings, strict=True)]
        self._report_event = report_event
        self._notifier = notifier
        self._watchdog_s = notifier.watchdog_s or WATCHDOG_TIMEOUT_S
        self._leave_by: float | None = None  # loop time; None until they are told to leave

    async def run(self) -> int:
        """Returns the exit code: 0, or that of the first daemon that has failed for good; EXIT_FOR_NEXT_RUN if none
        has, and one has ended with it.
        """
        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._leave_or_kill, number)
        first, *others = self._children
        with ExitStack() as closing:
            closing.callback(self._kill_all)
            for child in self._children:
                closing.callback(self._receive_notices(child).close)
            self._start(first)
            # The others find the run, and a peer of it, by the registry file of the first.
            while first.is_open and not daemon_registry.socket_of(first.home).with_suffix(".json").exists():
                await self._look_after([first], restarts=False)
            if first.is_open and self._leave_by is None:
                for child in others:
                    self._start(child)
            while any(child.is_open for child in self._children):
                await self._look_after(self._children, restarts=True)
        codes = [child.exit_code for child in self._children if child.exit_code]
        return next((code for code in codes if code != EXIT_FOR_NEXT_RUN), codes[0] if codes else 0)

    def _leave_or_kill(self, number: signal.Signals) -> None:
        if self._leave_by is not None:  # the second signal
            self._report_event(events.OwnerTold(f"ended at once by a second signal, {number.name}"))
            self._kill_all()
            os._exit(1)
        self._leave_by = loop_time() + LEAVE_TIMEOUT_S
        self._notifier.send(STOPPING=1, STATUS=SIGNALS[number])
        self._report_event(events.StateChanged("leaving", SIGNALS[number]))
        for child in self._children:
            child.restart_at = None
            if child.process is not None:
                child.process.terminate()

    def _kill_all(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()

    # --- one daemon

    def _start(self, child: _Child) -> None:
        child.restart_at, child.fed_at, child.is_ready, child.status = None, None, False, "starting"
        environment = {
            **without_settings(os.environ),
            **child.settings.to_environment(),
            daemon_registry.SUPERVISOR_VARIABLE: str(os.getpid()),
            "NOTIFY_SOCKET": str(_notice_socket(child.home)),
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1e6)),
        }
        environment.pop("WATCHDOG_PID", None)  # systemd's, for the supervisor
        run, invite = self._named_run(child)
        try:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "agora.cli.main_node", "join", run, "--dir", str(child.home.root)],
                stdin=subprocess.PIPE,
                stdout=None if child is self._children[0] else subprocess.DEVNULL,  # one invite is enough
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which tells each of them once
                preexec_fn=_terminate_with_parent,
            )
        except OSError as error:
            self._schedule_restart(child, f"could not be started ({error.strerror})")
            return
        assert child.process.stdin is not None
        with suppress(BrokenPipeError), child.process.stdin as stdin:
            stdin.write(invite.encode())

    def _named_run(self, child: _Child) -> tuple[str, str]:
        # An invite may be a secret, and arguments are seen in `ps`: it goes through standard input.
        known = self._reference
        if known.file is not None:
            return str(known.file.absolute()), ""
        if known.signed is not None:
            return str(self._children[0].home.manifest(known.run)), ""
        return runs.STDIN, str(Invite(RunId(known.run), known.addresses[:MAX_ADDRESSES], known.name, known.ticket))

    async def _look_after(self, children: Sequence[_Child], *, restarts: bool) -> None:
        await asyncio.sleep(POLL_INTERVAL_S)
        now = loop_time()
        for child in children:
            if child.process is not None and self._unfed_s(child) > self._watchdog_s:
                told = f"the daemon of {child.device} is killed: no sign of progress for {self._watchdog_s:.0f} s"
                self._report_event(events.OwnerTold(told))
                child.process.kill()
                child.process.wait()
            if child.process is not None and (code := child.process.poll()) is not None:
                child.process = None
                child.exit_code = code if code >= 0 else 128 - code
                if restarts and self._leave_by is None and code not in NEVER_RESTARTED:
                    self._schedule_restart(child, f"has ended with exit code {child.exit_code}")
            if child.restart_at is not None and now >= child.restart_at:
                self._start(child)
        if self._leave_by is not None and now > self._leave_by:
            self._kill_all()
        self._notify_systemd()

    @staticmethod
    def _unfed_s(child: _Child) -> float:
        return loop_time() - child.fed_at if child.fed_at is not None else 0.0

    def _schedule_restart(self, child: _Child, what: str) -> None:
        child.ends.append(loop_time())
        delay_s = restart_delay_s(child.ends, loop_time())
        child.restart_at, child.status = loop_time() + delay_s, "starting again"
        self._report_event(events.OwnerTold(f"the daemon of {child.device} {what}; it starts again in {delay_s:.0f} s"))

    # --- systemd: each daemon notifies the supervisor, which notifies systemd for all

    def _receive_notices(self, child: _Child) -> socket.socket:
        place = _notice_socket(child.home)
        place.unlink(missing_ok=True)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            paths.make_private(place.parent)
            channel.bind(str(place))
        except OSError as error:
            channel.close()
            text = f"cannot open {place} ({error.strerror}); set {paths.RUNTIME_VARIABLE} to a directory of yours"
            raise LocalError(text) from None
        asyncio.get_running_loop().add_reader(channel, self._take_notice, child, channel)
        return channel

    def _take_notice(self, child: _Child, channel: socket.socket) -> None:
        fields = parse_notice(channel.recv(MAX_NOTICE_BYTES))
        child.status = fields.get("STATUS", child.status)
        child.is_ready = child.is_ready or fields.get("READY") == "1"
        # Before READY, which follows its first microbatch, any notice will do: that one may take long, as may a start.
        if "WATCHDOG" in fields or (child.fed_at is not None and not child.is_ready):
            child.fed_at = loop_time()
        if extension := fields.get("EXTEND_TIMEOUT_USEC", ""):
            self._notifier.send(EXTEND_TIMEOUT_USEC=extension)

    def _notify_systemd(self) -> None:
        open_children = [child for child in self._children if child.is_open]
        if open_children and all(child.is_ready for child in open_children) and self._leave_by is None:
            self._notifier.send(READY=1)
        # A daemon that stands still is killed after a whole interval. If that fails, systemd restarts all of them.
        unfed = [child for child in open_children if child.process and self._unfed_s(child) > self._watchdog_s / 2]
        if not unfed:
            self._notifier.send(WATCHDOG=1)
        self._notifier.send(STATUS="; ".join(f"{child.device}: {child.status}" for child in open_children))


def parse_notice(datagram: bytes) -> dict[str, str]:
    """Returns the fields of an sd_notify datagram, lines KEY=value."""
    lines = datagram.decode(errors="replace").splitlines()
    return {key: value for key, found, value in (line.partition("=") for line in lines) if found}


def _notice_socket(home: paths.Home) -> Path:
    return daemon_registry.socket_of(home).with_suffix(".notify")


def _terminate_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if the supervisor is killed, they leave in order


def run_daemons(reference: runs.RunReference, home: paths.Home, chosen: Settings, devices: Sequence[str]) -> int:
    """Runs a daemon for each of `devices` until all have left; returns the exit code. Locks DIR/devices meanwhile.

    Raises LocalError or DiskError if it cannot begin.
    """
    with ExitStack() as closing:
        try:
            for place in homes_of(home, devices):
                place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            closing.enter_context(lock_file(home.devices / "daemon.lock"))
            reporter = Reporter([Journal(home.devices), EventLog(level=chosen.log_level)])
        except OSError as error:
            raise DiskError(f"Cannot make or write {home.devices} ({error.strerror}); choose another --dir.") from error
        settings = settings_per_device(chosen, devices, home, least_memory().amount)
        supervisor = Supervisor(reference, home, settings, reporter.report, SystemdNotifier())
        return asyncio.run(supervisor.run())
