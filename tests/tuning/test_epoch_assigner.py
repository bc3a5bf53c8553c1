"""Every microbatch of an epoch is done, whoever dies or joins; repeats are few, and counted as they happened."""

from __future__ import annotations

import pytest
from agora_protocol.errors import DataError, ProtocolError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agora.tuning.epochs.assigner import ANNOUNCE_INTERVALS, LAPSE_INTERVALS, BlockOrder, EpochAssigner
from agora.tuning.epochs.state import (
    KEPT_TALLIES,
    MAX_EPOCH,
    MAX_STATE_INTS,
    BlockLayout,
    EpochProgress,
    EpochState,
    Tally,
    write_state,
)
from tests.tuning.epoch_swarm import EpochSwarm


def swarm_of(count: int, *seconds: float, seed: int = 1, delay: float = 0.05, loss: float = 0.0) -> EpochSwarm:
    swarm = EpochSwarm(count, seed, delay=delay, loss=loss)
    for number, each in enumerate(seconds):
        swarm.join(f"peer{number}", each)
    return swarm


def finish(swarm: EpochSwarm, until: float) -> int:
    """Runs, settles and checks; returns how often a microbatch was repeated."""
    swarm.run(until)
    swarm.settle()
    swarm.check()
    return len(swarm.log) - len(set(swarm.log))


# --- one origin


def test_a_single_origin_does_every_microbatch_once_and_goes_on_with_the_next_epoch() -> None:
    assigner = EpochAssigner(7, "me", 1, 10)
    taken = []
    for _ in range(35):
        number = assigner.take_next([])
        assert number is not None
        assigner.mark_completed(number, samples=3)
        taken.append(number)
    assert sorted(taken[:30]) == list(range(30))
    assert {number // 10 for number in taken[30:]} == {3}
    counts = assigner.counts()
    assert (counts.seen, counts.repeated, counts.missed, counts.samples) == (35, 0, 0, 105)
    assert [(epoch.epoch, epoch.done, epoch.in_flight, epoch.not_started) for epoch in counts.epochs] == [(3, 5, 0, 5)]


def test_seeds_and_epochs_have_other_orders() -> None:
    orders = set()
    for seed in range(3):
        assigner = EpochAssigner(seed, "me", 1, 300)
        taken = [assigner.take_next([]) for _ in range(600)]
        orders |= {tuple(taken[:300]), tuple(number - 300 for number in taken[300:] if number is not None)}
    assert len(orders) == 6


def test_what_is_given_up_is_free_again() -> None:
    assigner = EpochAssigner(7, "me", 1, 300)
    first = assigner.take_next([])
    assert first is not None
    assigner.release(first)
    assert first in {assigner.take_next([]) for _ in range(300)}


def test_only_what_was_taken_can_be_completed() -> None:
    assigner = EpochAssigner(7, "me", 1, 300)
    with pytest.raises(ValueError, match="microbatch 3 was not taken"):
        assigner.mark_completed(3)


def test_an_origin_waits_when_the_oldest_epoch_is_too_far_behind() -> None:
    assigner = EpochAssigner(7, "me", 1, 200)
    taken = [assigner.take_next([]) for _ in range(400)]
    assert sorted(filter(None, taken)) == list(range(1, 400))
    assert assigner.take_next([]) is None
    for number in range(200):
        assigner.mark_completed(number)
    assert assigner.take_next([]) in range(400, 600)


# --- two origins, by hand


def pair() -> tuple[EpochAssigner, EpochAssigner]:
    """Two origins that have heard of each other."""
    one, other = EpochAssigner(7, "a", 1, 40), EpochAssigner(7, "b", 2, 40)
    tell(one, other)
    return one, other


def tell(one: EpochAssigner, other: EpochAssigner) -> None:
    one.merge("b", other.next_state())
    other.merge("a", one.next_state())


def all_of_epoch_0(assigner: EpochAssigner, live: str) -> set[int]:
    """What an origin takes of epoch 0, once it has told of its claims."""
    taken: set[int] = set()
    for _ in range(200):
        assigner.next_state()
        taken |= {number for _ in range(2) if (number := assigner.take_next(live)) is not None}
    return {number for number in taken if number < 40}


def test_two_origins_that_agree_on_who_is_live_split_an_epoch_without_gossip() -> None:
    one, other = pair()
    order = BlockOrder(7, "a", 40).order(0, frozenset("ab"))
    mine = {one.take_next("ab") for _ in range(len(order.own))}
    others = {other.take_next("ab") for _ in range(40 - len(order.own))}
    assert mine == set(order.own)
    assert not mine & others
    assert mine | others == set(range(40))


def test_of_two_that_claim_the_same_the_higher_hash_gives_up() -> None:
    one, other = pair()
    assert one.take_next("a") is not None
    assert other.take_next("b") is not None  # neither knows of the other
    claimed = {name: claims_of(assigner) for name, assigner in (("a", one), ("b", other))}
    for _ in range(40):  # until both have claimed the same one
        if claimed["a"] & claimed["b"]:
            break
        one.take_next("a")
        other.take_next("b")
        claimed = {name: claims_of(assigner) for name, assigner in (("a", one), ("b", other))}
    (number,) = claimed["a"] & claimed["b"]
    tell(one, other)
    loser = one if BlockOrder(7, "a", 40).is_preceded_by("b", 0, number) else other
    winner = other if loser is one else one
    assert number not in all_of_epoch_0(loser, "ab")
    assert number in all_of_epoch_0(winner, "ab")


def claims_of(assigner: EpochAssigner) -> set[int]:
    """What it has claimed of epoch 0, as another origin reads it."""
    reader = EpochAssigner(7, "reader", 9, 40)
    reader.merge("it", assigner.next_state())
    return {number for part in reader._others["it"].epochs.values() for number in range(40) if number in part.claimed}


def test_what_a_dead_origin_had_opened_is_free_again_and_what_it_had_done_is_not() -> None:
    one, other = pair()
    opened = {other.take_next("ab") for _ in range(4)} - {None}
    done = min(opened)
    other.mark_completed(done)
    one.merge("b", other.next_state())
    assert not all_of_epoch_0(one, "ab") & opened
    assert all_of_epoch_0(one, "a") >= opened - {done}
    assert done not in all_of_epoch_0(one, "a")


def test_a_paused_origin_gives_up_its_claims() -> None:
    _, other = pair()
    other.take_next("ab")
    assert claims_of(other)
    for _ in range(LAPSE_INTERVALS):
        other.next_state()
    assert not claims_of(other)


def test_a_claim_in_the_block_of_another_is_opened_only_when_it_was_told() -> None:
    one, _ = pair()
    own = len(BlockOrder(7, "a", 40).order(0, frozenset("ab")).own)
    first = [one.take_next("ab") for _ in range(own)]
    assert all(number is not None and number < 40 for number in first)
    assert one.take_next("ab") >= 40, "of the next epoch, where it has blocks of its own"
    for _ in range(ANNOUNCE_INTERVALS):
        one.next_state()
    assert one.take_next("ab") < 40


def test_what_an_origin_had_opened_before_it_restarted_is_free_again() -> None:
    one, other = pair()
    opened = other.take_next("ab")
    one.merge("b", other.next_state())
    again = EpochAssigner(7, "b", 3, 40)
    one.merge("b", again.next_state())
    assert opened in all_of_epoch_0(one, "ab")


def test_a_newcomer_opens_nothing_before_it_has_heard_of_all_that_are_live() -> None:
    one, other = pair()
    newcomer = EpochAssigner(7, "c", 3, 40)
    newcomer.merge("a", one.next_state())
    assert newcomer.take_next("ab") is None
    newcomer.merge("b", other.next_state())
    assert newcomer.take_next("ab") is not None
    deaf = EpochAssigner(7, "d", 4, 40)
    for _ in range(LAPSE_INTERVALS):
        assert deaf.take_next("ab") is None
        deaf.next_state()
    assert deaf.take_next("ab") is not None


def test_an_older_message_does_not_replace_a_newer_one() -> None:
    one, other = pair()
    older = other.next_state()
    opened = other.take_next("ab")
    one.merge("b", other.next_state())
    one.merge("b", older)
    assert opened not in all_of_epoch_0(one, "ab")


def test_the_state_is_equal_while_nothing_changes() -> None:
    one, _ = pair()
    idle = one.next_state()
    assert idle == one.next_state() == one.last_state
    one.take_next("ab")
    busy = one.next_state()
    assert busy != idle
    assert busy == one.next_state()


@pytest.mark.parametrize("values", [(), (1,), (2, 0, 40), (1, 0, 40, 1, 1, 0, 0, 0, 0), (1, 0, 40, 1, 1, -1, 0, 0)])
def test_a_malformed_share_is_a_violation(values: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="The epoch state of b cannot be read"):
        pair()[0].merge("b", values)


def test_an_origin_of_other_rows_is_told_what_to_compare() -> None:
    one, other = EpochAssigner(7, "a", 1, 40, rows_id=5), EpochAssigner(7, "b", 2, 40, rows_id=6)
    with pytest.raises(DataError, match="b trains on other rows than this one; compare samples, tokenizer.json"):
        one.merge("b", other.next_state())
    with pytest.raises(DataError, match="cannot be resumed: the state of the epochs is of other rows"):
        one.restore(EpochAssigner(7, "a", 1, 41, rows_id=5).snapshot())


def test_a_snapshot_of_other_rows_says_what_to_do_and_a_malformed_one_changes_nothing() -> None:
    one, _ = pair()
    before = one.snapshot()
    with pytest.raises(DataError, match="cannot be resumed: .*; give the samples"):
        one.restore(EpochAssigner(7, "a", 1, 41, rows_id=5).snapshot())
    with pytest.raises(ValueError, match="ends too early"):
        one.restore((1, 0))
    assert one.snapshot() == before


# --- swarms


@pytest.mark.parametrize("seconds", [(0.2,) * 3, (0.1, 0.2, 0.4, 1.0), (0.2,) * 8])
@pytest.mark.parametrize("count", [1, 7, 50, 1000])
def test_nothing_is_repeated_when_gossip_arrives(count: int, seconds: tuple[float, ...]) -> None:
    swarm = swarm_of(count, *seconds)
    assert finish(swarm, 15.0) == 0 == swarm.collisions


def test_who_is_faster_does_more_and_nobody_waits() -> None:
    swarm = swarm_of(400, 0.1, 0.2, 0.4)
    swarm.run(60.0)
    shares = [origin.assigner._tallies[origin.assigner._session].microbatches for origin in swarm.alive()]
    assert shares[0] == pytest.approx(600, rel=0.1)
    assert shares[1] == pytest.approx(300, rel=0.1)
    assert shares[2] == pytest.approx(150, rel=0.1)
    assert all(origin.stalls <= 4 for origin in swarm.alive()), "only until they have heard of each other"


@pytest.mark.parametrize("seed", range(4))
def test_what_dead_origins_leave_is_done_by_others(seed: int) -> None:
    swarm = swarm_of(60, 0.2, 0.2, 0.3, 0.1, seed=seed)
    swarm.at(2.1, lambda: swarm.kill("peer0"))
    swarm.at(3.3, lambda: swarm.kill("peer3"))
    in_flight = 2 * 2
    repeated = finish(swarm, 20.0)
    assert repeated <= swarm.lost_with_dead + in_flight
    assert set(range(60)) <= set(swarm.known_completions())


def test_a_newcomer_goes_on_where_the_others_are() -> None:
    swarm = swarm_of(300, 0.2, 0.2)
    for second in range(2, 8):
        swarm.at(second, lambda second=second: swarm.join(f"late{second}", 0.2))
    assert finish(swarm, 20.0) == 0


@pytest.mark.parametrize(("loss", "delay", "share"), [(0.1, 0.05, 0.005), (0.3, 0.05, 0.01), (0.3, 0.4, 0.06)])
def test_lost_and_late_gossip_costs_few_repeats(loss: float, delay: float, share: float) -> None:
    swarm = swarm_of(300, 0.05, 0.1, 0.1, 0.2, 0.5, loss=loss, delay=delay)
    assert finish(swarm, 30.0) <= share * len(swarm.log)


def test_an_origin_without_any_gossip_repeats_what_others_do_and_that_is_counted() -> None:
    swarm = swarm_of(40, 0.2, 0.2, loss=1.0)
    repeated = finish(swarm, 20.0)
    assert repeated > 0


def test_an_origin_that_is_taken_for_dead_for_a_while_costs_what_it_has_in_flight() -> None:
    swarm = swarm_of(200, 0.2, 0.2, 0.2)
    swarm.at(5.0, lambda: swarm.suspected.add("peer1"))
    swarm.at(7.0, lambda: swarm.suspected.discard("peer1"))
    assert finish(swarm, 20.0) <= 12


def test_a_paused_origin_holds_up_nobody() -> None:
    swarm = swarm_of(30, 0.2, 0.2, 0.2)
    swarm.run(3.0)
    swarm.origins["peer1"].is_paused = True
    before = len(swarm.log)
    swarm.run(33.0)
    assert len(swarm.log) - before > 0.95 * 30.0 / 0.2 * 2
    swarm.settle()
    swarm.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_of_all_goes_on_at_the_right_microbatch(seed: int) -> None:
    swarm = swarm_of(70, 0.1, 0.2, 0.3, seed=seed)
    swarm.at(4.6, swarm.restart)
    swarm.at(9.1, swarm.restart)
    assert finish(swarm, 20.0) <= 4, "what one had done in the last moment, and told nobody before all restarted"
    assert max(swarm.log) > 70


def test_a_restart_of_one_origin_repeats_nothing() -> None:
    assigner = EpochAssigner(7, "a", 1, 40)
    done = [assigner.take_next([]) for _ in range(10)]
    for number in done[:8]:
        assert number is not None
        assigner.mark_completed(number)
    again = EpochAssigner(7, "a", 2, 40)
    again.restore(assigner.snapshot())
    assert {again.take_next([]) for _ in range(32)} == set(range(40)) - set(done[:8])
    assert again.counts().seen == 8
    assert again.snapshot() == assigner.snapshot()


def test_a_million_microbatches_fit_into_a_message() -> None:
    swarm = EpochSwarm(1_000_000, 1)
    for number in range(8):
        swarm.join(f"peer{number}", 0.02, send_window=16)
    finish(swarm, 5.0)
    assert len(swarm.log) > 1000
    assert swarm.longest_state < MAX_STATE_INTS / 4


@settings(max_examples=15)
@example(  # a slow origin opens nothing between the notice of the last death and second 12
    count=283,
    seconds=[1.0, 0.05, 1.0, 0.3, 1.0],
    deaths=[(1.5, 1), (7.640659027513635, 3), (8.407153850883201, 3)],
    joins=[1.4022327319003893],
    restart=None,
    loss=0.0,
    seed=0,
)
@given(
    count=st.integers(1, 700),
    seconds=st.lists(st.sampled_from([0.05, 0.1, 0.3, 1.0]), min_size=2, max_size=5),
    deaths=st.lists(st.tuples(st.floats(0.5, 9.0), st.integers(1, 4)), max_size=3),
    joins=st.lists(st.floats(0.5, 9.0), max_size=3),
    restart=st.none() | st.floats(1.0, 9.0),
    loss=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 1000),
)
def test_whatever_happens_the_counts_are_what_happened(
    count: int,
    seconds: list[float],
    deaths: list[tuple[float, int]],
    joins: list[float],
    restart: float | None,
    loss: float,
    seed: int,
) -> None:
    swarm = swarm_of(count, *seconds, seed=seed, loss=loss)
    for number, time in enumerate(joins):
        swarm.at(time, lambda number=number: swarm.join(f"late{number}", 0.2))
    for time, victim in deaths:
        name = f"peer{victim}"
        swarm.at(time, lambda name=name: name in swarm.live_names() and swarm.kill(name))
    if restart is not None:
        swarm.at(restart, swarm.restart)
    finish(swarm, 15.0)  # each origin has opened something since the last death was noticed, and so knows of it


def test_nobody_else_says_what_this_session_has_done() -> None:
    one, liar = (
        EpochAssigner(7, "a", 1, 40),
        EpochAssigner(7, "b", 1, 40),
    )  # the liar takes the other's session for its own
    for _ in range(5):
        liar.mark_completed(take_after_told(liar))
    one.merge("b", liar.next_state())
    one.mark_completed(take_after_told(one))
    assert one.counts().samples == 1


def test_tallies_beyond_what_a_session_can_have_are_malformed() -> None:
    one, liar = EpochAssigner(7, "a", 1, 40), EpochAssigner(7, "b", 2, 40)
    liar.mark_completed(take_after_told(liar), samples=2**62)
    with pytest.raises(ProtocolError, match="tally"):
        one.merge("b", liar.next_state())


def test_a_flood_of_sessions_is_bounded() -> None:
    one = EpochAssigner(7, "a", 1, 40)
    for session in range(2, 2 + 3 * KEPT_TALLIES):
        other = EpochAssigner(7, "b", session, 40)
        other.mark_completed(take_after_told(other))
        one.merge("b", other.next_state())
    assert len(one.snapshot()) < 3 * KEPT_TALLIES + 200


def test_epochs_far_beyond_do_not_make_this_origins_own_state_malformed() -> None:
    one, other = EpochAssigner(7, "a", 1, 4), EpochAssigner(7, "b", 2, 4)
    state = list(other.next_state())
    state[5] = MAX_EPOCH  # the first epoch that is not complete
    one.merge("b", state)
    for _ in range(9):
        one.mark_completed(take_after_told(one))
    EpochAssigner(7, "c", 3, 4).merge("a", one.next_state())


def take_after_told(assigner: EpochAssigner) -> int:
    """Takes a microbatch, as a sole origin does once it has told others for some intervals."""
    for _ in range(20):
        assigner.next_state()
        if (number := assigner.take_next(())) is not None:
            return number
    raise AssertionError("nothing to take")


# --- an origin that says what it has not done


def lying_state(count: int, version: int, how: str, listener: int) -> tuple[int, ...]:
    layout = BlockLayout(count)
    if how in ("epochs", "all epochs"):
        first = MAX_EPOCH if how == "all epochs" else 1 + version // 2
        return write_state(EpochState(99, version, first, {99: Tally(10**9, 10**9)}, {}), layout, 0, MAX_STATE_INTS)
    epochs = {}
    for epoch in range(2):
        part = epochs[epoch] = EpochProgress.empty(layout)
        for number in range(count):
            if how == "everything" or number % 4 == listener % 4:  # "to each something else"
                part.done.add(number)
    return write_state(EpochState(99, version, 0, {}, epochs), layout, 0, MAX_STATE_INTS)


@pytest.mark.parametrize("how", ["epochs", "all epochs", "everything", "to each something else"])
@pytest.mark.parametrize("honest", [1, 3, 15])
def test_one_origins_word_skips_no_more_than_a_fast_one_could_have_done(how: str, honest: int) -> None:
    count, calls = 120, 3 * 120 // honest
    names = [f"honest {number}" for number in range(honest)]
    origins = [EpochAssigner(7, name, number, count) for number, name in enumerate(names)]
    live, trained = [*names, "liar"], list[int]()
    for version in range(1, calls + LAPSE_INTERVALS + 2):
        states = [origin.next_state() for origin in origins]
        for listener, origin in enumerate(origins):
            for name, state in zip(names, states, strict=True):
                origin.merge(name, state)
            if version > LAPSE_INTERVALS + 1:  # while an origin is new, and alone with the liar, it has only its word
                origin.merge("liar", lying_state(count, version, how, listener))
            if (number := origin.take_next(live)) is not None:
                origin.mark_completed(number)
                trained.append(number)
    assert len(trained) >= 0.9 * honest * calls, "nobody is held up"
    epochs = [origin.counts().epochs[0].epoch for origin in origins]
    assert max(epochs) <= 1 + (len(trained) + 4 * calls + 8) / count
    done = len({number for number in trained if number < max(epochs) * count})
    assert done >= 0.9 * honest / (honest + 4) * max(epochs) * count - 8


def test_what_most_origins_say_is_believed_at_once_and_what_is_doubted_is_taken_last() -> None:
    origins = {name: EpochAssigner(7, name, number, 40) for number, name in enumerate("abcde")}
    told = EpochState(7, 1, 3, {}, {})
    for name in "bc":
        origins["a"].merge(name, write_state(told, BlockLayout(40), 0, MAX_STATE_INTS))
    assert origins["a"].counts().seen == 3 * 40, "two of two"
    layout = BlockLayout(40)
    part = EpochProgress.empty(layout)
    part.done.add_range((0, 30))
    one = origins["e"]
    assert one.take_next("abcde") is None, "it has heard of nobody yet"
    for name in "abcd":
        state = EpochState(7, 1, 0, {}, {0: part} if name == "a" else {})
        one.merge(name, write_state(state, layout, 0, MAX_STATE_INTS))
    assert one.counts().seen == 8, "one of four: what it may have done by now"
    taken = [take_after_told(one) for _ in range(10 + 40)]
    assert set(taken) >= set(range(30, 40)) | set(range(40, 80)), "the others and the next epoch come first"
