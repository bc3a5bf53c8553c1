"""Token bucket, fair shares of work, slots and bytes, and the moving average. Deterministic.

A client's prefix matters because anyone can create as many peer ids as they like, but not as many networks.

| shared | rule | function |
|---|---|---|
| work per second | each client has a bucket that fills at a rate; a request takes its price out of it | RateLimiter |
| slots, bytes | a fraction is free to all; each prefix may have an equal part, a peer one of that | may_acquire |
| slots, all taken | a client with more than its part gives one up, the largest client first | largest_client |
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

# Maximum number of clients whose buckets are remembered; the one that asked longest ago is forgotten first.
MAX_CLIENTS: Final = 16_384
ROUNDING_S: Final = 1e-6  # sums of floats must not cost the last token of a full bucket
FREE_FRACTION: Final = 0.5  # the fraction of a capacity that any client may take, whichever clients have the rest


class Client(NamedTuple):
    """A user of a part of what is shared: a peer, and the prefix of the address that it comes from ("" if unknown)."""

    prefix: str
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
    """Limits the work per second of each client: keeps a token bucket for each, full at its first request.

    Keeps at most MAX_CLIENTS buckets: then the client that asked longest ago is forgotten, and would begin with a
    full bucket again.
    """

    def __init__(self, rate: float, burst: float) -> None:
        """rate: tokens that a bucket gains each second. burst: the most that it holds, and so the highest price."""
        self.rate = rate
        self.burst = burst
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def take(self, client: Hashable, now: float, price: float = 1.0) -> bool:
        """Takes `price` tokens out of the client's bucket if it has that many by `now`; returns whether it did."""
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = TokenBucket(self.rate, self.burst / self.rate)
            if len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(client)
        return bucket.try_take(price, now)


def may_acquire(
    held: Mapping[Client, int], client: Client, capacity: int, size: int = 1, free: float = FREE_FRACTION
) -> bool:
    """Returns whether `client` may take `size` more of a `capacity` (of slots or bytes). held: what each has now.

    | taken in all afterwards | which clients may take it |
    |---|---|
    | at most free * capacity | all |
    | more | a client that stays within its fair share, see fair_share_of, or that has nothing yet |
    | more than the capacity | none |
    """
    taken = sum(held.values()) + size
    own = held.get(client, 0)
    if taken > capacity:
        return False
    return taken <= free * capacity or not own or own + size <= fair_share_of(held, client, capacity)


def fair_share_of(held: Mapping[Client, int], client: Client, capacity: int) -> float:
    """Returns capacity / number of prefixes / number of peers in the client's prefix: the client's fair share.

    Counts only clients that have something (held: what each has now), and `client` itself.
    """
    peers: dict[str, set[PeerId]] = {client.prefix: {client.peer}}
    for other, count in held.items():
        if count:
            peers.setdefault(other.prefix, set()).add(other.peer)
    return capacity / len(peers) / len(peers[client.prefix])


def largest_client(held: Mapping[Client, int], newcomer: Client) -> Client | None:
    """Returns which client should give up a slot for `newcomer`: the largest client of the prefix that holds most.

    That prefix may be the newcomer's own. held: how many slots each client has now. Returns None if no client has
    any, if the largest client is the newcomer itself, or if another prefix is chosen but the newcomer's holds as
    much.
    """
    by_prefix: Counter[str] = Counter()
    for client, count in held.items():
        by_prefix[client.prefix] += count
    if not by_prefix:
        return None
    prefix = max(by_prefix, key=lambda known: (by_prefix[known], known))
    if by_prefix[newcomer.prefix] >= by_prefix[prefix] and prefix != newcomer.prefix:
        return None
    largest = max((h for h in held if h.prefix == prefix and held[h]), key=lambda h: (held[h], h.peer), default=None)
    return None if largest is None or largest == newcomer else largest


class SharedCapacity:
    """A capacity of `limit` slots or bytes that clients share: counts what each has (`held`); see may_acquire."""

    def __init__(self, limit: int, max_fraction_each: float = 1.0) -> None:
        """max_fraction_each: the fraction of the capacity that one client may have, even if no other wants any."""
        self.limit = limit
        self.held: Counter[Client] = Counter()
        self._max_fraction_each = max_fraction_each

    def acquire(self, client: Client, size: int = 1) -> bool:
        """Takes `size` of the capacity for `client` if max_fraction_each and may_acquire allow; False if not.

        If not, takes nothing.
        """
        exceeds_own_limit = self.held[client] + size > self._max_fraction_each * self.limit
        if exceeds_own_limit or not may_acquire(self.held, client, self.limit, size):
            return False
        self.held[client] += size
        return True

    def release(self, client: Client, size: int = 1) -> None:
        """Releases `size` of what the client has, or all of it if that is less."""
        self.held[client] -= size
        if self.held[client] <= 0:
            del self.held[client]


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """An exponential moving average in which the first 1 / `weight` samples count equally; see `with_sample`.

    weight: of a new sample, 0 to 1. value: None before the first sample. samples: how many there were.
    """

    weight: float
    value: float | None = None
    samples: int = 0

    def with_sample(self, sample: float) -> MovingAverage:
        """Returns the average with `sample` added: value + w * (sample - value), w = max(weight, 1 / (samples + 1))."""
        weight = max(self.weight, 1.0 / (self.samples + 1))
        value = sample if self.value is None else self.value
        return MovingAverage(self.weight, value + weight * (sample - value), self.samples + 1)
