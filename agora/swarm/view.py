"""Merges signed records into what this peer knows of the swarm: every live peer's span, state and progress. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress, Record, StageAccount

from agora.core.moving_average import MovingAverage

STEP_S_WEIGHT = 0.3  # the weight of the newest value in PeerView.mean_step_s
_NO_STEPS = MovingAverage(STEP_S_WEIGHT)


@dataclass(frozen=True, slots=True)
class PeerView:
    """What is known of one live peer, from its latest claim and progress record.

    state: "joining", "serving" or "leaving". steps, accounts: one entry for each stage of the span; empty before the
    first progress. capacity: microbatches per second for the span; 0 for unknown. bandwidth: bytes per second; 0 for
    unknown. expires_unix: when the peer is dropped unless its claim is read again. stepped_unix: when any of the steps
    was last seen to grow. mean_step_s: seconds between two steps of a stage. The others: see Claim and Progress.
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
        """Returns how many optimizer steps the peer has taken at `stage`; 0 if unknown."""
        index = stage - self.span.first
        return self.steps[index] if 0 <= index < len(self.steps) else 0

    def account_of(self, stage: int) -> StageAccount:
        """Returns the token counts that the peer publishes for `stage`; all zeros if unknown."""
        index = stage - self.span.first
        return self.accounts[index] if 0 <= index < len(self.accounts) else StageAccount()


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """How many peers one stage has, by estimate, in a run that is too large for every peer's claim to be read.

    peers: estimated number of peers that claim the stage, in any state, verified or not. period_s: seconds within
    which the claim of each peer of the stage in the view is read again.
    """

    peers: float
    period_s: float


@dataclass(frozen=True)
class View:
    """What one peer knows of the swarm at one moment: every peer that seems to be live, by its id.

    peers: the verified ones, this peer included if it has a claim. unverified: peers whose claims were read, but with
    whom no HELLO was exchanged; they count only when a stage's size is estimated. estimates: by stage, the number of
    peers if only some of the run's claims are read; empty if all are.
    """

    peers: Mapping[PeerId, PeerView] = field(default_factory=dict)
    estimates: Mapping[int, StageEstimate] = field(default_factory=dict)
    unverified: Mapping[PeerId, PeerView] = field(default_factory=dict)

    def replicas(self, stage: int) -> tuple[PeerView, ...]:
        """Returns the serving peers that hold `stage`, sorted by id; only these are sent microbatches."""
        return self._serving_by_stage.get(stage, ())

    def claimants(self, stage: int) -> tuple[PeerView, ...]:
        """Returns the peers that serve `stage` or are joining it, sorted by id; placement counts these."""
        return self._claiming_by_stage.get(stage, ())

    def replica_count(self, stage: int) -> int:
        """Returns how many peers serve `stage`, scaled up if the stage is only partly read."""
        return self._scale_to_stage(stage, len(self.replicas(stage)))

    def claimant_count(self, stage: int) -> int:
        """Returns how many peers serve `stage` or are joining it, scaled up if the stage is only partly read."""
        return self._scale_to_stage(stage, len(self.claimants(stage)))

    def period_s(self, stage: int) -> float:
        """Returns the seconds within which each known peer of `stage` is read again; 0 if the stage has no estimate."""
        return self.estimates[stage].period_s if stage in self.estimates else 0.0

    def without(self, *peers: PeerId) -> View:
        if not peers:
            return self
        removed = frozenset(peers)
        remaining = {other: known for other, known in self.peers.items() if other not in removed}
        unverified = {other: known for other, known in self.unverified.items() if other not in removed}
        return View(remaining, self.estimates, unverified)

    def with_verified(self, is_verified: Callable[[PeerId], bool]) -> View:
        """Returns a copy of the view in which `is_verified`, called with each of its peers, says which are verified."""
        everybody = {**self.peers, **self.unverified}
        peers = {peer: known for peer, known in everybody.items() if is_verified(peer)}
        unverified = {peer: known for peer, known in everybody.items() if peer not in peers}
        return View(peers, self.estimates, unverified)

    def _scale_to_stage(self, stage: int, count: int) -> int:
        # count * estimate / known, where both count verified and unverified peers in any state: of the claims that were
        # not read, the same fraction is taken to be verified as of those that were.
        estimate = self.estimates.get(stage)
        known = self._holders_by_stage.get(stage, 0)
        if estimate is None or estimate.peers <= known:
            return count
        return round(estimate.peers * count / max(1, known))

    @cached_property
    def _holders_by_stage(self) -> Mapping[int, int]:
        everybody = (*self.peers.values(), *self.unverified.values())
        return Counter(stage for known in everybody for stage in known.span.stages)

    @cached_property
    def _serving_by_stage(self) -> Mapping[int, tuple[PeerView, ...]]:
        claiming = self._claiming_by_stage
        return {stage: tuple(p for p in held_by if p.state == "serving") for stage, held_by in claiming.items()}

    @cached_property
    def _claiming_by_stage(self) -> Mapping[int, tuple[PeerView, ...]]:
        holders: dict[int, list[PeerView]] = defaultdict(list)
        for known in sorted(self.peers.values(), key=lambda known: known.peer):
            for stage in known.span.stages if known.state != "leaving" else ():
                holders[stage].append(known)
        return {stage: tuple(held_by) for stage, held_by in holders.items()}


def merge(view: View, records: Iterable[Record], now_unix: float, linger_s: float) -> View:
    """Returns a copy of `view` into which verified, unexpired claims and progress records are merged at `now_unix`.

    The newest incarnation of a peer wins. A claim, also one that repeats what is known, keeps its peer in the view for
    `linger_s` seconds. Progress without a claim of the same incarnation and span is ignored. The result has the
    unverified peers among its peers: call `with_verified` to separate them again.
    """
    peers = {**view.peers, **view.unverified}
    for record in sorted(records, key=lambda record: record.KIND):  # claims first
        if isinstance(record, Claim):
            _merge_claim(peers, record, now_unix, linger_s)
        elif isinstance(record, Progress):
            _merge_progress(peers, record, now_unix)
    return View({peer: known for peer, known in peers.items() if known.expires_unix > now_unix}, view.estimates)


# The states of a claim, in the order in which one incarnation of a peer goes through them.
_STATES = ("joining", "serving", "leaving")


def _merge_claim(peers: dict[PeerId, PeerView], claim: Claim, now_unix: float, linger_s: float) -> None:
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
    known = peers.get(progress.peer)
    if known is None or known.incarnation != progress.incarnation or known.span != progress.span:
        return
    if any(new < old for new, old in zip(progress.steps, known.steps, strict=False)):
        return  # an older record, read from a slower node of the directory
    grown = sum(progress.steps) - sum(known.steps)
    mean_step_s = known.mean_step_s
    # A sample: the seconds since the last progress, divided by the mean number of steps of a stage.
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
