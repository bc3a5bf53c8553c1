"""Claims about the swarm's time: whose clock is followed, how far, and what a wrong or lying clock can do."""

from __future__ import annotations

import random

import pytest

from agora.swarm.swarm_clock import MAX_CORRECTION_S, ClockCorrection, SwarmClock, clock_remark, correct_clock

SETTLED = ClockCorrection(0.0, is_settled=True)


class Machine:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.boot = 1000.0

    def boot_s(self) -> float:
        return self.boot


def test_the_first_peer_keeps_its_own_time_and_tells_it() -> None:
    machine = Machine()
    clock = SwarmClock(5_000.0, machine.boot_s)
    assert clock.time_for_others_unix() == 0.0
    assert clock.follow([])
    assert clock.time_for_others_unix() == clock.unix() == 5_000.0
    machine.boot += 7.0
    assert clock.time_for_others_unix() == 5_007.0


@pytest.mark.parametrize("off_s", [300.0, -15.0, -3600.0, 0.01])
def test_a_newcomer_adopts_the_time_of_whoever_tells_it(off_s: float) -> None:
    machine = Machine()
    clock = SwarmClock(5_000.0 + off_s, machine.boot_s)
    clock.follow([4_000.0])  # it was 4,000 when this machine's boot_s was 0, so it is 5,000 now
    assert clock.unix() == pytest.approx(5_000.0) and clock.correction.is_settled


def test_a_settled_peer_believes_nobody_alone() -> None:
    assert correct_clock(SETTLED, [500.0]) == SETTLED
    assert correct_clock(SETTLED, []) == SETTLED


@pytest.mark.parametrize("honest", [2, 3, 4, 9])
def test_fewer_liars_than_honest_peers_do_not_move_the_clock(honest: int) -> None:
    """This peer is honest too: one liar fewer than all the honest together, itself included."""
    for liars in range(honest):
        for lie in (1e9, -1e9, 3_000.0, -30.0):
            corrected = correct_clock(SETTLED, [0.0] * honest + [lie] * liars)
            assert abs(corrected.seconds) < 0.25, (honest, liars, lie)


def test_two_others_that_agree_correct_a_settled_peer_that_began_alone() -> None:
    assert correct_clock(ClockCorrection(0.0, is_settled=True), [300.0, 300.2]).seconds == pytest.approx(300.0, abs=0.2)


def test_no_correction_is_beyond_a_day_and_the_owner_is_told() -> None:
    for wanted in (2 * MAX_CORRECTION_S, -2 * MAX_CORRECTION_S):
        corrected = correct_clock(ClockCorrection(), [wanted])
        assert corrected.seconds == 0.0 and corrected.refused_s == wanted
        assert "too much to be corrected" in clock_remark(corrected)


def test_measuring_errors_of_milliseconds_do_not_add_up() -> None:
    rng, correction = random.Random(0), SETTLED
    for _ in range(1000):
        correction = correct_clock(correction, [correction.seconds + rng.uniform(0.0, 0.1) for _ in range(3)])
    assert correction.seconds == 0.0


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (9.9, ""),
        (-9.9, ""),
        (15.0, "this machine's clock is 15 s behind the swarm's; "),
        (-300.0, "this machine's clock is 300 s ahead of the swarm's; "),
    ],
)
def test_a_clock_more_than_ten_seconds_off_is_remarked_with_the_remedy(seconds: float, sentence: str) -> None:
    remark = clock_remark(ClockCorrection(seconds, is_settled=True))
    assert remark.startswith(sentence) and ("timedatectl" in remark) == bool(sentence)


def test_peers_that_are_hours_apart_agree_in_any_order_of_joining() -> None:
    """Each joins by asking those that are there; all end within a quarter of a second."""
    rng = random.Random(7)
    for _ in range(50):
        offs = [rng.uniform(-3e3, 3e3) for _ in range(6)]
        corrections: list[ClockCorrection] = []
        for index, off in enumerate(offs):
            known = rng.sample(range(index), min(index, rng.randint(1, 3)))
            told = [offs[other] + corrections[other].seconds - off for other in known]
            corrections.append(correct_clock(ClockCorrection(), told))
        times = [off + each.seconds for off, each in zip(offs, corrections, strict=True)]
        assert max(times) - min(times) < 0.25
