"""Decides whether a serving peer should move to another span, so that the slowest stage of the swarm gets faster.

Deterministic: random numbers are passed in.

Every peer judges for itself at random moments; the rules that keep many from moving together are in
docs/understand/placement.md.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

from agora_protocol.ids import PeerId, Span

from agora.swarm.placement import Placement
from agora.swarm.stage_capacity import (
    ENOUGH_HOLDERS,
    MachineCapacity,
    StageCapacity,
    StageNeeds,
    spans_of_length,
    spans_that_fit,
)
from agora.swarm.view import PeerView, View

# A peer moves only if the swarm's rate rises by more than this factor, or a thin stage is filled. It bounds what is
# lost: a stage with 10 replicas where 11 could be loses up to a tenth of its rate. Where stages are known by samples,
# the samples' uncertainty is added, see StageCapacity.
MIN_GAIN = 1.05
# Minimum number of peers that serve a stage when one of them gives it up: a move never takes one of the last two.
MIN_REPLICAS = 3
# A move is expected to pay for at most this many seconds: in a swarm of rented machines, few stay for much longer.
PAYBACK_WINDOW_S = 1800.0
# Seconds that a move takes apart from fetching: to finish microbatches, to write checkpoints, to load.
MOVE_DURATION_S = 15.0
# Bounds of the random seconds between two calls of `judge_move` by a peer.
MIN_JUDGE_INTERVAL_S, MAX_JUDGE_INTERVAL_S = 2.0, 6.0
# Of n peers that could be spared, this one included, k should move before this one; but they may be unable to. With
# this probability, times k / n, a peer judges as if they could not.
OUT_OF_TURN = 0.05
# At most this many of the other movers are simulated, before this peer's move and again after it.
MAX_SIMULATED_MOVES = 32


def rebalance_interval_s(rng: random.Random) -> float:
    """Returns the seconds to wait before the next `judge_move`: random, so that peers do not judge at the same time."""
    return rng.uniform(MIN_JUDGE_INTERVAL_S, MAX_JUDGE_INTERVAL_S)


def judge_move(
    view: View, me: PeerId, needs: StageNeeds, machine: MachineCapacity, rng: random.Random, served_s: float = math.inf
) -> Placement | None:
    """Returns the span to which this peer should move, and why; None if it should stay, or does not serve.

    A move must fill a thin stage, or raise the swarm's rate by more than MIN_GAIN; and repay the time that it takes.

    The peers that could be spared take turns, in the order of a hash of peer and slowest stage: this peer judges the
    stages as they would be after the moves of the peers before it. So peers that judge the same view at the same time
    go to different stages, and no more go than are needed. One number is drawn from `rng` at each call.

    served_s: seconds for which this peer has served its span. A move is expected to pay for as long again, so that
    peers do not move to and fro while measured speeds vary a little.
    """
    draw = rng.random()
    own = view.peers.get(me)
    if own is None or own.state != "serving" or own.span.last >= needs.stage_count:
        return None
    alone = _MoveEvaluation(view, own, needs, machine, served_s).choose_span()
    if alone is None:
        return None
    evaluation = _MoveEvaluation(view, own, needs, machine, served_s)
    others = evaluation.other_spare_peers()
    moved = evaluation.apply_earlier_moves(others)
    if (placement := evaluation.choose_span()) is not None:
        return placement
    return alone if draw * (1 + len(others)) < OUT_OF_TURN * moved else None


# The swarm's microbatches per second: before a move, and after it and the moves that would follow.
@dataclass(slots=True)
class _Rates:
    before: float
    after: float


# One evaluation of whether one peer should move. Use it once: each simulated move changes its StageCapacity.
class _MoveEvaluation:
    def __init__(self, view: View, own: PeerView, needs: StageNeeds, machine: MachineCapacity, served_s: float) -> None:
        self._view = view
        self._horizon_s = min(PAYBACK_WINDOW_S, served_s)
        self._own = own
        self._needs = needs
        self._machine = machine
        self._capacity = StageCapacity(view, needs, machine.speed)
        self._speed = self._capacity.plausible_speed(machine.speed or own.capacity * self._capacity.work_of(own.span))
        self._own_rate = self._capacity.rate_of(own)
        self._min_gain = MIN_GAIN + self._capacity.uncertainty
        self._was_thin = bool(self._capacity.thin_stages)
        self._serving = [len(view.replicas(stage)) for stage in range(needs.stage_count)]

    # --- who may move

    def is_uneven(self) -> bool:
        # Whether a move could help at all. If the view had a thin stage at the beginning, only thin stages count: rates
        # are evened out once these are filled and can serve their state.
        capacity = self._capacity
        return bool(capacity.thin_stages) or (
            not self._was_thin and self._min_gain * capacity.rate < capacity.even_rate
        )

    def other_spare_peers(self) -> list[PeerView]:
        is_thin = bool(self._capacity.thin_stages)
        rate = self._capacity.rate
        others = (peer for peer in self._view.peers.values() if peer.peer != self._own.peer)
        return [peer for peer in others if self._is_spare(peer, is_thin, rate)]

    def apply_earlier_moves(self, others: list[PeerView]) -> int:
        slowest = self._capacity.rates.index(min(self._capacity.rates))
        turns = {peer.peer: _turn(peer.peer, slowest) for peer in [*others, self._own]}
        for peer in self._view.peers.values():
            if peer.state == "leaving" and peer.span.last < self._capacity.stage_count:
                self._add_where_best(peer)
        moved = 0
        for peer in sorted(others, key=lambda other: turns[other.peer]):
            if turns[peer.peer] > turns[self._own.peer] or not self.is_uneven() or moved >= MAX_SIMULATED_MOVES:
                break
            if self._is_still_spare(peer):
                moved += self._simulate_move(peer)
        return moved

    def _is_still_spare(self, peer: PeerView) -> bool:
        return self._is_spare(peer, bool(self._capacity.thin_stages), self._capacity.rate)

    def _is_spare(self, peer: PeerView, is_thin: bool, swarm_rate: float) -> bool:
        if peer.state != "serving" or peer.span.last >= self._capacity.stage_count:
            return False
        capacity = self._capacity
        stages = peer.span.stages
        if any(min(self._serving[stage], capacity.holders[stage]) < MIN_REPLICAS for stage in stages):
            return False
        if is_thin:
            return True
        rate = capacity.rate_of(peer)
        return all(capacity.rates[stage] - rate > swarm_rate for stage in stages)

    def may_hold(self, span: Span) -> bool:
        # While a peer moves, it serves nothing, not even the stages that it keeps. How many must serve, it included:
        #   a stage given up: MIN_REPLICAS
        #   a stage kept, but away meanwhile: two, unless `span` has a stage without any
        fills_empty = any(self._capacity.holders[stage] == 0 for stage in span.stages)
        for stage in self._own.span.stages:
            stay = min(self._serving[stage], self._capacity.holders[stage])  # how many still serve after others' moves
            if stage not in span and stay < MIN_REPLICAS:
                return False
            if stage in span and stay < ENOUGH_HOLDERS and not fills_empty:
                return False
        return True

    # --- whether it pays

    def choose_span(self) -> Placement | None:
        # The moves stay simulated, whatever is returned. A move gains enough if the swarm's rate, after the moves of
        # others that would follow, rises by the factor `_min_gain`; one that fills a thin stage needs no gain.
        if not self.is_uneven():
            return None
        spans = [s for s in spans_that_fit(self._machine.max_span_lengths) if s != self._own.span and self.may_hold(s)]
        if not spans:
            return None
        capacity = self._capacity
        own = self._own
        max_length = max(len(span) for span in spans)
        thinness = capacity.thinness(max_length)
        balance = capacity.balance_key()
        rate_before = capacity.rate
        capacity.remove(own.span, self._own_rate)
        span = _pick_by_hash(capacity.best_spans(spans, self._speed, self._machine.bandwidth), own.peer)
        capacity.add(span, capacity.rate_at(span, self._speed, self._machine.bandwidth))
        fills = capacity.thinness(max_length) < thinness
        if not fills and (capacity.thinness(max_length) > thinness or capacity.balance_key() <= balance):
            return None
        rates = _Rates(rate_before, capacity.rate if fills else self._rate_after_reaction(self._min_gain * rate_before))
        if not fills and rates.after <= self._min_gain * rate_before:
            return None
        if not self._is_repaid(span, rates, fills):
            return None
        if fills:
            return Placement(span, f"stages {span} have a stage with fewer than two peers")
        return Placement(span, f"the swarm's slowest stage gets {rates.after / max(rate_before, 1e-9) - 1:.0%} faster")

    def _rate_after_reaction(self, wanted: float) -> float:
        capacity = self._capacity
        simulated = 0
        for peer in sorted(
            self.other_spare_peers(), key=lambda seen: (-min(capacity.rates[s] for s in seen.span.stages), seen.peer)
        ):
            if capacity.rate > wanted or simulated >= MAX_SIMULATED_MOVES:
                break
            if self._is_still_spare(peer):
                simulated += self._simulate_move(peer)
        return capacity.rate

    def _simulate_move(self, peer: PeerView) -> bool:
        self._capacity.remove(peer.span, self._capacity.rate_of(peer))
        return self._add_where_best(peer) != peer.span

    def _add_where_best(self, peer: PeerView) -> Span:
        capacity = self._capacity
        spans = spans_of_length(len(peer.span), capacity.stage_count)
        speed = capacity.speed_of(peer)
        span = _pick_by_hash(capacity.best_spans(spans, speed, peer.bandwidth), peer.peer)
        capacity.add(span, capacity.rate_at(span, speed, peer.bandwidth))
        return span

    def _is_repaid(self, span: Span, rates: _Rates, fills: bool) -> bool:
        new = [stage for stage in span.stages if stage not in self._own.span]
        fetched = sum(self._needs.state_bytes[stage] for stage in new)
        seconds = fetched / self._machine.bandwidth if self._machine.bandwidth > 0 else 0.0
        # A move that fills a thin stage is worth the whole horizon: without it the swarm may stop.
        won = PAYBACK_WINDOW_S if fills else self._horizon_s * (1.0 - rates.before / rates.after)
        return seconds + MOVE_DURATION_S < won


def _turn(peer: PeerId, slowest: int) -> bytes:
    # A hash decides, because nothing that a peer reports may change whose turn it is.
    return hashlib.sha256(f"agora move 1\0{slowest}\0{peer}".encode()).digest()


def _pick_by_hash(spans: list[Span], peer: PeerId) -> Span:
    # A hash decides, so that every peer knows where the others go.
    digest = hashlib.sha256(f"agora move to 1\0{peer}".encode()).digest()
    return spans[int.from_bytes(digest[:4], "big") % len(spans)]
