"""Epoch gossip in virtual time: news reach all origins soon, silence costs little, and nobody is believed who lies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from agora_protocol.errors import DataError, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedEpochs, GossipEpochs, Pong

from agora.core.calls import Reply
from agora.observe.events import Event, TaskFailed
from agora.swarm.peer_score import Violation
from agora.tuning.epochs.gossip import HEARTBEAT_INTERVAL_S, INTERVAL_S, REPORT_INTERVAL_S, TARGETS, EpochGossip
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults
from tests.pipeline.world import peer_id
from tests.virtual_time import run

BAD, OTHER_ROWS = 666, 667


class KnownNumbers:
    """A state that is a set of numbers: whoever hears of one knows it too."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.last_state: tuple[int, ...] = ()
        self.ticks = 0

    def next_state(self) -> tuple[int, ...]:
        self.ticks += 1
        self.last_state = tuple(sorted(self.known))
        return self.last_state

    def merge(self, origin: str, values: Sequence[int]) -> None:
        if BAD in values:
            raise ProtocolError("bad-message", "no state")
        if OTHER_ROWS in values:
            raise DataError("other rows")
        self.known |= set(values)


class Circle:
    """Origins that all know each other."""

    def __init__(self, count: int, faults: NetworkFaults | None = None) -> None:
        self.network = MemoryNetwork(faults, random.Random(1))
        self.assigners: dict[PeerId, KnownNumbers] = {}
        self.gossips: dict[PeerId, EpochGossip] = {}
        self.events: list[Event] = []
        self.violations: list[tuple[PeerId, Violation]] = []
        self.news = 0
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}
        for index in range(count):
            self.add(peer_id(f"origin {index}"))

    def add(self, peer: PeerId, answer: Callable[[MemoryCall], Coroutine[Any, Any, Reply]] | None = None) -> None:
        async def by_gossip(call: MemoryCall) -> Reply:
            assert isinstance(call.message, GossipEpochs)
            return Reply(self.gossips[peer].answer(call.peer, call.message))

        caller = self.network.join(peer, answer or by_gossip)
        self.assigners[peer] = KnownNumbers()
        self.gossips[peer] = EpochGossip(
            self.assigners[peer],
            caller,
            lambda: self.assigners.keys() - {peer},
            report=self.events.append,
            report_violation=lambda who, violation, text: self.violations.append((who, violation)),
            on_exchange=self._count_news,
            rng=random.Random(len(self.assigners)),
        )
        if answer is None:
            self.tasks[peer] = asyncio.create_task(self.gossips[peer].run())

    def _count_news(self) -> None:
        self.news += 1

    def knowing(self, number: int) -> int:
        return sum(number in assigner.known for assigner in self.assigners.values())

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def in_circle(count: int, faults: NetworkFaults | None = None) -> Any:
    """Decorates a test that gets a running circle of `count` origins."""

    def decorate(test: Callable[[Circle], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def wrapped() -> None:
            async def whole() -> None:
                circle = Circle(count, faults)
                try:
                    await test(circle)
                finally:
                    await circle.stop()

            run(whole())

        wrapped.__name__ = test.__name__
        return wrapped

    return decorate


@in_circle(12)
async def test_what_one_has_done_all_know_within_a_few_intervals(circle: Circle) -> None:
    await asyncio.sleep(5.0)
    first = next(iter(circle.assigners.values()))
    first.known.add(7)
    await asyncio.sleep(8 * INTERVAL_S)
    assert circle.knowing(7) == 12
    assert circle.events == [] and circle.violations == []


@in_circle(6, NetworkFaults(lost_answer=0.4))
async def test_lost_answers_delay_the_news_and_lose_none(circle: Circle) -> None:
    for number, assigner in enumerate(circle.assigners.values()):
        assigner.known.add(number)
    await asyncio.sleep(20.0)
    assert circle.network.faults.fired["lost"] > 10
    assert all(circle.knowing(number) == 6 for number in range(6))
    assert circle.violations == []


@in_circle(8)
async def test_origins_without_news_only_send_heartbeats(circle: Circle) -> None:
    await asyncio.sleep(10.0)
    before = circle.network.calls.total()
    await asyncio.sleep(100.0)
    sent = circle.network.calls.total() - before
    assert 0 < sent <= 8 * TARGETS * (100.0 / HEARTBEAT_INTERVAL_S + 1)
    assert all(assigner.ticks >= 100.0 / INTERVAL_S for assigner in circle.assigners.values()), (
        "each interval is counted"
    )


@in_circle(4)
async def test_a_newcomer_hears_what_is_done_though_nothing_new_happens(circle: Circle) -> None:
    for assigner in circle.assigners.values():
        assigner.known.add(3)
    await asyncio.sleep(30.0)
    circle.add(peer_id("newcomer"))
    await asyncio.sleep(INTERVAL_S)
    assert 3 in circle.assigners[peer_id("newcomer")].known, "it asks by telling"


@in_circle(4)
async def test_a_hung_origin_holds_up_nobody(circle: Circle) -> None:
    await asyncio.sleep(5.0)
    first, *_, last = circle.assigners
    circle.network.hang(last)
    circle.assigners[first].known.add(9)
    await asyncio.sleep(6.0)
    assert circle.network.faults.fired["hang"] == 1
    assert circle.knowing(9) == 3


@in_circle(2)
async def test_an_answer_that_is_none_is_a_violation(circle: Circle) -> None:
    async def pong(call: MemoryCall) -> Reply:
        return Reply(Pong())

    async def nonsense(call: MemoryCall) -> Reply:
        return Reply(GossipedEpochs((BAD,)))

    circle.add(peer_id("pong"), pong)
    circle.add(peer_id("nonsense"), nonsense)
    await asyncio.sleep(30.0)
    assert {who for who, _ in circle.violations} == {peer_id("pong"), peer_id("nonsense")}
    assert {violation for _, violation in circle.violations} == {Violation.BAD_ANSWER}
    assert not any(BAD in assigner.known for assigner in circle.assigners.values())


@in_circle(2)
async def test_an_origin_that_refuses_the_state_has_not_offended(circle: Circle) -> None:
    async def refuse(call: MemoryCall) -> Reply:
        raise ProtocolError("bad-message", "that is no state for me")

    circle.add(peer_id("newer version"), refuse)
    await asyncio.sleep(30.0)
    assert circle.network.calls.total() > 0 and circle.violations == []


@in_circle(2)
async def test_a_malformed_request_is_refused(circle: Circle) -> None:
    first = next(iter(circle.gossips.values()))
    with pytest.raises(ProtocolError):
        first.answer(peer_id("liar"), GossipEpochs((BAD,)))


@in_circle(2)
async def test_other_rows_are_reported_once_a_minute_and_not_used(circle: Circle) -> None:
    async def other(call: MemoryCall) -> Reply:
        return Reply(GossipedEpochs((OTHER_ROWS, 5)))

    circle.add(peer_id("other"), other)
    await asyncio.sleep(3 * REPORT_INTERVAL_S)
    reports = [event for event in circle.events if isinstance(event, TaskFailed)]
    assert 2 * 3 <= len(reports) <= 2 * 4 and all("other rows" in event.error for event in reports)
    assert circle.knowing(5) == 0 and circle.violations == []


@in_circle(3)
async def test_the_origin_hears_of_every_interval_and_of_all_news(circle: Circle) -> None:
    await asyncio.sleep(10.0)
    assert circle.news >= 3 * 10.0 / INTERVAL_S
