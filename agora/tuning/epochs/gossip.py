"""Epoch gossip: tells other origins which microbatches of the epochs in progress are claimed, opened and done."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

from agora_protocol.errors import AgoraError, DataError, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedEpochs, GossipEpochs, Message

from agora.core.calls import PeerCaller
from agora.core.clock import loop_time
from agora.observe import events
from agora.swarm.peer_score import ReportViolation, Violation
from agora.tuning.epochs.assigner import EpochAssigner

INTERVAL_S: Final = 0.25  # seconds between two ticks
# Seconds after which an origin sends its state again although it has not changed, above all for newcomers.
HEARTBEAT_INTERVAL_S: Final = 2.0
TARGETS: Final = 4  # maximum number of other origins to which the state is sent at one interval
CALL_TIMEOUT_S: Final = 3.0  # seconds after which a call that was not answered has failed
REPORT_INTERVAL_S: Final = 60.0  # minimum seconds between two reports that one and the same origin trains on other rows


class EpochGossip:
    """Exchanges this origin's epoch state with other origins: `run` sends the state, `answer` serves their requests.

    The state is sent to up to TARGETS random origins, when it has changed or every HEARTBEAT_INTERVAL_S. The states of
    other origins, received in requests and in answers, are merged into this origin's.
    """

    def __init__(
        self,
        assigner: EpochAssigner,
        peer_caller: PeerCaller,
        others: Callable[[], Collection[PeerId]],
        *,
        report: events.Report,
        report_violation: ReportViolation,
        on_exchange: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        """others: returns the other live origins. on_exchange: called at every tick, and for each received state."""
        self._assigner = assigner
        self._peer_caller = peer_caller
        self._others = others
        self._report = report
        self._report_violation = report_violation
        self._on_exchange = on_exchange
        self._rng = rng or random.Random()
        self._calls: dict[PeerId, asyncio.Task[None]] = {}
        self._sent_at = -HEARTBEAT_INTERVAL_S
        self._reported_at: dict[PeerId, float] = {}

    async def run(self) -> None:
        """Calls `tick` now and every INTERVAL_S until cancelled; then cancels the open calls and waits for them."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in self._calls.values():
                task.cancel()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def tick(self) -> None:
        """To up to TARGETS random origins without an open call, if it has changed or after HEARTBEAT_INTERVAL_S."""
        now = loop_time()
        last_state = self._assigner.last_state
        state = self._assigner.next_state()
        if state != last_state or now - self._sent_at >= HEARTBEAT_INTERVAL_S:
            free = sorted(set(self._others()) - self._calls.keys())
            for peer in self._rng.sample(free, min(TARGETS, len(free))):
                call = self._send_state(peer, GossipEpochs(state))
                self._calls[peer] = asyncio.create_task(call, name=f"epochs {peer}")
            self._sent_at = now
        self._on_exchange()

    def answer(self, peer: PeerId, message: GossipEpochs) -> GossipedEpochs:
        """Merges the state of the origin `peer`; returns this origin's. Raises ProtocolError for a malformed one."""
        self._merge(peer, message.state)
        return GossipedEpochs(self._assigner.last_state or self._assigner.next_state())

    async def _send_state(self, peer: PeerId, request: GossipEpochs) -> None:
        try:
            reply = await self._peer_caller.call(peer, request, (), deadline=loop_time() + CALL_TIMEOUT_S)
            self._merge_answer(peer, reply.message)
        except AgoraError:
            pass  # an origin that cannot be reached now gets the state at a later interval, or is not live
        finally:
            del self._calls[peer]

    def _merge_answer(self, peer: PeerId, answer: Message) -> None:
        try:
            if not isinstance(answer, GossipedEpochs):
                raise ProtocolError("bad-message", f"Answered gossip with {type(answer).__name__}.")
            self._merge(peer, answer.state)
        except ProtocolError as error:
            self._report_violation(peer, Violation.BAD_ANSWER, f"{error.code}: {error}")

    def _merge(self, peer: PeerId, state: Sequence[int]) -> None:
        try:
            self._assigner.merge(peer, state)
        except DataError as error:
            if loop_time() - self._reported_at.get(peer, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S:
                self._reported_at[peer] = loop_time()
                self._report(events.TaskFailed("epochs", str(error)))
        self._on_exchange()
