"""What a member contributes to rounds: its values, what quantisation lost before, and of gradients what was late.

Knows: parts, values, their encoding. Must not know: owners, calls, time.

    x = (T g + T' g') / (T + T') + e        e after it: x - decoded(encoded(x))

g: the mean gradient of this step over T tokens, or a slice's difference to the anchor. g', T': of gradients, those of
the step before, if they came too late for their round; a difference that was late is in the slice's next one anyway.
e: the error of the contribution before (error feedback: Seide et al. 2014; Karimireddy et al. 2019, EF-SGD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agora_protocol.codec_names import WireName
from torch import Tensor

from agora.averaging.wire import NORMAL_BITS, Encoded

if TYPE_CHECKING:
    from agora.averaging.exchange import Part, Place, RoundConfig


class Weighted(NamedTuple):
    """A replica's own values of one part, float32 [n], and the tokens behind them."""

    values: Tensor
    tokens: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member sends to the owner of a part. values: float32 [n], encoded as `wire`. weight: tokens behind them.

    own: the values alone, without what was added to them. late_tokens: tokens of the step before among `weight`.
    """

    values: Tensor
    weight: float
    wire: Encoded
    own: Weighted
    late_tokens: float = 0.0


class Contributions:
    """Makes the contributions of one peer, and keeps what each leaves for the next of its place."""

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self._errors: dict[Place, Tensor] = {}
        self._late: dict[Place, Weighted] = {}

    def make(self, part: Part, values: Tensor, weight: float, wire: WireName) -> Contribution:
        """Returns the contribution of `values` behind `weight` tokens, as `wire`: with late ones and the last error."""
        own, place = Weighted(values, weight), self._config.place(part)
        late = self._late.get(place)
        if late is not None and weight + late.tokens > 0:
            weight += late.tokens
            values = values.lerp(late.values, late.tokens / weight)
        if (error := self._errors.get(place)) is not None and wire in NORMAL_BITS:
            values = values + error
        encoded = self._config.encode(part, values, wire)
        return Contribution(values, weight, encoded, own, late.tokens if late else 0.0)

    def settle(self, part: Part, made: Contribution, counted: bool | None) -> float:
        """Takes in whether the part's mean has the contribution, None when unknown; returns the tokens now lost.

        A gradient that is known to be missing is late: it is added to the part's next one. If that is late as well,
        what was late before is lost.
        """
        place = self._config.place(part)
        self._late.pop(place, None)
        if counted is False and part.what == "gradient":
            self._late[place] = made.own
            return made.late_tokens
        if counted and made.wire.name in NORMAL_BITS:
            self._errors[place] = made.values - self._config.decode(part, made.wire, len(made.values))
        return 0.0

    def carry_over(self, part: Part, values: Tensor, weight: float) -> None:
        """Has the part's next contribution contain `values` behind `weight` tokens, of a round that brought no mean."""
        self._late[self._config.place(part)] = Weighted(values, weight)

    def forget(self, stage: int) -> None:
        """Drops what is kept of a stage, whose state was replaced by another replica's."""
        for kept in (self._errors, self._late):
            for place in [place for place in kept if place.stage == stage]:
                del kept[place]
