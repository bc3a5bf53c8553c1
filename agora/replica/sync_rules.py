"""Whether a stage takes all-reduces or inner steps with how many fragments, and what gradients are sent as; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from agora_protocol.codec_names import NUMBER_FORMAT_NAMES, NumberFormatName
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.parts import MIN_FRAGMENTS

from agora.core.step_schedule import ALL_REDUCE

# Replicas that count less than this fraction of all tokens per second may have slower uplinks than all-reduces need.
MAX_SLOW_FRACTION: Final = 0.25
# Uplinks are fast enough to return to all-reduces if they carry this many times the bytes of gradients.
RETURN_FACTOR: Final = 1.5
CHANGE_FACTOR: Final = 1.5  # the number of fragments changes if it should be this many times as large, or as small
# Seconds for which a reducer must have wanted a change before it asks for it: 2 * RATE_DECAY_S. RATE_DECAY_S * ln 3
# seconds after a stall, however long, measured rates are within RETURN_FACTOR of what they were.
MIN_WISH_AGE_S: Final = 20.0
SCALE_BYTES: Final = 1 / QUANTISER_BLOCK
# Bytes of one value in each format; the smallest format first.
BYTES: Final[dict[NumberFormatName, float]] = {
    "normal2": 2 / 8 + SCALE_BYTES,
    "normal3": 3 / 8 + SCALE_BYTES,
    "normal4": 4 / 8 + SCALE_BYTES,
    "int8": 1 + SCALE_BYTES,
    "bf16": 2.0,
    "float32": 4.0,
}
NEEDED_BYTES: Final = BYTES["normal2"]  # of a value, so that all-reduces are possible at all
DOUBLING_STEPS: Final = 200  # an uplink counts as twice as fast after this many steps in which it was never full
MAX_DOUBLINGS: Final = 20.0
MENTIONED_GROWTH: Final = 1.05  # the least factor that the reason mentions


# --- all-reduces, or inner steps and fragment syncs (DiLoCo)
#
# | the stage takes | a reducer wants, if most uplinks carry b bytes for each value and step |
# |---|---|
# | all-reduces | inner steps, if b < NEEDED_BYTES; in NEEDED_BYTES / b fragments, at least MIN_FRAGMENTS |
# | inner steps | all-reduces, if b >= RETURN_FACTOR * NEEDED_BYTES |
# | inner steps | NEEDED_BYTES / b fragments, if that is CHANGE_FACTOR times as many or as few as now |
#
# Most uplinks: those of replicas with all but MAX_SLOW_FRACTION of the tokens that all replicas count per second.
# SyncChangeRule says when a change that all reducers of a round want takes effect.


class ReplicaUplink(NamedTuple):
    """A replica's tokens per second, None if unknown, and the bytes that its uplink carries for each value and step.

    carried: infinite if nothing ever waits for the uplink.
    """

    rate: float | None
    carried: float = math.inf


def carried_by_most(uplinks: Sequence[ReplicaUplink]) -> float:
    """Returns the bytes for each value and step that most uplinks carry; infinite without uplinks.

    That is the least value such that replicas whose uplinks carry less have less than MAX_SLOW_FRACTION of all rates.
    An unknown rate counts as the median of the known ones.
    """
    known = [uplink.rate for uplink in uplinks if uplink.rate is not None]
    median = statistics.median(known) if known else 1.0
    rates = [median if uplink.rate is None else uplink.rate for uplink in uplinks]
    slower = 0.0
    for rate, uplink in sorted(zip(rates, uplinks, strict=True), key=lambda item: item[1].carried):
        slower += rate
        if slower >= MAX_SLOW_FRACTION * sum(rates):
            return uplink.carried
    return math.inf


def choose_fragment_count(present: int, uplinks: Sequence[ReplicaUplink], most_fragments: int) -> tuple[int, str]:
    """Returns the number of fragments that a stage should have, or ALL_REDUCE, and the reason in words; see the table.

    present: the number that it has now, or ALL_REDUCE. uplinks: of all live replicas. most_fragments: the manifest's.
    """
    carried = carried_by_most(uplinks)
    if math.isinf(carried):
        reason = "most uplinks are never full"
    else:
        reason = f"most uplinks carry {carried:.2g} bytes for each value and step, gradients need {NEEDED_BYTES:.2g}"
    if carried >= NEEDED_BYTES * (1.0 if present == ALL_REDUCE else RETURN_FACTOR):
        return ALL_REDUCE if len(uplinks) > 1 else present, reason
    wanted = most_fragments if carried == 0 else min(math.ceil(NEEDED_BYTES / carried), most_fragments)
    wanted = max(wanted, MIN_FRAGMENTS)
    # More than the most is near nothing: an amendment has lowered it.
    may_stay = present != ALL_REDUCE and present <= most_fragments
    is_near = may_stay and present / CHANGE_FACTOR < wanted < present * CHANGE_FACTOR
    return present if is_near else wanted, reason


class Wish(NamedTuple):
    """What kind of change a reducer wants for a stage, and since when it has wanted that without a break.

    kind: "none", "all-reduces", "more fragments" (inner steps instead of all-reduces, too) or "fewer fragments".
    since: in seconds, on the clock of `now`.
    """

    kind: str = "none"
    since: float = 0.0

    def after(self, present: int, wanted: int, now: float) -> Wish:
        """Returns the wish of a reducer that wants `wanted` fragments now, where the stage has `present`."""
        kind = "more fragments" if wanted > present else "fewer fragments"
        if wanted in (present, ALL_REDUCE):
            kind = "none" if wanted == present else "all-reduces"
        return self if kind == self.kind else Wish(kind, now)

    def is_held(self, now: float) -> bool:
        """Returns whether it has been wanted for MIN_WISH_AGE_S seconds, so that the reducer may ask for it."""
        return now - self.since >= MIN_WISH_AGE_S


# --- gradient compression
#
# Each of n replicas sends (n - 1) / n of its gradient to reducers, and its 1 / n of the mean to n - 1 members: in total
# 2 (n - 1) / n values for each element. Every sender chooses for itself, since a message names its format.


class MeasuredUplink(NamedTuple):
    """A peer's uplink. rate: measured while it was full, in bytes per second, None if it never was.

    steps: optimizer steps since the rate was last measured. Only a full uplink is measured; fewer bits fill it no more,
    so that one that has become faster would never be noticed. So the rate that counts grows with these steps, until
    more bits fill the uplink again.
    """

    rate: float | None = None
    steps: int = 0

    def after_step(self, rate: float | None) -> MeasuredUplink:
        """Returns the uplink after a further step. rate: as measured by now; the same as before if it was not full."""
        return MeasuredUplink(rate, self.steps + 1 if rate == self.rate else 0)

    @property
    def growth(self) -> float:
        return math.exp2(min(self.steps / DOUBLING_STEPS, MAX_DOUBLINGS))


class GradientCompression(NamedTuple):
    """The format in which a replica sends gradients, and the reason in words.

    is_limited: whether the uplink is too slow for the manifest's format. carried: bytes that it carries for each value
    and step; infinite if that is not known, because nothing waits for it.
    """

    name: NumberFormatName
    reason: str
    is_limited: bool = False
    carried: float = math.inf

    @property
    def fits(self) -> bool:
        return self.carried >= BYTES[self.name]


def choose_gradient_compression(
    largest: NumberFormatName, numel: int, replicas: int, uplink: MeasuredUplink, step_s: float | None, fraction: float
) -> GradientCompression:
    """Returns the largest format, up to the manifest's, whose bytes can be sent in a step; if none can, the smallest.

    A format fits if its bytes <= fraction * rate * growth * step_s, with the uplink's rate and growth; a replica sends
    2 * (n - 1) / n * numel values in a step. With an unknown rate or step_s, or for one replica, returns
    the manifest's.

    numel: elements of the stages held.
    replicas: n, the number of replicas, this one included.
    step_s: seconds in which all replicas count a step's tokens, None if unknown. Not the measured duration of steps: a
    full uplink stretches it, and the longer steps would seem to leave room for more bytes.
    largest: the manifest's format. fraction: part of the uplink that gradients may use.
    """
    if uplink.rate is None or step_s is None or replicas < 2:
        return GradientCompression(largest, f"{largest}: nothing waits for its uplink")
    values = 2 * (replicas - 1) / replicas * numel
    budget = fraction * uplink.rate * uplink.growth * step_s
    allowed = [name for name in NUMBER_FORMAT_NAMES if BYTES[name] <= BYTES[largest]]
    fitting = [name for name in allowed if values * BYTES[name] <= budget]
    chosen = fitting[-1] if fitting else allowed[0]
    needed = values * BYTES[chosen]
    reason = f"{chosen}: {needed / 1e6:.3g} MB in a step of {step_s:.2g} s; {fraction:.0%} of its uplink of "
    reason += f"{uplink.rate * 8e-6:.3g} Mbit/s "
    if uplink.growth >= MENTIONED_GROWTH:
        reason += f"(taken as {uplink.growth:.2g} times that: it was never full for {uplink.steps} steps) "
    reason += f"carries {budget / 1e6:.3g} MB"
    if needed > budget:
        reason += ", which is too little"
    return GradientCompression(chosen, reason, chosen != largest or needed > budget, budget / values)
