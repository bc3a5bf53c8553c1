"""What a round sends, as bytes: number formats, error feedback, late gradients, and the mean."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import torch
from agora_protocol.codec_names import WireName, packed_bytes
from agora_protocol.errors import PeerFailed, ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged
from agora_protocol.parts import part_elements, slice_count
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agora.codec import decode_uncompressed, encode_uncompressed, is_all_finite
from agora.codec.bit_packing import pack, unpack
from agora.core.sync_mode import EXACT
from agora.replica.trust import MagnitudeBound

# --- normal_levels

# Quantises float32 vectors to 2, 3 or 4 bits: levels for normally distributed values, times a scale for each block.
#
# A value x of a block of QUANTISER_BLOCK elements becomes the level nearest to x / scale, the scale being the block's
# root mean square. The levels have the least mean squared error for a normal distribution (Lloyd 1982; Max 1960). The
# error is not random: a sender of successive gradients therefore uses error feedback (see contributions).

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
    """Returns what `quantise` encoded, rounded to its levels: float32 [numel], finite, the same bits at every receiver.

    Raises ProtocolError ("bad-tensor") for another count, type or shape of tensors, or an exponent out of range.
    """
    blocks = -(-numel // QUANTISER_BLOCK)
    shapes = [(1 + blocks,), (packed_bytes(numel, bits),)]
    if [(tensor.dtype, tensor.shape) for tensor in tensors] != [("uint8", shape) for shape in shapes]:
        raise ProtocolError("bad-tensor", f"a part in {bits} bits is two uint8 tensors, {shapes[0]} and {shapes[1]}")
    header = np.frombuffer(tensors[0].data, np.uint8)
    exponent = int(header[:1].view(np.int8)[0])
    if abs(exponent) > MAX_SCALE_EXPONENT:
        raise ProtocolError("bad-tensor", f"an exponent is not from {-MAX_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}")
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


# --- part_codec

# Encodes the parts of a round: as float32, bf16, in 2 to 4 bits, or as int8 with an exponent for each block.
#
# normal2 to normal4 are in normal_levels.py.
#
# int8 is meant for values on which replicas nearly agree. A block's scale is a power of two, so that nearly equal
# blocks
# are rounded to the same grid. Before rounding, every member adds the same pseudo-random fraction to an element, and
# decoding subtracts it again (subtractive dither, L. Roberts 1962). So the difference of two members' decoded values is
# unbiased, and exactly 0 where they agree.

# Bits of an element, by the name of each format that is sent with error feedback.
NORMAL_BITS: Final[Mapping[str, int]] = {"normal2": 2, "normal3": 3, "normal4": 4}
MAX_LEVEL: Final = 126.0  # largest magnitude before dither, so that it never clips
MIN_EXPONENT, MAX_EXPONENT = -120, 100
# Parts whose dither is cached, half a MiB to 2 MiB each: about as many as are being sent at the same time.
CACHED_PARTS: Final = 32


@functools.lru_cache(maxsize=CACHED_PARTS)
def dither_fractions(label: str, numel: int) -> Tensor:
    """Returns pseudo-random fractions that depend on `label` alone: float32 [numel] in (-0.5, 0.5).

    A smaller `numel` gives the first fractions of a larger one. Each is (byte + 0.5) / 256; the signed bytes come from
    a Philox4x64-10 generator whose key is a hash of the label. The tensor is cached; do not change it.
    """
    key = hashlib.sha256(f"agora dither 1\0{label}".encode()).digest()[:16]
    words = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(-(-numel // 8))
    signed = torch.from_numpy(words.astype("<u8", copy=False).view(np.int8)[:numel])
    return signed.to(torch.float32).add_(0.5).mul_(1.0 / 256.0)


class EncodedPart(NamedTuple):
    """Encoded values of a part. wire: the name of their number format. tensors: one or two, as PartCodec makes them."""

    wire: WireName
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PartCodec:
    """Encodes a part's float32 values as wire tensors, and decodes them, in the number format `name`.

    name: float32, bf16, int8 (with an exponent for each block, and optional dither), or normal2 to normal4 (2 to 4 bits
    with a scale for each block, see normal_levels).
    """

    def __init__(self, name: WireName) -> None:
        self.name = name

    def encode(self, values: Tensor, dither: str | None = None) -> list[WireTensor]:
        """Returns `values`, float32 [n] on the CPU and finite, as wire tensors.

        int8 clips magnitudes above about 2^107; normal2 to normal4 treat a block's root mean square as at most 2^100.
        dither: the label for dither_fractions, which int8 adds before it rounds; `decode` needs the same label. None
        adds nothing. The other formats ignore the label. float32 tensors share the memory of `values`, which must not
        change until they are sent.
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

        dither: the label that was passed to `encode`. Raises ProtocolError ("bad-tensor") for another count, type or
        shape of tensors, values that are not finite, or exponents out of range.
        """
        if self.name in NORMAL_BITS:
            return dequantise(list(tensors), numel, NORMAL_BITS[self.name])
        if self.name != "int8":
            if len(tensors) != 1:
                raise ProtocolError("bad-tensor", f"a part is one tensor, not {len(tensors)}")
            values = decode_uncompressed(tensors[0], self.name, shape=(numel,))
            if not is_all_finite(values):
                raise ProtocolError("bad-tensor", "a part holds values that are not finite")
            return values
        if len(tensors) != 2:
            raise ProtocolError("bad-tensor", "an int8 part comes with its exponents")
        levels = torch.from_numpy(_from_int8(tensors[0], numel).astype(np.float32))
        if dither is not None:
            levels.sub_(dither_fractions(dither, numel))
        exponents = _from_int8(tensors[1], -(-numel // QUANTISER_BLOCK))
        if exponents.min(initial=0) < MIN_EXPONENT or exponents.max(initial=0) > MAX_EXPONENT:
            raise ProtocolError("bad-tensor", f"an exponent is not from {MIN_EXPONENT} to {MAX_EXPONENT}")
        return _block_rows(levels).mul_(_powers_of_two(exponents.astype(np.int32))).view(-1)[:numel]


def _block_rows(values: Tensor) -> Tensor:
    missing = -len(values) % QUANTISER_BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, QUANTISER_BLOCK)


def _powers_of_two(exponents: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(((exponents + 127) << 23).view(np.float32))[:, None]


def _from_int8(wire: WireTensor, numel: int) -> NDArray[np.int8]:
    if wire.dtype != "int8" or wire.shape != (numel,):
        raise ProtocolError("bad-tensor", f"a part's tensor is {wire.dtype} {wire.shape}, not int8 ({numel},)")
    return np.frombuffer(wire.data, np.int8)


# --- contributions

# Builds a member's contributions to rounds: its values, the residual of the last encoding, and late gradients.
#
#     x = (T g + T' g') / (T + T') + e
#     e' = x - decode(encode(x))
#
# x: the contribution. g, T: the replica's share of a gradient and its tokens; of a slice, the difference to the anchor.
# g', T': the share of the step before if that came too late for its round; a late difference is in the slice's next one
# anyway. e, e': the residual before and after (error feedback: Seide et al. 2014; Karimireddy et al. 2019, EF-SGD).


class WeightedValues(NamedTuple):
    """A replica's own values of one part, float32 [n], and the tokens behind them."""

    values: Tensor
    tokens: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member sends to the owner of a part.

    values: float32 [n], before encoding.
    weight: tokens behind the values.
    encoded: the same values as bytes.
    own: this replica's values and tokens of this round, without residual and late gradient.
    late_tokens: how many tokens of `weight` belong to the late gradient.
    """

    values: Tensor
    weight: float
    encoded: EncodedPart
    own: WeightedValues
    late_tokens: float = 0.0


class ContributionBuilder:
    """Builds the contributions of one peer; keeps, by region, what is added to the region's next contribution.

    A region is the elements of a stage that a part averages. Added are the residual, which the last encoding lost, and
    the late gradient, which came too late for the mean of its own step. The caller calls `build` for each part, then
    record_outcome; then carry_over for a part of which no owner has a mean; and drop_stage when a stage's state is
    replaced.
    """

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self._residuals: dict[Region, Tensor] = {}
        self._late_gradients: dict[Region, WeightedValues] = {}

    def build(self, part: Part, values: Tensor, weight: float, wire: WireName) -> Contribution:
        """Returns the contribution of `values`, float32 [n], computed over `weight` tokens, encoded in format `wire`.

        Merges the region's late gradient as a mean weighted by tokens (its tokens join the weight), then adds the
        error-feedback residual if `wire` has 2 to 4 bits. Changes nothing; see record_outcome.
        """
        own = WeightedValues(values, weight)
        region = self._config.region(part)
        late = self._late_gradients.get(region)
        if late is not None and weight + late.tokens > 0:
            weight += late.tokens
            values = values.lerp(late.values, late.tokens / weight)
        if (residual := self._residuals.get(region)) is not None and wire in NORMAL_BITS:
            values = values + residual
        encoded = self._config.encode_part(part, values, wire)
        return Contribution(values, weight, encoded, own, late.tokens if late else 0.0)

    def record_outcome(self, part: Part, contribution: Contribution, counted: bool | None) -> float:
        """Records whether the part's mean contains the contribution (`counted`; None if unknown). Returns lost tokens.

        Lost tokens are those that no later mean can contain. The former late gradient is dropped in any case, the
        former residual only where there is a new one.

        | counted | kept for the region's next contribution | lost tokens |
        |---|---|---|
        | True | the new residual (float32), if the contribution was sent in 2 to 4 bits | 0 |
        | False, of a gradient | the replica's own values, as late gradient | those of the former late gradient |
        | False, of a slice | nothing new | 0 |
        | None | nothing new | 0 |
        """
        region = self._config.region(part)
        self._late_gradients.pop(region, None)
        if counted is False and part.kind == "gradient":
            self._late_gradients[region] = contribution.own
            return contribution.late_tokens
        if counted and contribution.encoded.wire in NORMAL_BITS:
            decoded = self._config.decode_part(part, contribution.encoded, len(contribution.values))
            self._residuals[region] = contribution.values - decoded
        return 0.0

    def carry_over(self, part: Part, values: Tensor, weight: float) -> None:
        """Keeps `values`, of a part without a mean, as the late gradient for the region's next contribution.

        values: this replica's own. weight: the tokens behind them. Replaces the region's former late gradient.
        """
        self._late_gradients[self._config.region(part)] = WeightedValues(values, weight)

    def drop_stage(self, stage: int) -> None:
        """Drops the residuals and late gradients of a stage whose state was replaced by another replica's."""
        for kept in (self._residuals, self._late_gradients):
            for region in [region for region in kept if region.stage == stage]:
                del kept[region]


# --- aggregate

# Reduces the contributions to a part to one mean: weighted, or by centered clipping. Arguments are never changed.

Aggregation = Literal["mean", "clip"]
CLIP_ROUNDS: Final = 3  # enough, since clipping begins near, at the owner's own value: Karimireddy et al., ICML 2021
MIN_NORM, MAX_NORM = 1e-15, 1e15
# A contribution may be this many times as long as the lower median of all; a longer one is shortened to that.
MAX_TIMES_LONGER: Final = 2.0
# Minimum number of contributions for one to be called too long: of two, either could be right.
MIN_TO_COMPARE: Final = 3


@dataclass(frozen=True, slots=True)
class PartMean:
    """The mean of one part of a round."""

    values: Tensor  # float32 [n]
    # How many members contributed, and the tokens behind the mean; the part's owner sends it with the mean.
    message: Averaged
    encoded: EncodedPart | None = None  # the tensors that `values` were decoded from; None before the mean is encoded


def aggregate(
    contributions: Sequence[Tensor],
    weights: Sequence[float],
    aggregation: Aggregation,
    *,
    center: Tensor | None,
    cap: bool,
) -> PartMean | None:
    """Returns the weighted mean, or the centered clip, of `contributions`, float32 [n] each and finite.

    aggregation: "mean" or "clip". A contribution of weight 0 adds no values, but the result's message counts it as a
    contributor. cap: whether to lower the largest weights first, see cap_weights, and to scale contributions down that
    are far too long, see shorten; the message's weight is the sum before that. center: the start value of a clip; None
    means the median of each coordinate. The result is not encoded; it is None when every weight is 0 or the mean is not
    finite.
    """
    weighted = [(values, weight) for values, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not weighted:
        return None
    values = [value for value, _ in weighted]
    tokens = [weight for _, weight in weighted]
    values = shorten(values, tokens) if cap else values
    limited = cap_weights(tokens) if cap else tokens
    fractions = [weight / sum(limited) for weight in limited]
    mean = _mean(values, fractions) if aggregation == "mean" else _clip(values, fractions, center)
    if not is_all_finite(mean):
        return None
    return PartMean(mean, Averaged(len(values), len(contributions), sum(tokens), counted=True, wire="float32"))


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Returns the n `weights`, in the same order, with the largest lowered until none exceeds 2/n of their new sum.

    All must be above 0, and there must be at least one.
    """
    ordered = sorted(weights, reverse=True)
    for lowered, largest_kept in enumerate(ordered):
        cap = 2.0 * sum(ordered[lowered:]) / (len(ordered) - 2 * lowered)
        if largest_kept <= cap:
            break
    return [min(weight, cap) for weight in weights]


def shorten(values: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    """Returns the contributions `values`, float32 [n] each, with the ones that are too long scaled down to their limit.

    weights: tokens of each contribution. The limit of the Euclidean length x of a contribution over w tokens is
    MAX_TIMES_LONGER * max(median(x), median(x sqrt(w)) / sqrt(w)), with lower medians over all contributions: one over
    fewer tokens holds more noise, and so is longer. Without this limit one contribution of 1e30 makes the mean
    implausible for every replica, and all of them lose the step. A contribution is returned unchanged if its length is
    infinite or its limit 0; all are returned unchanged if there are fewer than MIN_TO_COMPARE.
    """
    if len(values) < MIN_TO_COMPARE:
        return list(values)
    lengths = [_norm(value) for value in values]
    median_length = statistics.median_low(lengths)
    median_of_one_token = statistics.median_low([x * math.sqrt(w) for x, w in zip(lengths, weights, strict=True)])
    limits = [MAX_TIMES_LONGER * max(median_length, median_of_one_token / math.sqrt(weight)) for weight in weights]
    return [
        value * (limit / length) if 0.0 < limit < length < math.inf else value
        for value, length, limit in zip(values, lengths, limits, strict=True)
    ]


def magnitude(values: Tensor) -> float:
    """Returns the root mean square of `values`, 0 if empty.

    All elements count: with a sample of them, a peer that knows the sample could send anything in the others.
    """
    return _norm(values) / math.sqrt(max(1, len(values)))


def _norm(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm if MIN_NORM < norm < MAX_NORM else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _mean(values: Sequence[Tensor], fractions: Sequence[float]) -> Tensor:
    mean = values[0]
    for value, fraction in zip(values[1:], fractions[1:], strict=True):
        mean = torch.add(mean, value - values[0], alpha=fraction)
    return mean


def _clip(values: Sequence[Tensor], fractions: Sequence[float], center: Tensor | None) -> Tensor:
    # CLIP_ROUNDS times v += sum of fraction * (x - v) * min(1, tau / |x - v|). fractions: of the weights, with sum 1. v
    # begins at `center`, or, if that is None, at the lower median of each coordinate. tau, computed each time again, is
    # the lower median of the |x - v| that are not 0, so that half of the contributors cannot choose it.
    clipped = (torch.stack(list(values)).median(dim=0).values if center is None else center).clone()
    for _ in range(CLIP_ROUNDS):
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


# --- part_averager

# Turns a replica's values into contributions and contributions into means, and keeps the residuals of encoding.
#
# An owner encodes a mean once, and every replica, the owner included, uses what these bytes decode to. So all replicas
# apply the same bits, whichever replica sent them the mean, and at any time.

MAX_WEIGHT_ROUNDS: Final = 64  # A contribution is refused if its weight exceeds the tokens of this number of rounds
# Number of initial gradients of a run that are sent as int8 where later ones take 2 to 4 bits: they vary the most.
INT8_ROUNDS: Final = 20


class Part(NamedTuple):
    """The name of one part of a round: one of the pieces into which the averaged vector is cut, each with its owner.

    stage: the stage whose replicas hold the round.
    kind: "gradient", or "slice": a fixed set of the stage's weights.
    round: counts the rounds of this stage and kind; of a gradient, it is the step.
    position: of the part within the round, from 0.
    slices: how many the stage has; the round averages number round % slices. EXACT (0) for a gradient.
    """

    stage: int
    kind: str
    round: int
    position: int
    slices: int = EXACT

    @property
    def round_key(self) -> tuple[int, str, int]:
        return self[:3]


class Region(NamedTuple):
    """Names the elements of a stage that a part averages: the key of what is kept from one round to the next.

    stage, kind, slices, position: as in Part. slice_number: which slice of the stage; 0 for gradients, whose parts cut
    the whole stage.
    """

    stage: int
    kind: str
    slices: int
    slice_number: int
    position: int


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """The manifest's settings for rounds, and this peer's id (`me`).

    round_s: seconds that a round may take.
    max_weight: tokens above which a contribution is refused; a larger weight of another peer's mean counts as this.
    synchronous: whether means are exact: no weight is capped, nothing is clipped, no mean is rejected as implausible.
    gradient_wire, slice_wire: the formats in which values are sent.
    """

    me: PeerId
    run: RunId
    aggregation: Aggregation
    round_s: float
    max_weight: float
    synchronous: bool = False
    gradient_wire: WireName = "float32"
    slice_wire: WireName = "float32"

    @classmethod
    def from_manifest(cls, signed: SignedManifest, me: PeerId) -> RoundConfig:
        """Returns the configuration of a run; in a synchronous run gradients and slices are sent as float32."""
        averaging = signed.manifest.averaging
        synchronous = signed.manifest.schedule.kind == "synchronous"
        pass_steps = averaging.every * slice_count(averaging.fraction)
        max_weight = MAX_WEIGHT_ROUNDS * signed.manifest.optimizer.target_tokens * pass_steps
        wires: tuple[WireName, WireName] = averaging.gradient_wire, averaging.slice_wire
        if synchronous:
            wires = "float32", "float32"
        return cls(me, signed.run_id, averaging.aggregation, averaging.round_s, max_weight, synchronous, *wires)

    def region(self, part: Part) -> Region:
        """Returns the name of the region, the elements of the stage, that the part averages."""
        return Region(part.stage, part.kind, part.slices, part.round % max(part.slices, 1), part.position)

    def dither_label(self, part: Part) -> str:
        """Returns the seed string of the part's dither (random rounding), the same at all members of the round."""
        return f"{self.run}\0{part.stage}\0{part.kind}\0{part.round}\0{part.position}"

    def encode_part(self, part: Part, values: Tensor, wire: WireName) -> EncodedPart:
        """Encodes `values`, float32 [n], of `part` in the format `wire`; members and owners use the same dither."""
        return EncodedPart(wire, PartCodec(wire).encode(values, self.dither_label(part)))

    def decode_part(self, part: Part, encoded: EncodedPart, numel: int) -> Tensor:
        """Returns the values that encode_part encoded for `part`: float32 [numel], the same bits at every receiver.

        Raises ProtocolError unless the tensors are those of `numel` values in the format `encoded.wire`.
        """
        return PartCodec(encoded.wire).decode(encoded.tensors, numel, self.dither_label(part))


class PartAverager:
    """Encodes what one peer sends in rounds, as member and as owner; decodes means, and checks their magnitudes.

    In 2 to 4 bits members and owners use error feedback: each adds the residual of its last encoding of a region to the
    region's next values. Sends nothing itself. Keeps, by region, residuals, late gradients and bounds of magnitudes.
    """

    def __init__(self, config: RoundConfig) -> None:
        # By stage, the format in which this peer sends its gradients; the manifest's for other stages.
        self.gradient_wires: dict[int, WireName] = {}
        self.contributions = ContributionBuilder(config)
        self._config = config
        self._owner_residuals: dict[Region, Tensor] = {}
        self._bounds: defaultdict[Region, MagnitudeBound] = defaultdict(MagnitudeBound)

    def build_contribution(self, part: Part, values: Tensor, weight: float) -> Contribution:
        """Returns a member's contribution of `values`, float32 [n], over `weight` tokens, encoded in the part's format.

        Adds the region's late gradient and residual, see ContributionBuilder.build; changes nothing.
        """
        return self.contributions.build(part, values, weight, self.wire_of(part))

    def wire_of(self, part: Part) -> WireName:
        """Returns the format in which this peer now sends the part's values, as member and as owner.

        The first INT8_ROUNDS gradients of a run are sent as int8 where later ones take 2 to 4 bits.
        """
        if part.kind == "slice":
            return self._config.slice_wire
        wire = self.gradient_wires.get(part.stage, self._config.gradient_wire)
        return "int8" if wire in NORMAL_BITS and part.round < INT8_ROUNDS else wire

    def drop_stage(self, stage: int) -> None:
        """Drops the residuals and late gradients of a stage whose state was replaced by another replica's.

        Keeps the bounds of the means' magnitudes.
        """
        self.contributions.drop_stage(stage)
        for region in [region for region in self._owner_residuals if region.stage == stage]:
            del self._owner_residuals[region]

    def average(
        self, part: Part, values: Sequence[Tensor], weights: list[float], center: Tensor | None
    ) -> PartMean | None:
        """Averages the contributions `values`, float32 [n] each, as an owner; returns the mean, encoded and decoded.

        weights: tokens of each contribution. In an asynchronous run the aggregation is the manifest's, and large
        weights and values are limited, see `aggregate`; in a synchronous run it is the plain weighted mean. center: the
        start value of a clip. In 2 to 4 bits the owner encodes y = mean + e, and sets its residual e of the region to
        y - decode(encode(y)), except after a single contribution. Returns None, and changes nothing, when every weight
        is 0 or the mean is not finite.
        """
        if self._config.synchronous:
            mean = aggregate(values, weights, "mean", center=None, cap=False)
        else:
            mean = aggregate(values, weights, self._config.aggregation, center=center, cap=True)
        if mean is None:
            return None
        wire = self.wire_of(part)
        region = self._config.region(part)
        feeds_back = wire in NORMAL_BITS
        compensated = mean.values
        if feeds_back and region in self._owner_residuals:
            compensated = compensated + self._owner_residuals[region]
        encoded = self._config.encode_part(part, compensated, wire)
        decoded = self._config.decode_part(part, encoded, len(compensated))
        if feeds_back and len(values) > 1:  # no replica uses the mean of one contribution alone
            self._owner_residuals[region] = compensated - decoded
        return PartMean(decoded, replace(mean.message, wire=wire), encoded)

    def encode_zero_mean(self, part: Part, numel: int) -> PartMean:
        """Returns a mean of zeros, float32 [numel], with 0 contributors: for a part whose mean no replica keeps."""
        wire = self.wire_of(part)
        encoded = self._config.encode_part(part, torch.zeros(numel), wire)
        message = Averaged(in_mean=0, contributors=0, weight=0.0, counted=False, wire=wire)
        return PartMean(self._config.decode_part(part, encoded, numel), message, encoded)

    def decode_mean(self, part: Part, tensors: Sequence[WireTensor], numel: int, message: Averaged) -> PartMean:
        """Returns the mean, float32 [numel], that an owner sent as `tensors` with `message`.

        Raises ProtocolError for tensors that are not `numel` values in the format `message.wire`.
        """
        encoded = EncodedPart(cast("WireName", message.wire), tensors)
        return PartMean(self._config.decode_part(part, encoded, numel), message, encoded)

    def check_magnitude(self, part: Part, own: Tensor, mean: Tensor) -> None:
        """Raises PeerFailed if `mean` is implausibly large; otherwise updates the MagnitudeBound of the part's region.

        own: this replica's values of the part. In a synchronous run accepts every mean, and updates nothing.
        """
        if self._config.synchronous:
            return
        mean_size, own_size = magnitude(mean), magnitude(own)
        region = self._config.region(part)
        bound = self._bounds[region]
        if why := bound.why_implausible(mean_size, own_size):
            raise PeerFailed(why)
        self._bounds[region] = bound.after_accepted_mean(mean_size, own_size)


def cut_into_parts(numel: int) -> list[slice]:
    """Returns the parts of a vector of `numel` elements as Python slice objects, in order, each of part_elements.

    The last one may be shorter. Returns [] if `numel` is 0.
    """
    size = part_elements(numel)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
