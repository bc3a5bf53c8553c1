"""What peers say of themselves counts within what others measured: bandwidths, tokens, steps, histories."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from agora_protocol.ids import PeerId, RunId
from agora_protocol.messages import GossipSteps

from agora.replica.divergence import SharedHistory
from agora.replica.pacing import BatchSizeCorrection, RateMeter, StepPacing, TokenRate
from agora.replica.reducers import reducers_of, reducing_bandwidths
from agora.replica.shard_codec import Shard
from agora.replica.trust import (
    FASTEST_TOKENS_PER_S,
    MAX_INNER_LEAD,
    MAX_LEAD,
    MAX_PROGRESS_RATIO,
    MAX_SPEED_UP,
    STALL_ALLOWANCE_S,
    LevelStep,
    StepPace,
    believed_bandwidths,
    believed_claim,
    believed_rates,
    believed_step_tokens,
    believed_tokens,
    highest_plausible_step,
)
from agora.swarm.peer_score import Violation
from tests.replica.group_world import GroupWorld
from tests.replica.world import identities
from tests.virtual_time import run


def highest(
    now: float, *shared: SharedHistory, level: LevelStep, pace: StepPace, present_step: int | None = None
) -> int:
    return highest_plausible_step(level.step if present_step is None else present_step, level, shared, pace, now)


def test_others_may_be_as_far_as_time_allows_and_no_further() -> None:
    level, pace = LevelStep(100, 50.0), StepPace(10.0, 1000)
    at_once = 100 + MAX_LEAD + int(STALL_ALLOWANCE_S / 10.0 * MAX_SPEED_UP)
    assert highest(50.0, level=level, pace=pace) == at_once
    assert highest(50.0 + 25.0, level=level, pace=pace) == at_once + int(2.5 * MAX_SPEED_UP)
    assert highest(40.0, level=level, pace=pace) == at_once, "a clock that went back allows nothing"
    hour = highest(50.0 + 3600.0, level=level, pace=StepPace(10.0, 1000, MAX_INNER_LEAD))
    assert hour == at_once - MAX_LEAD + MAX_INNER_LEAD + 360 * MAX_SPEED_UP, "who was away for an hour follows"


def test_where_a_replica_parted_others_may_have_gone_on_at_the_pace_of_then() -> None:
    level, pace = LevelStep(400, 1000.0), StepPace(8.0, 1000)
    parted = SharedHistory(first=0, last=400, at=500.0, step_s=1.0)
    at_once = 400 + MAX_LEAD + int(STALL_ALLOWANCE_S * MAX_SPEED_UP)
    assert highest(500.0, parted, level=level, pace=pace) == at_once
    assert highest(1000.0, parted, level=level, pace=pace) == at_once + 500 * MAX_SPEED_UP
    of_unknown_pace = highest(500.0, parted._replace(step_s=None), level=level, pace=pace)
    assert of_unknown_pace == 400 + MAX_LEAD + STALL_ALLOWANCE_S / 8 * MAX_SPEED_UP
    level_with_all = parted._replace(at=1000.0, step_s=8.0)
    assert highest(1000.0, level_with_all, level=level, pace=pace) == highest(1000.0, level=level, pace=pace)


def test_a_machine_that_stood_still_for_seconds_accepts_those_who_went_on() -> None:
    assert highest(0.0, level=LevelStep(30, 0.0), pace=StepPace(0.16, 1000)) >= 30 + STALL_ALLOWANCE_S / 0.16


def test_before_a_step_was_measured_the_fastest_machines_are_the_bound() -> None:
    level, pace = LevelStep(0, 0.0), StepPace(None, 65_536)
    assert highest(1.0, level=level, pace=pace) == MAX_LEAD + int(
        (1.0 + STALL_ALLOWANCE_S) * FASTEST_TOKENS_PER_S / 65_536
    )
    assert highest(60.0, level=level, pace=pace) < 10**4


def test_the_time_counts_from_the_last_step_that_was_taken_level_with_the_others() -> None:
    level = LevelStep(7, 10.0)
    assert level.after_step(8, 99.0, furthest_step=9) == LevelStep(8, 99.0)
    assert level.after_step(8, 99.0, furthest_step=40) == level, "it still replays their steps"


def test_whoever_is_followed_cannot_lead_on_at_once() -> None:
    level, pace, now = LevelStep(100, 0.0), StepPace(10.0, 1000), 1.0
    first = highest(now, level=level, pace=pace)
    assert highest(now, level=level, pace=pace, present_step=first) == first + 1


# --- claimed bandwidths

RUN = RunId("ab" * 32)


def shares_reduced(claims: dict[PeerId, float], networks: dict[PeerId, str] | None = None) -> dict[PeerId, float]:
    """Returns the fraction of shards that each peer is the first reducer of, over many epochs."""
    members = reducing_bandwidths({peer: (claim, "public") for peer, claim in claims.items()}, networks or {})
    shards = [Shard(1, "gradient", 16 * epoch, part) for epoch in range(40) for part in range(64)]
    first = Counter(reducers_of(RUN, shard, members)[0] for shard in shards)
    return {peer: first[peer] / len(shards) for peer in claims}


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("times", [8.0, 10.0, 100.0, 8e4])
def test_one_that_claims_any_bandwidth_reduces_what_it_would_if_it_were_honest(count: int, times: float) -> None:
    peers = identities(count)
    honest = dict.fromkeys(peers, 12.5e6)
    assert shares_reduced(honest | {peers[0]: times * 12.5e6}) == shares_reduced(honest)
    assert shares_reduced(honest | {peers[0]: 12.5e6 / times})[peers[0]] >= 0.8 / (1 + 4 * (count - 1)), "nor nothing"


@pytest.mark.parametrize(("count", "most"), [(4, 0.6), (16, 0.23)])
def test_no_claim_of_bandwidth_brings_more_than_four_times_the_median(count: int, most: float) -> None:
    peers = identities(count)
    for times in (2.0, 3.0, 4.0, 4.1, 5.0, 6.0, 7.9):
        assert shares_reduced(dict.fromkeys(peers, 1e6) | {peers[0]: times * 1e6})[peers[0]] <= most


def test_a_claim_counts_as_it_is_up_to_four_times_the_median_and_less_the_larger_it_is() -> None:
    assert [believed_claim(claim, 10.0) for claim in (0.1, 10.0, 40.0)] == [0.1, 10.0, 40.0]
    beyond = [believed_claim(claim, 10.0) for claim in (40.001, 50.0, 60.0, 79.0)]
    assert beyond == sorted(beyond, reverse=True) and 10.0 < beyond[-1] < beyond[0] < 40.0, "without a jump"
    assert [believed_claim(claim, 10.0) for claim in (80.0, 1e3, 1e300, math.inf)] == [10.0] * 4


def test_ids_of_one_network_move_no_median() -> None:
    *honest, first = identities(5)
    sybils = [first, *identities(30)[5:]]
    claims = dict.fromkeys(honest, 1e6) | dict.fromkeys(sybils, 1e12)
    networks = {peer: f"10.0.{number}.0/24" for number, peer in enumerate(honest)} | dict.fromkeys(
        sybils, "10.9.9.0/24"
    )
    believed = believed_bandwidths(claims, networks)
    assert set(believed.values()) == {1e6}
    assert believed_bandwidths({honest[0]: 0.0}, {}) == {honest[0]: 0.0}, "unknown"


# --- numbers of steps that others say


async def train(others: int, *, liar: bool) -> tuple[list[int], list[list[float]], list[tuple[bool, Violation]]]:
    """Returns the steps and weights of the honest replicas after a minute, and the violations that they recorded."""
    world = GroupWorld([300.0] * (others + 1))
    *honest, last = world.all
    if not liar:
        world.peers.pop(last.peer)
    for peer in honest:
        peer.start()

    async def tell() -> None:
        """Says to every honest replica, ten times a second, that the liar has taken 10^9 steps."""
        step = 10**9
        while True:
            for peer in honest:
                entry = (last.peer, step, step, 4, 10**12, step, 5, 0, 0, 0)
                peer.group.stages[0].gossip.answer(last.peer, GossipSteps(0, (entry,)))
            await asyncio.sleep(0.1)

    telling = asyncio.create_task(tell()) if liar else None
    await asyncio.sleep(60.0)
    if telling is not None:
        telling.cancel()
    violations = [(peer == last.peer, violation) for p in honest for peer, violation, _ in p.violations]
    steps, weights = [p.stage.step for p in honest], [p.stage.weights.tolist() for p in honest]
    for peer in honest:
        await peer.stop()
    return steps, weights, violations


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_liar_at_step_10_9_changes_neither_steps_nor_weights(others: int) -> None:
    with_liar = run(train(others, liar=True))
    without = run(train(others, liar=False))
    assert with_liar[0] == without[0] and min(without[0]) >= 10
    for beside_it, alone in zip(with_liar[1], without[1], strict=True):  # until its first lie it was waited for
        assert np.allclose(beside_it, alone, atol=0.01)
    assert others == 3 or with_liar[1] == without[1]
    assert set(with_liar[2]) == {(True, Violation.IMPLAUSIBLE_STEP)} and not without[2]


# --- rates and tokens of others


@pytest.mark.parametrize("count", [3, 4, 16])
@pytest.mark.parametrize("times", [512.0, 1e6, 1e15])
def test_one_that_reports_any_rate_has_the_share_of_the_others(count: int, times: float) -> None:
    peers = identities(count)
    assert believed_rates(dict.fromkeys(peers, 100.0) | {peers[0]: 100.0 * times}) == dict.fromkeys(peers, 100.0)


def test_one_that_is_64_times_as_fast_as_all_others_counts_as_it_is() -> None:
    rates = dict.fromkeys(identities(4), 100.0) | {identities(1)[0]: 6400.0}
    assert believed_rates(rates) == rates


def test_rates_count_as_they_are_where_replicas_differ_as_machines_do() -> None:
    peers = identities(4)
    for rates in ([1.0, 2.0, 4.0, 8.0], [100.0, 10.0, 100.0, 1.0], [64.0, 0.0, 1.0, 0.0], [5.0, 0.0, 0.0, 0.0]):
        known = dict(zip(peers, rates, strict=True))
        assert believed_rates(known) == known
    assert believed_rates({peers[0]: 64.1, peers[1]: 1.0}) == {peers[0]: 1.0, peers[1]: 1.0}, "word against word"
    assert believed_rates({peers[0]: None, peers[1]: 4.0, peers[2]: 4.0}) == dict.fromkeys(peers[:3], 4.0)
    assert believed_rates(dict.fromkeys(peers, 0.0)) == dict.fromkeys(peers, 1.0)


def test_one_that_is_too_fast_to_be_believed_counts_all_that_it_can_meanwhile() -> None:
    """And the others as much as they would beside one like them: nobody waits."""
    peers, target = identities(4), 40_000
    quotas = []
    for me, rate in zip(peers, (64_000.0, 100.0, 100.0, 100.0), strict=True):
        meter = StepPacing(10, BatchSizeCorrection(target), meter=RateMeter(TokenRate(rate, 1.0)))
        others = {peer: 64_000.0 if peer == peers[0] else 100.0 for peer in peers if peer != me}
        quotas.append(meter.update_quota(me, others))
    assert quotas == [6_400_000, 10_000, 10_000, 10_000]


def test_tokens_of_others_count_as_far_as_the_median_has_come_or_as_their_share_and_a_microbatch() -> None:
    peers = identities(3)
    shares = dict.fromkeys(peers, 100.0)
    assert believed_tokens(dict.fromkeys(peers, 50), shares, 50, 100.0, 8) == dict.fromkeys(peers, 50)
    lie = dict(zip(peers, (2**50, 60, 60), strict=True))
    assert list(believed_tokens(lie, shares, 60, 100.0, 8).values()) == [108, 60, 60]
    late = dict(zip(peers, (2**50, 130, 130), strict=True))
    assert list(believed_tokens(late, shares, 20, 100.0, 8).values()) == [138, 130, 130], "made up for by the others"


def test_a_fast_replica_whose_share_is_all_microbatches_completes_the_step_of_the_slow_ones() -> None:
    """Eight microbatches, of which 64/66 are 7.8: it counts all of them."""
    peers = identities(2)
    shares = dict(zip(peers, (64 / 66 * 800, 1 / 66 * 800), strict=True))
    believed = believed_tokens({peers[0]: 800, peers[1]: 0}, shares, 0, shares[peers[1]], 100)
    assert believed[peers[0]] == 800


def test_the_tokens_of_a_step_are_those_that_the_replicas_have_reported_where_its_reducer_alone_says_others() -> None:
    peers = identities(3)
    shares = dict.fromkeys(peers, 100.0)

    def step_tokens(told: float, *reported: int, own: int = 90) -> float:
        return believed_step_tokens(told, dict(zip(peers, reported, strict=True)), shares, own, 100.0, 8)

    assert step_tokens(365.0, 90, 90, 90) == 365.0, "as told: all members adapt to the same number"
    assert step_tokens(36.0, 90, 90, 90) == step_tokens(8000.0, 90, 90, 90) == 360.0
    assert step_tokens(36.0, 90, 90, 70) == pytest.approx(270 + 90 / MAX_PROGRESS_RATIO - 8), "who reports less"
    assert step_tokens(8000.0, 90, 90, 2**50) == pytest.approx(270 + 90 * MAX_PROGRESS_RATIO + 8), "or more"
    assert step_tokens(36.0, 90, 90, 0) == 360.0, "what one has counted is not known any more"
    assert step_tokens(8000.0, 90, 90, 90, own=10) == 280.0, "this replica came late"
    assert believed_step_tokens(8000.0, {peers[0]: 90}, {peers[0]: 100.0}, 90, 100.0, 8) == 8000.0, "word against word"
    idle = believed_step_tokens(36.0, {peers[0]: 5, peers[1]: 90}, {peers[0]: 0.0, peers[1]: 100.0}, 90, 100.0, 8)
    assert idle == 185.0, "who has no share, a microbatch at most"
