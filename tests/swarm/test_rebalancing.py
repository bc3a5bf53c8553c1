"""When a serving peer moves to other stages, when it stays, and what comes of it when all judge again and again."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from agora_protocol.ids import Span

from agora.swarm.placement import Placement
from agora.swarm.rebalancing import (
    MAX_JUDGE_INTERVAL_S,
    MIN_GAIN,
    MIN_JUDGE_INTERVAL_S,
    MOVE_DURATION_S,
    judge_move,
    rebalance_interval_s,
)
from agora.swarm.stage_capacity import MachineCapacity, StageCapacity, StageNeeds, equal_needs
from agora.swarm.view import PeerView, StageEstimate, View
from tests.swarm.makers import peer_id, seen, view


class Always(random.Random):
    """Draws 0 where chance decides whether a peer moves, so that it does if it may."""

    def random(self) -> float:
        return 0.0


class Never(random.Random):
    """Draws nearly 1, so that no peer goes out of its turn."""

    def random(self) -> float:
        return 0.999999


def stage(number: int, count: int, capacity: float = 0.0, state: str = "serving") -> list[PeerView]:
    """`count` peers of one stage, named after it: "0a", "0b" ..."""
    return [seen(f"{number}{chr(97 + i)}", str(number), state, capacity=capacity) for i in range(count)]


def judge(
    peers: View, name: str, stages: int, *, longest: int = 1, speed: float = 0.0, needs: StageNeeds | None = None,
    bandwidth: float = 0.0,
) -> Placement | None:  # fmt: skip
    fits = tuple(min(longest, stages - first) for first in range(stages))
    return judge_move(
        peers, peer_id(name), needs or equal_needs(stages), MachineCapacity(speed, bandwidth, fits), Always(1)
    )


def test_a_peer_of_a_rich_stage_fills_an_empty_one() -> None:
    placement = judge(view(*stage(0, 3)), "0a", 2)
    assert placement == Placement(Span(1, 1), "stages 1 have a stage with fewer than two peers")


def test_a_stage_with_one_replica_gets_a_second_from_one_with_three() -> None:
    assert judge(view(*stage(0, 3), *stage(1, 1)), "0a", 2).span == Span(1, 1)


@pytest.mark.parametrize("other", [0, 1])
def test_a_stage_never_loses_one_of_its_last_two_replicas(other: int) -> None:
    assert judge(view(*stage(0, 2), *stage(1, other)), "0a", 2) is None


def test_replicas_that_are_still_joining_do_not_count_as_left_behind() -> None:
    peers = view(*stage(0, 2), seen("new", "0", "joining"), *stage(1, 1))
    assert judge(peers, "0a", 2) is None


def test_a_peer_that_joins_the_thin_stage_counts_at_once() -> None:
    assert judge(view(*stage(0, 3), *stage(1, 1)), "0a", 2) is not None
    assert judge(view(*stage(0, 3), *stage(1, 1), seen("mover", "1", "joining")), "0a", 2) is None


def test_a_peer_that_is_leaving_may_be_on_its_way_and_is_waited_for() -> None:
    assert judge(view(*stage(0, 4), *stage(1, 1), seen("mover", "0", "leaving")), "0a", 2) is None


def test_a_peer_that_does_not_serve_stays() -> None:
    assert judge(view(*stage(0, 3), seen("me", "0", "joining")), "me", 2) is None
    assert judge(view(*stage(0, 3)), "me", 2) is None, "not in the view"
    assert judge(view(*stage(0, 3), seen("me", "0-9")), "me", 2) is None, "a claim beyond the run"


def test_a_longer_span_is_taken_to_fill_a_stage_while_another_replica_keeps_its_own() -> None:
    assert judge(view(*stage(0, 2), *stage(1, 1)), "0a", 2, longest=2).span == Span(0, 1)
    assert judge(view(*stage(0, 1), *stage(1, 1)), "0a", 2, longest=2) is None, "stage 0 would be empty meanwhile"
    assert judge(view(*stage(0, 1)), "0a", 2, longest=2).span == Span(0, 1), "the swarm stands still anyway"


def test_what_does_not_fit_into_memory_is_not_taken() -> None:
    assert judge(view(*stage(0, 3)), "0a", 2, longest=0) is None


def test_a_slow_stage_is_raised_when_the_rate_rises_by_enough() -> None:
    assert judge(view(*stage(0, 6), *stage(1, 2)), "0a", 2).reason == "the swarm's slowest stage gets 50% faster"
    measured = view(*stage(0, 4, capacity=10.0), *stage(1, 4, capacity=1.0))
    assert judge(measured, "0a", 2, speed=10.0).span == Span(1, 1)
    assert judge(view(*stage(0, 4), *stage(1, 3)), "0a", 2) is None, "even enough"
    assert 23 / 22 < MIN_GAIN
    assert judge(view(*stage(0, 24), *stage(1, 22)), "0a", 2) is None, "too small a gain"


def test_a_stage_of_which_a_part_is_known_counts_in_full_and_its_uncertainty_forbids_small_moves() -> None:
    peers = view(*stage(0, 24), *stage(1, 6)).peers
    assert judge(View(peers), "0a", 2) is not None, "all that there are"
    samples = {0: StageEstimate(24.0, 8.0), 1: StageEstimate(20.0, 50.0)}
    capacity = StageCapacity(View(peers, samples), equal_needs(2))
    assert capacity.rates == pytest.approx([24.0, 20.0]) and capacity.holders == [24, 20] and capacity.speed == 44.0
    assert capacity.uncertainty == pytest.approx(3.0 * ((1.0 - 6 / 20) / 6) ** 0.5)
    assert judge(View(peers, samples), "0a", 2) is None


def test_a_gain_that_only_comes_when_others_move_too_counts() -> None:
    """Two stages are slow: one mover alone cannot raise the slowest."""
    peers = view(*stage(0, 12), *stage(1, 4), *stage(2, 4))
    placement = judge(peers, "0a", 3)
    assert placement is not None and placement.span.first in (1, 2)


def test_a_peer_whose_own_stage_would_become_the_slowest_stays() -> None:
    fast = seen("fast", "0", capacity=10.0)
    peers = view(fast, *stage(0, 3, capacity=0.1), *stage(1, 4, capacity=1.0))
    assert judge(peers, "fast", 2, speed=10.0) is None


def test_a_move_must_repay_the_bytes_that_it_fetches() -> None:
    peers = view(*stage(0, 6, capacity=1.0), *stage(1, 2, capacity=1.0))
    for state_bytes, moves in ((1e9, True), (1e12, False)):
        needs = StageNeeds((1.0, 1.0), 0.0, (state_bytes,) * 2)
        assert (judge(peers, "0a", 2, speed=1.0, needs=needs, bandwidth=1e7) is not None) == moves
        assert judge(peers, "0a", 2, speed=1.0, needs=needs) is not None, "an unknown bandwidth forbids nothing"


def test_of_fifty_peers_that_could_move_at_once_about_as_many_go_as_are_needed() -> None:
    peers, fits = view(*(seen(f"p{i}", "0") for i in range(50)), seen("q", "1")), (1, 1)
    went = []
    for seed in range(20):
        rng = random.Random(seed)
        machine = MachineCapacity(0.0, 0.0, fits)
        moves = [judge_move(peers, peer_id(f"p{i}"), equal_needs(2), machine, rng) for i in range(50)]
        went.append(sum(move is not None for move in moves))
    assert 1.0 <= sum(went) / len(went) <= 1.2, "one is needed"
    assert max(went) <= 2


@pytest.mark.parametrize("counts", [(14, 10, 12, 12), (12, 12, 9, 9, 13, 13), (20, 4, 12, 12)])
def test_peers_that_judge_the_same_view_at_once_go_to_different_stages_and_no_more_of_them_than_help(
    counts: tuple[int, ...],
) -> None:
    peers, now = view(*(peer for number, count in enumerate(counts) for peer in stage(number, count))), list(counts)
    machine, needs = MachineCapacity(0.0, 0.0, (1,) * len(counts)), equal_needs(len(counts))
    for peer in peers.peers.values():
        if placement := judge_move(peers, peer.peer, needs, machine, Never(1)):
            now[peer.span.first] -= 1
            now[placement.span.first] += 1
    assert max(now) - min(now) <= 1


def test_peers_look_again_at_random_moments() -> None:
    rng = random.Random(0)
    looks = [rebalance_interval_s(rng) for _ in range(200)]
    assert MIN_JUDGE_INTERVAL_S <= min(looks) < max(looks) <= MAX_JUDGE_INTERVAL_S and len(set(looks)) > 190


# --- all together


def settle(stages: int, speeds: list[float], longest: int, seed: int, looks: int = 30) -> tuple[View, int, int]:
    """Returns the view after random peers have judged in turn, the moves, and the round of looks of the last one."""
    rng, names, moves, last = random.Random(seed), [f"p{i}" for i in range(len(speeds))], 0, 0
    fits = tuple(min(longest, stages - first) for first in range(stages))

    def claim(name: str, span: Span) -> PeerView:
        return seen(name, str(span), capacity=speeds[names.index(name)] / len(span))

    starts = [rng.randrange(stages) for _ in names]
    now = view(*(claim(name, Span(first, first)) for name, first in zip(names, starts, strict=True)))
    for look in range(looks * len(names)):
        name = rng.choice(names)
        machine = MachineCapacity(speeds[names.index(name)], 0.0, fits)
        if placement := judge_move(now, peer_id(name), equal_needs(stages), machine, rng):
            now = View({**now.peers, peer_id(name): claim(name, placement.span)})
            moves, last = moves + 1, look // len(names)
    return now, moves, last


def best_rate(stages: int, speeds: list[float], longest: int) -> float:
    """Returns the greatest rate of the slowest stage over all ways to place peers of these speeds."""
    spans = [range(f, f + n) for n in range(1, longest + 1) for f in range(stages - n + 1)]
    rate = 0.0
    for chosen in itertools.product(spans, repeat=len(speeds)):
        rates = [0.0] * stages
        for span, speed in zip(chosen, speeds, strict=True):
            for held in span:
                rates[held] += speed / len(span)
        rate = max(rate, min(rates))
    return rate


@pytest.mark.parametrize(("stages", "peers", "longest"), [(2, 6, 1), (2, 8, 1), (2, 6, 2), (3, 6, 2)])
def test_from_random_starts_small_swarms_come_near_the_best_placement(stages: int, peers: int, longest: int) -> None:
    """On average. The worst are those where a stage has no peer to spare: its last two stay whatever it costs."""
    ratios = []
    for seed in range(10):
        speeds = random.Random(seed).choices([1.0, 1.0, 2.0, 4.0], k=peers)
        now, _, _ = settle(stages, speeds, longest, seed)
        ratios.append(StageCapacity(now, equal_needs(stages)).rate / best_rate(stages, speeds, longest))
    assert sum(ratios) / len(ratios) >= 0.9 and min(ratios) >= 0.7, ratios


@pytest.mark.parametrize("longest", [1, 3])
def test_a_large_swarm_evens_out_soon_and_then_nobody_moves(longest: int) -> None:
    speeds = random.Random(1).choices([1.0, 1.0, 2.0, 4.0], k=60)
    now, moves, last = settle(6, speeds, longest, seed=1, looks=40)
    capacity = StageCapacity(now, equal_needs(6))
    assert capacity.rate >= 0.88 * capacity.even_rate and min(capacity.holders) >= 2
    assert moves <= len(speeds) and last < 30, "they do not oscillate"


def test_heads_are_counted_while_no_speed_is_known() -> None:
    peers = view(*(seen(f"p{i}", "0") for i in range(12)))
    rng = random.Random(0)
    for _ in range(400):
        name = f"p{rng.randrange(12)}"
        machine = MachineCapacity(0.0, 0.0, (1, 1, 1))
        if placement := judge_move(peers, peer_id(name), equal_needs(3), machine, rng):
            peers = View({**peers.peers, peer_id(name): seen(name, str(placement.span))})
    counts = Counter(peer.span.first for peer in peers.peers.values())
    assert min(counts.values()) >= 3 and sum(counts.values()) == 12, counts


@pytest.mark.parametrize("slow_peers", [2, 5])
def test_a_move_is_expected_to_pay_for_as_long_as_the_peer_has_served(slow_peers: int) -> None:
    """One more peer makes the slow stage (n + 1) / n times as fast: 1 / (n + 1) of the time is won."""
    peers = view(*stage(0, 8, 2.0), *stage(1, slow_peers, 1.0))
    machine, repaid_s = MachineCapacity(1.0, 0.0, (1, 1)), MOVE_DURATION_S * (slow_peers + 1)
    for served_s, moves in ((0.9 * repaid_s, False), (1.1 * repaid_s, True)):
        placement = judge_move(peers, peer_id("0a"), equal_needs(2), machine, Always(1), served_s)
        assert (placement is not None) == moves


def test_a_thin_stage_is_filled_by_a_peer_that_has_just_come() -> None:
    peers = view(*stage(0, 3), *stage(1, 1))
    assert (
        judge_move(peers, peer_id("0a"), equal_needs(2), MachineCapacity(0.0, 0.0, (1, 1)), Always(1), 0.0) is not None
    )
