"""Measures contenders in turns on one machine while the others are frozen or idle, so that drift affects all alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.children import BenchFailed
from benchmarks.contenders import Contender
from benchmarks.freezer import Freezer
from benchmarks.machine import Watch
from benchmarks.report import Cell
from benchmarks.window import print_progress

T = TypeVar("T")

CALM_CORES = 0.15


@dataclass(slots=True)
class Readings:
    """One contender's rounds: tokens per second, its processor seconds per 1000 tokens, cores that others used."""

    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)


def alternating(those: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields (round, contender), from round 1; the order of contenders is reversed in every other round."""
    for number in range(rounds):
        for one in those if number % 2 == 0 else reversed(those):
            yield number + 1, one


def start(contenders: Sequence[Contender], freezer: Freezer | None = None) -> None:
    """Starts the contenders one after the other and freezes each when it is warm; without a freezer it rests."""
    for contender in contenders:
        print_progress(f"starting {contender.name}")
        contender.start()
        if freezer is not None:
            freezer.freeze(contender.groups())


def take_turns(
    contenders: Sequence[Contender], rounds: int, window_s: float, freezer: Freezer | None = None
) -> dict[str, Readings]:
    """Measures every contender once in each round, in turns, and returns its readings by name.

    freezer: has frozen all contenders, which are frozen again afterwards. None: those that are not measured rest
    instead, since daemons that were frozen for long take each other for dead when they thaw. The processor time that
    resting contenders need to stay connected is reported as `elsewhere`. Raises BenchFailed when a contender trains
    nothing.
    """
    found = {contender.name: Readings() for contender in contenders}
    for number, contender in alternating(contenders, rounds):
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
        turn = f"round {number} of {rounds}: {contender.name} {window.rate:,.0f} tokens/s"
        print_progress(turn + (f" (others used {elsewhere:.1f} cores)" if elsewhere > CALM_CORES else ""))
    return found


def row(contender: Contender, found: Readings) -> dict[str, Cell]:
    """Returns one line of the table for a contender."""
    return {
        "name": contender.name,
        "processes": contender.processes,
        "threads": contender.threads,
        "unit": "tokens/s",
        "median": statistics.median(found.rates),
        "low": min(found.rates),
        "high": max(found.rates),
        "rounds": len(found.rates),
        "cpu_s_per_1000": round(statistics.median(found.costs), 4),
        "others": round(statistics.mean(found.elsewhere), 3),
    }


def calmness(elsewhere: Iterable[Sequence[float]]) -> list[str]:
    """Returns a warning when other programs used the machine. elsewhere: the cores they used, by contender."""
    worst = max(map(statistics.mean, elsewhere), default=0.0)
    if worst <= CALM_CORES:
        return []
    return [f"THE MACHINE WAS NOT CALM: others used up to {worst:.1f} cores on average; these figures mean little."]
