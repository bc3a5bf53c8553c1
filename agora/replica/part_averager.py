"""Turns a replica's values into contributions and contributions into means, and keeps the residuals of encoding.

An owner encodes a mean once, and every replica, the owner included, uses what these bytes decode to. So all replicas
apply the same bits, whichever replica sent them the mean, and at any time.
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
from agora_protocol.parts import slice_count
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.core.sync_mode import EXACT
from agora.replica.aggregate import Aggregation, PartMean, aggregate, magnitude
from agora.replica.contributions import Contribution, ContributionBuilder
from agora.replica.part_codec import NORMAL_BITS, EncodedPart, PartCodec
from agora.replica.partition import Members, choose_owners, ownership_epoch
from agora.replica.plausibility import MagnitudeBound

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

    def owners(self, part: Part, members: Members) -> tuple[PeerId, PeerId | None]:
        """Returns the part's first and second owner among the members, which average its values; see choose_owners.

        The second is None if only one member may own parts.
        """
        epoch = ownership_epoch(part.round, part.slices)
        return choose_owners(self.run, part.stage, part.kind, epoch, part.position, members)

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
