"""A machine that would add nothing waits, says so, and takes a span as soon as one needs it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.errors import OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.node.settings import Settings
from agora.node.span.load_span import RunFull, _claim_or_stand_by
from agora.swarm.placement import Placement
from agora.swarm.rebalancing import MAX_JUDGE_INTERVAL_S, MIN_JUDGE_INTERVAL_S
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from tests.virtual_time import run

WAIT = Placement(None, "it would do 1.0% of what others do, and no stage has fewer than two peers")


class Joiner:
    """A LocalPeer whose placements are given; remembers when each was asked for, and what it said meanwhile."""

    def __init__(self, *placements: Placement, longest: tuple[int, ...] = (1, 1)) -> None:
        self.placements = list(placements)
        self.asked: list[tuple[float, Span | None]] = []
        self.said: list[str] = []
        self.manifest = preset("tiny")
        self.capacity_probe = SimpleNamespace(
            base_bytes=0, needs=equal_needs(2), machine=MachineCapacity(1.0, 0.0, longest), dtype=None
        )
        self.membership = SimpleNamespace(claim_span=self._claim_span)
        self.context = SimpleNamespace(
            settings=Settings(memory_gib=0.001), phases=SimpleNamespace(report_progress=self.said.append)
        )

    async def _claim_span(self, needs: Any, machine: Any, wanted: Span | None) -> Placement:
        self.asked.append((asyncio.get_running_loop().time(), wanted))
        return self.placements.pop(0)


def claimed(joiner: Joiner, wanted: Span | None = None) -> tuple[Span, str]:
    return run(_claim_or_stand_by(joiner, wanted))


def test_a_machine_that_adds_nothing_looks_again_and_again_and_says_why() -> None:
    joiner = Joiner(WAIT, WAIT, Placement(Span(1, 1), "stage 1 is the thinnest, held by 1 peer"))
    assert claimed(joiner) == (Span(1, 1), "stage 1 is the thinnest, held by 1 peer")
    assert joiner.said == [f"standing by: {WAIT.reason}"] * 2
    times = [time for time, _ in joiner.asked]
    waits = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert len(waits) == 2 and all(MIN_JUDGE_INTERVAL_S <= wait <= MAX_JUDGE_INTERVAL_S for wait in waits)


def test_a_machine_that_adds_nothing_does_not_wait_where_other_runs_are_queued() -> None:
    joiner = Joiner(WAIT)
    joiner.context.settings = Settings(queue=("proofs",))
    with pytest.raises(RunFull, match=r"does not need this machine now: it would do 1\.0%"):
        claimed(joiner)


def test_a_span_that_the_owner_chose_is_claimed_at_once() -> None:
    joiner = Joiner(Placement(Span(0, 1), "as asked for"), longest=(0, 0))
    assert claimed(joiner, Span(0, 1))[0] == Span(0, 1)
    assert [wanted for _, wanted in joiner.asked] == [Span(0, 1)] and not joiner.said


def test_a_machine_that_fits_no_stage_does_not_wait_for_ever() -> None:
    joiner = Joiner(longest=(0, 0))
    with pytest.raises(OutOfMemory, match="stage"):
        claimed(joiner)
    assert not joiner.asked
