"""When a daemon judges its place, what it publishes of itself, and what it does when a move fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId, Span

from agora.node.process.balancing import (
    FAILED_MOVE_PAUSE_S,
    MEASURE_INTERVAL_S,
    keep_claimed_capacity_current,
    rebalance_repeatedly,
)
from agora.observe.events import MoveChosen
from agora.swarm.rebalancing import MAX_JUDGE_INTERVAL_S
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from agora.swarm.view import PeerView, View
from tests.virtual_time import run

ME = PeerId("me")


def peer(name: str, span: str) -> PeerView:
    return PeerView(PeerId(name), Span.parse(span), 1, state="serving", capacity=1.0)


def view(*others: PeerView) -> View:
    """Only this peer can be spared: each other one holds a stage that has no third."""
    peers = [peer("me", "1"), peer("a", "0-1"), peer("b", "0-1"), *others]
    return View({seen.peer: seen for seen in peers})


def uneven() -> View:
    """The last stage has one peer."""
    return view(peer("lonely", "2"))


def even() -> View:
    return view(peer("c", "2"), peer("d", "2"))


class FakePeer:
    """A LocalPeer with a view of its own, which `fresh` replaces when it is read again."""

    def __init__(self, view: View, fresh: View | None = None) -> None:
        self.events: list[Any] = []
        self.reads = 0
        self.published: list[tuple[float, float]] = []
        self.fresh = fresh
        self.context = SimpleNamespace(me=ME, report_event=self.events.append)
        self.membership = SimpleNamespace(
            view=view, refresh=self._refresh, update_capacity=lambda *values: self.published.append(values)
        )
        self.capacity_probe = SimpleNamespace(
            needs=equal_needs(3),
            machine=MachineCapacity(1.0, 5.0, (1, 1, 1)),
            record_measurement=lambda span, service_s, uplink: 1 / service_s,
        )

    @property
    def view(self) -> View:
        view: View = self.membership.view
        return view

    async def _refresh(self) -> None:
        self.reads += 1
        if self.fresh is not None:
            self.membership.view = self.fresh

    def uplink_bytes_per_s(self) -> float:
        return 5.0


class Mover:
    """What carries out moves: remembers when each was asked for."""

    def __init__(self, error: LocalError | None = None) -> None:
        self.error = error
        self.moves: list[tuple[float, Span]] = []

    async def move(self, span: Span) -> None:
        self.moves.append((asyncio.get_running_loop().time(), span))
        if self.error is not None:
            raise self.error


def balanced_for(
    seconds: float, local_peer: FakePeer, mover: Mover, serving: Any = lambda: SimpleNamespace(loaded_at=0.0)
) -> None:
    """Lets the task run for so long."""

    async def work() -> None:
        task = asyncio.create_task(rebalance_repeatedly(local_peer, serving, mover.move))
        await asyncio.sleep(seconds)
        assert not task.done()
        task.cancel()

    run(work())


def test_a_peer_moves_to_the_stage_with_too_few() -> None:
    local_peer, mover = FakePeer(uneven()), Mover()
    balanced_for(300.0, local_peer, mover)
    assert {span for _, span in mover.moves} == {Span(2, 2)}
    chosen = [event for event in local_peer.events if isinstance(event, MoveChosen)]
    assert len(chosen) == len(mover.moves) and chosen[0].first_stage == 2 and "fewer than two peers" in chosen[0].reason


def test_a_peer_of_an_even_swarm_stays() -> None:
    local_peer, mover = FakePeer(even()), Mover()
    balanced_for(300.0, local_peer, mover)
    assert not mover.moves and not local_peer.events
    assert local_peer.reads == 0, "the directory is read again only before a move"


def test_a_move_is_judged_again_on_a_view_that_was_read_right_before() -> None:
    local_peer, mover = FakePeer(uneven(), fresh=even()), Mover()
    balanced_for(300.0, local_peer, mover)
    assert local_peer.reads > 0 and not mover.moves


def test_a_daemon_that_serves_nothing_does_not_judge() -> None:
    local_peer, mover = FakePeer(uneven()), Mover()
    balanced_for(300.0, local_peer, mover, serving=lambda: None)
    assert not mover.moves and local_peer.reads == 0


def test_a_move_that_fails_is_not_repeated_soon() -> None:
    local_peer, mover = FakePeer(uneven()), Mover(LocalError("the text is not on this machine"))
    balanced_for(10 * FAILED_MOVE_PAUSE_S, local_peer, mover)
    times = [time for time, _ in mover.moves]
    assert len(times) > 2, "it does not give up for ever"
    assert min(later - earlier for earlier, later in zip(times, times[1:], strict=False)) >= FAILED_MOVE_PAUSE_S
    assert times[0] <= 1000.0 + 60 * MAX_JUDGE_INTERVAL_S


def test_what_was_measured_is_put_into_the_claim_while_a_span_is_held() -> None:
    local_peer = FakePeer(even())
    hop = SimpleNamespace(service_s=None)
    held: list[Any] = [None]

    async def work() -> None:
        task = asyncio.create_task(keep_claimed_capacity_current(local_peer, lambda: held[0]))
        await asyncio.sleep(2.5 * MEASURE_INTERVAL_S)
        held[0] = SimpleNamespace(span=Span(0, 0), hop=hop)
        await asyncio.sleep(2 * MEASURE_INTERVAL_S)
        assert not local_peer.published, "no span, then no microbatch yet"
        hop.service_s = 0.25
        await asyncio.sleep(2 * MEASURE_INTERVAL_S)
        task.cancel()

    run(work())
    assert local_peer.published == [(4.0, 5.0)] * 2
