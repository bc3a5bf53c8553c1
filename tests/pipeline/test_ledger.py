"""The work ledger: started once, joined, repeated; what it refuses; what it still answers after a move."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from agora_protocol.errors import Busy, NotMyStage, OutOfMemory, PeerFailed
from agora_protocol.ids import microbatch_id
from agora_protocol.messages import CallProgress, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.fair_shares import Requester
from agora.observe.events import Event, RepeatServed, SlotsChanged
from agora.pipeline.process_call import HopAnswer, ProcessCall
from agora.pipeline.work_ledger import ANSWERS_PER_SLOT, ENTRY_BYTES, AnswerCache, RunningWork, WorkKey, WorkLedger
from tests.pipeline.world import World, boundary_of, gradient_of, peer_id, tokens_of
from tests.virtual_time import run

MB = microbatch_id(b"session0", 1)


def process(stage: int, number: int = 1) -> Process:
    return Process(microbatch_id(b"session0", number), peer_id("origin"), stage, "train", 60_000)


def answer(number: int = 1) -> HopAnswer:
    return HopAnswer(Processed(float(number), 2, 1.0), [gradient_of(MB, number)])


def call_of(
    request: Process,
    caller: Requester | None = None,
    tensors: Sequence[WireTensor] = (),
    heard: list[CallProgress] | None = None,
) -> ProcessCall:
    on_progress = [].append if heard is None else heard.append
    return ProcessCall(request, tensors, asyncio.get_running_loop().time() + 60.0, on_progress, caller)


class Entries:
    """A ledger whose work ends when it is told to."""

    def __init__(self, slots: int = 2) -> None:
        self.events: list[Event] = []
        self.ledger = WorkLedger(peer_id("me"), slots, self.events.append)
        self.started: list[WorkKey] = []
        self.finish = asyncio.Event()

    async def work(self, work: RunningWork) -> HopAnswer:
        self.started.append(work.key)
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)  # as a device that ends its job first
            raise
        return answer()

    def enter(self, stage: int, number: int = 1, last: int = 2) -> asyncio.Task[HopAnswer]:
        return asyncio.create_task(self.ledger.run(call_of(process(stage, number)), last, self.work))


def test_the_same_work_is_started_once_and_both_callers_get_its_answer() -> None:
    async def work() -> None:
        entries = Entries()
        one, two = entries.enter(1), entries.enter(1)
        await asyncio.sleep(1.0)
        entries.finish.set()
        assert (await one) is (await two) and [key[:2] for key in entries.started] == [(MB, 1)]
        assert entries.events == [RepeatServed(MB.hex(), 1)] and entries.ledger.taken == 0

    run(work())


def test_running_work_takes_a_slot_until_it_has_ended_also_when_it_was_cancelled() -> None:
    async def work() -> None:
        entries = Entries(slots=2)
        tasks = [entries.enter(1, number) for number in (1, 2)]
        await asyncio.sleep(1.0)
        with pytest.raises(Busy, match="all 2 slots are taken"):
            await entries.enter(1, 3)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert entries.ledger.taken == 2, "cancelled, but not ended"
        await asyncio.sleep(1.0)
        assert entries.ledger.taken == 1
        entries.finish.set()
        await entries.enter(1, 3)
        assert await entries.ledger.drain(5.0, "leaving")

    run(work())


def test_a_ledger_that_takes_nothing_new_still_answers_repeats_and_lets_work_be_joined() -> None:
    async def work() -> None:
        entries = Entries()
        one = entries.enter(1)
        await asyncio.sleep(1.0)
        entries.ledger.stop_accepting("moving to other stages")
        two = entries.enter(1)
        with pytest.raises(Busy, match="moving to other stages"):
            await entries.enter(1, 2)
        entries.finish.set()
        assert (await one) is (await two)
        assert entries.ledger.answer_repeat(call_of(process(1))) is await one
        entries.ledger.start_accepting()
        await entries.enter(1, 2)

    run(work())


def test_callers_of_work_that_is_cancelled_at_the_end_are_told_to_ask_another_peer() -> None:
    async def work() -> None:
        entries = Entries()
        waiting = [entries.enter(1), entries.enter(1)]
        gone = entries.enter(1, 2)
        await asyncio.sleep(1.0)
        ending = asyncio.create_task(entries.ledger.drain(1.0, "moving to other stages"))
        await asyncio.sleep(1.25)  # the work is cancelled, and has not ended yet
        gone.cancel()
        assert not await ending
        errors = await asyncio.gather(*waiting, gone, return_exceptions=True)
        assert [type(error) for error in errors] == [PeerFailed, Busy, asyncio.CancelledError]

    run(work())


def test_a_repeat_of_cancelled_work_gets_the_answer_of_what_was_counted_all_the_same() -> None:
    async def work() -> None:
        entries, counted = Entries(), []

        async def count(work: RunningWork) -> HopAnswer:
            work.mark_maybe_counted()
            with contextlib.suppress(asyncio.CancelledError):  # as a device that has begun to count
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)
            counted.append(work.key)
            return answer()

        enter = lambda: asyncio.create_task(entries.ledger.run(call_of(process(1)), 2, count))  # noqa: E731
        first = enter()
        await asyncio.sleep(0.1)
        ending = asyncio.create_task(entries.ledger.drain(0.1, "moving to other stages"))
        await asyncio.sleep(0.5)
        entries.ledger.start_accepting()
        repeat = enter()
        assert not await ending
        assert (await first) is (await repeat) and len(counted) == 1

    run(work())


def test_cancelled_work_ends_when_its_gradient_could_not_be_counted_after_all() -> None:
    async def work() -> None:
        entries = Entries()

        async def refuse(work: RunningWork) -> HopAnswer:
            work.mark_maybe_counted()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)
            work.mark_not_counted()
            await asyncio.sleep(100.0)  # asks another peer
            return answer()

        waiting = asyncio.create_task(entries.ledger.run(call_of(process(1)), 2, refuse))
        await asyncio.sleep(0.1)
        assert not await entries.ledger.drain(0.1, "leaving")
        with pytest.raises(PeerFailed):
            await waiting

    run(work())


def test_a_microbatch_is_counted_once_per_stage_whichever_spans_this_peer_held() -> None:
    async def work() -> None:
        entries = Entries()
        entries.finish.set()
        await entries.enter(1, last=2)
        entries.ledger.refuse_overlap(WorkKey(MB, 1), 2)  # the same entry: a repeat
        entries.ledger.refuse_overlap(WorkKey(MB, 3), 4)  # other stages, which it holds after a move
        entries.ledger.refuse_overlap(WorkKey(MB, 0), 0)
        for first, last in ((2, 2), (0, 1), (0, 4), (2, 4)):
            with pytest.raises(Busy, match="entered this peer at stage 1"):
                entries.ledger.refuse_overlap(WorkKey(MB, first), last)

    run(work())


LIAR, HONEST, REPLICA = (Requester("", peer_id(name)) for name in ("liar", "honest", "honest replica"))


def test_who_sends_the_ids_of_others_first_neither_answers_nor_blocks_them() -> None:
    """Whether the liar's work is over or runs, and whichever stage it entered."""

    async def work() -> None:
        entries = Entries(slots=400)
        sent_by_liar = [boundary_of(b"a liar's boundary", 1), tokens_of(1)]
        true = [boundary_of(MB, 1), tokens_of(1)]

        async def answer_by_content(work: RunningWork) -> HopAnswer:
            return HopAnswer(Processed(0.0, 2, 1.0), [gradient_of(work.key.content_digest, 1)])

        for number in range(100):
            for stage, liar in ((1, LIAR), (2, Requester("", peer_id("second liar")))):
                lie = call_of(process(stage, number), liar, sent_by_liar)
                await entries.ledger.run(lie, 2, answer_by_content)
        still_running = [
            asyncio.create_task(entries.ledger.run(call_of(process(1, number), LIAR, sent_by_liar), 2, entries.work))
            for number in range(100, 200)
        ]
        await asyncio.sleep(0)
        for number in range(200):
            call = call_of(process(1, number), HONEST, true)
            assert entries.ledger.answer_repeat(call) is None
            answered = await entries.ledger.run(call, 2, answer_by_content)
            assert bytes(answered.tensors[0].data) == bytes(gradient_of(call.content_digest, 1).data)
        entries.finish.set()
        await asyncio.gather(*still_running)

    run(work())


def test_a_kept_answer_is_for_who_asked_and_for_who_sends_the_same() -> None:
    async def work() -> None:
        entries = Entries()
        entries.finish.set()
        ledger, sent = entries.ledger, [boundary_of(MB, 1), tokens_of(1)]
        kept = await ledger.run(call_of(process(1), HONEST, sent), 2, entries.work)
        assert ledger.answer_repeat(call_of(process(1), REPLICA, sent)) is kept, "a replica that computed the same"
        assert ledger.answer_repeat(call_of(process(1), HONEST, [boundary_of(MB, 2), tokens_of(1)])) is kept
        for tensors in ([boundary_of(MB, 2), tokens_of(1)], [boundary_of(MB, 1), tokens_of(2)], sent[1:]):
            assert ledger.answer_repeat(call_of(process(1), REPLICA, tensors)) is None
        assert ledger.answer_repeat(call_of(replace(process(1), purpose="evaluate"), REPLICA, sent)) is None

    run(work())


def test_a_repeat_of_a_former_span_is_answered_without_a_span_and_by_the_hop_of_the_next_span() -> None:
    async def work() -> None:
        world = World(3)
        mover = world.add("mover", "1-2")
        deadline = asyncio.get_running_loop().time() + 60.0
        tensors = [boundary_of(MB, 1), tokens_of(1)]
        first = await mover.hop.process(ProcessCall(process(1), tensors, deadline, lambda news: None))
        assert await mover.ledger.drain(5.0, "moving to other stages")
        heard: list[CallProgress] = []
        assert mover.ledger.answer_repeat(call_of(process(1), heard=heard)) is first, "no span is held"
        assert [(news.stage, news.event) for news in heard] == [(1, "finished")]
        assert mover.ledger.answer_repeat(call_of(process(1, 9), heard=heard)) is None
        world.move(mover, "0")
        assert await mover.hop.process(ProcessCall(process(1), [], deadline, heard.append)) is first
        with pytest.raises(NotMyStage):
            await mover.hop.process(ProcessCall(process(1, 9), tensors, deadline, heard.append))
        assert sum(mover.device.counted.values()) == 0, "the new span has counted nothing"

    run(work())


def test_kept_answers_are_bounded_in_bytes_and_in_age() -> None:
    size = answer().nbytes + ENTRY_BYTES
    cache = AnswerCache(max_bytes=2 * size, max_age_s=100.0)
    keys = [WorkKey(MB, stage) for stage in range(3)]
    for stage, key in enumerate(keys):
        cache.put(key, stage, answer(stage), now=float(stage))
    assert cache.get(keys[0], 3.0) is None and cache.get(keys[1], 3.0) is not None
    assert cache.nbytes == 2 * size and cache.last_stages_of(MB, 3.0) == {keys[1]: 1, keys[2]: 2}
    assert cache.get(keys[1], 101.5) is None and cache.nbytes == size, "older than 100 s"
    assert cache.get(keys[2], 103.0) is None and cache.nbytes == 0 and cache.last_stages_of(MB, 103.0) == {}


def test_work_that_runs_out_of_memory_costs_a_slot_which_comes_back_after_many_answers() -> None:
    async def work() -> None:
        entries = Entries(slots=4)
        ledger = entries.ledger

        async def fail(work: RunningWork) -> HopAnswer:
            raise OutOfMemory("the device is out of memory")

        async def answer_at_once(work: RunningWork) -> HopAnswer:
            return answer()

        running = [entries.enter(1, number) for number in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(OutOfMemory):
            await ledger.run(call_of(process(1, 3)), 2, fail)
        with pytest.raises(Busy, match="all 2 slots are taken"):
            await entries.enter(1, 4)
        entries.finish.set()
        await asyncio.gather(*running)
        for number in range(2 * ANSWERS_PER_SLOT):
            await ledger.run(call_of(process(1, 100 + number)), 2, answer_at_once)
        changes = [event.slots for event in entries.events if isinstance(event, SlotsChanged)]
        assert changes == [2, 3, 4], "three were here, one failed; then one more after each so many answers"

    run(work())


def test_a_caller_that_has_its_share_of_the_slots_leaves_the_last_one_to_others() -> None:
    async def work() -> None:
        entries, waiting = Entries(slots=8), list[asyncio.Task[HopAnswer]]()
        greedy, other = Requester("203.0.113.0/24", peer_id("greedy")), Requester("198.51.100.0/24", peer_id("other"))

        async def ask(caller: Requester) -> str:
            call = call_of(process(1, len(waiting)), caller)
            waiting.append(asyncio.create_task(entries.ledger.run(call, 1, entries.work)))
            await asyncio.sleep(0)
            return str(waiting[-1].exception()) if waiting[-1].done() else ""

        assert not await ask(other)
        assert [await ask(greedy) for _ in range(8)] == [""] * 6 + ["your share of the 8 slots is taken"] * 2
        assert not await ask(other), "one slot was left for it"
        assert await ask(other) == "all 8 slots are taken"
        entries.finish.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(work())
