"""What an owner remembers of a round: its members, which of them have contributed to which part.

And the parts' means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Recalled
from agora_protocol.tensors import WireTensor

# Number of newest rounds of a stage and kind ("gradient" or "slice") whose means are kept, whatever their size.
MIN_KEPT_ROUNDS: Final = 4
# Bytes of kept means of a stage and kind, beyond which the means of older rounds are dropped. Means are kept because a
# replica that has just joined asks for the means of the steps that were taken while it fetched the state.
MAX_KEPT_BYTES: Final = 2**28


class KeptPartMean(NamedTuple):
    """A part's mean of `numel` elements, encoded by its owner as `tensors`, with the owner's message about it.

    slices: of the part, since parts of other slices have other elements.
    """

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int
    slices: int

    def recalled(self) -> Recalled:
        """Returns the message that answers Recall with this mean."""
        counts = self.message
        return Recalled(counts.in_mean, counts.contributors, counts.weight, counts.wire, counts.wanted_slices)


def averaged_from(recalled: Recalled) -> Averaged:
    """Returns the owner's message about a mean that a member has sent as `recalled`: the reverse of recalled()."""
    numbers = recalled.in_mean, recalled.contributors, recalled.weight
    return Averaged(*numbers, counted=True, wire=recalled.wire, wanted_slices=recalled.wanted_slices)


@dataclass(slots=True)
class RoundRecord:
    """What a replica remembers of one round, above all as an owner of parts.

    members: by id, with bandwidths as in partition.Members.
    unresponsive: members that no part waits for.
    contributed: by part index, the peers that have contributed.
    means: by part index, the kept means, `nbytes` bytes together.
    """

    members: dict[PeerId, float | None] = field(default_factory=dict)
    unresponsive: set[PeerId] = field(default_factory=set)
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    means: dict[int, KeptPartMean] = field(default_factory=dict)
    nbytes: int = 0

    def drop_means(self) -> None:
        """Drops the kept means; keeps the other fields, so that a second contribution is still noticed."""
        self.means.clear()
        self.nbytes = 0


def drop_oldest_means(rounds: Mapping[int, RoundRecord]) -> None:
    """Drops kept means beyond MAX_KEPT_BYTES, oldest rounds first, but not those of the newest MIN_KEPT_ROUNDS.

    rounds: the records of a stage and kind, by the round's number. Changes them in place.
    """
    numbers, total = sorted(rounds, reverse=True), 0
    for number in numbers:
        total += rounds[number].nbytes
        if total > MAX_KEPT_BYTES and number <= numbers[0] - MIN_KEPT_ROUNDS:
            rounds[number].drop_means()
