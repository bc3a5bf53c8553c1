"""Which step numbers of others are followed, and which are not, however often they are said."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from agora_protocol.messages import GossipSteps

from agora.replica.trust import FASTEST_TOKENS_PER_S, LEAD, LOCAL_LEAD, MAX_SPEED_UP, SLACK_S, OwnPace
from agora.swarm.peer_score import Violation
from tests.replica.group_world import GroupWorld
from tests.virtual_time import run


def test_others_may_be_as_far_as_time_allows_and_no_further() -> None:
    pace = OwnPace(own_step=100, own_step_at=50.0, present_step=100, step_s=10.0)
    at_once = 100 + LEAD + int(SLACK_S / 10.0 * MAX_SPEED_UP)
    assert pace.highest_plausible_step(50.0, 1000, LEAD) == at_once
    assert pace.highest_plausible_step(50.0 + 25.0, 1000, LEAD) == at_once + int(2.5 * MAX_SPEED_UP)
    assert pace.highest_plausible_step(40.0, 1000, LEAD) == at_once, "a clock that went back allows nothing"
    hour = pace.highest_plausible_step(50.0 + 3600.0, 1000, LOCAL_LEAD)
    assert hour == at_once - LEAD + LOCAL_LEAD + 360 * MAX_SPEED_UP, "who was away for an hour follows"


def test_a_machine_that_stood_still_for_seconds_accepts_those_who_went_on() -> None:
    pace = OwnPace(own_step=30, own_step_at=0.0, present_step=30, step_s=0.16)
    assert pace.highest_plausible_step(0.0, 1000, LEAD) >= 30 + SLACK_S / 0.16


def test_before_a_step_was_measured_the_fastest_machines_are_the_bound() -> None:
    pace = OwnPace(own_step=0, own_step_at=0.0, present_step=0)
    assert pace.highest_plausible_step(1.0, 65_536, LEAD) == LEAD + int((1.0 + SLACK_S) * FASTEST_TOKENS_PER_S / 65_536)
    assert pace.highest_plausible_step(60.0, 65_536, LEAD) < 10**4


def test_the_time_counts_from_the_last_step_that_was_taken_level_with_the_others() -> None:
    pace = OwnPace(7, 10.0, 7, 1.0)
    assert pace.with_step(7, 99.0, 2.0, furthest_step=7) == OwnPace(7, 10.0, 7, 2.0)
    assert pace.with_step(8, 99.0, 2.0, furthest_step=9) == OwnPace(8, 99.0, 8, 2.0)
    assert pace.with_step(8, 99.0, 2.0, furthest_step=40) == OwnPace(7, 10.0, 8, 2.0), "it still replays their steps"


def test_whoever_is_followed_cannot_lead_on_at_once() -> None:
    pace, now = OwnPace(100, 0.0, 100, 10.0), 1.0
    first = pace.highest_plausible_step(now, 1000, LEAD)
    followed = pace.with_step(first, now, 10.0, furthest_step=first)
    assert followed.highest_plausible_step(now, 1000, LEAD) == first + 1


async def train(others: int, *, liar: bool) -> tuple[list[int], list[list[float]], list[tuple[bool, Violation]]]:
    """Returns the steps and weights of the honest replicas after a minute, and the offences that they recorded."""
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
                peer.group.gossip.answer(last.peer, GossipSteps(0, (entry,)))
            await asyncio.sleep(0.1)

    telling = asyncio.create_task(tell()) if liar else None
    await asyncio.sleep(60.0)
    if telling is not None:
        telling.cancel()
    offences = [(peer == last.peer, offence) for p in honest for peer, offence, _ in p.offences]
    steps, weights = [p.stage.step for p in honest], [p.stage.weights.tolist() for p in honest]
    for peer in honest:
        await peer.stop()
    return steps, weights, offences


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_liar_at_step_10_9_changes_neither_steps_nor_weights(others: int) -> None:
    with_liar = run(train(others, liar=True))
    without = run(train(others, liar=False))
    assert with_liar[0] == without[0] and min(without[0]) >= 10
    for beside_it, alone in zip(with_liar[1], without[1], strict=True):  # until its first lie it was waited for
        assert np.allclose(beside_it, alone, atol=0.01)
    assert others == 3 or with_liar[1] == without[1]
    assert set(with_liar[2]) == {(True, Violation.IMPLAUSIBLE_STEP)} and not without[2]
