"""Claims about how a start asks other peers for the time: whom it waits for, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId
from agora_protocol.messages import Message, Pong

from agora.core.calls import ConnectionBroken, Reply
from agora.core.clock import loop_time
from agora.net.rpc.dialling import AddressBook
from agora.node.daemon_context import StartPhases, SystemdNotifier
from agora.node.peer.clock_keeper import ANSWER_TIMEOUT_S, MORE_ANSWERS_TIMEOUT_S, ClockKeeper
from agora.swarm.swarm_clock import SwarmClock
from tests import virtual_time

QUICK, SILENT, GONE = PeerId("quick"), PeerId("silent"), PeerId("gone")


class AskedNetwork:
    """Peers of which QUICK answers, SILENT never does and GONE fails; counts the calls that are open."""

    def __init__(self) -> None:
        self.open_calls = 0
        self.address_book = AddressBook()
        self.boot_unix: list[float] = []

    async def call(self, peer: PeerId, request: Message, *, deadline: float) -> Reply:
        self.open_calls += 1
        try:
            if peer == SILENT:
                await asyncio.Event().wait()
            if peer == GONE:
                raise ConnectionBroken("gone")
            return Reply(Pong())
        finally:
            self.open_calls -= 1

    async def ask_clocks(self, within_s: float) -> list[float]:
        return self.boot_unix


@pytest.mark.parametrize("off_s", [-3 * 86400.0, -3600.0, 3600.0, 3 * 86400.0])
def test_a_machine_whose_clock_is_days_off_is_told_at_its_start_and_trains_no_run_of_its_own(off_s: float) -> None:
    async def main() -> None:
        made, network = keeper()
        network.boot_unix = [-off_s, -off_s + 0.1, -off_s]
        if abs(off_s) <= 86400:
            await made.ask_at_start({QUICK: ()})
            return
        sense = "ahead of" if off_s > 0 else "behind"
        match = f"clock is 259200 s {sense} the swarm's.*set-ntp true`, then start again. No other peer would see this"
        with pytest.raises(LocalError, match=match):
            await made.ask_at_start({QUICK: ()})

    virtual_time.run(main())


def keeper() -> tuple[ClockKeeper, AskedNetwork]:
    network = AskedNetwork()
    phases = StartPhases(lambda _event: None, SystemdNotifier({}))
    context = SimpleNamespace(phases=phases, clock=SwarmClock(0.0, lambda: 0.0), report_event=lambda _event: None)
    return ClockKeeper(cast(Any, context), cast(Any, network)), network


@pytest.mark.parametrize(
    ("peers", "seconds"),
    [((QUICK, SILENT, GONE), MORE_ANSWERS_TIMEOUT_S), ((SILENT, GONE), ANSWER_TIMEOUT_S), ((QUICK, GONE), 0.0)],
)
def test_a_start_waits_shortly_for_the_late_ones_and_ends_their_calls(peers: Sequence[PeerId], seconds: float) -> None:
    async def main() -> None:
        made, network = keeper()
        began = loop_time()
        await made.ask_at_start(dict.fromkeys(peers, ()))
        assert loop_time() - began == pytest.approx(seconds)
        assert network.open_calls == 0

    virtual_time.run(main())


def test_a_start_that_is_cancelled_leaves_no_call_behind() -> None:
    async def main() -> None:
        made, network = keeper()
        start = asyncio.create_task(made.ask_at_start({SILENT: ()}))
        await asyncio.sleep(0.1)
        assert network.open_calls == 1
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert network.open_calls == 0

    virtual_time.run(main())
