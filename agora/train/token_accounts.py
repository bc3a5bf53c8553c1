"""Which tokens of a step were counted, and how stale their gradients were."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from agora_protocol.limits import RECENT_STEPS
from agora_protocol.records import StageAccount

STALENESS_BINS = 33  # staleness 0, 1, ... 31, and one bin for everything older.


class _RecentStep(NamedTuple):
    own: int
    in_mean: int | None
    staleness: float  # mean age of its gradients in steps


class TokenAccounts:
    """Counts what became of a stage's tokens here since the stage was loaded: totals, and sums over the last steps.

    computed: tokens whose gradient was computed; `Stage` adds to it. Of steps, only the last RECENT_STEPS are kept.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._counted = 0
        self._recent: deque[_RecentStep] = deque(maxlen=RECENT_STEPS)

    def record_step(self, own: int, in_mean: int | None, staleness: float) -> None:
        """Records one optimizer step.

        own: this peer's tokens. in_mean: all replicas', or None if the step was along this peer's own gradient.
        """
        self._counted += own
        self._recent.append(_RecentStep(own, in_mean, staleness))

    def forget_recent(self) -> None:
        # Not the totals. A loaded state has replaced the stage's.
        self._recent.clear()

    def account(self, waiting: int) -> StageAccount:
        """Returns totals, and sums and mean staleness over the recent steps. waiting: tokens that are in no step yet.

        Each step's staleness is weighted by this peer's tokens in it; the mean is 0 without tokens.
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
