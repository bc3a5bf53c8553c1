"""Origins that share a synchronous step: it is completed once when their allotments add up, and completed when not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from agora_protocol.messages import Processed

from agora.pipeline.flow_control import TOP_UP_AFTER_S, SendInputs, StepState, equal_part
from agora.pipeline.origin import POLL_INTERVAL_S, Origin, OriginConfig
from agora.pipeline.process_call import HopAnswer, ProcessCall
from tests.pipeline.world import TOKENS, Source, peer_id
from tests.virtual_time import run

STEP = 8
"""Microbatches that make a step."""


class Stage:
    """Stage 0 of a run, as all its replicas see it: steps when a step's tokens are counted. `opened` by step.

    ranks: each origin's rank and how many it sees; `by_origin` counts what it opened of a step.
    """

    def __init__(self, ranks: Sequence[tuple[int, int]], seconds: float = 1.0, ceiling: int = 16) -> None:
        self.step, self.tokens, self.seconds = 0, 0, seconds
        self.opened: Counter[int] = Counter()
        self.by_origin: Counter[tuple[int, int]] = Counter()
        self.began = asyncio.get_running_loop().time()
        self.took: list[float] = []
        self.ranks = list(ranks)
        self.has_enough = [True] * len(ranks)
        self.origins = [self._origin(index, ceiling) for index in range(len(ranks))]
        self.running = [asyncio.create_task(origin.run()) for origin in self.origins]

    def _origin(self, index: int, ceiling: int) -> Origin:
        config = OriginConfig(peer_id(f"origin {index}"), 2, ceiling)

        def look() -> SendInputs:
            lacking = STEP - self.tokens // TOKENS
            return SendInputs(self.has_enough[index], StepState(self.step, STEP, lacking, *self.ranks[index]))

        entrance, session = _Entrance(self, index), bytes([index]) * 8
        return Origin(config, entrance, Source(), lambda event: None, look, session=session)

    def count(self) -> None:
        self.tokens += TOKENS
        if self.tokens >= STEP * TOKENS:
            now = asyncio.get_running_loop().time()
            self.took.append(now - self.began)
            self.step, self.tokens, self.began = self.step + 1, 0, now
            for origin in self.origins:
                origin.notify_step()

    async def kill(self, index: int) -> None:
        self.running[index].cancel()
        await asyncio.wait([self.running[index]])

    async def close(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.wait(self.running)


class _Entrance:
    def __init__(self, stage: Stage, index: int) -> None:
        self.stage, self.index = stage, index

    async def process(self, call: ProcessCall) -> HopAnswer:
        stage, message = self.stage, call.request
        stage.opened[message.step] += 1
        stage.by_origin[message.step, self.index] += 1
        await asyncio.sleep(stage.seconds)
        stage.count()
        return HopAnswer(Processed(1.0, TOKENS, 1.0))


def test_allotments_are_whole_numbers_that_sum_to_the_step() -> None:
    for origins in range(1, 12):
        for microbatches in (1, 8, 9):
            allotments = [equal_part(microbatches, rank, origins) for rank in range(origins)]
            assert sum(allotments) == microbatches and max(allotments) - min(allotments) <= 1


def test_allotments_that_add_up_make_each_step_of_exactly_its_microbatches_without_a_pause() -> None:
    async def work() -> None:
        stage = Stage([(rank, 3) for rank in range(3)])
        await asyncio.sleep(10.5)
        assert stage.step == 10 and all(stage.opened[step] == STEP for step in range(10))
        assert [stage.by_origin[4, index] for index in range(3)] == [3, 3, 2]
        assert all(abs(it - stage.seconds) < 1e-3 for it in stage.took)
        await stage.close()

    run(work())


def test_what_allotments_leave_open_is_opened_after_a_grace_period_by_who_has_nothing_to_do() -> None:
    async def work() -> None:
        stage = Stage([(1, 3), (2, 3)])  # nobody is the first of the three: 3 + 2 of 8 are opened
        await asyncio.sleep(1.0 + TOP_UP_AFTER_S - 0.1)
        assert stage.step == 0 and stage.opened[0] == 5, "not before"
        await asyncio.sleep(0.1 + POLL_INTERVAL_S)
        assert stage.opened[0] == 7, "a third of the three that lack, each"
        while stage.step < 3:
            await asyncio.sleep(0.1)
        assert all(stage.opened[step] <= STEP + 1 for step in range(3))
        assert all(it < stage.seconds + 2 * (TOP_UP_AFTER_S + POLL_INTERVAL_S + stage.seconds) for it in stage.took)
        await stage.close()

    run(work())


def test_allotments_that_are_too_large_overshoot_by_no_more_than_what_was_opened_at_once() -> None:
    async def work() -> None:
        stage = Stage([(0, 1), (0, 1)])
        await asyncio.sleep(20.0)
        assert stage.step >= 19
        assert max(stage.opened.values()) <= 2 * STEP
        await stage.close()

    run(work())


def test_an_origin_that_dies_costs_grace_periods_until_the_others_see_it_and_nothing_after() -> None:
    async def work() -> None:
        stage = Stage([(0, 2), (1, 2)])
        await asyncio.sleep(5.5)
        assert stage.step == 5
        await stage.kill(1)
        while stage.step < 7:
            await asyncio.sleep(0.1)
        least = stage.seconds + 3 * (TOP_UP_AFTER_S + stage.seconds)
        longest = least + 3 * POLL_INTERVAL_S
        assert least - 0.1 < stage.took[-1] < longest + 0.1, "its own 4, then halves of what lacks: 2, 1, 1"
        assert stage.by_origin[6, 0] == STEP
        stage.ranks[0] = (0, 1)
        while stage.step < 9:
            await asyncio.sleep(0.1)
        assert stage.took[-1] < stage.seconds + 1e-3 and stage.opened[8] == STEP
        await stage.close()

    run(work())


def test_a_step_that_lacks_nothing_is_not_topped_up_however_long_it_takes() -> None:
    async def work() -> None:
        stage = Stage([(0, 2), (1, 2)])
        stage.count = lambda: setattr(stage, "tokens", stage.tokens + TOKENS)
        await asyncio.sleep(100 * TOP_UP_AFTER_S)
        assert stage.step == 0 and stage.opened == {0: STEP}, "all is counted: the step is only being taken"
        await stage.close()

    run(work())


def test_an_origin_with_something_open_tops_nothing_up() -> None:
    async def work() -> None:
        stage = Stage([(0, 2), (0, 2)], seconds=10 * TOP_UP_AFTER_S)
        stage.has_enough[1] = False
        await asyncio.sleep(10 * TOP_UP_AFTER_S - 0.1)
        assert stage.opened == {0: STEP // 2}
        await stage.close()

    run(work())


def test_an_origin_that_may_not_begin_opens_nothing_and_begins_when_it_may() -> None:
    async def work() -> None:
        stage = Stage([(0, 1)])
        stage.has_enough[0] = False
        await asyncio.sleep(50.0)
        assert not stage.opened
        stage.has_enough[0] = True
        await asyncio.sleep(2.0)
        assert stage.opened[0] == STEP
        await stage.close()

    run(work())


def test_a_top_up_never_exceeds_the_memory() -> None:
    async def work() -> None:
        stage = Stage([(0, 1), (1, 2)], ceiling=3)
        await stage.kill(1)
        began = stage.step
        while stage.step < began + 3:
            await asyncio.sleep(0.05)
            assert stage.origins[0].open_count <= 3
        await stage.close()

    run(work())
