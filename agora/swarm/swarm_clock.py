"""Computes the swarm's time: this machine's clock, corrected by other peers' clocks.

Deterministic: the class changes only by the calls to it. Records are published and judged in swarm time, so that a
clock that is wrong makes no peer invisible.

The wall clock is read once, at the start; from then on elapsed time is added, so that a clock that is set back or
forward while the daemon runs changes nothing. `boot` times are seconds since this machine was started.

| this peer | others that send a time | swarm time is |
|---|---|---|
| has just started | none | its own: it is the first peer, and settled by that |
| has just started | 1 or more | the median of theirs |
| is settled | none or 1 | as before: one peer alone is not followed |
| is settled | 2 or more | the median of theirs |

If an even number of other peers send a time, the median counts this peer's own time too. An unsettled peer sends no
time. A median within STEADY_S of the time in force changes nothing, so that measuring errors do not add up. One that
is more than MAX_CORRECTION_S from this machine's clock is not followed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

STEADY_S: Final = 0.25  # seconds by which the others' median may differ before the correction changes
# Seconds by which this machine's clock is corrected at most, whatever the others' clocks show.
MAX_CORRECTION_S: Final = 86_400.0
MAX_TOLERATED_S: Final = 10.0  # seconds by which this machine's clock may be off before its owner is told
REMEDY: Final = "switch on time synchronisation: `timedatectl set-ntp true`"


@dataclass(frozen=True, slots=True)
class ClockCorrection:
    """The seconds to add to this machine's clock to get swarm time, the time that the peers have in common.

    is_settled: see the module's table. refused_s: the correction that others' clocks ask for, if it exceeds
    MAX_CORRECTION_S.
    """

    seconds: float = 0.0
    is_settled: bool = False
    refused_s: float | None = None


def correct_clock(current: ClockCorrection, offsets_s: Collection[float]) -> ClockCorrection:
    """Returns the settled correction that follows `current`, by the module's table.

    offsets_s: for each other peer, by how many seconds its time is ahead of this machine's uncorrected clock.
    """
    if current.is_settled and len(offsets_s) < 2:
        return current
    if not offsets_s:
        return ClockCorrection(current.seconds, is_settled=True)
    wanted = _median_with_own(list(offsets_s), current.seconds)
    if abs(wanted) > MAX_CORRECTION_S:
        return ClockCorrection(current.seconds, is_settled=True, refused_s=wanted)
    is_same = current.is_settled and abs(wanted - current.seconds) < STEADY_S
    return ClockCorrection(current.seconds if is_same else wanted, is_settled=True)


def _median_with_own(offsets_s: Sequence[float], own: float) -> float:
    # `own` counts where the number is even, so that the median is always one of the values, never a mean of two.
    return statistics.median(offsets_s if len(offsets_s) % 2 else [*offsets_s, own])


def clock_remark(correction: ClockCorrection) -> str:
    """Returns a sentence, with the remedy, if this machine's clock is more than MAX_TOLERATED_S off; "" otherwise."""
    off_s = correction.seconds if correction.refused_s is None else correction.refused_s
    if abs(off_s) <= MAX_TOLERATED_S:
        return ""
    sense = "behind" if off_s > 0 else "ahead of"
    follows = "" if correction.refused_s is None else ", which is too much to be corrected"
    return f"this machine's clock is {abs(off_s):.0f} s {sense} the swarm's{follows}; {REMEDY}"


class SwarmClock:
    """The swarm's time in this process: this machine's clock plus `correction`, which `follow` changes."""

    def __init__(self, wall_unix: float, boot_s: Callable[[], float]) -> None:
        """wall_unix: the wall clock now. boot_s: the seconds since this machine was started."""
        self._boot_s = boot_s
        self._boot_unix = wall_unix - boot_s()
        self.correction = ClockCorrection()

    def unix(self) -> float:
        """Returns the present swarm time, in unix seconds."""
        return self._boot_unix + self._boot_s() + self.correction.seconds

    def time_for_others_unix(self) -> float:
        """Returns the time that this peer sends others, in unix seconds; 0.0 while it is not settled."""
        return self.unix() if self.correction.is_settled else 0.0

    def follow(self, boot_unix: Collection[float]) -> bool:
        """Sets `correction` by the times that other peers sent; returns whether it has changed.

        boot_unix: for each of these peers, the unix time on its clock when this machine's `boot_s` was 0. Empty: an
        unsettled clock is settled as it is.
        """
        former = self.correction
        self.correction = correct_clock(former, [peer_unix - self._boot_unix for peer_unix in boot_unix])
        return self.correction != former
