"""Where microbatches wait for a step or for a mean: only as long as they may, and without a trace."""

from __future__ import annotations

import asyncio

import pytest
from agora_protocol.errors import Busy
from agora_protocol.ids import Span, microbatch_id
from agora_protocol.messages import Process

from agora.pipeline.barriers import BEHIND_RETRY_MS, MAX_WAIT_FRACTION, POLL_INTERVAL_S, MeanBarrier, StepBarrier
from tests.pipeline.world import peer_id
from tests.virtual_time import VirtualLoop, run


class Stages:
    """The steps that stages 2, 3 and 4 have taken."""

    def __init__(self) -> None:
        self.steps = {2: 0, 3: 0, 4: 0}
        self.barrier = StepBarrier(Span(2, 4), self.steps.__getitem__)

    def step(self, *stages: int) -> None:
        for stage in stages:
            self.steps[stage] += 1
        self.barrier.notify_step()


def now() -> float:
    return asyncio.get_running_loop().time()


def entering(stage: int, step: int = 0) -> Process:
    return Process(microbatch_id(b"session0", 1), peer_id("origin"), stage, "train", 60_000, step=step)


def waiting_microbatches() -> int:
    """Microbatches that wait at the barrier: each has a timer of the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.open_timers()


def test_who_is_not_ahead_passes_at_once() -> None:
    async def work() -> None:
        stages, began = Stages(), now()
        await stages.barrier.hold(entering(2, 0), began + 10.0)
        stages.step(2, 3, 4)
        await stages.barrier.hold(entering(2, 0), began + 10.0)
        await stages.barrier.hold(entering(2, 1), began + 10.0)
        await stages.barrier.hold(entering(2, 1), began - 10.0)
        assert now() == began, "even when the deadline is over"

    run(work())


def test_it_waits_for_all_stages_that_the_microbatch_enters_and_for_no_other() -> None:
    async def work() -> None:
        stages, passed = Stages(), []

        async def enter(first: int) -> None:
            await stages.barrier.hold(entering(first, 1), now() + 100.0)
            passed.append(first)

        waiting = [asyncio.create_task(enter(first)) for first in (2, 3, 4)]
        for stepped, expected in ((4, [4]), (2, [4]), (3, [4, 2, 3])):
            await asyncio.sleep(1.0)
            stages.step(stepped)
            await asyncio.sleep(1.0)
            assert passed == expected
        await asyncio.gather(*waiting)
        assert waiting_microbatches() == 0

    run(work())


def test_waiting_microbatches_go_step_by_step_and_within_a_step_in_the_order_they_came() -> None:
    async def work() -> None:
        stages, passed = Stages(), []

        async def enter(name: int, step: int) -> None:
            await stages.barrier.hold(entering(2, step), now() + 1000.0)
            passed.append((step, name))

        waiting = []
        for step in (1, 2, 3):
            waiting += [asyncio.create_task(enter(name, number)) for name, number in enumerate([step, step - 1, step])]
            await asyncio.sleep(5.0)
            assert all(it <= step - 1 for it, _ in passed)
            stages.step(2, 3, 4)
        await asyncio.gather(*waiting)
        assert passed == [(0, 1), (1, 0), (1, 2), (1, 1), (2, 0), (2, 2), (2, 1), (3, 0), (3, 2)]

    run(work())


def test_who_is_two_steps_ahead_of_a_stage_that_it_enters_is_refused_at_once() -> None:
    async def work() -> None:
        stages, began = Stages(), now()
        stages.step(2, 4)
        with pytest.raises(Busy, match="has not taken step 2"):
            await stages.barrier.hold(entering(2, 2), began + 20.0)
        assert now() == began
        await stages.barrier.hold(entering(4, 1), began + 20.0)

    run(work())


def test_who_is_not_let_in_is_sent_away_while_there_is_time_for_another_peer() -> None:
    async def work() -> None:
        stages, began = Stages(), now()
        stages.step(2, 4)
        with pytest.raises(Busy) as refusal:
            await stages.barrier.hold(entering(2, 1), began + 20.0)
        assert now() - began == pytest.approx(MAX_WAIT_FRACTION * 20.0)
        assert "stage 3 has not taken step 1" in str(refusal.value) and refusal.value.retry_after_ms == BEHIND_RETRY_MS
        assert waiting_microbatches() == 0

    run(work())


def test_steps_that_are_not_enough_do_not_lengthen_the_wait() -> None:
    async def work() -> None:
        stages, began = Stages(), now()
        waiting = asyncio.create_task(stages.barrier.hold(entering(2, 1), began + 20.0))
        for _ in range(30):
            await asyncio.sleep(1.0)
            stages.step(2, 4)
            if waiting.done():
                break
        with pytest.raises(Busy):
            await waiting
        assert now() - began <= MAX_WAIT_FRACTION * 20.0 + 1.0

    run(work())


def test_a_deadline_that_is_over_refuses_at_once() -> None:
    async def work() -> None:
        stages, began = Stages(), now()
        with pytest.raises(Busy):
            await stages.barrier.hold(entering(2, 1), began - 5.0)
        assert now() == began

    run(work())


def test_a_cancelled_wait_leaves_nothing_behind_and_holds_up_nobody() -> None:
    async def work() -> None:
        stages = Stages()
        waiting = [asyncio.create_task(stages.barrier.hold(entering(2, 1), now() + 1000.0)) for _ in range(5)]
        await asyncio.sleep(1.0)
        for task in waiting[:4]:
            task.cancel()
        await asyncio.wait(waiting[:4])
        assert all(task.cancelled() for task in waiting[:4])
        assert waiting_microbatches() == 1, "what the fifth needs"
        waiting[4].cancel()
        stages.step(2, 3, 4)
        await asyncio.wait(waiting)
        assert waiting_microbatches() == 0, "also when the step and the cancellation come together"
        await stages.barrier.hold(entering(2, 1), now() + 1.0)

    run(work())


def test_microbatches_wait_for_a_mean_in_their_stages_until_it_is_in_or_not_awaited_any_more() -> None:
    async def work() -> None:
        awaited = {3: True}
        barrier, began = MeanBarrier(Span(2, 4), lambda stage: awaited.get(stage, False)), now()
        await barrier.hold(entering(4), began + 10.0)
        assert now() == began, "stage 3 is before it"
        waiting = asyncio.create_task(barrier.hold(entering(2), began + 10.0))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        awaited.clear()
        barrier.notify_step()
        await waiting
        assert now() == pytest.approx(began + 1.0), "at once"
        awaited[2] = True
        again = asyncio.create_task(barrier.hold(entering(2), began + 10.0))
        await asyncio.sleep(0.1)
        awaited.clear()
        await asyncio.sleep(1.1 * POLL_INTERVAL_S)
        assert again.done(), "the time is over for which it is awaited, of which nobody tells"

    run(work())


def test_a_mean_that_never_comes_keeps_no_microbatch_beyond_half_of_its_time() -> None:
    async def work() -> None:
        began = now()
        await MeanBarrier(Span(2, 4), lambda stage: True).hold(entering(2), began + 10.0)
        assert now() == pytest.approx(began + MAX_WAIT_FRACTION * 10.0)

    run(work())
