"""Whether an average can be believed, and when a newcomer counts. Pure.

Knows: how far replicas usually are from their average, as numbers. Must not know: tensors, calls or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

USUAL_EMA: Final = 0.3
BEYOND_USUAL: Final = 8.0
NEAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class Drift:
    """How far, as root mean square, this stage's averages lie from its own values; None before the first round."""

    usual: float | None = None

    def unbelievable(self, moved: float, size: float) -> str:
        """Why an average that lies `moved` from values of root mean square `size` is not used; "" when it is.

        A first average may lie as far as the values are large; a later one BEYOND_USUAL times the usual.
        """
        most = size if self.usual is None else max(BEYOND_USUAL * self.usual, 1e-3 * size)
        if moved <= most:
            return ""
        return f"the average lies {moved:.3g} from the own values, {most:.3g} would be the most"

    def seen(self, moved: float) -> Drift:
        """After a round whose parts lay `moved` away, as median."""
        return Drift(moved if self.usual is None else self.usual + USUAL_EMA * (moved - self.usual))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Whether this replica's values count. One that came later takes averages at weight 0 until it is near them."""

    counts: bool = True

    def seen(self, own: float, others: float, complete: bool) -> Newcomer:
        """After a round: `own` distance to the average, the `others'` median; `complete`: every part was averaged."""
        return Newcomer(self.counts or (complete and own <= NEAR * others))
