"""Keeps this peer's records in the directory and its view of the others fresh: all the effects of the swarm room.

Knows when to publish, when to read, whom to wake. Must not know how records are stored (a seam), nor what a view is
good for: placement, health and routing decide on it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agora_protocol.errors import AgoraError, LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.records import Claim, Progress, Record

from agora.observe import events
from agora.observe.events import Report
from agora.swarm.placement import Collision, Placement, choose_span, judge_collision, pinned_span
from agora.swarm.view import PeerView, View, merge

LIFETIME_S = 20.0
"""How long a record outlives its peer in the directory; a killed peer leaves every view after this and `linger_s`."""
LEAVING_LIFETIME_S = 10.0
PUBLISH_S = 6.0
PROGRESS_S = 4.0
READ_S, CALM_READ_S, MOST_READ_S = 1.0, 4.0, 8.0
SLOW_READ_S = 3.0
"""Any read of the directory may take so long, although the one before was quick."""
JITTER = 0.2
MOST_ROUNDS = 12
KEPT_ROUNDS = 3
"""Who has kept its span so often serves it, although others still choose: some are bound to theirs by their owner."""


class Directory(Protocol):
    """Where signed records are kept (net.directory.Directory)."""

    async def publish(self, record: Record, identity: Identity, lifetime_s: float) -> object:
        """Stores our record under every stage of its span."""

    async def read_many(self, kind: type[Record], stages: Sequence[int]) -> Mapping[int, Sequence[Record]]:
        """The verified live records of one kind under some stages; empty where nothing was found in time."""


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The run, and how hard to look. A claim is given `settle_s` to be seen before collisions are judged."""

    run: RunId
    stage_count: int
    settle_s: float = 1.0
    lifetime_s: float = LIFETIME_S


class Membership:
    """This peer among the others. `join` chooses and claims a span, `run` keeps everything fresh until cancelled."""

    def __init__(
        self,
        config: MembershipConfig,
        directory: Directory,
        identity: Identity,
        report: Report,
        *,
        rng: random.Random | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._directory = directory
        self._identity = identity
        self._report = report
        self._rng = rng or random.Random()
        self._unix = unix
        self._own: Claim | None = None
        self._progress: Callable[[], Progress | None] = lambda: None
        self._subscribers: list[Callable[[], None]] = []
        self._trouble = ""
        self._changed_at = 0.0
        self._linger_s = linger_s(0.0)
        self.view = View()

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self._identity.peer

    @property
    def claim(self) -> Claim | None:
        """What this peer claims now."""
        return self._own

    def subscribe(self, changed: Callable[[], None]) -> None:
        """`changed` is called, on the loop, whenever somebody came, went, or changed span, state or addresses."""
        self._subscribers.append(changed)

    def speak_progress(self, progress: Callable[[], Progress | None]) -> None:
        """Where `run` gets this peer's progress from, each time it publishes it."""
        self._progress = progress

    # --- joining and leaving

    async def join(self, claim: Claim, length: int, pinned: Span | None = None) -> Placement:
        """Chooses a span of `length` stages (or takes `pinned`), claims it as joining, and settles collisions.

        `claim` says everything but the span. Returns the placement that stands; `confirm` asks once more before
        serving.
        """
        await self.refresh()
        placement = self._place(length, pinned)
        claim = replace(claim, span=placement.span, state="joining")
        if pinned is None:
            return await self._settle(claim, placement)
        await self.announce(claim)
        return self._chosen(placement)

    async def confirm(self) -> Placement | None:
        """Asks once more, with a fresh view, right before serving: None when the claimed span still stands.

        Otherwise the placement to load instead, already claimed and settled as in `join`. Raises LocalError before
        `join`.
        """
        await self.refresh()
        verdict = self.judge()
        before = self._own
        if before is None or not verdict.choose_again:
            return None
        placement = await self._settle(_reborn(before, verdict), Placement(verdict.span, verdict.reason))
        return placement if placement.span != before.span else None

    async def _settle(self, claim: Claim, placement: Placement) -> Placement:
        """Claims the placement, and another one as long as peers that chose at once come first."""
        kept = 0
        await self.announce(claim)
        for _ in range(MOST_ROUNDS):
            await asyncio.sleep(self._config.settle_s * self._rng.uniform(1.0, 2.0))
            await self.refresh()
            verdict = self.judge()
            kept = 0 if verdict.choose_again else kept + 1
            if verdict.settled or kept == KEPT_ROUNDS:
                break
            if verdict.choose_again:
                claim, placement = _reborn(claim, verdict), Placement(verdict.span, verdict.reason)
            await self.announce(claim)
        return self._chosen(placement)

    def _chosen(self, placement: Placement) -> Placement:
        self._report(events.SpanChosen(placement.span.first, placement.span.last, placement.reason))
        return placement

    def judge(self) -> Collision:
        """Whether the claimed span is still right, as far as the view knows. Raises LocalError before `join`."""
        me = self.view.peers.get(self.me)
        if me is None:
            raise LocalError("this peer has claimed no stages yet; join first")
        return judge_collision(self.view, me, self._config.stage_count, self._config.run)

    async def announce(self, claim: Claim) -> None:
        """Publishes this peer's claim, now and from now on."""
        self._own = claim
        self._merge([claim])
        await self._publish_claim()

    async def say(self, state: str) -> None:
        """Publishes the claim with another state: "serving", "leaving"."""
        if self._own is not None:
            await self.announce(replace(self._own, state=state))

    def _place(self, length: int, pinned: Span | None) -> Placement:
        view, count = self.view.without(self.me), self._config.stage_count
        return choose_span(view, count, length, self._rng) if pinned is None else pinned_span(view, count, pinned)

    # --- staying

    async def run(self) -> None:
        """Publishes and reads until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_publishing(), name="publish claim")
            group.create_task(self._keep_speaking(), name="publish progress")
            group.create_task(self._keep_reading(), name="read directory")

    async def _keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(min(PUBLISH_S, self._config.lifetime_s / 3.0)))
            await self._publish_claim()

    async def _keep_speaking(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(PROGRESS_S))
            progress = self._progress()
            if progress is not None:
                await self.tell(progress)

    async def tell(self, progress: Progress) -> None:
        """Publishes this peer's progress now."""
        if self._own is not None:
            progress = replace(progress, incarnation=self._own.incarnation)
            self._merge([progress])
            await self._publish(progress, self._config.lifetime_s)

    async def _keep_reading(self) -> None:
        while True:
            took = await self.refresh()
            await asyncio.sleep(self._jittered(read_interval_s(self._calm(), took)))

    def _calm(self) -> bool:
        """Nothing changed lately, and nobody is missing."""
        full = all(self.view.replicas(stage) for stage in range(self._config.stage_count))
        return full and self._now() - self._changed_at > 10.0

    async def refresh(self) -> float:
        """Reads every stage's claims and progress once, and merges them; how long that took, in seconds."""
        started = self._now()
        found = await asyncio.gather(self._read(Claim), self._read(Progress))
        took = self._now() - started
        self._linger_s = linger_s(took)
        others = [record for records in found for record in records if getattr(record, "peer", None) != self.me]
        self._merge(others)
        return took

    async def _read(self, kind: type[Record]) -> list[Record]:
        try:
            found = await self._directory.read_many(kind, range(self._config.stage_count))
        except AgoraError as error:
            self._in_trouble("read", error)
            return []
        return [record for records in found.values() for record in records]

    async def _publish_claim(self) -> None:
        if self._own is not None:
            leaving = self._own.state == "leaving"
            await self._publish(self._own, LEAVING_LIFETIME_S if leaving else self._config.lifetime_s)

    async def _publish(self, record: Record, lifetime_s: float) -> None:
        try:
            await self._directory.publish(record, self._identity, lifetime_s)
        except AgoraError as error:
            self._in_trouble("publish", error)

    def _in_trouble(self, what: str, error: AgoraError) -> None:
        self._report(events.DirectoryTrouble(what, f"{error.code}: {error}"))

    # --- the view

    def _merge(self, records: Sequence[Record]) -> None:
        now = self._unix()
        renewed = [*records, self._own] if self._own is not None else records
        self._adopt(merge(self.view, renewed, now, self._linger_s))

    def _adopt(self, view: View) -> None:
        before, self.view = self.view, view
        changed = changes(before, view)
        for event in changed:
            self._report(event)
        if changed:
            self._changed_at = self._now()
            for subscriber in self._subscribers:
                subscriber()

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _reborn(claim: Claim, verdict: Collision) -> Claim:
    """The claim of another span is a new life: the one before stays in the directory until it ends."""
    return replace(claim, span=verdict.span, incarnation=claim.incarnation + 1)


def read_interval_s(calm: bool, took_s: float) -> float:
    """How long to rest between two reads: a second while things change, four when calm, more where reading is slow."""
    return min(MOST_READ_S, max(CALM_READ_S if calm else READ_S, 3.0 * took_s))


def linger_s(took_s: float) -> float:
    """How long a peer is believed after a read that took `took_s` found it: until the next can have been answered.

    A slow read of the directory is no death. The next begins after the longest rest that follows this one, and may be
    twice as slow.
    """
    return (1.0 + JITTER) * read_interval_s(True, took_s) + max(SLOW_READ_S, 2.0 * took_s)


def changes(before: View, after: View) -> list[events.Event]:
    """What is worth telling about the difference: who came, went, or changed span, state or addresses."""
    told: list[events.Event] = []
    for peer, seen in after.peers.items():
        known = before.peers.get(peer)
        if known is None or _face(known) != _face(seen):
            told.append(events.PeerSeen(peer, seen.span.first, seen.span.last, seen.state))
    for peer in before.peers.keys() - after.peers.keys():
        told.append(events.PeerGone(peer, "its claim ended"))
    return told


def _face(seen: PeerView) -> tuple[object, ...]:
    return seen.span, seen.state, seen.incarnation, seen.addresses
