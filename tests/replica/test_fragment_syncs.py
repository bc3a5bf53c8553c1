"""Replicas with inner steps keep one anchor, the same bits at all of them, whoever dies, hangs, comes or is apart."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import numpy as np
import pytest
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.messages import Averaged

from agora.core.calls import PeerCaller
from agora.observe.events import PartFailed, Report, RoundDone, StageDiverged, StageFellBehind, StepsSkipped, TaskFailed
from agora.replica.all_reduce import MAX_RUNNING_SYNCS, AllReduce
from agora.replica.fragment_syncs import RECALL_FIRST, FragmentSyncs
from agora.replica.kept_means import MAX_RECALLS, RECALL_PAUSE
from agora.replica.reducers import FragmentDivision
from agora.replica.rounds import RoundContext, RoundResult
from agora.replica.shard_codec import RoundConfig, Shard, ShardCodec, ShardMean
from agora.replica.stage_view import SILENCE_TIMEOUT_S
from agora.state.layout import OUTER_PARAMETERS, VELOCITY
from tests.replica.group_world import NUMEL, GroupPeer, GroupWorld
from tests.virtual_time import run

TARGET = 4096
EXACT_STEPS = 5


def world_of(*rates: float, **averaging: Any) -> GroupWorld:
    """Fragments of a quarter: every element has its turn in 4 steps."""
    settings = {"exact_steps": EXACT_STEPS, "fraction": 0.25, "round_s": 3.0, **averaging}
    return GroupWorld(rates, target=TARGET, averaging=settings)


async def at_one_fragment(*peers: GroupPeer) -> None:
    """Waits until all have taken in the same rounds."""
    async with asyncio.timeout(30.0):
        while len({peer.stage.agreed_step for peer in peers}) > 1:
            await asyncio.sleep(0.01)


def assert_equal_outer_parameters(*peers: GroupPeer) -> None:
    first = peers[0].stage
    for peer in peers:
        assert peer.stage.history[peer.stage.agreed_step] == first.history[first.agreed_step] != 0
        for name in (OUTER_PARAMETERS, VELOCITY):
            assert torch.equal(peer.stage.outer.moments[name], first.outer.moments[name])


def fragment_rounds(peer: GroupPeer) -> list[RoundDone]:
    return [done for done in peer.of(RoundDone) if done.what == "slice"]


@pytest.mark.parametrize("exact_steps", [0, EXACT_STEPS])
@pytest.mark.parametrize("every", [1, 3])
def test_after_the_all_reduce_steps_replicas_step_alone_around_the_same_outer_parameters(
    exact_steps: int, every: int
) -> None:
    async def main() -> None:
        async with world_of(4000.0, 2000.0, 6000.0, exact_steps=exact_steps, every=every) as world:
            await asyncio.sleep(40.0)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            first = world.all[0].stage
            assert first.step >= 100 and first.agreed_step >= first.step - 2 * every
            for peer in world.all:
                assert min(peer.stage.alone_at) == exact_steps, "the steps before were taken along a mean"
                done = fragment_rounds(peer)
                numbers = [event.round for event in done]
                assert sorted(numbers) == list(range(exact_steps // every + 1, max(numbers) + 1)), (
                    "each slice has its turn"
                )
                assert all(event.contributors == 3 and not event.failed_parts for event in done)
                assert not peer.of(StageDiverged)
                apart = peer.stage.weights - peer.stage.outer.moments[OUTER_PARAMETERS]
                assert float(apart.square().mean().sqrt()) < 0.01 * 3 * 4 * (every + 2), "as since its slices' turns"

    run(main())


def test_a_stage_with_fewer_blocks_than_fragments_has_empty_ones() -> None:
    async def main() -> None:
        async with world_of(2000.0, 2000.0, fraction=SLICE_BLOCK / NUMEL / 2) as world:
            await asyncio.sleep(30.0)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            assert world.all[0].stage.agreed_step >= world.all[0].stage.step - 3
            assert not any(peer.of(PartFailed) for peer in world.all)

    run(main())


def test_inner_steps_hold_their_target_and_no_token_is_lost() -> None:
    async def main() -> None:
        async with world_of(4000.0, 2000.0, 6000.0) as world:
            await asyncio.sleep(60.0)
            steps, counted = world.all[0].stage.step, sum(peer.stage.counted for peer in world.all)
            assert counted / steps == pytest.approx(TARGET, rel=0.05)
            for peer in world.all:
                assert sum(peer.stage.closed) == peer.stage.counted - peer.stage.tokens
                assert abs(peer.stage.step - steps) <= 1 and not peer.of(StepsSkipped)

    run(main())


def test_a_replica_that_comes_late_fetches_outer_parameters_and_velocity_and_is_in_the_next_round() -> None:
    async def main() -> None:
        world = world_of(4000.0, 4000.0, 4000.0)
        async with world:
            late = world.all[2]
            await world.kill(late)
            await asyncio.sleep(40.0)
            world.network.dead.clear()
            late.start()
            await asyncio.sleep(10.0)
            assert len(late.of(StageFellBehind)) == 1 == len(late.fetches)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            assert fragment_rounds(late)[-1].contributors == 3

    run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_replica_that_dies_or_hangs_costs_the_others_no_step(hangs: bool) -> None:
    async def main() -> None:
        async with world_of(1000.0, 1000.0, 1000.0) as world:
            await asyncio.sleep(60.0)
            first, second, gone = world.all
            step, began = first.stage.step, asyncio.get_running_loop().time()
            (world.network.silent if hangs else world.network.dead).add(gone.peer)
            await gone.stop()
            while first.stage.step < step + 10:
                await asyncio.sleep(0.1)
            seconds = asyncio.get_running_loop().time() - began
            assert seconds < 10 * TARGET / 2000 + 0.5 * TARGET / 3000, "ten steps of the two left, and half of one"
            await asyncio.sleep(SILENCE_TIMEOUT_S)
            await at_one_fragment(first, second)
            assert_equal_outer_parameters(first, second)

    run(main())


def test_halves_that_were_apart_become_one_again() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(20.0)
            left, right = world.all[:2], world.all[2:]
            world.network.broken |= {frozenset((a.peer, b.peer)) for a in left for b in right}
            await asyncio.sleep(4 * SILENCE_TIMEOUT_S)
            ends = [peer.stage.history[peer.stage.agreed_step] for peer in world.all]
            assert len(set(ends)) > 1, "they went apart"
            world.network.broken.clear()
            await asyncio.sleep(20.0)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            diverged = [len(peer.of(StageDiverged)) for peer in world.all]
            least = min(world.all, key=lambda peer: peer.peer)
            kept = left if least in left else right
            assert all((count == 0) == (peer in kept) for peer, count in zip(world.all, diverged, strict=True))

    run(main())


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("apart_s", [0.5, 1.3, 2.1, 3.4])
def test_replicas_whose_rounds_fell_apart_meet_in_the_same_ones_again(replicas: int, apart_s: float) -> None:
    """Ten steps of a second's tenth, rounds that wait for others 1.2 s, and slices that are due again after four steps.

    Of three replicas one dies while the two others are apart.
    """

    async def main() -> None:
        async with world_of(*[10.0 * TARGET / replicas] * replicas, exact_steps=0) as world:
            await asyncio.sleep(5.0)
            first, second, *others = world.all
            for gone in others:
                await world.kill(gone)
            world.network.broken.add(frozenset((first.peer, second.peer)))
            await asyncio.sleep(apart_s)
            world.network.broken.clear()
            await asyncio.sleep(3.0)
            counts = [len(fragment_rounds(peer)) for peer in (first, second)]
            await asyncio.sleep(10.0)
            for peer, count in zip((first, second), counts, strict=True):
                rounds = fragment_rounds(peer)[count:]
                whole = [done for done in rounds if done.contributors == 2 and not done.failed_parts]
                assert len(whole) > 0.8 * max(len(rounds), 10 * 10 / replicas), f"{len(whole)} of {len(rounds)}"
            await at_one_fragment(first, second)
            assert_equal_outer_parameters(first, second)

    run(main())


def test_a_replica_that_missed_rounds_asks_for_what_the_others_keep_of_them() -> None:
    async def main() -> None:
        async with world_of(2000.0, 2000.0, 2000.0) as world:
            first, second, third = world.all
            await asyncio.sleep(20.0)
            world.network.broken |= {frozenset((third.peer, other.peer)) for other in (first, second)}
            await asyncio.sleep(0.5 * SILENCE_TIMEOUT_S)
            assert third.stage.agreed_step < first.stage.agreed_step, "it lacks the means of some"
            world.network.broken.clear()
            await asyncio.sleep(10.0)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            assert world.calls["Recall"] and not any(peer.of(StageDiverged) for peer in world.all)

    run(main())


def test_the_only_replica_has_its_own_weights_as_outer_parameters() -> None:
    async def main() -> None:
        async with world_of(4000.0, exact_steps=0) as world:
            await asyncio.sleep(30.0)
            stage = world.all[0].stage
            await asyncio.sleep(0.2)
            assert stage.agreed_step >= 25 and not fragment_rounds(world.all[0])
            apart = stage.weights - stage.outer.moments[OUTER_PARAMETERS]
            assert float(apart.square().mean().sqrt()) <= 0.01 * 4 and not stage.outer.moments[VELOCITY].any()

    run(main())


class Stages:
    """Notes which rounds' means are taken in, and when."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, Any]] = []
        self.refused: set[int] = set()
        self.error: Exception = ProtocolError("bad-tensor", "as the test wants it")
        self.step = 0

    def step_of(self, stage: int) -> int:
        return self.step

    async def outer_gradient(self, stage: int, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(NUMEL // 4), torch.zeros(NUMEL // 4)

    async def outer_step(
        self, stage: int, step: int, blocks: Any, snapshot: Any, averaged: Any, wanted_fragments: int
    ) -> None:
        if step in self.refused:
            raise self.error
        self.applied.append((step, averaged))


class SlowRounds(AllReduce):
    """Rounds of two replicas; each takes as many seconds as `seconds` says of its number.

    waiting: numbers of the rounds in which contributions wait here. of: the fragments of the stage.
    """

    def __init__(
        self,
        seconds: dict[int, float],
        waiting: Collection[int] = (),
        of: FragmentDivision = FragmentDivision(NUMEL, 4, 0),
    ) -> None:
        me, other = PeerId("me"), PeerId("other")
        view = RoundContext({me: 0.0, other: 0.0}, frozenset(self.live_others), frozenset(), 20.0)
        config = RoundConfig(me, RunId("0" * 64), "mean", 20.0, 1e9)
        super().__init__(
            ShardCodec(config),
            cast(PeerCaller, None),
            lambda shard: view,
            lambda fragments: 4,
            lambda message: b"",
            lambda event: None,
            lambda *violation: None,
        )
        vars(self.kept_means)["recall_from"] = self.recall_from
        self.seconds = seconds
        self.waiting = waiting
        self.of = of
        self.weights: dict[int, float] = {}

    live_others: tuple[PeerId, ...] = ()

    async def recall_from(self, peer: PeerId, shard: Shard, numel: int, deadline: float) -> ShardMean | None:
        return None

    def has_waiting_contributions(self, first: Shard) -> bool:
        return first.round in self.waiting

    def division_of(self, number: int) -> FragmentDivision:
        return self.of

    async def run(
        self, stage: int, kind: str, number: int, values: torch.Tensor, weight: float, fragments: int = 0
    ) -> RoundResult:
        assert (kind, fragments) == ("fragment", self.of.count)
        self.weights[number] = weight
        await asyncio.sleep(self.seconds.get(number, 0.0))
        return RoundResult(values * number, [True], 4, [4])


def syncs_of(stages: Stages, rounds: SlowRounds, every: int = 1, report: Report = lambda event: None) -> FragmentSyncs:
    return FragmentSyncs(0, every, lambda: 4, cast(Any, stages), rounds, rounds.division_of, report)


def slow_world(seconds: dict[int, float], every: int = 1) -> tuple[FragmentSyncs, Stages, SlowRounds]:
    stages, group = Stages(), SlowRounds(seconds)
    return syncs_of(stages, group, every), stages, group


def test_rounds_that_last_longer_than_steps_run_side_by_side_and_are_taken_in_by_their_numbers() -> None:
    async def main() -> None:
        rounds, stages, _ = slow_world({1: 3.0, 2: 1.0})
        for step in range(1, MAX_RUNNING_SYNCS + 1):
            assert rounds.next_due(step, agreed_step=0) == step
            rounds.begin(step, step)
            assert rounds.next_due(step, agreed_step=0) is None, "once"
        assert rounds.next_due(99, agreed_step=0) is None, "as many as may run"
        await asyncio.sleep(2.9)
        assert not stages.applied
        await asyncio.sleep(0.2)
        assert [step for step, _ in stages.applied] == [1, 2, 3, 4]
        assert rounds.next_due(99, agreed_step=4) == 5, "later ones wait for their turn, none is left out"

    run(main())


def test_a_late_round_contributes_its_own_values_and_keeps_the_means_that_it_was_given() -> None:
    """Shard 0 is kept by the other replica; the round fails in part 0, and averages part 1."""

    async def main() -> None:
        size, sent = PART_ELEMENTS + SLICE_BLOCK, list[torch.Tensor]()

        class Group(SlowRounds):
            """The other replica keeps the mean of shard 0: threes, where this replica has ones."""

            live_others = (PeerId("other"),)

            async def recall_from(self, peer: PeerId, shard: Shard, numel: int, deadline: float) -> ShardMean | None:
                mean = ShardMean(torch.full((numel,), 3.0), Averaged(2, 2, 2.0, counted=True, wire="float32"))
                return mean if shard.position == 0 else None

            async def run(
                self, stage: int, kind: str, number: int, values: Any, weight: float, fragments: int = 0
            ) -> RoundResult:
                sent.append(values.clone())
                return RoundResult(values * 2, [False, True], 4, [4, 4])

        class LargeStages(Stages):
            async def outer_gradient(self, stage: int, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.ones(size), torch.zeros(size)

        stages = LargeStages()
        group = Group({}, of=FragmentDivision(4 * size, 4, 0))
        rounds = syncs_of(stages, group)
        rounds.begin(1, 1 + RECALL_FIRST)
        await asyncio.sleep(1.0)
        assert torch.equal(sent[0], torch.ones(size)), "its own values, not the mean that it was given"
        (_, (mean, averaged)) = stages.applied[0]
        assert averaged == (True, True)
        assert torch.equal(mean[:PART_ELEMENTS], torch.full((PART_ELEMENTS,), 3.0)), "as the other replica took it in"
        assert torch.equal(mean[PART_ELEMENTS:], torch.full((SLICE_BLOCK,), 2.0))

    run(main())


def test_rounds_whose_fragment_is_due_again_are_only_asked_for_so_that_a_backlog_ends() -> None:
    async def main() -> None:
        rounds, stages, group = slow_world({})
        stages.step = 200
        began = asyncio.get_running_loop().time()
        while (number := rounds.next_due(200, agreed_step=stages.applied[-1][0] if stages.applied else 0)) is not None:
            rounds.begin(number, 200)
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() < began + 3.0
        assert sorted(group.weights) == [197, 198, 199, 200]
        assert [step for step, _ in stages.applied] == list(range(1, 201))

    run(main())


def test_a_round_whose_fragment_is_due_again_is_taken_part_in_if_others_wait_in_it() -> None:
    async def main() -> None:
        stages, group = Stages(), SlowRounds({}, {7})
        rounds = syncs_of(stages, group)
        stages.step = 20
        for number in range(5, 9):
            rounds.begin(number, 20)
        await asyncio.sleep(1.0)
        assert group.weights.keys() == {7}
        assert [(step, averaged[1]) for step, averaged in stages.applied] == [
            (number, (number == 7,)) for number in range(5, 9)
        ]

    run(main())


def test_a_failed_round_ends_at_once_when_its_fragment_is_due_again() -> None:
    """Else it holds its place while further steps are taken, and the replica comes late to all rounds after it."""

    async def main() -> None:
        class Failing(SlowRounds):
            async def run(
                self, stage: int, kind: str, number: int, values: Any, weight: float, fragments: int = 0
            ) -> RoundResult:
                await super().run(stage, kind, number, values, weight, fragments)
                return RoundResult(values, [False], 4, [4])

        for step, seconds in ((4, RECALL_PAUSE * (MAX_RECALLS - 1) * 20.0), (5, 0.0)):
            stages, group = Stages(), Failing({})
            rounds = syncs_of(stages, group)
            stages.step = step
            rounds.begin(1, 1)
            began = asyncio.get_running_loop().time()
            while not stages.applied:
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - began == pytest.approx(seconds, abs=0.1)

    run(main())


def test_no_two_rounds_of_one_fragment_run_at_once() -> None:
    async def main() -> None:
        stages, group = Stages(), SlowRounds({1: 3.0}, of=FragmentDivision(NUMEL, 2, 0))
        rounds = syncs_of(stages, group)
        rounds.begin(1, 1)
        rounds.begin(2, 2)
        await asyncio.sleep(1.0)
        assert rounds.next_due(9, agreed_step=0) is None

    run(main())


class FewerFragmentsLater(SlowRounds):
    """From round 7 on of two slices, not of four."""

    def division_of(self, number: int) -> FragmentDivision:
        return self.of if number < 7 else FragmentDivision(NUMEL, 2, 0)


def test_the_first_round_of_another_number_of_fragments_waits_for_the_rounds_before_it() -> None:
    """Its slice has weights of theirs: what is learnt of those would be applied twice."""

    async def main() -> None:
        stages, group = Stages(), FewerFragmentsLater({5: 3.0, 6: 5.0})
        rounds = syncs_of(stages, group)
        rounds.begin(5, 5)
        assert rounds.next_due(6, agreed_step=4) == 6, "of the same number"
        rounds.begin(6, 6)
        for waited_s, due in ((1.0, None), (3.0, None), (2.0, 7)):
            await asyncio.sleep(waited_s)
            assert rounds.next_due(8, agreed_step=4) == due

    run(main())


@pytest.mark.parametrize("error", [ProtocolError("bad-tensor", "it is wrong"), IndexError("it is wrong")])
def test_a_round_that_cannot_be_taken_in_is_told_and_those_after_it_go_on(error: Exception) -> None:
    async def main() -> None:
        stages, group, told = Stages(), SlowRounds({}), []
        stages.refused.add(1)
        stages.error = error
        rounds = syncs_of(stages, group, report=told.append)
        rounds.begin(1, 2)
        rounds.begin(2, 2)
        await asyncio.sleep(1.0)
        code = error.code if isinstance(error, ProtocolError) else "IndexError"
        assert [step for step, _ in stages.applied] == [2]
        assert told == [TaskFailed("averaging", f"fragment sync 1: {code}: it is wrong")]

    run(main())


def test_a_fragment_weighs_the_tokens_since_its_last_round() -> None:
    async def main() -> None:
        rounds, _, group = slow_world({}, every=2)
        for step in range(1, 21):
            rounds.record_inner_step(step)
            if (number := rounds.next_due(step, agreed_step=step - 2)) is not None:
                rounds.begin(number, step)
                await asyncio.sleep(0.1)
        assert group.weights[10] == sum(range(13, 21)), "four slices, a round every two steps"

    run(main())


def test_rounds_that_are_stopped_change_nothing_and_begin_again_from_what_the_state_holds() -> None:
    async def main() -> None:
        rounds, stages, group = slow_world({3: 5.0, 4: 5.0})
        rounds.begin(3, 3)
        rounds.begin(4, 4)
        await asyncio.sleep(1.0)
        await rounds.stop()
        await asyncio.sleep(10.0)
        assert not stages.applied and rounds.next_due(6, agreed_step=2) == 3
        taken_part = dict(group.weights)
        for number in (3, 4, 5):
            rounds.begin(number, 5)
        await asyncio.sleep(30.0)
        assert group.weights.keys() - taken_part.keys() == {5}, "what it has contributed to it only asks for"
        assert [step for step, _ in stages.applied] == [3, 4, 5]

    run(main())
