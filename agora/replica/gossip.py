"""Step gossip: who is told what of how many steps and tokens every replica of a stage has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import AgoraError, NotMyStage
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import GossipedSteps, GossipEntry, GossipSteps

from agora.core.calls import Caller, ConnectionBroken
from agora.core.clock import loop_time
from agora.observe import faults
from agora.replica.trust import FORGIVE_S
from agora.replica.view import (
    KnownReplicas,
    ReplicaCounts,
    choose_targets,
    compose_gossip,
    merge_gossip,
    record_failure,
    record_view,
    suspected_replicas,
)

INTERVAL_S: Final = 0.25  # seconds between two calls of StepGossip.tick in asynchronous runs
# Seconds between two calls of StepGossip.tick in synchronous runs, where every replica waits for the step.
SYNCHRONOUS_INTERVAL_S: Final = 0.02
# Seconds after which a replica reports again although nothing has changed, so that it does not count as silent.
HEARTBEAT_S: Final = 1.5
CALL_S: Final = 3.0  # seconds after which a call that was not answered has failed


@dataclass(frozen=True, slots=True)
class SwarmView:
    """What this peer sees of the run, as questions that are answered immediately.

    replicas_in_view: a stage's serving replicas, this peer included if it serves, with the bandwidths in bytes per
    second by which reducers are chosen, see reducing_bandwidths.
    has_connections: whether this peer has a connection to any other peer of the run now; without one, failed calls do
    not show that others are down.
    uplink_bytes_per_s: of this peer, measured while data waits for it; None otherwise.
    steps_of_run: for each stage of the run, the steps that each of its replicas has taken.
    """

    replicas_in_view: Callable[[int], Mapping[PeerId, float]]
    has_connections: Callable[[], bool]
    uplink_bytes_per_s: Callable[[], float | None]
    steps_of_run: Callable[[], Collection[Collection[int]]]


# What gossip keeps for one stage of the span. known: the last known progress of the stage's other replicas. sent,
# sent_at: the counts that this peer last sent to them, and when. implausible: by replica, when it last reported an
# implausible step. Times are loop times.
@dataclass(slots=True)
class _StageGossip:
    known: KnownReplicas = field(default_factory=dict)
    sent: ReplicaCounts | None = None
    sent_at: float = -1e9
    implausible: dict[PeerId, float] = field(default_factory=dict)


class StepGossip:
    """Exchanges progress (steps and tokens) with the other replicas of each stage of the span.

    `run` sends changes and heartbeats until cancelled; `answer` serves the calls of other replicas; `known_progress`
    returns what was received. When a call to a replica fails, that replica is suspected.
    """

    def __init__(
        self,
        me: PeerId,
        span: Span,
        caller: Caller,
        swarm: SwarmView,
        counts: Callable[[], Mapping[int, ReplicaCounts]],
        on_change: Callable[[int], None],
        *,
        highest_plausible: Callable[[int], float],
        report_implausible: Callable[[int, PeerId, int], None],
        interval_s: float = INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        """counts: returns for each stage how far this peer is; never blocks.
        on_change: called on the loop with the stage, at every tick and after every merge.
        highest_plausible: returns the highest step that another replica of a stage can have taken by now.
        report_implausible: called with stage, peer and step of each report that a peer makes of itself beyond that.
        """
        self._me = me
        self._span = span
        self._caller = caller
        self._swarm = swarm
        self._counts = counts
        self._on_change = on_change
        self._highest_plausible = highest_plausible
        self._report_implausible = report_implausible
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
        """Returns the ids of a stage's other replicas in this peer's view of the run.

        Leaves a replica out for FORGIVE_S after it reported an implausible step.
        """
        since = loop_time() - FORGIVE_S
        implausible_peers = {peer for peer, at in self._stages[stage].implausible.items() if at > since}
        return set(self._swarm.replicas_in_view(stage)) - {self._me} - implausible_peers

    def known_progress(self, stage: int) -> KnownReplicas:
        """Returns the last known progress of a stage's other replicas, by id; silent ones may be among them.

        A replica that no gossip has reported is among them only if a call to it failed; its counts are 0 then.
        """
        return self._stages[stage].known

    def furthest_step(self, stage: int) -> int:
        """Returns the most steps that another replica of a stage has reported of itself.

        Returns 0 if no other is known, -1 if none of the known ones has reported itself.
        """
        return max((progress.direct.step for progress in self.known_progress(stage).values()), default=0)

    def tick(self) -> None:
        """Sends each stage's progress, if it has changed or a heartbeat is due, and calls `on_change` for every stage.

        Sends to all the stage's replicas in the view, or to GOSSIP_FANOUT random ones of many, and to suspected
        replicas at every tick, until they answer or count as silent. Starts one task for each call, and does not wait.
        Leaves a replica out while a call to it about the stage is open; the progress then counts as not sent, and is
        sent again at the next tick. Forgets replicas that are neither live nor in the view, and implausible reports
        older than FORGIVE_S.
        """
        now = loop_time()
        counts = self._counts()
        for stage, gossip in self._stages.items():
            gossip.implausible = {peer: at for peer, at in gossip.implausible.items() if at > now - FORGIVE_S}
            listed = self.others_in_view(stage)
            gossip.known = record_view(gossip.known, listed, now)
            targets = suspected_replicas(gossip.known, listed, now)
            has_news = gossip.sent != counts[stage] or now - gossip.sent_at > HEARTBEAT_S
            if has_news:
                targets.update(choose_targets(listed, self._me, self._rng))
            free = [peer for peer in sorted(targets) if (stage, peer) not in self._calls]
            if free:
                request = GossipSteps(stage, self._compose(stage, counts[stage]))
                for peer in free:
                    self._calls[stage, peer] = asyncio.create_task(self._gossip_with(stage, peer, request))
            if has_news and free and len(free) == len(targets):
                gossip.sent, gossip.sent_at = counts[stage], now
            self._on_change(stage)

    def answer(self, peer: PeerId, message: GossipSteps) -> GossipedSteps:
        """Merges the gossip of `peer`, calls `on_change` with its stage, and returns what this peer knows of the stage.

        Implausible steps of `peer` itself raise nothing: they are reported. Raises NotMyStage for a stage outside the
        span.
        """
        if message.stage not in self._span:
            raise NotMyStage(f"this peer holds stages {self._span}, not {message.stage}; read the directory again")
        own = self._counts()[message.stage]
        self._merge(message.stage, message.replicas, peer)
        return GossipedSteps(self._compose(message.stage, own))

    def _compose(self, stage: int, own: ReplicaCounts) -> tuple[GossipEntry, ...]:
        own = own._replace(step=int(faults.falsify("gossip.step", own.step)))
        return compose_gossip(self.known_progress(stage), self._me, own, self.others_in_view(stage), loop_time())

    async def _gossip_with(self, stage: int, peer: PeerId, request: GossipSteps) -> None:
        gossip = self._stages[stage]
        try:
            reply = await self._caller.call(peer, request, (), deadline=loop_time() + CALL_S)
            if isinstance(reply.message, GossipedSteps):
                self._merge(stage, reply.message.replicas, peer)
        except AgoraError as error:
            # Without any connection this peer's own network may be down, and says nothing of the other's process.
            broken = error.code == ConnectionBroken.code and self._swarm.has_connections()
            gossip.known = record_failure(gossip.known, peer, loop_time(), broken=broken)
        finally:
            del self._calls[stage, peer]

    def _merge(self, stage: int, entries: Collection[GossipEntry], sender: PeerId) -> None:
        gossip, now = self._stages[stage], loop_time()
        entries = self._select_plausible(stage, entries, sender)
        listed = self.others_in_view(stage)
        accepted = [entry for entry in entries if entry[0] == sender or {entry[0], sender} <= listed]
        known = merge_gossip(gossip.known, accepted, sender, self._me, now)
        gossip.known = record_view(known, listed, now)
        self._on_change(stage)

    def _select_plausible(self, stage: int, entries: Collection[GossipEntry], sender: PeerId) -> list[GossipEntry]:
        gossip, highest = self._stages[stage], self._highest_plausible(stage)
        step = max((max(step, open_step) for peer, step, open_step, *_ in entries if peer == sender), default=0)
        if step <= highest:
            gossip.implausible.pop(sender, None)
            return [entry for entry in entries if max(entry[1:3]) <= highest]
        gossip.implausible[sender] = loop_time()
        gossip.known = {peer: progress for peer, progress in gossip.known.items() if peer != sender}
        self._report_implausible(stage, sender, step)
        return []
