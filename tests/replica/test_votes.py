"""Whose history is right is decided by what a replica has seen of the others, not by how many ids there are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from agora_protocol.ids import PeerId

from agora.observe.events import StageDiverged
from agora.replica.votes import (
    MAX_LAG,
    MAX_STANDINGS,
    MIN_REDUCED,
    VOTE_STEPS,
    Electorate,
    HistoryReport,
    Standing,
    replicas_to_fetch_from,
    with_reduced_shard,
    with_reports,
)
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_stage_replicas import ALL_REDUCES, at_one_step
from tests.virtual_time import run

ME, A, B, C, D = (PeerId(name) for name in ("me", "a", "b", "x", "y"))
STEP = 200
HISTORY = {step: 1000 + step for step in range(STEP - 31, STEP + 1)}
EQUAL, OTHER = HistoryReport(STEP, HISTORY[STEP]), HistoryReport(STEP, 7)
LONG = Standing(first=0, last=STEP)
APART = replace(LONG, last=STEP - 50)  # a stage that was split since then
NEW = Standing(first=STEP - VOTE_STEPS + 1, last=STEP)


def fetched_from(
    reports: dict[PeerId, HistoryReport],
    standings: dict[PeerId, Standing],
    networks: dict[PeerId, str] | None = None,
    *,
    me: PeerId = ME,
    began: int = 0,
) -> tuple[PeerId, ...]:
    found = networks if networks is not None else {peer: peer for peer in (*reports, me)}
    return replicas_to_fetch_from(HISTORY, Electorate(me, began, began, reports, standings, lambda: found))


def test_any_number_of_ids_that_never_shared_the_history_decides_nothing() -> None:
    honest, strangers = [PeerId(f"h{n}") for n in range(3)], [PeerId(f"a{n}") for n in range(50)]
    reports = dict.fromkeys(honest, EQUAL) | dict.fromkeys(strangers, OTHER)
    standings = dict.fromkeys(honest, LONG)
    assert fetched_from(reports, standings) == ()
    assert fetched_from(reports, standings | dict.fromkeys(strangers, NEW)) == (), "a few steps are not enough"
    assert fetched_from(dict.fromkeys(strangers, OTHER), {}) == (), "a lone replica follows no strangers either"
    assert fetched_from(dict.fromkeys(strangers, OTHER), dict.fromkeys(strangers, NEW)) == (), "nor when all are new"


def test_the_larger_group_of_those_that_have_shared_the_history_is_right() -> None:
    standings = dict.fromkeys((A, B, C), LONG)
    assert fetched_from({A: EQUAL, B: OTHER, C: OTHER}, standings) == ()
    assert fetched_from({A: OTHER, B: OTHER, C: EQUAL}, {**standings, C: NEW}) == (A, B)
    assert fetched_from({A: OTHER, B: OTHER, C: OTHER, D: OTHER}, standings) == (A, B, C), "voters are asked, not D"


def test_those_of_one_network_have_one_vote() -> None:
    standings = dict.fromkeys((A, B, C, D), LONG)
    reports = {A: OTHER, B: OTHER, C: OTHER, D: EQUAL}
    assert fetched_from(reports, standings) == (A, B, C)
    assert fetched_from(reports, standings, {A: "n", B: "n", C: "n", D: "d", ME: "me"}) == ()
    # In a LAN nobody's network is known: there ids of long standing decide.
    assert fetched_from(reports, standings, {}) == (A, B, C)


def test_both_sides_of_a_split_stage_choose_the_same_one_whoever_joined_meanwhile() -> None:
    """Two are on this side with one that joined it; three are on the other."""
    standings = {A: LONG, B: NEW, C: APART, D: APART}
    three = {C: OTHER, D: OTHER, PeerId("z"): OTHER}
    assert fetched_from({A: EQUAL, B: EQUAL, **three}, {**standings, PeerId("z"): APART}) == (C, D, "z")
    # As the three see it, of whom one is `C`.
    seen = {D: LONG, PeerId("z"): LONG, ME: APART, A: APART}
    reports = {D: EQUAL, PeerId("z"): EQUAL, ME: OTHER, A: OTHER, B: OTHER}
    assert fetched_from(reports, seen, me=C) == ()


@pytest.mark.parametrize("started", [0, STEP - 40])
def test_equal_halves_choose_the_one_that_began_first_and_then_the_least_id(started: int) -> None:
    other = {A: OTHER._replace(start_step=started)}
    mine = {ME: OTHER}
    assert fetched_from(other, {A: APART}) == (() if started else (A,))
    assert fetched_from(mine, {ME: APART}, me=A, began=started) == ((ME,) if started else ())


def test_a_newcomer_sees_as_those_see_it_that_do_not_know_it_yet() -> None:
    """It and another newcomer have one history; the replica that was there before them has another."""
    start, began = STEP - 20, Standing(STEP - 18, STEP)
    young = EQUAL._replace(start_step=start)
    assert fetched_from({A: OTHER, C: young}, {A: began, C: began}, began=start) == (A,)
    assert fetched_from({ME: OTHER._replace(start_step=start), C: young._replace(digest=7)}, {ME: began}, me=A) == ()


@pytest.mark.parametrize("known_for", [VOTE_STEPS - 1, VOTE_STEPS])
def test_who_has_loaded_another_state_is_new_to_those_that_know_it_since_then(known_for: int) -> None:
    """It has run since step 0; who has known it for long knows that too, and the two are equal but for their ids."""
    standings = {C: Standing(STEP - known_for, STEP)}
    electorate = Electorate(ME, 0, STEP - 30, {C: OTHER}, standings)
    assert replicas_to_fetch_from(HISTORY, electorate) == ((C,) if known_for < VOTE_STEPS else ())


def test_who_has_just_begun_and_shares_nobodys_history_follows_the_others() -> None:
    reports = {A: OTHER, B: OTHER}
    assert fetched_from(reports, {}, began=STEP - VOTE_STEPS + 1) == (A, B)
    assert fetched_from(reports, {C: LONG}, began=STEP - 1) == (A, B), "whom it knew is gone"
    assert fetched_from(reports, {}, began=STEP - VOTE_STEPS) == ()


def test_a_standing_grows_with_steps_and_not_with_reports() -> None:
    standings: dict[PeerId, Standing] = {}
    for step in (STEP - 3, STEP - 3, STEP - 2, STEP - 3, STEP):
        reports = {A: HistoryReport(step, HISTORY[step]), B: HistoryReport(step, 1), C: HistoryReport(step, 0)}
        standings = dict(with_reports(standings, HISTORY, reports))
    assert standings == {A: Standing(STEP - 3, STEP)}
    assert with_reports(standings, HISTORY, {A: EQUAL}) is standings
    many = {PeerId(f"p{n}"): Standing(0, n) for n in range(MAX_STANDINGS)}
    kept = with_reports(many, HISTORY, {A: EQUAL})
    assert len(kept) == MAX_STANDINGS and A in kept and PeerId("p0") not in kept


def test_who_brings_nothing_to_the_means_has_no_vote_and_who_was_not_reached_loses_none() -> None:
    standings = {A: LONG, B: LONG, C: APART}
    for _ in range(MIN_REDUCED):
        standings = dict(with_reduced_shard(standings, {ME, A}, STEP + MAX_LAG))
    assert not standings[A].is_idle and standings[B].is_idle and standings[C] == APART
    assert fetched_from({A: EQUAL, B: OTHER}, standings) == ()
    assert fetched_from({A: OTHER, B: EQUAL}, standings, {}) == (), (
        "a tie of two, and this one's side has more replicas"
    )


def sybils_of(world: GroupWorld, count: int) -> tuple[list[GroupPeer], list[GroupPeer]]:
    """Those with the least ids, and the others."""
    by_id = sorted(world.all, key=lambda peer: peer.peer)
    return by_id[:count], by_id[count:]


def lies_of_history(peer: GroupPeer, ahead: int) -> None:
    gossip = peer.group.stages[0].gossip
    true = gossip._counts
    gossip._counts = lambda: (told := true())._replace(
        step=told.step + ahead,
        open_step=told.open_step + ahead,
        history_hash=1 + told.agreed_step,
        start_step=0,
    )


@pytest.mark.parametrize("ahead", [0, 1, 3], ids=["another history", "a step ahead too", "three steps ahead too"])
def test_replicas_follow_no_number_of_new_ids_that_say_another_history_or_a_later_step(ahead: int) -> None:
    """Five ids come to four replicas; all that they do but their reports is honest."""

    async def main() -> None:
        world = GroupWorld([1024.0] * 9, target=512, **ALL_REDUCES)
        sybils, honest = sybils_of(world, 5)
        for peer in sybils:
            peer.stage.rate = 0.0
        async with world:
            for peer in sybils:
                await world.kill(peer)
            await asyncio.sleep(12.0)
            assert min(peer.stage.step for peer in honest) >= VOTE_STEPS
            world.network.dead.clear()
            for peer in sybils:
                lies_of_history(peer, ahead)
                peer.start()
            before = [peer.stage.step for peer in honest]
            await asyncio.sleep(7.0)
            assert not any(peer.of(StageDiverged) or peer.fetches for peer in honest)
            assert min(peer.stage.step - step for peer, step in zip(honest, before, strict=True)) >= 40
            await at_one_step(*honest)

    run(main())
