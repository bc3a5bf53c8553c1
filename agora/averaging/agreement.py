"""How far the replicas of a stage are together, and when it steps. Pure: `now` and the random generator are passed in.

Knows: what each replica was last heard to have counted. Must not know: calls, threads, weights.

A stage takes a step when its replicas together have counted the step's tokens. Each of them judges by what it has
heard: whoever finds the step complete takes it, and the others follow when they hear of that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_GOSSIPED_REPLICAS

STALE_S: Final = 6.0
"""A replica that was not heard for so long is not counted on, and may come back with lower numbers."""
TELL_ALL: Final = 8
"""So many others are all told; of more, FEW at random, who tell further."""
FEW: Final = 4


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """A replica: optimizer steps taken, tokens counted since, the tokens it had counted when it took the last one (0
    when that was not heard), when it last spoke to anybody, as far as is known, and when it last failed to answer here.

    `said`: the step of which it last spoke here itself, -1 before; the rest may be what others told of it.
    """

    step: int
    tokens: int
    before: int
    heard: float
    lost: float = -math.inf
    said: int = -1

    def present(self, now: float) -> bool:
        """Whether it has been heard lately, and since it last failed to answer."""
        return now - self.heard <= STALE_S and self.heard > self.lost


KnownReplicas = Mapping[PeerId, ReplicaProgress]
News = tuple[PeerId, int, int, int]
"""A replica, its step, its tokens, and how many milliseconds ago it spoke."""


def heard(
    known: KnownReplicas, news: Iterable[News], sender: PeerId, me: PeerId, now: float
) -> dict[PeerId, ReplicaProgress]:
    """What is known after `sender` told `news`, of itself and of others.

    Lower numbers are believed when a replica says them itself, or was not there before: it has started again. Of
    others only what they said lately counts, so that tales keep nobody alive.
    """
    merged = dict(known)
    for peer, step, tokens, age_ms in news:
        at = now if peer == sender else now - age_ms / 1000
        if peer == me or now - at > STALE_S:
            continue
        before = merged.get(peer)
        if before is None:
            merged[peer] = ReplicaProgress(step, tokens, 0, at)
        elif peer == sender or (step, tokens) >= (before.step, before.tokens) or not before.present(now):
            merged[peer] = _after(before, step, tokens, max(at, before.heard))
        if peer == sender:
            merged[peer] = replace(merged[peer], said=step)
    return merged


def _after(before: ReplicaProgress, step: int, tokens: int, at: float) -> ReplicaProgress:
    if step == before.step:
        kept = before.before if tokens >= before.tokens else 0
    else:
        kept = before.tokens if step == before.step + 1 else 0
    return replace(before, step=step, tokens=tokens, before=kept, heard=at)


def lost(known: KnownReplicas, peer: PeerId, now: float) -> dict[PeerId, ReplicaProgress]:
    """What is known after `peer` did not answer: it is not there until it has spoken again."""
    return dict(known) | {peer: replace(known.get(peer) or ReplicaProgress(0, 0, 0, -math.inf), lost=now)}


def absent(known: KnownReplicas, members: Collection[PeerId], now: float) -> set[PeerId]:
    """The members that have not been heard lately, or did not answer; of who is new here nothing is known yet."""
    return {peer for peer in members if peer in known and not known[peer].present(now)}


def fresh(known: KnownReplicas, members: Collection[PeerId], now: float) -> dict[PeerId, ReplicaProgress]:
    """The other replicas that are in the view and were heard lately."""
    return {peer: it for peer, it in known.items() if peer in members and it.present(now)}


def counted_by(others: KnownReplicas, step: int) -> int:
    """Tokens that the others have counted for the step after `step`; who has taken it already took its own with it."""
    return sum(it.tokens if it.step == step else it.before if it.step == step + 1 else 0 for it in others.values())


def tokens_to_go(others: KnownReplicas, step: int, target: int) -> int:
    """The tokens that this replica must have counted since `step` for the stage to step; at least 1."""
    return max(1, target - counted_by(others, step))


def step_to_follow(others: KnownReplicas, live: int, step: int, own_tokens: int, target: int) -> int:
    """The step that the stage has reached, `step` itself when this replica is not behind.

    live: how many others are there, those included of whom nothing is known yet, so that nobody who is heard first is a
    majority. Half of them carry everyone along, however far. One step ahead, a quarter is enough when, as far as is
    known, a quarter of the step's tokens are there: the stage has stepped, the news of the tokens are slower. Only what
    each says itself counts here: a tale of the others would make one liar the majority.
    """
    reached = sorted((it.said for it in others.values()), reverse=True)
    half = math.ceil(live / 2)
    if 0 < half <= len(reached) and reached[half - 1] > step:
        return reached[half - 1]
    ahead = sum(it.said == step + 1 for it in others.values())
    known = own_tokens + counted_by(others, step)
    return step + 1 if ahead and ahead >= math.ceil(live / 4) and 4 * known >= target else step


def whom_to_tell(members: Collection[PeerId], me: PeerId, rng: random.Random) -> list[PeerId]:
    """All the others where they are few, else some."""
    others = sorted(set(members) - {me})
    return others if len(others) <= TELL_ALL else rng.sample(others, FEW)


def tale(
    known: KnownReplicas, own: tuple[PeerId, int, int], members: Collection[PeerId], now: float
) -> tuple[News, ...]:
    """What to tell: the own numbers first, then the freshest of the others', at most MAX_GOSSIPED_REPLICAS in all."""
    others = sorted(fresh(known, members, now).items(), key=lambda item: -item[1].heard)[: MAX_GOSSIPED_REPLICAS - 1]
    return ((*own, 0), *((peer, it.step, it.tokens, round(1000 * (now - it.heard))) for peer, it in others))
