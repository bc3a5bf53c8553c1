"""Counts what becomes of the tokens whose gradients this peer computes for one stage."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from agora_protocol.limits import RECENT_STEPS
from agora_protocol.records import StageAccount


class _RecentStep(NamedTuple):
    """The token counts of one of the last optimizer steps; for the fields see TokenAccounts.record_step."""

    own: int
    in_mean: int | None
    staleness: float


class TokenAccounts:
    """Counts what became of a stage's tokens here since the stage was loaded: totals, and sums over the last steps.

    computed: tokens whose gradient was computed; the owner of this object adds to it. Of steps, only the last
    RECENT_STEPS are kept.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._counted = 0
        self._recent: deque[_RecentStep] = deque(maxlen=RECENT_STEPS)

    def record_step(self, own: int, in_mean: int | None, staleness: float) -> None:
        """Records an optimizer step that was taken along a gradient.

        own: this peer's tokens that went into the gradient. in_mean: tokens of all replicas in the mean gradient; None
        if the step was along this peer's own gradient. staleness: mean age of this peer's gradients in steps.
        """
        self._counted += own
        self._recent.append(_RecentStep(own, in_mean, staleness))

    def forget_recent(self) -> None:
        """Drops the recent steps, but not the totals; to be called when a loaded state has replaced the stage's."""
        self._recent.clear()

    def account(self, waiting: int) -> StageAccount:
        """Returns the account for the progress record: totals, and sums and mean staleness over the recent steps.

        waiting: tokens that are in no step yet. Each step's staleness is weighted by this peer's tokens in it; the mean
        is 0 without tokens.
        """
        along_own = [step.own for step in self._recent if step.in_mean is None]
        in_mean = [step.in_mean for step in self._recent if step.in_mean is not None]
        own = sum(step.own for step in self._recent)
        return StageAccount(
            computed=self.computed,
            waiting=waiting,
            counted=self._counted,
            own_steps=len(along_own),
            along_own=sum(along_own),
            mean_steps=len(in_mean),
            in_mean=sum(in_mean),
            staleness=sum(step.own * step.staleness for step in self._recent) / max(own, 1),
        )
