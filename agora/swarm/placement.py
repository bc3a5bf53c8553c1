"""Which span a peer should claim, and who must choose again when two chose at once. Pure.

Knows the view and how thin each stage is. Must not know memory, devices or the directory: how many stages fit is
passed in, and ties are broken by a random generator that is passed in. The rule is Petals' (arXiv 2312.08361,
appendix; its `choose_best_blocks`): of all contiguous spans of the length take the one whose stages, sorted by how
thinly they are held, come first. That raises the thinnest stage, then the next thinnest.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agora_protocol.ids import PeerId, RunId, Span

from agora.swarm.view import PeerView, View


@dataclass(frozen=True, slots=True)
class Placement:
    """The span to claim, and why."""

    span: Span
    reason: str


@dataclass(frozen=True, slots=True)
class Collision:
    """The span to hold after the jitter, whether it is another than the one claimed, and why.

    settled: no joiner in the view has to choose again, so there is nothing to wait for.
    """

    span: Span
    choose_again: bool
    reason: str
    settled: bool = False


def choose_span(view: View, stage_count: int, length: int, rng: random.Random) -> Placement:
    """The contiguous span of `length` stages (at most all) that raises the thinnest stage of the view."""
    length = max(1, min(length, stage_count))
    holders = holders_by_stage(view.peers.values(), stage_count)
    first = rng.choice(_best_starts(holders, length))
    span = Span(first, first + length - 1)
    return Placement(span, _because(holders, span))


def pinned_span(view: View, stage_count: int, span: Span) -> Placement:
    """The span that the owner asked for, with what it means for the swarm."""
    return Placement(span, "as asked for; " + _because(holders_by_stage(view.peers.values(), stage_count), span))


def holders_by_stage(peers: Iterable[PeerView], stage_count: int) -> list[int]:
    """How many peers serve each stage or are about to; those that leave do not count."""
    holders = [0] * stage_count
    for seen in peers:
        if seen.state != "leaving":
            for stage in seen.span.stages:
                if stage < stage_count:
                    holders[stage] += 1
    return holders


def judge_collision(view: View, me: PeerView, stage_count: int, run: RunId) -> Collision:
    """Which span this peer, still joining, should hold, given that others may have chosen at the same time.

    To be asked once the claim had time to be seen, and again right before serving. Who stands well beside everybody
    else's claim stays. The other joiners stand in the order of a hash of (run, peer): each in turn keeps its span if
    that is a best choice given those who serve, those who stand well and those before it, else it gets the best one
    then. Every peer that sees the same view computes the same outcome, so they settle in one round; with views that
    differ they settle when the views do.
    """
    moving = [p for p in view.peers.values() if p.state == "joining" and not _stands_well(view, p, stage_count)]
    if me.peer not in {p.peer for p in moving}:
        reason = f"stages {me.span} are the best choice beside everybody else's"
        return Collision(me.span, False, reason, settled=not moving)
    holders = holders_by_stage((p for p in view.peers.values() if p not in moving), stage_count)
    ahead = 0
    for turn in sorted(moving, key=lambda p: hash_order(run, p.peer)):
        span = _settled_span(holders, turn, run)
        if turn.peer == me.peer:
            break
        ahead += 1
        for stage in span.stages:
            holders[stage] += 1
    if span == me.span:
        return Collision(span, False, f"of those that chose stages {span} at once, others come later and give way")
    return Collision(span, True, f"{ahead} peers that chose at once come first; {_because(holders, span)}")


def _stands_well(view: View, peer: PeerView, stage_count: int) -> bool:
    others = view.without(peer.peer).peers.values()
    return peer.span.first in _best_starts(holders_by_stage(others, stage_count), len(peer.span))


def _settled_span(holders: Sequence[int], turn: PeerView, run: RunId) -> Span:
    """What a joiner holds when its turn comes; ties are broken by its hash, so that everybody computes the same."""
    starts = _best_starts(holders, len(turn.span))
    if turn.span.first in starts:
        return turn.span
    first = starts[int.from_bytes(hash_order(run, turn.peer)[-4:], "big") % len(starts)]
    return Span(first, first + len(turn.span) - 1)


def hash_order(run: RunId, peer: PeerId) -> bytes:
    """Where a peer stands among those that do something at the same time; nobody can choose it for a given run."""
    return hashlib.sha256(f"agora order 1\0{run}\0{peer}".encode()).digest()


def _best_starts(holders: Sequence[int], length: int) -> list[int]:
    starts = range(len(holders) - length + 1)
    thinness = {start: sorted(holders[start : start + length]) for start in starts}
    least = min(thinness.values())
    return [start for start in starts if thinness[start] == least]


def _because(holders: Sequence[int], span: Span) -> str:
    thinnest = min(span.stages, key=lambda stage: holders[stage])
    count = holders[thinnest]
    peers = "nobody" if count == 0 else "1 peer" if count == 1 else f"{count} peers"
    if count == min(holders):
        return f"stage {thinnest} is the thinnest, held by {peers}"
    return f"stage {thinnest} is held by {peers}"
