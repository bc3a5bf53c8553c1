"""What an owner makes of contributions: shares that nobody can grow, a clip that nobody can stretch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from agora_protocol.messages import Averaged

from agora.averaging.aggregate import Aggregation, aggregate, capped, magnitude, root_mean_square
from agora.averaging.plausibility import MOST_TIMES_USUAL, NEAR, Drift, GradientSize, Newcomer

SIZE = 512


def honest(index: int, spread: float = 0.1) -> torch.Tensor:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(index))
    return torch.linspace(-1, 1, SIZE) + spread * noise


def averaged(values: list[torch.Tensor], weights: list[float] | None = None, rule: Aggregation = "mean", **settings):
    settings = {"center": None, "cap": True} | settings
    found = aggregate(values, weights or [1.0] * len(values), rule, **settings)
    assert found is not None
    return found


# --- weights


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 9, 64])
def test_no_share_of_the_whole_is_more_than_two_nths(members: int) -> None:
    rng = random.Random(members)
    for _ in range(50):
        weights = [10.0 ** rng.uniform(-6, 18) for _ in range(members)]
        lowered = capped(weights)
        most = 2.0 / members * sum(lowered)
        assert all(it <= most * (1 + 1e-9) for it in lowered)
        for before, after in zip(weights, lowered, strict=True):
            assert 0 < after <= before
            assert after == before or after == pytest.approx(most), "lowered only as far as it must be"


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([7.0], [7.0]),
        ([1e9, 1.0], [1e9, 1.0]),
        ([1000.0, 1.0, 1.0], [4.0, 1.0, 1.0]),
        ([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]),
        ([1e9, 1e9, 1.0, 1.0, 1.0], [6.0, 6.0, 1.0, 1.0, 1.0]),
        ([5.0] * 6, [5.0] * 6),
    ],
)
def test_what_the_cap_makes_of_weights(weights: list[float], expected: list[float]) -> None:
    assert capped(weights) == pytest.approx(expected)
    assert capped(weights[::-1]) == pytest.approx(expected[::-1]), "whoever comes first"


def test_a_liar_about_its_weight_moves_ten_members_by_two_tenths() -> None:
    values = [torch.zeros(SIZE)] * 9 + [torch.ones(SIZE)]
    weights = [1.0] * 9 + [1e9]
    assert torch.allclose(averaged(values, weights).values, torch.full((SIZE,), 0.2))
    exact = averaged(values, weights, cap=False).values
    assert float(exact[0]) > 0.99, "gradients are not capped: their weights are how many tokens there are"


def test_shares_sum_to_one() -> None:
    for weights in ([1.0], [3.0, 1.0], [100.0, 2.0, 3.0], [0.0, 5.0, 1.0], [1e18, 1e-3, 7.0]):
        found = averaged([torch.full((SIZE,), 2.5)] * len(weights), weights)
        assert torch.equal(found.values, torch.full((SIZE,), 2.5)), "equal values are their own mean, to the bit"
    a, b = honest(1), honest(2)
    assert torch.allclose(averaged([a, b], [3.0, 1.0]).values, 0.75 * a + 0.25 * b, atol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_a_newcomer_is_not_in_the_average_nor_in_its_count(rule: Aggregation) -> None:
    values = [honest(1), honest(2), torch.full((SIZE,), 1e6)]
    with_it = averaged(values, [2.0, 1.0, 0.0], rule)
    without = averaged(values[:2], [2.0, 1.0], rule)
    assert torch.equal(with_it.values, without.values)
    assert (with_it.message.members, with_it.message.weight, with_it.message.distance) == (
        2,
        3.0,
        without.message.distance,
    )


def test_nobody_with_a_weight_makes_no_average() -> None:
    for rule in ("mean", "clip"):
        assert aggregate([honest(1), honest(2)], [0.0, 0.0], rule, center=None, cap=True) is None
        assert aggregate([], [], rule, center=None, cap=True) is None


def test_what_comes_in_is_not_changed() -> None:
    for rule in ("mean", "clip"):
        values, center = [honest(n) for n in range(3)], honest(0)
        kept = [it.clone() for it in values]
        averaged(values, rule=rule, center=center)
        assert all(torch.equal(it, was) for it, was in zip([*values, center], [*kept, honest(0)], strict=True))


# --- absurd values


@pytest.mark.parametrize("rule", ["mean", "clip"])
@pytest.mark.parametrize("size", [1e19, 1e25, 1e35, 3e38])
def test_what_is_said_of_an_absurd_average_can_be_said(size: float, rule: Aggregation) -> None:
    """Else one member's values would make the owner refuse the honest ones."""
    for attackers in (1, 2):
        values = [honest(1), honest(2)] + [torch.full((SIZE,), size)] * attackers
        found = averaged(values, rule=rule, center=values[0])
        assert bool(found.values.isfinite().all())
        Averaged(found.message.members, found.message.members, found.message.weight, found.message.distance, True)


def test_values_whose_average_no_float_can_hold_make_none() -> None:
    huge = torch.full((SIZE,), 3e38)
    assert aggregate([huge, -huge, honest(1)], [1.0] * 3, "mean", center=None, cap=True) is None


def test_a_magnitude_is_of_every_element() -> None:
    values = torch.zeros(131_072)
    values[1::16] = 4.0
    assert magnitude(values) == pytest.approx(1.0) and root_mean_square(values) == 0.0
    for size in (1e-30, 1e-15, 1e15, 3e38):
        assert magnitude(torch.full((1000,), size)) == pytest.approx(size), "squares need not fit a float32"


def test_distances_are_root_mean_squares() -> None:
    assert root_mean_square(torch.full((100,), -3.0)) == pytest.approx(3.0)
    assert root_mean_square(torch.full((100_000,), 1e25), torch.zeros(100_000)) == pytest.approx(1e25, rel=1e-6)
    values = [torch.full((SIZE,), it) for it in (0.0, 1.0, 5.0)]
    assert averaged(values).message.distance == pytest.approx(2.0), "the median of 2, 1 and 3"


# --- the clip


def test_a_clip_of_members_that_agree_is_their_mean() -> None:
    same = honest(3)
    assert torch.equal(averaged([same] * 5, rule="clip").values, same)
    assert torch.equal(averaged([same] * 5, rule="clip", center=same).values, same)
    around = [same + shift for shift in (torch.tensor(0.1), torch.tensor(-0.1))] * 2
    assert torch.allclose(averaged(around, rule="clip", center=same).values, same, atol=1e-6)


def test_a_clip_of_honest_members_is_near_their_mean() -> None:
    values = [honest(n) for n in range(8)]
    wrong = averaged(values, rule="clip", center=values[0]).values - sum(values) / 8
    assert root_mean_square(wrong) < 0.25 * 0.1


ATTACKS = {
    "sign flip": lambda it: -it,
    "a thousandfold": lambda it: 1000.0 * it,
    "a constant": lambda it: torch.full_like(it, 50.0),
    "far away": lambda it: torch.full_like(it, -1e18),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("members", "attackers"), [(3, 1), (4, 1), (5, 2), (8, 3), (9, 4)])
def test_attackers_that_are_fewer_than_half_move_a_clip_no_farther_than_members_are_apart(
    members: int, attackers: int, attack: str
) -> None:
    good = [honest(n) for n in range(members - attackers)]
    bad = [ATTACKS[attack](honest(100 + n)) for n in range(attackers)]
    apart = max(root_mean_square(a, b) for a in good for b in good)
    lies = (
        [[1.0] * len(good) + [1e9] * attackers] if 4 * attackers <= members else []
    )  # with these a member counts twice
    for weights in (None, *lies):
        for center in (good[0], good[-1]):
            found = averaged([*good, *bad], weights, "clip", center=center)
            assert root_mean_square(found.values, center) < 3.0 * apart, "three rounds, each at most the radius"


def test_one_attacker_moves_a_clip_by_its_share_of_the_radius_in_each_round() -> None:
    """All others agree to within `spread`: the attacker's pull is 1/n of that, three times."""
    spread = 0.01
    good = [honest(n, spread) for n in range(7)]
    without = averaged(good, rule="clip", center=good[0]).values
    for attack in ATTACKS.values():
        found = averaged([*good, attack(honest(100))], rule="clip", center=good[0])
        assert root_mean_square(found.values, without) < 3 * (2 * spread) / 8


# --- what a member accepts


def test_a_first_average_may_lie_as_far_as_the_values_are_large_and_a_later_one_eight_times_the_usual() -> None:
    assert not Drift().why_implausible(1.0, 1.0)
    assert "the average lies 1.01 from" in Drift().why_implausible(1.01, 1.0)
    usual = Drift().updated(0.01)
    assert not usual.why_implausible(0.99 * MOST_TIMES_USUAL * 0.01, 1.0)
    assert usual.why_implausible(1.01 * MOST_TIMES_USUAL * 0.01, 1.0)


def test_after_rounds_without_drift_a_fiftieth_of_the_values_is_still_accepted() -> None:
    still = Drift().updated(0.0)
    assert not still.why_implausible(0.02, 1.0) and still.why_implausible(0.021, 1.0)


def test_a_replica_that_had_most_of_the_weight_still_accepts_the_next_average() -> None:
    """Two replicas, found 0.0037 apart, one with a tenth of the other's tokens; then they weigh the same."""
    near, median, size = 0.00033, 0.0019, 0.05
    assert Drift().updated(near).why_implausible(0.0044, size), "the own distance alone says too little"
    assert not Drift().updated(Drift.after_acceptance(near, median)).why_implausible(0.0044, size)
    assert Drift.after_acceptance(0.0034, median) == 0.0034
    assert Drift.after_acceptance(near, 1e30) == MOST_TIMES_USUAL * near, "an owner's word counts so much and no more"
    assert Drift.after_acceptance(0.0, 1e30) == 0.0


def test_replicas_that_are_suddenly_farther_apart_accept_one_another_again_soon() -> None:
    drift, refused = Drift().updated(0.01), 0
    while drift.why_implausible(1.0, 1.0):
        drift, refused = drift.updated(drift.after_rejection(1.0)), refused + 1
    assert refused == 3
    assert Drift().after_rejection(1.0) is None, "a first that is rejected teaches nothing"
    for _ in range(100):
        drift = drift.updated(drift.after_rejection(1.0))
    assert drift.usual <= 1.0, "as large as the values, at most"


def test_what_is_not_a_number_is_rejected() -> None:
    for drift in (Drift(), Drift().updated(0.01)):
        assert drift.why_implausible(math.nan, 1.0) and drift.why_implausible(math.inf, 1.0)


def test_the_usual_distance_follows_slowly() -> None:
    drift = Drift().updated(0.01)
    for _ in range(3):
        before = drift.usual
        drift = drift.updated(MOST_TIMES_USUAL * before)
        assert drift.usual < 3.2 * before, "even at the edge of what is accepted"
    for _ in range(30):
        drift = drift.updated(0.02)
    assert drift.usual == pytest.approx(0.02, rel=0.01)


def test_a_mean_gradient_may_be_eight_times_as_large_as_the_usual_or_as_the_own() -> None:
    usual = GradientSize().updated(0.01, 0.02)
    assert not usual.why_implausible(0.99 * MOST_TIMES_USUAL * 0.01, 0.0)
    assert "the mean gradient is 0.0808 large" in usual.why_implausible(1.01 * MOST_TIMES_USUAL * 0.01, 0.0)
    assert not usual.why_implausible(1.01 * MOST_TIMES_USUAL * 0.01, 0.02)
    for size in (GradientSize(), usual):
        assert size.why_implausible(math.nan, 1.0) and size.why_implausible(math.inf, 1.0)
    assert usual.updated(0.08, 0.01).usual < 0.032


def test_a_mean_gradient_with_nothing_to_judge_it_by_is_used_and_not_remembered() -> None:
    assert not GradientSize().why_implausible(1e38, 0.0) and GradientSize().updated(1e38, 0.0) == GradientSize()
    assert GradientSize().why_implausible(0.81, 0.1) and not GradientSize().why_implausible(0.79, 0.1)
    assert GradientSize().updated(0.79, 0.1).usual == 0.1, "a first is judged by the own, and so remembered"


# --- when a newcomer counts


def test_a_replica_that_counts_goes_on_counting() -> None:
    newcomer = Newcomer()
    for _ in range(3):
        newcomer = newcomer.after_round(100.0, 1.0, 3.0, cover=20)
        assert newcomer.counts


@pytest.mark.parametrize("members", [2.0, 3.0, 8.0])
def test_a_newcomer_counts_once_it_is_as_near_as_the_others_would_be_from_outside(members: float) -> None:
    edge = NEAR * math.sqrt((members + 1) / (members - 1))
    far = Newcomer(counts=False).after_round(1.01 * edge * 0.1, 0.1, members, cover=20)
    assert not far.counts and far.rounds == 1
    assert far.after_round(0.99 * edge * 0.1, 0.1, members, cover=20).counts


def test_a_replica_as_good_as_the_others_is_near_enough() -> None:
    """n alike replicas and one more of the same spread, which is not in their average."""
    for members in (2, 3, 8):
        values = [honest(n) for n in range(members + 1)]
        found = averaged(values, [1.0] * members + [0.0])
        own = root_mean_square(values[-1], found.values)
        assert Newcomer(counts=False).after_round(own, found.message.distance, found.message.members, cover=20).counts


def test_a_single_other_is_nothing_to_compare_with() -> None:
    assert Newcomer(counts=False).after_round(5.0, 0.0, 1.0, cover=20).counts


def test_a_newcomer_that_has_every_slice_counts_in_any_case() -> None:
    newcomer = Newcomer(counts=False)
    for number in range(1, 6):
        newcomer = newcomer.after_round(100.0, 1.0, 3.0, cover=5)
        assert newcomer.counts == (number == 5)
