"""How much a replica may begin before a mean gradient is applied. Pure.

Where means come soon, origins and hops wait for them, so that microbatches are computed at weights that include them.
Where weights are predicted, a part of the next share may begin meanwhile: it keeps the devices busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora.replica.stage_view import ReplicaCounts


@dataclass(frozen=True, slots=True)
class WorkBeforeMean:
    """What a replica may begin before the mean of its closed share, or of the open one, is applied.

    counts: of this replica. quota: tokens of its share of a step. ahead: tokens of the next share that may begin, 0
    where weights are not predicted.
    """

    counts: ReplicaCounts
    quota: int
    ahead: int
    microbatch_tokens: int

    @property
    def drains(self) -> bool:
        """Whether all microbatches in progress belong to the open share, so that it is closed when none is left."""
        return not self.ahead

    @property
    def tokens_in_flight(self) -> int:
        """How many tokens an origin may have in flight; at 0 or less it waits for the mean."""
        awaits_mean = self.counts.open_step > self.counts.step
        lacking = -self.counts.tokens if awaits_mean else self.quota - self.counts.tokens
        return lacking + self.ahead

    def must_hold_next(self, in_progress: int) -> bool:
        """Returns whether the next microbatch must wait for the mean of a closed share.

        in_progress: training microbatches that are already at work here.
        """
        if self.counts.open_step == self.counts.step:
            return False
        return self.counts.tokens + in_progress * self.microbatch_tokens >= self.ahead
