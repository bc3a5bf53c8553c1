"""Encodes and decodes what a round sends: contributions with error feedback, late gradients, and the mean.

A reducer encodes a mean once, and every replica, the reducer included, uses what these bytes decode to. So all replicas
apply the same bits, whichever replica sent them the mean, and at any time.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, cast

import torch
from agora_protocol.codec_names import NUMBER_FORMAT_NAMES, NumberFormatName
from agora_protocol.errors import PeerFailed
from agora_protocol.identity import verify
from agora_protocol.ids import PeerId, RunId
from agora_protocol.manifest import SignedManifest
from agora_protocol.manifest_sections import AveragingSection
from agora_protocol.messages import Averaged, Contribute, Recall
from agora_protocol.packing import pack as pack_message
from agora_protocol.parts import fragment_count, shard_elements
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import is_all_finite
from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import ALL_REDUCE
from agora.replica.number_formats import NORMAL_BITS, NumberFormat
from agora.replica.trust import MAX_MEAN_RATIO, MAX_MEAN_RATIO_SYNCHRONOUS, MagnitudeBound, fair_size

Aggregation = Literal["mean", "clip"]
RoundKind = Literal["gradient", "fragment"]  # what a round averages: all gradients, or the differences of one fragment
# Which reducer of a shard has signed a mean, as far as this peer knows the reducers. "nobody": the mean is unsigned, as
# that of a newcomer, or the zeros of a shard that no reducer could average.
Signer = Literal["first", "second", "other", "nobody", "invalid"]
MEAN_TAG: Final = b"agora mean 1\0"  # what a reducer's signature begins with
WIRE_KINDS: Final[Mapping[RoundKind, str]] = {"gradient": "gradient", "fragment": "slice"}
# Enough, since clipping begins near, at the reducer's own value: Karimireddy et al., ICML 2021.
CLIP_ITERATIONS: Final = 3
MIN_NORM, MAX_NORM = 1e-15, 1e15  # outside of these a norm is computed again in float64
# A contribution may be this many times as long as the lower median of all; a longer one is shortened to that.
MAX_TIMES_LONGER: Final = 2.0
# A weight may be this many times an equal part, which is 1 / n of n contributions; FEW_WEIGHT_CAP times where n is less
# than MIN_TO_CAP.
WEIGHT_CAP: Final = 1.5
FEW_WEIGHT_CAP: Final = 2.0
MIN_TO_CAP: Final = 4
# A mean's weight counts up to this many times the tokens that its steps should have.
MAX_TIMES_TARGET: Final = 2.0
# Minimum number of contributions for one to be called too long: of two, either could be right.
MIN_TO_COMPARE: Final = 3
MAX_WEIGHT_ROUNDS: Final = 64  # a contribution is refused if its weight exceeds the tokens of this number of rounds
# Number of initial gradients of a run that are sent as int8 where later ones take 2 to 4 bits: they vary the most.
INT8_ROUNDS: Final = 20
# int8 would decode zeros as what is left of the dither, so that no replica would take them for zeros.
ZERO_MEAN_FORMAT: Final[NumberFormatName] = "normal2"


# --- what a round averages


class RoundKey(NamedTuple):
    """What names one round of a stage: its kind, and its number among those of the kind."""

    stage: int
    kind: RoundKind
    round: int


class Shard(NamedTuple):
    """Names one shard of a round: one of the pieces into which the averaged vector is cut, each with its reducer."""

    stage: int
    kind: RoundKind
    round: int  # counts the rounds of this stage and kind; of a gradient, it is the step
    position: int  # within the round, from 0
    fragments: int = ALL_REDUCE  # how many the stage has; the round averages number round % fragments

    @classmethod
    def of_message(cls, message: Contribute | Recall) -> Shard:
        kind: RoundKind = "fragment" if message.what == WIRE_KINDS["fragment"] else "gradient"
        return cls(message.stage, kind, message.round, message.part, message.slices)

    @property
    def wire_kind(self) -> str:
        """The kind by its name in messages, events, and the strings that are hashed."""
        return WIRE_KINDS[self.kind]

    @property
    def round_key(self) -> RoundKey:
        return RoundKey(self.stage, self.kind, self.round)

    @property
    def region(self) -> Region:
        fragment = self.round % max(self.fragments, 1)
        return Region(self.stage, self.kind, self.fragments, fragment, self.position)


class Region(NamedTuple):
    """The elements of a stage that a shard averages: the key of what is kept from one round to the next."""

    stage: int
    kind: RoundKind
    fragments: int
    fragment: int  # 0 for gradients, whose shards cut the whole stage
    position: int


def cut_into_shards(numel: int) -> list[slice]:
    """Returns the shards of a vector of `numel` elements, in order, each of shard_elements; the last may be shorter."""
    size = shard_elements(numel)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """The manifest's settings for rounds, and this peer's id."""

    me: PeerId
    run: RunId
    aggregation: Aggregation
    round_s: float  # seconds that a round may take
    max_weight: float  # tokens above which a contribution is refused, unless amendments allow more
    synchronous: bool = False  # means are exact: no weight is capped, nothing is clipped
    gradient_wire: NumberFormatName = "float32"
    fragment_wire: NumberFormatName = "float32"
    # Returns how many tokens the step of a number should have.
    step_tokens: Callable[[int], float] = lambda _: math.inf
    every: int = 1  # steps from one sync to the next
    amended_max_weight: Callable[[], float] = lambda: 0.0
    # Returns the settings in force at a step, if the run can be amended.
    at_step: Callable[[int], RoundConfig] | None = None

    @classmethod
    def from_manifest(cls, signed: SignedManifest, me: PeerId, live: LiveManifest | None = None) -> RoundConfig:
        """live: the manifest in force at each step; None: the signed one at every step."""
        live = live or LiveManifest(signed.manifest)
        averaging = signed.manifest.averaging

        def greatest_weight() -> float:
            # A pass over all fragments is the longest time from one contribution of a weight to the next.
            pass_steps = max(_pass_steps(manifest.averaging) for manifest in live.of_all_steps)
            return MAX_WEIGHT_ROUNDS * live.greatest_target_tokens * pass_steps

        config = cls(
            me,
            signed.run_id,
            averaging.aggregation,
            averaging.round_s,
            max_weight=MAX_WEIGHT_ROUNDS * signed.manifest.optimizer.target_tokens * _pass_steps(averaging),
            amended_max_weight=greatest_weight,
            synchronous=signed.manifest.schedule.kind == "synchronous",
            step_tokens=live.target_tokens,
        ).with_section(averaging)
        return replace(config, at_step=lambda step: config.with_section(live.at(step).averaging))

    def with_section(self, averaging: AveragingSection) -> RoundConfig:
        """Returns the settings with those of a manifest's section [averaging]."""
        return replace(
            self,
            aggregation=averaging.aggregation,
            round_s=averaging.round_s,
            gradient_wire="float32" if self.synchronous else averaging.gradient_wire,
            fragment_wire="float32" if self.synchronous else averaging.slice_wire,
            every=averaging.every,
        )

    def of_round(self, shard: Shard) -> RoundConfig:
        """Returns the settings in force at the step that the shard's round averages."""
        return self if self.at_step is None else self.at_step(self._averaged_step(shard))

    def _averaged_step(self, shard: Shard) -> int:
        return shard.round if shard.kind == "gradient" else max(shard.round * self.every - 1, 0)

    @property
    def weight_limit(self) -> float:
        return max(self.max_weight, self.amended_max_weight())

    def planned_tokens(self, shard: Shard) -> float:
        """Returns over how many tokens all contributions to a shard should be computed together."""
        tokens = self.step_tokens(self._averaged_step(shard))
        return tokens if shard.kind == "gradient" else self.every * shard.fragments * tokens

    def believed_weight(self, shard: Shard, reported: float) -> float:
        """Returns a mean's weight in tokens, as its reducer `reported` it: at most MAX_TIMES_TARGET * the planned."""
        return min(reported, MAX_TIMES_TARGET * self.planned_tokens(shard), self.weight_limit)

    def dither_label(self, shard: Shard) -> str:
        """Returns the seed of the shard's dither (random rounding), the same at all members of the round."""
        return f"{self.run}\0{shard.stage}\0{shard.wire_kind}\0{shard.round}\0{shard.position}"


def _pass_steps(averaging: AveragingSection) -> int:
    return averaging.every * fragment_count(averaging.fraction)


# --- what a member sends, and a reducer answers


class EncodedShard(NamedTuple):
    """Encoded values of a shard, in one or two tensors, as NumberFormat makes them."""

    wire: NumberFormatName
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class WeightedValues(NamedTuple):
    """A replica's own values of one shard, float32 [n], and the tokens that they were computed over."""

    values: Tensor
    tokens: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member sends to the reducer of a shard."""

    values: Tensor  # float32 [n], before encoding
    weight: float  # tokens that the values were computed over
    encoded: EncodedShard
    own: WeightedValues  # this replica's values and tokens of this round, without residual and late gradient
    late_tokens: float = 0.0  # how many tokens of `weight` belong to the late gradient


@dataclass(frozen=True, slots=True)
class ShardMean:
    """The mean of one shard of a round. encoded: what `values` were decoded from; None before the mean is encoded."""

    values: Tensor  # float32 [n]
    message: Averaged  # how many members contributed, and over how many tokens; sent with it
    encoded: EncodedShard | None = None


class ImplausibleMean(PeerFailed):
    """Raised for a mean that is too large for this replica's own values and earlier means.

    is_false: whether no honest reducer can have made it, whatever the others have sent.
    """

    def __init__(self, text: str, *, is_false: bool) -> None:
        super().__init__(text)
        self.is_false = is_false


class ShardCodec:
    """Encodes what one peer sends in rounds, as member and as reducer; decodes means, and checks their magnitudes.

        x = (T g + T' g') / (T + T') + e        what a member sends
        e' = x - decode(encode(x))              what it keeps

    g, T: the replica's share of a gradient and its tokens; of a fragment, the difference to the outer parameters.
    g', T': the share of the step before if that came too late for its round; a late difference is in the fragment's
    next one anyway. e, e': the residual before and after (error feedback: Seide et al. 2014; Karimireddy et al. 2019,
    EF-SGD), only in 2 to 4 bits. A reducer feeds the error of its means back likewise.

    A member calls `make_contribution` for each shard, and `record_outcome` once the outcome is known. Where no replica
    has a mean, it calls `carry_over`. Any thread may call the methods, those of one region one after the other.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.config = config
        self._gradient_formats: dict[int, NumberFormatName] = {}
        self._residuals: dict[Region, Tensor] = {}
        self._late_gradients: dict[Region, WeightedValues] = {}
        self._mean_residuals: dict[Region, Tensor] = {}
        bound = MagnitudeBound(max_ratio=MAX_MEAN_RATIO_SYNCHRONOUS if config.synchronous else MAX_MEAN_RATIO)
        self._bounds: defaultdict[Region, MagnitudeBound] = defaultdict(lambda: bound)

    # --- formats

    def send_gradients_as(self, stage: int, wire: NumberFormatName) -> None:
        """Sets the format in which this peer sends the stage's gradients from now on, as member and as reducer."""
        self._gradient_formats[stage] = wire

    def format_of(self, shard: Shard) -> NumberFormatName:
        """Returns the format in which this peer now sends the shard's values, as member and as reducer."""
        config = self.config.of_round(shard)
        if shard.kind == "fragment":
            return config.fragment_wire
        chosen = self._gradient_formats.get(shard.stage, config.gradient_wire)
        # What was chosen for an earlier step may be more than an amendment allows at this one.
        wire = min(chosen, config.gradient_wire, key=NUMBER_FORMAT_NAMES.index)
        return "int8" if wire in NORMAL_BITS and shard.round < INT8_ROUNDS else wire

    def encode(self, shard: Shard, values: Tensor, wire: NumberFormatName) -> EncodedShard:
        return EncodedShard(wire, NumberFormat(wire).encode(values, self.config.dither_label(shard)))

    def decode(self, shard: Shard, encoded: EncodedShard, numel: int) -> Tensor:
        """Returns float32 [numel], the same bits at every receiver; raises ProtocolError for another form."""
        return NumberFormat(encoded.wire).decode(encoded.tensors, numel, self.config.dither_label(shard))

    # --- as a member

    def make_contribution(
        self, shard: Shard, values: Tensor, weight: float, wire: NumberFormatName | None = None
    ) -> Contribution:
        """Returns `values`, float32 [n], over `weight` tokens, with the region's late gradient and residual.

        Changes nothing; see record_outcome. wire: another format than format_of.
        """
        wire = wire or self.format_of(shard)
        own = WeightedValues(values, weight)
        late = self._late_gradients.get(shard.region)
        if late is not None and weight + late.tokens > 0:
            weight += late.tokens
            values = values.lerp(late.values, late.tokens / weight)
        if (residual := self._residuals.get(shard.region)) is not None and wire in NORMAL_BITS:
            values = values + residual
        return Contribution(values, weight, self.encode(shard, values, wire), own, late.tokens if late else 0.0)

    def record_outcome(self, shard: Shard, contribution: Contribution, counted: bool | None) -> float:
        """Keeps what the region's next contribution needs; returns how many tokens no later mean can contain.

        counted: whether the shard's mean has the contribution; None if unknown.
        """
        self._late_gradients.pop(shard.region, None)
        if counted is False and shard.kind == "gradient":
            # It came too late: it goes into the next one, and with it the former late gradient is lost. A late
            # difference needs nothing: the fragment's next one contains it.
            self._late_gradients[shard.region] = contribution.own
            return contribution.late_tokens
        if counted and contribution.encoded.wire in NORMAL_BITS:
            decoded = self.decode(shard, contribution.encoded, len(contribution.values))
            self._residuals[shard.region] = contribution.values - decoded
        # Of an unknown outcome nothing is kept: what may be in a mean is not sent again.
        return 0.0

    def carry_over(self, shard: Shard, values: Tensor, weight: float) -> None:
        """Keeps this replica's `values` of a shard without a mean as the late gradient of the next contribution."""
        self._late_gradients[shard.region] = WeightedValues(values, weight)

    def decode_mean(self, shard: Shard, tensors: Sequence[WireTensor], numel: int, message: Averaged) -> ShardMean:
        """Returns the mean, float32 [numel], that a reducer sent as `tensors`; raises ProtocolError as `decode`."""
        encoded = EncodedShard(cast("NumberFormatName", message.wire), tensors)
        return ShardMean(self.decode(shard, encoded, numel), message, encoded)

    def signed_bytes(self, shard: Shard, mean: ShardMean) -> bytes:
        """Returns what the reducer of a mean signs: all that its members take from it, see SPEC.md, section 12."""
        digest = hashlib.sha256()
        for tensor in mean.encoded.tensors if mean.encoded else ():
            digest.update(tensor.nbytes.to_bytes(8, "big"))
            digest.update(tensor.data)
        message = mean.message
        named = (shard.stage, shard.wire_kind, shard.round, shard.position, shard.fragments)
        values = (
            *named,
            message.in_mean,
            message.contributors,
            message.weight,
            message.wire,
            message.wanted_slices,
            digest.digest(),
        )
        return MEAN_TAG + bytes.fromhex(self.config.run) + pack_message(values)

    def is_signed(self, shard: Shard, mean: ShardMean) -> bool:
        """Returns whether the reducer that the mean names has signed it for this shard."""
        message = mean.message
        return verify(PeerId(message.reducer), self.signed_bytes(shard, mean), message.signature)

    def find_signer(self, shard: Shard, mean: ShardMean, reducers: tuple[PeerId, PeerId | None]) -> Signer:
        """Returns which reducer has signed the mean. reducers: the first and the second of the shard."""
        message = mean.message
        if not message.contributors and mean.values.any():
            return "invalid"
        if not message.reducer and not message.signature:
            return "nobody"
        if not self.is_signed(shard, mean):
            return "invalid"
        first, second = reducers
        return "first" if message.reducer == first else "second" if message.reducer == second else "other"

    def check_signature(self, shard: Shard, mean: ShardMean, reducers: Collection[PeerId | None]) -> None:
        """Raises PeerFailed unless one of these reducers of the shard has signed the mean."""
        if mean.message.reducer not in reducers or not self.is_signed(shard, mean):
            raise PeerFailed("the mean is not signed by a reducer of the shard")

    def why_implausible(self, shard: Shard, own: WeightedValues, mean: Tensor, members: int) -> str:
        """Returns why `mean` cannot be the shard's mean, or "". own: this replica's values, 0 where it has none."""
        own_size = fair_size(magnitude(own.values), own.tokens, self.config.planned_tokens(shard), members)
        return self._bounds[shard.region].why_implausible(magnitude(mean), own_size)

    def check_magnitude(self, shard: Shard, own: WeightedValues, mean: Tensor, members: int) -> None:
        """Raises ImplausibleMean if `mean` is too large; otherwise updates the MagnitudeBound of the shard's region.

        own: this replica's values of the shard.
        """
        mean_size = magnitude(mean)
        own_size = fair_size(magnitude(own.values), own.tokens, self.config.planned_tokens(shard), members)
        bound = self._bounds[shard.region]
        if why := bound.why_implausible(mean_size, own_size):
            raise ImplausibleMean(why, is_false=bound.is_false(mean_size, own_size))
        self._bounds[shard.region] = bound.after_accepted_mean(mean_size, own_size)

    # --- as a reducer

    def average(
        self, shard: Shard, values: Sequence[Tensor], weights: Sequence[float], center: Tensor | None
    ) -> ShardMean | None:
        """Averages the contributions `values`, float32 [n] each, over `weights` tokens; encodes and decodes the mean.

        center: see `aggregate`. Returns None, and changes nothing, when every weight is 0 or the mean is not finite.
        """
        exact = self.config.synchronous
        aggregation = "mean" if exact else self.config.of_round(shard).aggregation
        usual_length = self._bounds[shard.region].usual * math.sqrt(len(values[0])) if exact else 0.0
        mean = aggregate(values, weights, aggregation, center=center, exact=exact, usual_length=usual_length)
        if mean is None:
            return None
        wire = self.format_of(shard)
        feeds_back = wire in NORMAL_BITS
        compensated = mean.values
        if feeds_back and shard.region in self._mean_residuals:
            compensated = compensated + self._mean_residuals[shard.region]
        if not exact:
            # Where one member still has the large values of earlier steps, the others would reject a mean with them.
            sent = [magnitude(each) for each, weight in zip(values, weights, strict=True) if weight > 0]
            most, size = self._bounds[shard.region].largest_to_send(sent), magnitude(compensated)
            compensated = compensated * (most / size) if size > most else compensated
        encoded = self.encode(shard, compensated, wire)
        decoded = self.decode(shard, encoded, len(compensated))
        if feeds_back and len(values) > 1:  # no replica uses the mean of one contribution alone
            self._mean_residuals[shard.region] = compensated - decoded
        return ShardMean(decoded, replace(mean.message, wire=wire), encoded)

    def make_zero_mean(self, shard: Shard, numel: int) -> ShardMean:
        """Returns a mean of zeros, float32 [numel], without contributors: for a shard whose mean no replica keeps."""
        encoded = self.encode(shard, torch.zeros(numel), ZERO_MEAN_FORMAT)
        message = Averaged(in_mean=0, contributors=0, weight=0.0, counted=False, wire=encoded.wire)
        return ShardMean(self.decode(shard, encoded, numel), message, encoded)

    def drop_stage(self, stage: int) -> None:
        """Drops residuals and late gradients of a stage whose state was replaced by another replica's; keeps bounds."""
        for kept in (self._residuals, self._late_gradients, self._mean_residuals):
            # A thread may be adding some to it.
            for region in [region for region in tuple(kept) if region.stage == stage]:
                kept.pop(region, None)


# --- the mean


def aggregate(
    contributions: Sequence[Tensor],
    weights: Sequence[float],
    aggregation: Aggregation,
    *,
    center: Tensor | None,
    exact: bool = False,
    usual_length: float = 0.0,
) -> ShardMean | None:
    """Returns the weighted mean, or the centered clip, of `contributions`, float32 [n] each and finite, not encoded.

    Weights and lengths are limited first, see cap_weights and shorten; the message has the sum of the weights as they
    were before. exact: no weight is limited, and only absurd lengths are. usual_length: of earlier means; 0 if none is
    known. center: the start value of a clip; None: the median of each coordinate. Returns None when every weight is 0
    or the mean is not finite.
    """
    # A contribution of weight 0 adds no values, but counts as a contributor.
    weighted = [(values, weight) for values, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not weighted:
        return None
    values = [value for value, _ in weighted]
    tokens = [weight for _, weight in weighted]
    values = shorten(values, tokens, MAX_MEAN_RATIO_SYNCHRONOUS if exact else MAX_TIMES_LONGER, usual_length)
    limited = tokens if exact else cap_weights(tokens)
    fractions = [weight / sum(limited) for weight in limited]
    mean = _mean(values, fractions) if aggregation == "mean" else _clip(values, fractions, center)
    if not is_all_finite(mean):
        return None
    return ShardMean(mean, Averaged(len(values), len(contributions), sum(tokens), counted=True, wire="float32"))


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Returns the n `weights`, all above 0, with the largest lowered until none exceeds WEIGHT_CAP / n of their sum."""
    factor = WEIGHT_CAP if len(weights) >= MIN_TO_CAP else FEW_WEIGHT_CAP
    ordered = sorted(weights, reverse=True)
    for lowered, largest_kept in enumerate(ordered):
        cap = factor * sum(ordered[lowered:]) / (len(ordered) - factor * lowered)
        if largest_kept <= cap:
            break
    return [min(weight, cap) for weight in weights]


def shorten(
    values: Sequence[Tensor],
    weights: Sequence[float],
    times_longer: float = MAX_TIMES_LONGER,
    usual_length: float = 0.0,
) -> list[Tensor]:
    """Returns the contributions `values`, float32 [n] each, with those that are too long scaled down to their limit.

    The limit of the Euclidean length x of a contribution over w tokens is times_longer * max(median(x),
    median(x sqrt(w)) / sqrt(w), usual_length), with lower medians over all: a contribution over fewer
    tokens has more noise, and is longer. usual_length: of earlier means; a contribution of that length is not too long,
    even if all others are short this time.
    """
    # Without this one contribution of 1e30 makes the mean implausible for every replica, and all lose the step.
    if len(values) < MIN_TO_COMPARE:
        return list(values)
    lengths = [_norm(value) for value in values]
    median_length = statistics.median_low(lengths)
    median_of_one_token = statistics.median_low([x * math.sqrt(w) for x, w in zip(lengths, weights, strict=True)])
    least = max(median_length, usual_length)
    limits = [times_longer * max(least, median_of_one_token / math.sqrt(weight)) for weight in weights]
    return [
        value * (limit / length) if 0.0 < limit < length < math.inf else value
        for value, length, limit in zip(values, lengths, limits, strict=True)
    ]


def magnitude(values: Tensor) -> float:
    """Returns the root mean square of `values`, 0 if empty."""
    # Of all elements: with a sample of them, a peer that knows the sample could send anything in the others.
    return _norm(values) / math.sqrt(max(1, len(values)))


def _norm(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm if MIN_NORM < norm < MAX_NORM else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _mean(values: Sequence[Tensor], fractions: Sequence[float]) -> Tensor:
    # x0 + sum of fraction * (x - x0): the mean of equal values is exactly that value.
    mean = values[0]
    for value, fraction in zip(values[1:], fractions[1:], strict=True):
        mean = torch.add(mean, value - values[0], alpha=fraction)
    return mean


def _clip(values: Sequence[Tensor], fractions: Sequence[float], center: Tensor | None) -> Tensor:
    # CLIP_ITERATIONS times v += sum of fraction * (x - v) * min(1, tau / |x - v|), from `center` or the lower median of
    # each coordinate. tau is the lower median of the |x - v| that are not 0: so half of the contributors cannot choose
    # it.
    clipped = (torch.stack(list(values)).median(dim=0).values if center is None else center).clone()
    for _ in range(CLIP_ITERATIONS):
        distances = [_norm(value - clipped) for value in values]
        nonzero = [distance for distance in distances if distance > 0]
        if not nonzero:
            break
        tau = statistics.median_low(nonzero)
        change = torch.zeros_like(clipped)
        for value, fraction, distance in zip(values, fractions, distances, strict=True):
            if distance > 0:
                change.add_(value - clipped, alpha=fraction * min(1.0, tau / distance))
        clipped += change
    return clipped
