"""Decides who may use how much of what this peer shares with others: rates, and places. Deterministic.

Knows: holders (a peer and the address prefix that it comes from), counts and amounts. Must not know: what is shared,
clocks (`now` is an argument), sockets. A holder's prefix matters because anyone can create as many peer ids as they
like, but not as many networks.

| shared | rule | function |
|---|---|---|
| work per second | each holder has a bucket that fills at a rate; a request takes its price out of it | WorkBuckets |
| places | half of them are free to all; beyond, each prefix has an equal part, each peer one of that | may_enter |
| places, all taken | whoever has more than its part gives one up, the largest holder first | largest_holder |
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

MAX_HOLDERS: Final = 16_384
"""Holders whose buckets are remembered; the one that asked longest ago is forgotten first."""
FREE_FRACTION: Final = 0.5
"""The fraction of the places that anybody may take, whoever holds the others."""


class Holder(NamedTuple):
    """Who holds a place: a peer, and the prefix of the address that it comes from ("" where that is unknown)."""

    prefix: str
    peer: PeerId


@dataclass(slots=True)
class WorkBucket:
    """Holds at most `burst` tokens, and gains `rate` of them each second. level: tokens at time `at`."""

    rate: float
    burst: float
    level: float
    at: float

    def take(self, now: float, price: float) -> bool:
        """Takes `price` tokens if there are that many, and returns whether there were."""
        self.level = min(self.burst, self.level + self.rate * max(0.0, now - self.at))
        self.at = max(self.at, now)
        if price > self.level:
            return False
        self.level -= price
        return True


class WorkBuckets:
    """Keeps one bucket of tokens for each holder, full at its first request; at most MAX_HOLDERS buckets."""

    def __init__(self, rate: float, burst: float) -> None:
        """rate: tokens that a bucket gains each second. burst: the most that it holds, and so the highest price."""
        self.rate, self.burst = rate, burst
        self._buckets: OrderedDict[Hashable, WorkBucket] = OrderedDict()

    def take(self, holder: Hashable, now: float, price: float = 1.0) -> bool:
        """Takes `price` tokens out of the holder's bucket if there are that many, and returns whether there were."""
        bucket = self._buckets.get(holder)
        if bucket is None:
            bucket = self._buckets[holder] = WorkBucket(self.rate, self.burst, self.burst, now)
            if len(self._buckets) > MAX_HOLDERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(holder)
        return bucket.take(now, price)


def may_enter(
    held: Mapping[Holder, int], holder: Holder, places: int, size: int = 1, free: float = FREE_FRACTION
) -> bool:
    """Returns whether `holder` may take `size` more of `places`. held: how many places each holder has now.

    | places taken then | may take them |
    |---|---|
    | at most the fraction `free` of them | anybody |
    | more | a holder that stays within its fair part, see fair_part, or that has none yet |
    | more than all | nobody |
    """
    taken, own = sum(held.values()) + size, held.get(holder, 0)
    if taken > places:
        return False
    return taken <= free * places or not own or own + size <= fair_part(held, holder, places)


def fair_part(held: Mapping[Holder, int], holder: Holder, places: int) -> float:
    """Returns the holder's fair part of `places`: an equal part of its prefix's, which is an equal part of all."""
    peers: dict[str, set[PeerId]] = {holder.prefix: {holder.peer}}
    for other, count in held.items():
        if count:
            peers.setdefault(other.prefix, set()).add(other.peer)
    return places / len(peers) / len(peers[holder.prefix])


def largest_holder(held: Mapping[Holder, int], newcomer: Holder) -> Holder | None:
    """Returns who should give up a place for `newcomer`: of the largest prefix, the largest peer; None for nobody.

    Nobody has to when the newcomer's own prefix would then hold more than that one.
    """
    by_prefix: Counter[str] = Counter()
    for holder, count in held.items():
        by_prefix[holder.prefix] += count
    if not by_prefix:
        return None
    prefix = max(by_prefix, key=lambda known: (by_prefix[known], known))
    if by_prefix[newcomer.prefix] >= by_prefix[prefix] and prefix != newcomer.prefix:
        return None
    largest = max((h for h in held if h.prefix == prefix and held[h]), key=lambda h: (held[h], h.peer), default=None)
    return None if largest is None or largest == newcomer else largest


class Places:
    """Counts how many of `limit` places each holder has, and applies may_enter. It changes only by enter and leave."""

    def __init__(self, limit: int, max_fraction_each: float = 1.0) -> None:
        """max_fraction_each: of the places, for one holder, even if nobody else wants any."""
        self.limit = limit
        self.held: Counter[Holder] = Counter()
        self._max_fraction_each = max_fraction_each

    def enter(self, holder: Holder, size: int = 1) -> bool:
        """Takes `size` places for `holder` and returns True, unless it has too many already; see may_enter."""
        is_too_many = self.held[holder] + size > self._max_fraction_each * self.limit
        if is_too_many or not may_enter(self.held, holder, self.limit, size):
            self.held += Counter()  # forgets who holds nothing
            return False
        self.held[holder] += size
        return True

    def leave(self, holder: Holder, size: int = 1) -> None:
        """Gives `size` places of `holder` back."""
        self.held[holder] -= size
        if self.held[holder] <= 0:
            del self.held[holder]
