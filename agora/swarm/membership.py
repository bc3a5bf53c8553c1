"""Publishes this peer's records in the directory, and keeps its view of the other peers fresh.

Knows: when to publish, when to read, and whom to notify. Must not know: how records are stored, which of them are read,
how a view is used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from agora_protocol.errors import AgoraError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.records import Claim, Progress, Record

from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.directory_reader import JITTER, DirectoryReader, FoundRecords, RecordStore
from agora.swarm.lost_peers import LostPeers
from agora.swarm.meetings import Acquaintances, AllHandshaken, Meetings
from agora.swarm.placement import (
    Ability,
    Placement,
    Settling,
    StageDemands,
    choose_placement,
    judge_collision,
    next_settling_step,
    place_as_pinned,
)
from agora.swarm.reachability import Announcement
from agora.swarm.stage_supply import equal_demands
from agora.swarm.view import StageSample, View, merge

MEET_ALL_S = 15.0
"""Maximum number of seconds for which a newcomer dials those whose claims it has read, before it chooses a span."""
MANY_UNREACHABLE = 16
"""If at least this many, and most, of a batch of dialled strangers are unreachable, the peers are counted again."""
SETTLE_S = 1.0
"""Minimum seconds, at random up to twice this, for others to see a claim before its peer looks for collisions."""
LIFETIME_S = 20.0
"""Seconds that a record outlives its peer in the directory; a killed peer leaves all views after this + `linger_s`."""
LEAVING_LIFETIME_S = 10.0
PUBLISH_CLAIM_S = 6.0
PUBLISH_PROGRESS_S = 4.0
CALM_AFTER_S = 10.0
MAX_CAPACITY, MAX_BANDWIDTH = 1e9, 1e12
"""The greatest values that a claim can hold."""


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Describes the run and this peer in it. Immutable.

    incarnation: number of this peer's first claim; each new claim of a span has the next number. is_member: returns
    whether a peer is admitted to the run; others are not in the view.
    """

    run: RunId
    stage_count: int
    incarnation: int
    addresses: tuple[str, ...] = ()
    proof: bytes = b""  # this peer's tickets, which its claims carry
    is_member: Callable[[PeerId], bool] = lambda _: True


class Membership:
    """Chooses and publishes which span this peer holds, and keeps its view of all peers fresh while `run` runs.

    acquaintances: says who was met; only they are in the view. Counts everybody as met until its creator replaces it.
    """

    def __init__(
        self,
        config: MembershipConfig,
        directory: RecordStore,
        identity: Identity,
        report: Report,
        *,
        progress: Callable[[], Progress | None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """progress: returns what to publish as this peer's progress, None for nothing. unix: the wall clock.

        on_change: called, on the loop, after each merge in which a peer came, went or changed its claim.
        """
        self._me = identity.peer
        self._config = config
        self._identity = identity
        self._report = report
        self._progress = progress
        self._on_change = on_change
        self.acquaintances: Acquaintances = AllHandshaken()
        self._rng = rng or random.Random()
        self._unix = unix
        self._directory = directory
        self._meetings = Meetings(self._rng)
        self._reader = DirectoryReader(
            directory,
            config.run,
            self._me,
            config.stage_count,
            report,
            rng=self._rng,
            unix=unix,
            was_unreachable=self._meetings.was_unreachable,
        )
        self._demands = equal_demands(config.stage_count)
        self._changed_at = 0.0
        self._announcement = Announcement(addresses=config.addresses)
        self.claim: Claim | None = None
        self.view = View()
        self.lost_peers = LostPeers()
        """Who counts as gone although its claim has not ended; such peers are in no view."""

    # --- this peer's claim

    async def claim_span(self, demands: StageDemands, ability: Ability, pinned: Span | None = None) -> Placement:
        """Claims a span as joining: `pinned`, or the best one for `ability`, chosen again while others collide.

        Reads the directory and dials strangers first; takes seconds. The new claim replaces this peer's former one.
        Returns the placement that has settled; call `confirm` before serving. A placement without a span means to stand
        by: then nothing is claimed.
        """
        await self.refresh()
        await self._meet_everybody()
        self._demands = demands
        others, count = self.view.without(self._me), self._config.stage_count
        if pinned is not None:
            return await self._settle(Settling(place_as_pinned(others, count, pinned), settled=True))
        placement = choose_placement(others, demands, ability, self._rng)
        return placement if placement.span is None else await self._settle(Settling(placement))

    async def confirm(self) -> Placement | None:
        """Judges collisions once more, right before serving. Returns None if the claimed span is still the right one.

        Otherwise claims another span, waits until that has settled, and returns the placement to load instead.
        """
        judged = await self._judge_collision()
        claimed = self.view.peers[self._me].span
        if judged.span == claimed:
            return None
        placement = await self._settle(Settling(judged))
        return placement if placement.span != claimed else None

    async def _settle(self, settling: Settling) -> Placement:
        """Claims the placement, and others while claims collide; reports SpanChosen. Returns the settled placement."""
        await self._publish_new_claim(settling.placement)
        while not settling.settled:
            await asyncio.sleep(SETTLE_S * self._rng.uniform(1.0, 2.0))
            claimed, settling = settling.placement, next_settling_step(settling, await self._judge_collision())
            if settling.placement is not claimed:
                await self._publish_new_claim(settling.placement)
            elif not settling.settled:
                await self._publish_claim()
        if self.claim is not None:
            self._report(events.SpanChosen(self.claim.span.first, self.claim.span.last, settling.placement.reason))
        return settling.placement

    async def _judge_collision(self) -> Placement:
        """Reads the directory, then returns which span this peer should hold; see placement.judge_collision."""
        await self.refresh()
        return judge_collision(self.view, self.view.peers[self._me], self._demands, self._config.run)

    async def announce(self, state: str) -> None:
        """Sets the claim's state ("serving", "leaving") and publishes it now; does nothing without a claim."""
        if self.claim is not None:
            await self._change_and_publish(replace(self.claim, state=state))

    def update_ability(self, capacity: float, bandwidth: float) -> None:
        """Sets the claim's capacity and bandwidth from its next publication on; does nothing without a claim.

        capacity: microbatches per second for its span, at most MAX_CAPACITY. bandwidth: bytes per second, at most
        MAX_BANDWIDTH. Both 0 for unknown.
        """
        if self.claim is not None:
            capacity, bandwidth = min(capacity, MAX_CAPACITY), min(bandwidth, MAX_BANDWIDTH)
            self.claim = replace(self.claim, capacity=capacity, bandwidth=bandwidth)

    async def announce_addresses(self, announcement: Announcement) -> None:
        """Sets how others can connect to this peer, in this claim and later ones; publishes at once if that is new."""
        if announcement == self._announcement:
            return
        self._announcement = announcement
        if self.claim is not None:
            await self._change_and_publish(replace(self.claim, **asdict(announcement)))

    async def _publish_new_claim(self, placement: Placement) -> None:
        """Claims a span as joining, under the next incarnation: readers prefer it to this peer's older claims."""
        span = placement.span
        assert span is not None, "who stands by claims nothing"
        incarnation = self._config.incarnation if self.claim is None else self.claim.incarnation + 1
        ways = self._announcement
        claim = Claim(self._me, span, incarnation, ways.addresses, "joining", 0.0, proof=self._config.proof)
        await self._change_and_publish(replace(claim, reachability=ways.reachability, relays_for=ways.relays_for))

    async def _change_and_publish(self, claim: Claim) -> None:
        """Sets this peer's claim, merges it into its view, and publishes it; errors are reported, not raised."""
        self.claim = claim
        self._merge([])
        await self._publish_claim()

    async def _publish_claim(self) -> None:
        """Stores the claim, if there is one, in the directory again; a leaving claim gets a shorter lifetime."""
        if self.claim is not None:
            await self._publish(self.claim, LEAVING_LIFETIME_S if self.claim.state == "leaving" else LIFETIME_S)

    async def publish_progress(self, progress: Progress | None) -> None:
        """Merges this peer's progress into the view and publishes it, both with the claim's incarnation.

        Does nothing without a claim, for None, and for progress of another span than the claimed one.
        """
        if self.claim is not None and progress is not None and self.claim.span == progress.span:
            progress = replace(progress, incarnation=self.claim.incarnation)
            self._merge([FoundRecords([progress], 0.0)])
            await self._publish(progress, LIFETIME_S)

    async def _publish(self, record: Record, lifetime_s: float) -> None:
        """Stores a record in the directory; an AgoraError is reported as DirectoryTrouble, not raised."""
        try:
            shards = self._reader.shards_to_publish(record.span)
            await self._directory.publish(record, self._identity, lifetime_s, shards)
        except AgoraError as error:
            self._report(events.DirectoryTrouble("publish", f"{error.code}: {error}"))

    # --- staying

    async def run(self) -> None:
        """Until cancelled, publishes the claim and the progress every few seconds and reads the directory."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(PUBLISH_CLAIM_S, self._publish_claim), name="publish claim")
            repeated_progress = self._repeat(PUBLISH_PROGRESS_S, lambda: self.publish_progress(self._progress()))
            group.create_task(repeated_progress, name="publish progress")
            group.create_task(self._keep_reading(), name="read directory")

    async def _repeat(self, every_s: float, publish: Callable[[], Awaitable[None]]) -> None:
        """Waits `every_s` seconds, jittered, then calls `publish`, again and again until cancelled."""
        while True:
            await asyncio.sleep(self._jitter(every_s))
            await publish()

    async def _keep_reading(self) -> None:
        """Refreshes the view until cancelled; waits between reads, longer when nothing changes or reads are slow."""
        while True:
            await self.refresh()
            is_complete = all(self.view.replicas(stage) for stage in range(self._config.stage_count))
            is_calm = is_complete and loop_time() - self._changed_at > CALM_AFTER_S
            await asyncio.sleep(self._jitter(self._reader.interval_s(is_calm)))

    async def refresh(self) -> None:
        """Reads the claims and progress that are due, merges them into the view, and dials strangers that are due.

        In a small run everything is due; in a large one a bounded part, see swarm/directory_shards.py.
        """
        span = self.claim.span if self.claim is not None else None
        found = await self._reader.read(span)
        self._merge(found, self._reader.samples(span))
        await self._meet_some()

    async def _meet_some(self) -> bool:
        """Dials the strangers that are due, and moves those that answer into the view. Returns whether any were due."""
        due = self._meetings.choose(loop_time(), self.view.strangers)
        if due:
            await self.acquaintances.meet(due)
            self.count_members()
            unreachable = sum(seen.peer in self.view.strangers for seen in due)
            if unreachable >= MANY_UNREACHABLE and 2 * unreachable > len(due):
                self._reader.forget()  # it counted them as peers
        return bool(due)

    async def _meet_everybody(self) -> None:
        """Dials every stranger once, for MEET_ALL_S at most: a newcomer chooses its span by the peers that answer."""
        until = loop_time() + MEET_ALL_S
        while not all(map(self._meetings.was_dialled, self.view.strangers)) and loop_time() < until:
            if not await self._meet_some():
                break
        if self.view.strangers:
            await self.refresh()

    def count_members(self) -> None:
        """Moves strangers that were met by now into the view; to be called after each exchanged HELLO."""
        if any(self.acquaintances.is_met(peer) for peer in self.view.strangers):
            self._merge([])

    def forget_lost(self) -> None:
        """Removes the peers from the view that `lost_peers` counts as lost by now."""
        self._merge([])

    def _jitter(self, seconds: float) -> float:
        """Returns `seconds` made longer or shorter at random, by a fifth at most, so that peers do not act in step."""
        return seconds * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    # --- the view

    def forget_refused(self) -> None:
        """Removes the peers from the view that are not members any more."""
        self._merge([])

    def _merge(self, found: Sequence[FoundRecords], samples: Mapping[int, StageSample] | None = None) -> None:
        """Merges records into the view, removes peers that expired, are lost or are not members, and reports changes.

        This peer's own claim is merged each time, so that it never expires. samples: the view's new samples; None keeps
        the present ones.
        """
        own = FoundRecords([self.claim] if self.claim is not None else [], self._reader.linger_s)
        former, view, now_unix = self.view, self.view, self._unix()
        for batch in (*found, own):
            view = merge(view, batch.records, now_unix, batch.linger_s)
        everybody = {**view.peers, **view.strangers}.items()
        lost = {
            peer
            for peer, seen in everybody
            if peer != self._me and (self.lost_peers.is_lost(seen) or not self._config.is_member(peer))
        }
        view = view.without(*lost)
        view = view if samples is None else replace(view, samples=samples)
        self.view = view.of_members(lambda peer: peer == self._me or self.acquaintances.is_met(peer))
        changed = changes(former, self.view, lost)
        for event in changed:
            self._report(event)
        if changed:
            self._changed_at = loop_time()
            self._on_change()


def changes(former: View, view: View, lost: Collection[PeerId] = ()) -> list[events.Event]:
    """Returns PeerSeen for each peer that came or changed span, state, incarnation or addresses, PeerGone for others.

    former, view: before and after. lost: peers removed although their claims have not ended.
    """
    changed: list[events.Event] = []
    for peer, seen in view.peers.items():
        known = former.peers.get(peer)
        claimed = (seen.span, seen.state, seen.incarnation, seen.addresses)
        if known is None or (known.span, known.state, known.incarnation, known.addresses) != claimed:
            changed.append(events.PeerSeen(peer, seen.span.first, seen.span.last, seen.state))
    usual = "its claim ended, or it is in no shard that is read now" if view.samples else "its claim ended"
    for peer in former.peers.keys() - view.peers.keys():
        reason = "its connection broke, and it cannot be dialled" if peer in lost else usual
        changed.append(events.PeerGone(peer, reason))
    return changed
