"""Chooses in how many bits a replica sends gradients, from what its uplink carries in a step. Pure.

Each of n replicas sends (n - 1) / n of its gradient to owners, and its 1 / n of the mean to n - 1 members: in total
2 (n - 1) / n values for each element. Every sender chooses for itself, since a message names its format.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from agora_protocol.codec_names import WIRE_NAMES, WireName
from agora_protocol.limits import QUANTISER_BLOCK

SCALE_BYTES: Final = 1 / QUANTISER_BLOCK
# Bytes of one value in each format; the smallest format first.
BYTES: Final[dict[WireName, float]] = {
    "normal2": 2 / 8 + SCALE_BYTES,
    "normal3": 3 / 8 + SCALE_BYTES,
    "normal4": 4 / 8 + SCALE_BYTES,
    "int8": 1 + SCALE_BYTES,
    "bf16": 2.0,
    "float32": 4.0,
}

DOUBLING_STEPS: Final = 200  # an uplink counts as twice as fast after this many steps in which it was never full
MAX_DOUBLINGS: Final = 20.0
MENTIONED_GROWTH: Final = 1.05  # the least factor that the reason mentions


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


class GradientWire(NamedTuple):
    """The format in which a replica sends gradients, and the reason in words.

    is_limited: whether the uplink is too slow for the manifest's format. carried: bytes that it carries for each value
    and step; infinite if that is not known, because nothing waits for it.
    """

    name: WireName
    reason: str
    is_limited: bool = False
    carried: float = math.inf

    @property
    def fits(self) -> bool:
        return self.carried >= BYTES[self.name]


def choose_gradient_wire(
    manifest_wire: WireName, numel: int, replicas: int, uplink: MeasuredUplink, step_s: float | None, fraction: float
) -> GradientWire:
    """Returns the largest format, up to `manifest_wire`, whose bytes can be sent in a step; if none can, the smallest.

    A format fits if its bytes <= fraction * rate * growth * step_s, with the uplink's rate and growth; a replica sends
    2 * (n - 1) / n * numel values in a step. With an unknown rate or step_s, or for one replica, returns
    `manifest_wire`.

    numel: elements of the stages held.
    replicas: n, the number of replicas, this one included.
    step_s: seconds in which all replicas count a step's tokens, None if unknown. Not the measured duration of steps: a
    full uplink stretches it, and the longer steps would seem to leave room for more bytes.
    fraction: part of the uplink that gradients may use.
    """
    if uplink.rate is None or step_s is None or replicas < 2:
        return GradientWire(manifest_wire, f"{manifest_wire}: nothing waits for its uplink")
    values = 2 * (replicas - 1) / replicas * numel
    budget = fraction * uplink.rate * uplink.growth * step_s
    allowed = [name for name in WIRE_NAMES if BYTES[name] <= BYTES[manifest_wire]]
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
    return GradientWire(chosen, reason, chosen != manifest_wire or needed > budget, budget / values)
