"""The links of the benchmark: their rates by the machine's pace, what limits a swarm over them, which boundary suits.

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.wan_settings import DENSE, PUBLISHED, Setting

RTT_MS: Final = 50
# Of a step of the boundary that a link is made for: what it would take without the link. The wire does the rest.
FREE_SHARE: Final = 0.15
BUSY: Final = 0.8  # processors or a wire that are busy for at least this share of the time limit a swarm

SHARPNESS: Final = 1.8  # the exponent of `expected_step`


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The rule for the rate of a link: the bytes of `reference` take 1 / (FREE_SHARE * times) of its step without it.

    So at `times` 1 a step of `reference` takes 1 / FREE_SHARE of its time without a link: 85 % is the wire's doing.
    """

    name: str
    reference: Setting
    times: float

    def bits_per_s(self, width: int, tokens_per_s: float) -> float:
        """Returns the rate, where `reference` has `tokens_per_s` without a link."""
        return 8 * self.reference.sent_per_token(width) * tokens_per_s * FREE_SHARE * self.times

    def wire_time(self, setting: Setting, width: int) -> float:
        """Returns the time of the bytes of `setting` over this link, in units of the time of `reference` without it."""
        return setting.sent_per_token(width) / (self.reference.sent_per_token(width) * FREE_SHARE * self.times)


# Today's link binds dense bf16, `bound` the published recipe, `fast` is five times as fast as today's.
RATES: Final[Mapping[str, LinkRate]] = {
    rate.name: rate
    for rate in (LinkRate("today", DENSE, 1.0), LinkRate("bound", PUBLISHED, 1.0), LinkRate("fast", DENSE, 5.0))
}


@dataclass(frozen=True, slots=True)
class PacedLink:
    """A link whose rate follows the pace. free_share: its reference's tokens/s without a link / the pace's."""

    rate: LinkRate
    free_share: float

    def bits_per_s(self, width: int, pace: float) -> float:
        """Returns the link's rate where the pace has just had so many tokens per second."""
        return self.rate.bits_per_s(width, self.free_share * pace)


def link_text(bits_per_s: float) -> str:
    """Returns the rate as `--link` reads it."""
    return f"{bits_per_s / 1e6:.4f}Mbit"


@dataclass(frozen=True, slots=True)
class Turn:
    """One window of a swarm and the window of the pace just before it.

    pace, tokens_per_s: tokens per second of the pace's window and of the swarm's.
    bits_per_s: the rate of the swarm's link, which follows from `pace`; None without a link.
    cpu_s: processor seconds of the swarm's daemons for 1,000 tokens.
    elsewhere: cores that the rest of the machine used.
    """

    pace: float
    tokens_per_s: float
    bits_per_s: float | None
    cpu_s: float
    elsewhere: float


@dataclass(frozen=True, slots=True)
class Speed:
    """The medians over the turns of one swarm over one link.

    pace_share: the swarm's tokens per second / those of the pace.
    wire: the share of the time for which the uplink of a middle stage is busy with boundaries.
    processor, others: the shares of all cores that the swarm's daemons and other programs use.
    bits_per_s: the link's rate.
    """

    pace_share: float
    wire: float
    processor: float
    others: float
    bits_per_s: float

    @property
    def limit(self) -> str:
        share, name = max((self.wire, "wire"), (self.processor + self.others, "processor"))
        return name if share >= BUSY else "neither"


def speed_of(turns: Sequence[Turn], sent_per_token: float, cores: int) -> Speed:
    """Returns the medians over the turns. sent_per_token: bytes that a middle stage sends for each token."""
    wires = [8 * sent_per_token * turn.tokens_per_s / turn.bits_per_s for turn in turns if turn.bits_per_s]
    return Speed(
        pace_share=statistics.median(turn.tokens_per_s / turn.pace for turn in turns),
        wire=statistics.median(wires) if wires else 0.0,
        processor=statistics.median(turn.cpu_s / 1000 * turn.tokens_per_s / cores for turn in turns),
        others=statistics.median(turn.elsewhere / cores for turn in turns),
        bits_per_s=statistics.median(turn.bits_per_s or math.inf for turn in turns),
    )


def choose(rate: LinkRate, width: int, steps: Mapping[Setting, float]) -> Setting:
    """Returns the setting with the least expected time to the target over this link: steps x expected_step.

    steps: to the target; infinite where it was not reached. The first setting is returned where none has reached it.
    """
    return min(steps, key=lambda setting: steps[setting] * expected_step(rate.wire_time(setting, width)))


def expected_step(wire_time: float) -> float:
    """Returns the time of a step over a link, in units of the time that it takes without: (1 + wire_time^1.8)^(1/1.8).

    wire_time: the time of the step's bytes over the link, in the same unit. A step takes no less than 1 and no less
    than wire_time; where both are about as long, some of each is waited for. The exponent is the one that fits eleven
    measured swarms of width 128 best, to 15 %: 1.50 and 1.76 where their bytes took 0.88 and 1.05, 2.46 where 2.26.
    """
    return float((1.0 + wire_time**SHARPNESS) ** (1.0 / SHARPNESS))
