"""Replica groups that step together, whatever their views and calls do: no replica steps alone while others live."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from agora_protocol.errors import NotMyStage
from agora_protocol.ids import PeerId
from agora_protocol.messages import Contribute, GossipSteps, Recall

from agora.core.clock import loop_time
from agora.observe.events import GradientWireChosen, PartFailed, RoundDone, TaskFailed
from agora.replica import kept_means
from agora.replica.decide import STAGE_CATCH_UP_AFTER_S
from agora.replica.gradient_steps import FETCH_TRIES
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import INT8_ROUNDS, Shard
from agora.replica.span_replicas import LEADING_STEP_INTERVAL_S
from agora.replica.stage_view import GONE_AFTER_S, SILENCE_TIMEOUT_S
from agora.replica.work_before_mean import WorkBeforeMean
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.virtual_time import run

ALL_REDUCES = {"averaging": {"gradient_wire": "float32", "round_s": 3.0}}
INNER_STEPS = {"averaging": {"exact_steps": 5, "round_s": 3.0}}
SYNCHRONOUS = {"schedule": {"kind": "synchronous"}, "averaging": {"round_s": 3.0}}


def assert_equal_bits(*peers: GroupPeer) -> None:
    """Replicas at one step have the same bits, and none is more than a step ahead."""
    steps = {peer.stage.step for peer in peers}
    assert max(steps) - min(steps) <= 1
    for peer in peers:
        for other in peers:
            if peer.stage.step == other.stage.step:
                assert torch.equal(peer.stage.weights, other.stage.weights)


async def at_one_step(*peers: GroupPeer) -> None:
    while len({peer.stage.step for peer in peers}) > 1 or any(peer.stage.share for peer in peers):
        await asyncio.sleep(0.01)


def gradient_rounds(peer: GroupPeer) -> list[RoundDone]:
    return [event for event in peer.of(RoundDone) if event.what == "gradient"]


@pytest.mark.parametrize("sections", [ALL_REDUCES, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_replicas_step_along_the_same_bits(sections: dict) -> None:
    async def main() -> None:
        async with GroupWorld([400.0, 800.0, 600.0], **sections) as world:
            await asyncio.sleep(15.0)
            await at_one_step(*world.all)
            assert world.all[0].stage.step >= 8
            assert_equal_bits(*world.all)
            assert all(
                done.contributors == 3 and not done.failed_parts for p in world.all for done in gradient_rounds(p)
            )

    run(main())


@pytest.mark.parametrize("rates", [[4000.0] * 4, [2000.0, 8000.0, 1000.0, 4000.0], [4000.0, 8000.0, 0.0]])
def test_asynchronous_all_reduce_steps_hold_their_target_and_no_token_is_lost(rates: list[float]) -> None:
    """Each replica closes its part at its quota, and counts for the next step while the mean is formed."""
    target = 8192

    async def main() -> None:
        async with GroupWorld(rates, target=target, **ALL_REDUCES) as world:
            await asyncio.sleep(60.0)
            await at_one_step(*world.all)
            counted = sum(peer.stage.counted for peer in world.all)
            first = world.all[0].stage
            assert first.step == pytest.approx(counted / target, abs=1.0)
            held = [sum(parts) for parts in zip(*(peer.stage.closed for peer in world.all), strict=True)]
            assert sum(held[5:]) / len(held[5:]) == pytest.approx(target, rel=0.02)
            assert_equal_bits(*world.all)
            assert all(
                done.contributors >= 1 and not done.failed_parts for p in world.all for done in gradient_rounds(p)
            )

    run(main())


@pytest.mark.parametrize(
    "sections", [ALL_REDUCES, INNER_STEPS, SYNCHRONOUS], ids=["all-reduces", "inner", "synchronous"]
)
@pytest.mark.parametrize("rates", [[4000.0], [4000.0, 4000.0], [2000.0, 8000.0, 1000.0]], ids=len)
def test_a_stage_takes_exactly_the_steps_of_the_run_whatever_is_still_sent(rates: list[float], sections: Any) -> None:
    async def main() -> None:
        async with GroupWorld(rates, target=4096, **sections) as world:
            world.stops_at = 12
            await asyncio.sleep(120.0)
            assert [peer.stage.step for peer in world.all] == [12] * len(rates)
            assert all("has taken its 12 steps" in peer.group.stages[0].reason for peer in world.all)
            world.stops_at = 30  # an amendment has the run go on
            for peer in world.all:
                peer.stage.tokens = 0
            await asyncio.sleep(180.0)
            assert [peer.stage.step for peer in world.all] == [30] * len(rates)

    run(main())


@pytest.mark.parametrize(("rate", "busy_s"), [(40.0, 0.0), (0.0, 1.5)])
def test_a_replica_too_slow_for_a_microbatch_of_each_step_keeps_nobody_waiting(rate: float, busy_s: float) -> None:
    """Also where it has counted nothing, and its device does not close its share before the end of a long job."""

    async def steps_in_half_a_minute(rates: list[float]) -> int:
        async with GroupWorld(rates, target=4096, **ALL_REDUCES) as world:
            for peer in world.all[4:]:
                peer.stage.busy_s = busy_s
            await asyncio.sleep(20.0)
            before = world.all[0].stage.step
            await asyncio.sleep(30.0)
            await at_one_step(*world.all[:4])
            assert_equal_bits(*world.all[:4])
            assert len(rates) < 5 or world.all[4].group.stages[0].pacing.quota_now == 0
            return world.all[0].stage.step - before

    async def main() -> None:
        without = await steps_in_half_a_minute([4000.0] * 4)
        assert await steps_in_half_a_minute([*([4000.0] * 4), rate]) >= 0.95 * without

    run(main())


@pytest.mark.parametrize("sections", [ALL_REDUCES, INNER_STEPS], ids=["exact", "inner"])
def test_replicas_that_would_stop_step_with_one_that_goes_on(sections: Any) -> None:
    async def main() -> None:
        async with GroupWorld([4000.0, 4000.0, 4000.0], target=4096, **sections) as world:
            world.stops_at, world.all[1].goes_on = 12, True
            await asyncio.sleep(60.0)
            assert min(peer.stage.step for peer in world.all) > 24
            assert not any(peer.fetches for peer in world.all)

    run(main())


@pytest.mark.parametrize("predicts", [True, False])
def test_where_weights_are_predicted_a_part_of_the_next_share_begins_before_the_mean_is_applied(
    predicts: bool,
) -> None:
    """It keeps the device busy while the mean is formed. Without prediction nothing does, since it would be stale."""

    async def main() -> None:
        async with GroupWorld([4000.0] * 4, target=8192, **ALL_REDUCES) as world:
            for peer in world.all:
                peer.stage.predicts_weights = predicts
            first = world.all[0]
            replicas = first.group.stages[0]
            pacing = replicas.pacing

            def work() -> WorkBeforeMean:
                found = replicas.work_before_mean()
                assert found is not None
                return found

            await asyncio.sleep(10.0)
            while first.stage.share is None:
                await asyncio.sleep(0.01)
            allowed = pacing.tokens_ahead(0.25) if predicts else 0
            assert work().tokens_in_flight == allowed - first.stage.tokens
            in_progress = max(0, math.ceil((allowed - first.stage.tokens) / pacing.microbatch_tokens))
            assert work().must_hold_next(in_progress)
            assert not in_progress or not work().must_hold_next(in_progress - 1)
            while first.stage.share is not None:
                await asyncio.sleep(0.01)
            assert not work().must_hold_next(100), "no mean is awaited"
            await asyncio.sleep(20.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)

    run(main())


def test_a_replica_that_comes_late_replays_the_steps_since_its_state_and_counts_from_the_next_one() -> None:
    async def main() -> None:
        world = GroupWorld([4000.0, 4000.0, 0.0], target=4096, **ALL_REDUCES)
        async with world:
            late = world.all[2]
            await world.kill(late)
            await asyncio.sleep(20.0)
            source = world.all[0].stage
            late.stage.weights, late.stage.step = source.weights, source.step
            late.stage.history = dict(source.history)
            await asyncio.sleep(5.0)
            missed = source.step - late.stage.step
            assert missed >= 5
            world.network.dead.clear()
            late.stage.rate = 4000.0
            late.start()
            await asyncio.sleep(10.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            assert not late.fetches and world.calls["Recall"] >= missed
            weights = [done.weight for done in gradient_rounds(late)]
            assert weights[0] > 0, "it is what the others are"
            assert sum(late.stage.closed) == late.stage.counted - late.stage.tokens, "its tokens wait for their step"

    run(main())


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_who_joins_in_the_runs_first_steps_reduces_no_shard_before_it_may_sign_one(steps: int) -> None:
    """A mean that its reducer does not sign is one that no replica takes: both would lose the step."""

    async def main() -> None:
        world = GroupWorld([500.0, 500.0], **ALL_REDUCES)
        first, late = world.all
        world.bandwidths = {first.peer: 1.0, late.peer: 1e9}  # it reduces everything as soon as it reduces at all
        async with world:
            await world.kill(late)
            while first.stage.step < steps:
                await asyncio.sleep(0.01)
            world.network.dead.clear()
            late = world.join(2, 500.0, first)
            await asyncio.sleep(20.0)
            rounds = [gradient_rounds(peer) for peer in world.all]
            assert min(len(each) for each in rounds) >= 15 and not late.fetches
            assert not any(done.failed_parts for each in rounds for done in each)
            await at_one_step(first, late)
            assert_equal_bits(first, late)

    run(main())


@pytest.mark.parametrize("wire", ["float32", "bf16", "int8", "normal3"])
def test_who_comes_too_late_for_a_round_takes_the_zeros_of_the_others_at_once_and_no_gradient_is_lost(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        averaging = {"gradient_wire": wire, "round_s": 20.0}
        async with GroupWorld([500.0, 500.0], averaging=averaging) as world:
            await asyncio.sleep(20.0)
            await at_one_step(*world.all)
            prompt, late = world.all
            came_at: list[float] = []
            taken: list[tuple[PeerId, int, int, float]] = []
            all_reduce = late.group.stages[0].all_reduce
            in_time = all_reduce.run

            async def come_late(*arguments: Any) -> RoundResult:
                monkeypatch.setattr(all_reduce, "run", in_time)
                await asyncio.sleep(8.0)
                came_at.append(loop_time())
                return await in_time(*arguments)

            monkeypatch.setattr(all_reduce, "run", come_late)
            for peer in world.all:
                step_with_gradient = peer.stage.step_with_gradient

                async def take(*arguments: Any, peer: PeerId = peer.peer, inner: Any = step_with_gradient) -> None:
                    taken.append((peer, arguments[1], arguments[3], loop_time()))
                    await inner(*arguments)

                monkeypatch.setattr(peer.stage, "step_with_gradient", take)
            await asyncio.sleep(20.0)
            failed = [done.round for done in gradient_rounds(prompt) if done.failed_parts]
            assert 1 <= len(failed) <= 3, "while it was away"
            assert [done.round for done in gradient_rounds(late) if done.failed_parts] == failed[:1]
            assert {tokens for _, step, tokens, _ in taken if step in failed} == {0}, "nothing was averaged"
            assert max(at for _, step, _, at in taken if step in failed) < came_at[0] + 0.1
            after = [tokens for _, step, tokens, _ in taken if step == failed[-1] + 1]
            assert len(after) == 2 and min(after) > 1500, "with a share that had no mean"
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            assert not any(peer.fetches for peer in world.all)

    run(main())


def test_a_lone_replica_keeps_the_means_of_its_steps_for_a_newcomer_whose_fetch_takes_longer_than_they_do() -> None:
    """It fetches once more than a state that was there at once would need, and replays what was taken meanwhile."""

    async def main() -> None:
        world = GroupWorld([2048.0, 2048.0], target=1024, **ALL_REDUCES)
        world.transfer_s = 6.0
        lone, newcomer = world.all
        async with world:
            await world.kill(newcomer)
            await asyncio.sleep(30.0)
            missed = lone.stage.step
            assert missed >= 40
            world.network.dead.clear()
            newcomer.start()
            await asyncio.sleep(30.0)
            assert 1 <= len(newcomer.fetches) <= 2
            assert world.calls["Recall"] >= 8, "what the lone one stepped along during the fetch"
            assert len(gradient_rounds(newcomer)) >= 3
            await at_one_step(lone, newcomer)
            assert_equal_bits(lone, newcomer)

    run(main())


def test_a_replica_that_comes_too_late_for_the_kept_means_fetches_the_state_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        monkeypatch.setattr(kept_means, "MAX_KEPT_BYTES", 0)
        world = GroupWorld([4000.0, 4000.0, 4000.0], target=4096, **ALL_REDUCES)
        async with world:
            late = world.all[2]
            await world.kill(late)
            await asyncio.sleep(20.0)
            world.network.dead.clear()
            late.start()
            await asyncio.sleep(10.0)
            await at_one_step(*world.all)
            assert late.fetches
            assert_equal_bits(*world.all)

    run(main())


def test_a_replica_that_hangs_costs_an_asynchronous_step_less_than_its_own_duration() -> None:
    """Its calls get no answer: the reducers' windows end after a part of a step, and the others have computed on."""

    async def main() -> None:
        async with GroupWorld([1000.0, 1000.0, 1000.0], target=12_000, **ALL_REDUCES) as world:
            await asyncio.sleep(60.0)
            first, second, hung = world.all
            step, began = first.stage.step, asyncio.get_running_loop().time()
            world.network.silent.add(hung.peer)
            await hung.stop()
            while first.stage.step < step + 10:
                await asyncio.sleep(0.1)
            seconds = asyncio.get_running_loop().time() - began
            assert seconds < 10 * 12_000 / 2000 + 4.0 * 0.5, "ten steps of the two that are left, and half of one"
            held = [sum(parts) for parts in zip(first.stage.closed[-8:], second.stage.closed[-8:], strict=True)]
            assert sum(held) / len(held) == pytest.approx(12_000, rel=0.05), "they took over what it had to count"

    run(main())


@pytest.mark.parametrize("sections", [ALL_REDUCES, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_a_replica_that_the_view_does_not_list_yet_is_not_stepped_without(sections: dict) -> None:
    """The view of the first has a replica that died, and not yet the one that lives: it must not step alone."""

    async def main() -> None:
        world = GroupWorld([500.0, 500.0, 500.0], **sections)
        first, second, victim = world.all
        first.sees = [first.peer, victim.peer]
        async with world:
            await asyncio.sleep(1.0)
            await world.kill(victim)
            await asyncio.sleep(15.0)
            await at_one_step(first, second)
            assert first.stage.step >= 4 and not first.stage.alone_at and not second.stage.alone_at
            assert_equal_bits(first, second)
            for done in gradient_rounds(first) + gradient_rounds(second):
                assert done.contributors >= 2 and not done.failed_parts
            first.sees = None
            await asyncio.sleep(5.0)
            await at_one_step(first, second)
            assert_equal_bits(first, second)

    run(main())


@pytest.mark.parametrize("sections", [ALL_REDUCES, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_the_last_replica_goes_on_two_seconds_after_the_other_ones_process_has_ended(sections: dict) -> None:
    """Connections to it break at once, while others stand: nobody waits until it is silent."""

    async def main() -> None:
        async with GroupWorld([500.0, 500.0], **sections) as world:
            world.has_connections = True
            left, victim = world.all
            await asyncio.sleep(20.0)
            await world.kill(victim)
            step = left.stage.step
            await asyncio.sleep(GONE_AFTER_S + 1.0 + 1024 / 500)
            assert left.stage.step > step
            await asyncio.sleep(10 * 1024 / 500)
            assert left.stage.step >= step + 10, "each step is its own now"

    run(main())


@pytest.mark.parametrize("seed", range(4))  # of the run, and so of who reduces what
def test_a_shard_that_nobody_gets_a_mean_of_is_in_the_next_step_and_all_become_equal(seed: int) -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0, 500.0], seed=seed, **ALL_REDUCES) as world:
            await asyncio.sleep(20.0)
            world.failing.add(Contribute)
            await asyncio.sleep(3.0)
            step, weights = world.all[0].stage.step, world.all[0].stage.weights
            await asyncio.sleep(7.0)
            assert all(gradient_rounds(peer)[-1].failed_parts for peer in world.all)
            assert world.all[0].stage.step > step + 2
            assert torch.equal(world.all[0].stage.weights, weights), "means of nobody"
            world.failing.clear()
            await asyncio.sleep(10.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            # For most runs one or two replicas fetch another's state some times: what each made of a shard differs.
            assert not any(peer.stage.alone_at or len(peer.fetches) > 3 for peer in world.all)

    run(main())


@pytest.mark.parametrize("sections", [ALL_REDUCES, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_calls_that_fail_for_a_while_make_nobody_step_alone(sections: dict) -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0], **sections) as world:
            first, second = world.all
            for _ in range(6):
                await asyncio.sleep(3.0)
                await at_one_step(first, second)
                world.network.broken.add(frozenset(world.peers))
                await asyncio.sleep(0.6 * SILENCE_TIMEOUT_S)
                world.network.broken.clear()
            await asyncio.sleep(3.0)
            await at_one_step(first, second)
            assert first.stage.step >= 10 and not first.stage.alone_at and not second.stage.alone_at
            assert_equal_bits(first, second)
            assert all(
                done.contributors == 2 and not done.failed_parts for p in world.all for done in gradient_rounds(p)
            )

    run(main())


@pytest.mark.parametrize("sections", [ALL_REDUCES, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_the_last_replica_steps_alone_once_the_others_are_silent(sections: dict) -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0], **sections) as world:
            first, second = world.all
            await asyncio.sleep(5.0)
            await at_one_step(first, second)
            await world.kill(second)
            step = first.stage.step
            await asyncio.sleep(0.8 * SILENCE_TIMEOUT_S)
            assert first.stage.step <= step + 1 and not first.stage.alone_at
            assert "may still be alive" in first.group.stages[0].reason
            await asyncio.sleep(SILENCE_TIMEOUT_S + 6.0)
            assert first.stage.step >= step + 2 and first.stage.alone_at

    run(main())


def test_when_nobody_gets_a_whole_mean_gradient_the_least_id_takes_the_step_and_the_others_fetch_it() -> None:
    async def main() -> None:
        world = GroupWorld([500.0, 500.0, 500.0], **SYNCHRONOUS)
        world.failing.add(Contribute)
        async with world:
            least = min(world.all, key=lambda peer: peer.peer)
            while least.stage.step == 0:
                await asyncio.sleep(0.01)
            world.failing.clear()
            assert least.fetches == [1] * FETCH_TRIES
            await asyncio.sleep(5.0)
            await at_one_step(*world.all)
            assert least.stage.step >= 2 and least.of(PartFailed)
            assert_equal_bits(*world.all)

    run(main())


def test_a_replica_that_missed_a_mean_gradient_fetches_the_state_of_one_that_has_it() -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0, 500.0], **SYNCHRONOUS) as world:
            first, second, third = world.all
            await asyncio.sleep(5.0)
            world.network.broken |= {frozenset((third.peer, other.peer)) for other in (first, second)}
            await asyncio.sleep(0.5 * SILENCE_TIMEOUT_S)
            world.network.broken.clear()
            await asyncio.sleep(10.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            assert not any(peer.stage.alone_at for peer in world.all)

    run(main())


def test_what_encoding_had_lost_is_dropped_with_the_state_that_a_fetch_replaces() -> None:
    """The other replica's state knows nothing of the gradient to which it belonged."""

    async def main() -> None:
        world = GroupWorld([0.0, 0.0], averaging={"gradient_wire": "normal2"})
        peer, other = world.all
        averager, part, gradient = (
            peer.group.stages[0].all_reduce.codec,
            Shard(0, "gradient", INT8_ROUNDS, 0),
            peer.stage.gradient,
        )
        made = averager.make_contribution(part, gradient, 1.0)
        averager.record_outcome(part, made, counted=True)
        assert not torch.equal(averager.make_contribution(part, gradient, 1.0).values, gradient)
        await peer.group.stages[0].fetch_state([other.peer], 0)
        assert torch.equal(averager.make_contribution(part, gradient, 1.0).values, gradient)

    run(main())


def test_a_synchronous_stage_that_stays_behind_the_other_stages_takes_their_step_number() -> None:
    async def main() -> None:
        world = GroupWorld([0.0, 0.0], **SYNCHRONOUS)
        world.run_steps = [[0, 0], [40, 40, 10**9]]
        async with world:
            await asyncio.sleep(STAGE_CATCH_UP_AFTER_S)
            assert [peer.stage.step for peer in world.all] == [0, 0]
            await asyncio.sleep(2 * LEADING_STEP_INTERVAL_S)
            assert [peer.stage.step for peer in world.all] == [40, 40]

    run(main())


def test_an_error_in_the_watch_over_other_stages_is_told() -> None:
    async def main() -> None:
        world = GroupWorld([0.0], **SYNCHRONOUS)
        world.run_steps = [["no step"]]
        async with world:
            await asyncio.sleep(2 * LEADING_STEP_INTERVAL_S)
            (failed,) = world.all[0].of(TaskFailed)
            assert failed.error.startswith("steps of other stages: TypeError: ")

    run(main())


def test_a_leaving_replica_follows_no_step() -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0], averaging={"exact_steps": 0}) as world:
            await asyncio.sleep(5.0)
            leaving, other = world.all
            await leaving.group.leave(1.0)
            leaving.stage.rate, step = 0.0, leaving.stage.step
            await asyncio.sleep(10.0)
            assert leaving.stage.step <= step + 1 and other.stage.step > step + 1
            assert leaving.group.stages[0].reason == "this peer is leaving"

    run(main())


@pytest.mark.parametrize("at", [5.0, 5.2, 5.4, 5.6, 5.8])
def test_who_leaves_ends_the_step_that_it_is_taking_and_takes_none_after(at: float) -> None:
    """A checkpoint written after `leave` is of the last step."""

    async def main() -> None:
        async with GroupWorld([500.0, 200.0], target=512) as world:
            await asyncio.sleep(at)
            leaving = world.all[0]
            await leaving.group.leave(5.0)
            step = leaving.stage.step
            await asyncio.sleep(10.0)
            assert leaving.stage.step == step > 0

    run(main())


def test_a_replica_with_a_slow_uplink_sends_fewer_bits_and_all_step_along_the_same() -> None:
    """Each message names its format, so that nobody need agree on it."""

    async def main() -> None:
        world = GroupWorld([4000.0, 4000.0, 4000.0], target=8192, averaging={"round_s": 3.0})
        async with world:
            slow = world.all[1]
            await asyncio.sleep(30.0)
            assert not any(peer.of(GradientWireChosen) for peer in world.all)
            slow.uplink_rate = 5_000.0
            await asyncio.sleep(20.0)
            chosen = [[event.wire for event in peer.of(GradientWireChosen)] for peer in world.all]
            assert chosen == [[], ["normal2"], []] and slow.group.stages[0].sync_choice.compression.is_limited
            sent = [gradient_rounds(peer)[-1].bytes_out for peer in world.all]
            assert sent[1] <= max(sent) / 1.8 or not sent[1], "unless it reduces the part"
            slow.uplink_rate = 10**9
            await asyncio.sleep(20.0)
            await at_one_step(*world.all)
            assert slow.group.stages[0].sync_choice.compression.name == "int8"
            assert_equal_bits(*world.all)

    run(main())


@pytest.mark.parametrize("stage", [1, 7])
def test_a_stage_that_is_not_held_is_refused_and_nobody_is_accused(stage: int) -> None:
    """The asker may know a span that this peer has left."""

    async def main() -> None:
        async with GroupWorld([0.0] * 2) as world:
            first, second = world.all
            deadline = asyncio.get_running_loop().time() + 1.0
            asked = [
                GossipSteps(stage, ()),
                Contribute(stage, "gradient", 0, 0, 0, 1.0, first_owner_failed=False, wire="float32", deadline_ms=1000),
                Recall(stage, "gradient", 0, 0, 0),
            ]
            for message in asked:
                with pytest.raises(NotMyStage, match=f"holds stages 0, not {stage}"):
                    await first.group.answer(second.peer, message, [], deadline)
            assert not first.violations

    run(main())
