"""How far one of this peer's stages is with its training: a snapshot that any thread may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agora_protocol.records import StageAccount

from agora.core.sync_mode import StepPlan


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Snapshot of the training progress of one of this peer's stages."""

    stage: int
    step: int  # how many optimizer steps were taken
    open_step: int  # number of the step whose share is open: `step` + closed shares that wait for their means
    tokens_in_share: int  # counted here for the open share
    tokens_counted: int  # counted here since the stage was loaded
    tokens_total: int  # this replica's tokens in all steps and shares, those of a loaded state included
    # Number of microbatches by how many steps old their gradient was; the last bin has all older ones.
    staleness: tuple[int, ...]
    tokens_predicted: int  # of those counted here, tokens whose gradient was computed at predicted weights
    refused_nonfinite: int  # microbatches and sums refused for values that are not finite or plausible
    account: StageAccount  # what became of the tokens counted here
    plan: StepPlan  # which of the stage's steps are local, in how many slices
    lineages: Mapping[int, int]  # of the last agreed steps, by step; see train.lineage

    @property
    def agreed(self) -> int:
        return max(self.lineages)

    @property
    def lineage(self) -> int:
        return self.lineages[self.agreed]
