"""What a reducer makes of contributions: shares that nobody can grow, a clip that nobody can stretch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from agora_protocol.messages import Averaged

from agora.replica.shard_codec import (
    MAX_TIMES_LONGER,
    Aggregation,
    aggregate,
    cap_weights,
    magnitude,
    shorten,
)
from agora.replica.trust import (
    MAX_MEAN_RATIO,
    MAX_MEAN_RATIO_SYNCHRONOUS,
    MAX_OWN_RATIO,
    MagnitudeBound,
    believed_weights,
    fair_size,
    token_bounds,
    update_accepted_fractions,
)
from tests.replica.world import identities

SIZE = 512


def honest(index: int, spread: float = 0.1) -> torch.Tensor:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(index))
    return torch.linspace(-1, 1, SIZE) + spread * noise


def distance(values: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of (values - other)."""
    return magnitude(values - other)


def averaged(values: list[torch.Tensor], weights: list[float] | None = None, rule: Aggregation = "mean", **settings):
    settings = {"center": None, "exact": False} | settings
    found = aggregate(values, weights or [1.0] * len(values), rule, **settings)
    assert found is not None
    return found


# --- lengths


@pytest.mark.parametrize("scale", [1e30, -1e30, 100.0])
def test_one_contribution_however_long_moves_the_mean_by_no_more_than_a_bound(scale: float) -> None:
    others = [honest(index) for index in range(3)]
    alone = averaged(others).values
    beside = averaged([*others, honest(3) * scale]).values
    assert magnitude(beside) < (MAX_TIMES_LONGER / 4 + 1.5) * magnitude(alone)
    size = magnitude(alone)
    assert not MagnitudeBound(size, size).why_implausible(magnitude(beside), magnitude(others[0]))
    exact = averaged([*others, honest(3) * scale], exact=True).values
    assert magnitude(exact) < (MAX_MEAN_RATIO_SYNCHRONOUS / 4 + 1.5) * magnitude(alone)


def test_a_synchronous_mean_is_exact_where_one_honest_contribution_is_as_long_as_usual_and_the_others_are_short() -> (
    None
):
    """Lengths as in a run of three: a rare text made one gradient over 512 tokens 16 times as long as the others."""
    weights, lengths = [768.0, 512.0, 768.0], [0.974, 15.883, 0.679]
    values = [honest(n) * (length / float(honest(n).norm())) for n, length in enumerate(lengths)]
    plain = sum(value * (weight / 2048) for value, weight in zip(values, weights, strict=True))
    usual = aggregate(values, weights, "mean", center=None, exact=True, usual_length=2.4)
    assert usual is not None and torch.allclose(usual.values, plain, rtol=1e-5, atol=1e-7)
    size, own = 2.4 / SIZE**0.5, 0.679 / SIZE**0.5
    bound = MagnitudeBound(size, size, MAX_MEAN_RATIO_SYNCHRONOUS)
    assert not bound.why_implausible(magnitude(usual.values), own), "nor do the others refuse it"
    absurd = aggregate(
        [values[0], values[1] * 1e6, values[2]], weights, "mean", center=None, exact=True, usual_length=2.4
    )
    assert absurd is not None and not bound.why_implausible(magnitude(absurd.values), own)


def test_what_is_longer_because_few_tokens_are_behind_it_is_not_shortened() -> None:
    """Noise: its length goes with one by the square root of the tokens. Nor is one of two, whichever is right."""
    weights = [64.0, 6400.0, 12800.0, 25600.0]
    noise = [torch.randn(SIZE, generator=torch.Generator().manual_seed(n)) / w**0.5 for n, w in enumerate(weights)]
    assert all(short is value for short, value in zip(shorten(noise, weights), noise, strict=True))
    pair = [honest(1), honest(2) * 1e6]
    assert all(short is value for short, value in zip(shorten(pair, [1.0, 1.0]), pair, strict=True))
    assert shorten([torch.zeros(4)] * 2 + [torch.ones(4)], [1.0] * 3)[2].tolist() == [1.0] * 4, (
        "nothing to compare with"
    )


# --- weights


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 9, 64])
def test_no_share_of_the_whole_is_more_than_one_and_a_half_nths_of_four_or_more(members: int) -> None:
    rng = random.Random(members)
    for _ in range(50):
        weights = [10.0 ** rng.uniform(-6, 18) for _ in range(members)]
        lowered = cap_weights(weights)
        most = (1.5 if members >= 4 else 2.0) / members * sum(lowered)
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
        ([1e9, 1.0, 1.0, 1.0], [1.8, 1.0, 1.0, 1.0]),
        ([1e9, 1e9, 1.0, 1.0, 1.0], [2.25, 2.25, 1.0, 1.0, 1.0]),
        ([5.0] * 6, [5.0] * 6),
    ],
)
def test_what_the_cap_makes_of_weights(weights: list[float], expected: list[float]) -> None:
    assert cap_weights(weights) == pytest.approx(expected)
    assert cap_weights(weights[::-1]) == pytest.approx(expected[::-1]), "whoever comes first"


def test_a_liar_about_its_weight_moves_ten_members_by_a_tenth_and_a_half() -> None:
    values = [torch.zeros(SIZE)] * 9 + [torch.ones(SIZE)]
    weights = [1.0] * 9 + [1e9]
    assert torch.allclose(averaged(values, weights).values, torch.full((SIZE,), 0.15))
    exact = averaged(values, weights, exact=True).values
    assert float(exact[0]) > 0.99, "in synchronous runs weights are tokens; reducers have bounded them before"


def test_whoever_claims_tokens_is_heard_for_three_times_its_share_by_rates_that_others_measured() -> None:
    a, b, c, d = identities(4)
    bounds = token_bounds({a: 100.0, b: 100.0, c: 100.0, d: 1e12}, 4000, 64)
    honest_bounds = token_bounds({a: 100.0, b: 100.0, c: 100.0, d: 100.0}, 4000, 64)
    assert honest_bounds == dict.fromkeys((a, b, c, d), 3000.0)
    assert all(bounds[peer] > 1000.0 for peer in (a, b, c)), "honest weights are not lowered"
    assert bounds[d] == bounds[a], "a claim beyond all measure counts as the median"
    assert token_bounds({a: 100.0, b: 1.0, c: 0.0, d: None}, 4000, 64) == {}
    assert token_bounds({a: 100.0, b: 1.0}, 4000, 64) == {}, "of two, either could be right"
    slow = token_bounds({a: 1000.0, b: 1000.0, c: 1000.0, d: 0.1}, 4000, 64)
    assert slow[d] == 3 * 64, "a microbatch at least"


def test_what_a_fast_machine_had_while_weights_were_right_is_not_lost_by_the_lie_of_another() -> None:
    fast, slow, other, liar = identities(4)
    honest = {fast: 960.0, slow: 15.0, other: 15.0, liar: 10.0}
    rates = {fast: 6400.0, slow: 100.0, other: 100.0, liar: 100.0}
    bounds = token_bounds(rates, 1000, 1)
    assert bounds[fast] < honest[fast], "its rate is beyond what others believe at once"
    assert believed_weights(honest, 1000.0, bounds, {}) == honest, "together they are right, so each is"
    accepted: dict[str, float] = {}
    for _ in range(8):
        accepted = update_accepted_fractions(accepted, honest, 1000.0)
    for claimed in (1e4, 1e9):
        told = honest | {liar: claimed}
        assert update_accepted_fractions(accepted, told, 1000.0) == accepted, "such a round teaches nothing"
        believed = believed_weights(told, 1000.0, bounds, accepted)
        assert {peer: believed[peer] for peer in (fast, slow, other)} == {fast: 960.0, slow: 15.0, other: 15.0}
        assert believed[liar] == bounds[liar] <= 750.0


def test_who_claims_as_much_as_goes_unnoticed_is_never_believed_more_than_that() -> None:
    """However many rounds it has: a claim within the surplus raises no later one beyond it."""
    *honest, liar = identities(4)
    bounds = token_bounds(dict.fromkeys([*honest, liar], 100.0), 1000, 1)
    accepted: dict[str, float] = {}
    for _ in range(100):
        told = dict.fromkeys(honest, 250.0) | {liar: 500.0}
        accepted = update_accepted_fractions(accepted, told, 1000.0)
        believed = believed_weights(told | {liar: 1e6}, 1000.0, bounds, accepted)
        assert believed[liar] == bounds[liar] and all(believed[peer] == 250.0 for peer in honest)


@pytest.mark.parametrize("ratio", [64, 1000])
@pytest.mark.parametrize("members", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("exact", [False, True])
def test_a_machine_with_nearly_all_tokens_accepts_the_noisier_means_of_its_stage(
    ratio: int, members: int, exact: bool
) -> None:
    tokens = [float(ratio)] + [1.0] * (members - 1)
    bound, planned = MagnitudeBound(), sum(tokens)
    for round_ in range(10):
        rng = torch.Generator().manual_seed(round_)
        values = [torch.randn(SIZE, generator=rng) / count**0.5 for count in tokens]
        mean = magnitude(averaged(values, tokens, exact=exact).values)
        own = fair_size(magnitude(values[0]), tokens[0], planned, members)
        assert not bound.why_implausible(mean, own)
        bound = bound.after_accepted_mean(mean, own)


@pytest.mark.parametrize("tokens", [0.0, 1.0, 250.0])
def test_who_has_no_more_than_its_equal_part_judges_by_its_values_as_they_are(tokens: float) -> None:
    assert fair_size(0.1, tokens, 1000.0, 4) == 0.1
    assert fair_size(0.1, 1e9, 1000.0, 4) == pytest.approx(0.2), "and nobody by more than there are members"


def test_shares_sum_to_one() -> None:
    for weights in ([1.0], [3.0, 1.0], [100.0, 2.0, 3.0], [0.0, 5.0, 1.0], [1e18, 1e-3, 7.0]):
        found = averaged([torch.full((SIZE,), 2.5)] * len(weights), weights)
        assert torch.equal(found.values, torch.full((SIZE,), 2.5)), "equal values are their own mean, to the bit"
    a, b = honest(1), honest(2)
    assert torch.allclose(averaged([a, b], [3.0, 1.0]).values, 0.75 * a + 0.25 * b, atol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_who_weighs_nothing_is_present_but_not_in_the_average_nor_in_its_count(rule: Aggregation) -> None:
    values = [honest(1), honest(2), torch.full((SIZE,), 1e6)]
    with_it = averaged(values, [2.0, 1.0, 0.0], rule)
    without = averaged(values[:2], [2.0, 1.0], rule)
    assert torch.equal(with_it.values, without.values)
    assert (with_it.message.in_mean, with_it.message.contributors, with_it.message.weight) == (2, 3, 3.0)


def test_nobody_with_a_weight_makes_no_average() -> None:
    for rule in ("mean", "clip"):
        assert aggregate([honest(1), honest(2)], [0.0, 0.0], rule, center=None) is None
        assert aggregate([], [], rule, center=None) is None


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
    """Else one member's values would make the reducer refuse the honest ones."""
    for attackers in (1, 2):
        values = [honest(1), honest(2)] + [torch.full((SIZE,), size)] * attackers
        found = averaged(values, rule=rule, center=values[0])
        assert bool(found.values.isfinite().all())
        Averaged(found.message.in_mean, found.message.contributors, found.message.weight, True, "float32")


def test_values_whose_average_no_float_can_hold_make_none() -> None:
    huge = torch.full((SIZE,), 3e38)
    assert aggregate([huge, -huge, honest(1)], [1.0] * 3, "mean", center=None) is None


def test_a_magnitude_is_of_every_element() -> None:
    values = torch.zeros(131_072)
    values[1::16] = 4.0
    assert magnitude(values) == pytest.approx(1.0) and magnitude(torch.full((100,), -3.0)) == pytest.approx(3.0)
    for size in (1e-30, 1e-15, 1e15, 3e38):
        assert magnitude(torch.full((1000,), size)) == pytest.approx(size), "squares need not fit a float32"


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
    assert magnitude(wrong) < 0.25 * 0.1


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
    apart = max(distance(a, b) for a in good for b in good)
    lies = (
        [[1.0] * len(good) + [1e9] * attackers] if 4 * attackers <= members else []
    )  # with these a member counts twice
    for weights in (None, *lies):
        for center in (good[0], good[-1]):
            found = averaged([*good, *bad], weights, "clip", center=center)
            assert distance(found.values, center) < 3.0 * apart, "three rounds, each at most the radius"


def test_one_attacker_moves_a_clip_by_its_share_of_the_radius_in_each_round() -> None:
    """All others agree to within `spread`: the attacker's pull is 1/n of that, three times."""
    spread = 0.01
    good = [honest(n, spread) for n in range(7)]
    without = averaged(good, rule="clip", center=good[0]).values
    for attack in ATTACKS.values():
        found = averaged([*good, attack(honest(100))], rule="clip", center=good[0])
        assert distance(found.values, without) < 3 * (2 * spread) / 8


# --- what a member accepts


def test_a_mean_may_be_four_times_as_large_as_the_usual_or_as_the_own() -> None:
    bound = MagnitudeBound().after_accepted_mean(0.01, 0.02)
    assert not bound.why_implausible(0.99 * MAX_MEAN_RATIO * 0.01, 0.0)
    assert "the mean has a root mean square of 0.0404" in bound.why_implausible(1.01 * MAX_MEAN_RATIO * 0.01, 0.0)
    assert not bound.why_implausible(1.01 * MAX_MEAN_RATIO * 0.01, 0.02)


def test_what_is_not_a_number_is_rejected() -> None:
    for bound in (MagnitudeBound(), MagnitudeBound().after_accepted_mean(0.01, 0.02)):
        assert bound.why_implausible(math.nan, 1.0) and bound.why_implausible(math.inf, 1.0)
        assert bound.why_implausible(math.inf, 0.0), "even with nothing to judge it by"


def test_the_usual_size_follows_slowly() -> None:
    bound = MagnitudeBound().after_accepted_mean(0.01, 0.02)
    for _ in range(30):
        bound = bound.after_accepted_mean(0.02, 0.02)
    assert bound.average == pytest.approx(0.02, rel=0.01)
    assert bound.after_accepted_mean(0.5, 0.0) == bound, "where this replica has no values, it learns nothing"


@pytest.mark.parametrize("own", [1e-3, 0.0])
def test_means_at_the_edge_of_what_is_accepted_never_raise_it_beyond_a_bound(own: float) -> None:
    """However many rounds a reducer has: what counts as usual is held by the replica's own values."""
    bound = MagnitudeBound()
    for _ in range(5):
        bound = bound.after_accepted_mean(1e-3, 1e-3)
    for _ in range(1000):
        limit = bound.limit(own)
        assert limit <= MAX_MEAN_RATIO * MAX_OWN_RATIO * 1e-3
        bound = bound.after_accepted_mean(0.99 * limit, own)


def test_a_replica_whose_own_values_grow_accepts_means_as_much_larger() -> None:
    """Differences to the anchor grow with each round that fails."""
    bound = MagnitudeBound().after_accepted_mean(0.01, 0.01)
    assert bound.why_implausible(1.0, 0.2) and not bound.why_implausible(1.0, 0.3)


def test_a_mean_with_nothing_to_judge_it_by_is_used_and_not_remembered() -> None:
    assert (
        not MagnitudeBound().why_implausible(1e38, 0.0)
        and MagnitudeBound().after_accepted_mean(1e38, 0.0) == MagnitudeBound()
    )
    assert MagnitudeBound().why_implausible(0.81, 0.1) and not MagnitudeBound().why_implausible(0.79, 0.1)
    assert MagnitudeBound().after_accepted_mean(0.79, 0.1).average == MAX_OWN_RATIO * 0.1, (
        "a first is judged by the own, and so remembered"
    )
