"""Slices cover everything exactly once; owners win parts in proportion to their bandwidth."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK

from agora.averaging.partition import Slices, choose_owners, cut_into_parts
from tests.averaging.world import RUN, identities


@pytest.mark.parametrize("blocks", [1, 2, 7, 47, 1000])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_every_block_is_in_exactly_one_of_the_slices(blocks: int, fraction: float) -> None:
    slices = Slices(blocks * SLICE_BLOCK, fraction, seed=7)
    found = [slices.blocks(number) for number in range(slices.count)]
    assert sorted(np.concatenate(found)) == list(range(blocks))
    assert [len(it) * SLICE_BLOCK for it in found] == [slices.numel_of(number) for number in range(slices.count)]
    assert np.array_equal(slices.blocks(0), slices.blocks(slices.count)), "round K averages slice 0 again"


def test_a_twentieth_makes_twenty_slices_and_the_blocks_are_pinned() -> None:
    slices = Slices(100 * SLICE_BLOCK, 0.05, seed=7)
    assert slices.count == 20
    assert slices.blocks(3).tolist() == Slices(100 * SLICE_BLOCK, 0.05, seed=7).blocks(3).tolist()
    assert slices.blocks(3).tolist() != Slices(100 * SLICE_BLOCK, 0.05, seed=8).blocks(3).tolist()


def test_parts_are_of_one_size_but_the_last() -> None:
    cuts = cut_into_parts(2 * PART_ELEMENTS + 5)
    assert [cut.stop - cut.start for cut in cuts] == [PART_ELEMENTS, PART_ELEMENTS, 5]


def test_a_peer_wins_parts_as_its_bandwidth_is() -> None:
    peers = identities(4)
    members = dict(zip(peers, (10.0, 20.0, 0.0, 30.0), strict=True))  # unknown: the median, 20
    wins = Counter(choose_owners(RUN, 0, "weights", 1, part, members)[0] for part in range(4000))
    for peer, share in zip(peers, (1, 2, 2, 3), strict=True):
        assert wins[peer] == pytest.approx(4000 * share / 8, rel=0.1)


def test_a_peer_that_goes_leaves_the_parts_of_others_alone() -> None:
    peers = identities(5)
    before = dict.fromkeys(peers, 0.0)
    after = dict.fromkeys(peers[:-1], 0.0)
    for part in range(200):
        first, second = choose_owners(RUN, 0, "weights", 1, part, before)
        gone = peers[-1]
        assert choose_owners(RUN, 0, "weights", 1, part, after)[0] == (second if first == gone else first)
