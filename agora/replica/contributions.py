"""Builds a member's contributions to rounds: its values, the residual of the last encoding, and late gradients.

    x = (T g + T' g') / (T + T') + e
    e' = x - decode(encode(x))

x: the contribution. g, T: the replica's share of a gradient and its tokens; of a slice, the difference to the anchor.
g', T': the share of the step before if that came too late for its round; a late difference is in the slice's next one
anyway. e, e': the residual before and after (error feedback: Seide et al. 2014; Karimireddy et al. 2019, EF-SGD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agora_protocol.codec_names import WireName
from torch import Tensor

from agora.replica.part_codec import NORMAL_BITS, EncodedPart

if TYPE_CHECKING:
    from agora.replica.part_averager import Part, Region, RoundConfig


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
