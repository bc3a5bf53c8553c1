"""Step gossip among replicas, in virtual time: they step together, wait for nobody, and believe no single one."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import MAX_UINT
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedSteps, GossipSteps, Pong

from agora.core.calls import Reply
from agora.core.step_schedule import SyncSchedule
from agora.replica.decide import Action, Situation, StepSettings, decide
from agora.replica.gossip import (
    CALL_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    INTERVAL_S,
    SYNCHRONOUS_INTERVAL_S,
    StepGossip,
    SwarmQueries,
)
from agora.replica.stage_view import (
    GOSSIP_FANOUT,
    MAX_DIRECT_TARGETS,
    SILENCE_TIMEOUT_S,
    Membership,
    ReplicaCounts,
    StageView,
    missing_tokens,
    unreachable_replicas,
)
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults
from tests.replica.world import identities
from tests.virtual_time import run

STAGE = 3


def now() -> float:
    return asyncio.get_running_loop().time()


class Replica:
    """Counts tokens at its own rate, and steps as `decide` says."""

    def __init__(self, world: World, peer: PeerId, rate: float) -> None:
        self.world, self.peer, self.rate = world, peer, rate
        self.step, self.tokens, self.counted = 0, 0, 0
        self.sees: list[PeerId] | None = None
        self.actions: list[Action] = []
        self.port = world.network.join(peer, self._answer)
        self.gossip = StepGossip(
            peer,
            STAGE,
            self,
            SwarmQueries(
                self.replicas_in_view,
                bandwidths=lambda stage: {},
                has_connections=self.has_connections,
                uplink_bytes_per_s=lambda: None,
                steps_of_run=lambda: [[]],
            ),
            counts=lambda: self.counts,
            on_change=self.decide,
            highest_plausible=lambda: math.inf,
            report_implausible=lambda *report: None,
            interval_s=SYNCHRONOUS_INTERVAL_S if world.soon else INTERVAL_S,
            rng=random.Random(len(world.replicas)),
        )
        self.tasks: list[asyncio.Task[None]] = []

    def replicas_in_view(self, stage: int) -> list[PeerId]:
        return list(self.world.replicas) if self.sees is None else self.sees

    def has_connections(self) -> bool:
        return self.world.has_connections

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self.gossip.run()), asyncio.create_task(self._count())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)

    @property
    def counts(self) -> ReplicaCounts:
        return ReplicaCounts(self.step, self.step, self.tokens, self.counted + self.tokens)

    @property
    def others(self) -> Membership:
        return self.gossip.membership()

    @property
    def heard(self) -> set[PeerId]:
        return set(self.others.listed_live)

    @property
    def present(self) -> set[PeerId]:
        others = self.others
        return {self.peer, *others.listed} - unreachable_replicas(others.known, others.listed, now())

    def to_go(self) -> int:
        return missing_tokens(self.others.listed_live, self.step, self.world.target)

    def decide(self) -> None:
        config = StepSettings(self.world.target, False, max_steps_behind=10**30)
        view = StageView(self.counts, self.others, sync_schedule=SyncSchedule(20))
        action, _ = decide(Situation.of(view, now(), config))
        self.actions.append(action)
        if self.tasks:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        match action:
            case Action("catch up", step):
                self.take(step)
            case Action("step"):
                self.take(self.step + 1)

    def take(self, step: int) -> None:
        self.world.spent[self.step] += self.tokens
        self.counted += self.tokens
        self.step, self.tokens = step, 0
        self.gossip.tick()

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.tokens += int(self.rate * 0.05)
            if self.tokens >= self.to_go():
                self.take(self.step + 1)

    async def _answer(self, call: MemoryCall) -> Reply:
        answer = self.world.answers.get(self.peer) or self.gossip.answer
        return Reply(answer(call.peer, call.message), [])

    async def call(self, peer, request, tensors=(), *, deadline, on_progress=None) -> Reply:
        self.world.calls.append((now(), self.peer, peer))
        self.world.open[self.peer, peer] += 1
        try:
            return await self.port.call(peer, request, tensors, deadline=deadline)
        finally:
            self.world.open[self.peer, peer] -= 1


class World:
    """Replicas of one stage, and their network; `answers` are hostile ones."""

    def __init__(self, rates: list[float], target: int = 1000, soon: bool = False) -> None:
        self.target, self.soon = target, soon
        self.has_connections = False
        self.network = MemoryNetwork(NetworkFaults(latency_s=(0.0025, 0.0025)))
        self.answers: dict[PeerId, Callable[[PeerId, GossipSteps], Any]] = {}
        self.calls: list[tuple[float, PeerId, PeerId]] = []
        self.open: Counter[tuple[PeerId, PeerId]] = Counter()
        self.spent: Counter[int] = Counter()
        self.replicas: dict[PeerId, Replica] = {}
        for peer, rate in zip(identities(len(rates)), rates, strict=True):
            self.replicas[peer] = Replica(self, peer, rate)

    @property
    def all(self) -> list[Replica]:
        return list(self.replicas.values())

    def start(self) -> None:
        for replica in self.all:
            replica.start()

    async def close(self) -> None:
        for replica in self.all:
            await replica.stop()
        await asyncio.sleep(0.01)
        assert not +self.open and len(asyncio.all_tasks()) == 1, "nothing is left behind"


def in_world(rates: list[float], work: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        world = World(rates, **settings)
        await work(world)
        await world.close()

    run(main())


def entry(peer: PeerId, step: int, tokens: int, age_ms: int = 0) -> tuple[PeerId, *tuple[int, ...]]:
    """A gossiped entry of a replica that has counted nothing before."""
    return peer, step, step, tokens, tokens, 0, 0, 0, 0, age_ms


def told(step: int, tokens: int, *others: tuple[PeerId, *tuple[int, ...]], by: PeerId) -> GossipSteps:
    return GossipSteps(STAGE, (entry(by, step, tokens), *others))


# --- together


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_replicas_step_together_when_together_they_have_the_tokens(replicas: int, soon: bool) -> None:
    async def work(world: World) -> None:
        world.start()
        for _ in range(16):
            await asyncio.sleep(0.5)
            steps = [it.step for it in world.all]
            assert max(steps) - min(steps) <= 1
        done = min(it.step for it in world.all)
        late = 0.05 if soon else 0.3
        rate = sum(it.rate for it in world.all)
        assert done >= 0.8 * 8.0 / (world.target / rate + late)
        for step in range(done):
            assert 0.95 * world.target <= world.spent[step] <= world.target + rate * (late + 0.1), step

    rates = [1000.0 + 400.0 * (n % 3) for n in range(replicas)]
    in_world(rates, work, target=int(sum(rates)), soon=soon)


def test_one_that_starts_again_with_nothing_follows_and_takes_nobody_back() -> None:
    async def work(world: World) -> None:
        world.start()
        await asyncio.sleep(10.0)
        first = world.all[0]
        before = first.step
        assert before > 5
        first.step, first.tokens = 0, 0
        await asyncio.sleep(1.0)
        assert first.step >= before and min(it.step for it in world.all) >= before

    in_world([400.0] * 3, work)


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_replica_that_falls_silent_is_not_counted_on_and_blocks_nobody(how: str) -> None:
    async def work(world: World) -> None:
        world.start()
        await asyncio.sleep(5.0)
        silent = world.all[2]
        await silent.stop()
        getattr(world.network, how).add(silent.peer)
        await asyncio.sleep(SILENCE_TIMEOUT_S + CALL_TIMEOUT_S)
        for replica in world.all[:2]:
            assert silent.peer not in replica.heard
            assert silent.peer not in replica.present
            assert replica.present == {it.peer for it in world.all[:2]}
            assert replica.gossip.others_in_view() == {it.peer for it in world.all} - {replica.peer}, (
                "in the view it still is"
            )
        before, world.spent = world.all[0].step, Counter()
        await asyncio.sleep(10.0)
        steps = [it.step for it in world.all[:2]]
        assert min(steps) - before >= 6 and max(steps) - min(steps) <= 1, "at two thirds of the pace"
        assert all(world.spent[step] >= 0.95 * world.target for step in range(before + 1, min(steps)))

    in_world([400.0] * 3, work)


def test_one_that_was_lost_is_there_again_when_it_speaks() -> None:
    async def work(world: World) -> None:
        world.start()
        await asyncio.sleep(2.0)
        first, second = world.all
        world.network.dead.add(second.peer)
        await asyncio.sleep(2.0)
        assert first.present == {first.peer}
        world.network.dead.clear()
        await asyncio.sleep(2.0)
        assert first.present == {first.peer, second.peer} == second.present
        assert abs(first.step - second.step) <= 1

    in_world([400.0] * 2, work)


# --- what others ask of a gossip


def test_tokens_to_go_is_what_the_others_have_not_counted_for_this_step() -> None:
    async def work(world: World) -> None:
        first, second, third = world.all
        gossip = first.gossip
        assert first.to_go() == 1000
        gossip.answer(second.peer, told(0, 300, by=second.peer))
        assert first.to_go() == 700
        gossip.answer(third.peer, told(0, 650, by=third.peer))
        first.tokens = 20
        assert first.to_go() == 50 and set(first.actions) == {Action("wait")}
        gossip.answer(third.peer, told(0, 5000, by=third.peer))
        assert first.to_go() == 1
        assert first.actions[-1] == Action("step")
        await asyncio.sleep(SILENCE_TIMEOUT_S + 1.0)
        gossip.tick()
        assert first.to_go() == 1000, "what they counted went with them"
        await asyncio.sleep(CALL_TIMEOUT_S)

    in_world([0.0] * 3, work)


def test_each_report_and_each_interval_is_decided_on() -> None:
    async def work(world: World) -> None:
        first, second = world.all
        first.tokens = 1
        first.gossip.answer(second.peer, told(0, 2000, by=second.peer))
        running = asyncio.create_task(first.gossip.run())
        await asyncio.sleep(0)
        assert first.actions == [Action("step")] * 2
        running.cancel()
        await asyncio.wait([running])
        first.gossip.answer(second.peer, told(1, 0, by=second.peer))
        assert first.actions[-1] == Action("wait"), "it counts on for its own part"
        first.gossip.answer(second.peer, told(9, 0, by=second.peer))
        assert first.actions[-1] == Action("catch up", 9)

    in_world([0.0] * 2, work)


def test_one_that_is_alone_calls_nobody_and_steps_by_its_own_tokens() -> None:
    async def work(world: World) -> None:
        only = world.all[0]
        only.start()
        assert not only.gossip.others_in_view()
        await asyncio.sleep(10.2)
        assert only.step == 4 and not world.calls
        only.sees = []
        assert not only.gossip.others_in_view(), "also before the view has itself in it"
        only.sees = [only.peer, identities(2)[1]]
        assert only.gossip.others_in_view()
        only.sees = None

    in_world([400.0], work)


def test_an_answer_has_the_own_numbers_first_and_how_old_the_others_are() -> None:
    async def work(world: World) -> None:
        first, second, third = world.all
        first.step, first.tokens = 4, 77
        first.gossip.answer(second.peer, told(4, 10, by=second.peer))
        await asyncio.sleep(2.0)
        answer = first.gossip.answer(third.peer, told(4, 20, by=third.peer))
        assert answer.replicas == (
            entry(first.peer, 4, 77),
            entry(third.peer, 4, 20),
            entry(second.peer, 4, 10, 2000),
        )

    in_world([0.0] * 3, work)


# --- how much is told


@pytest.mark.parametrize("replicas", [2, MAX_DIRECT_TARGETS + 1, MAX_DIRECT_TARGETS + 2, 40])
def test_few_are_called_at_once_and_nobody_twice_at_the_same_time(replicas: int) -> None:
    async def work(world: World) -> None:
        most = replicas - 1 if replicas <= MAX_DIRECT_TARGETS + 1 else GOSSIP_FANOUT
        first = world.all[0]
        for _ in range(20):
            before = len(world.calls)
            first.tokens += 1
            first.gossip.tick()
            first.gossip.tick()
            await asyncio.sleep(0.2)
            asked = [peer for _, _, peer in world.calls[before:]]
            assert len(asked) == most == len(set(asked)) and first.peer not in asked
        world.network.silent |= set(world.replicas) - {first.peer}
        for _ in range(100):
            first.tokens += 1
            first.gossip.tick()
            assert max(world.open.values()) <= 1
            await asyncio.sleep(0.01)
        await asyncio.sleep(CALL_TIMEOUT_S)

    in_world([0.0] * replicas, work)


def test_gossip_that_ends_waits_for_no_answer() -> None:
    async def work(world: World) -> None:
        world.network.silent |= set(world.replicas)
        world.start()
        await asyncio.sleep(1.0)
        assert +world.open
        began = now()
        for replica in world.all:
            await replica.stop()
        assert now() == began and not +world.open

    in_world([0.0] * 3, work)


def test_without_news_only_heartbeats_are_sent() -> None:
    async def work(world: World) -> None:
        world.start()
        await asyncio.sleep(60.0)
        assert 0.8 * 60.0 / HEARTBEAT_INTERVAL_S <= len(world.calls) / 2 <= 60.0 / HEARTBEAT_INTERVAL_S + 2
        assert all(len(it.heard) == 1 for it in world.all), "which keep them alive for each other"

    in_world([0.0] * 2, work)


# --- hostile ones


def test_one_of_three_that_is_far_ahead_carries_nobody() -> None:
    async def work(world: World) -> None:
        hostile = world.all[3]
        world.answers[hostile.peer] = lambda peer, message: GossipedSteps((entry(hostile.peer, MAX_UINT, 0),))
        for replica in world.all[:3]:
            replica.start()
        for _ in range(40):
            await asyncio.sleep(0.25)
            for replica in world.all[:3]:
                replica.gossip.answer(hostile.peer, told(MAX_UINT, 0, by=hostile.peer))
        steps = [it.step for it in world.all[:3]]
        assert 6 <= min(steps) and max(steps) <= 13, "12 at the pace of three"
        assert all(it >= 0.95 * world.target for it in [world.spent[step] for step in range(min(steps))])

    in_world([400.0] * 3 + [0.0], work)


def test_lies_about_others_last_until_those_report() -> None:
    async def work(world: World) -> None:
        first, second, third, hostile = world.all
        for honest in (second, third):
            first.gossip.answer(honest.peer, told(0, 100, by=honest.peer))
        first.gossip.answer(hostile.peer, told(0, 0, entry(second.peer, 0, 400), by=hostile.peer))
        assert first.to_go() == 500
        first.gossip.answer(second.peer, told(0, 101, by=second.peer))
        assert first.to_go() == 1000 - 201
        first.gossip.answer(
            hostile.peer, told(0, 0, entry(second.peer, 0, 1), entry(first.peer, 9, 9), by=hostile.peer)
        )
        assert first.to_go() == 1000 - 201, "and nobody is made less, or told of itself"
        assert set(first.actions) <= {Action("wait")}

    in_world([0.0] * 4, work)


def test_strangers_move_nobody_and_are_not_remembered() -> None:
    async def work(world: World) -> None:
        first, second = world.all
        strangers = identities(60)[2:]
        first.gossip.answer(second.peer, told(0, 100, by=second.peer))
        for stranger in strangers:
            about = [entry(peer, 7, 10**6) for peer in (second.peer, *strangers[:40]) if peer != stranger]
            answer = first.gossip.answer(stranger, told(10**6, 10**6, *about, by=stranger))
            assert {peer for peer, *_ in answer.replicas} == {first.peer, second.peer}
        assert first.to_go() == 900 and set(first.actions) <= {Action("wait")}
        assert set(first.heard) == {second.peer}
        await asyncio.sleep(SILENCE_TIMEOUT_S + 1.0)
        first.gossip.answer(second.peer, told(0, 110, *(entry(it, 7, 7) for it in strangers[:40]), by=second.peer))
        assert set(first.gossip.known_progress()) == {second.peer}

    in_world([0.0] * 2, work)


def test_an_answer_of_another_kind_changes_nothing() -> None:
    async def work(world: World) -> None:
        first, second = world.all
        for answer in (told(0, 500, by=second.peer), Pong()):
            world.answers[second.peer] = lambda peer, message: answer
            first.gossip.tick()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S + 0.5)
            assert not first.heard and first.to_go() == 1000

    in_world([0.0] * 2, work)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("bad", [-1, MAX_UINT + 1, 0.5, True])
def test_numbers_that_no_replica_can_have_are_no_message(place: int, bad: Any) -> None:
    numbers: list[Any] = [0] * 7
    numbers[place] = bad
    with pytest.raises(ProtocolError):
        GossipSteps(STAGE, ((identities(1)[0], *numbers),))
