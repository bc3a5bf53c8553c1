"""What an owner remembers of a round: its members, who has contributed to which part, and the parts' means.

Knows: peers, encoded means. Must not know: how values are averaged, calls, time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged
from agora_protocol.tensors import WireTensor


class KeptPartMean(NamedTuple):
    """A part's mean of `numel` elements, encoded by its owner as `tensors`, with the owner's message about it."""

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int


@dataclass(slots=True)
class RoundRecord:
    """What a replica remembers of one round, above all as an owner of parts.

    members: by id, with bandwidths as in partition.Members. unresponsive: members that no part waits for. contributed:
    by part index, the peers that have contributed. means: by part index, the kept means, `nbytes` bytes together.
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
