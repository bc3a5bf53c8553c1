"""One hop and the calls around it: entry anywhere, refusal before work, repeats, cancellation, callers that vanish."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from agora_protocol.errors import Busy, DeviceError, NotMyStage, PeerFailed, ProtocolError, Unavailable
from agora_protocol.ids import MicrobatchId, Span, microbatch_id
from agora_protocol.messages import CallProgress, Process
from agora_protocol.tensors import WireTensor

from agora.observe.events import HopRefused, MicrobatchCounted, RepeatServed
from agora.pipeline.barriers import MeanBarrier, StepBarrier
from agora.pipeline.hop import is_hopeless
from agora.pipeline.process_call import ProcessCall
from agora.swarm.peer_score import POINTS_TO_SUSPEND, SUSPENSION_S
from tests.pipeline.world import (
    Node,
    World,
    boundary_of,
    completed,
    gradient_of,
    loss_of,
    peer_id,
    tokens_of,
    train,
    violations_of,
)
from tests.virtual_time import run

MB = microbatch_id(b"session0", 7)


def process(stage: int = 0, microbatch: MicrobatchId = MB, purpose: str = "train") -> Process:
    return Process(microbatch, peer_id("origin"), stage, purpose, 60_000)


async def enter(node: Node, stage: int = 0, *, microbatch=MB, purpose="train", within_s=60.0, progress=None):
    tensors = [boundary_of(microbatch, stage), tokens_of(7)] if stage else [tokens_of(7)]
    deadline = asyncio.get_running_loop().time() + within_s
    call = ProcessCall(process(stage, microbatch, purpose), tensors, deadline, progress or (lambda a: None))
    return await node.hop.process(call)


def counted(world: World, microbatch=MB) -> list[int]:
    return [sum(world.counts(stage, microbatch).values()) for stage in range(world.stage_count)]


@pytest.mark.parametrize("spans", [["0-3"], ["0", "1-3"], ["0-1", "2", "3"], ["0", "1", "2", "3"], ["0-2", "3"]])
def test_a_microbatch_goes_through_any_cut_of_the_pipeline_and_back(spans: list[str]) -> None:
    async def work() -> None:
        world = World(4)
        nodes = [world.add(f"peer{i}", span) for i, span in enumerate(spans)]
        answer = await enter(nodes[0])
        assert answer.message.loss_sum == loss_of(tokens_of(7))
        assert answer.tensors == []
        assert counted(world) == [1, 1, 1, 1]
        assert all(node.device.held == set() and node.ledger.taken == 0 for node in nodes)

    run(work())


def test_a_span_may_be_entered_in_its_middle() -> None:
    async def work() -> None:
        world = World(4)
        node, last = world.add("middle", "0-2"), world.add("last", "3")
        answer = await enter(node, 1)
        assert bytes(answer.tensors[0].data) == bytes(gradient_of(MB, 1).data)
        assert counted(world) == [0, 1, 1, 1]
        assert last.calls_in == 1

    run(work())


def test_evaluation_returns_the_loss_and_counts_nothing() -> None:
    async def work() -> None:
        world = World(3)
        nodes = [world.add(f"peer{i}", str(i)) for i in range(3)]
        answer = await enter(nodes[0], purpose="evaluate")
        assert (answer.message.loss_sum, answer.tensors) == (loss_of(tokens_of(7)), [])
        assert counted(world) == [0, 0, 0]
        assert not any(node.device.held for node in nodes)

    run(work())


def test_progress_tells_the_caller_once_of_every_hop() -> None:
    async def work() -> None:
        world, heard = World(3), []
        nodes = [world.add(f"peer{i}", str(i)) for i in range(3)]
        await enter(nodes[0], progress=heard.append)
        trace = [(a.stage, a.event, a.peer) for a in heard]
        expected = [(0, "accepted"), (1, "accepted"), (2, "accepted"), (0, "finished")]
        assert trace == [(stage, what, nodes[stage].peer) for stage, what in expected]

    run(work())


def test_a_stage_outside_the_span_is_refused_before_any_work() -> None:
    async def work() -> None:
        world = World(3)
        node = world.add("peer", "0-1")
        with pytest.raises(NotMyStage):
            await enter(node, 2)
        assert node.device.busy_s == 0.0
        assert [e.code for e in node.events if isinstance(e, HopRefused)] == ["not-my-stage"]

    run(work())


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [tokens_of(1)],
        [tokens_of(1), boundary_of(MB, 1)],
        [boundary_of(MB, 1), WireTensor("int32", (1, 4), memoryview(bytes(16)))],
        [boundary_of(MB, 1), WireTensor("int64", (1, 3), memoryview(bytes(24)))],
        [boundary_of(MB, 1), tokens_of(1), tokens_of(1)],
        [WireTensor("bf16", (1, 2, 4), memoryview(bytes(16))), tokens_of(1)],
    ],
)
def test_tensors_that_the_run_does_not_imply_are_refused_before_any_work(tensors: list[WireTensor]) -> None:
    async def work() -> None:
        world = World(3)
        node = world.add("peer", "1-2")
        with pytest.raises(ProtocolError):
            await node.hop.process(ProcessCall(process(1), tensors, asyncio.get_running_loop().time() + 9.0, print))
        assert node.device.busy_s == 0.0
        assert node.ledger.taken == 0

    run(work())


def test_without_a_slot_the_answer_is_busy_before_any_work() -> None:
    async def work() -> None:
        world = World(2)
        node, last = world.add("first", "0", slots=2), world.add("last", "1")
        async with asyncio.TaskGroup() as group:
            for i in range(2):
                group.create_task(enter(node, microbatch=microbatch_id(b"session0", i)))
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            with pytest.raises(Busy) as refusal:
                await enter(node)
            assert refusal.value.retry_after_ms > 0
        assert counted(world) == [0, 0]
        assert last.calls_in == 2
        assert [e.code for e in node.events if isinstance(e, HopRefused)] == ["busy"]
        await enter(node)

    run(work())


def test_a_deadline_that_cannot_be_met_is_refused_once_the_hop_knows_its_own_time() -> None:
    async def work() -> None:
        world = World(1)
        node = world.add("peer", "0", service_s=10.0)
        await enter(node)
        other = microbatch_id(b"session0", 8)
        with pytest.raises(Unavailable):
            await enter(node, microbatch=other, within_s=2.0)
        assert node.device.busy_s == 10.0

    run(work())


def test_a_microbatch_waits_for_the_next_step_and_is_sent_away_at_once_with_any_later_one() -> None:
    async def work() -> None:
        world, steps, now = World(2), [0, 3], asyncio.get_running_loop().time
        barrier = StepBarrier(Span(1, 1), steps.__getitem__)
        last = world.add("last", "1", barrier=barrier)

        async def ask(number: int, step: int) -> float:
            microbatch, began = microbatch_id(b"session0", number), now()
            tensors = [boundary_of(microbatch, 1), tokens_of(7)]
            message = replace(process(1, microbatch), step=step)
            await last.hop.process(ProcessCall(message, tensors, began + 600.0, print))
            return now() - began

        assert await ask(0, 3) < 1.0
        assert await ask(1, 2) < 1.0
        for number, step in ((2, 5), (3, 2**60)):
            began = now()
            with pytest.raises(Busy, match="stage 1 has not taken"):
                await ask(number, step)
            assert now() == began
            assert last.ledger.taken == 0
        early = asyncio.create_task(ask(4, 4))
        await asyncio.sleep(10.0)
        assert not early.done()
        steps[1] = 4
        barrier.notify_step()
        assert 10.0 <= await early < 11.0

    run(work())


def test_a_microbatch_waits_for_a_mean_that_comes_soon_and_is_in_work_from_then_on() -> None:
    async def work() -> None:
        world, awaited, now = World(2), {1}, asyncio.get_running_loop().time
        last = world.add("last", "1", barrier=MeanBarrier(Span(1, 1), awaited.__contains__))
        microbatch, began = microbatch_id(b"session0", 0), now()
        tensors = [boundary_of(microbatch, 1), tokens_of(7)]
        answer = asyncio.create_task(
            last.hop.process(ProcessCall(process(1, microbatch), tensors, began + 600.0, print))
        )
        await asyncio.sleep(10.0)
        assert not answer.done()
        assert last.hop.training_count == last.ledger.taken == 0
        awaited.clear()
        await asyncio.sleep(0.07)
        assert last.hop.training_count == 1
        await answer
        assert last.hop.training_count == 0
        assert now() < began + 11.0

    run(work())


def test_a_hop_knows_whether_its_device_waits_for_a_mean_for_later_stages_or_for_microbatches() -> None:
    async def work() -> None:
        world, awaited, now = World(2), {1}, asyncio.get_running_loop().time
        first, last = (
            world.add("first", "0"),
            world.add("last", "1", barrier=MeanBarrier(Span(1, 1), awaited.__contains__)),
        )
        began = now()
        answer = asyncio.create_task(enter(first))
        await asyncio.sleep(10.0)
        awaited.clear()
        await answer
        ended = now()
        await asyncio.sleep(5.0)
        away, held = first.hop.device_time.total(now(), 0.0, 0.0), last.hop.device_time.total(now(), 0.0, 0.0)
        took_s = ended - began
        assert away.peer + away.wire == pytest.approx(took_s, rel=0.5) and away.microbatches >= 5.0 and away.mean == 0.0
        assert held.mean == pytest.approx(10.0, rel=0.1) and held.peer == held.wire == 0.0

    run(work())


def test_a_repeat_is_answered_from_the_cache_and_not_counted_twice() -> None:
    async def work() -> None:
        world, heard = World(2), []
        node, last = world.add("first", "0"), world.add("last", "1")
        first = await enter(node)
        again = await enter(node, progress=heard.append)
        assert again is first
        assert counted(world) == [1, 1]
        assert [a.event for a in heard] == ["finished"]
        assert last.calls_in == 1
        assert len([e for e in node.events if isinstance(e, RepeatServed)]) == 1

    run(work())


def test_a_repeat_joins_the_work_under_way() -> None:
    async def work() -> None:
        world, heard = World(2), []
        node = world.add("first", "0")
        world.add("last", "1", service_s=5.0)
        one = asyncio.create_task(enter(node))
        await asyncio.sleep(1.0)
        two = asyncio.create_task(enter(node, progress=heard.append))
        assert (await one) is (await two)
        assert counted(world) == [1, 1]
        assert [(a.stage, a.event) for a in heard] == [(0, "accepted"), (1, "accepted"), (0, "finished")]

    run(work())


def test_a_repeat_without_a_hint_hears_what_the_first_caller_hinted() -> None:
    async def work() -> None:
        world, heard = World(3), []
        node, _ = world.add("first", "0"), world.add("middle", "1")
        last = world.add("last", "2", service_s=5.0)
        hinted, deadline = replace(process(0, MB), hint=((2, last.peer),)), asyncio.get_running_loop().time() + 60.0
        one = asyncio.create_task(node.hop.process(ProcessCall(hinted, [tokens_of(7)], deadline, print)))
        await asyncio.sleep(1.0)
        await asyncio.gather(one, enter(node, progress=heard.append))
        assert [(a.stage, a.event) for a in heard] == [(stage, "accepted") for stage in range(3)] + [(0, "finished")]

    run(work())


def test_when_one_of_two_callers_leaves_the_other_still_gets_its_answer() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        world.add("last", "1", service_s=5.0)
        one = asyncio.create_task(enter(node))
        await asyncio.sleep(1.0)
        two = asyncio.create_task(enter(node))
        await asyncio.sleep(0.1)
        one.cancel()
        assert (await two).message.tokens == 2
        assert counted(world) == [1, 1]

    run(work())


def test_a_joined_work_that_fails_by_its_own_deadline_is_begun_again_for_the_longer_one() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        one = asyncio.create_task(enter(node, within_s=5.0))
        await asyncio.sleep(1.0)
        two = asyncio.create_task(enter(node, within_s=500.0))
        with pytest.raises(Unavailable):
            await one
        world.add("last", "1")
        await two
        assert counted(world) == [1, 1]

    run(work())


def test_a_caller_that_cancels_frees_the_slot_the_forward_and_everything_downstream() -> None:
    async def work() -> None:
        world = World(3)
        nodes = [world.add("first", "0"), world.add("second", "1"), world.add("last", "2", service_s=50.0)]
        blocker = asyncio.create_task(enter(nodes[2], 2, microbatch=microbatch_id(b"session0", 99)))
        await asyncio.sleep(0.0)
        task = asyncio.create_task(enter(nodes[0]))
        await asyncio.sleep(2.0)
        assert [node.ledger.taken for node in nodes] == [1, 1, 2]
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.1)
        assert [node.ledger.taken for node in nodes] == [0, 0, 2], "the last was committed: it may have been counted"
        assert not nodes[0].device.held
        assert not nodes[1].device.held
        await blocker
        await asyncio.sleep(200.0)
        assert [node.ledger.taken for node in nodes] == [0, 0, 0]
        assert counted(world) == [0, 0, 1]

    run(work())


def test_work_that_is_being_counted_ends_even_when_its_caller_cancels_and_a_repeat_gets_the_result() -> None:
    async def work() -> None:
        world = World(1)
        node = world.add("only", "0", service_s=5.0)
        task = asyncio.create_task(enter(node))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(10.0)
        assert counted(world) == [1]
        await enter(node)
        assert counted(world) == [1]
        assert node.device.busy_s == 5.0

    run(work())


def test_a_caller_that_vanishes_changes_nothing_downstream() -> None:
    async def work() -> None:
        world = World(3)
        nodes = [world.add("first", "0"), world.add("second", "1"), world.add("last", "2", service_s=5.0)]
        asyncio.get_running_loop().create_task(enter(nodes[0]))
        await asyncio.sleep(2.0)
        world.network.kill(nodes[0].peer)
        await asyncio.sleep(20.0)
        assert counted(world) == [0, 1, 1]
        again = world.add("another", "0")
        await enter(again)
        assert counted(world) == [1, 1, 1], "the retry was answered from the second peer's cache"

    run(work())


def test_a_microbatch_that_was_here_at_another_stage_is_refused_rather_than_counted_twice() -> None:
    async def work() -> None:
        world = World(3)
        wide = world.add("wide", "1-2")
        await enter(wide, 1)
        with pytest.raises(Busy):
            await enter(wide, 2)
        assert counted(world) == [0, 1, 1]
        await enter(wide, 2, purpose="evaluate")

    run(work())


def test_two_entries_that_wait_at_the_barrier_together_are_not_both_counted() -> None:
    async def work() -> None:
        world, awaited = World(3), {1, 2}
        wide = world.add("wide", "1-2", barrier=MeanBarrier(Span(1, 2), awaited.__contains__))
        entries = [asyncio.create_task(enter(wide, stage)) for stage in (1, 2)]
        await asyncio.sleep(10.0)
        assert not any(entry.done() for entry in entries)
        awaited.clear()
        outcomes = await asyncio.gather(*entries, return_exceptions=True)
        assert sum(isinstance(outcome, Busy) for outcome in outcomes) == 1
        assert max(counted(world)) == 1

    run(work())


def test_a_failure_of_our_own_device_is_passed_up_and_counts_nothing() -> None:
    async def work() -> None:
        world = World(2)
        node, last = world.add("first", "0"), world.add("last", "1")
        node.device.fail_next.append(DeviceError("the device failed"))
        with pytest.raises(DeviceError):
            await enter(node)
        assert counted(world) == [0, 0]
        assert node.ledger.taken == 0
        assert last.calls_in == 0
        await enter(node)
        assert counted(world) == [1, 1]

    run(work())


def test_a_peer_that_answers_nonsense_is_recorded_and_another_replica_is_asked_with_the_same_forward() -> None:
    async def work() -> None:
        world = World(2)
        node, liar = world.add("first", "0"), world.add("liar", "1")
        liar.device.answers_nonsense = True
        task = asyncio.create_task(enter(node, within_s=600.0))
        await asyncio.sleep(1.0)
        world.add("sound", "1")
        await task
        assert (liar.peer, "useless-gradient", "bad-tensor: the gradient is wrong") in violations_of(node)
        assert counted(world)[0] == 1
        assert len([e for e in node.events if isinstance(e, MicrobatchCounted)]) == 1

    run(work())


def test_a_callee_that_keeps_sending_useless_gradients_is_suspended_and_others_get_the_microbatches() -> None:
    async def work() -> None:
        world = World(2)
        node, liar, sound = world.add("first", "0"), world.add("liar", "1"), world.add("sound", "1")
        liar.device.answers_nonsense = True
        await train(world.origin(node, max_in_flight=2), 60)
        assert len(violations_of(node)) == POINTS_TO_SUSPEND == liar.calls_in
        assert {(peer, violation) for peer, violation, _ in violations_of(node)} == {(liar.peer, "useless-gradient")}
        assert set(node.router.balancer.callees(1)) == {sound.peer}
        assert sound.calls_in >= 60
        assert node.device.counted.total() == len(completed(node.events)) >= 60
        await asyncio.sleep(SUSPENSION_S)
        await enter(node)
        assert set(node.router.balancer.callees(1)) == {sound.peer, liar.peer}, "it is tried again afterwards"

    run(work())


def test_nobody_downstream_becomes_a_typed_refusal_before_our_own_deadline() -> None:
    async def work() -> None:
        world = World(3)
        node = world.add("second", "1")
        started = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable) as refusal:
            await enter(node, 1, within_s=7.0)
        assert refusal.value.stage == 2
        assert "no live peer holds stage 2" in str(refusal.value)
        assert asyncio.get_running_loop().time() - started <= 7.0
        assert not node.device.held
        assert node.ledger.taken == 0

    run(work())


def test_the_fault_points_are_reached_in_order() -> None:
    async def work() -> None:
        world = World(2)
        node, last = world.add("first", "0"), world.add("last", "1")
        await enter(node)
        assert list(node.reached) == ["hop.accepted", "hop.forwarded", "hop.before-answer"]
        assert list(last.reached) == ["hop.accepted", "hop.before-answer"]

    run(work())


def test_a_paused_peer_refuses_newcomers_and_finishes_what_it_has() -> None:
    async def work() -> None:
        world = World(2)
        node, last = world.add("first", "0"), world.add("last", "1", service_s=5.0)
        task = asyncio.create_task(enter(node))
        await asyncio.sleep(1.0)
        last.ledger.stop_accepting("paused by its owner")
        with pytest.raises(Busy):
            await enter(last, 1, microbatch=microbatch_id(b"session0", 9))
        await task
        last.ledger.start_accepting()
        await enter(last, 1, microbatch=microbatch_id(b"session0", 9))
        assert await last.ledger.drain(1.0, "leaving")

    run(work())


def test_leaving_waits_for_what_has_a_slot_but_not_for_ever() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        task = asyncio.create_task(enter(node, within_s=100.0))
        await asyncio.sleep(1.0)
        started = asyncio.get_running_loop().time()
        assert not await node.ledger.drain(5.0, "leaving")
        assert asyncio.get_running_loop().time() - started == pytest.approx(5.0)
        with pytest.raises(PeerFailed, match="ask another"):
            await task
        assert node.ledger.taken == 0
        assert not node.device.held

    run(work())


@pytest.mark.parametrize("stage", [0, 1])
def test_leaving_answers_what_the_device_counts_at_that_moment(stage: int) -> None:
    """Its caller would else have it counted a second time by another peer."""

    async def work() -> None:
        world = World(2)
        nodes = [world.add("first", "0"), world.add("last", "1")]
        node = nodes[stage]
        node.device.service_s = 6.0  # of the first stage 2 s forward and 4 s backward; of the last one job
        task = asyncio.create_task(enter(node, stage))
        await asyncio.sleep(3.0)
        assert not await node.ledger.drain(0.5, "leaving")
        await task
        node.ledger.start_accepting()
        await enter(node, stage)
        assert node.device.counted == {(stage, MB): 1}, "the answer is kept"

    run(work())


def test_leaving_drops_what_still_waits_for_the_device() -> None:
    async def work() -> None:
        world = World(2)
        last = world.add("last", "1", service_s=4.0)
        tasks = [
            asyncio.create_task(enter(last, 1, microbatch=microbatch_id(b"session0", number))) for number in range(3)
        ]
        await asyncio.sleep(1.0)
        assert not await last.ledger.drain(0.5, "leaving")
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(it) for it in done[1:]] == [PeerFailed, PeerFailed] and not isinstance(done[0], Exception)
        assert sum(last.device.counted.values()) == 1

    run(work())


def test_news_for_a_caller_that_joins_late_begins_with_the_latest() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        one = asyncio.create_task(enter(node))
        await asyncio.sleep(1.0)
        heard: list[CallProgress] = []
        two = asyncio.create_task(enter(node, progress=heard.append))
        await asyncio.sleep(0.1)
        assert [a.event for a in heard] == ["accepted"]
        world.add("last", "1")
        await one
        await two

    run(work())


def test_a_deadline_is_hopeless_when_half_the_usual_work_does_not_fit() -> None:
    assert is_hopeless(0.0, 0.0)
    assert is_hopeless(0.9, 2.0)
    assert not is_hopeless(1.1, 2.0)
    assert not is_hopeless(0.1, 0.0)
