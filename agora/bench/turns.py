"""Contenders of a benchmark take turns on one machine, the others frozen or at rest: what drifts hits all alike.

Knows: contenders, processor time, the freezer. Must not know: what a contender is, which ratios are made of its rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agora.bench.children import BenchFailed
from agora.bench.contenders import Contender
from agora.bench.freezer import Freezer
from agora.bench.machine import Watch
from agora.bench.window import tell

CALM_CORES = 0.15


@dataclass(slots=True)
class Readings:
    """One contender's rounds: tokens per second, its processor seconds per 1000 tokens, cores that others used."""

    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)


def start(contenders: Sequence[Contender], freezer: Freezer | None = None) -> None:
    """One after the other; each is frozen as soon as it is warm. None: it rests, see take_turns."""
    for contender in contenders:
        tell(f"starting {contender.name}")
        contender.start()
        if freezer is not None:
            freezer.freeze(contender.groups())


def take_turns(
    contenders: Sequence[Contender], rounds: int, window_s: float, freezer: Freezer | None = None
) -> dict[str, Readings]:
    """What every contender did in every round; the order of turns is reversed in every other round.

    freezer: of all contenders, which are frozen now, and are again afterwards. Daemons that are frozen for long take
    each other for dead when they thaw; so None lets those that are not measured rest, which costs the one that is
    what they need to stay in touch, and is told as `elsewhere`. Raises BenchFailed when one trains nothing.
    """
    found = {contender.name: Readings() for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if freezer is not None:
                freezer.thaw(contender.groups())
            watch = Watch(contender.groups())
            window = contender.measure(window_s)
            elsewhere, cost = watch.elsewhere(), 1000 * watch.ours() / max(window.trained, 1)
            if freezer is not None:
                freezer.freeze(contender.groups())
            if window.tokens <= 0 or window.seconds <= 0:
                raise BenchFailed(f"{contender.name} trained nothing in {window_s:.0f} s; run again in calm")
            found[contender.name].rates.append(window.rate)
            found[contender.name].costs.append(cost)
            found[contender.name].elsewhere.append(elsewhere)
            turn = f"round {number + 1} of {rounds}: {contender.name} {window.rate:,.0f} tokens/s"
            tell(turn + (f" (others used {elsewhere:.1f} cores)" if elsewhere > CALM_CORES else ""))
    return found
