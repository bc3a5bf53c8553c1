"""Reports the daemon's state to systemd by sd_notify datagrams, and changes of health and traffic as events.

systemd's watchdog is not fed while microbatches are in progress and none of them advances: that this loop runs proves
nothing. While the daemon is paused, waiting or idle, the watchdog is fed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agora.core.clock import loop_time
from agora.node.control.node_report import NO_TRAFFIC, NodeReport, service_status
from agora.node.daemon_context import SystemdNotifier
from agora.observe import events

POLL_INTERVAL_S = 1.0  # seconds between two checks of the daemon
TRAFFIC_INTERVAL_S = 2.0  # seconds between two reports of the traffic
DEVICE_INTERVAL_S = 30.0  # seconds between two reports of how the device is used
WAITS_INTERVAL_S = 10.0  # seconds between two reports of what the device waits for
# Seconds for which work in progress may stand still if systemd gives no interval; else half of that interval.
SILENCE_TIMEOUT_S = 30.0
# Work may in any case stand still for this many times `latency_s`, the seconds to the last stage and back.
SILENCE_LATENCIES = 10.0


def may_feed(
    silent_s: float, limit_s: float, in_progress: int, waiting_for: str, pause_reason: str = ""
) -> tuple[bool, str]:
    """Returns whether systemd's watchdog may be fed, and a phrase for its STATUS; unfed, systemd restarts the daemon.

    False only if `in_progress` microbatches (1 or more) are in progress, the daemon is neither paused nor waiting, and
    `silent_s`, the seconds since its last progress, is above `limit_s`. waiting_for: what the daemon waits for, "" for
    nothing. pause_reason: why it is paused, "" if it works.
    """
    if pause_reason:
        return True, pause_reason
    if waiting_for:
        return True, f"waiting for {waiting_for}"
    if in_progress == 0:
        return True, "idle: no open microbatch"
    if silent_s <= limit_s:
        return True, f"working on {in_progress} microbatches"
    return False, f"no progress for {silent_s:.0f} s with {in_progress} open microbatches"


class Watchdog:
    """Takes a report of the node every second: feeds systemd's watchdog unless open work stands still; reports events.

    The events are changes of health, the traffic, how the device is used, what it waits for, and the first microbatch
    served.
    """

    def __init__(
        self,
        sample_node_report: Callable[[], NodeReport],
        report_event: events.Report,
        notifier: SystemdNotifier,
        age_s: Callable[[], float],
    ) -> None:
        """age_s: returns how many seconds the process has run."""
        self._sample_node_report = sample_node_report
        self._report_event = report_event
        self._notifier = notifier
        self._age_s = age_s
        self._health = ""
        self._has_served = False
        self._traffic = NO_TRAFFIC

    async def run(self) -> None:
        """Until cancelled, takes the node's report again and again, reports changes of health, and notifies systemd.

        Every TRAFFIC_INTERVAL_S also reports the traffic, if it has changed, every DEVICE_INTERVAL_S how the device is
        used, and every WAITS_INTERVAL_S what its time was spent on.
        """
        traffic_due = device_due = waits_due = 0.0
        while True:
            report = self._sample_node_report()
            self._report_changes(report)
            self._notify_systemd(report)
            if loop_time() >= traffic_due:
                traffic_due = loop_time() + TRAFFIC_INTERVAL_S
                self.report_traffic(report)
            if loop_time() >= device_due and report.span is not None and report.span.device is not None:
                device_due = loop_time() + DEVICE_INTERVAL_S
                self._report_event(report.span.device)
            if loop_time() >= waits_due and report.span is not None:
                waits_due = loop_time() + WAITS_INTERVAL_S
                self._report_event(events.DeviceWaited(*(round(seconds, 3) for seconds in report.span.device_time)))
            await asyncio.sleep(POLL_INTERVAL_S)

    def report_traffic(self, report: NodeReport) -> None:
        """Reports the bytes carried since the daemon's start (a Traffic event), unless equal to the last report's."""
        if report.traffic != self._traffic:
            self._traffic = report.traffic
            self._report_event(report.traffic)

    def _report_changes(self, report: NodeReport) -> None:
        health = report.health
        loaded = report.span
        first_unix = report.counters.first_counted_unix
        if first_unix is not None and loaded is not None and not self._has_served:
            self._has_served = True
            served_s = self._age_s() - (report.now_unix - first_unix)
            self._report_event(events.FirstHopServed(loaded.span.first, served_s))
        is_starting = loaded is None and not report.pause_reason
        if health.state != self._health and not is_starting:
            self._health = health.state
            self._report_event(events.HealthChanged(health.state, health.why, health.advice or ""))

    def _notify_systemd(self, report: NodeReport) -> None:
        latency_s, in_progress = (report.span.latency_s or 0.0, report.span.in_progress) if report.span else (0.0, 0)
        limit_s = max(self._notifier.watchdog_s / 2 or SILENCE_TIMEOUT_S, SILENCE_LATENCIES * latency_s)
        waiting_for = f"a peer of stage {report.empty_stages[0]}" if report.empty_stages else ""
        if report.start_phase:
            waiting_for = f"the phase {report.start_phase!r} of its start"
        silent_s = report.now_unix - report.counters.last_sign_unix
        is_allowed, phrase = may_feed(silent_s, limit_s, in_progress, waiting_for, report.pause_reason)
        if is_allowed:
            self._notifier.send(WATCHDOG=1)
            if not self._has_served:  # 120 s more until systemd's start timeout
                self._notifier.send(EXTEND_TIMEOUT_USEC=120_000_000)
        # Repeated, since a datagram may be lost; a second READY changes nothing.
        if self._has_served or report.pause_reason:
            self._notifier.send(READY=1)
        self._notifier.send(STATUS=service_status(report, phrase))
