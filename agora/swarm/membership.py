"""Publishes this peer's records in the directory, and keeps its view of the other peers fresh.

Knows: when to publish, when to read, and whom to notify. Must not know: how records are stored, how a view is used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agora_protocol.errors import AgoraError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId, Span
from agora_protocol.records import Claim, Progress, Record

from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.placement import (
    Ability,
    Placement,
    Settling,
    StageDemands,
    choose_placement,
    judge_collision,
    next_settling_step,
    pinned_span,
)
from agora.swarm.stage_supply import equal_demands
from agora.swarm.view import View, merge

SETTLE_S = 1.0
"""How long a claim is given to be seen before collisions are judged; up to twice that, drawn at random."""
LIFETIME_S = 20.0
"""How long a record outlives its peer in the directory; a killed peer leaves every view after this and `linger_s`."""
LEAVING_LIFETIME_S = 10.0
PUBLISH_CLAIM_S = 6.0
PUBLISH_PROGRESS_S = 4.0
READ_S, CALM_READ_S, MAX_READ_S = 1.0, 4.0, 8.0
CALM_AFTER_S = 10.0
SLOW_READ_S = 3.0
"""Any read of the directory may take so long, although the one before was quick."""
JITTER = 0.2
MOST_CAPACITY, MOST_BANDWIDTH = 1e9, 1e12
"""The greatest values that a claim can hold."""


class RecordStore(Protocol):
    """Publishes this peer's records, signed, and reads those of all (net.directory.Directory does)."""

    async def publish(self, record: Record, identity: Identity, lifetime_s: float) -> object:
        """Signs this peer's record and stores it under every stage of its span, for `lifetime_s` seconds."""

    async def read_many(self, kind: type[Record], stages: Sequence[int]) -> Mapping[int, Sequence[Record]]:
        """Returns the verified live records of one kind, by stage; an empty sequence where no answer came in time."""


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The run, and this peer in it. incarnation: number of its first claim; each new claim of a span has the next."""

    run: RunId
    stage_count: int
    incarnation: int
    addresses: tuple[str, ...] = ()


class Membership:
    """Chooses and publishes which span this peer holds, and keeps its view of all peers fresh while `run` runs."""

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
        self._directory = directory
        self._identity = identity
        self._report = report
        self._progress = progress
        self._on_change = on_change
        self._rng = rng or random.Random()
        self._unix = unix
        self._demands = equal_demands(config.stage_count)
        self._changed_at = 0.0
        self._linger_s = linger_s(0.0)
        self.claim: Claim | None = None
        self.view = View()

    # --- the own claim

    async def claim_span(self, demands: StageDemands, ability: Ability, pinned: Span | None = None) -> Placement:
        """Claims a span as joining: `pinned`, or the best one for `ability`, chosen again while others collide.

        Gives up the stages that this peer claimed before. Returns the placement that stands; call `confirm` later. A
        placement without a span means to stand by: then nothing is claimed.
        """
        await self.refresh()
        self._demands = demands
        others, count = self.view.without(self._me), self._config.stage_count
        if pinned is not None:
            return await self._settle(Settling(pinned_span(others, count, pinned), settled=True))
        placement = choose_placement(others, demands, ability, self._rng)
        return placement if placement.span is None else await self._settle(Settling(placement))

    async def confirm(self) -> Placement | None:
        """Asks once more, right before serving. Returns None when the claimed span still stands.

        Otherwise returns the placement to load instead, already claimed and settled.
        """
        judged = await self._judge_collision()
        claimed = self.view.peers[self._me].span
        if judged.span == claimed:
            return None
        placement = await self._settle(Settling(judged))
        return placement if placement.span != claimed else None

    async def _settle(self, settling: Settling) -> Placement:
        """Claims the placement, then others while claims collide. Reports SpanChosen and returns the settled one."""
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
            await self._publish_changed(replace(self.claim, state=state))

    def update_ability(self, capacity: float, bandwidth: float) -> None:
        """Sets what the claim says of this peer from its next publication on; does nothing without a claim.

        capacity: microbatches per second for its span. bandwidth: bytes per second. Both 0 for unknown.
        """
        if self.claim is not None:
            capacity, bandwidth = min(capacity, MOST_CAPACITY), min(bandwidth, MOST_BANDWIDTH)
            self.claim = replace(self.claim, capacity=capacity, bandwidth=bandwidth)

    async def _publish_new_claim(self, placement: Placement) -> None:
        """Claims a span as joining, under the next incarnation: readers prefer it to this peer's older claims."""
        span = placement.span
        assert span is not None, "who stands by claims nothing"
        incarnation = self._config.incarnation if self.claim is None else self.claim.incarnation + 1
        await self._publish_changed(Claim(self._me, span, incarnation, self._config.addresses, "joining", 0.0))

    async def _publish_changed(self, claim: Claim) -> None:
        """Makes `claim` this peer's claim, merges it into the own view and publishes it."""
        self.claim = claim
        self._merge([])
        await self._publish_claim()

    async def _publish_claim(self) -> None:
        """Stores the claim, if there is one, in the directory again; a leaving one with a shorter lifetime."""
        if self.claim is not None:
            await self._publish(self.claim, LEAVING_LIFETIME_S if self.claim.state == "leaving" else LIFETIME_S)

    async def publish_progress(self, progress: Progress | None) -> None:
        """Merges progress, if any of the claimed span, into the view; publishes it with the claim's incarnation."""
        if self.claim is not None and progress is not None and self.claim.span == progress.span:
            progress = replace(progress, incarnation=self.claim.incarnation)
            self._merge([progress])
            await self._publish(progress, LIFETIME_S)

    async def _publish(self, record: Record, lifetime_s: float) -> None:
        """Stores a record in the directory; an AgoraError is reported as DirectoryTrouble, not raised."""
        try:
            await self._directory.publish(record, self._identity, lifetime_s)
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
            await asyncio.sleep(self._jittered(every_s))
            await publish()

    async def _keep_reading(self) -> None:
        """Refreshes the view until cancelled; rests between, longer when nothing changes or reads are slow."""
        while True:
            took_s = await self.refresh()
            is_complete = all(self.view.replicas(stage) for stage in range(self._config.stage_count))
            is_calm = is_complete and loop_time() - self._changed_at > CALM_AFTER_S
            await asyncio.sleep(self._jittered(read_interval_s(is_calm, took_s)))

    async def refresh(self) -> float:
        """Reads all stages' claims and progress once, merges the others' into the view. Returns the seconds it took."""
        started = loop_time()
        claims, progress = await asyncio.gather(self._read(Claim), self._read(Progress))
        took_s = loop_time() - started
        self._linger_s = linger_s(took_s)
        self._merge([record for record in (*claims, *progress) if record.peer != self._me])
        return took_s

    async def _read(self, kind: type[Record]) -> list[Record]:
        """Returns all stages' records of one kind; after an AgoraError, reported as DirectoryTrouble, an empty list."""
        try:
            by_stage = await self._directory.read_many(kind, range(self._config.stage_count))
        except AgoraError as error:
            self._report(events.DirectoryTrouble("read", f"{error.code}: {error}"))
            return []
        return [record for records in by_stage.values() for record in records]

    def _jittered(self, seconds: float) -> float:
        """Returns `seconds` made longer or shorter at random, by a fifth at most, so that peers do not act in step."""
        return seconds * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    # --- the view

    def _merge(self, records: Sequence[Record]) -> None:
        """Merges records and this peer's own claim, so that it never expires, into the view; reports each change."""
        renewed = [*records, self.claim] if self.claim is not None else records
        former, self.view = self.view, merge(self.view, renewed, self._unix(), self._linger_s)
        changed = changes(former, self.view)
        for event in changed:
            self._report(event)
        if changed:
            self._changed_at = loop_time()
            self._on_change()


def read_interval_s(is_calm: bool, took_s: float) -> float:
    """Returns how long to rest after a read that took `took_s`: 3 times that, at least 1 s (calm: 4 s), at most 8 s.

    is_calm: every stage has a replica, and the view has not changed for CALM_AFTER_S.
    """
    return min(MAX_READ_S, max(CALM_READ_S if is_calm else READ_S, 3.0 * took_s))


def linger_s(took_s: float) -> float:
    """Returns how many seconds a peer stays in the view after a read of `took_s` seconds found it.

    The next read begins after the longest rest and may take twice as long: a slow one must not look like a death.
    """
    return (1.0 + JITTER) * read_interval_s(True, took_s) + max(SLOW_READ_S, 2.0 * took_s)


def changes(former: View, view: View) -> list[events.Event]:
    """Returns PeerSeen for each peer that came or changed span, state, incarnation or addresses, PeerGone if gone."""
    changed: list[events.Event] = []
    for peer, seen in view.peers.items():
        known = former.peers.get(peer)
        claimed = (seen.span, seen.state, seen.incarnation, seen.addresses)
        if known is None or (known.span, known.state, known.incarnation, known.addresses) != claimed:
            changed.append(events.PeerSeen(peer, seen.span.first, seen.span.last, seen.state))
    changed += [events.PeerGone(peer, "its claim ended") for peer in former.peers.keys() - view.peers.keys()]
    return changed
