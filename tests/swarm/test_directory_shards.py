"""Where peers publish and what they read: bounded for any number of peers, and nobody is lost."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest
from agora_protocol.directory_shards import HASHES, DirectoryShard, shard_bits
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_SHARD_BITS

from agora.swarm.directory_shards import (
    MAX_NEXT_SHARDS,
    OWN_SHARD_ROTATION_S,
    OWN_SHARDS,
    RANDOM_SHARD_ROTATION_S,
    READINGS_LIFETIME_S,
    SHARDS_PER_READ,
    SMALL_RUN,
    KnownReadings,
    ReaderIdentity,
    add_readings,
    choose_shards_to_read,
    close_shards,
    depth_to_read,
    depths_to_publish,
    estimate_peers,
    judge_reading,
    next_shards,
    own_shards,
    shards_to_publish,
)

SIZES = [10, 40, 200, 1_000, 10_000, 100_000]


def hashes_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def bottom(hashes: Iterable[int], shard: DirectoryShard) -> list[int]:
    """What a node keeps of a shard in which all of these publish."""
    return sorted(peer for peer in hashes if shard.contains(peer))[:MAX_KEY_RECORDS]


def knowing(counts: Mapping[int, float], depth: int = 0) -> KnownReadings:
    """Readings from which a stage has exactly so many peers."""
    known: KnownReadings = {}
    for stage, count in counts.items():
        shard = DirectoryShard(stage, "0" * depth)
        reading = judge_reading(shard, (), 0.0)
        known = add_readings(known, {shard: type(reading)(round(count * 0.5**depth), 0.5**depth, 0.0)})
    return known


# --- how many peers there are


@pytest.mark.parametrize("count", SIZES)
def test_the_estimate_is_exact_while_a_key_is_not_full_and_near_when_it_is(count: int) -> None:
    ratios = []
    for seed in range(20 if count < 10_000 else 3):
        hashes = hashes_of(count, seed)
        known = add_readings(
            {}, {DirectoryShard(0): judge_reading(DirectoryShard(0), bottom(hashes, DirectoryShard(0)), 1.0)}
        )
        ratios.append(estimate_peers(known, 0) / count)
    if count < MAX_KEY_RECORDS:
        assert ratios == [1.0] * len(ratios)
    assert all(0.6 < ratio < 1.6 for ratio in ratios)
    assert math.fsum(ratios) / len(ratios) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("count", [200, 1_000, 30_000])
def test_a_few_shards_of_the_depth_that_is_read_tell_the_count_within_a_quarter(count: int) -> None:
    hashes, depth = hashes_of(count), depth_to_read(count)
    shards = {DirectoryShard(0, shard_bits(corner, depth)) for corner in hashes_of(8, seed=1)}
    known = add_readings({}, {shard: judge_reading(shard, bottom(hashes, shard), 1.0) for shard in shards})
    assert estimate_peers(known, 0) == pytest.approx(count, rel=0.25)


def test_a_stage_of_which_nothing_was_read_has_no_peers_and_one_read_empty_neither() -> None:
    assert estimate_peers({}, 3) == 0.0
    assert (
        estimate_peers(add_readings({}, {DirectoryShard(3, "01"): judge_reading(DirectoryShard(3, "01"), [], 1.0)}), 3)
        == 0.0
    )


def test_old_readings_of_a_stage_are_forgotten_only_after_newer_ones_came() -> None:
    def found(shard: DirectoryShard, count: int, at: float) -> KnownReadings:
        return add_readings(known, {shard: judge_reading(shard, range(count), at)})

    known: KnownReadings = {}
    known = found(DirectoryShard(0, "00"), 8, 0.0)
    known = found(DirectoryShard(0, "11"), 4, READINGS_LIFETIME_S)
    assert estimate_peers(known, 0) == pytest.approx(24.0)
    known = found(DirectoryShard(0, "11"), 4, READINGS_LIFETIME_S + 1.0)
    assert estimate_peers(known, 0) == pytest.approx(16.0)
    known = found(DirectoryShard(1), 5, 1e9)
    assert estimate_peers(known, 0) == pytest.approx(16.0), "another stage's reading makes nothing old"


def test_ids_made_to_have_the_least_hashes_spoil_the_estimate_only_until_shards_are_read() -> None:
    honest, ground = hashes_of(10_000), list(range(MAX_KEY_RECORDS))
    everybody = [*honest, *ground]
    known = add_readings(
        {}, {DirectoryShard(0): judge_reading(DirectoryShard(0), bottom(everybody, DirectoryShard(0)), 0.0)}
    )
    assert estimate_peers(known, 0) > 1e12
    assert depth_to_read(estimate_peers(known, 0)) == MAX_SHARD_BITS
    reader, reads = ReaderIdentity(hashes_of(1, seed=5)[0], 1, Span(0, 0), 7), 0
    while estimate_peers(known, 0) > 20_000:
        to_read, reads = choose_shards_to_read(known, reader, 8.0 * reads, random.Random(reads)), reads + 1
        found = {shard: judge_reading(shard, bottom(everybody, shard), 8.0 * reads) for shard in to_read.shards}
        known = add_readings(known, found)
    assert reads <= 30


# --- where to publish


@pytest.mark.parametrize("count", [33, 46, 63, 64, 91, 1_000, 5_793, 99_999])
def test_peers_find_each_other_while_their_estimates_differ_by_up_to_a_factor_of_1_4(count: int) -> None:
    for skew in (1 / 1.4, 1 / 1.2, 1.0, 1.2, 1.4):
        assert depth_to_read(skew * count) in depths_to_publish(count), (count, skew)


def test_a_growing_stage_moves_on_by_one_depth_at_a_time_and_nobody_leaves_a_depth_that_is_read() -> None:
    counts = [32 * 1.02**power for power in range(400)]
    depths = [depth_to_read(count) for count in counts]
    assert {after - before for before, after in zip(depths, depths[1:], strict=False)} == {0, 1}
    assert all({depth} <= depths_to_publish(count) for count, depth in zip(counts, depths, strict=True))
    assert all(len(depths_to_publish(count)) <= 2 for count in counts)


def test_a_small_stage_has_one_key_as_ever() -> None:
    for count in (0, 1, 10, 32):
        assert shards_to_publish(knowing({4: count}), Span(4, 4), HASHES - 1) == [DirectoryShard(4)]


@pytest.mark.parametrize("count", SIZES)
def test_what_a_key_holds_is_bounded_and_whoever_should_be_read_is_there(count: int) -> None:
    known, published = knowing({0: count}), Counter[DirectoryShard]()
    depth = depth_to_read(count)
    for peer in hashes_of(count):
        shards = shards_to_publish(known, Span(0, 0), peer)
        assert 1 <= len(shards) <= 3
        assert all(shard.contains(peer) for shard in shards)
        assert DirectoryShard(0, shard_bits(peer, depth)) in shards
        published.update(shards)
    assert published[DirectoryShard(0)] <= 2 * MAX_KEY_RECORDS, "those beyond a full key's last do not even ask"
    assert published[DirectoryShard(0)] >= min(count, MAX_KEY_RECORDS)
    of_depth = [records for shard, records in published.items() if shard.depth == depth]
    kept = sum(min(records, MAX_KEY_RECORDS) for records in of_depth)
    assert kept >= 0.99 * count
    assert sum(of_depth) == count
    assert sum(published.values()) <= 3 * count


# --- what to read


def reader_of(peer_hash: int, span: Span | None, stages: int = 32) -> ReaderIdentity:
    return ReaderIdentity(peer_hash, stages, span, peer_hash ^ 0xABCDEF)


@pytest.mark.parametrize("peers", [0, 1, 3])
def test_a_small_run_is_read_whole_each_time(peers: int) -> None:
    to_read = choose_shards_to_read(
        knowing(dict.fromkeys(range(32), peers)), reader_of(7, Span(3, 4)), 5.0, random.Random(0)
    )
    assert to_read.is_small
    assert to_read.shards == tuple(map(DirectoryShard, range(32)))


def test_a_small_run_with_one_large_stage_is_read_whole_too() -> None:
    to_read = choose_shards_to_read(knowing({0: 120, 1: 4}), reader_of(7, Span(1, 1), 2), 5.0, random.Random(0))
    assert to_read.is_small
    assert set(to_read.shards) == {DirectoryShard(1), *(DirectoryShard(0, bits) for bits in ("00", "01", "10", "11"))}


@pytest.mark.parametrize("stages", [1, 32, 1024])
@pytest.mark.parametrize("per_stage", [300, 100_000])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_read_and_a_cycle_are_bounded_for_any_number_of_peers(stages: int, per_stage: int, length: int) -> None:
    span = Span(0, min(length, stages) - 1) if length else None
    known = knowing(dict.fromkeys(range(stages), per_stage), depth_to_read(per_stage))
    to_read = choose_shards_to_read(known, reader_of(123 << 50, span, stages), 0.0, random.Random(0))
    assert not to_read.is_small
    assert len(to_read.shards) <= SHARDS_PER_READ
    assert to_read.close_period <= (max(OWN_SHARDS, length) + MAX_NEXT_SHARDS + 8) / SHARDS_PER_READ
    assert to_read.other_period <= to_read.close_period * max(4, stages / 8)


def test_each_shard_of_interest_is_read_again_within_its_period() -> None:
    known = knowing(dict.fromkeys(range(32), 1_000), 5)
    reader, rng = reader_of(99 << 40, Span(5, 6)), random.Random(3)
    last: dict[DirectoryShard, int] = {}
    gaps: dict[bool, int] = defaultdict(int)
    close = close_shards([1_000.0] * 32, reader, 0.0)
    for number in range(400):
        to_read = choose_shards_to_read(known, reader, 2.0 * number, rng)
        for shard in to_read.shards:
            if shard in last and shard.bits:
                gaps[shard in close] = max(gaps[shard in close], number - last[shard])
            last[shard] = number
        readings = {s: type(judge_reading(s, (), 0.0))(31, 0.5**s.depth, 2.0 * number) for s in to_read.shards}
        known = add_readings(known, readings)
        if 2.0 * number > OWN_SHARD_ROTATION_S - 10:
            break
    assert close <= last.keys()
    assert {shard.stage for shard in last} == set(range(32))
    assert gaps[True] <= math.ceil(to_read.close_period) + 2
    assert gaps[False] <= math.ceil(to_read.other_period) + 3


@pytest.mark.parametrize("count", [10, 1_000, 30_000])
def test_every_peer_of_the_next_stage_is_known_to_some_callers_and_the_load_of_a_key_is_bounded(count: int) -> None:
    """Equally many peers of one stage call those of the next."""
    depth, readers = depth_to_read(count), Counter[DirectoryShard]()
    for peer in hashes_of(count, seed=2):
        readers.update(next_shards(1, count, count, peer & 0xFFFFFFFF, 0.0))
    shards = 2**depth
    assert len(readers) == shards, "no shard is unknown to all"
    assert max(readers.values()) <= 300
    assert min(readers.values()) >= min(count, 60)


def test_few_callers_of_many_peers_know_more_shards_each() -> None:
    few, many = next_shards(1, 3_000, 40, 1, 0.0), next_shards(1, 3_000, 3_000, 1, 0.0)
    assert len(many) <= 4 < len(few) <= MAX_NEXT_SHARDS


def test_random_shards_are_exchanged_one_at_a_time_so_that_a_router_keeps_most_of_whom_it_knows() -> None:
    times = [second * RANDOM_SHARD_ROTATION_S / 64 for second in range(129)]
    known = [next_shards(1, 10_000, 10_000, 5, now) for now in times]
    assert all(len(before - after) <= 1 for before, after in zip(known, known[1:], strict=False))
    assert len(set().union(*known)) > 8


@pytest.mark.parametrize("count", [200, 500])
def test_replicas_of_a_stage_of_up_to_500_all_know_each_other(count: int) -> None:
    depth = depth_to_read(count)
    for peer in hashes_of(20):
        assert own_shards(0, count, 1, peer, 0.0) == {
            DirectoryShard(0, shard_bits(n << (64 - depth), depth)) for n in range(2**depth)
        }


@pytest.mark.parametrize("stages", [1, 2, 4, 16, 200])
def test_beyond_that_replicas_that_know_each_other_know_the_same_ones(stages: int) -> None:
    hashes = hashes_of(300)
    groups = {peer: frozenset(own_shards(0, 20_000, stages, peer, 0.0)) for peer in hashes}
    assert all(len(group) == max(1, OWN_SHARDS // stages) for group in groups.values())
    depth = depth_to_read(20_000)
    for peer in hashes:
        shard = DirectoryShard(0, shard_bits(peer, depth))
        assert all((shard in group) == (group == groups[peer]) for group in groups.values())


def test_in_time_all_replicas_of_a_huge_stage_are_connected() -> None:
    depth = depth_to_read(20_000)
    start = DirectoryShard(0, "0" * depth)
    reached = {start}
    for turn in range(depth):
        now = turn * OWN_SHARD_ROTATION_S
        reached |= {new for old in reached for new in own_shards(0, 20_000, 1, old.first_hash, now)}
    assert len(reached) == 2**depth


def test_the_bound_of_a_small_run_counts_the_claims_of_all_stages() -> None:
    exactly, more = knowing({0: 128, 1: SMALL_RUN - 128}), knowing({0: 128, 1: SMALL_RUN - 127})
    assert choose_shards_to_read(exactly, reader_of(1, None, 2), 0.0, random.Random(0)).is_small
    assert not choose_shards_to_read(more, reader_of(1, None, 2), 0.0, random.Random(0)).is_small
