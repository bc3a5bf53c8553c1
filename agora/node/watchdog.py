"""Looks at the daemon every second: feeds systemd's watchdog, and reports changes of health and traffic.

Knows: the node's report. Must not know: how its numbers come about. The watchdog is fed only where the work itself
proves progress or states what it waits for; that this loop runs proves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agora.clock import loop_time
from agora.node.node_report import NO_TRAFFIC, NodeReport, service_status
from agora.node.systemd import Notifier
from agora.observe import events
from agora.observe.events import Report

LOOK_S = 1.0
TRAFFIC_S = 2.0
SILENCE_S = 30.0
"""Work in hand may make no progress for so long, or for half of systemd's interval, or for ten paths."""
SILENCE_PATHS = 10.0


def may_feed(
    silent_s: float, limit_s: float, in_hand: int, waiting_for: str = "", *, is_paused: bool = False
) -> tuple[bool, str]:
    """Returns whether the watchdog may be fed, and a sentence for systemd's STATUS.

    Work in hand must make progress: `silent_s`, the time since anything was finished, is at most `limit_s`. Otherwise
    systemd restarts the daemon. A daemon that is paused, waits, or has nothing to do is fed.
    """
    if is_paused:
        return True, "paused by the owner"
    if waiting_for:
        return True, f"waiting for {waiting_for}"
    if in_hand == 0:
        return True, "idle: no microbatch in hand"
    if silent_s <= limit_s:
        return True, f"working on {in_hand} microbatches"
    return False, f"no progress for {silent_s:.0f} s with {in_hand} microbatches in hand"


class Watchdog:
    """Takes a report every second: feeds systemd's watchdog while work goes on, and reports what has changed.

    began_unix: when the process started.
    """

    def __init__(
        self, take_report: Callable[[], NodeReport], report: Report, notifier: Notifier, began_unix: float
    ) -> None:
        self._take_report = take_report
        self._report = report
        self._notifier = notifier
        self._began_unix = began_unix
        self._health = ""
        self._has_served = False
        self._traffic = NO_TRAFFIC

    async def run(self) -> None:
        """Looks at the daemon every second, and every 2 s at its traffic, until cancelled."""
        traffic_due = 0.0
        while True:
            node = self._take_report()
            self._report_changes(node)
            self._feed(node)
            if loop_time() >= traffic_due:
                traffic_due = loop_time() + TRAFFIC_S
                self.report_traffic(node)
            await asyncio.sleep(LOOK_S)

    def report_traffic(self, node: NodeReport) -> None:
        """Reports the byte counts (a Traffic event), if they have changed since the last time."""
        if node.traffic != self._traffic:
            self._traffic = node.traffic
            self._report(node.traffic)

    def _report_changes(self, node: NodeReport) -> None:
        """Reports FirstHopServed once the first microbatch is counted, and HealthChanged when the health changes."""
        first_unix, health = node.counters.first_counted_unix, node.health
        if first_unix is not None and node.span is not None and not self._has_served:
            self._has_served = True
            self._report(events.FirstHopServed(node.span.span.first, first_unix - self._began_unix))
        if health.state != self._health:
            self._health = health.state
            self._report(events.HealthChanged(health.state, health.why, health.do or ""))

    def _feed(self, node: NodeReport) -> None:
        """Feeds systemd's watchdog if `may_feed` allows it, and sends the status line.

        Sends READY once the first microbatch was counted; before that, asks for more time to start.
        """
        path_s, in_hand = (node.span.path_s or 0.0, node.span.in_hand) if node.span else (0.0, 0)
        limit_s = max(self._notifier.watchdog_s / 2 or SILENCE_S, SILENCE_PATHS * path_s)
        waiting_for = f"a peer of stage {node.empty_stages[0]}" if node.empty_stages else ""
        if node.step_of_start:
            waiting_for = f"the step {node.step_of_start!r} of its start"
        silent_s = node.now_unix - node.counters.last_sign_unix
        may, sentence = may_feed(silent_s, limit_s, in_hand, waiting_for, is_paused=node.is_paused)
        if may:
            self._notifier.send(WATCHDOG=1)
            if not self._has_served:
                self._notifier.send(EXTEND_TIMEOUT_USEC=120_000_000)
        line = service_status(node, sentence)
        if self._has_served:  # sent every time, since a datagram may be lost and a second READY changes nothing
            self._notifier.send(READY=1, STATUS=line)
        else:
            self._notifier.send(STATUS=line)
