"""The step instructions' rules, and the queue of step events, without a device or a swarm."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from agora_protocol.manifest_sections import ALL_STEPS

from agora.core.step_instructions import StageStepped, StepInstructions
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.train.device_worker import MAX_EVENTS, StepEvents

KNOWN = StepInstructions(target_tokens=1000, averages=True, step=7, own_tokens=400, alone=True)


def test_the_tokens_needed_of_this_replica_are_known_for_that_step_only() -> None:
    assert [KNOWN.tokens_needed(step) for step in (6, 7, 8)] == [1000, 400, 1000]


@pytest.mark.parametrize(
    ("first_local", "alone", "step", "waits"),
    [
        (0, False, 7, False),
        (7, False, 7, False),
        (8, False, 7, True),
        (8, True, 7, False),
        (9, True, 8, True),
        (9, True, 6, True),
        (9, True, 9, False),
        (ALL_STEPS, False, ALL_STEPS - 1, True),
    ],
)
def test_an_all_reduce_step_waits_unless_this_replica_is_known_to_be_alone_at_it(
    first_local: int, alone: bool, step: int, waits: bool
) -> None:
    assert replace(KNOWN, alone=alone).uses_mean_gradient(step, SyncSchedule(0, first_local, 20)) == waits


def test_a_part_is_closed_at_once_only_of_the_step_that_the_instructions_are_of_and_where_the_mean_is_awaited() -> None:
    closing = replace(KNOWN, alone=False, closes_share=True)
    assert [closing.must_close(step, ONLY_ALL_REDUCE) for step in (6, 7, 8)] == [False, True, False]
    assert not replace(closing, closes_share=False).must_close(7, ONLY_ALL_REDUCE)
    assert not closing.must_close(7, SyncSchedule(0, 7, 20)) and closing.must_close(7, SyncSchedule(20, 7, 0))
    assert not replace(closing, alone=True).must_close(7, ONLY_ALL_REDUCE)
    assert not replace(closing, averages=False).must_close(7, ONLY_ALL_REDUCE)


def test_instructions_that_know_nothing_of_others_ask_for_the_whole_target_and_waits_where_steps_are_exact() -> None:
    first, local = StepInstructions(target_tokens=1000, averages=True), SyncSchedule(0, 2, 20)
    assert [(first.tokens_needed(step), first.uses_mean_gradient(step, local)) for step in (0, 1, 2)] == [
        (1000, True),
        (1000, True),
        (1000, False),
    ]


def test_step_events_of_another_thread_reach_their_one_reader_in_order() -> None:
    sent = [StageStepped(stage=0, step=step, own_tokens=32) for step in range(1, 200)]

    async def whole() -> list[StageStepped]:
        events, received = StepEvents(), []
        thread = threading.Thread(target=lambda: [events.put(event) for event in sent])
        thread.start()
        async for event in events:
            received.append(event)
            if len(received) == len(sent):
                break
        thread.join()
        return received

    assert asyncio.run(asyncio.wait_for(whole(), 30)) == sent


def test_step_events_that_nobody_reads_are_bounded_and_the_newest_are_kept() -> None:
    async def whole() -> StageStepped:
        events = StepEvents()
        for step in range(MAX_EVENTS + 10):
            events.put(StageStepped(0, step, 0))
        return await anext(aiter(events))

    assert asyncio.run(whole()).step == 10


def test_a_step_after_the_loop_has_closed_is_nobodys_concern() -> None:
    async def whole() -> StepEvents:
        return StepEvents()

    asyncio.run(whole()).put(StageStepped(0, 1, 0))
