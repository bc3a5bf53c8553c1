"""What a microbatch costs the machines and links of a simulated swarm. Pure.

Knows: seconds of work and bytes, by stage. Must not know: peers, events, or where the costs come from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """What a microbatch costs. work: of each stage, as seconds on a machine of speed 1, forward and backward together.

    forward_share: the forward's part of it. boundary_bytes, gradient_bytes: sent to and by the next stage for each
    microbatch. seats: the most microbatches that a peer holds at once.
    """

    work: tuple[float, ...]
    boundary_bytes: float
    gradient_bytes: float
    forward_share: float = 1.0 / 3.0
    seats: int = 128

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.work)

    def seconds(self, entry: int, last: int, speed: float) -> float:
        """Returns the seconds that the stages from `entry` to `last` take a machine of this speed."""
        return sum(self.work[entry : last + 1]) / speed
