"""Epoch gossip: exchanges with the other origins which rows of the epochs in progress are taken and done.

Knows: GossipEpochs and GossipedEpochs, when to send them and to whom. Must not know: what the state means, training.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from agora_protocol.errors import AgoraError, DataError, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedEpochs, GossipEpochs

from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import events
from agora.swarm.conduct import Offence, ReportOffence

INTERVAL_S: Final = 0.25
HEARTBEAT_S: Final = 2.0
"""Seconds after which an origin sends its state again although it has not changed, above all for newcomers."""
TARGETS: Final = 4
"""Maximum number of other origins to which the state is sent at one interval."""
CALL_S: Final = 3.0
REPEAT_S: Final = 60.0
"""Seconds between two reports that one and the same origin trains on other rows."""


class SharedEpochs(Protocol):
    """Protocol: what this origin knows of the epochs, as integers to send; implemented by data.EpochShares.

    last_told: what `state` last returned; () before its first call.
    """

    @property
    def last_told(self) -> tuple[int, ...]: ...
    def state(self) -> tuple[int, ...]:
        """Returns the present state as integers to send, and remembers it as last_told."""

    def merge(self, origin: str, values: Sequence[int]) -> None:
        """Merges the state `values` of another origin. Raises ProtocolError if malformed, DataError for other rows."""


class EpochGossip:
    """Sends this origin's epoch state, when it has changed, to a few others at every interval; answers theirs."""

    def __init__(
        self,
        shares: SharedEpochs,
        caller: Caller,
        others: Callable[[], Collection[PeerId]],
        *,
        report: events.Report,
        report_offence: ReportOffence,
        on_news: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        """others: returns the other live origins. on_news: is called at every interval and for each received state."""
        self._shares = shares
        self._caller = caller
        self._others = others
        self._report = report
        self._report_offence = report_offence
        self._on_news = on_news
        self._rng = rng or random.Random()
        self._calls: dict[PeerId, asyncio.Task[None]] = {}
        self._told_at = -HEARTBEAT_S
        self._reported_at: dict[PeerId, float] = {}

    async def run(self) -> None:
        """Calls `tick` every INTERVAL_S until cancelled; then cancels the open calls and waits for them."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in self._calls.values():
                task.cancel()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def tick(self) -> None:
        """Sends the state to up to TARGETS random origins if it has changed or a heartbeat is due; calls `on_news`.

        Starts one task for each call, and does not wait. Origins to which a call is still open are left out.
        """
        last_state, now = self._shares.last_told, loop_time()
        state = self._shares.state()
        if state != last_state or now - self._told_at >= HEARTBEAT_S:
            free = sorted(set(self._others()) - self._calls.keys())
            for peer in self._rng.sample(free, min(TARGETS, len(free))):
                self._calls[peer] = asyncio.create_task(self._tell(peer, GossipEpochs(state)), name=f"epochs {peer}")
            self._told_at = now
        self._on_news()

    def answer(self, peer: PeerId, message: GossipEpochs) -> GossipedEpochs:
        """Merges another origin's state and returns this one's. Raises ProtocolError for a malformed state."""
        self._merge(peer, message.state)
        return GossipedEpochs(self._shares.last_told or self._shares.state())

    async def _tell(self, peer: PeerId, request: GossipEpochs) -> None:
        """Sends one request and merges the state in its answer. Reports a malformed answer as an offence of `peer`.

        Ignores a peer that does not answer.
        """
        try:
            reply = await self._caller.call(peer, request, (), deadline=loop_time() + CALL_S)
            if not isinstance(reply.message, GossipedEpochs):
                raise ProtocolError("bad-message", f"answered gossip with {type(reply.message).__name__}")
            self._merge(peer, reply.message.state)
        except ProtocolError as error:
            self._report_offence(peer, Offence.BAD_ANSWER, f"{error.code}: {error}")
        except AgoraError:
            pass  # an origin that cannot be reached now gets the state at a later interval, or is not live
        finally:
            del self._calls[peer]

    def _merge(self, peer: PeerId, state: Sequence[int]) -> None:
        """Merges the state of `peer` and calls `on_news`. Raises ProtocolError for a malformed state.

        A state of other rows is not used; TaskFailed reports that, at most every REPEAT_S for each peer.
        """
        try:
            self._shares.merge(peer, state)
        except DataError as error:
            if loop_time() - self._reported_at.get(peer, -REPEAT_S) >= REPEAT_S:
                self._reported_at[peer] = loop_time()
                self._report(events.TaskFailed("epochs", str(error)))
        self._on_news()
