"""Claims about what a daemon loads: the span that stands when it is loaded, and nothing of those it gave up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.node.building import MOST_LOADS, MOST_SEATS_BYTES, Builder, seats, usual_in_flight
from agora.node.service import Notifier
from agora.node.steps import Steps
from agora.swarm.placement import Placement


class Compute:
    """What was loaded for a span, and whether it is closed."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.closed = False

    async def close(self, timeout_s: float) -> None:
        self.closed = True


class Membership:
    """Says, each time it is asked, what it was told to say; a moved span stands from then on."""

    def __init__(self, *moves: Span) -> None:
        self.moves = list(moves)
        self.asked = 0

    async def confirm(self) -> Placement | None:
        self.asked += 1
        return Placement(self.moves.pop(0), "others chose it first") if self.moves else None


class Loading(Builder):
    """The builder with nothing real behind the two loads."""

    def __init__(self, closing: AsyncExitStack, pinned: Span | None = None) -> None:
        self.events: list = []
        self.loaded: list[Compute] = []
        where = SimpleNamespace(settings=SimpleNamespace(span=pinned, memory_gib=0.0))
        steps = Steps(self.events.append, Notifier())
        super().__init__(where, self.events.append, steps, closing, SimpleNamespace(), lambda name, work: None)

    async def _corpus(self, signed, span):
        return f"the text for {span}"

    async def _model(self, manifest, span):
        assert all(compute.closed for compute in self.loaded), "two spans are never held at once"
        self.loaded.append(Compute(span))
        return self.loaded[-1]


def load(membership: Membership, pinned: Span | None = None) -> tuple[Loading, Compute, object]:
    """The builder, and what it kept; checks that the daemon's end closes just that."""

    async def work():
        async with AsyncExitStack() as closing:
            builder = Loading(closing, pinned)
            signed = SimpleNamespace(manifest=preset("tiny"))
            compute, batches = await builder._load(signed, membership, pinned or Span(0, 0))
            assert [c.closed for c in builder.loaded] == [True] * (len(builder.loaded) - 1) + [False]
        assert compute.closed
        return builder, compute, batches

    return asyncio.run(work())


def test_a_span_that_stands_is_loaded_once() -> None:
    membership = Membership()
    builder, compute, batches = load(membership)
    assert (len(builder.loaded), membership.asked) == (1, 1)
    assert (compute.span, batches) == (Span(0, 0), "the text for 0")


def test_a_span_taken_while_it_loaded_is_given_up_for_the_other() -> None:
    membership = Membership(Span(1, 1))
    builder, compute, batches = load(membership)
    assert [c.span for c in builder.loaded] == [Span(0, 0), Span(1, 1)]
    assert (compute.span, batches, membership.asked) == (Span(1, 1), None, 2)
    assert [event.name for event in builder.events] == ["confirm", "placement", "confirm"]
    taken, moved, stands = [event.note for event in builder.events]
    assert (taken, stands) == ("others took it meanwhile", "the span stands")
    assert moved.startswith("stages 1: others chose it first; ")


def test_the_last_span_loaded_is_served_whatever_others_do() -> None:
    membership = Membership(*[Span(1, 1), Span(0, 0)] * 5)
    builder, compute, _ = load(membership)
    assert (len(builder.loaded), membership.asked) == (MOST_LOADS, MOST_LOADS - 1)
    assert compute.span == Span(0, 0)


def test_a_pinned_span_is_never_asked_about() -> None:
    membership = Membership(Span(1, 1))
    _, compute, _ = load(membership, pinned=Span(0, 1))
    assert (compute.span, membership.asked) == (Span(0, 1), 0)


def test_a_failed_question_keeps_nothing_loaded() -> None:
    class Broken(Membership):
        async def confirm(self) -> Placement | None:
            raise ConnectionError

    async def work() -> None:
        async with AsyncExitStack() as closing:
            builder = Loading(closing)
            with pytest.raises(ConnectionError):
                await builder._load(SimpleNamespace(manifest=preset("tiny")), Broken(), Span(0, 0))
            assert [compute.closed for compute in builder.loaded] == [True]

    asyncio.run(work())


def test_long_links_get_four_times_the_usual_seats_as_far_as_memory_goes() -> None:
    manifest = preset("tiny", model={"layers": 8}, stages={"count": 8})
    usual = usual_in_flight(manifest)
    assert seats(manifest, 64 * 2**30) == 4 * usual
    assert seats(manifest, 0) == usual, "no fewer than ever"
    large = preset("tiny", model={"width": 4096, "subspace": 4096, "context": 2048})
    shape = large.boundary_shape()
    held = seats(large, 2**50) * 4 * shape[0] * shape[1] * shape[2]
    assert seats(large, 2**50) == usual_in_flight(large) or held <= MOST_SEATS_BYTES
