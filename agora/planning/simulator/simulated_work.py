"""What a microbatch costs the machines and links of a simulated swarm. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """What a microbatch costs. work: of each stage, in seconds on a machine of speed 1, forward and backward together.

    forward_share: the forward's fraction of the work.
    boundary_bytes: sent to the next stage for each microbatch.
    gradient_bytes: sent back by the next stage for each microbatch.
    slots: maximum number of microbatches that a peer holds at the same time.
    """

    work: tuple[float, ...]
    boundary_bytes: float
    gradient_bytes: float
    forward_share: float = 1.0 / 3.0
    slots: int = 128

    @property
    def stages(self) -> int:
        return len(self.work)

    def seconds(self, first: int, last: int, speed: float) -> float:
        """Returns the seconds of forward and backward at the stages `first` to `last` on a machine of this speed."""
        return sum(self.work[first : last + 1]) / speed
