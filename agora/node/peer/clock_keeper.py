"""Corrects the peer's clock by those of its neighbours, at the start and repeatedly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId
from agora_protocol.messages import Ping

from agora.core.clock import loop_time
from agora.net.rpc.network import MAX_CLOCKS, Network
from agora.node.daemon_context import DaemonContext
from agora.observe import events, faults
from agora.swarm.swarm_clock import clock_remark

ANSWER_TIMEOUT_S: Final = 4.0  # seconds within which peers must answer with the time, dialling included
MORE_ANSWERS_TIMEOUT_S: Final = 0.5  # seconds that a start waits for further answers once it has one
# Seconds from the start of `run` until the peers that are connected then are asked for the first time.
FIRST_INTERVAL_S: Final = 5.0
INTERVAL_S: Final = 20.0  # seconds between two such questions after the first


class ClockKeeper:
    """Asks other peers for the time, corrects the daemon's SwarmClock, and warns the owner if the clock is wrong."""

    def __init__(self, context: DaemonContext, network: Network) -> None:
        self._context = context
        self._network = network

    async def ask_at_start(self, known: Mapping[PeerId, Sequence[str]]) -> None:
        """Asks peers for the time and corrects the clock, so that even the first records are judged by the right time.

        known: multiaddrs by peer. Dials the first MAX_CLOCKS of these peers; takes 2 * ANSWER_TIMEOUT_S at most, as the
        phase "clock" of the start. Without an answer the clock is settled uncorrected. Raises LocalError if the clock
        is too wrong to be corrected.
        """
        with self._context.phases.enter("clock") as note:
            peers = list(known)[:MAX_CLOCKS]
            for peer in peers:
                self._network.address_book.learn(peer, known[peer])
            await self._await_answers(peers)
            boot_unix = await self._network.ask_clocks(ANSWER_TIMEOUT_S)
            self._correct_clock(boot_unix)
            correction_s = self._context.clock.correction.seconds
            note.text = f"{len(boot_unix)} peers told the time, corrected by {correction_s:.2f} s"
        if self._context.clock.correction.refused_s is not None:
            # No record of this peer counts with the others, and none of theirs here: it would train a run of its own.
            remark = clock_remark(self._context.clock.correction)
            raise LocalError(f"{remark[0].upper()}{remark[1:]}, then start again. No other peer would see this one.")

    async def run(self) -> None:
        """After FIRST_INTERVAL_S, then every INTERVAL_S, asks connected peers for the time and corrects the clock.

        Runs until it is cancelled.
        """
        for wait_s in itertools.chain([FIRST_INTERVAL_S], itertools.repeat(INTERVAL_S)):
            await asyncio.sleep(wait_s)
            await faults.inject_fault("clock.asked")
            self._correct_clock(await self._network.ask_clocks(ANSWER_TIMEOUT_S))

    async def _await_answers(self, peers: Sequence[PeerId]) -> None:
        deadline = loop_time() + ANSWER_TIMEOUT_S
        calls = {asyncio.create_task(self._network.call(peer, Ping(), deadline=deadline)) for peer in peers}
        running = calls
        timeout_s = ANSWER_TIMEOUT_S
        try:
            while running:
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if any(call.exception() is None for call in done):
                    timeout_s = MORE_ANSWERS_TIMEOUT_S
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _correct_clock(self, boot_unix: Sequence[float]) -> None:
        clock = self._context.clock
        former = clock_remark(clock.correction)
        clock.follow(boot_unix)
        remark = clock_remark(clock.correction)
        if remark and remark != former:
            self._context.report_event(events.OwnerTold(remark))
