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
    """Whether to choose again after the jitter, and why."""

    choose_again: bool
    reason: str


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
    """Whether this peer, still joining, must give way to others that chose at the same time.

    To be asked once the claim had time to be seen, and again right before serving. Who stands well in the whole view
    stays. Else the joining peers stand in the order of a hash of (run, peer), and each stays whose span is a best
    choice given everybody who serves and those before it in that order: the first always does, and when every peer
    applies the rule to its own claim they settle after at most as many rounds as there are joiners.
    """
    others = view.without(me.peer)
    if me.span.first in _best_starts(holders_by_stage(others.peers.values(), stage_count), len(me.span)):
        return Collision(False, f"stages {me.span} are the best choice beside everybody else's")
    mine = hash_order(run, me.peer)
    serving = [p for p in others.peers.values() if p.state == "serving"]
    before = [p for p in others.peers.values() if p.state == "joining" and hash_order(run, p.peer) < mine]
    if me.span.first in _best_starts(holders_by_stage([*serving, *before], stage_count), len(me.span)):
        return Collision(False, f"of those that chose stages {me.span} at once, others come later and give way")
    return Collision(True, f"{len(before)} peers that chose at once come first; other stages are held more thinly now")


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
