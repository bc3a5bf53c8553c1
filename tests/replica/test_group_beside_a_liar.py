"""A replica group with one liar takes the steps that it takes with an honest one: whatever it says of itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from agora.train.stage import StageProgress
from tests.replica.group_world import FakeStage, GroupWorld
from tests.virtual_time import run

SETTINGS: dict[str, dict[str, Any]] = {
    "all-reduce": {"averaging": {"exact_steps": 10**9, "gradient_wire": "float32"}},
    "synchronous": {"schedule": {"kind": "synchronous"}},
    "inner steps": {"averaging": {"exact_steps": 0, "fraction": 0.25, "round_s": 3.0}},
}
RATE, HONEST_S, LYING_S = 1280.0, 10.0, 20.0

Lie = Callable[[StageProgress], StageProgress]
LIES: dict[str, Lie] = {
    "2^50 tokens": lambda told: replace(told, tokens_in_share=2**50 + told.step, tokens_counted=2**50 + told.step),
    "10 times its rate": lambda told: replace(told, tokens_counted=10 * told.tokens_counted),
    "a million times its rate, and all tokens": lambda told: replace(
        told, tokens_counted=10**6 * told.tokens_counted, tokens_in_share=2**40
    ),
    "all its shares closed": lambda told: replace(told, open_step=told.step + 2, tokens_in_share=0),
}


class LyingStage(FakeStage):
    """Tells of its progress what `lie` makes of it."""

    lie: Lie | None = None

    def progress(self) -> list[StageProgress]:
        told = super().progress()
        return told if self.lie is None else [self.lie(told[0])]


class Taken(NamedTuple):
    """What an honest replica did while the other one lied: steps, and its tokens in one of them."""

    steps: int
    tokens: float
    fetches: int


@functools.cache
def taken(mode: str, count: int, lie: str = "") -> Taken:
    async def main() -> Taken:
        settings = SETTINGS[mode]
        async with GroupWorld([RATE] * count, target=512 * count, stage_type=LyingStage, **settings) as world:
            await asyncio.sleep(HONEST_S)
            liar, honest, *_ = world.all
            assert isinstance(liar.stage, LyingStage)
            liar.stage.lie = LIES[lie] if lie else None
            step, shares = honest.stage.step, len(honest.stage.closed)
            await asyncio.sleep(LYING_S)
            closed = honest.stage.closed[shares:] or [0]
            tokens = honest.stage.counted if mode == "synchronous" else sum(closed) / len(closed)
            return Taken(honest.stage.step - step, tokens, len(honest.fetches))

    return run(main())


CASES = [
    pytest.param(mode, count, lie, marks=[] if count == 4 and mode != "synchronous" else pytest.mark.slow)
    for mode in SETTINGS
    for count in (4, 16)
    for lie in LIES
]


@pytest.mark.parametrize(("mode", "count", "lie"), CASES)
def test_one_liar_neither_rushes_nor_empties_steps(mode: str, count: int, lie: str) -> None:
    honest, beside_it = taken(mode, count), taken(mode, count, lie)
    assert honest.steps >= 40
    assert beside_it.steps == pytest.approx(honest.steps, rel=0.02, abs=1.0)
    assert beside_it.tokens == pytest.approx(honest.tokens, rel=0.03)
    assert not beside_it.fetches, "nor does anybody fetch its state"
