"""Decides which span a peer should claim, and which peers must choose again when several chose at once. Pure.

Knows: the view, what stages ask of machines, what this machine can do. Must not know: devices or the directory. The
random generator that breaks ties is passed in. The rules stand as a table in docs/placement.md.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agora_protocol.ids import PeerId, RunId, Span

from agora.swarm.stage_supply import Ability, StageDemands, StageSupply, spans_of_length, spans_that_fit
from agora.swarm.view import PeerView, View

__all__ = [
    "Ability",
    "Placement",
    "Settling",
    "StageDemands",
    "choose_placement",
    "describe_thinnest",
    "hash_order",
    "holders_by_stage",
    "judge_collision",
    "next_settling_step",
    "place_as_pinned",
]

MAX_SETTLING_ROUNDS = 12
"""Maximum rounds, each one read of the other claims, after which a joining peer's claim is settled in any case."""
ROUNDS_TO_KEEP = 3
"""The rounds in a row that a span must be kept to be settled; peers that still choose again may then be pinned."""
MIN_SHARE = 0.02
"""A newcomer with less than this part of a median machine's rate stands by, while no stage is thin."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The span to hold, and why; span None means to hold none and stand by. Immutable.

    is_final: every joiner in the view may keep the span that it has claimed.
    """

    span: Span | None
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Settling:
    """How far a joining peer is with settling its claim. Immutable; see `next_settling_step`.

    rounds: how often it has looked at the claims of the others. kept: how many of the last looks, in a row, have left
    its span as it was.
    """

    placement: Placement
    rounds: int = 0
    kept: int = 0
    settled: bool = False


def next_settling_step(settling: Settling, judged: Placement) -> Settling:
    """Returns the next state of settling.

    judged: what `judge_collision` has returned, after the other claims had time to be seen.

    | judged                                                        | next                                   |
    |---------------------------------------------------------------|----------------------------------------|
    | another span than the claimed one                             | claim it; settled after the last round |
    | the claimed span: is_final, or ROUNDS_TO_KEEP times in a row  | settled                                |
    | the claimed span                                              | look again; settled after the last round |
    """
    rounds = settling.rounds + 1
    is_last = rounds >= MAX_SETTLING_ROUNDS
    if judged.span != settling.placement.span:
        return Settling(judged, rounds, 0, is_last)
    kept = settling.kept + 1
    return replace(settling, rounds=rounds, kept=kept, settled=judged.is_final or kept >= ROUNDS_TO_KEEP or is_last)


def choose_placement(view: View, demands: StageDemands, ability: Ability, rng: random.Random) -> Placement:
    """Returns the span where a newcomer helps most: thin stages first, then the slowest stage; `rng` breaks ties.

    Returns a placement without a span, so that the newcomer stands by, when no stage fits into its memory, and when no
    stage is thin and its rate would be less than MIN_SHARE of what a machine of median speed does there.
    """
    spans = spans_that_fit(ability.longest)
    if not spans:
        return Placement(None, "no stage of the run fits into this machine's memory")
    supply = StageSupply(view, demands, ability.speed)
    speed = supply.believed_speed(ability.speed)
    span = rng.choice(supply.best_spans(spans, speed, ability.bandwidth))
    rate = supply.rate_at(span, speed, ability.bandwidth)
    share = rate / supply.rate_at(span, supply.usual_speed, 0.0)
    if share < MIN_SHARE and not supply.thin_stages:
        return Placement(None, f"it would do {share:.1%} of what others do, and no stage has fewer than two peers")
    return Placement(span, describe_thinnest(supply.holders, span))


def place_as_pinned(view: View, stage_count: int, span: Span) -> Placement:
    """Returns a placement on `span`, as its owner asked; its reason says how many hold the span's thinnest stage."""
    return Placement(span, "as asked for; " + describe_thinnest(holders_by_stage(view, stage_count), span))


def holders_by_stage(view: View, stage_count: int) -> list[int]:
    """Returns how many peers serve or join each stage, by stage index; estimated in a large run."""
    return [view.claimant_count(stage) for stage in range(stage_count)]


def judge_collision(view: View, me: PeerView, demands: StageDemands, run: RunId) -> Placement:
    """Returns the span that this peer, still joining, should hold, since others may have chosen at the same time.

    A joiner whose span is a best choice, given all other claims, keeps it. The other joiners take turns in the order of
    a hash of (run, peer): each keeps its span if that is a best choice, given those who serve, those who keep theirs,
    and those whose turn came before. Otherwise it gets the best span of the same length at that point. The same view
    gives every peer the same outcome.
    """
    everybody = StageSupply(view, demands)
    moving = {p.peer: p for p in view.peers.values() if p.state == "joining" and not _is_best_choice(everybody, p)}
    if me.peer not in moving:
        return Placement(me.span, f"stages {me.span} are the best choice, given everybody else's", not moving)
    for peer in moving.values():
        if peer.span.first < demands.stage_count:
            everybody.remove(peer.span, everybody.rate_of(peer))
    turns = sorted(moving, key=lambda peer: hash_order(run, peer))
    ahead = turns.index(me.peer)
    for turn in turns[:ahead]:
        span = _span_in_turn(everybody, moving[turn], run)
        everybody.add(span, _rate_elsewhere(everybody, moving[turn], span))
    span = _span_in_turn(everybody, me, run)
    if span == me.span:
        return Placement(span, f"of those that chose stages {span} at once, others come later and give way")
    return Placement(span, f"{ahead} peers that chose at once come first; {describe_thinnest(everybody.holders, span)}")


def _is_best_choice(everybody: StageSupply, peer: PeerView) -> bool:
    """Returns whether the peer's span is a best choice, given all other claims; leaves `everybody` as it was."""
    if peer.span.first >= everybody.stage_count:
        return False
    rate = everybody.rate_of(peer)
    everybody.remove(peer.span, rate)
    best = _best_for(everybody, peer)
    everybody.add(peer.span, rate)
    return peer.span in best


def _best_for(supply: StageSupply, peer: PeerView) -> list[Span]:
    """Returns the best spans for `peer`, of the length that it claims, at most all stages."""
    spans = spans_of_length(len(peer.span), supply.stage_count)  # a claim may name stages that the run does not have
    return supply.best_spans(spans, _claimed_speed(supply, peer), peer.bandwidth)


def _claimed_speed(supply: StageSupply, peer: PeerView) -> float:
    """Returns the peer's speed; the usual one if its claim lies outside the run."""
    return supply.speed_of(peer) if peer.span.first < supply.stage_count else supply.usual_speed


def _rate_elsewhere(supply: StageSupply, peer: PeerView, span: Span) -> float:
    """Returns the microbatches per second that the peer would compute at `span`."""
    return supply.rate_at(span, _claimed_speed(supply, peer), peer.bandwidth)


def _span_in_turn(supply: StageSupply, turn: PeerView, run: RunId) -> Span:
    """Returns the joiner's claimed span if that is a best choice, given `supply`; otherwise a best one by its hash."""
    best = _best_for(supply, turn)
    if turn.span in best:
        return turn.span
    return best[int.from_bytes(hash_order(run, turn.peer)[-4:], "big") % len(best)]


def hash_order(run: RunId, peer: PeerId) -> bytes:
    """Returns the hash of (run, peer) by which peers that act at once take turns; nobody can choose its own."""
    return hashlib.sha256(f"agora order 1\0{run}\0{peer}".encode()).digest()


def describe_thinnest(holders: Sequence[int], span: Span) -> str:
    """Returns in words how many peers hold the span's stage with the fewest holders, and whether no stage has fewer."""
    thinnest = min(span.stages, key=lambda stage: holders[stage])
    count = holders[thinnest]
    peers = "nobody" if count == 0 else "1 peer" if count == 1 else f"{count} peers"
    return f"stage {thinnest} is {'the thinnest, ' if count == min(holders) else ''}held by {peers}"
