"""What members and owners make of a part's values: contributions, the mean, its bytes, and what is fed back.

Knows: the run's averaging configuration, parts and their values. Must not know: owners by id, calls, deadlines.

An owner encodes a mean once, and everybody uses what these bytes decode to, the owner too: so all replicas take in the
same bits, whoever gave them the mean, and whenever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, cast

import torch
from agora_protocol.codec_names import WireName
from agora_protocol.errors import PeerFailed
from agora_protocol.ids import PeerId, RunId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging.aggregate import Aggregation, Average, aggregate, magnitude
from agora.averaging.contributions import Contribution, Contributions
from agora.averaging.partition import Members, choose_owners, ownership_turn, slice_count
from agora.averaging.plausibility import UsualSize
from agora.averaging.wire import NORMAL_BITS, Encoded, PartCodec

MOST_ROUNDS_OF_WEIGHT: Final = 64
"""A contribution that weighs more tokens than so many rounds have is refused."""
INT8_ROUNDS: Final = 20
"""The first so many gradients of a run travel as int8 where later ones take 2 to 4 bits: they change the most."""


class Part(NamedTuple):
    """Names a part of a round, as Contribute does. what: "gradient" or "slice". number: of the round. part: index."""

    stage: int
    what: str
    number: int
    part: int

    @property
    def round(self) -> tuple[int, str, int]:
        """The name of the round that the part belongs to: (stage, what, number)."""
        return self[:3]


class Place(NamedTuple):
    """The elements of a stage that a part averages. slice_: the number of its slice, 0 for gradients."""

    stage: int
    what: str
    slice_: int
    part: int


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """What all members of a run agree on about rounds, and this peer's id.

    max_weight: tokens above which a contribution is refused. exact: whether mean gradients are exact weighted means.
    slices: the number of slices of a stage.
    """

    me: PeerId
    run: RunId
    aggregation: Aggregation
    round_s: float
    max_weight: float
    exact: bool = False
    gradient_wire: WireName = "float32"
    slice_wire: WireName = "float32"
    slices: int = 1

    @classmethod
    def of(cls, signed: SignedManifest, me: PeerId) -> RoundConfig:
        """Returns what the run's manifest says; in a synchronous run everything travels as float32."""
        averaging, exact = signed.manifest.averaging, signed.manifest.schedule.kind == "synchronous"
        slices = slice_count(averaging.fraction)
        max_weight = MOST_ROUNDS_OF_WEIGHT * signed.manifest.optimizer.target_tokens * averaging.every * slices
        wires: tuple[WireName, WireName] = averaging.gradient_wire, averaging.slice_wire
        if exact:
            wires = "float32", "float32"
        return cls(me, signed.run_id, averaging.aggregation, averaging.round_s, max_weight, exact, *wires, slices)

    def place(self, part: Part) -> Place:
        """Returns the elements that the part averages: those of an earlier round's part with the same place."""
        return Place(part.stage, part.what, part.number % self.slices if part.what == "slice" else 0, part.part)

    def owners(self, part: Part, members: Members) -> tuple[PeerId, PeerId | None]:
        """Returns the part's first and second owner among the members, see choose_owners."""
        turn = ownership_turn(part.what, part.number, self.slices)
        return choose_owners(self.run, part.stage, part.what, turn, part.part, members)

    def dither(self, part: Part) -> str:
        """Returns the label of the dither that all members use for this part."""
        return f"{self.run}\0{part.stage}\0{part.what}\0{part.number}\0{part.part}"

    def encode(self, part: Part, values: Tensor, wire: WireName) -> Encoded:
        """Encodes the values of a member or an owner, with the part's dither."""
        return Encoded(wire, PartCodec(wire).encode(values, self.dither(part)))

    def decode(self, part: Part, encoded: Encoded, numel: int) -> Tensor:
        """Undoes `encode`: float32 [numel], the same bits at every receiver. Raises ProtocolError for another form."""
        return PartCodec(encoded.name).decode(encoded.tensors, numel, self.dither(part))


class Exchange:
    """What one peer exchanges in the rounds of its stages, as a member and as an owner, and what it keeps for the next.

    In 2 to 4 bits members and owners feed back what their encoding loses, each into the next round of the same place.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.gradient_wire = config.gradient_wire
        """How this peer sends gradients now: as the manifest says, or in fewer bits, as its uplink allows."""
        self._config = config
        self._contributions = Contributions(config)
        self._owner_errors: dict[Place, Tensor] = {}
        self._sizes: defaultdict[Place, UsualSize] = defaultdict(UsualSize)

    def contribution(self, part: Part, values: Tensor, weight: float) -> Contribution:
        """Returns what a member sends of `values`, float32 [n], behind `weight` tokens, see Contributions."""
        return self._contributions.make(part, values, weight, self.wire_of(part))

    def wire_of(self, part: Part) -> WireName:
        """Returns how this peer sends a part's values: int8 for the first INT8_ROUNDS of gradients, if coarse later."""
        if part.what == "slice":
            return self._config.slice_wire
        begins = self.gradient_wire in NORMAL_BITS and part.number < INT8_ROUNDS
        return "int8" if begins else self.gradient_wire

    def settle(self, part: Part, made: Contribution, counted: bool | None) -> float:
        """Takes in whether the part's mean has a contribution, None when unknown; returns the tokens now lost."""
        return self._contributions.settle(part, made, counted)

    def carry_over(self, part: Part, values: Tensor, weight: float) -> None:
        """Adds a gradient behind `weight` tokens, of a part that has no mean anywhere, to the part's next one."""
        self._contributions.carry_over(part, values, weight)

    def forget(self, stage: int) -> None:
        """Drops what earlier rounds of a stage have left for later ones, as its state was fetched."""
        self._contributions.forget(stage)
        for place in [place for place in self._owner_errors if place.stage == stage]:
            del self._owner_errors[place]

    def combine(
        self, part: Part, values: Sequence[Tensor], weights: list[float], center: Tensor | None
    ) -> Average | None:
        """Returns the owner's mean: by the run's aggregation, weights capped; in a synchronous run the plain mean.

        In few bits y = mean + e is encoded, and e becomes y - decoded(encoded(y)). center: of a clip. None without any
        weight, or when the mean is not finite.
        """
        if self._config.exact:
            average = aggregate(values, weights, "mean", center=None, cap=False)
        else:
            average = aggregate(values, weights, self._config.aggregation, center=center, cap=True)
        if average is None:
            return None
        wire, place = self.wire_of(part), self._config.place(part)
        wanted, coarse = average.values, wire in NORMAL_BITS
        if coarse and place in self._owner_errors:
            wanted = wanted + self._owner_errors[place]
        encoded = self._config.encode(part, wanted, wire)
        decoded = self._config.decode(part, encoded, len(wanted))
        if coarse and len(values) > 1:  # nobody uses the mean of one alone
            self._owner_errors[place] = wanted - decoded
        return Average(decoded, replace(average.message, wire=wire), encoded)

    def mean_of_nobody(self, part: Part, numel: int) -> Average:
        """Returns the mean, 0, of a part to which nobody has contributed, as this peer sends it."""
        wire = self.wire_of(part)
        encoded = self._config.encode(part, torch.zeros(numel), wire)
        message = Averaged(members=0, present=0, weight=0.0, counted=False, wire=wire)
        return Average(self._config.decode(part, encoded, numel), message, encoded)

    def decode_mean(self, part: Part, tensors: Sequence[WireTensor], numel: int, message: Averaged) -> Average:
        """Returns the mean of which these are the bytes. Raises ProtocolError for tensors of another form."""
        encoded = Encoded(cast("WireName", message.wire), tensors)
        return Average(self._config.decode(part, encoded, numel), message, encoded)

    def check_and_record(self, part: Part, own: Tensor, mean: Tensor) -> None:
        """Raises PeerFailed for a mean too large beside this replica's `own` values; else it moves the usual size.

        The most is UsualSize.limit. A synchronous run judges none.
        """
        if self._config.exact:
            return
        size, own_size, place = magnitude(mean), magnitude(own), self._config.place(part)
        usual = self._sizes[place]
        if why := usual.why_implausible(size, own_size):
            raise PeerFailed(why)
        self._sizes[place] = usual.updated(size, own_size)
