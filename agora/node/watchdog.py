"""Looks at the daemon every second: feeds systemd's watchdog, and reports changes of health and traffic.

Knows: the node's report. Must not know: how its numbers come about. The watchdog is fed only where the work itself
proves progress or states what it waits for; that this loop runs proves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agora.clock import loop_time
from agora.node.node_report import NO_TRAFFIC, NodeReport, service_status
from agora.node.systemd import Notifier
from agora.observe import events
from agora.observe.events import Report

LOOK_S = 1.0
TRAFFIC_S = 2.0
SILENCE_S = 30.0
SILENCE_PATHS = 10.0


@dataclass(frozen=True, slots=True)
class WorkState:
    """What is known of this daemon's work at one moment. Times are unix seconds.

    last_progress: when something was last finished, a microbatch, a step, a step of the start. in_hand: microbatches
    accepted or originated and not finished. waiting_for: what the work waits for, "" when it does not wait.
    """

    now: float
    last_progress: float
    in_hand: int
    waiting_for: str = ""
    is_paused: bool = False


def may_feed(work: WorkState, silence_s: float) -> tuple[bool, str]:
    """Returns whether the watchdog may be fed, and a sentence for systemd's STATUS.

    Work in hand must make progress within `silence_s`. Otherwise the watchdog is not fed, and systemd restarts the
    daemon. A daemon that is paused, waits, or has nothing to do is fed.
    """
    if work.is_paused:
        return True, "paused by the owner"
    if work.waiting_for:
        return True, f"waiting for {work.waiting_for}"
    if work.in_hand == 0:
        return True, "idle: no microbatch in hand"
    silent_s = work.now - work.last_progress
    if silent_s <= silence_s:
        return True, f"working on {work.in_hand} microbatches"
    return False, f"no progress for {silent_s:.0f} s with {work.in_hand} microbatches in hand"


class Watchdog:
    """Takes a report every second. `began_unix` is when the process started."""

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
        """Looks every second until cancelled."""
        traffic_due = 0.0
        while True:
            node = self._take_report()
            self._report_first_hop(node)
            self._report_health(node)
            self._feed(node)
            if loop_time() >= traffic_due:
                traffic_due = loop_time() + TRAFFIC_S
                self.report_traffic(node)
            await asyncio.sleep(LOOK_S)

    def report_traffic(self, node: NodeReport) -> None:
        """Reports the byte counts, if they have changed."""
        if node.traffic != self._traffic:
            self._traffic = node.traffic
            self._report(node.traffic)

    def _report_first_hop(self, node: NodeReport) -> None:
        """Reports once that the first microbatch was counted here."""
        first_unix = node.counters.first_counted_unix
        if first_unix is not None and node.span is not None and not self._has_served:
            self._has_served = True
            self._report(events.FirstHopServed(node.span.span.first, first_unix - self._began_unix))

    def _report_health(self, node: NodeReport) -> None:
        """Reports the swarm's health when its state has changed."""
        health = node.health
        if health.state != self._health:
            self._health = health.state
            self._report(events.HealthChanged(health.state, health.why, health.do or ""))

    def _feed(self, node: NodeReport) -> None:
        """Feeds systemd's watchdog if it may be fed, and sends the status line."""
        path_s = node.span.path_s if node.span else None
        silence_s = max(self._notifier.watchdog_s / 2 or SILENCE_S, SILENCE_PATHS * (path_s or 0.0))
        in_hand = node.span.in_hand if node.span else 0
        work = WorkState(node.now_unix, node.counters.last_sign_unix, in_hand, _wait_of(node), node.is_paused)
        may, sentence = may_feed(work, silence_s)
        if may:
            self._notifier.send(WATCHDOG=1)
            if not self._has_served:
                self._notifier.send(EXTEND_TIMEOUT_USEC=120_000_000)
        line = service_status(node, sentence)
        if self._has_served:  # sent every time, since a datagram may be lost and a second READY changes nothing
            self._notifier.send(READY=1, STATUS=line)
        else:
            self._notifier.send(STATUS=line)


def _wait_of(node: NodeReport) -> str:
    """Returns what the daemon waits for, "" when it does not wait."""
    if node.step_of_start:
        return f"the step {node.step_of_start!r} of its start"
    return f"a peer of stage {node.empty_stages[0]}" if node.empty_stages else ""
