"""Publishes this peer's records in the directory, and keeps its view of the other peers fresh."""

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

from agora.core.calls import Announcement
from agora.core.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.directory_reader import JITTER, DirectoryReader, FoundRecords, RecordStore
from agora.swarm.key_use import KeyUse
from agora.swarm.lost_peers import LostPeers
from agora.swarm.placement import (
    Placement,
    Settling,
    choose_placement,
    judge_collision,
    next_settling,
    place_as_pinned,
)
from agora.swarm.stage_capacity import MachineCapacity, StageNeeds, equal_needs
from agora.swarm.unverified_dials import UnverifiedDials
from agora.swarm.view import PeerView, StageEstimate, View, merge

# Before a newcomer chooses a span, it dials the peers whose claims it has read, for at most this many seconds: only
# those that answer count.
VERIFY_ALL_TIMEOUT_S = 15.0
# If at least this many, and most, of a batch of dialled peers did not answer, the peers are counted again.
MANY_UNREACHABLE = 16
# Minimum number of seconds, at random up to twice this, for others to see a claim before collisions are judged.
SETTLE_DELAY_S = 1.0
# Seconds after its last publication for which a record is valid; a killed peer leaves the views of peers without a
# connection to it after this + `linger_s`.
LIFETIME_S = 20.0
LEAVING_LIFETIME_S = 10.0
PUBLISH_CLAIM_INTERVAL_S = 6.0
PUBLISH_PROGRESS_INTERVAL_S = 4.0
# If another process seems to use this peer's key, a start publishes a probe and watches for PROBE_TIMEOUT_S. If the
# other one answers it, the start warns that process for KEY_WARNING_DURATION_S. PROBE_INTERVAL_S: between two reads or
# warnings.
PROBE_TIMEOUT_S = 1.4 * PUBLISH_PROGRESS_INTERVAL_S + 2.0
KEY_WARNING_DURATION_S = 10.0
PROBE_INTERVAL_S = 0.8
PROBE_LIFETIME_S = 5.0  # less than the lifetime of a living process' record, which therefore replaces the probe
CALM_AFTER_S = 10.0
MAX_CAPACITY, MAX_BANDWIDTH = 1e9, 1e12  # the greatest values that a claim can hold


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The run, and this peer in it.

    incarnation: the number of this peer's first claim; each new claim of a span has the next one. addresses: those that
    claims announce until `announce_addresses` is called. proof: this peer's tickets, which its claims carry. is_member:
    whether a peer is admitted; others are kept out of the view.
    """

    run: RunId
    stage_count: int
    incarnation: int
    addresses: tuple[str, ...] = ()
    proof: bytes = b""
    is_member: Callable[[PeerId], bool] = lambda _: True


class Membership:
    """This peer as a member of the run: chooses and publishes the span that it holds, and keeps its view fresh.

    claim: None until this peer has claimed a span. view: what is known of this peer and of others.
    """

    def __init__(
        self,
        config: MembershipConfig,
        directory: RecordStore,
        identity: Identity,
        report: Report,
        *,
        is_verified: Callable[[PeerId], bool],
        dial_unverified: Callable[[Sequence[PeerView]], Awaitable[None]],
        progress: Callable[[], Progress | None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """is_verified: returns whether HELLO was exchanged with a peer; only such peers are among the view's peers.

        dial_unverified: dials peers with whom no HELLO was exchanged yet; returns within a few seconds, even if some do
        not answer. progress: returns what to publish as this peer's progress, None for nothing. unix: the wall clock.

        on_change: called, on the loop, after each merge in which a peer came, went or changed its claim.
        """
        self._me = identity.peer
        self._config = config
        self._identity = identity
        self._report = report
        self._progress = progress
        self._on_change = on_change
        self._is_verified = is_verified
        self._dial_unverified = dial_unverified
        self._rng = rng or random.Random()
        self._unix = unix
        self._directory = directory
        self._unverified_dials = UnverifiedDials(self._rng)
        self._reader = DirectoryReader(
            directory,
            config.run,
            self._me,
            config.stage_count,
            report,
            rng=self._rng,
            unix=unix,
            was_dialled=self._unverified_dials.was_dialled,
            on_own=self._judge_own_record,
        )
        self.key_use = KeyUse(self._me, config.incarnation, config.addresses, loop_time())
        self._needs = equal_needs(config.stage_count)
        self._changed_at = 0.0
        self._announcement = Announcement(addresses=config.addresses)
        self.claim: Claim | None = None
        self._is_probing = False  # whether the start finds out if another process has its key, and warns that one
        self.view = View()
        self.lost_peers = LostPeers()  # who counts as gone although its claim has not ended; such peers are in no view

    # --- this peer's claim

    async def claim_span(self, needs: StageNeeds, machine: MachineCapacity, pinned: Span | None = None) -> Placement:
        """Claims a span in state "joining": `pinned`, or the best one for `machine`; returns the settled placement.

        Reads the directory and dials unverified peers first; takes seconds. Publishes the claim. Unless it is `pinned`,
        then reads the claims of others that chose at the same time, and claims another span if they collide, until it
        has settled; call `confirm` before serving. If the placement has no span, it claims nothing, and the peer is to
        stand by. Raises KeyInUse when another process publishes under this peer's key.
        """
        await self.refresh()
        await self._require_sole_use_of_the_key()
        await self._verify_everybody()
        self._needs = needs
        others = self.view.without(self._me)
        if pinned is not None:
            placement = place_as_pinned(others, self._config.stage_count, pinned)
            return await self._settle(Settling(placement, settled=True))
        placement = choose_placement(others, needs, machine, self._rng)
        return placement if placement.span is None else await self._settle(Settling(placement))

    async def confirm(self) -> Placement | None:
        """Checks once more, right before serving, whether the claimed span is the right one; claims another if not.

        Returns the placement to load instead, None if the claimed span stays. Call it only with a claim, and not for a
        pinned span, which it would give up.
        """
        judged = await self._judge_collision()
        claimed = self.view.peers[self._me].span
        if judged.span == claimed:
            return None
        placement = await self._settle(Settling(judged))
        return placement if placement.span != claimed else None

    async def _settle(self, settling: Settling) -> Placement:
        await self._publish_new_claim(settling.placement)
        while not settling.settled:
            await asyncio.sleep(SETTLE_DELAY_S * self._rng.uniform(1.0, 2.0))
            claimed = settling.placement
            settling = next_settling(settling, await self._judge_collision())
            if settling.placement is not claimed:
                await self._publish_new_claim(settling.placement)
            elif not settling.settled:
                await self._publish_claim()
        if self.claim is not None:
            self._report(events.SpanChosen(self.claim.span.first, self.claim.span.last, settling.placement.reason))
        return settling.placement

    async def _judge_collision(self) -> Placement:
        await self.refresh()
        return judge_collision(self.view, self.view.peers[self._me], self._needs, self._config.run)

    async def set_state(self, state: str) -> None:
        """Sets the claim's state, such as "serving" or "leaving", and publishes it; does nothing without a claim.

        Trouble with the directory is reported, not raised.
        """
        if self.claim is not None:
            await self._change_and_publish(replace(self.claim, state=state))

    def update_capacity(self, capacity: float, bandwidth: float) -> None:
        """Sets the claim's capacity (microbatches/s for the span) and bandwidth (bytes/s), shown by its next
        publication.
        """
        if self.claim is not None:
            self.claim = replace(
                self.claim, capacity=min(capacity, MAX_CAPACITY), bandwidth=min(bandwidth, MAX_BANDWIDTH)
            )

    async def announce_addresses(self, announcement: Announcement) -> None:
        """Sets what claims contain on how to connect to this peer, and publishes the claim if that has changed."""
        if announcement == self._announcement:
            return
        self._announcement = announcement
        if self.claim is not None:
            await self._change_and_publish(replace(self.claim, **asdict(announcement)))

    async def _publish_new_claim(self, placement: Placement) -> None:
        # The claim has the next incarnation, so that readers prefer it to this peer's older ones. Its capacity is
        # unknown until `update_capacity` is called.
        span = placement.span
        assert span is not None, "who stands by claims nothing"
        incarnation = self._config.incarnation if self.claim is None else self.claim.incarnation + 1
        announced = self._announcement
        claim = Claim(self._me, span, incarnation, announced.addresses, "joining", 0.0, proof=self._config.proof)
        await self._change_and_publish(replace(claim, **asdict(announced)))

    async def _change_and_publish(self, claim: Claim) -> None:
        self.claim = claim
        self._merge([])
        await self._publish_claim()

    async def _publish_claim(self) -> None:
        if self.claim is not None:
            await self._publish(self.claim, LEAVING_LIFETIME_S if self.claim.state == "leaving" else LIFETIME_S)

    async def publish_progress(self, progress: Progress | None) -> None:
        """Publishes this peer's progress, with the claim's incarnation, and merges it into the view.

        Does nothing without a claim, for None, and for progress of another span than the claimed one.
        """
        if self.claim is not None and progress is not None and self.claim.span == progress.span:
            progress = replace(progress, incarnation=self.claim.incarnation)
            self._merge([FoundRecords([progress], 0.0)])
            await self._publish(progress, LIFETIME_S)

    async def _publish(self, record: Record, lifetime_s: float) -> None:
        # The records under a key that is used twice belong to the other process: this one must not even say that it
        # leaves.
        if self.key_use.error is None:
            await self._store(record, lifetime_s)

    async def _store(self, record: Record, lifetime_s: float) -> None:
        try:
            shards = self._reader.shards_to_publish(record.span)
            await self._directory.publish(record, self._identity, lifetime_s, shards)
        except AgoraError as error:
            self._report(events.DirectoryTrouble("publish", f"{error.code}: {error}"))

    # --- one process for one key

    def _judge_own_record(self, record: Record) -> None:
        if isinstance(record, Claim | Progress):
            latest = self._config.incarnation if self.claim is None else self.claim.incarnation
            if told := self.key_use.take(record, latest, loop_time()):
                self._report(events.OwnerTold(told))

    async def _require_sole_use_of_the_key(self) -> None:
        if (suspect := self.key_use.suspect) is None:
            return
        # A process that runs publishes its progress again within PUBLISH_PROGRESS_INTERVAL_S, in the place of the
        # probe.
        self._is_probing = True
        await self._store(self.key_use.probe(suspect), PROBE_LIFETIME_S)
        until = loop_time() + PROBE_TIMEOUT_S
        while self.key_use.error is None and loop_time() < until:
            await asyncio.sleep(PROBE_INTERVAL_S)
            await self.refresh()
        if self.key_use.error is not None:
            self._report(events.OwnerTold(str(self.key_use.error)))
            until = loop_time() + KEY_WARNING_DURATION_S
            while loop_time() < until:  # again and again, since the other one's progress replaces it
                await self._store(self.key_use.probe(suspect), PROBE_LIFETIME_S)
                await asyncio.sleep(PROBE_INTERVAL_S)
        self._is_probing = False
        self._raise_if_key_is_used()

    def _raise_if_key_is_used(self) -> None:
        if self.key_use.error is not None:
            raise self.key_use.error

    # --- staying

    async def run(self) -> None:
        """Publishes claim and progress and reads the directory, again and again until cancelled.

        Raises KeyInUse when another process that started earlier publishes under this peer's key.
        """
        try:
            await self._publish_and_read()
        except BaseExceptionGroup as group:
            self._raise_if_key_is_used()
            raise group from None

    async def _publish_and_read(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(PUBLISH_CLAIM_INTERVAL_S, self._publish_claim), name="publish claim")
            repeated_progress = self._repeat(
                PUBLISH_PROGRESS_INTERVAL_S, lambda: self.publish_progress(self._progress())
            )
            group.create_task(repeated_progress, name="publish progress")
            group.create_task(self._keep_reading(), name="read directory")

    async def _repeat(self, every_s: float, publish: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._jitter(every_s))
            await publish()

    async def _keep_reading(self) -> None:
        while True:
            await self.refresh()
            if not self._is_probing:  # afterwards the start raises it: the other process must have read the warning
                self._raise_if_key_is_used()
            is_complete = all(self.view.replicas(stage) for stage in range(self._config.stage_count))
            is_calm = is_complete and loop_time() - self._changed_at > CALM_AFTER_S
            await asyncio.sleep(self._jitter(self._reader.interval_s(is_calm)))

    async def refresh(self) -> None:
        """Reads the claims and progress that are due, merges them into the view, and dials unverified peers.

        Returns when the dials have ended, after a few seconds. Trouble with the directory is reported, not raised.
        """
        span = self.claim.span if self.claim is not None else None
        found = await self._reader.read(span)
        self._merge(found, self._reader.stage_estimates(span))
        await self._verify_some()

    async def _verify_some(self) -> bool:
        due = self._unverified_dials.choose(loop_time(), self.view.unverified)
        if due:
            await self._dial_unverified(due)
            self.promote_verified()
            unreachable = sum(seen.peer in self.view.unverified for seen in due)
            if unreachable >= MANY_UNREACHABLE and 2 * unreachable > len(due):
                self._reader.forget_estimates()  # their claims were counted in these
        return bool(due)

    async def _verify_everybody(self) -> None:
        until = loop_time() + VERIFY_ALL_TIMEOUT_S
        while not all(map(self._unverified_dials.was_dialled, self.view.unverified)) and loop_time() < until:
            if not await self._verify_some():
                break
        if self.view.unverified:
            await self.refresh()

    def promote_verified(self) -> None:
        """Moves peers with whom HELLO was exchanged meanwhile to the view's peers; call it after each HELLO."""
        if any(self._is_verified(peer) for peer in self.view.unverified):
            self._merge([])

    def forget_lost(self) -> None:
        """Removes the peers that `lost_peers` now counts as lost from the view."""
        self._merge([])

    def _jitter(self, seconds: float) -> float:
        # At random, so that peers do not act in step.
        return seconds * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    # --- the view

    def forget_refused(self) -> None:
        """Removes the peers that `config.is_member` no longer admits from the view."""
        self._merge([])

    def _merge(self, found: Sequence[FoundRecords], estimates: Mapping[int, StageEstimate] | None = None) -> None:
        # This peer's own claim is merged each time, so that it never expires. estimates: None keeps the present ones.
        own = FoundRecords([self.claim] if self.claim is not None else [], self._reader.linger_s)
        former = view = self.view
        now_unix = self._unix()
        for batch in (*found, own):
            view = merge(view, batch.records, now_unix, batch.linger_s)
        everybody = {**view.peers, **view.unverified}
        everybody.pop(self._me, None)
        refused = {peer for peer in everybody if not self._config.is_member(peer)}
        lost = {peer for peer, known in everybody.items() if self.lost_peers.is_lost(known)}
        view = view.without(*lost, *refused)
        view = view if estimates is None else replace(view, estimates=estimates)
        self.view = view.with_verified(lambda peer: peer == self._me or self._is_verified(peer))
        changed = compare_views(former, self.view, lost, refused)
        for event in changed:
            self._report(event)
        if changed:
            self._changed_at = loop_time()
            self._on_change()


def compare_views(
    former: View, view: View, lost: Collection[PeerId] = (), refused: Collection[PeerId] = ()
) -> list[events.Event]:
    """Returns a PeerSeen for each peer that came or changed its claim, then a PeerGone for each that left the view.

    lost, refused: peers removed before their claims ended, since they cannot be reached or are not admitted.
    """
    changed: list[events.Event] = []
    for peer, current in view.peers.items():
        known = former.peers.get(peer)
        claimed = (current.span, current.state, current.incarnation, current.addresses)
        if known is None or (known.span, known.state, known.incarnation, known.addresses) != claimed:
            changed.append(events.PeerSeen(peer, current.span.first, current.span.last, current.state))
    ended_reason = "its claim ended, or it is in no shard that is read now" if view.estimates else "its claim ended"
    for peer in former.peers.keys() - view.peers.keys():
        lost_reason = "its connection broke, and it cannot be dialled" if peer in lost else ended_reason
        reason = "it is not admitted any more" if peer in refused else lost_reason
        changed.append(events.PeerGone(peer, reason))
    return changed
