"""What a round of weights and a round of gradients have in common, and what each does in its own way.

Knows: the run's averaging configuration, parts and their values. Must not know: owners, calls, deadlines.
docs/averaging.md has the differences as a table.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from agora_protocol.errors import PeerFailed
from agora_protocol.ids import PeerId, RunId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged
from agora_protocol.tensors import WireTensor
from torch import Tensor, zeros_like

from agora.averaging.aggregate import Aggregation, Average, aggregate, magnitude, root_mean_square
from agora.averaging.contributions import Contribution, Gradient, GradientContributions
from agora.averaging.plausibility import Drift, GradientSize
from agora.averaging.wire import NORMAL_BITS, PartCodec, WireName

MOST_ROUNDS_OF_WEIGHT: Final = 64
"""A contribution that weighs more tokens than so many rounds have is refused."""
INT8_ROUNDS: Final = 20
"""The first so many gradients of a run travel as int8 where later ones take 2 to 4 bits: they change the most."""


class Part(NamedTuple):
    """Names a part of a round, as Contribute does. what: "weights" or "gradient". number: of the round. part: index."""

    stage: int
    what: str
    number: int
    part: int

    @property
    def round(self) -> tuple[int, str, int]:
        """The name of the round that the part belongs to: (stage, what, number)."""
        return self[:3]


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """What all members of a run agree on about rounds, and this peer's id.

    max_weight: tokens above which a contribution is refused. exact: whether mean gradients are exact weighted means.
    """

    me: PeerId
    run: RunId
    aggregation: Aggregation
    wire: WireName
    round_s: float
    max_weight: float
    exact: bool = False
    gradient_wire: WireName = "float32"

    @classmethod
    def of(cls, signed: SignedManifest, me: PeerId) -> RoundConfig:
        """Returns what the run's manifest says; in a synchronous run everything travels as float32."""
        averaging, exact = signed.manifest.averaging, signed.manifest.schedule.kind == "synchronous"
        max_weight = MOST_ROUNDS_OF_WEIGHT * signed.manifest.optimizer.target_tokens * averaging.every
        wire: WireName = "float32" if exact else averaging.wire
        gradient_wire: WireName = "float32" if exact else averaging.gradient_wire
        return cls(me, signed.run_id, averaging.aggregation, wire, averaging.round_s, max_weight, exact, gradient_wire)

    def is_coarse(self, part: Part) -> bool:
        """Returns whether the part's values travel in so few bits that their error is fed back into the next round."""
        return self._codec(part).name in NORMAL_BITS

    def _codec(self, part: Part) -> PartCodec:
        """Returns the codec of the part's values: int8 for the first INT8_ROUNDS of gradients that are coarse later."""
        if part.what == "weights":
            return PartCodec(self.wire)
        begins = self.gradient_wire in NORMAL_BITS and part.number < INT8_ROUNDS
        return PartCodec("int8" if begins else self.gradient_wire)

    def dither(self, part: Part) -> str:
        """Returns the label of the dither that all members use for this part."""
        return f"{self.run}\0{part.stage}\0{part.what}\0{part.number}\0{part.part}"

    def encode(self, part: Part, values: Tensor) -> list[WireTensor]:
        """Encodes a member's values in the run's wire format, with the part's dither, as it sends them to an owner."""
        return self._codec(part).encode(values, self.dither(part))

    def decode(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Undoes `encode`: float32 [numel], the same bits at every receiver. Raises ProtocolError for another form."""
        return self._codec(part).decode(list(tensors), numel, self.dither(part))


class WeightRound:
    """Rounds of weights: owners answer by average - values; members reject one far beyond the usual distance."""

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self._drifts: defaultdict[int, Drift] = defaultdict(Drift)  # by stage
        self._recorded: defaultdict[int, dict[int, float]] = defaultdict(dict)  # of the running round: stage, part

    def contribution(self, part: Part, values: Tensor, weight: float) -> Contribution:
        """Returns what a member sends to the part's owner: its `values`, float32 [n], behind `weight` tokens."""
        return Contribution(values, weight, self._config.encode(part, values), Gradient(values, weight))

    def settle(self, part: Part, made: Contribution, counted: bool | None) -> float:
        """Takes in whether the part's average has a contribution, None when unknown; returns the tokens now lost: 0."""
        return 0.0

    def forget(self, stage: int) -> None:
        """Does nothing: a round of weights leaves nothing for the next."""

    def combine(
        self, part: Part, values: Sequence[Tensor], weights: list[float], center: Tensor | None
    ) -> Average | None:
        """Returns the owner's average, weights capped; several that all weigh 0 count equally. center: of a clip."""
        if len(weights) > 1 and not any(weights):
            weights = [1.0] * len(weights)
        return aggregate(values, weights, self._config.aggregation, center=center, cap=True)

    def encode_answer(self, average: Average, values: Tensor) -> Sequence[WireTensor]:
        """Encodes average - values, the answer to the member that sent `values`; without dither."""
        return PartCodec(self._config.wire).encode(average.values - values)

    def own_answer(self, average: Average, values: Tensor) -> Tensor:
        """Returns average - values, the owner's answer to itself: it does not travel, so it is not rounded."""
        return average.values - values

    def encode_recalled(self, average: Average) -> Sequence[WireTensor]:
        """Encodes the average itself, as float32."""
        return PartCodec("float32").encode(average.values)

    def decode_recalled(self, part: Part, tensors: Sequence[WireTensor], numel: int, message: Averaged) -> Average:
        """Undoes `encode_recalled`; raises ProtocolError for tensors of another form."""
        return Average(PartCodec("float32").decode(list(tensors), numel), message)

    def decode_answer(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns the difference between the average and the values that were sent, float32 [numel]."""
        return PartCodec(self._config.wire).decode(list(tensors), numel)

    def answer_of_failed(self, values: Tensor) -> Tensor:
        """Returns zeros for a part that was not averaged: the weights stay as they are."""
        return zeros_like(values)

    def kept(self, part: Part, average: Average) -> Callable[[], Average]:
        """Returns a function that returns the owner's average again."""
        return lambda: average

    def kept_answer(
        self, part: Part, sent: Sequence[WireTensor], tensors: Sequence[WireTensor], answer: Tensor, message: Averaged
    ) -> Callable[[], Average]:
        """Returns a function that returns a part's average again: what was `sent`, decoded, plus the `answer` to it."""
        return lambda: Average(self._config.decode(part, sent, len(answer)) + answer, message)

    def check_and_record(self, part: Part, values: Tensor, answer: Tensor, message: Averaged) -> float:
        """Returns the root mean square of (values - average). Raises PeerFailed for a distance above Drift.limit.

        Either way a distance is recorded for `end_round`, unless a single member made the average: that says nothing.
        """
        distance, size, drift = magnitude(answer), magnitude(values), self._drifts[part.stage]
        recorded = self._recorded[part.stage]
        if why := drift.why_implausible(distance, size):
            if message.members > 1 and (counted := drift.after_rejection(size)) is not None:
                recorded.setdefault(part.part, counted)
            raise PeerFailed(why)
        recorded.pop(part.part, None)
        if message.members > 1:
            recorded[part.part] = Drift.after_acceptance(distance, message.distance)
        return distance

    def end_round(self, stage: int) -> None:
        """Takes the median of the parts' recorded distances into the stage's usual distance."""
        if recorded := self._recorded.pop(stage, None):
            self._drifts[stage] = self._drifts[stage].updated(statistics.median(recorded.values()))


class GradientRound:
    """Rounds of gradients of one exact step: owners answer by the average itself; methods as those of WeightRound.

    The average is encoded once, with the part's dither, and everybody uses what these bytes decode to, the owner too:
    so all replicas step along the same bits, whoever gave them the average, and whenever. In 2 to 4 bits members and
    owner feed back what their encoding loses, each into its next round: see GradientContributions and `combine`.
    """

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self._contributions = GradientContributions(config)
        self._owner_errors: dict[tuple[int, int], Tensor] = {}  # by stage and part
        self._sizes: defaultdict[tuple[int, int], GradientSize] = defaultdict(GradientSize)  # by stage and part

    def contribution(self, part: Part, values: Tensor, weight: float) -> Contribution:
        """Returns what a member sends of its mean gradient `values` over `weight` tokens, see GradientContributions."""
        return self._contributions.make(part, values, weight)

    def settle(self, part: Part, made: Contribution, counted: bool | None) -> float:
        """Takes in whether the part's average has a contribution, None when unknown; returns the tokens now lost."""
        return self._contributions.settle(part, made, counted)

    def forget(self, stage: int) -> None:
        """Drops what earlier rounds of a stage have left for later ones, as its state was fetched."""
        self._contributions.forget(stage)
        for place in [place for place in self._owner_errors if place[0] == stage]:
            del self._owner_errors[place]

    def combine(
        self, part: Part, values: Sequence[Tensor], weights: list[float], center: Tensor | None
    ) -> Average | None:
        """Returns the owner's average: by the run's aggregation, weights capped; the plain mean if synchronous.

        In few bits y = average + e is encoded, and e becomes y - decoded(encoded(y)).
        """
        if self._config.exact:
            average = aggregate(values, weights, "mean", center=None, cap=False)
        else:
            average = aggregate(values, weights, self._config.aggregation, center=center, cap=True)
        if average is None:
            return None
        wanted, coarse, place = average.values, self._config.is_coarse(part), (part.stage, part.part)
        if coarse and place in self._owner_errors:
            wanted = wanted + self._owner_errors[place]
        wire = self._config.encode(part, wanted)
        decoded = self._config.decode(part, wire, len(wanted))
        if coarse and len(values) > 1:  # nobody uses the average of one alone
            self._owner_errors[place] = wanted - decoded
        return Average(decoded, average.message, wire)

    def encode_answer(self, average: Average, values: Tensor) -> Sequence[WireTensor]:
        """Returns the encoded average: the same bytes for every member."""
        return average.wire

    def own_answer(self, average: Average, values: Tensor) -> Tensor:
        """Returns the average: the same bits that the other members get."""
        return average.values

    def encode_recalled(self, average: Average) -> Sequence[WireTensor]:
        """Returns the encoded average, the bytes that its owner has sent."""
        return average.wire

    def decode_recalled(self, part: Part, tensors: Sequence[WireTensor], numel: int, message: Averaged) -> Average:
        """Returns the average of which these are the bytes. Raises ProtocolError for tensors of another form."""
        return Average(self._config.decode(part, tensors, numel), message, tensors)

    def decode_answer(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns the average that an owner's answer brought, float32 [numel]."""
        return self._config.decode(part, tensors, numel)

    def answer_of_failed(self, values: Tensor) -> Tensor:
        """Returns the member's own gradient for a part that was not averaged."""
        return values

    def kept(self, part: Part, average: Average) -> Callable[[], Average]:
        """Returns a function that decodes the owner's average again; it holds the bytes only."""
        return partial(self.decode_recalled, part, average.wire, len(average.values), average.message)

    def kept_answer(
        self, part: Part, sent: Sequence[WireTensor], tensors: Sequence[WireTensor], answer: Tensor, message: Averaged
    ) -> Callable[[], Average]:
        """Returns a function that decodes an owner's answer, `tensors`, again; it holds these bytes only."""
        return partial(self.decode_recalled, part, tensors, len(answer), message)

    def check_and_record(self, part: Part, values: Tensor, answer: Tensor, message: Averaged) -> float:
        """Returns the root mean square of (values - average), sampled. Raises PeerFailed for too large a mean.

        The most is GradientSize.limit. An accepted mean moves the usual size. A synchronous run judges none.
        """
        if not self._config.exact:
            own, mean, usual = magnitude(values), magnitude(answer), self._sizes[part.stage, part.part]
            if why := usual.why_implausible(mean, own):
                raise PeerFailed(why)
            self._sizes[part.stage, part.part] = usual.updated(mean, own)
        return root_mean_square(answer, values)

    def end_round(self, stage: int) -> None:
        """Does nothing: `check_and_record` has recorded the sizes already."""


RoundKind = WeightRound | GradientRound


def round_kinds(config: RoundConfig) -> dict[str, RoundKind]:
    """Makes the two kinds of rounds, with keys "weights" and "gradient", the `what` of a Contribute message."""
    return {"weights": WeightRound(config), "gradient": GradientRound(config)}
