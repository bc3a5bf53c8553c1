"""How far the replicas of a stage are together, and when it steps. Pure: `now` and the random generator are passed in.

Knows: what each replica was last heard to have counted. Must not know: calls, threads, weights.

A stage takes a step when its replicas together have counted the step's tokens. Each of them judges by what it has
heard: whoever finds the step complete takes it, and the others follow when they hear of that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_TALLIES

STALE_S: Final = 6.0
"""A replica that was not heard for so long is not counted on, and may come back with lower numbers."""
TELL_ALL: Final = 8
"""So many others are all told; of more, FEW at random, who tell further."""
FEW: Final = 4


@dataclass(frozen=True, slots=True)
class Tallied:
    """A replica: optimizer steps taken, tokens counted since, the tokens it had counted when it took the last one (0
    when that was not heard), and when anything new was heard of it.
    """

    step: int
    tokens: int
    before: int
    heard: float


Tallies = Mapping[PeerId, Tallied]
News = tuple[PeerId, int, int]


def heard(known: Tallies, news: Iterable[News], sender: PeerId, me: PeerId, now: float) -> dict[PeerId, Tallied]:
    """What is known after `sender` told `news`, of itself and of others.

    Of a third peer only what is further than what is known counts, so that an old tale keeps nobody alive. A lower
    number is believed when the replica was not heard for STALE_S, or says so itself: it has started again.
    """
    merged = dict(known)
    for peer, step, tokens in news:
        if peer == me:
            continue
        before = merged.get(peer)
        if before is None or now - before.heard > STALE_S:
            merged[peer] = Tallied(step, tokens, 0, now)
        elif (step, tokens) > (before.step, before.tokens):
            kept = before.before if step == before.step else before.tokens if step == before.step + 1 else 0
            merged[peer] = Tallied(step, tokens, kept, now)
        elif peer == sender:
            same = (step, tokens) == (before.step, before.tokens)
            merged[peer] = Tallied(step, tokens, before.before if same else 0, now)
    return merged


def fresh(known: Tallies, members: Collection[PeerId], now: float) -> dict[PeerId, Tallied]:
    """The other replicas that are in the view and were heard lately."""
    return {peer: it for peer, it in known.items() if peer in members and now - it.heard <= STALE_S}


def counted_by(others: Tallies, step: int) -> int:
    """Tokens that the others have counted for the step after `step`; who has taken it already took its own with it."""
    return sum(it.tokens if it.step == step else it.before if it.step == step + 1 else 0 for it in others.values())


def tokens_to_go(others: Tallies, step: int, target: int) -> int:
    """The tokens that this replica must have counted since `step` for the stage to step; at least 1."""
    return max(1, target - counted_by(others, step))


def step_to_follow(others: Tallies, step: int, own_tokens: int, target: int) -> int:
    """The step that the stage has reached, `step` itself when this replica is not behind.

    Half of the others carry everyone along, however far. One step ahead, a quarter of them is enough when, as far as is
    known, a quarter of the step's tokens are there: the stage has stepped, the news of the tokens are slower.
    """
    live = len(others)
    reached = sorted((it.step for it in others.values()), reverse=True)
    if not live:
        return step
    common = reached[math.ceil(live / 2) - 1]
    if common > step:
        return common
    ahead = sum(it.step == step + 1 for it in others.values())
    known = own_tokens + counted_by(others, step)
    return step + 1 if ahead >= math.ceil(live / 4) and 4 * known >= target and ahead else step


def whom_to_tell(members: Collection[PeerId], me: PeerId, rng: random.Random) -> list[PeerId]:
    """All the others where they are few, else some."""
    others = sorted(set(members) - {me})
    return others if len(others) <= TELL_ALL else rng.sample(others, FEW)


def tale(known: Tallies, own: News, members: Collection[PeerId], now: float) -> tuple[News, ...]:
    """What to tell: the own numbers first, then the freshest of the others', at most MAX_TALLIES in all."""
    others = sorted(fresh(known, members, now).items(), key=lambda item: -item[1].heard)
    return (own, *((peer, it.step, it.tokens) for peer, it in others[: MAX_TALLIES - 1]))
