"""Step gossip: tells the other replicas of a stage how far this one is, and keeps what they tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedSteps, GossipEntry, GossipSteps

from agora.core.calls import ConnectionBroken, PeerCaller
from agora.core.clock import loop_time
from agora.observe import faults
from agora.replica.stage_view import (
    KnownReplicas,
    Membership,
    ReplicaCounts,
    choose_targets,
    compose_gossip,
    live_replicas,
    merge_gossip,
    record_failure,
    record_view,
    suspected_replicas,
)
from agora.replica.trust import ABSENCE_S

# Most seconds between two ticks of StepGossip in asynchronous runs; a closed share and a step tick at once.
INTERVAL_S: Final = 0.25
# The same in synchronous runs, where every replica waits for the step.
SYNCHRONOUS_INTERVAL_S: Final = 0.02
# Seconds after which a replica reports again although nothing has changed, so that it does not count as silent.
HEARTBEAT_INTERVAL_S: Final = 1.5
CALL_TIMEOUT_S: Final = 3.0  # seconds after which a call that was not answered has failed


@dataclass(frozen=True, slots=True)
class SwarmQueries:
    """What this peer sees of the run, as questions that are answered immediately.

    replicas_in_view: a stage's serving replicas, this peer included if it serves.
    bandwidths: of these, in bytes per second, by which reducers are chosen, see reducing_bandwidths; 0: unknown.
    has_connections: whether this peer has a connection to any other peer of the run now; without one, failed calls do
    not show that others are down.
    uplink_bytes_per_s: of this peer, measured while data waits for it; None otherwise.
    steps_of_run: for each stage of the run, the steps that each of its replicas has taken.
    networks: of a stage's serving replicas, the public networks that they are seen in, this peer's own included.
    stops_at: the number of steps that this peer's stages take at most; 0: no end, because this peer's owner, or another
    one, has chosen to go on after the run's end.
    """

    replicas_in_view: Callable[[int], Collection[PeerId]]
    bandwidths: Callable[[int], Mapping[PeerId, float]]
    has_connections: Callable[[], bool]
    uplink_bytes_per_s: Callable[[], float | None]
    steps_of_run: Callable[[], Collection[Collection[int]]]
    networks: Callable[[int], Mapping[PeerId, str]] = lambda stage: {}
    stops_at: Callable[[], int] = lambda: 0


class StepGossip:
    """Exchanges progress (steps and tokens) with the other replicas of one stage.

    `run` sends changes and heartbeats until cancelled; `answer` serves the calls of other replicas; `known_progress`
    returns what was received. When a call to a replica fails, that replica is suspected.
    """

    def __init__(
        self,
        me: PeerId,
        stage: int,
        peer_caller: PeerCaller,
        swarm: SwarmQueries,
        *,
        counts: Callable[[], ReplicaCounts],
        on_change: Callable[[], None],
        highest_plausible: Callable[[], float],
        report_implausible: Callable[[PeerId, int], None],
        interval_s: float = INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        """counts: returns how far this peer is; never blocks.
        on_change: called on the loop every `interval_s` and after every merge.
        highest_plausible: returns the highest step that another replica can have taken by now.
        report_implausible: called with peer and step of each report that a peer makes of itself beyond that.
        """
        self._me = me
        self._stage = stage
        self._peer_caller = peer_caller
        self._swarm = swarm
        self._counts = counts
        self._on_change = on_change
        self._highest_plausible = highest_plausible
        self._report_implausible = report_implausible
        self._interval_s = interval_s
        self._rng = rng or random.Random()
        self._known: KnownReplicas = {}
        self._sent: ReplicaCounts | None = None  # what was last sent to all
        self._sent_at = -1e9
        self._implausible: dict[PeerId, float] = {}  # by replica, when it last reported an implausible step
        self._calls: dict[PeerId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Ticks, and calls `on_change`, every `interval_s` seconds until cancelled; then cancels the open calls."""
        try:
            while True:
                self.tick()
                self._on_change()
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._calls.values():
                task.cancel()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def others_in_view(self) -> set[PeerId]:
        """Returns the ids of the stage's other replicas in this peer's view of the run.

        Leaves a replica out for ABSENCE_S after an implausible report, or until its next plausible one.
        """
        since = loop_time() - ABSENCE_S
        implausible_peers = {peer for peer, at in self._implausible.items() if at > since}
        return set(self._swarm.replicas_in_view(self._stage)) - {self._me} - implausible_peers

    def known_progress(self) -> KnownReplicas:
        """Returns the last known progress of the stage's other replicas, by id; silent ones may be among them.

        A replica that no gossip has reported is among them only if a call to it failed; its counts are 0 then.
        """
        return self._known

    def membership(self) -> Membership:
        """Returns which of the stage's other replicas take part in its step now."""
        return Membership.of(self.known_progress(), self.others_in_view(), loop_time())

    def live_progress(self) -> KnownReplicas:
        """Returns the last known progress of those other replicas in the view that are live now."""
        return live_replicas(self._known, self.others_in_view(), loop_time())

    def furthest_step(self) -> int:
        """Returns the most steps that another replica has reported of itself.

        Returns 0 if no other is known, -1 if none of the known ones has reported itself.
        """
        return max((progress.direct.step for progress in self._known.values()), default=0)

    def tick(self) -> None:
        """Sends this peer's progress, if it has changed or a heartbeat is due.

        Sends to all the stage's replicas in the view, or to GOSSIP_FANOUT random ones of many, and to suspected
        replicas at every tick, until they answer or count as silent. Starts one task for each call, and does not wait.
        Leaves a replica out while a call to it is open; the progress then counts as not sent, and is sent again at the
        next tick. Forgets replicas that are neither live nor in the view, and implausible reports older than ABSENCE_S.
        """
        now, own = loop_time(), self._counts()
        self._implausible = {peer: at for peer, at in self._implausible.items() if at > now - ABSENCE_S}
        listed = self.others_in_view()
        self._known = record_view(self._known, listed, now)
        targets = suspected_replicas(self._known, listed, now)
        has_news = self._sent != own or now - self._sent_at > HEARTBEAT_INTERVAL_S
        if has_news:
            targets.update(choose_targets(listed, self._me, self._rng))
        free = [peer for peer in sorted(targets) if peer not in self._calls]
        if free:
            request = GossipSteps(self._stage, self._compose(own))
            for peer in free:
                self._calls[peer] = asyncio.create_task(self._gossip_with(peer, request))
        if has_news and free and len(free) == len(targets):
            self._sent, self._sent_at = own, now

    def answer(self, peer: PeerId, message: GossipSteps) -> GossipedSteps:
        """Merges the gossip of `peer`, calls `on_change`, and returns what this peer knows of the stage.

        Implausible steps of `peer` itself raise nothing: they are reported.
        """
        own = self._counts()
        self._merge(message.replicas, peer)
        return GossipedSteps(self._compose(own))

    def _compose(self, own: ReplicaCounts) -> tuple[GossipEntry, ...]:
        own = own._replace(step=int(faults.falsify("gossip.step", own.step)))
        return compose_gossip(self._known, self._me, own, self.others_in_view(), loop_time())

    async def _gossip_with(self, peer: PeerId, request: GossipSteps) -> None:
        try:
            reply = await self._peer_caller.call(peer, request, (), deadline=loop_time() + CALL_TIMEOUT_S)
            if isinstance(reply.message, GossipedSteps):
                self._merge(reply.message.replicas, peer)
        except AgoraError as error:
            # Without any connection this peer's own network may be down: the failure shows nothing about the other.
            broken = error.code == ConnectionBroken.code and self._swarm.has_connections()
            self._known = record_failure(self._known, peer, loop_time(), broken=broken)
        finally:
            del self._calls[peer]

    def _merge(self, entries: Collection[GossipEntry], sender: PeerId) -> None:
        now = loop_time()
        entries = self._select_plausible(entries, sender)
        listed = self.others_in_view()
        accepted = [entry for entry in entries if entry[0] == sender or {entry[0], sender} <= listed]
        known = merge_gossip(self._known, accepted, sender, self._me, now)
        self._known = record_view(known, listed, now)
        self._on_change()

    def _select_plausible(self, entries: Collection[GossipEntry], sender: PeerId) -> list[GossipEntry]:
        highest = self._highest_plausible()
        step = max((max(step, open_step) for peer, step, open_step, *_ in entries if peer == sender), default=0)
        if step <= highest:
            self._implausible.pop(sender, None)
            return [entry for entry in entries if max(entry[1:3]) <= highest]
        self._implausible[sender] = loop_time()
        self._known = {peer: progress for peer, progress in self._known.items() if peer != sender}
        self._report_implausible(sender, step)
        return []
