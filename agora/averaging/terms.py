"""What a round is: how it is named, what is agreed about it, and what an average brings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agora_protocol.ids import PeerId, RunId
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging.aggregate import Rule
from agora.averaging.wire import Dither, Name, PartCodec

FIRST_WINDOW = 0.4
"""Of a round's seconds: how long a first owner waits for contributions, from the first it has."""
FIRST_PATIENCE = 0.6
"""Of what is left of a round: how long a member waits for the first owner before it asks the second."""
SECOND_WINDOW = 0.2
RECALL_SHARE = 0.1


class Part(NamedTuple):
    """A part of a round: what `Contribute` names."""

    stage: int
    what: str
    number: int
    part: int


@dataclass(frozen=True, slots=True)
class AveragingTerms:
    """What the members of a run agree on, and who this one is. `round_s`: seconds until a round ends.

    `exact`: a synchronous run, where the mean of gradients is over tokens as they are; else nothing
    that a replica says of its gradients is believed further than what it says of its weights.
    """

    me: PeerId
    run: RunId
    rule: Rule
    wire: Name
    round_s: float
    max_weight: float
    exact: bool = False

    def as_it_is(self, what: str) -> bool:
        """Whether parts of this kind are averaged without a cap or a clip, and not judged."""
        return self.exact and what == "gradient"

    @property
    def codec(self) -> PartCodec:
        """How the elements of a part travel."""
        return PartCodec(self.wire)

    def answer(self, part: Part, average: Tensor, values: Tensor) -> list[WireTensor]:
        """What an owner answers to a member's `values`, as it decoded them: of weights the difference to the average,
        which leaves the member its own rounding; of a gradient the average itself, the same bits for everyone.
        """
        if part.what == "weights":
            return self.codec.encode(average - values)
        return self.codec.encode(average, self.dither(part))

    def answered(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """The same as a member decodes it, float32 [numel]. Raises ProtocolError."""
        dither = None if part.what == "weights" else self.dither(part)
        return self.codec.decode(list(tensors), numel, dither)

    def own_answer(self, part: Part, average: Tensor, values: Tensor) -> Tensor:
        """What `answered` would make of `answer`, but for the rounding of a difference that need not travel."""
        if part.what == "weights":
            return average - values
        return self.answered(part, self.answer(part, average, values), len(values))

    def dither(self, part: Part) -> Dither:
        """What all members add to this part's elements before rounding."""
        return Dither(f"{self.run}\0{part.stage}\0{part.what}\0{part.number}\0{part.part}")


@dataclass(frozen=True, slots=True)
class Average:
    """The average of a part: float32 [n], and what `Averaged` says of it."""

    values: Tensor
    members: int
    present: int
    weight: float
    distance: float


Members = Callable[[int], Mapping[PeerId, float]]
"""A stage's replicas in this peer's view, itself included if it is one, with their bandwidths."""

SizeOf = Callable[[Part], int]
"""Elements of a part. Raises Refused for a round that this peer takes no part in now, ProtocolError for none at all."""
