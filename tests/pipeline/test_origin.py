"""The origin: send window, both schedules, evaluation, pause, leaving, and that nothing started is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from agora_protocol.errors import AgoraError, Busy, PeerFailed, Unavailable
from agora_protocol.ids import microbatch_id
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.span_work import DrawnMicrobatch
from agora.observe.events import EvaluationDone, Event, MicrobatchDropped, MicrobatchRerouted
from agora.pipeline.flow_control import SendInputs, StepState
from agora.pipeline.origin import Origin, OriginConfig
from agora.pipeline.process_call import HopAnswer, ProcessCall
from tests.pipeline.world import (
    TOKENS,
    Source,
    World,
    completed,
    dropped,
    loss_of,
    peer_id,
    started,
    tokens_of,
    train,
)
from tests.virtual_time import run


class Entrance:
    """A pipeline that answers after a while, or as told."""

    def __init__(self, seconds: float = 1.0, answers: Sequence[AgoraError | float] = ()) -> None:
        self.seconds, self.answers = seconds, list(answers)
        self.open, self.most, self.seen, self.answered = 0, 0, [], 0

    async def process(self, call: ProcessCall) -> HopAnswer:
        message, loop = call.request, asyncio.get_running_loop()
        self.seen.append((message, bytes(call.tensors[0].data), call.deadline - loop.time(), loop.time()))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            told = self.answers.pop(0) if self.answers else self.seconds
            if isinstance(told, AgoraError):
                raise told
            await asyncio.sleep(told)
            self.answered += 1
            return HopAnswer(Processed(loss_of(call.tensors[0]), TOKENS, 1.0))
        finally:
            self.open -= 1


STEP = 8
"""Microbatches that make a step."""


def origin_of(
    entrance: Entrance,
    events: list | None = None,
    rank=(0, 1),
    latency_s=None,
    synchronous=False,
    source: Source | None = None,
    **settings,
) -> Origin:
    values = {"me": peer_id("origin"), "stage_count": 2, "ceiling": 16} | settings
    report = (lambda e: None) if events is None else events.append

    def look() -> SendInputs:
        step, counted = divmod(entrance.answered, STEP)
        state = StepState(step, STEP, STEP - counted, *rank)
        return SendInputs(True, state if synchronous else None, latency_s)

    return Origin(OriginConfig(**values), entrance, source or Source(), report, look, session=b"origin00")


def test_a_microbatch_keeps_the_codec_that_was_in_force_when_it_was_opened() -> None:
    async def work() -> None:
        entrance = Entrance(0.1, [PeerFailed("gone"), 0.1])
        codecs = iter(["", "int8", "int8"])
        origin = Origin(
            OriginConfig(peer_id("origin"), 1, ceiling=1),
            entrance,
            Source(),
            lambda _: None,
            codec=lambda: next(codecs),
        )
        await train(origin, 2)
        assert [(message.microbatch, message.codec) for message, *_ in entrance.seen[:2]] == [
            (entrance.seen[0][0].microbatch, "")
        ] * 2, "also when it is sent again"
        assert entrance.seen[2][0].codec == "int8"

    run(work())


def rerouted(events: list) -> list[MicrobatchRerouted]:
    return [e for e in events if isinstance(e, MicrobatchRerouted)]


def test_send_window_rises_by_at_most_one_for_each_completion() -> None:
    async def work() -> None:
        entrance = Entrance(0.1, [24.0 + 0.1 * i for i in range(4)])  # the first trips wait for connections
        origin = origin_of(entrance, ceiling=500, latency_s=24.0)
        running = asyncio.create_task(origin.run())
        most = {}
        while origin.completed < 60:
            await asyncio.sleep(0.01)
            most[origin.completed] = entrance.most
        await origin.leave(1000.0)
        await running
        assert all(seen <= 4 + completed for completed, seen in most.items()), most
        assert entrance.most > 16, "and as fast as that"

    run(work())


def test_a_synchronous_origin_opens_the_next_step_when_the_last_microbatch_of_this_one_is_back() -> None:
    async def work() -> None:
        entrance = Entrance(1.0, [1.0, 9.0])
        await train(origin_of(entrance, synchronous=True), 20)
        opened = [at for *_, at in entrance.seen]
        steps = [opened[i : i + 8] for i in range(0, len(opened), 8)]
        assert all(len(set(step)) == 1 for step in steps[:2]), "all of a step at once"
        assert steps[1][0] - steps[0][0] == pytest.approx(9.0) and steps[2][0] - steps[1][0] == pytest.approx(1.0)

    run(work())


def test_a_synchronous_origin_never_exceeds_its_memory() -> None:
    async def work() -> None:
        entrance = Entrance()
        await train(origin_of(entrance, synchronous=True, ceiling=3), 16)
        assert entrance.most == 3

    run(work())


@pytest.mark.parametrize(("rank", "origins", "expected"), [(0, 1, 8), (0, 3, 3), (2, 3, 2), (9, 20, 0)])
def test_origins_share_a_synchronous_step(rank: int, origins: int, expected: int) -> None:
    async def work() -> None:
        entrance = Entrance()
        origin = origin_of(entrance, rank=(rank, origins), synchronous=True)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(0.5)
        assert entrance.open == expected
        await origin.leave(10.0)
        await running

    run(work())


def test_an_asynchronous_origin_keeps_its_send_window_in_flight_without_a_flush() -> None:
    async def work() -> None:
        entrance = Entrance(1.0, [5.0])
        events: list = []
        origin = origin_of(entrance, events, max_in_flight=5)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(4.5)
        assert entrance.open == 5 and origin.open_count == 5
        assert origin.completed == 16, "four went round while one was slow"
        await origin.leave(10.0)
        await running
        assert dropped(events) == [] and entrance.most == 5

    run(work())


def test_measured_send_window_fills_the_pipeline_and_no_more() -> None:
    async def work() -> None:
        world = World(4)
        nodes = [world.add(f"peer{i}", str(i), service_s=0.1) for i in range(4)]
        origin = world.origin(nodes[0], ceiling=200)
        begun = asyncio.get_running_loop().time()
        await train(origin, 150)
        rate = origin.completed / (asyncio.get_running_loop().time() - begun)
        assert rate > 0.9 / 0.1, "the slowest stage is busy nine tenths of the time"
        assert 8 <= origin.window.limit <= 20 and "round trip" in origin.window.reason

    run(work())


def test_a_failed_microbatch_is_tried_again_with_the_same_id_and_data_and_twice_the_time() -> None:
    async def work() -> None:
        events: list = []
        failures = [Unavailable(1, ["nobody"]), PeerFailed("no"), Busy("full", 700), Unavailable(1, [])]
        entrance = Entrance(1.0, failures)
        origin = origin_of(entrance, events, max_in_flight=1, first_timeout_s=50.0)
        await train(origin, 1)
        tries = [seen for seen in entrance.seen if seen[0].microbatch == entrance.seen[0][0].microbatch]
        assert len(tries) == 5 and len({data for _, data, *_ in tries}) == 1
        assert [round(left) for _, _, left, _ in tries] == [50, 100, 200, 400, 600]
        gaps = [b[3] - a[3] for a, b in zip(tries, tries[1:], strict=False)]
        assert gaps == sorted(gaps) or gaps[2] == pytest.approx(0.7)
        assert len(started(events)) == len(completed(events)) and len(rerouted(events)) == 3

    run(work())


def test_a_microbatch_is_never_dropped_while_the_origin_lives_however_long_the_stall() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        origin = world.origin(node, max_in_flight=3)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(24 * 3600.0)
        assert origin.completed == 0 and len(started(node.events)) == 3
        world.add("late", "1")
        await asyncio.sleep(5.0)
        assert origin.completed > 3 and dropped(node.events) == []
        await origin.leave(10.0)
        await running
        assert sorted(started(node.events)) == sorted(completed(node.events))

    run(work())


def test_a_pipeline_that_hangs_is_left_after_the_patience_that_trips_have_taught() -> None:
    async def work() -> None:
        entrance = Entrance(1.0, [1.0] * 10 + [10_000.0])
        origin = origin_of(entrance, max_in_flight=1, first_timeout_s=120.0)
        await train(origin, 11)
        assert [round(left) for _, _, left, _ in entrance.seen[:12]] == [120] + [20] * 10 + [40]

    run(work())


def test_what_an_attempt_heard_becomes_the_hint_of_the_next() -> None:
    async def work() -> None:
        world = World(3)
        node = world.add("first", "0")
        second = world.add("second", "1", service_s=0.1)
        origin = world.origin(node, max_in_flight=1, first_timeout_s=5.0)
        seen: list[Process] = []
        real = node.hop.process

        async def spy(call):
            seen.append(call.request)
            return await real(call)

        node.hop.process = spy
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(6.0)
        assert [m.hint for m in seen] == [(), ((1, second.peer),)]
        world.add("last", "2")
        await asyncio.sleep(5.0)
        await origin.leave(10.0)
        await running
        assert dropped(node.events) == []

    run(work())


def test_leaving_waits_for_what_is_open_then_counts_what_it_drops() -> None:
    async def work() -> None:
        events: list = []
        entrance = Entrance(3.0, [3.0, 3.0, 500.0])
        origin = origin_of(entrance, events, max_in_flight=3)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(1.0)
        begun = asyncio.get_running_loop().time()
        assert await origin.leave(8.0) == 1
        await running
        assert asyncio.get_running_loop().time() - begun == pytest.approx(8.0)
        assert (len(started(events)), origin.completed, len(dropped(events))) == (3, 2, 1)
        assert [e.reason for e in events if isinstance(e, MicrobatchDropped)] == ["this origin was told to end"]
        assert entrance.open == 0

    run(work())


def test_cancelling_an_origin_drops_what_is_open_and_says_so() -> None:
    async def work() -> None:
        events: list = []
        origin = origin_of(Entrance(500.0), events, max_in_flight=3)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait([running])
        assert len(dropped(events)) == 3

    run(work())


def test_a_draining_origin_opens_nothing_and_finishes_what_is_open() -> None:
    async def work() -> None:
        entrance = Entrance(1.0)
        origin = origin_of(entrance, max_in_flight=2)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(0.5)
        origin.drain()
        await asyncio.sleep(100.0)
        assert origin.completed == 2 and entrance.open == 0
        origin.refill()
        await asyncio.sleep(0.5)
        assert entrance.open == 2
        await origin.leave(10.0)
        await running

    run(work())


def test_evaluation_is_the_mean_loss_per_token_of_held_out_text_and_trains_on_nothing() -> None:
    async def work() -> None:
        world = World(3)
        nodes = [world.add(f"peer{i}", str(i)) for i in range(3)]
        origin = world.origin(nodes[0])
        result = await origin.evaluate(5, within_s=60.0)
        losses = [loss_of(tokens_of(10_000 + i)) for i in range(5)]
        assert result.loss == pytest.approx(sum(losses) / (5 * TOKENS)) and result.tokens == 5 * TOKENS
        assert not any(node.device.counted for node in nodes)
        assert [e.loss for e in nodes[0].events if isinstance(e, EvaluationDone)] == [result.loss]
        assert started(nodes[0].events) == []

    run(work())


def test_an_evaluation_survives_a_killed_peer_and_runs_beside_training() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        callees = [world.add(name, "1", service_s=0.5) for name in ("x", "y")]
        origin = world.origin(node, max_in_flight=4)
        running = asyncio.create_task(origin.run())
        task = asyncio.create_task(origin.evaluate(8, within_s=300.0))
        await asyncio.sleep(1.0)
        world.network.kill(callees[0].peer)
        assert (await task).tokens == 8 * TOKENS
        await origin.leave(60.0)
        await running
        assert dropped(node.events) == []

    run(work())


def test_an_evaluation_that_cannot_end_in_time_says_so() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        with pytest.raises(Unavailable) as refusal:
            await world.origin(node).evaluate(3, within_s=30.0)
        assert "did not end in 30 s" in str(refusal.value)
        assert node.ledger.taken == 0

    run(work())


def test_ids_never_repeat_and_batches_are_drawn_in_order() -> None:
    async def work() -> None:
        entrance = Entrance()
        origin = origin_of(entrance, max_in_flight=4)
        task = asyncio.create_task(origin.evaluate(3, within_s=60.0))
        await train(origin, 12)
        await task
        ids = [message.microbatch for message, *_ in entrance.seen]
        assert {*ids} == {microbatch_id(b"origin00", number) for number in range(len(ids))}
        drawn = [data for message, data, *_ in entrance.seen if message.purpose == "train"]
        assert drawn == [bytes(tokens_of(i).data) for i in range(len(drawn))]

    run(work())


class ReferenceEntrance(Entrance):
    """A pipeline of a dpo run: a reference request gets one log-probability, made of the tokens; others get metrics."""

    async def process(self, call: ProcessCall) -> HopAnswer:
        answer = await super().process(call)
        loss = loss_of(call.tensors[0])
        if call.request.purpose == "reference":
            answer.message = Processed(0.0, TOKENS, 1.0, log_probabilities=(-1.0 - loss,))
        else:
            answer.message = Processed(loss, TOKENS, 1.0, metrics=(3.0, 1.0, 1.0, 1.0))
        return answer


def test_for_dpo_the_reference_is_asked_first_and_goes_along_with_each_microbatch() -> None:
    async def work() -> None:
        events: list[Event] = []
        entrance = ReferenceEntrance()
        origin = origin_of(entrance, events, objective="dpo")
        running = asyncio.create_task(origin.run())
        while origin.completed < 10:
            await asyncio.sleep(0.1)
        await origin.leave(100.0)
        await running
        asked = {data: None for message, data, *_ in entrance.seen if message.purpose == "reference"}
        trained = [(message, data) for message, data, *_ in entrance.seen if message.purpose == "train"]
        assert len(trained) >= 10
        for message, data in trained:
            assert data in asked and message.references == (
                -1.0 - loss_of(WireTensor("int32", (1, 3), memoryview(data))),
            )
        assert len({message.microbatch for message, *_ in entrance.seen}) == len(entrance.seen), "each has its own id"
        assert {name: average.value for name, average in origin.metrics.items()} == {
            "rewards/chosen": 3.0,
            "rewards/rejected": 1.0,
            "rewards/accuracies": 1.0,
            "rewards/margins": 2.0,
        }
        assert completed(events), "only those that trained count as completed training"
        assert len(completed(events)) == len(trained)

    run(work())


class RepeatedSource(Source):
    """Epochs of EPOCH microbatches: the same ones in each epoch, in another order."""

    EPOCH = 10

    def draw(self) -> DrawnMicrobatch | None:
        drawn = super().draw()
        if drawn is None:
            return None
        epoch, place = divmod(drawn.number, self.EPOCH)
        return DrawnMicrobatch(tokens_of((place + 3 * epoch) % self.EPOCH), drawn.number)


def test_for_dpo_the_reference_is_asked_in_the_first_epoch_only() -> None:
    async def work() -> None:
        entrance, source = ReferenceEntrance(), RepeatedSource()
        origin = origin_of(entrance, source=source, objective="dpo", max_in_flight=2)
        await train(origin, 3 * source.EPOCH)
        asked = [data for message, data, *_ in entrance.seen if message.purpose == "reference"]
        assert len(asked) == len(set(asked)) == source.EPOCH
        trained = [(message.references, data) for message, data, *_ in entrance.seen if message.purpose == "train"]
        assert len(trained) >= 3 * source.EPOCH
        for references, data in trained:
            assert references == (-1.0 - loss_of(WireTensor("int32", (1, 3), memoryview(data))),)

    run(work())


def test_for_dpo_an_evaluation_compares_with_the_reference_too() -> None:
    async def work() -> None:
        entrance = ReferenceEntrance()
        result = await origin_of(entrance, objective="dpo").evaluate(3, within_s=60.0)
        assert result.metrics == (9.0, 3.0, 3.0, 3.0)
        purposes = [message.purpose for message, *_ in entrance.seen]
        assert sorted(purposes) == ["evaluate"] * 3 + ["reference"] * 3
        assert all(message.references for message, *_ in entrance.seen if message.purpose == "evaluate")

    run(work())


def test_an_origin_whose_source_has_nothing_asks_again_and_says_what_became_of_each_microbatch() -> None:
    async def work() -> None:
        entrance, source = Entrance(1.0), Source()
        origin = origin_of(entrance, source=source, latency_s=1.0)
        running = asyncio.create_task(origin.run())
        while len(source.done) < 5:
            await asyncio.sleep(0.1)
        source.dry = True
        await asyncio.sleep(20.0)
        assert len(source.done) == source.drawn and origin.open_count == 0, "all that was drawn is done"
        source.dry = False
        await asyncio.sleep(0.2)
        assert origin.open_count > 0, "it noticed that there is more"
        entrance.seconds = 1e6
        await asyncio.sleep(30.0)
        dropped_count = await origin.leave(1.0)
        await running
        assert dropped_count == len(source.given_back) > 0
        assert sorted(source.done + source.given_back) == list(range(source.drawn))

    run(work())
