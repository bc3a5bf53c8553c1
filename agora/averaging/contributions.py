"""What a member contributes to rounds of gradients: its gradient, what quantisation lost before, and what was late.

Knows: parts, values, their encoding. Must not know: owners, calls, time.

    x = (T g + T' g') / (T + T') + e        e after it: x - decoded(encoded(x))

g: the mean gradient of this step over T tokens. g', T': the same of the step before, if it came too late for its round.
e: the error of the contribution before (error feedback: Seide et al. 2014; Karimireddy et al. 2019, EF-SGD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agora_protocol.tensors import WireTensor
from torch import Tensor

if TYPE_CHECKING:
    from agora.averaging.kinds import Part, RoundConfig


class Gradient(NamedTuple):
    """A mean gradient of one part, float32 [n], and the tokens that it is the mean of."""

    values: Tensor
    tokens: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member sends to the owner of a part. values: float32 [n], encoded as `wire`. weight: tokens behind them.

    own: this step's gradient alone, without what was added to it. late_tokens: tokens of the step before among them.
    """

    values: Tensor
    weight: float
    wire: list[WireTensor]
    own: Gradient
    late_tokens: float = 0.0


class GradientContributions:
    """Makes the contributions of the gradients of one peer, and keeps what each leaves for the next of its part."""

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self._errors: dict[tuple[int, int], Tensor] = {}  # by stage and part
        self._late: dict[tuple[int, int], Gradient] = {}

    def make(self, part: Part, values: Tensor, weight: float) -> Contribution:
        """Returns the contribution of a mean gradient over `weight` tokens: with the late one and the last error."""
        own, place = Gradient(values, weight), (part.stage, part.part)
        late = self._late.get(place)
        if late is not None and weight + late.tokens > 0:
            weight += late.tokens
            values = values.lerp(late.values, late.tokens / weight)
        if (error := self._errors.get(place)) is not None and self._config.is_coarse(part):
            values = values + error
        wire = self._config.encode(part, values)
        return Contribution(values, weight, wire, own, late.tokens if late else 0.0)

    def settle(self, part: Part, made: Contribution, counted: bool | None) -> float:
        """Takes in whether the part's average has the contribution, None when unknown; returns the tokens now lost.

        One that is known to be missing is late: it is added to the part's next one. If that is late as well, what was
        late before is lost.
        """
        place = (part.stage, part.part)
        self._late.pop(place, None)
        if counted is False:
            self._late[place] = made.own
            return made.late_tokens
        if counted and self._config.is_coarse(part):
            self._errors[place] = made.values - self._config.decode(part, made.wire, len(made.values))
        return 0.0

    def forget(self, stage: int) -> None:
        """Drops what is kept of a stage, whose state was replaced by another replica's."""
        for kept in (self._errors, self._late):
            for place in [place for place in kept if place[0] == stage]:
                del kept[place]
