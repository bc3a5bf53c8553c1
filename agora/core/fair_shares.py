"""Token buckets, and fair shares of work, slots and bytes. Deterministic.

A requester's prefix matters because anyone can create as many peer ids as they like, but not as many networks.

| shared | rule | function |
|---|---|---|
| work per second | each requester has a bucket that fills at a rate; a request takes its price | RateLimiter |
| slots, bytes | a fraction is free to all; each prefix may have an equal part, a peer one of that | may_acquire |
| slots, all taken | a requester with more than its part gives one up, the largest requester first | largest_requester |
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

# Maximum number of requesters whose buckets are remembered; the one that asked longest ago is forgotten first.
MAX_REQUESTERS: Final = 16_384
ROUNDING_S: Final = 1e-6  # sums of floats must not cost the last token of a full bucket
FREE_FRACTION: Final = 0.5  # the fraction of a capacity that any requester may take, whichever requesters have the rest


class Requester(NamedTuple):
    """A user of a part of what is shared: a peer, and the prefix of the address that it comes from ("" if unknown)."""

    address_prefix: str
    peer: PeerId


class TokenBucket:
    """A token bucket, kept as the time until which its tokens are spent (GCRA): `rate` tokens a second.

    depth_s: a pause saves up the tokens of that many seconds. rate: may be changed, for what is taken after that.
    """

    def __init__(self, rate: float, depth_s: float = 0.0) -> None:
        self.rate = rate
        self._depth_s = depth_s
        self._spent_until = -math.inf

    def take(self, size: float, ready: float) -> float:
        """Takes `size` tokens, even those of the future; returns when the bucket had them all. Does not wait.

        ready: when they are wanted; up to `depth_s` before that is returned if enough was saved up.
        """
        self._spent_until = max(self._spent_until, ready - self._depth_s) + size / self.rate
        return self._spent_until

    def try_take(self, size: float, now: float) -> bool:
        """Takes `size` tokens if the bucket has as many at `now`; returns whether it did."""
        spent_until = max(self._spent_until, now - self._depth_s) + size / self.rate
        if spent_until > now + ROUNDING_S:
            return False
        self._spent_until = spent_until
        return True


class RateLimiter:
    """Limits the work per second of each requester: keeps a token bucket for each, full at its first request.

    Keeps at most MAX_REQUESTERS buckets: then the requester that asked longest ago is forgotten, and would begin with a
    full bucket again.
    """

    def __init__(self, rate: float, burst: float) -> None:
        """rate: tokens that a bucket gains each second. burst: the most that it holds, and so the highest price."""
        self.rate = rate
        self.burst = burst
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def take(self, requester: Hashable, now: float, price: float = 1.0) -> bool:
        """Takes `price` tokens out of the requester's bucket if it has that many by `now`; returns whether it did."""
        bucket = self._buckets.get(requester)
        if bucket is None:
            bucket = self._buckets[requester] = TokenBucket(self.rate, self.burst / self.rate)
            if len(self._buckets) > MAX_REQUESTERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(requester)
        return bucket.try_take(price, now)


def may_acquire(
    held: Mapping[Requester, int], requester: Requester, capacity: int, size: int = 1, free: float = FREE_FRACTION
) -> bool:
    """Returns whether `requester` may take `size` more of a `capacity` (of slots or bytes). held: what each has now.

    | taken in all afterwards | which requesters may take it |
    |---|---|
    | at most free * capacity | all |
    | more | a requester that stays within its fair share, see fair_share_of, or that has nothing yet |
    | more than the capacity | none |
    """
    taken = sum(held.values()) + size
    own = held.get(requester, 0)
    if taken > capacity:
        return False
    return taken <= free * capacity or not own or own + size <= fair_share_of(held, requester, capacity)


def fair_share_of(held: Mapping[Requester, int], requester: Requester, capacity: int) -> float:
    """Returns capacity / number of prefixes / number of peers in the requester's prefix: the requester's fair share.

    Counts only requesters that have something (held: what each has now), and `requester` itself.
    """
    peers: dict[str, set[PeerId]] = {requester.address_prefix: {requester.peer}}
    for other, count in held.items():
        if count:
            peers.setdefault(other.address_prefix, set()).add(other.peer)
    return capacity / len(peers) / len(peers[requester.address_prefix])


def largest_requester(held: Mapping[Requester, int], newcomer: Requester) -> Requester | None:
    """Returns which requester should give up a slot for `newcomer`: the largest one of the prefix that holds most.

    That prefix may be the newcomer's own. held: how many slots each requester has now. Returns None if no requester has
    any, if the largest requester is the newcomer itself, or if another prefix is chosen but the newcomer's holds as
    much.
    """
    by_prefix: Counter[str] = Counter()
    for requester, count in held.items():
        by_prefix[requester.address_prefix] += count
    if not by_prefix:
        return None
    prefix = max(by_prefix, key=lambda known: (by_prefix[known], known))
    if by_prefix[newcomer.address_prefix] >= by_prefix[prefix] and prefix != newcomer.address_prefix:
        return None
    largest = max(
        (h for h in held if h.address_prefix == prefix and held[h]), key=lambda h: (held[h], h.peer), default=None
    )
    return None if largest is None or largest == newcomer else largest


class SharedCapacity:
    """A capacity of `limit` slots or bytes that requesters share: counts what each has (`held`); see may_acquire."""

    def __init__(self, limit: int, max_fraction_each: float = 1.0) -> None:
        """max_fraction_each: the fraction of the capacity that one requester may have, even if no other wants any."""
        self.limit = limit
        self.held: Counter[Requester] = Counter()
        self._max_fraction_each = max_fraction_each

    def acquire(self, requester: Requester, size: int = 1) -> bool:
        """Takes `size` of the capacity for `requester` if max_fraction_each and may_acquire allow; False if not.

        If not, takes nothing.
        """
        exceeds_own_limit = self.held[requester] + size > self._max_fraction_each * self.limit
        if exceeds_own_limit or not may_acquire(self.held, requester, self.limit, size):
            return False
        self.held[requester] += size
        return True

    def release(self, requester: Requester, size: int = 1) -> None:
        """Releases `size` of what the requester has, or all of it if that is less."""
        self.held[requester] -= size
        if self.held[requester] <= 0:
            del self.held[requester]
