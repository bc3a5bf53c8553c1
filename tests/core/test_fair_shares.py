"""Who may use how much of what is shared: no requester, and no network of requesters, takes the others' part."""

from __future__ import annotations

import pytest
from agora_protocol.addresses import address_prefix
from agora_protocol.ids import PeerId

from agora.core import fair_shares
from agora.core.fair_shares import RateLimiter, Requester, SharedCapacity, largest_requester


def requester(peer: str, prefix: str = "203.0.113.0/24") -> Requester:
    return Requester(prefix, PeerId(peer))


def test_a_bucket_pays_a_burst_at_once_and_then_its_rate() -> None:
    buckets = RateLimiter(rate=10.0, burst=20.0)
    assert all(buckets.take("a", 0.0) for _ in range(20)) and not buckets.take("a", 0.0)
    assert buckets.take("b", 0.0, 20.0), "others have buckets of their own"
    assert buckets.take("a", 0.5, 5.0) and not buckets.take("a", 0.5)
    assert not buckets.take("a", 0.4), "a clock that goes back fills nothing"
    assert buckets.take("a", 100.0, 20.0) and not buckets.take("a", 100.0, 0.1)
    assert not buckets.take("c", 0.0, 20.1), "what costs more than a burst is never paid"


def test_buckets_of_the_longest_idle_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "MAX_REQUESTERS", 2)
    buckets = RateLimiter(rate=1.0, burst=1.0)
    for name in ("a", "b", "a", "c"):
        buckets.take(name, 0.0)
    assert not buckets.take("a", 0.0) and buckets.take("b", 0.0), "b was forgotten, a was not"


def test_addresses_of_one_network_have_one_prefix() -> None:
    assert address_prefix("/ip4/203.0.113.7/tcp/4001/p2p/Q") == address_prefix("/ip4/203.0.113.250/udp/1/quic")
    assert address_prefix("/ip4/203.0.113.7/tcp/1") == "203.0.113.0/24"
    assert address_prefix("/ip6/2001:db8:1:2::3/tcp/1") == "2001:db8:1::/48"
    assert address_prefix("/dns4/example.org/tcp/1") == address_prefix("/ip4/nonsense") == address_prefix("") == ""
    assert address_prefix("/ip4/198.51.100.4/tcp/1/p2p/R/p2p-circuit") == "198.51.100.0/24", "the relay's"


def test_one_consumer_takes_half_of_the_capacity_and_leaves_the_rest_to_others() -> None:
    capacity, greedy = SharedCapacity(8), requester("greedy")
    assert sum(capacity.acquire(greedy) for _ in range(20)) == 8, "alone it may have all"
    for _ in range(4):
        capacity.release(greedy)
    late = requester("late")
    assert capacity.acquire(late)
    assert not capacity.acquire(greedy), "it has its half"
    assert sum(capacity.acquire(late) for _ in range(20)) == 3
    assert capacity.held == {greedy: 4, late: 4}


def test_a_hundred_peers_of_one_network_get_no_more_than_one_of_another() -> None:
    capacity = SharedCapacity(16)
    crowd = sum(capacity.acquire(requester(f"p{number}")) for number in range(100))
    assert crowd == 16, "nobody else asks"
    for number in range(8):
        capacity.release(requester(f"p{number}"))
    other = requester("other", "198.51.100.0/24")
    assert sum(capacity.acquire(other) for _ in range(20)) == 8


def test_whoever_comes_to_a_full_house_takes_a_slot_from_the_largest_network_only() -> None:
    held = {requester("a"): 3, requester("b"): 5, requester("c", "198.51.100.0/24"): 6}
    assert largest_requester(held, requester("new", "192.0.2.0/24")) == requester("b")
    assert largest_requester(held, requester("d")) == requester("b"), "its own network pays"
    assert largest_requester(held, requester("b")) is None, "nobody pays for who has the most"
    assert largest_requester({}, requester("a")) is None
    even = {requester("a"): 1, requester("c", "198.51.100.0/24"): 1}
    assert largest_requester(even, requester("d", "198.51.100.0/24")) is None, "it would hold more than who pays"


def test_a_capacity_is_given_back_completely() -> None:
    capacity = SharedCapacity(2)
    assert (
        capacity.acquire(requester("a")) and capacity.acquire(requester("b")) and not capacity.acquire(requester("c"))
    )
    capacity.release(requester("a"))
    capacity.release(requester("b"))
    assert not capacity.held
