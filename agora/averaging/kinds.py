"""What a round of weights and a round of gradients have in common, and what each does in its own way.

Knows: the run's averaging configuration, parts and their values. Must not know: owners, calls, deadlines.

| | WeightRound | GradientRound |
|---|---|---|
| averages | a slice of the weights, float32 [n] | the mean gradient of a step, float32 [n] |
| an owner answers | average - values: the member keeps its own rounding | the average: the same bits for everyone |
| a part that failed | is not changed (0) | is the member's own |
| contributions that all have weight 0 | count equally: newcomers among themselves | make no average |
| a member rejects an average | that lies too far from its own values (Drift) | that is too large (GradientSize) |
| in a synchronous run | as ever | an exact weighted mean: no cap, no clip, nothing is rejected |
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agora_protocol.errors import PeerFailed
from agora_protocol.ids import PeerId, RunId
from agora_protocol.tensors import WireTensor
from torch import Tensor, zeros_like

from agora.averaging.aggregate import Aggregate, Rule, aggregate, magnitude, root_mean_square
from agora.averaging.plausibility import Drift, GradientSize
from agora.averaging.wire import Dither, PartCodec, WireName


class Part(NamedTuple):
    """Names a part of a round, as Contribute does. what: "weights" or "gradient"."""

    stage: int
    what: str
    number: int
    part: int

    @property
    def round(self) -> tuple[int, str, int]:
        """The round that the part belongs to."""
        return self[:3]


@dataclass(frozen=True, slots=True)
class Average:
    """The average of a part, float32 [n], and what Averaged says of it."""

    values: Tensor
    members: int
    present: int
    weight: float
    distance: float


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """What all members of a run agree on about rounds, and this peer's id.

    round_s: seconds until a round ends. max_weight: tokens above which a contribution is refused. exact: whether mean
    gradients are exact weighted means, as in synchronous runs.
    """

    me: PeerId
    run: RunId
    rule: Rule
    wire: WireName
    round_s: float
    max_weight: float
    exact: bool = False

    @property
    def codec(self) -> PartCodec:
        """The codec of parts on the wire."""
        return PartCodec(self.wire)

    def dither(self, part: Part) -> Dither:
        """Returns what all members add to this part's elements before rounding."""
        return Dither(f"{self.run}\0{part.stage}\0{part.what}\0{part.number}\0{part.part}")

    def encode(self, part: Part, values: Tensor) -> list[WireTensor]:
        """Returns a member's values as it contributes them."""
        return self.codec.encode(values, self.dither(part))

    def decode(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns contributed values, float32 [numel], as every receiver has them. Raises ProtocolError."""
        return self.codec.decode(list(tensors), numel, self.dither(part))


class Implausible(PeerFailed):
    """An average was rejected because of its size."""


class RoundKind(ABC):
    """What an owner and a member do in their own way in rounds of one kind; one instance of each kind for a daemon."""

    def __init__(self, config: RoundConfig) -> None:
        self._config = config

    def combine(self, values: Sequence[Tensor], weights: list[float], center: Tensor | None) -> Aggregate | None:
        """Returns the owner's average of contributions, by the run's rule. center: where a centered clip begins."""
        return aggregate(values, weights, self._config.rule, center=center, cap=True)

    @abstractmethod
    def encode_answer(self, part: Part, average: Tensor, values: Tensor) -> list[WireTensor]:
        """Returns what an owner answers to a member, `values` being that member's as the owner decoded them."""

    @abstractmethod
    def own_answer(self, part: Part, average: Tensor, values: Tensor) -> Tensor:
        """Returns the owner's answer to itself, as if it had travelled."""

    @abstractmethod
    def decode_answer(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns an owner's answer, float32 [numel]. Raises ProtocolError."""

    @abstractmethod
    def distance(self, answer: Tensor, values: Tensor) -> float:
        """Returns the root mean square of (values - average)."""

    @abstractmethod
    def answer_of_failed(self, values: Tensor) -> Tensor:
        """Returns what stands for the answer of a part that failed."""

    @abstractmethod
    def recalled(self, part: Part, sent: Sequence[WireTensor], answer: Tensor) -> Tensor:
        """Returns a part's average again, from what this member has sent and the answer to it."""

    @abstractmethod
    def check(self, part: Part, values: Tensor, answer: Tensor, distance: float, members: int) -> None:
        """Raises Implausible for an answer that must not be used. distance: see `distance`; members: in the average."""

    def accept(self, part: Part, distance: float, median: float, members: int) -> None:  # noqa: B027
        """Records that an average was used. median: of the members' distances, as the owner says."""

    def end_round(self, stage: int) -> None:  # noqa: B027
        """Takes what was recorded of a stage's round into what is usual."""


class WeightRound(RoundKind):
    """Rounds that average a slice of the weights."""

    def __init__(self, config: RoundConfig) -> None:
        super().__init__(config)
        self._drifts: defaultdict[int, Drift] = defaultdict(Drift)
        self._recorded: defaultdict[int, dict[int, float]] = defaultdict(dict)  # of the running round: stage, part

    def combine(self, values: Sequence[Tensor], weights: list[float], center: Tensor | None) -> Aggregate | None:
        """As RoundKind; newcomers among themselves count equally."""
        if len(weights) > 1 and not any(weights):
            weights = [1.0] * len(weights)
        return super().combine(values, weights, center)

    def encode_answer(self, part: Part, average: Tensor, values: Tensor) -> list[WireTensor]:
        """Encodes the difference between the average and the member's values, without dither."""
        return self._config.codec.encode(average - values)

    def own_answer(self, part: Part, average: Tensor, values: Tensor) -> Tensor:
        """Returns the difference, without the rounding of a difference that need not travel."""
        return average - values

    def decode_answer(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns the difference between the average and the values that were sent."""
        return self._config.codec.decode(list(tensors), numel)

    def distance(self, answer: Tensor, values: Tensor) -> float:
        """Returns the size of the difference, over all elements."""
        return magnitude(answer)

    def answer_of_failed(self, values: Tensor) -> Tensor:
        """Returns zeros: the weights stay as they are."""
        return zeros_like(values)

    def recalled(self, part: Part, sent: Sequence[WireTensor], answer: Tensor) -> Tensor:
        """Returns the values that were sent, as the owner decoded them, plus the difference."""
        return self._config.decode(part, sent, len(answer)) + answer

    def check(self, part: Part, values: Tensor, answer: Tensor, distance: float, members: int) -> None:
        """Raises Implausible for an average too far away; it still moves the usual distance, if several made it."""
        size, drift = magnitude(values), self._drifts[part.stage]
        if why := drift.why_implausible(distance, size):
            if members > 1 and (counted := drift.after_rejection(size)) is not None:
                self._recorded[part.stage].setdefault(part.part, counted)
            raise Implausible(why)

    def accept(self, part: Part, distance: float, median: float, members: int) -> None:
        """Records the part's distance; an average of a single member says nothing."""
        self._recorded[part.stage].pop(part.part, None)
        if members > 1:
            self._recorded[part.stage][part.part] = Drift.after_acceptance(distance, median)

    def end_round(self, stage: int) -> None:
        """Takes the median of the parts' recorded distances into the stage's usual distance."""
        if recorded := self._recorded.pop(stage, None):
            self._drifts[stage] = self._drifts[stage].updated(statistics.median(recorded.values()))


class GradientRound(RoundKind):
    """Rounds that average the replicas' gradients of one exact step."""

    def __init__(self, config: RoundConfig) -> None:
        super().__init__(config)
        self._sizes: defaultdict[tuple[int, int], GradientSize] = defaultdict(GradientSize)  # by stage and part

    def combine(self, values: Sequence[Tensor], weights: list[float], center: Tensor | None) -> Aggregate | None:
        """As RoundKind; in a synchronous run the plain mean by tokens."""
        if self._config.exact:
            return aggregate(values, weights, "mean", center=None, cap=False)
        return super().combine(values, weights, center)

    def encode_answer(self, part: Part, average: Tensor, values: Tensor) -> list[WireTensor]:
        """Encodes the average itself, with the part's dither."""
        return self._config.encode(part, average)

    def own_answer(self, part: Part, average: Tensor, values: Tensor) -> Tensor:
        """Returns the average after encoding and decoding: the same bits as for the other members."""
        return self._config.decode(part, self._config.encode(part, average), len(values))

    def decode_answer(self, part: Part, tensors: Sequence[WireTensor], numel: int) -> Tensor:
        """Returns the average."""
        return self._config.decode(part, tensors, numel)

    def distance(self, answer: Tensor, values: Tensor) -> float:
        """Returns the distance on an even sample of the elements."""
        return root_mean_square(answer, values)

    def answer_of_failed(self, values: Tensor) -> Tensor:
        """Returns the member's own gradient."""
        return values

    def recalled(self, part: Part, sent: Sequence[WireTensor], answer: Tensor) -> Tensor:
        """Returns the answer, which is the average."""
        return answer

    def check(self, part: Part, values: Tensor, answer: Tensor, distance: float, members: int) -> None:
        """Raises Implausible for a mean gradient much larger than usual; else takes its size into the usual one."""
        if self._config.exact:
            return
        own, mean, usual = magnitude(values), magnitude(answer), self._sizes[part.stage, part.part]
        if why := usual.why_implausible(mean, own):
            raise Implausible(why)
        self._sizes[part.stage, part.part] = usual.updated(mean, own)


def round_kinds(config: RoundConfig) -> dict[str, RoundKind]:
    """Returns both kinds by the word that Contribute has for them."""
    return {"weights": WeightRound(config), "gradient": GradientRound(config)}
