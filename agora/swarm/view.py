"""What one peer believes of the swarm: every live peer's span, state and progress, merged from signed records. Pure.

Knows claims, progress and their age. Must not know where records come from, nor any clock: `now_unix` is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress, Record

STEP_EMA = 0.3


@dataclass(frozen=True, slots=True)
class PeerView:
    """One live peer. `steps` has one number per stage of the span; `stepped_unix` is when any of them last grew.

    `step_s` is the mean time between two steps of this peer as far as seen, None before the second.
    """

    peer: PeerId
    span: Span
    incarnation: int
    addresses: tuple[str, ...] = ()
    state: str = "joining"
    capacity: float = 0.0
    bandwidth: float = 0.0
    steps: tuple[int, ...] = ()
    tokens_per_second: float = 0.0
    loss: float | None = None
    queue: int = 0
    completed: int = 0
    expires_unix: float = 0.0
    seen_unix: float = 0.0
    stepped_unix: float | None = None
    step_s: float | None = None

    def step_of(self, stage: int) -> int:
        """Optimizer steps taken at `stage`; 0 when unknown or outside the span."""
        index = stage - self.span.first
        return self.steps[index] if 0 <= index < len(self.steps) else 0


@dataclass(frozen=True, slots=True)
class View:
    """Every peer believed to be live, by id."""

    peers: Mapping[PeerId, PeerView] = field(default_factory=dict)

    def replicas(self, stage: int) -> list[PeerView]:
        """The peers that serve `stage` now, by id; only these are sent microbatches."""
        return [p for p in self._by_id() if stage in p.span and p.state == "serving"]

    def claimants(self, stage: int) -> list[PeerView]:
        """The peers that serve `stage` or are about to; what placement counts."""
        return [p for p in self._by_id() if stage in p.span and p.state != "leaving"]

    def without(self, peer: PeerId) -> View:
        """The view as it would be if `peer` were gone."""
        return View({other: seen for other, seen in self.peers.items() if other != peer})

    def _by_id(self) -> list[PeerView]:
        return sorted(self.peers.values(), key=lambda seen: seen.peer)


def merge(view: View, records: Iterable[Record], now_unix: float, linger_s: float) -> View:
    """The view after these verified, unexpired records were found at `now_unix`.

    The newest incarnation of a peer wins. A peer whose records were not found for `linger_s` is dropped; progress of a
    peer that has no claim of the same incarnation is ignored. A record that says again what is known renews it.
    """
    peers = dict(view.peers)
    found = list(records)
    for record in found:
        if isinstance(record, Claim):
            _take_claim(peers, record, now_unix, linger_s)
    for record in found:
        if isinstance(record, Progress):
            _take_progress(peers, record, now_unix)
    return View({peer: seen for peer, seen in peers.items() if seen.expires_unix > now_unix})


_STATES = ("joining", "serving", "leaving")


def _take_claim(peers: dict[PeerId, PeerView], claim: Claim, now_unix: float, linger_s: float) -> None:
    known = peers.get(claim.peer)
    if known is not None and known.incarnation > claim.incarnation:
        return
    same = known is not None and known.incarnation == claim.incarnation and known.span == claim.span
    if same and known is not None and _STATES.index(claim.state) < _STATES.index(known.state):
        return  # an older record of the same life, still found under another stage's key
    before = known if same and known is not None else PeerView(claim.peer, claim.span, claim.incarnation)
    peers[claim.peer] = replace(
        before,
        addresses=claim.addresses,
        state=claim.state,
        capacity=claim.capacity,
        bandwidth=claim.bandwidth,
        expires_unix=now_unix + linger_s,
        seen_unix=now_unix,
    )


def _take_progress(peers: dict[PeerId, PeerView], progress: Progress, now_unix: float) -> None:
    known = peers.get(progress.peer)
    if known is None or known.incarnation != progress.incarnation or known.span != progress.span:
        return
    if any(new < old for new, old in zip(progress.steps, known.steps, strict=False)):
        return  # read back from a slower node of the directory
    grown = sum(progress.steps) - sum(known.steps) if known.steps else 0
    peers[progress.peer] = replace(
        known,
        steps=progress.steps,
        tokens_per_second=progress.tokens_per_second,
        loss=progress.loss,
        queue=progress.queue,
        completed=progress.completed,
        step_s=_step_seconds(known, grown / len(progress.span), now_unix) if grown else known.step_s,
        stepped_unix=_stepped(known, progress, grown, now_unix),
    )


def _stepped(known: PeerView, progress: Progress, grown: int, now_unix: float) -> float | None:
    if grown or (not known.steps and any(progress.steps)):
        return now_unix
    return known.stepped_unix


def _step_seconds(known: PeerView, steps: float, now_unix: float) -> float | None:
    if known.stepped_unix is None or steps <= 0:
        return known.step_s
    seconds = (now_unix - known.stepped_unix) / steps
    return seconds if known.step_s is None else known.step_s + STEP_EMA * (seconds - known.step_s)
