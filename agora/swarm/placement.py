"""Decides which span a peer should claim, and which peers must choose again when several chose at once. Pure.

Knows: the view, and how many peers hold each stage. Must not know: memory, devices or the directory. The number of
stages that fit is passed in, and so is the random generator that breaks ties. The rule is that of Petals (arXiv
2312.08361, appendix; its `choose_best_blocks`): of all contiguous spans of the length, take the one whose numbers of
holders, in ascending order, come first. That raises the stage with the fewest holders, then the next.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agora_protocol.ids import PeerId, RunId, Span

from agora.swarm.view import PeerView, View

MAX_SETTLING_ROUNDS = 12
"""After so many looks at the claims of others, a joining peer's claim is settled in any case."""
ROUNDS_TO_KEEP = 3
"""A span that was kept in so many rounds in a row is settled; others that still have to choose again may be pinned."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The span to hold, and why. is_final: no joiner in the view has to claim another span than it has claimed."""

    span: Span
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Settling:
    """How far a joining peer is with settling its claim.

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


def choose_placement(view: View, stage_count: int, length: int, rng: random.Random) -> Placement:
    """Returns a placement on the span of `length` stages, at most all, with the fewest holders; `rng` breaks ties.

    Spans are compared by their stages' numbers of holders in ascending order: first the fewest, then the next.
    """
    length = max(1, min(length, stage_count))
    holders = holders_by_stage(view, stage_count)
    first = rng.choice(_best_starts(holders, length))
    span = Span(first, first + length - 1)
    return Placement(span, _reason(holders, span))


def pinned_span(view: View, stage_count: int, span: Span) -> Placement:
    """Returns a placement on `span`, as its owner asked; its reason says how many hold the span's thinnest stage."""
    return Placement(span, "as asked for; " + _reason(holders_by_stage(view, stage_count), span))


def holders_by_stage(view: View, stage_count: int) -> list[int]:
    """Returns how many peers each stage has that serve it or are joining."""
    return [len(view.claimants(stage)) for stage in range(stage_count)]


def judge_collision(view: View, me: PeerView, stage_count: int, run: RunId) -> Placement:
    """Decides which span this peer, still joining, should hold, since others may have chosen at the same time.

    A joiner whose span is a best choice beside all other claims keeps it. The other joiners take turns in the order of
    a hash of (run, peer): each keeps its span if that is a best choice beside those who serve, those who keep theirs,
    and those whose turn came before; else it gets the best span then. The same view gives every peer the same outcome.
    """
    everybody = holders_by_stage(view, stage_count)
    moving = {p.peer: p for p in view.peers.values() if p.state == "joining" and not _is_best_choice(everybody, p)}
    if me.peer not in moving:
        return Placement(me.span, f"stages {me.span} are the best choice beside everybody else's", not moving)
    holders = holders_by_stage(View({p: seen for p, seen in view.peers.items() if p not in moving}), stage_count)
    turns = sorted(moving, key=lambda peer: hash_order(run, peer))
    ahead = turns.index(me.peer)
    for peer in turns[:ahead]:
        for stage in _span_in_turn(holders, moving[peer], run).stages:
            holders[stage] += 1
    span = _span_in_turn(holders, me, run)
    if span == me.span:
        return Placement(span, f"of those that chose stages {span} at once, others come later and give way")
    return Placement(span, f"{ahead} peers that chose at once come first; {_reason(holders, span)}")


def _is_best_choice(everybody: Sequence[int], peer: PeerView) -> bool:
    """Returns whether the peer's span is a best choice beside all others. everybody: each stage's holders, with it."""
    others = [count - (stage in peer.span) for stage, count in enumerate(everybody)]
    return peer.span.first in _best_starts(others, len(peer.span))


def _span_in_turn(holders: Sequence[int], turn: PeerView, run: RunId) -> Span:
    """Returns the joiner's claimed span if that is a best choice beside `holders`, else the one its hash picks."""
    starts = _best_starts(holders, len(turn.span))
    if turn.span.first in starts:
        return turn.span
    first = starts[int.from_bytes(hash_order(run, turn.peer)[-4:], "big") % len(starts)]
    return Span(first, first + len(turn.span) - 1)


def hash_order(run: RunId, peer: PeerId) -> bytes:
    """Returns the hash of (run, peer) by which peers that act at once take turns; nobody can choose its own."""
    return hashlib.sha256(f"agora order 1\0{run}\0{peer}".encode()).digest()


def _best_starts(holders: Sequence[int], length: int) -> list[int]:
    """Returns the first stage of each best span of `length` stages: its ascending numbers of holders are the least."""
    length = min(length, len(holders))  # a claim may name stages that the run does not have
    starts = range(len(holders) - length + 1)
    counts = {start: sorted(holders[start : start + length]) for start in starts}
    least = min(counts.values())
    return [start for start in starts if counts[start] == least]


def _reason(holders: Sequence[int], span: Span) -> str:
    """Returns in words how many peers hold the span's stage with the fewest holders, and whether no stage has fewer."""
    thinnest = min(span.stages, key=lambda stage: holders[stage])
    count = holders[thinnest]
    peers = "nobody" if count == 0 else "1 peer" if count == 1 else f"{count} peers"
    return f"stage {thinnest} is {'the thinnest, ' if count == min(holders) else ''}held by {peers}"
