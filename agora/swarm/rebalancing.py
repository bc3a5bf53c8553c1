"""Decides whether a serving peer should move to another span, so that the slowest stage of the swarm gets faster. Pure.

Knows: the view, what stages ask of machines, what this machine can do. Must not know: how a peer moves, clocks. Every
peer judges for itself at random moments; the rules that keep many from moving at once are in docs/placement.md.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from agora_protocol.ids import PeerId, Span

from agora.swarm.placement import Ability, Placement, StageDemands
from agora.swarm.stage_supply import ENOUGH_HOLDERS, StageSupply, spans_of_length, spans_that_fit
from agora.swarm.view import PeerView, View

MIN_GAIN = 1.05
"""A peer moves only if the swarm's rate rises by more than this factor, or a thin stage is filled.

It bounds what is lost: of 10 replicas where 11 could be, a tenth is. Where stages are known by samples, the samples'
uncertainty is added, see StageSupply.
"""
MIN_REPLICAS = 3
"""Minimum number of peers that serve a stage when one of them gives it up: a move never takes one of the last two."""
HORIZON_S = 1800.0
"""Seconds for which a move is expected to pay; in a swarm of rented machines, few are there for much longer."""
MOVE_S = 60.0
"""Seconds that a move takes apart from fetching: to finish microbatches, to write checkpoints, to load."""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 2.0, 6.0
OUT_OF_TURN = 0.05
"""Where k peers before this one should move, it judges as if they could not with this probability, times k / n."""
MAX_FOLLOWERS = 32
"""At most this many of the other movers are simulated, before this peer's move and again after it."""


def next_look_s(rng: random.Random) -> float:
    """Returns the seconds until a peer next calls `judge_move`: random, so that peers do not judge at the same time."""
    return rng.uniform(SHORTEST_LOOK_S, LONGEST_LOOK_S)


def judge_move(view: View, me: PeerId, demands: StageDemands, ability: Ability, rng: random.Random) -> Placement | None:
    """Returns the span to which this peer should move, and why; None if it should stay.

    The peers that could be spared take turns, in the order of a hash of peer and slowest stage: this one judges what
    the stages would be after the moves of those before it. So peers that judge the same view at once go to different
    stages, and no more of them go than help. Those before it may be unable to move; so it judges without them with a
    small probability, see OUT_OF_TURN. One number is drawn from `rng` at each call, even if it is not needed.
    """
    draw, own = rng.random(), view.peers.get(me)
    if own is None or own.state != "serving" or own.span.last >= demands.stage_count:
        return None
    alone = _Judgement(view, own, demands, ability).judge()
    if alone is None:
        return None
    judgement = _Judgement(view, own, demands, ability)
    others = judgement.other_spare_peers()
    moved = judgement.apply_earlier_moves(others)
    if (placement := judgement.judge()) is not None:
        return placement
    return alone if draw * (1 + len(others)) < OUT_OF_TURN * moved else None


@dataclass(slots=True)
class _Rates:
    """The swarm's microbatches per second before a move, and after it and the moves of others that would follow."""

    now: float
    then: float


class _Judgement:
    """Decides whether one peer should move, from one view. Use it once: judging changes its StageSupply."""

    def __init__(self, view: View, own: PeerView, demands: StageDemands, ability: Ability) -> None:
        self._view = view
        self._own = own
        self._demands = demands
        self._ability = ability
        self._supply = StageSupply(view, demands, ability.speed)
        self._speed = self._supply.believed_speed(ability.speed or own.capacity * self._supply.work_of(own.span))
        self._own_rate = self._supply.rate_of(own)
        self._min_gain = MIN_GAIN + self._supply.uncertainty
        self._was_thin = bool(self._supply.thin_stages)
        self._serving = [len(view.replicas(stage)) for stage in range(demands.stage_count)]

    # --- who may move

    def is_uneven(self) -> bool:
        """Returns whether a move could help at all: a stage is thin, or the slowest is far below the even rate.

        If the view has a thin stage, only that counts: rates are evened out once it is filled and can give its state.
        """
        supply = self._supply
        return bool(supply.thin_stages) or (not self._was_thin and self._min_gain * supply.rate < supply.even_rate)

    def other_spare_peers(self) -> list[PeerView]:
        """Returns the other serving peers that could leave their stages without slowing the swarm; see `_is_spare`."""
        peers, is_thin, rate = self._view.peers.values(), bool(self._supply.thin_stages), self._supply.rate
        return [peer for peer in peers if peer.peer != self._own.peer and self._is_spare(peer, is_thin, rate)]

    def apply_earlier_moves(self, others: list[PeerView]) -> int:
        """Simulates the moves of those of `others` whose turn comes before this peer's; returns how many moved.

        Each goes where it helps most. Peers that are leaving are taken to be moving, and are placed first, not counted.
        Turns are by a hash of the peer and the slowest stage: nothing that a peer reports changes them. Stops after
        MAX_FOLLOWERS.
        """
        slowest = self._supply.rates.index(min(self._supply.rates))
        turns = {peer.peer: _turn(peer.peer, slowest) for peer in [*others, self._own]}
        for peer in self._view.peers.values():
            if peer.state == "leaving" and peer.span.last < self._supply.stage_count:
                self._settle(peer)
        moved = 0
        for peer in sorted(others, key=lambda other: turns[other.peer]):
            if turns[peer.peer] > turns[self._own.peer] or not self.is_uneven() or moved >= MAX_FOLLOWERS:
                break
            if self._is_still_spare(peer):
                moved += self._follow(peer)
        return moved

    def _is_still_spare(self, peer: PeerView) -> bool:
        """Returns whether a peer can be spared after the moves simulated by now."""
        return self._is_spare(peer, bool(self._supply.thin_stages), self._supply.rate)

    def _is_spare(self, peer: PeerView, is_thin: bool, swarm_rate: float) -> bool:
        """Returns whether the peer could leave: MIN_REPLICAS hold, and no stage of its gets slower than the slowest.

        is_thin: whether the supply has a thin stage; then rates do not matter. swarm_rate: of the slowest stage.
        """
        if peer.state != "serving" or peer.span.last >= self._supply.stage_count:
            return False
        supply, stages = self._supply, peer.span.stages
        if any(min(self._serving[stage], supply.holders[stage]) < MIN_REPLICAS for stage in stages):
            return False
        if is_thin:
            return True
        rate = supply.rate_of(peer)
        return all(supply.rates[stage] - rate > swarm_rate for stage in stages)

    def may_hold(self, span: Span) -> bool:
        """Returns whether this peer may move to `span`.

        | stage                    | peers that serve it, this one included             |
        |--------------------------|----------------------------------------------------|
        | given up                 | at least MIN_REPLICAS                            |
        | kept, but away meanwhile | at least two, or the span has a stage without any  |
        """
        fills_empty = any(self._supply.holders[stage] == 0 for stage in span.stages)
        for stage in self._own.span.stages:
            stay = min(self._serving[stage], self._supply.holders[stage])  # of those that serve, after others' moves
            if stage not in span and stay < MIN_REPLICAS:
                return False
            if stage in span and stay < ENOUGH_HOLDERS and not fills_empty:
                return False
        return True

    # --- whether it pays

    def judge(self) -> Placement | None:
        """Returns the best span if moving there beats staying by the least gain and repays its cost; otherwise None.

        A move that fills a stage with fewer than two peers needs no gain. Leaves the supply with the move made.
        """
        if not self.is_uneven():
            return None
        spans = [s for s in spans_that_fit(self._ability.longest) if s != self._own.span and self.may_hold(s)]
        if not spans:
            return None
        supply, own = self._supply, self._own
        most = max(len(span) for span in spans)
        thinness, levels, now = supply.thinness(most), supply.levels(), supply.rate
        supply.remove(own.span, self._own_rate)
        span = _of_equals(supply.best_spans(spans, self._speed, self._ability.bandwidth), own.peer)
        supply.add(span, supply.rate_at(span, self._speed, self._ability.bandwidth))
        fills = supply.thinness(most) < thinness
        if not fills and (supply.thinness(most) > thinness or supply.levels() <= levels):
            return None
        rates = _Rates(now, supply.rate if fills else self._rate_after_reaction(self._min_gain * now))
        if not fills and rates.then <= self._min_gain * now:
            return None
        if not self._is_repaid(span, rates, fills):
            return None
        if fills:
            return Placement(span, f"stages {span} have a stage with fewer than two peers")
        return Placement(span, f"the swarm's slowest stage gets {rates.then / max(now, 1e-9) - 1:.0%} faster")

    def _rate_after_reaction(self, wanted: float) -> float:
        """Simulates the moves of others, each where it helps most, until the rate is above `wanted`; returns the rate.

        Only peers that can be spared move, each once, and keep the lengths of their spans.
        """
        supply, followers = self._supply, 0
        for peer in sorted(
            self.other_spare_peers(), key=lambda seen: (-min(supply.rates[s] for s in seen.span.stages), seen.peer)
        ):
            if supply.rate > wanted or followers >= MAX_FOLLOWERS:
                break
            if self._is_still_spare(peer):
                followers += self._follow(peer)
        return supply.rate

    def _follow(self, peer: PeerView) -> bool:
        """Simulates the move of another peer to where it helps most. Returns whether that is not its present span."""
        self._supply.remove(peer.span, self._supply.rate_of(peer))
        return self._settle(peer) != peer.span

    def _settle(self, peer: PeerView) -> Span:
        """Adds a peer that is not in the supply where it helps most, keeping its span's length; returns the span."""
        supply = self._supply
        spans, speed = spans_of_length(len(peer.span), supply.stage_count), supply.speed_of(peer)
        span = _of_equals(supply.best_spans(spans, speed, peer.bandwidth), peer.peer)
        supply.add(span, supply.rate_at(span, speed, peer.bandwidth))
        return span

    def _is_repaid(self, span: Span, rates: _Rates, fills: bool) -> bool:
        """Returns whether the time won within HORIZON_S exceeds the time of the move: MOVE_S, and fetching new state.

        The time won is HORIZON_S * (1 - now / then); if `fills`, which means that the move fills a thin stage,
        HORIZON_S: without that the swarm may stop.
        """
        new = [stage for stage in span.stages if stage not in self._own.span]
        fetched = sum(self._demands.state_bytes[stage] for stage in new)
        seconds = fetched / self._ability.bandwidth if self._ability.bandwidth > 0 else 0.0
        won = HORIZON_S if fills else HORIZON_S * (1.0 - rates.now / rates.then)
        return seconds + MOVE_S < won


def _turn(peer: PeerId, slowest: int) -> bytes:
    """Returns the hash by which peers take turns to help the slowest stage."""
    return hashlib.sha256(f"agora move 1\0{slowest}\0{peer}".encode()).digest()


def _of_equals(spans: list[Span], peer: PeerId) -> Span:
    """Returns the one of equally good spans that a hash picks for a peer, so that others know where it goes."""
    digest = hashlib.sha256(f"agora move to 1\0{peer}".encode()).digest()
    return spans[int.from_bytes(digest[:4], "big") % len(spans)]
