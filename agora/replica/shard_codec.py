"""What a round sends, as bytes: number formats, error feedback, late gradients, and the mean.

A reducer encodes a mean once, and every replica, the reducer included, uses what these bytes decode to. So all replicas
apply the same bits, whichever replica sent them the mean, and at any time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import torch
from agora_protocol.codec_names import WireName, packed_bytes
from agora_protocol.errors import PeerFailed, ProtocolError
from agora_protocol.identity import verify
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute, Recall
from agora_protocol.packing import pack as pack_message
from agora_protocol.parts import fragment_count, shard_elements
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agora.codec import decode_uncompressed, encode_uncompressed, is_all_finite
from agora.codec.bit_packing import pack, unpack
from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import ALL_REDUCE
from agora.replica.trust import MAX_RATIO, MAX_RATIO_SYNCHRONOUS, MagnitudeBound, fair_size

# Bits of an element, by the name of each format that is sent with error feedback.
NORMAL_BITS: Final[Mapping[str, int]] = {"normal2": 2, "normal3": 3, "normal4": 4}
MAX_LEVEL: Final = 126.0  # largest magnitude of int8 before dither, so that it never clips
MIN_EXPONENT, MAX_EXPONENT = -120, 100
# Shards whose dither is cached, half a MiB to 2 MiB each: about as many as are being sent at the same time.
CACHED_SHARDS: Final = 32
# The positive half of the levels, by the number of bits; the negative half is its mirror image.
POSITIVE_LEVELS: Final = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
MAX_SCALE_EXPONENT: Final = 100  # bound of a vector's exponent e, -100 to 100; scales are at most 2^100
SCALES_PER_OCTAVE: Final = 8  # A block's scale is 2^(e - c / 8) with a whole code c: eight scales for each power of two
ZERO_SCALE: Final = 255  # the scale code of a block whose values are all decoded as 0
_SCALES: Final = torch.tensor(
    [2.0 ** (-code / SCALES_PER_OCTAVE) for code in range(ZERO_SCALE)] + [0.0], dtype=torch.float32
)

Aggregation = Literal["mean", "clip"]
RoundKind = Literal["gradient", "fragment"]  # what a round averages: all gradients, or the differences of one fragment
MEAN_TAG: Final = b"agora mean 1\0"  # what a reducer's signature begins with
WIRE_KINDS: Final[Mapping[RoundKind, str]] = {"gradient": "gradient", "fragment": "slice"}
# Enough, since clipping begins near, at the reducer's own value: Karimireddy et al., ICML 2021.
CLIP_ITERATIONS: Final = 3
MIN_NORM, MAX_NORM = 1e-15, 1e15  # outside of these a norm is computed again in float64
# A contribution may be this many times as long as the lower median of all; a longer one is shortened to that.
MAX_TIMES_LONGER: Final = 2.0
# A weight may be this many times its fair part, 1 / n of n contributions; of fewer than MIN_TO_CAP, FEW_WEIGHT_CAP.
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
    def what(self) -> str:
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
    gradient_wire: WireName = "float32"
    fragment_wire: WireName = "float32"
    # Returns how many tokens the step of a number should have.
    step_tokens: Callable[[int], float] = lambda _: math.inf
    pass_steps: int = 1  # from one sync of a fragment to its next, if the stage has most fragments
    every: int = 1  # steps from one sync to the next
    amended_weight: Callable[[], float] = lambda: 0.0

    @classmethod
    def from_manifest(cls, signed: SignedManifest, me: PeerId, live: LiveManifest | None = None) -> RoundConfig:
        """live: what holds at each step; None: the signed manifest at all."""
        live = live or LiveManifest(signed.manifest)
        averaging = signed.manifest.averaging
        # A pass over all fragments is the longest time from one contribution of a weight to the next.
        pass_steps = averaging.every * fragment_count(averaging.fraction)
        synchronous = signed.manifest.schedule.kind == "synchronous"
        return cls(
            me,
            signed.run_id,
            averaging.aggregation,
            averaging.round_s,
            max_weight=MAX_WEIGHT_ROUNDS * signed.manifest.optimizer.target_tokens * pass_steps,
            amended_weight=lambda: MAX_WEIGHT_ROUNDS * live.greatest_target_tokens * pass_steps,
            synchronous=synchronous,
            gradient_wire="float32" if synchronous else averaging.gradient_wire,
            fragment_wire="float32" if synchronous else averaging.slice_wire,
            step_tokens=live.target_tokens,
            pass_steps=pass_steps,
            every=averaging.every,
        )

    @property
    def weight_limit(self) -> float:
        return max(self.max_weight, self.amended_weight())

    def planned_tokens(self, shard: Shard) -> float:
        """Returns how many tokens should be behind all contributions to a shard together."""
        if shard.kind == "gradient":
            return self.step_tokens(shard.round)
        return self.pass_steps * self.step_tokens(max(shard.round * self.every - 1, 0))

    def believed_weight(self, shard: Shard, reported: float) -> float:
        """Returns the tokens behind a mean, as `reported` by its reducer, at most MAX_TIMES_TARGET of the planned."""
        return min(reported, MAX_TIMES_TARGET * self.planned_tokens(shard), self.weight_limit)

    def dither_label(self, shard: Shard) -> str:
        """Returns the seed of the shard's dither (random rounding), the same at all members of the round."""
        return f"{self.run}\0{shard.stage}\0{shard.what}\0{shard.round}\0{shard.position}"


# --- what a member sends, and a reducer answers


class EncodedShard(NamedTuple):
    """Encoded values of a shard, in one or two tensors, as NumberFormat makes them."""

    wire: WireName
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class WeightedValues(NamedTuple):
    """A replica's own values of one shard, float32 [n], and the tokens behind them."""

    values: Tensor
    tokens: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member sends to the reducer of a shard."""

    values: Tensor  # float32 [n], before encoding
    weight: float  # tokens behind the values
    encoded: EncodedShard
    own: WeightedValues  # this replica's values and tokens of this round, without residual and late gradient
    late_tokens: float = 0.0  # how many tokens of `weight` belong to the late gradient


@dataclass(frozen=True, slots=True)
class ShardMean:
    """The mean of one shard of a round. encoded: what `values` were decoded from; None before the mean is encoded."""

    values: Tensor  # float32 [n]
    message: Averaged  # how many members contributed, and the tokens behind the mean; sent with it
    encoded: EncodedShard | None = None


class ImplausibleMean(PeerFailed):
    """Raised for a mean that is too large for this replica's own values and earlier means."""


class ShardCodec:
    """Encodes what one peer sends in rounds, as member and as reducer; decodes means, and checks their magnitudes.

        x = (T g + T' g') / (T + T') + e        what a member sends
        e' = x - decode(encode(x))              what it keeps

    g, T: the replica's share of a gradient and its tokens; of a fragment, the difference to the outer parameters.
    g', T': the share of the step before if that came too late for its round; a late difference is in the fragment's
    next one anyway. e, e': the residual before and after (error feedback: Seide et al. 2014; Karimireddy et al. 2019,
    EF-SGD), only in 2 to 4 bits. A reducer feeds the error of its means back likewise.

    A member calls make_contribution for each shard and then record_outcome; carry_over where no reducer has a mean. Any
    thread may call the methods, those of one region one after the other.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.config = config
        self._gradient_formats: dict[int, WireName] = {}
        self._residuals: dict[Region, Tensor] = {}
        self._late_gradients: dict[Region, WeightedValues] = {}
        self._mean_residuals: dict[Region, Tensor] = {}
        bound = MagnitudeBound(max_ratio=MAX_RATIO_SYNCHRONOUS if config.synchronous else MAX_RATIO)
        self._bounds: defaultdict[Region, MagnitudeBound] = defaultdict(lambda: bound)

    # --- formats

    def send_gradients_as(self, stage: int, wire: WireName) -> None:
        """From now on this peer sends the stage's gradients in format `wire`, as member and as reducer."""
        self._gradient_formats[stage] = wire

    def format_of(self, shard: Shard) -> WireName:
        """Returns the format in which this peer now sends the shard's values, as member and as reducer."""
        if shard.kind == "fragment":
            return self.config.fragment_wire
        wire = self._gradient_formats.get(shard.stage, self.config.gradient_wire)
        return "int8" if wire in NORMAL_BITS and shard.round < INT8_ROUNDS else wire

    def encode(self, shard: Shard, values: Tensor, wire: WireName) -> EncodedShard:
        return EncodedShard(wire, NumberFormat(wire).encode(values, self.config.dither_label(shard)))

    def decode(self, shard: Shard, encoded: EncodedShard, numel: int) -> Tensor:
        """Returns float32 [numel], the same bits at every receiver; raises ProtocolError for another form."""
        return NumberFormat(encoded.wire).decode(encoded.tensors, numel, self.config.dither_label(shard))

    # --- as a member

    def make_contribution(
        self, shard: Shard, values: Tensor, weight: float, wire: WireName | None = None
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
        encoded = EncodedShard(cast("WireName", message.wire), tensors)
        return ShardMean(self.decode(shard, encoded, numel), message, encoded)

    def signed_bytes(self, shard: Shard, mean: ShardMean) -> bytes:
        """Returns what the reducer of a mean signs: all that its members take from it, see SPEC.md, section 12."""
        digest = hashlib.sha256()
        for tensor in mean.encoded.tensors if mean.encoded else ():
            digest.update(tensor.nbytes.to_bytes(8, "big"))
            digest.update(tensor.data)
        message = mean.message
        named = (shard.stage, shard.what, shard.round, shard.position, shard.fragments)
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

    def check_signature(self, shard: Shard, mean: ShardMean, reducers: Collection[PeerId | None]) -> None:
        """Raises PeerFailed unless one of these reducers of the shard has signed the mean."""
        if mean.message.reducer not in reducers or not self.is_signed(shard, mean):
            raise PeerFailed("the mean is not signed by a reducer of the shard")

    def why_implausible(self, shard: Shard, own: WeightedValues, mean: Tensor, members: int) -> str:
        """Returns why `mean` cannot be the shard's, or "". own: this replica's values, 0 where it has none."""
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
            raise ImplausibleMean(why)
        self._bounds[shard.region] = bound.after_accepted_mean(mean_size, own_size)

    # --- as a reducer

    def average(
        self, shard: Shard, values: Sequence[Tensor], weights: Sequence[float], center: Tensor | None
    ) -> ShardMean | None:
        """Averages the contributions `values`, float32 [n] each, over `weights` tokens; encodes and decodes the mean.

        center: see `aggregate`. Returns None, and changes nothing, when every weight is 0 or the mean is not finite.
        """
        exact = self.config.synchronous
        aggregation = "mean" if exact else self.config.aggregation
        usual_length = self._bounds[shard.region].usual * math.sqrt(len(values[0])) if exact else 0.0
        mean = aggregate(values, weights, aggregation, center=center, exact=exact, usual_length=usual_length)
        if mean is None:
            return None
        wire = self.format_of(shard)
        feeds_back = wire in NORMAL_BITS
        compensated = mean.values
        if feeds_back and shard.region in self._mean_residuals:
            compensated = compensated + self._mean_residuals[shard.region]
        encoded = self.encode(shard, compensated, wire)
        decoded = self.decode(shard, encoded, len(compensated))
        if feeds_back and len(values) > 1:  # no replica uses the mean of one contribution alone
            self._mean_residuals[shard.region] = compensated - decoded
        return ShardMean(decoded, replace(mean.message, wire=wire), encoded)

    def make_zero_mean(self, shard: Shard, numel: int) -> ShardMean:
        """Returns a mean of zeros, float32 [numel], without contributors: for a shard whose mean no replica keeps."""
        encoded = self.encode(shard, torch.zeros(numel), self.format_of(shard))
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

    Weights and lengths are limited first, see cap_weights and shorten; the message has the weight before that. exact:
    no weight is, and only absurd lengths. usual_length: of earlier means; 0 if none is known. center: the start value
    of a clip; None: the median of each coordinate. Returns None when every weight is 0 or the mean is not finite.
    """
    # A contribution of weight 0 adds no values, but counts as a contributor.
    weighted = [(values, weight) for values, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not weighted:
        return None
    values = [value for value, _ in weighted]
    tokens = [weight for _, weight in weighted]
    values = shorten(values, tokens, MAX_RATIO_SYNCHRONOUS if exact else MAX_TIMES_LONGER, usual_length)
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
    median(x sqrt(w)) / sqrt(w), usual_length), with lower medians over all: one over fewer tokens holds more noise, and
    is longer. usual_length: of earlier means, beside which a length is not absurd although the others' are short now.
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


# --- number formats
#
# int8 is meant for values on which replicas nearly agree. A block's scale is a power of two, so that nearly equal
# blocks are rounded to the same grid. Before rounding, every member adds the same pseudo-random fraction to an element,
# and decoding subtracts it again (subtractive dither, L. Roberts 1962). So the difference of two members' decoded
# values is unbiased, and exactly 0 where they agree.
#
# normal2 to normal4: a value x of a block of QUANTISER_BLOCK elements becomes the level nearest to x / scale, the scale
# being the block's root mean square. The levels have the least mean squared error for a normal distribution (Lloyd
# 1982; Max 1960). The error is not random: a sender of successive gradients therefore uses error feedback.


class NumberFormat:
    """Encodes a shard's float32 values as wire tensors, and decodes them, in the number format `name`.

    name: float32, bf16, int8 (with an exponent for each block, and optional dither), or normal2 to normal4 (2 to 4 bits
    with a scale for each block, see `quantise`).
    """

    def __init__(self, name: WireName) -> None:
        self.name = name

    def encode(self, values: Tensor, dither: str | None = None) -> list[WireTensor]:
        """Returns `values`, float32 [n] on the CPU and finite, as wire tensors; float32 ones share their memory.

        int8 clips magnitudes above about 2^107; normal2 to normal4 treat a block's root mean square as at most 2^100.
        dither: the label for dither_fractions, which int8 adds before it rounds; `decode` needs the same label.
        """
        if self.name in NORMAL_BITS:
            return quantise(values, NORMAL_BITS[self.name])
        if self.name != "int8":
            return [encode_uncompressed(values, self.name)]
        rows = _block_rows(values)
        buffer = rows.abs()
        peaks = buffer.amax(dim=1).div_(MAX_LEVEL).clamp_(2.0 ** (MIN_EXPONENT - 1), 2.0 ** (MAX_EXPONENT - 1))
        exponents = (peaks.numpy().view(np.int32) >> 23) - 126  # exponent of the next power of two above
        scaled = torch.mul(rows, _powers_of_two(-exponents), out=buffer).view(-1)[: len(values)]
        if dither is not None:
            scaled.add_(dither_fractions(dither, len(values)))
        levels = scaled.round_().clamp_(-127.0, 127.0).to(torch.int8)
        arrays = (levels.numpy(), exponents.astype(np.int8))
        return [WireTensor("int8", array.shape, array.view(np.uint8).data) for array in arrays]

    def decode(self, tensors: Sequence[WireTensor], numel: int, dither: str | None = None) -> Tensor:
        """Returns what `encode` encoded, as the format rounds it: float32 [numel], finite, the same at every receiver.

        Raises ProtocolError ("bad-tensor") for tensors of another form, and for values that are not finite.
        """
        if self.name in NORMAL_BITS:
            return dequantise(list(tensors), numel, NORMAL_BITS[self.name])
        if self.name != "int8":
            if len(tensors) != 1:
                raise ProtocolError("bad-tensor", f"A shard is one tensor, not {len(tensors)}.")
            values = decode_uncompressed(tensors[0], self.name, shape=(numel,))
            if not is_all_finite(values):
                raise ProtocolError("bad-tensor", "A shard holds values that are not finite.")
            return values
        if len(tensors) != 2:
            raise ProtocolError("bad-tensor", "An int8 shard comes with its exponents.")
        levels = torch.from_numpy(_from_int8(tensors[0], numel).astype(np.float32))
        if dither is not None:
            levels.sub_(dither_fractions(dither, numel))
        exponents = _from_int8(tensors[1], -(-numel // QUANTISER_BLOCK))
        if exponents.min(initial=0) < MIN_EXPONENT or exponents.max(initial=0) > MAX_EXPONENT:
            raise ProtocolError("bad-tensor", f"An exponent is not from {MIN_EXPONENT} to {MAX_EXPONENT}.")
        return _block_rows(levels).mul_(_powers_of_two(exponents.astype(np.int32))).view(-1)[:numel]


def _block_rows(values: Tensor) -> Tensor:
    missing = -len(values) % QUANTISER_BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, QUANTISER_BLOCK)


def _powers_of_two(exponents: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(((exponents + 127) << 23).view(np.float32))[:, None]


def _from_int8(wire: WireTensor, numel: int) -> NDArray[np.int8]:
    if wire.dtype != "int8" or wire.shape != (numel,):
        raise ProtocolError("bad-tensor", f"A shard's tensor is {wire.dtype} {wire.shape}, not int8 ({numel},).")
    return np.frombuffer(wire.data, np.int8)


@functools.lru_cache(maxsize=CACHED_SHARDS)
def dither_fractions(label: str, numel: int) -> Tensor:
    """Returns pseudo-random fractions that depend on `label` alone: float32 [numel] in (-0.5, 0.5); do not change them.

    Each is (byte + 0.5) / 256, with signed bytes from a Philox4x64-10 generator whose key is a hash of the label.
    """
    key = hashlib.sha256(f"agora dither 1\0{label}".encode()).digest()[:16]
    words = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(-(-numel // 8))
    signed = torch.from_numpy(words.astype("<u8", copy=False).view(np.int8)[:numel])
    return signed.to(torch.float32).add_(0.5).mul_(1.0 / 256.0)


def quantise(values: Tensor, bits: int) -> list[WireTensor]:
    """Returns `values`, float32 [n] on the CPU and finite, in `bits` (2 to 4) bits as two wire tensors: scales, levels.

    scales: uint8 [1 + blocks]: first the exponent e of the largest scale (as int8), then for each block the code c of
    its scale 2^(e - c / 8). levels: uint8 [packed_bytes(n, bits)]. Blocks whose values are about 2^32 times smaller
    than the largest block's are decoded as 0.
    """
    blocks = -(-len(values) // QUANTISER_BLOCK)
    rows = pad(values, (0, blocks * QUANTISER_BLOCK - len(values))).view(blocks, QUANTISER_BLOCK)
    sizes = torch.linalg.vector_norm(rows, dim=1) / QUANTISER_BLOCK**0.5
    exponent, codes = _scale_codes(sizes)
    scales = (_SCALES[codes.long()] * 2.0**exponent).unsqueeze(1)
    scaled = rows / scales.clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.zeros(scaled.shape, dtype=torch.uint8)
    for edge in _edges(bits):  # comparing with each of few edges is many times as fast as torch.bucketize
        levels += (scaled > edge).view(torch.uint8)
    packed = pack(levels.view(-1)[: len(values)].clone(), bits)
    header = np.concatenate((np.array([exponent], np.int8).view(np.uint8), codes.numpy()))
    return [WireTensor("uint8", array.shape, array.data) for array in (header, packed.numpy())]


def dequantise(tensors: list[WireTensor], numel: int, bits: int) -> Tensor:
    """Returns what `quantise` encoded, rounded to its levels, see NumberFormat.decode."""
    blocks = -(-numel // QUANTISER_BLOCK)
    shapes = [(1 + blocks,), (packed_bytes(numel, bits),)]
    if [(tensor.dtype, tensor.shape) for tensor in tensors] != [("uint8", shape) for shape in shapes]:
        raise ProtocolError("bad-tensor", f"A shard in {bits} bits is two uint8 tensors, {shapes[0]} and {shapes[1]}.")
    header = np.frombuffer(tensors[0].data, np.uint8)
    exponent = int(header[:1].view(np.int8)[0])
    if abs(exponent) > MAX_SCALE_EXPONENT:
        raise ProtocolError("bad-tensor", f"An exponent is not from {-MAX_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}.")
    packed = torch.from_numpy(np.frombuffer(tensors[1].data, np.uint8).copy())
    levels = np.take(_levels(bits), unpack(packed, numel, bits).numpy())
    rows = pad(torch.from_numpy(levels), (0, blocks * QUANTISER_BLOCK - numel)).view(blocks, QUANTISER_BLOCK)
    scales = _SCALES[torch.from_numpy(header[1:].astype(np.int64))] * 2.0**exponent
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:numel]


def _scale_codes(sizes: Tensor) -> tuple[int, Tensor]:
    sizes = sizes.clamp(max=2.0**MAX_SCALE_EXPONENT)
    largest = float(sizes.max()) if len(sizes) else 0.0
    if largest == 0.0:
        return -MAX_SCALE_EXPONENT, torch.full((len(sizes),), ZERO_SCALE, dtype=torch.uint8)
    exponent = max(math.ceil(math.log2(largest)), -MAX_SCALE_EXPONENT)
    codes = (SCALES_PER_OCTAVE * (exponent - sizes.log2())).round_().clamp_(0, ZERO_SCALE)  # log2(0) gives ZERO_SCALE
    return exponent, codes.to(torch.uint8)


def _levels(bits: int) -> NDArray[np.float32]:
    upper = POSITIVE_LEVELS[bits]
    return np.array([-level for level in reversed(upper)] + list(upper), np.float32)


def _edges(bits: int) -> list[float]:
    levels = _levels(bits)
    return [float(edge) for edge in (levels[1:] + levels[:-1]) / 2]
