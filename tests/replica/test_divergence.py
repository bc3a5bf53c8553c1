"""Replicas that have taken different steps find out, and all but the largest group fetch the state of that."""

from __future__ import annotations

import asyncio

import pytest
from agora_protocol.ids import PeerId

from agora.observe.events import StageDiverged
from agora.replica.votes import Electorate, HistoryReport, replicas_to_fetch_from
from agora.train.stage import INITIAL_HASH, KEPT_STEPS, extend_history
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_stage_replicas import ALL_REDUCES, assert_equal_bits, at_one_step
from tests.virtual_time import run

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "z"))


def history_hashes(checksums: dict[int, int], first: dict[int, int]) -> dict[int, int]:
    made = first
    for step, checksum in checksums.items():
        made = extend_history(made, step, checksum)
    return made


BEGUN = history_hashes(dict.fromkeys(range(1, 6), 5), {0: INITIAL_HASH})
EQUAL = history_hashes(dict.fromkeys(range(6, 11), 5), BEGUN)
OTHER = history_hashes(dict.fromkeys(range(6, 11), 6), BEGUN)


def test_a_history_hash_tells_of_any_earlier_step() -> None:
    assert EQUAL[5] == OTHER[5] != 0 and EQUAL[6] != OTHER[6]
    later = [history_hashes(dict.fromkeys(range(11, 200), 7), first) for first in (EQUAL, OTHER)]
    assert later[0][199] != later[1][199] and len(later[0]) == KEPT_STEPS


def test_a_history_hash_is_unknown_after_one_that_is() -> None:
    assert history_hashes({11: 5, 12: 5}, {10: 0}) == {10: 0, 11: 0, 12: 0}
    assert history_hashes({11: 5}, {3: 7})[11] == 0, "steps are missing"


@pytest.mark.parametrize(
    ("others", "fetch_from"),
    [
        ({}, ()),
        ({A: HistoryReport(10, EQUAL[10])}, ()),
        ({A: HistoryReport(10, 0), B: HistoryReport(99, 7)}, ()),
        ({A: HistoryReport(10, OTHER[10]), B: HistoryReport(9, OTHER[9]), C: HistoryReport(10, EQUAL[10])}, ()),
        ({A: HistoryReport(10, OTHER[10]), B: HistoryReport(10, OTHER[10]), C: HistoryReport(10, EQUAL[10])}, (A, B)),
        ({A: HistoryReport(10, OTHER[10])}, (A,)),
        ({C: HistoryReport(10, OTHER[10])}, ()),
        ({A: HistoryReport(5, OTHER[5]), C: HistoryReport(5, OTHER[5])}, ()),
        ({A: HistoryReport(10, 1), B: HistoryReport(10, 2), C: HistoryReport(10, 3)}, (A,)),
        ({A: HistoryReport(10, OTHER[10]), C: HistoryReport(11, 7)}, ()),
    ],
    ids=[
        "alone",
        "equal",
        "unknown",
        "few",
        "tie, least id",
        "two, least id",
        "two, own id",
        "an equal step",
        "none",
        "one not comparable yet",
    ],
)
def test_the_largest_group_is_right_and_of_equal_ones_that_with_the_least_id(
    others: dict[PeerId, HistoryReport], fetch_from: tuple[PeerId, ...]
) -> None:
    assert replicas_to_fetch_from(EQUAL, Electorate(ME, 0, 0, others, {})) == fetch_from


def split(world: GroupWorld, one: list[GroupPeer], other: list[GroupPeer]) -> None:
    world.network.broken |= {frozenset((a.peer, b.peer)) for a in one for b in other}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1)], ids=str)
def test_halves_of_a_split_stage_are_one_again_after_it(sizes: tuple[int, int]) -> None:
    """Each half trains on alone; when they meet again, the smaller one fetches the state of the larger."""

    async def main() -> None:
        count = sum(sizes)
        async with GroupWorld([4000.0] * count, target=4096, **ALL_REDUCES) as world:
            await asyncio.sleep(10.0)
            one, other = world.all[: sizes[0]], world.all[sizes[0] :]
            split(world, one, other)
            await asyncio.sleep(20.0)
            steps = [peer.stage.step for peer in world.all]
            await asyncio.sleep(10.0)
            assert all(peer.stage.step > step + 3 for peer, step in zip(world.all, steps, strict=True))
            world.network.broken.clear()
            await asyncio.sleep(30.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            diverged = [peer for peer in world.all if peer.of(StageDiverged) or peer.fetches]
            if len(set(sizes)) > 1:
                assert diverged == other
            begun = [peer.stage.step for peer in world.all]
            await asyncio.sleep(10.0)
            assert all(peer.stage.step > step for peer, step in zip(world.all, begun, strict=True))

    run(main())


@pytest.mark.parametrize("id_of_the_other", [A, C])
def test_a_replica_that_has_taken_half_a_step_follows_any_other_group_and_is_followed_by_none(
    id_of_the_other: PeerId,
) -> None:
    others = {id_of_the_other: HistoryReport(10, OTHER[10])}
    assert replicas_to_fetch_from(EQUAL, Electorate(ME, 0, 0, others, {}), is_torn=True) == (id_of_the_other,)
    assert replicas_to_fetch_from(
        EQUAL, Electorate(ME, 0, 0, {A: HistoryReport(11, 7), C: HistoryReport(11, 7)}, {}), is_torn=True
    ) == (A, C)
    assert replicas_to_fetch_from(EQUAL, Electorate(ME, 0, 0, {}, {}), is_torn=True) == ()
    assert replicas_to_fetch_from(EQUAL, Electorate(ME, 0, 0, {A: HistoryReport(10, 0)}, {}), is_torn=True) == ()
