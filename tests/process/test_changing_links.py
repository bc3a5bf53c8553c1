"""Replicas in real processes whose links get too slow for gradients: inner steps; and fast again: all-reduce steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.manifest import Manifest

from agora.core.step_schedule import ALL_REDUCE, MIN_STEPS_BETWEEN
from tests.process.harness import Daemon, checkpoint_at, last_step, newest_common, nothing_lost, oracle_manifest, swarm

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FAST, SLOW = "400Mbit,1ms", "2Mbit,1ms"


def manifest_of_one_stage() -> Manifest:
    base = oracle_manifest(1, kind="asynchronous", activations="keep").model_dump()
    base["optimizer"] |= {"target_tokens": 8192, "total_steps": 2000}
    base["schedule"] |= {"least_replicas": 3}
    base["checkpoint"] |= {"every": 5, "keep": 1000}
    return Manifest.model_validate(base)


def set_links(daemons: list[Daemon], rate: str) -> None:
    for daemon in daemons:
        daemon.ask("link", rate=rate.split(",")[0])


def changes_of(daemon: Daemon) -> list[tuple[int, int, int]]:
    """The changes of the stage's plan: (from which step on, slices before, slices from there on)."""
    told = daemon.events("StepPlanChanged")
    return [(event["change_at"], event["slices"], event["later_slices"]) for event in told]


def returns_of(daemon: Daemon) -> list[int]:
    """From which steps on the stage's steps are exact again."""
    return [change_at for change_at, _, later in changes_of(daemon) if later == ALL_REDUCE]


def are_past(daemons: list[Daemon], step: int) -> bool:
    return min(map(last_step, daemons)) > step


@pytest.mark.slow
def test_links_that_get_slow_bring_inner_steps_and_links_that_get_fast_all_reduce_steps(tmp_path: Path) -> None:
    """All change at the same step, as often as links do; no microbatch is lost, and their means are the same bits."""
    with swarm(tmp_path, manifest_of_one_stage()) as made:
        peers = [made.start(name, "0", flags=["--link", FAST]) for name in ("a", "b", "c")]
        made.until(partial(are_past, peers, 5), "all-reduce steps of three")
        assert [changes_of(peer) for peer in peers] == [[], [], []]
        set_links(peers, SLOW)
        made.until(lambda: all(map(changes_of, peers)), "a decision for inner steps")
        (change_at, before, slices) = changes_of(peers[0])[0]
        assert before == ALL_REDUCE and slices > ALL_REDUCE
        made.until(partial(are_past, peers, change_at + 5), "inner steps of three")
        assert all("inner steps" in " ".join(peer.ask("report")["notes"]) for peer in peers)
        made.until(partial(are_past, peers, change_at + MIN_STEPS_BETWEEN), "many inner steps")
        set_links(peers, FAST)
        made.until(lambda: all(map(returns_of, peers)), "a decision for all-reduce steps")
        back = returns_of(peers[0])[0]
        made.until(partial(are_past, peers, back + 20), "all-reduce steps again")
        common = made.until(lambda: step if (step := newest_common(peers)) > back + 10 else 0, "states of all after")
        first, *others = (checkpoint_at(peer, 0, common) for peer in peers)
        assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
        for peer in peers:
            assert changes_of(peer)[0] == (change_at, ALL_REDUCE, slices) and returns_of(peer)[0] == back
            assert {event["task"] for event in peer.events("TaskFailed")} <= {"fetch state"}, "it is tried again"
            assert not peer.events("PeerSuspended")
            kinds = {event["what"] for event in peer.events("RoundDone") if change_at + 2 < event["round"] < back}
            assert kinds == {"slice"}
        made.stop()
        nothing_lost(made, *peers)
