"""Fragments cover everything exactly once; reducers win shards in proportion to their bandwidth, for a turn."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from agora_protocol.limits import MAX_PART_ELEMENTS, PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.parts import fragment_count

from agora.replica.reducers import (
    ROUNDS_PER_REDUCER,
    FragmentDivision,
    reducers_of,
    reducing_bandwidths,
    reducing_epoch,
)
from agora.replica.shard_codec import Shard, cut_into_shards
from tests.replica.world import RUN, identities


@pytest.mark.parametrize("blocks", [1, 2, 7, 47, 1000])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_every_block_is_in_exactly_one_of_the_fragments(blocks: int, fraction: float) -> None:
    division = FragmentDivision(blocks * SLICE_BLOCK, fragment_count(fraction), seed=7)
    found = [division.blocks(number) for number in range(division.count)]
    assert sorted(np.concatenate(found)) == list(range(blocks))
    assert [len(it) * SLICE_BLOCK for it in found] == [division.numel_of(number) for number in range(division.count)]
    assert np.array_equal(division.blocks(0), division.blocks(division.count)), "round K averages slice 0 again"


def test_a_newcomer_reduces_no_shard_unless_all_are_newcomers() -> None:
    *others, newcomer = identities(4)
    members = dict.fromkeys(others, 0.0) | {newcomer: None}
    for part in range(200):
        assert newcomer not in reducers_of(RUN, Shard(0, "gradient", 0, part), members)
    assert reducers_of(RUN, Shard(0, "gradient", 0, 0), {others[0]: 0.0, newcomer: None}) == (others[0], None)
    assert set(reducers_of(RUN, Shard(0, "gradient", 0, 0), {others[0]: None, newcomer: None})) == {others[0], newcomer}


def test_a_twentieth_makes_twenty_fragments_and_the_blocks_are_pinned() -> None:
    division = FragmentDivision(100 * SLICE_BLOCK, fragment_count(0.05), seed=7)
    assert division.count == fragment_count(0.05) == 20
    assert (
        division.blocks(3).tolist()
        == FragmentDivision(100 * SLICE_BLOCK, fragment_count(0.05), seed=7).blocks(3).tolist()
    )
    assert (
        division.blocks(3).tolist()
        != FragmentDivision(100 * SLICE_BLOCK, fragment_count(0.05), seed=8).blocks(3).tolist()
    )


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 1), (0.9, 2), (0.5, 2), (0.3, 4), (1 / 3, 3), (0.01, 100)])
def test_how_many_fragments_there_are_does_not_depend_on_the_stage(fraction: float, count: int) -> None:
    assert {
        FragmentDivision(blocks * SLICE_BLOCK, fragment_count(fraction), seed=7).count for blocks in (1, 3, 1000)
    } == {count}


def test_fragments_beyond_the_number_of_blocks_are_empty() -> None:
    division = FragmentDivision(3 * SLICE_BLOCK, fragment_count(0.1), seed=7)
    assert [len(division.blocks(number)) for number in range(10)] == [1, 1, 1] + [0] * 7
    assert [division.numel_of(number) for number in range(2, 5)] == [SLICE_BLOCK, 0, 0]
    assert cut_into_shards(0) == [], "and have no shards"


def test_shards_are_of_one_size_but_the_last() -> None:
    cuts = cut_into_shards(2 * PART_ELEMENTS + 5)
    assert [cut.stop - cut.start for cut in cuts] == [PART_ELEMENTS, PART_ELEMENTS, 5]


@pytest.mark.parametrize(
    ("elements", "of_shard", "shards"),
    [
        (64 * PART_ELEMENTS, PART_ELEMENTS, 64),
        (64 * PART_ELEMENTS + 1, 2 * PART_ELEMENTS, 33),
        (128 * PART_ELEMENTS + 1, MAX_PART_ELEMENTS, 33),
        (10**9, MAX_PART_ELEMENTS, 1908),
    ],
)
def test_a_large_vector_has_larger_shards_up_to_a_limit(elements: int, of_shard: int, shards: int) -> None:
    cuts = cut_into_shards(elements)
    assert len(cuts) == shards and cuts[-1].stop == elements
    assert {cut.stop - cut.start for cut in cuts[:-1]} == {of_shard}
    assert all(before.stop == after.start for before, after in pairwise(cuts))


def test_a_peer_wins_shards_as_its_bandwidth_is() -> None:
    peers = identities(4)
    members = dict(zip(peers, (10.0, 20.0, 0.0, 30.0), strict=True))  # unknown: the median, 20
    wins = Counter(reducers_of(RUN, Shard(0, "fragment", 1, part, 20), members)[0] for part in range(4000))
    for peer, share in zip(peers, (1, 2, 2, 3), strict=True):
        assert wins[peer] == pytest.approx(4000 * share / 8, rel=0.1)


def test_a_replica_behind_a_relay_reduces_a_quarter_of_the_shards_that_it_would_reduce() -> None:
    direct, relayed, unknown, unreachable = identities(4)
    weights = reducing_bandwidths(
        {
            direct: (20.0, "public"),
            relayed: (40.0, "relayed"),
            unknown: (0.0, "punched"),
            unreachable: (0.0, "unreachable"),
        }
    )
    assert weights == {direct: 20.0, relayed: 10.0, unknown: 30.0, unreachable: 30.0 / 4}
    members = reducing_bandwidths({direct: (0.0, "public"), relayed: (0.0, "relayed")})
    wins = Counter(reducers_of(RUN, Shard(0, "fragment", 1, part, 20), members)[0] for part in range(4000))
    assert wins[relayed] == pytest.approx(4000 / 5, rel=0.1)


def test_a_peer_that_goes_leaves_the_shards_of_others_alone() -> None:
    peers = identities(5)
    before = dict.fromkeys(peers, 0.0)
    after = dict.fromkeys(peers[:-1], 0.0)
    for part in range(200):
        first, second = reducers_of(RUN, Shard(0, "fragment", 1, part, 20), before)
        gone = peers[-1]
        assert reducers_of(RUN, Shard(0, "fragment", 1, part, 20), after)[0] == (second if first == gone else first)


def test_a_gradient_has_its_reducers_for_sixteen_rounds() -> None:
    turns = [reducing_epoch(number, fragments=0) for number in range(3 * ROUNDS_PER_REDUCER)]
    assert turns == ["0"] * 16 + ["1"] * 16 + ["2"] * 16


@pytest.mark.parametrize("slices", [1, 4, 20])
def test_a_fragment_has_its_reducers_for_sixteen_of_its_own_rounds_and_no_other_fragment_has_them(slices: int) -> None:
    turns = [reducing_epoch(number, slices) for number in range(2 * ROUNDS_PER_REDUCER * slices)]
    for number in range(slices):
        assert turns[number::slices] == [f"{number}.0"] * ROUNDS_PER_REDUCER + [f"{number}.1"] * ROUNDS_PER_REDUCER
    assert len(set(turns)) == 2 * slices


def test_over_turns_and_fragments_everybody_reduces_as_much() -> None:
    members = dict.fromkeys(identities(4), 0.0)
    turns = {reducing_epoch(number, 20): number for number in range(50 * 20 * ROUNDS_PER_REDUCER)}
    wins = Counter(reducers_of(RUN, Shard(0, "fragment", number, 0, 20), members)[0] for number in turns.values())
    assert len(turns) == 1000 and sorted(wins) == sorted(members)
    assert all(count == pytest.approx(250, rel=0.2) for count in wins.values())
