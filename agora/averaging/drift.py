"""Whether an average can be believed, and when a newcomer counts. Pure.

Knows: how far replicas usually are from their average, and how large a gradient usually is, as numbers. Must not know:
tensors, calls or time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

USUAL_EMA: Final = 0.3
BEYOND_USUAL: Final = 8.0
ALWAYS: Final = 0.02
"""Of the values' own size; replicas that train well are as far apart, or farther."""
NEAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class Drift:
    """How far, as root mean square, this stage's averages lie from its own values; None before the first round."""

    usual: float | None = None

    def most(self, size: float) -> float:
        """How far an average may lie from values of root mean square `size`.

        A first one as far as the values are large; a later one BEYOND_USUAL times the usual, or ALWAYS of the values:
        drift grows fast from nothing, as at a run's start.
        """
        return size if self.usual is None else max(BEYOND_USUAL * self.usual, ALWAYS * size)

    def unbelievable(self, moved: float, size: float) -> str:
        """Why an average that lies `moved` from values of this size is not used; "" when it is."""
        most = self.most(size)
        if moved <= most:
            return ""
        return f"the average lies {moved:.3g} from the own values, {most:.3g} would be the most"

    def counted(self, size: float) -> float | None:
        """What a part whose average was not believed goes into the usual as, its values being that large; None: not.

        As the farthest that would have been, `size` at most: else replicas that have come to be farther apart than that
        would never believe one another again. A first that is not believed teaches nothing.
        """
        return None if self.usual is None else min(self.most(size), size)

    @staticmethod
    def believed(moved: float, members: float) -> float:
        """What a part whose average was believed goes into the usual as: how far it `moved`, or the `members`' median.

        Whose values have most of the weight lies near the average by that alone, and would take the next one, in which
        all weigh the same, for a lie. The median is the owner's word, and counts BEYOND_USUAL times the own at most.
        """
        return max(moved, min(members, BEYOND_USUAL * moved))

    def seen(self, moved: float) -> Drift:
        """After a round whose averages counted as `moved`, the median of the parts."""
        return Drift(moved if self.usual is None else self.usual + USUAL_EMA * (moved - self.usual))


@dataclass(frozen=True, slots=True)
class Norm:
    """How large, as root mean square, the mean gradients of one part of a stage are; None before the first."""

    usual: float | None = None

    def most(self, own: float) -> float:
        """How large a mean gradient may be where the own share is `own`: BEYOND_USUAL times the usual, or the own.

        With neither there is nothing to judge by.
        """
        largest = max(self.usual or 0.0, own)
        return BEYOND_USUAL * largest if largest else math.inf

    def unbelievable(self, mean: float, own: float) -> str:
        """Why a mean gradient this large is not used; "" when it is."""
        most = self.most(own)
        if math.isfinite(mean) and mean <= most:
            return ""
        return f"the mean gradient is {mean:.3g} large, {most:.3g} would be the most"

    def seen(self, mean: float, own: float) -> Norm:
        """After a step in which it was believed; one that could not be judged is not remembered."""
        if self.usual is None:
            return Norm(min(mean, own) if own else None)
        return Norm(self.usual + USUAL_EMA * (mean - self.usual))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Whether this replica's values count. One that came later takes averages at weight 0 until it is near them.

    `rounds`: whole ones that it has waited for that.
    """

    counts: bool = True
    rounds: int = 0

    def seen(self, own: float, others: float, members: float, cover: int) -> Newcomer:
        """After a round in which every part was averaged: `own` distance to the average, the `others'` median, the
        `members` in it. `cover`: rounds after which it has every average there is, and counts in any case.

        Of replicas that lie equally far from their true mean, n have s sqrt(1 - 1/n) to their average, and one that is
        not in it s sqrt(1 + 1/n). With a single other nothing can be compared: then one round is enough.
        """
        near = members < 2 or own <= NEAR * others * math.sqrt((members + 1) / (members - 1))
        return Newcomer(self.counts or near or self.rounds + 1 >= cover, self.rounds + 1)
