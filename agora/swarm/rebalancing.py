"""Decides whether a serving peer should move to another span, so that the slowest stage of the swarm gets faster. Pure.

Knows: the view, what stages ask of machines, what this machine can do. Must not know: how a peer moves, clocks. Every
peer judges for itself at random moments; the rules that keep many from moving at once are in docs/placement.md.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

from agora_protocol.ids import PeerId, Span

from agora.swarm.placement import Ability, Placement, StageDemands
from agora.swarm.stage_supply import ENOUGH_HOLDERS, StageSupply, spans_of_length, spans_that_fit
from agora.swarm.view import PeerView, View

LEAST_GAIN = 1.1
"""A peer moves only if the swarm's rate rises by more than this factor, or a thin stage is filled.

It bounds what is lost: from random starts the swarm's rate ended at 0.80 of an even one with 1.25, at 0.92 with 1.1.
"""
LEAST_REPLICAS = 3
"""The least number of peers that serve a stage when one of them gives it up: a move never takes one of the last two."""
HORIZON_S = 1800.0
"""Seconds for which a move is expected to pay; in a swarm of rented machines, few are there for much longer."""
MOVE_S = 60.0
"""Seconds that a move takes apart from fetching: to finish microbatches, to write checkpoints, to load."""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 2.0, 6.0
OUT_OF_TURN = 0.05
"""A peer whose turn it is not goes with this probability, times those needed, divided by those that could go."""
MOST_FOLLOWERS = 32
"""Of the others that would move too, so many are reckoned with."""


def next_look_s(rng: random.Random) -> float:
    """Returns the seconds until a peer judges its place again, at random, so that peers do not judge at once."""
    return rng.uniform(SHORTEST_LOOK_S, LONGEST_LOOK_S)


def judge_move(view: View, me: PeerId, demands: StageDemands, ability: Ability, rng: random.Random) -> Placement | None:
    """Returns the span to which this peer should move, and why; None: it stays.

    Of the peers that could be spared where k have to move, the first k go, in the order of a hash of peer and slowest
    stage: they stay the first as long as others have not seen their moves, so that no more than k go. In case that none
    of them can, each other one goes with a small probability, see OUT_OF_TURN; the first number drawn from `rng`
    decides that. Peers that are leaving may be on their way, and are taken from k.
    """
    draw, own = rng.random(), view.peers.get(me)
    if own is None or own.state != "serving" or own.span.last >= demands.stage_count:
        return None
    judgement = _Judgement(view, own, demands, ability)
    needed = judgement.count_needed_moves()
    if needed <= 0:
        return None
    others = judgement.other_spare_peers()
    turn = judgement.turn_of(me)
    ahead = sum(judgement.turn_of(peer) < turn for peer in others)
    if ahead >= needed and draw * (1 + len(others)) >= OUT_OF_TURN * needed:
        return None
    spans = [span for span in spans_that_fit(ability.longest) if span != own.span and judgement.may_hold(span)]
    return judgement.judge(spans, rng) if spans else None


@dataclass(slots=True)
class _Rates:
    """The swarm's rate before a move, and what it would be after it and the moves of others that follow."""

    now: float
    then: float


class _Judgement:
    """One peer's judgement of one view. supply: with this peer at its span, between two calls."""

    def __init__(self, view: View, own: PeerView, demands: StageDemands, ability: Ability) -> None:
        self._view = view
        self._own = own
        self._demands = demands
        self._ability = ability
        self._supply = StageSupply(view, demands, ability.speed)
        self._speed = self._supply.believed_speed(ability.speed or own.capacity * self._supply.work_of(own.span))
        self._own_rate = self._supply.rate_of(own)
        self._serving = [len(view.replicas(stage)) for stage in range(demands.stage_count)]

    # --- who may move

    def count_needed_moves(self) -> int:
        """Returns how many peers would have to move to fill the thin stages, or else to even out the rates."""
        supply = self._supply
        leaving = sum(peer.state == "leaving" for peer in self._view.peers.values())
        if supply.thin_stages:
            lacking = sum(ENOUGH_HOLDERS - supply.holders[stage] for stage in supply.thin_stages)
        elif LEAST_GAIN * supply.rate >= supply.even_rate:
            return 0
        else:
            wanted = supply.even_rate / LEAST_GAIN
            missing = sum(max(0.0, wanted - rate) for rate in supply.rates)
            lacking = math.ceil(missing / (self._own_rate * len(self._own.span)))
        return lacking - leaving

    def other_spare_peers(self) -> list[PeerId]:
        """Returns the other serving peers that could give up their stages without making any worse."""
        return [peer.peer for peer in self._view.peers.values() if peer is not self._own and self._is_spare(peer)]

    def turn_of(self, peer: PeerId) -> bytes:
        """Returns the hash by which peers take turns to help the slowest stage; no report of a peer changes it."""
        rates = self._supply.rates
        return hashlib.sha256(f"agora move 1\0{rates.index(min(rates))}\0{peer}".encode()).digest()

    def _is_spare(self, peer: PeerView) -> bool:
        """Returns whether the swarm would be no worse without the peer: see LEAST_REPLICAS, and its rate stays."""
        if peer.state != "serving" or peer.span.last >= self._supply.stage_count:
            return False
        rate, supply = self._supply.rate_of(peer), self._supply
        return all(
            min(self._serving[s], supply.holders[s]) >= LEAST_REPLICAS
            and (supply.thin_stages or supply.rates[s] - rate > supply.rate)
            for s in peer.span.stages
        )

    def may_hold(self, span: Span) -> bool:
        """Returns whether this peer may move to `span`.

        | stage                    | peers that serve it, this one included             |
        |--------------------------|----------------------------------------------------|
        | given up                 | at least LEAST_REPLICAS                            |
        | kept, but away meanwhile | at least two, or the span has a stage without any  |
        """
        fills_empty = any(self._supply.holders[stage] == 0 for stage in span.stages)
        for stage in self._own.span.stages:
            if stage not in span and self._serving[stage] < LEAST_REPLICAS:
                return False
            if stage in span and self._serving[stage] < ENOUGH_HOLDERS and not fills_empty:
                return False
        return True

    # --- whether it pays

    def judge(self, spans: list[Span], rng: random.Random) -> Placement | None:
        """Returns the best of `spans` if moving there is better than staying, by enough, and repays what it costs."""
        supply, own = self._supply, self._own
        most = max(len(span) for span in spans)
        thinness, levels, now = supply.thinness(most), supply.levels(), supply.rate
        supply.remove(own.span, self._own_rate)
        span = rng.choice(supply.best_spans(spans, self._speed, self._ability.bandwidth))
        supply.add(span, supply.rate_at(span, self._speed, self._ability.bandwidth))
        fills = supply.thinness(most) < thinness
        if not fills and (supply.thinness(most) > thinness or supply.levels() <= levels):
            return None
        rates = _Rates(now, supply.rate if fills else self._rate_after_reaction(LEAST_GAIN * now))
        if not fills and rates.then <= LEAST_GAIN * now:
            return None
        if not self._is_repaid(span, rates, fills):
            return None
        if fills:
            return Placement(span, f"stages {span} have a stage with fewer than two peers")
        return Placement(span, f"the swarm's slowest stage gets {rates.then / max(now, 1e-9) - 1:.0%} faster")

    def _rate_after_reaction(self, wanted: float) -> float:
        """Returns the swarm's rate after others have moved too, each where it helps most; stops once above `wanted`.

        Only peers that can be spared move, each once, and keep the lengths of their spans.
        """
        supply, followers = self._supply, 0
        others = [peer for peer in self._view.peers.values() if peer.peer != self._own.peer and self._is_spare(peer)]
        for peer in sorted(others, key=lambda seen: (-min(supply.rates[s] for s in seen.span.stages), seen.peer)):
            if supply.rate > wanted or followers >= MOST_FOLLOWERS:
                break
            if self._is_spare(peer):  # still, after those before it have moved
                followers += self._follow(peer)
        return supply.rate

    def _follow(self, peer: PeerView) -> bool:
        """Moves another peer in `supply` to where it helps most. Returns whether that differs from where it was."""
        supply = self._supply
        supply.remove(peer.span, supply.rate_of(peer))
        spans, speed = spans_of_length(len(peer.span), supply.stage_count), supply.speed_of(peer)
        span = supply.best_spans(spans, speed, peer.bandwidth)[0]
        supply.add(span, supply.rate_at(span, speed, peer.bandwidth))
        return span != peer.span

    def _is_repaid(self, span: Span, rates: _Rates, fills: bool) -> bool:
        """Returns whether the time won within HORIZON_S is longer than MOVE_S and fetching the new stages' state take.

        The time won is HORIZON_S * (1 - now / then); for a thin stage, which may cost all of it, HORIZON_S.
        """
        new = [stage for stage in span.stages if stage not in self._own.span]
        fetched = sum(self._demands.state_bytes[stage] for stage in new)
        seconds = fetched / self._ability.bandwidth if self._ability.bandwidth > 0 else 0.0
        won = HORIZON_S if fills else HORIZON_S * (1.0 - rates.now / rates.then)
        return seconds + MOVE_S < won
