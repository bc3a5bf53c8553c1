"""Reports the daemon's state to systemd by sd_notify datagrams, and changes of health and traffic as events.

Knows: the node's report. Must not know: how its numbers are computed. systemd's watchdog is fed only where the work
itself proves progress or states what it waits for; that this loop runs proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from agora.clock import loop_time
from agora.node.node_report import NO_TRAFFIC, NodeReport, service_status
from agora.observe import events

LOOK_S = 1.0
"""Seconds between two checks of the daemon."""
TRAFFIC_S = 2.0
"""Seconds between two reports of the traffic."""
SILENCE_S = 30.0
"""Seconds for which work in hand may make no progress if systemd gives no interval; otherwise half of that interval."""
SILENCE_PATHS = 10.0
"""That time is at least this many times `path_s`, the seconds from here to the last stage and back."""


class Notifier:
    """Sends sd_notify datagrams to NOTIFY_SOCKET; does nothing when that is not set (not under systemd).

    `watchdog_s` is the watchdog's interval in seconds, 0 when systemd set no watchdog for this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and is_ours else 0.0

    def send(self, **fields: str | int) -> None:
        """Sends one datagram of KEY=value lines. A datagram that cannot be sent is lost without an error."""
        if not self._address:
            return
        lines = "\n".join(f"{key}={str(value).splitlines()[0] if str(value) else ''}" for key, value in fields.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
            channel.connect(self._address)
            channel.send(lines.encode())


def may_feed(silent_s: float, limit_s: float, in_hand: int, waiting_for: str, resting: str = "") -> tuple[bool, str]:
    """Returns whether systemd's watchdog may be fed, and a phrase for its STATUS; unfed, systemd restarts the daemon.

    silent_s: seconds since the daemon made any progress; with microbatches in hand, at most `limit_s` are allowed.
    waiting_for, resting: what it waits for, why it rests; "" for neither.
    """
    if resting:
        return True, resting
    if waiting_for:
        return True, f"waiting for {waiting_for}"
    if in_hand == 0:
        return True, "idle: no microbatch in hand"
    if silent_s <= limit_s:
        return True, f"working on {in_hand} microbatches"
    return False, f"no progress for {silent_s:.0f} s with {in_hand} microbatches in hand"


class Watchdog:
    """Takes a report of the node every second: feeds systemd's watchdog while work goes on, and reports changes."""

    def __init__(
        self,
        take_node_report: Callable[[], NodeReport],
        report_event: events.Report,
        notifier: Notifier,
        age_s: Callable[[], float],
    ) -> None:
        """age_s: returns for how long the process has run."""
        self._take_node_report = take_node_report
        self._report_event = report_event
        self._notifier = notifier
        self._age_s = age_s
        self._health = ""
        self._has_served = False
        self._traffic = NO_TRAFFIC

    async def run(self) -> None:
        """Takes the daemon's report every LOOK_S seconds until cancelled: reports changes of health, feeds systemd.

        Reports the daemon's traffic every TRAFFIC_S seconds.
        """
        traffic_due = 0.0
        while True:
            report = self._take_node_report()
            self._report_changes(report)
            self._feed(report)
            if loop_time() >= traffic_due:
                traffic_due = loop_time() + TRAFFIC_S
                self.report_traffic(report)
            await asyncio.sleep(LOOK_S)

    def report_traffic(self, report: NodeReport) -> None:
        """Reports the byte counts (a Traffic event), if they have changed since the last time."""
        if report.traffic != self._traffic:
            self._traffic = report.traffic
            self._report_event(report.traffic)

    def _report_changes(self, report: NodeReport) -> None:
        """Reports FirstHopServed once the first microbatch is counted, and HealthChanged when the health changes."""
        first_unix, health, loaded = report.counters.first_counted_unix, report.health, report.span
        if first_unix is not None and loaded is not None and not self._has_served:
            self._has_served = True
            served_s = self._age_s() - (report.now_unix - first_unix)
            self._report_event(events.FirstHopServed(loaded.span.first, served_s))
        is_starting = loaded is None and not report.resting
        if health.state != self._health and not is_starting:
            self._health = health.state
            self._report_event(events.HealthChanged(health.state, health.why, health.do or ""))

    def _feed(self, report: NodeReport) -> None:
        """Feeds systemd's watchdog if `may_feed` allows it; sends the status, and READY once it has served or rests.

        Until it has served, it also asks systemd for more time to start.
        """
        path_s, in_hand = (report.span.path_s or 0.0, report.span.in_hand) if report.span else (0.0, 0)
        limit_s = max(self._notifier.watchdog_s / 2 or SILENCE_S, SILENCE_PATHS * path_s)
        waiting_for = f"a peer of stage {report.empty_stages[0]}" if report.empty_stages else ""
        if report.step_of_start:
            waiting_for = f"the step {report.step_of_start!r} of its start"
        silent_s = report.now_unix - report.counters.last_sign_unix
        may, sentence = may_feed(silent_s, limit_s, in_hand, waiting_for, report.resting)
        if may:
            self._notifier.send(WATCHDOG=1)
            if not self._has_served:  # more time to start
                self._notifier.send(EXTEND_TIMEOUT_USEC=120_000_000)
        if (
            self._has_served or report.resting
        ):  # every time, since a datagram may be lost and a second READY changes nothing
            self._notifier.send(READY=1)
        self._notifier.send(STATUS=service_status(report, sentence))
