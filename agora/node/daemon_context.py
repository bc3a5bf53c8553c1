"""What all parts of a daemon share, and the phases of its start, which are also reported to systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.core.clock import boot_time
from agora.node import paths, runs
from agora.node.settings import Settings
from agora.observe import events
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock

# The next number is at least this much higher than the last: each new claim of a daemon adds 1 to its number.
INCARNATION_GAP_NS: Final = 1_000_000_000
MAX_INCARNATION: Final = 2**62  # a number from this one on in the file is ignored, and the clock alone counts
SYSTEMD_EXTENSION_USEC = 300_000_000  # microseconds for which systemd waits for the next sign of a start's progress


@dataclass(frozen=True, slots=True)
class DaemonContext:
    """What all parts of a daemon share: its run, data directory, settings, key, where to report, its start's phases."""

    reference: runs.RunReference
    home: paths.Home
    settings: Settings
    identity: Identity
    incarnation: int  # the unix time of the start, in nanoseconds, but greater than that of any earlier start
    clock: SwarmClock
    reporter: Reporter
    notifier: SystemdNotifier
    phases: StartPhases
    began_s: float = field(default_factory=boot_time)  # by the clock of `boot_time`
    queued: tuple[str, ...] = ()  # the names of the runs that are joined after this one
    queue_done: tuple[tuple[str, str], ...] = ()  # those before: the name of each, and why this machine went on

    def age_s(self) -> float:
        """Returns for how many seconds this daemon has run, pauses included."""
        return boot_time() - self.began_s

    @property
    def me(self) -> PeerId:
        return self.identity.peer

    @property
    def report_event(self) -> events.Report:
        return self.reporter.report


@dataclass
class PhaseNote:
    """The result of a phase of the start, in a few words: the phase's block sets `text`."""

    text: str = ""


class StartPhases:
    """Times the phases of a start: `with phases.enter("host") as note:` reports StartStep("host", seconds, note.text).

    current: the phase that runs, or the inner one of two, with how far it is; after an error the phase that failed; ""
    otherwise.
    """

    def __init__(self, report_event: events.Report, notifier: SystemdNotifier) -> None:
        self._report_event = report_event
        self._notifier = notifier
        self.current = ""

    @contextmanager
    def enter(self, name: str) -> Iterator[PhaseNote]:
        """Tells systemd of the phase, times the block, and reports StartStep when the block ends without an error.

        Sets `current` to `name` meanwhile; after an error it keeps that name.
        """
        note = PhaseNote()
        began = time.perf_counter()
        outer, self.current = self.current, name
        self._notifier.send(STATUS=f"starting: {name}", EXTEND_TIMEOUT_USEC=SYSTEMD_EXTENSION_USEC)
        yield note  # after an error `current` stays, so that the status says where the start ended
        self._report_event(events.StartStep(name, time.perf_counter() - began, note.text))
        self.current = outer

    def report_progress(self, text: str) -> None:
        """Tells systemd how far the phase is, so that systemd goes on waiting; sets `current` to "PHASE: text"."""
        name = self.current.partition(":")[0]
        self.current = f"{name}: {text}"
        self._notifier.send(STATUS=f"starting: {self.current}", EXTEND_TIMEOUT_USEC=SYSTEMD_EXTENSION_USEC)


class SystemdNotifier:
    """Sends sd_notify datagrams to NOTIFY_SOCKET; does nothing when that is not set (not under systemd).

    watchdog_s: the watchdog's interval in seconds, 0 when systemd set no watchdog for this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and is_ours else 0.0

    def send(self, **fields: str | int) -> None:
        """Sends one datagram of KEY=value lines, only the first line of each value; does nothing outside systemd.

        A datagram that cannot be sent without waiting is lost without an error.
        """
        if not self._address:
            return
        lines = "\n".join(f"{key}={str(value).splitlines()[0] if str(value) else ''}" for key, value in fields.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
            channel.connect(self._address)
            channel.send(lines.encode())


def next_incarnation(file: Path, now_ns: int) -> int:
    """Returns the number of this start, the greater of `now_ns` and the last + INCARNATION_GAP_NS; writes it to `file`.

    So a later start has a higher number even when the clock was set back. now_ns: unix time in nanoseconds. A missing
    or malformed file counts as none. Raises DiskError if writing fails.
    """
    try:
        last = int(file.read_text(encoding="ascii").strip() or 0)
    except (OSError, ValueError):
        last = 0
    number = max(now_ns, last + INCARNATION_GAP_NS if 0 < last < MAX_INCARNATION else 0)
    try:
        paths.replace_text(file, f"{number}\n")
    except OSError as error:
        raise DiskError(f"Cannot write {file} ({error.strerror}); free some space, or choose another --dir.") from error
    return number
