"""Step gossip: exchanges with the other replicas of each stage how many steps and tokens every replica has.

Knows: GossipSteps and GossipedSteps, when to send them and to whom, what was heard. Must not know: how a step is taken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from agora_protocol.errors import AgoraError, NotMyStage
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import GossipedSteps, GossipSteps

from agora.averaging import replica_progress
from agora.averaging.plausible_steps import FORGIVE_S
from agora.averaging.replica_progress import GossipEntry, KnownReplicas, ReplicaCounts
from agora.calls import BROKEN, Caller
from agora.clock import loop_time
from agora.observe import faults

INTERVAL_S: Final = 0.25
SYNCHRONOUS_INTERVAL_S: Final = 0.02
"""Seconds between two ticks in synchronous runs, where every replica waits for the step."""
HEARTBEAT_S: Final = 1.5
"""Seconds after which a replica reports again although nothing has changed, so that it does not count as silent."""
CALL_S: Final = 3.0


@dataclass(slots=True)
class _StageGossip:
    """What is known of one stage's replicas; the counts that this peer has last sent them, and when.

    implausible: by replica, when it last reported a step that is not believed.
    """

    known: KnownReplicas = field(default_factory=dict)
    sent: ReplicaCounts | None = None
    sent_at: float = -1e9
    implausible: dict[PeerId, float] = field(default_factory=dict)


class GossipListing(Protocol):
    """Protocol: which replicas this peer sees.

    replicas_in_view: returns the ids of a stage's replicas in its view, with or without this peer.
    is_connected: whether this peer has any connection; without one, failed calls are no evidence that others are down.
    """

    def replicas_in_view(self, stage: int) -> Collection[PeerId]: ...
    def is_connected(self) -> bool: ...


class PlausibleSteps(Protocol):
    """Protocol: says which steps of other replicas are believed; implemented by step_bounds.StepBounds.

    is_plausible: returns whether another replica of a stage can have taken `step` steps by now.
    """

    def is_plausible(self, stage: int, step: int) -> bool: ...
    def report(self, stage: int, peer: PeerId, step: int) -> None:
        """Reports that `peer` claims a step of a stage that is not plausible."""


class AllStepsPlausible:
    """PlausibleSteps that believes every step; used until `StepGossip.bounds` is set."""

    def is_plausible(self, stage: int, step: int) -> bool:
        """Returns True."""
        return True

    def report(self, stage: int, peer: PeerId, step: int) -> None:
        """Does nothing: no step is implausible."""


class StepGossip:
    """Exchanges progress with the other replicas of each stage of the span; `known_progress` returns what it has heard.

    `run` sends news and heartbeats until cancelled; `answer` serves the others' calls. When a call to a replica fails,
    that replica is suspected, see replica_progress. bounds: says which steps of others are believed, by default all.
    """

    def __init__(
        self,
        me: PeerId,
        span: Span,
        caller: Caller,
        listing: GossipListing,
        counts: Callable[[], Mapping[int, ReplicaCounts]],
        on_change: Callable[[int], None],
        *,
        interval_s: float = INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        """counts: returns for each stage how far this peer is; never blocks.
        on_change: is called with a stage, on the loop, at every tick and whenever something was heard.
        """
        self._me = me
        self._span = span
        self._caller = caller
        self._listing = listing
        self._counts = counts
        self._on_change = on_change
        self.bounds: PlausibleSteps = AllStepsPlausible()
        self._interval_s = interval_s
        self._rng = rng or random.Random()
        self._stages = {stage: _StageGossip() for stage in span.stages}
        self._calls: dict[tuple[int, PeerId], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Calls `tick` every `interval_s` seconds until cancelled; then cancels the open calls and waits for them."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._calls.values():
                task.cancel()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def others_in_view(self, stage: int) -> set[PeerId]:
        """Returns the other replicas of a stage that the view lists, without those whose steps are not believed."""
        since = loop_time() - FORGIVE_S
        not_believed = {peer for peer, at in self._stages[stage].implausible.items() if at > since}
        return set(self._listing.replicas_in_view(stage)) - {self._me} - not_believed

    def known_progress(self, stage: int) -> KnownReplicas:
        """Returns the last known progress of each other replica of a stage, by id."""
        return self._stages[stage].known

    def furthest(self, stage: int) -> int:
        """Returns the most steps that another replica of a stage has reported of itself; 0 without any."""
        return max((progress.direct.step for progress in self.known_progress(stage).values()), default=0)

    def tick(self) -> None:
        """Sends each stage's progress if it has changed or a heartbeat is due, and calls `on_change` for every stage.

        Starts one task for each call, and does not wait. A suspected replica is called at every tick until it answers
        or counts as silent. A replica to which a call about the stage is still open is called at a later tick.
        """
        now, counts = loop_time(), self._counts()
        for stage, state in self._stages.items():
            state.implausible = {peer: at for peer, at in state.implausible.items() if at > now - FORGIVE_S}
            state.known = replica_progress.record_view(state.known, self.others_in_view(stage), now)
            targets = replica_progress.suspected_replicas(state.known, self.others_in_view(stage), now)
            has_news = state.sent != counts[stage] or now - state.sent_at > HEARTBEAT_S
            if has_news:
                targets.update(replica_progress.choose_targets(self.others_in_view(stage), self._me, self._rng))
            free = [peer for peer in sorted(targets) if (stage, peer) not in self._calls]
            if free:
                request = GossipSteps(stage, self._compose(stage, counts[stage]))
                for peer in free:
                    self._calls[stage, peer] = asyncio.create_task(self._gossip_with(stage, peer, request))
            if has_news and free and len(free) == len(targets):
                state.sent, state.sent_at = counts[stage], now
            self._on_change(stage)

    def answer(self, peer: PeerId, message: GossipSteps) -> GossipedSteps:
        """Merges another replica's gossip and returns this peer's. Raises NotMyStage for a stage outside the span."""
        if message.stage not in self._span:
            raise NotMyStage(f"this peer holds stages {self._span}, not {message.stage}; read the directory again")
        own = self._counts()[message.stage]
        self._merge(message.stage, message.replicas, peer)
        return GossipedSteps(self._compose(message.stage, own))

    def _compose(self, stage: int, own: ReplicaCounts) -> tuple[GossipEntry, ...]:
        """Returns the entries to send about a stage: this peer's `own` counts, then the last known ones of others."""
        own = own._replace(step=int(faults.say("gossip.step", own.step)))
        return replica_progress.compose_gossip(
            self.known_progress(stage), self._me, own, self.others_in_view(stage), loop_time()
        )

    async def _gossip_with(self, stage: int, peer: PeerId, request: GossipSteps) -> None:
        """Sends one request and merges the answer; when the call fails, records that, so that the peer is suspected."""
        state = self._stages[stage]
        try:
            reply = await self._caller.call(peer, request, (), deadline=loop_time() + CALL_S)
            if isinstance(reply.message, GossipedSteps):
                self._merge(stage, reply.message.replicas, peer)
        except AgoraError as error:
            broken = error.code == BROKEN and self._listing.is_connected()
            state.known = replica_progress.record_failure(state.known, peer, loop_time(), broken=broken)
        finally:
            del self._calls[stage, peer]

    def _merge(self, stage: int, entries: Collection[GossipEntry], sender: PeerId) -> None:
        """Merges what `sender` reported of itself and, if it is listed, of other listed replicas; calls `on_change`.

        Of steps that are not plausible nothing is believed.
        """
        state, now = self._stages[stage], loop_time()
        entries = self._select_plausible(stage, entries, sender)
        listed = self.others_in_view(stage)
        accepted = [entry for entry in entries if entry[0] == sender or {entry[0], sender} <= listed]
        known = replica_progress.merge_gossip(state.known, accepted, sender, self._me, now)
        state.known = replica_progress.record_view(known, listed, now)
        self._on_change(stage)

    def _select_plausible(self, stage: int, entries: Collection[GossipEntry], sender: PeerId) -> list[GossipEntry]:
        """Returns the entries whose steps are plausible; none if the sender's own are not, which is reported.

        For FORGIVE_S such a sender counts as no replica of the stage, and what was known of it is forgotten.
        """
        state, bounds = self._stages[stage], self.bounds
        step = max((max(entry[1], entry[2]) for entry in entries if entry[0] == sender), default=0)
        if bounds.is_plausible(stage, step):
            state.implausible.pop(sender, None)
            return [entry for entry in entries if bounds.is_plausible(stage, max(entry[1], entry[2]))]
        state.implausible[sender] = loop_time()
        state.known = {peer: progress for peer, progress in state.known.items() if peer != sender}
        bounds.report(stage, sender, step)
        return []
