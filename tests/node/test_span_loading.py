"""Claims about what a daemon loads: the span that stands when it is loaded, and nothing of those it gave up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.cost.manifest_cost import default_in_flight
from agora.node.peer.local_peer import MAX_SLOTS_BYTES, compute_slots
from agora.node.span.load_span import MAX_LOADS, load_until_confirmed


class Loads:
    """Loads spans one at a time, and says when asked that others took the span: as often as it has another."""

    def __init__(self, *others: Span) -> None:
        self.others = list(others)
        self.asked = 0
        self.loaded: list[Span] = []
        self.held: set[Span] = set()

    @asynccontextmanager
    async def load(self, span: Span) -> AsyncIterator[Span]:
        assert not self.held, "two spans are never held at once"
        self.loaded.append(span)
        self.held.add(span)
        yield span
        self.held.remove(span)

    async def confirm(self) -> Span | None:
        self.asked += 1
        return self.others.pop(0) if self.others else None


def load(loads: Loads, most: int = MAX_LOADS) -> Span:
    """The span that stays loaded, until the block ends in which it was asked for."""

    async def work() -> Span:
        async with load_until_confirmed(Span(0, 0), loads.load, loads.confirm, most) as span:
            assert loads.held == {span}
        assert not loads.held
        return span

    return asyncio.run(work())


def test_a_span_that_stands_is_loaded_once() -> None:
    loads = Loads()
    assert load(loads) == Span(0, 0)
    assert (loads.loaded, loads.asked) == ([Span(0, 0)], 1)


def test_a_span_taken_while_it_loaded_is_given_up_for_the_other() -> None:
    loads = Loads(Span(1, 1))
    assert load(loads) == Span(1, 1)
    assert (loads.loaded, loads.asked) == ([Span(0, 0), Span(1, 1)], 2)


def test_the_last_span_loaded_is_served_whatever_others_do() -> None:
    loads = Loads(*[Span(1, 1), Span(0, 0)] * 5)
    assert load(loads) == Span(0, 0)
    assert (len(loads.loaded), loads.asked) == (MAX_LOADS, MAX_LOADS - 1)


def test_a_span_that_the_owner_chose_is_never_asked_about() -> None:
    loads = Loads(Span(1, 1))
    assert (load(loads, most=1), loads.asked) == (Span(0, 0), 0)


def test_a_failed_question_keeps_nothing_loaded() -> None:
    class Broken(Loads):
        async def confirm(self) -> Span | None:
            raise ConnectionError

        @asynccontextmanager
        async def load(self, span: Span) -> AsyncIterator[Span]:
            self.held.add(span)
            try:
                yield span
            finally:
                self.held.remove(span)

    async def work() -> None:
        loads = Broken()
        with pytest.raises(ConnectionError):
            async with load_until_confirmed(Span(0, 0), loads.load, loads.confirm, MAX_LOADS):
                raise AssertionError("nothing is yielded")
        assert not loads.held

    asyncio.run(work())


def test_long_links_get_four_times_the_usual_slots_as_far_as_memory_goes() -> None:
    manifest = preset("tiny", model={"layers": 8}, stages={"count": 8})
    usual = default_in_flight(manifest)
    assert compute_slots(manifest, 64 * 2**30) == 4 * usual
    assert compute_slots(manifest, 0) == usual, "no fewer than ever"
    large = preset("tiny", model={"width": 4096, "subspace": 4096, "context": 2048})
    shape = large.boundary_shape()
    held = compute_slots(large, 2**50) * 4 * shape[0] * shape[1] * shape[2]
    assert compute_slots(large, 2**50) == default_in_flight(large) or held <= MAX_SLOTS_BYTES


def test_asking_what_memory_a_span_needs_takes_no_time_of_the_event_loop() -> None:
    """In a fresh process: drawing a normal tensor on the meta device would import torch's compiler, for seconds."""
    code = (
        "import sys; from agora.node.limits.memory import MemoryBudget, check_memory; "
        "from agora_protocol.ids import Span; from agora_protocol.manifest import preset; "
        "check_memory(preset('tiny'), Span(0, 0), MemoryBudget(2**40)); "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
