"""Merges signed records into what this peer knows of the swarm: every live peer's span, state and progress. Pure.

Knows: claims, progress and their age. Must not know: where records come from, nor any clock: `now_unix` is passed in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress, Record, StageAccount

from agora.moving_average import MovingAverage

STEP_S_WEIGHT = 0.3
"""The weight of the newest value in PeerView.mean_step_s."""
_NO_STEPS = MovingAverage(STEP_S_WEIGHT)


@dataclass(frozen=True, slots=True)
class PeerView:
    """What is known of one live peer. Immutable.

    steps, accounts: optimizer steps taken and token counts, one entry for each stage of the span; empty before the
    first progress. capacity: microbatches per second; bandwidth: bytes per second; both 0 for unknown. expires_unix:
    when the peer is dropped unless its claim is read again. stepped_unix: when any of the steps last grew. metrics,
    waits_for, note: see Progress. mean_step_s: the moving average of the seconds between two steps of a stage; it has
    no value before the second step.
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
    expires_unix: float = 0.0
    seen_unix: float = 0.0
    stepped_unix: float | None = None
    mean_step_s: MovingAverage = _NO_STEPS
    accounts: tuple[StageAccount, ...] = ()
    metrics: tuple[float, ...] = ()
    waits_for: str = ""
    note: str = ""
    reachability: str = "unknown"
    relays_for: int = 0

    def step_of(self, stage: int) -> int:
        """Returns the optimizer steps taken at `stage`; 0 when unknown or outside the span."""
        index = stage - self.span.first
        return self.steps[index] if 0 <= index < len(self.steps) else 0

    def account_of(self, stage: int) -> StageAccount:
        """Returns the peer's token counts of `stage`; all zeros when unknown or outside the span."""
        index = stage - self.span.first
        return self.accounts[index] if 0 <= index < len(self.accounts) else StageAccount()


@dataclass(frozen=True, slots=True)
class StageSample:
    """What is known of a stage's size in a run that is too large to be read whole. Immutable.

    peers: estimated number of peers that claim the stage. period_s: seconds within which each peer in the view is read
    again.
    """

    peers: float
    period_s: float


@dataclass(frozen=True)
class View:
    """Every peer that is believed to be live, by its id. Immutable; each stage's peers are found and sorted only once.

    samples: by stage, if only a part of the run's peers is read; empty if all are. strangers: peers whose claims were
    read, but with whom no HELLO was exchanged. They count only when a stage's size is estimated: of the claims that
    were not read, the same part is taken to be of members as of those that were read.
    """

    peers: Mapping[PeerId, PeerView] = field(default_factory=dict)
    samples: Mapping[int, StageSample] = field(default_factory=dict)
    strangers: Mapping[PeerId, PeerView] = field(default_factory=dict)

    def replicas(self, stage: int) -> tuple[PeerView, ...]:
        """Returns the peers that serve `stage` now, sorted by id; only these are sent microbatches."""
        return self._serving_by_stage.get(stage, ())

    def claimants(self, stage: int) -> tuple[PeerView, ...]:
        """Returns the peers that serve `stage` or are joining, sorted by id; placement counts these."""
        return self._claiming_by_stage.get(stage, ())

    def replica_count(self, stage: int) -> int:
        """Returns how many peers serve `stage`: those in the view, or the estimate if that is more."""
        return self._scale_to_stage(stage, len(self.replicas(stage)))

    def claimant_count(self, stage: int) -> int:
        """Returns how many peers serve `stage` or are joining: those in the view, or the estimate if that is more."""
        return self._scale_to_stage(stage, len(self.claimants(stage)))

    def period_s(self, stage: int) -> float:
        """Returns the seconds within which each peer of a sampled stage is read again; 0 where all peers are read."""
        return self.samples[stage].period_s if stage in self.samples else 0.0

    def without(self, *peers: PeerId) -> View:
        """Returns a view without `peers` among its peers and strangers; this view itself if none are named."""
        if not peers:
            return self
        left = {other: seen for other, seen in self.peers.items() if other not in peers}
        strangers = {other: seen for other, seen in self.strangers.items() if other not in peers}
        return View(left, self.samples, strangers)

    def of_members(self, is_member: Callable[[PeerId], bool]) -> View:
        """Returns a new view in which `is_member` decides who, of this one's peers and strangers, is a peer."""
        everybody = {**self.peers, **self.strangers}
        peers = {peer: seen for peer, seen in everybody.items() if is_member(peer)}
        strangers = {peer: seen for peer, seen in everybody.items() if peer not in peers}
        return View(peers, self.samples, strangers)

    def _scale_to_stage(self, stage: int, count: int) -> int:
        """Scales `count`, of the stage's peers in the view, to its estimated size; `count` if that is no larger.

        The estimate counts strangers and leaving peers too, so it is divided by their number in the view.
        """
        sample, known = self.samples.get(stage), self._holders_by_stage.get(stage, 0)
        return count if sample is None or sample.peers <= known else round(sample.peers * count / max(1, known))

    @cached_property
    def _holders_by_stage(self) -> Mapping[int, int]:
        """The number of peers and strangers of each stage, in any state."""
        everybody = (*self.peers.values(), *self.strangers.values())
        return Counter(stage for seen in everybody for stage in seen.span.stages)

    @cached_property
    def _serving_by_stage(self) -> Mapping[int, tuple[PeerView, ...]]:
        """The serving peers of each stage, sorted by id."""
        claiming = self._claiming_by_stage
        return {stage: tuple(p for p in held_by if p.state == "serving") for stage, held_by in claiming.items()}

    @cached_property
    def _claiming_by_stage(self) -> Mapping[int, tuple[PeerView, ...]]:
        """The serving and joining peers of each stage, sorted by id."""
        holders: dict[int, list[PeerView]] = defaultdict(list)
        for seen in sorted(self.peers.values(), key=lambda seen: seen.peer):
            for stage in seen.span.stages if seen.state != "leaving" else ():
                holders[stage].append(seen)
        return {stage: tuple(held_by) for stage, held_by in holders.items()}


def merge(view: View, records: Iterable[Record], now_unix: float, linger_s: float) -> View:
    """Returns a new view, after these verified, unexpired records were read at `now_unix`.

    The newest incarnation of a peer wins. A claim, also one that repeats what is known, keeps its peer in the view for
    `linger_s` seconds; then it is dropped. Progress of a peer without a claim of the same incarnation is ignored.
    """
    peers = {**view.peers, **view.strangers}
    for record in sorted(records, key=lambda record: record.KIND):  # claims first
        if isinstance(record, Claim):
            _merge_claim(peers, record, now_unix, linger_s)
        elif isinstance(record, Progress):
            _merge_progress(peers, record, now_unix)
    return View({peer: seen for peer, seen in peers.items() if seen.expires_unix > now_unix}, view.samples)


_STATES = ("joining", "serving", "leaving")
"""The states of a claim, in the order in which one incarnation of a peer goes through them."""


def _merge_claim(peers: dict[PeerId, PeerView], claim: Claim, now_unix: float, linger_s: float) -> None:
    """Puts a claim into `peers` for `linger_s`, unless a later one is known.

    A new incarnation, or another span, drops the progress.
    """
    known = peers.get(claim.peer)
    if known is not None and known.incarnation > claim.incarnation:
        return
    if known is None or known.incarnation != claim.incarnation or known.span != claim.span:
        known = PeerView(claim.peer, claim.span, claim.incarnation)
    elif _STATES.index(claim.state) < _STATES.index(known.state):
        return  # an older record of the same incarnation, read under another stage's key
    peers[claim.peer] = replace(
        known,
        addresses=claim.addresses,
        state=claim.state,
        capacity=claim.capacity,
        bandwidth=claim.bandwidth,
        reachability=claim.reachability,
        relays_for=claim.relays_for,
        expires_unix=now_unix + linger_s,
        seen_unix=now_unix,
    )


def _merge_progress(peers: dict[PeerId, PeerView], progress: Progress, now_unix: float) -> None:
    """Puts progress into `peers`, and adds the mean seconds of a step since the last one to `mean_step_s`.

    Ignores progress of a peer without a claim of the same incarnation and span, and if any step would fall.
    """
    known = peers.get(progress.peer)
    if known is None or known.incarnation != progress.incarnation or known.span != progress.span:
        return
    if any(new < old for new, old in zip(progress.steps, known.steps, strict=False)):
        return  # an older record, read from a slower node of the directory
    grown = sum(progress.steps) - sum(known.steps)
    mean_step_s = known.mean_step_s
    if grown and known.steps and known.stepped_unix is not None:
        mean_step_s = mean_step_s.with_sample((now_unix - known.stepped_unix) * len(progress.span) / grown)
    peers[progress.peer] = replace(
        known,
        steps=progress.steps,
        tokens_per_second=progress.tokens_per_second,
        loss=progress.loss,
        mean_step_s=mean_step_s,
        accounts=tuple(map(StageAccount._make, progress.accounts)),
        metrics=progress.metrics,
        waits_for=progress.waits_for,
        note=progress.note,
        stepped_unix=now_unix if grown else known.stepped_unix,
    )
