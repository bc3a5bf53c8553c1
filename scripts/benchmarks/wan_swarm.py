"""How fast a real swarm trains over links of a given rate and latency, once everything has settled."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.swarm import ANSWER_S, STALL_S, SwarmContender
from benchmarks.window import print_progress

LOOK_S = 1.0
LOOKS = 6
SETTLED = 0.1
TIMEOUT_S = 90.0


class SteadySwarm(SwarmContender):
    """A swarm whose windows begin once its pipeline is as full as it will be, which over a slow link takes long."""

    def change_rate(self, rate: str) -> None:
        """Gives the link of every daemon another rate, such as "2Mbit". Raises DaemonRefused where there is no link."""
        for daemon in self.swarm.daemons.values():
            daemon.ask("link", ANSWER_S, rate=rate)

    def fill(self) -> None:
        windows: list[int] = []
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            windows.append(send_window_of(self.origins()[0].try_ask("report") or {}))
            if len(self.completed) > 2 * windows[-1] and is_settled(windows[-LOOKS:]):
                return
            next_look = time.monotonic() + LOOK_S
            self.until(lambda end=next_look: time.monotonic() >= end, "to go on", LOOK_S + STALL_S)
        self.until(lambda: bool(self.completed), "to train", STALL_S)
        print_progress(f"{self.name}: the send window has not settled within {TIMEOUT_S:.0f} s: {windows[-LOOKS:]}")


def send_window_of(report: dict[str, Any]) -> int:
    """Returns the send window in a daemon's report; 0 when there is none."""
    found = re.match(r"[0-9]+", str(report.get("credit", "")))
    return int(found[0]) if found else 0


def is_settled(windows: Sequence[int]) -> bool:
    """Returns whether LOOKS readings of the send window differ by at most a tenth, or by one microbatch."""
    return len(windows) >= LOOKS and max(windows) - min(windows) <= max(1.0, SETTLED * max(windows))
