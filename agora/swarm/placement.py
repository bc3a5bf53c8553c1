"""Decides which span a peer should claim, and which peers must choose again when several chose together.

Pure, but for the random generator that breaks ties, which is passed in.

The rules stand as a table in docs/understand/placement.md.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agora_protocol.ids import PeerId, RunId, Span

from agora.swarm.stage_capacity import MachineCapacity, StageCapacity, StageNeeds, spans_of_length, spans_that_fit
from agora.swarm.view import PeerView, View

# Number of turns, each one read of the other claims, after which a joining peer's claim is settled in any case.
MAX_SETTLING_TURNS = 12
# A span kept for this many turns in a row is settled even if other joiners have not moved to the best spans:
# their owners may have pinned those, and then it is no use to wait longer.
TURNS_TO_KEEP = 3
# A newcomer with less than this fraction of a median machine's rate stands by, while no stage is thin.
MIN_FRACTION = 0.02


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision on the span that one peer should hold."""

    span: Span | None  # None: the peer should hold none and stand by
    reason: str  # why, in words
    # True if, by the view that was judged, this peer and all other joining peers keep their claimed spans: then no
    # further turn is needed.
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Settling:
    """How far one joining peer is with settling its claim, in turns of judging the claims of others."""

    placement: Placement  # what the peer claims now
    turns: int = 0  # the number of turns so far
    kept: int = 0  # how many of the latest turns, in a row, have left the peer's span as it was
    settled: bool = False  # whether no further turn is needed


def next_settling(settling: Settling, judged: Placement) -> Settling:
    """Returns the Settling after one more turn: with the placement to claim now, and whether it has settled.

    judged: what `judge_collision` returned in this turn, after the claims of others had time to be seen.

    | judged                                                        | next                                   |
    |---------------------------------------------------------------|----------------------------------------|
    | another span than the claimed one                             | claim it; another turn                 |
    | the claimed span: is_final, or TURNS_TO_KEEP times in a row   | settled                                |
    | the claimed span                                              | another turn                           |
    | any span, in turn MAX_SETTLING_TURNS                          | claim it; settled                      |
    """
    turns = settling.turns + 1
    is_last = turns >= MAX_SETTLING_TURNS
    if judged.span != settling.placement.span:
        return Settling(judged, turns, 0, is_last)
    kept = settling.kept + 1
    return replace(settling, turns=turns, kept=kept, settled=judged.is_final or kept >= TURNS_TO_KEEP or is_last)


def choose_placement(view: View, needs: StageNeeds, machine: MachineCapacity, rng: random.Random) -> Placement:
    """Returns the span that fits into a newcomer's memory and where it helps most, and why; `rng` breaks ties.

    Thin stages (fewer than two holders) come first, then the slowest. It returns no span, so that the newcomer stands
    by, if no stage fits, or if no stage is thin and the newcomer's rate would be less than MIN_FRACTION of a median
    machine's. view: without the newcomer.
    """
    spans = spans_that_fit(machine.max_span_lengths)
    if not spans:
        return Placement(None, "no stage of the run fits into this machine's memory")
    capacity = StageCapacity(view, needs, machine.speed)
    speed = capacity.plausible_speed(machine.speed)
    span = rng.choice(capacity.best_spans(spans, speed, machine.bandwidth))
    rate = capacity.rate_at(span, speed, machine.bandwidth)
    fraction = rate / capacity.rate_at(span, capacity.usual_speed, 0.0)
    if fraction < MIN_FRACTION and not capacity.thin_stages:
        return Placement(None, f"it would do {fraction:.1%} of what others do, and no stage has fewer than two peers")
    return Placement(span, describe_thinnest(capacity.holders, span))


def place_as_pinned(view: View, stage_count: int, span: Span) -> Placement:
    """Returns a placement on `span`, as the peer's owner asked."""
    return Placement(span, "as asked for; " + describe_thinnest(holders_by_stage(view, stage_count), span))


def holders_by_stage(view: View, stage_count: int) -> list[int]:
    """Returns, by stage, how many peers serve it or are joining it."""
    return [view.claimant_count(stage) for stage in range(stage_count)]


def judge_collision(view: View, me: PeerView, needs: StageNeeds, run: RunId) -> Placement:
    """Returns the span that this peer, still joining, should hold, since others may have chosen at the same time.

    A joining peer whose span is a best choice, given all other claims, keeps it. The others are placed one by one, in
    the order of `settling_order_key`: each keeps its span if that is a best choice given the peers that serve, that
    keep their spans, and that were placed before; otherwise it gets a best span of the same length, picked by a hash.
    The same view gives every peer the same outcome. is_final: nobody had to be placed.
    """
    capacity = StageCapacity(view, needs)
    displaced = {p.peer: p for p in view.peers.values() if p.state == "joining" and not _is_best_choice(capacity, p)}
    if me.peer not in displaced:
        return Placement(me.span, f"stages {me.span} are the best choice, given everybody else's", not displaced)
    for peer in displaced.values():
        if peer.span.first < needs.stage_count:
            capacity.remove(peer.span, capacity.rate_of(peer))
    turns = sorted(displaced, key=lambda peer: settling_order_key(run, peer))
    ahead = turns.index(me.peer)
    for earlier in turns[:ahead]:
        span = _span_in_turn(capacity, displaced[earlier], run)
        capacity.add(span, _rate_at(capacity, displaced[earlier], span))
    span = _span_in_turn(capacity, me, run)
    if span == me.span:
        return Placement(span, f"others chose stages {span} at the same time, but rank later and give way")
    earlier_peers = "1 peer" if ahead == 1 else f"{ahead} peers"
    thinnest = describe_thinnest(capacity.holders, span)
    return Placement(span, f"placed after {earlier_peers} that chose at the same time; {thinnest}")


def _is_best_choice(capacity: StageCapacity, peer: PeerView) -> bool:
    if peer.span.first >= capacity.stage_count:
        return False
    return peer.span in _best_for(capacity.without(peer.span, capacity.rate_of(peer)), peer)


def _best_for(capacity: StageCapacity, peer: PeerView) -> list[Span]:
    # capacity: must not count `peer`.
    spans = spans_of_length(len(peer.span), capacity.stage_count)  # a claim may name stages that the run does not have
    return capacity.best_spans(spans, _claimed_speed(capacity, peer), peer.bandwidth)


def _claimed_speed(capacity: StageCapacity, peer: PeerView) -> float:
    return capacity.speed_of(peer) if peer.span.first < capacity.stage_count else capacity.usual_speed


def _rate_at(capacity: StageCapacity, peer: PeerView, span: Span) -> float:
    return capacity.rate_at(span, _claimed_speed(capacity, peer), peer.bandwidth)


def _span_in_turn(capacity: StageCapacity, joiner: PeerView, run: RunId) -> Span:
    # capacity: must count the peers that keep their spans and those whose turn came before, not `joiner`.
    best = _best_for(capacity, joiner)
    if joiner.span in best:
        return joiner.span
    return best[int.from_bytes(settling_order_key(run, joiner.peer)[-4:], "big") % len(best)]


def settling_order_key(run: RunId, peer: PeerId) -> bytes:
    """Returns a hash of run and peer: of peers that chose at the same time, the one with the lowest is placed first."""
    return hashlib.sha256(f"agora order 1\0{run}\0{peer}".encode()).digest()


def describe_thinnest(holders: Sequence[int], span: Span) -> str:
    """Returns in words which stage of the span has the fewest holders. holders: of each stage of the run."""
    thinnest = min(span.stages, key=lambda stage: holders[stage])
    count = holders[thinnest]
    peers = "nobody" if count == 0 else "1 peer" if count == 1 else f"{count} peers"
    return f"stage {thinnest} is {'the thinnest, ' if count == min(holders) else ''}held by {peers}"
