"""How fast a real swarm trains over links of a given rate and latency, once everything has settled.

Knows: the local swarm of daemons, their reports and journals. Must not know: codecs, losses, what is compared with
what.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.swarm import STALL_S, SwarmContender
from benchmarks.window import tell

LOOK_S = 1.0
LOOKS = 6
SETTLED = 0.1
PATIENCE_S = 90.0


class SteadySwarm(SwarmContender):
    """A swarm whose windows begin once its pipeline is as full as it will be, which over a slow link takes long."""

    def _fill(self) -> None:
        """Lets it train until the origin's credit has found its level, and as much is home again as was in flight."""
        credits: list[int] = []
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            credits.append(self._origin_credit())
            home = len(self._completed)
            if home > 2 * credits[-1] and is_settled(credits[-LOOKS:]):
                return
            self._pass_time(LOOK_S)
        self._wait_until("train", lambda: bool(self._completed), STALL_S)
        tell(f"{self.name}: the credit has not settled within {PATIENCE_S:.0f} s: {credits[-LOOKS:]}")

    def _pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._wait_until("go on", lambda: time.monotonic() >= end, seconds + STALL_S)

    def _origin_credit(self) -> int:
        origin = next(daemon for daemon in self._daemons if self._spans.get(daemon.index, (-1, -1))[0] == 0)
        return credit_of(origin.ask("report") or {})


def credit_of(report: dict[str, Any]) -> int:
    """The credit that a daemon's report gives, 0 when it gives none."""
    found = re.match(r"[0-9]+", str(report.get("credit", "")))
    return int(found[0]) if found else 0


def is_settled(credits: Sequence[int]) -> bool:
    """Whether these looks at the credit, of which there are LOOKS, say the same but for a tenth, or one microbatch."""
    return len(credits) >= LOOKS and max(credits) - min(credits) <= max(1.0, SETTLED * max(credits))
