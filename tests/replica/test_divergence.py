"""Replicas that have taken different steps find out, and all fetch the state of those whose history is right.

That is decided by what a replica has seen of the others, not by how many ids there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from agora_protocol.ids import PeerId
from agora_protocol.messages import GossipedSteps, GossipSteps

from agora.observe.events import StageDiverged
from agora.replica.divergence import (
    MAX_SHARED_HISTORIES,
    VOTE_STEPS,
    Electorate,
    HistoryReport,
    SharedHistory,
    replicas_to_fetch_from,
    with_reports,
)
from agora.train.history_hash import INITIAL_HASH, KEPT_STEPS, extend_history
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_stage_replicas import ALL_REDUCES, assert_equal_bits, at_one_step
from tests.virtual_time import run

ME, A, B, C, D = (PeerId(name) for name in ("me", "a", "b", "z", "zz"))


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
def test_where_all_are_new_the_largest_group_is_right_and_of_equal_ones_that_with_the_least_id(
    others: dict[PeerId, HistoryReport], fetch_from: tuple[PeerId, ...]
) -> None:
    assert replicas_to_fetch_from(EQUAL, Electorate(ME, 0, others, {})) == fetch_from


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


@pytest.mark.parametrize("slow", [0, 1], ids=["the side of the least id is slow", "the other side is slow"])
def test_halves_of_a_split_stage_that_stepped_at_unlike_paces_are_one_again(slow: int) -> None:
    """The fast half is further ahead than the slow one can compare histories, and than its own pace would allow."""

    async def main() -> None:
        async with GroupWorld([4000.0] * 4, target=4096, **ALL_REDUCES) as world:
            world.suspends = True
            await asyncio.sleep(10.0)
            by_id = sorted(world.all, key=lambda peer: peer.peer)
            halves = by_id[:2], by_id[2:]
            split(world, *halves)
            for peer in halves[slow]:
                peer.stage.rate /= 8
            await asyncio.sleep(60.0)
            ahead = min(peer.stage.step for peer in halves[1 - slow]) - max(peer.stage.step for peer in halves[slow])
            assert ahead > 2 * KEPT_STEPS
            world.network.broken.clear()
            await asyncio.sleep(30.0)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            assert not any(peer.violations for peer in world.all)

    run(main())


@pytest.mark.parametrize("id_of_the_other", [A, C])
def test_a_replica_that_has_taken_half_a_step_follows_any_other_group_and_is_followed_by_none(
    id_of_the_other: PeerId,
) -> None:

    def fetched_from(reports: dict[PeerId, HistoryReport]) -> tuple[PeerId, ...]:
        return replicas_to_fetch_from(EQUAL, Electorate(ME, 0, reports, {}), is_torn=True)

    assert fetched_from({id_of_the_other: HistoryReport(10, OTHER[10])}) == (id_of_the_other,)
    assert fetched_from({A: HistoryReport(11, 7), C: HistoryReport(11, 7)}) == (A, C)
    assert fetched_from({}) == ()
    assert fetched_from({A: HistoryReport(10, 0)}) == ()


STEP = 200
HISTORY = {step: 1000 + step for step in range(STEP - 31, STEP + 1)}
SAME, OTHERS = HistoryReport(STEP, HISTORY[STEP]), HistoryReport(STEP, 7)
LONG = SharedHistory(first=0, last=STEP)
APART = SharedHistory(first=0, last=STEP - 50)  # a stage that was split since then
NEW = SharedHistory(first=STEP - VOTE_STEPS + 1, last=STEP)


def fetched_from(
    reports: dict[PeerId, HistoryReport],
    shared: dict[PeerId, SharedHistory],
    networks: dict[PeerId, str] | None = None,
    *,
    me: PeerId = ME,
    began: int = 0,
) -> tuple[PeerId, ...]:
    found = networks if networks is not None else {peer: peer for peer in (*reports, me)}
    return replicas_to_fetch_from(HISTORY, Electorate(me, began, reports, shared, lambda: found))


def test_any_number_of_ids_that_never_shared_the_history_decides_nothing() -> None:
    honest, strangers = [PeerId(f"h{n}") for n in range(3)], [PeerId(f"a{n}") for n in range(50)]
    reports = dict.fromkeys(honest, SAME) | dict.fromkeys(strangers, OTHERS)
    shared = dict.fromkeys(honest, LONG)
    assert fetched_from(reports, shared) == ()
    assert fetched_from(reports, shared | dict.fromkeys(strangers, NEW)) == (), "a few steps are not enough"
    assert fetched_from(dict.fromkeys(strangers, OTHERS), {}) == (), "a lone replica follows no strangers either"
    assert fetched_from(dict.fromkeys(strangers, OTHERS), dict.fromkeys(strangers, NEW)) == (), "nor when all are new"


def test_the_larger_group_of_those_that_have_shared_the_history_is_right() -> None:
    shared = dict.fromkeys((A, B, C), LONG)
    assert fetched_from({A: SAME, B: OTHERS, C: OTHERS}, shared) == ()
    assert fetched_from({A: OTHERS, B: OTHERS, C: SAME}, {**shared, C: NEW}) == (A, B)
    assert fetched_from({A: OTHERS, B: OTHERS, C: OTHERS, D: OTHERS}, shared) == (A, B, C), "voters are asked, not D"


def test_those_of_one_network_have_one_vote() -> None:
    shared = dict.fromkeys((A, B, C, D), LONG)
    reports = {A: OTHERS, B: OTHERS, C: OTHERS, D: SAME}
    assert fetched_from(reports, shared) == (A, B, C)
    assert fetched_from(reports, shared, {A: "n", B: "n", C: "n", D: "d", ME: "me"}) == ()
    # In a LAN nobody's network is known: there ids of long standing decide.
    assert fetched_from(reports, shared, {}) == (A, B, C)


def test_both_sides_of_a_split_stage_choose_the_same_one_whoever_joined_meanwhile() -> None:
    """Two are on this side with one that joined it; three are on the other."""
    shared = {A: LONG, B: NEW, C: APART, D: APART}
    three = {C: OTHERS, D: OTHERS, PeerId("zzz"): OTHERS}
    assert fetched_from({A: SAME, B: SAME, **three}, {**shared, PeerId("zzz"): APART}) == (C, D, "zzz")
    # As the three see it, of whom one is `C`.
    seen = {D: LONG, PeerId("zzz"): LONG, ME: APART, A: APART}
    reports = {D: SAME, PeerId("zzz"): SAME, ME: OTHERS, A: OTHERS, B: OTHERS}
    assert fetched_from(reports, seen, me=C) == ()


@pytest.mark.parametrize("started", [0, STEP - 60])
def test_equal_halves_choose_the_one_that_began_first_and_then_the_least_id(started: int) -> None:
    apart = SharedHistory(first=started, last=STEP)
    assert fetched_from({A: OTHERS._replace(start_step=started)}, {A: apart}) == (() if started else (A,))
    assert fetched_from({ME: OTHERS}, {ME: apart}, me=A, began=started) == ((ME,) if started else ())


@pytest.mark.parametrize("age", [STEP, 45], ids=["an old stage", "a young stage"])
def test_more_newcomers_than_there_are_replicas_of_long_standing_choose_as_those_do(age: int) -> None:
    """Two were there from the beginning; three came twenty steps ago and have another history."""
    before, start, began = STEP - age, STEP - 20, SharedHistory(STEP - 18, STEP)
    young, old = HistoryReport(STEP, SAME.digest, start), OTHERS._replace(start_step=before)
    third = PeerId("n")
    assert fetched_from(
        {A: old, B: old, C: young, third: young}, dict.fromkeys((A, B, C, third), began), began=start
    ) == (A, B)
    theirs = dict.fromkeys((C, D, third), young._replace(digest=7))
    long = SharedHistory(before, STEP)
    seen = {B: long, **dict.fromkeys(theirs, began)}
    assert fetched_from({B: SAME._replace(start_step=before), **theirs}, seen, me=A, began=before) == ()


def test_who_has_just_begun_and_shares_nobodys_history_follows_the_others() -> None:
    reports = {A: OTHERS, B: OTHERS}
    assert fetched_from(reports, {}, began=STEP - VOTE_STEPS + 1) == (A, B)
    assert fetched_from(reports, {C: LONG}, began=STEP - 1) == (A, B), "whom it knew is gone"
    assert fetched_from(reports, {}, began=STEP - VOTE_STEPS) == ()


def test_a_shared_history_grows_with_steps_and_not_with_reports() -> None:
    shared: Mapping[PeerId, SharedHistory] = {}
    for step in (STEP - 3, STEP - 3, STEP - 2, STEP - 3, STEP):
        reports = {A: HistoryReport(step, HISTORY[step]), B: HistoryReport(step, 1), C: HistoryReport(step, 0)}
        shared = with_reports(shared, HISTORY, reports)
    assert shared == {A: SharedHistory(STEP - 3, STEP)}
    many = {PeerId(f"p{n}"): SharedHistory(0, n) for n in range(MAX_SHARED_HISTORIES)}
    kept = with_reports(many, HISTORY, {A: SAME})
    assert len(kept) == MAX_SHARED_HISTORIES and A in kept and PeerId("p0") not in kept


def lies_of_history(liar: GroupPeer, ahead: int) -> None:
    """Whoever gossips with it hears that it is further, has applied other means, and was there from the beginning."""
    gossip = liar.group.stages[0].gossip
    honest = gossip.answer

    def answer(peer: PeerId, message: GossipSteps) -> GossipedSteps:
        (own, *others) = honest(peer, message).replicas
        name, step, open_step, tokens, counted, agreed, _, _, *rest = own
        return GossipedSteps(
            ((name, step + ahead, open_step + ahead, tokens, counted, agreed, 1 + agreed, 0, *rest), *others)
        )

    gossip.answer = answer


@pytest.mark.parametrize("ahead", [0, 1, 3], ids=["another history", "a step ahead too", "three steps ahead too"])
def test_replicas_follow_no_number_of_new_ids_that_say_another_history_or_a_later_step(ahead: int) -> None:
    """Five ids, the least ones, come to four replicas; all that they do but their reports is honest."""

    async def main() -> None:
        world = GroupWorld([1024.0] * 9, target=512, **ALL_REDUCES)
        by_id = sorted(world.all, key=lambda peer: peer.peer)
        strangers, honest = by_id[:5], by_id[5:]
        for peer in strangers:
            peer.stage.rate = 0.0
        async with world:
            for peer in strangers:
                await world.kill(peer)
            await asyncio.sleep(12.0)
            assert min(peer.stage.step for peer in honest) >= VOTE_STEPS
            world.network.dead.clear()
            for peer in strangers:
                lies_of_history(peer, ahead)
                peer.start()
            before = [peer.stage.step for peer in honest]
            await asyncio.sleep(7.0)
            assert not any(peer.of(StageDiverged) or peer.fetches for peer in honest)
            assert min(peer.stage.step - step for peer, step in zip(honest, before, strict=True)) >= 40
            await at_one_step(*honest)

    run(main())
