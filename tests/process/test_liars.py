"""A real replica that lies to three honest ones: their steps and weights go on as without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.process.harness import Daemon, fired, last_step, sampler_of, swarm, tiny
from tests.process.heldout import checkpoints, heldout_loss, weights_in

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

EVERY = 5
BEGIN = 20
"""Arrivals at a fault's point until the lies begin: it lies as a replica that the others know."""
STEPS = 60
"""Steps after the first lie; about as many as come in the run without one."""
MOST_LOSS = 1.05
"""Two runs without a liar differ by some 2 %: each draws other samples, and a busier machine has older gradients."""
MANIFEST = tiny(1, checkpoint={"every": EVERY, "keep": 400}, optimizer={"target_tokens": 1024, "total_steps": 10**6})


def common_checkpoint(honest: list[Daemon], after: int) -> int:
    """The first step from `after` on of which all honest ones have written a checkpoint; 0 for none yet."""
    common = set.intersection(*(set(checkpoints(daemon)) for daemon in honest))
    return min((step for step in common if step >= after), default=0)


def train(folder: Path, faults: str, step: int) -> tuple[int, float]:
    """Runs three honest replicas and a fourth one with `faults`; returns a step and the held-out loss there.

    The step is the first with a checkpoint from STEPS after the first lie on; without faults, from `step` on.
    """
    folder.mkdir()
    with swarm(folder, MANIFEST) as made:
        honest = [made.start(f"honest-{number}", "0", slowdown=4.0) for number in range(3)]
        made.serving()
        fourth = made.start("fourth", "0", faults=faults, slowdown=4.0)  # without faults, honest: as busy a machine
        made.serving("fourth")
        if faults:
            made.until(lambda: len(fired(fourth)) > 5, "the lies to be told")
            step = last_step(honest[0]) + STEPS
        made.until(lambda: common_checkpoint(honest, step), "the honest ones to go on", 240)
        step = common_checkpoint(honest, step)
        weights = [weights_in(checkpoints(daemon)[step]) for daemon in honest]
        for other in weights[1:]:
            assert all(np.array_equal(weights[0][name], other[name]) for name in other), "the honest ones are equal"
        for daemon in honest:
            assert max(event["step"] for event in daemon.events("StepTaken")) < 10_000, "nobody followed the lie"
            assert not {e["peer"] for e in daemon.events("OffenceRecorded")} & {each.peer for each in honest}
        assert fourth.is_alive
        if faults:
            point, action = faults.split(",")[0].split(":")[:2]
            assert {tuple(entry[1:3]) for entry in fired(fourth)} == {(point, action.partition("=")[0])}
            told = {e["offence"] for daemon in honest for e in daemon.events("OffenceRecorded", peer=fourth.peer)}
            print(f"{faults}: {len(fired(fourth))} lies; violations {told or 'none'}")
        made.stop()
        return step, heldout_loss(MANIFEST, sampler_of(MANIFEST, made.corpus), weights[:1])


@pytest.mark.parametrize(
    "faults", [f"gossip.step:say=1000000000:{BEGIN}+", f"averaging.scale:say=1e30:{BEGIN}+"], ids=["step", "gradient"]
)
def test_three_honest_replicas_learn_beside_a_liar_as_beside_a_fourth(tmp_path: Path, faults: str) -> None:
    step, beside = train(tmp_path / "liar", faults, 0)
    again, alone = train(tmp_path / "honest", "", step)
    print(f"{faults}: held-out loss {beside:.4f} at step {step}, beside an honest one {alone:.4f} at step {again}")
    assert again - step <= EVERY and beside < MOST_LOSS * alone
