"""Replicas that have applied different means find out, and those with fewer votes fetch the state of the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from agora_protocol.ids import PeerId

from agora.observe.events import StageDiverged
from agora.replica.trust import VOTE_STEPS, Divergence, HistoryReport, Standing, find_divergence, with_reports
from agora.train.stage import INITIAL_HASH, KEPT_STEPS, extend_history
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_replica_group import EXACT, assert_equal_bits, at_one_step
from tests.virtual_time import run

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "z"))


def lineages(checksums: dict[int, int], first: dict[int, int]) -> dict[int, int]:
    made = first
    for step, checksum in checksums.items():
        made = extend_history(made, step, checksum)
    return made


BEGUN = lineages(dict.fromkeys(range(1, 6), 5), {0: INITIAL_HASH})
EQUAL = lineages(dict.fromkeys(range(6, 11), 5), BEGUN)
OTHER = lineages(dict.fromkeys(range(6, 11), 6), BEGUN)


def test_a_lineage_tells_of_any_earlier_step() -> None:
    assert EQUAL[5] == OTHER[5] != 0 and EQUAL[6] != OTHER[6]
    later = [lineages(dict.fromkeys(range(11, 200), 7), first) for first in (EQUAL, OTHER)]
    assert later[0][199] != later[1][199] and len(later[0]) == KEPT_STEPS


def test_a_lineage_is_unknown_after_one_that_is() -> None:
    assert lineages({11: 5, 12: 5}, {10: 0}) == {10: 0, 11: 0, 12: 0}
    assert lineages({11: 5}, {3: 7})[11] == 0, "steps are missing"


SINCE_THE_START = Standing(first=0, steps=9, last=9, equal_at=90.0)
LONG = Standing(first=40, steps=VOTE_STEPS, last=99, equal_at=90.0)
NEW = replace(LONG, steps=VOTE_STEPS - 1)
AWAY = replace(SINCE_THE_START, away_at=95.0)


def divergence(
    reports: dict[PeerId, HistoryReport], standings: dict[PeerId, Standing], me: PeerId = ME, start_step: int = 0
) -> Divergence:
    return find_divergence(EQUAL, me, reports, standings, start_step=start_step, run="run")


EQUALS, OTHERS = HistoryReport(10, EQUAL[10]), HistoryReport(10, OTHER[10])


@pytest.mark.parametrize(
    ("reports", "fetch_from"),
    [
        ({}, ()),
        ({A: EQUALS}, ()),
        ({A: HistoryReport(10, 0), B: HistoryReport(99, 7)}, ()),
        ({A: OTHERS, B: HistoryReport(9, OTHER[9]), C: EQUALS}, ()),
        ({A: OTHERS, B: OTHERS, C: EQUALS}, ()),
        ({A: OTHERS, B: OTHERS}, (A, B)),
        ({A: HistoryReport(5, OTHER[5]), C: HistoryReport(5, OTHER[5])}, ()),
        ({A: HistoryReport(10, 1), B: HistoryReport(10, 2), C: HistoryReport(10, 3)}, ()),
        ({A: OTHERS, B: OTHERS, C: HistoryReport(11, 7)}, ()),
    ],
    ids=["alone", "equal", "unknown", "few", "as many", "more", "an equal step", "none", "one not comparable yet"],
)
def test_the_group_with_most_votes_is_right_and_no_tie_goes_to_an_id(
    reports: dict[PeerId, HistoryReport], fetch_from: tuple[PeerId, ...]
) -> None:
    for standing in (SINCE_THE_START, LONG):
        assert divergence(reports, dict.fromkeys((A, B, C), standing)).fetch_from == fetch_from


@pytest.mark.parametrize("me", [PeerId("0"), PeerId("zz")])
def test_of_two_replicas_none_follows_the_other_unless_they_were_apart(me: PeerId) -> None:
    """A liar's id may be less than any other one: ids are free."""
    assert divergence({A: OTHERS}, {A: SINCE_THE_START}, me) == Divergence(undecided=(A,))
    assert divergence({A: OTHERS}, {}, me) == Divergence(), "a stranger"
    apart = divergence({A: OTHERS}, {A: AWAY}, me), divergence({me: OTHERS}, {me: AWAY}, A)
    assert sorted(map(bool, (half.fetch_from for half in apart))) == [False, True], "one half fetches from the other"
    assert not any(half.undecided for half in apart)


def test_one_that_stayed_while_others_were_away_does_not_win_with_them() -> None:
    reports = {A: EQUALS, B: OTHERS, C: OTHERS}
    assert divergence(reports, {A: SINCE_THE_START, B: AWAY, C: SINCE_THE_START}).undecided == (B, C)


def test_many_new_ids_have_no_vote() -> None:
    honest, sybils = [PeerId(f"h{n}") for n in range(3)], [PeerId(f"a{n}") for n in range(50)]
    reports = dict.fromkeys(honest, EQUALS) | dict.fromkeys(sybils, OTHERS)
    standings = dict.fromkeys(honest, SINCE_THE_START)
    assert divergence(reports, standings) == Divergence()
    assert divergence(reports, standings | dict.fromkeys(sybils, NEW)) == Divergence()
    assert divergence(reports, standings | dict.fromkeys(sybils[:3], LONG)) == Divergence(), "four are more than three"
    found = divergence(dict.fromkeys(sybils, OTHERS), dict.fromkeys(sybils[:2], LONG))
    assert found.fetch_from == tuple(sybils[:2]), "and only voters are asked for the state"


def test_one_that_begins_with_another_history_than_all_others_follows_them() -> None:
    assert divergence({A: OTHERS, B: OTHERS}, {}, start_step=9).fetch_from == (A, B)
    assert divergence({A: OTHERS, B: OTHERS}, {}, start_step=0) == Divergence(), "it was here when the run began"


def test_a_standing_counts_steps_and_not_reports() -> None:
    standings: dict[PeerId, Standing] = {}
    for now, step in enumerate((3, 3, 4, 3, 5)):
        reports = {A: HistoryReport(step, EQUAL[step]), B: HistoryReport(step, 1), C: HistoryReport(step, 0)}
        standings = with_reports(standings, EQUAL, reports, [], float(now))
    assert standings == {A: Standing(first=3, steps=3, last=5, equal_at=4.0)}
    gone = with_reports(standings, EQUAL, {}, [A, B], 5.0)
    assert gone[A].was_away and not standings[A].was_away
    assert not with_reports(gone, EQUAL, {A: EQUALS}, [], 6.0)[A].was_away, "it is back, and equal"


def split(world: GroupWorld, one: list[GroupPeer], other: list[GroupPeer]) -> None:
    world.network.broken |= {frozenset((a.peer, b.peer)) for a in one for b in other}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1)], ids=str)
def test_halves_of_a_split_stage_are_one_again_after_it(sizes: tuple[int, int]) -> None:
    """Each half trains on alone; when they meet again, the smaller one fetches the state of the larger."""

    async def main() -> None:
        count = sum(sizes)
        async with GroupWorld([4000.0] * count, target=4096, **EXACT) as world:
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
