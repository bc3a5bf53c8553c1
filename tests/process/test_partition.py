"""A swarm whose network splits in two: both halves train on, and grow together again when the link is back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from tests.process.harness import last_step, tiny
from tests.process.heldout import checkpoints, weights_in
from tests.process.sites import Sites, can_make_sites

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not can_make_sites(), reason="needs root and the command ip, to make network namespaces"),
]

HEALED_WITHIN_S = 90.0
STAGES = ("0", "1", "0")
"""What the peers of a half hold: both halves have the whole model."""


@pytest.fixture
def sites() -> Iterator[Sites]:
    with Sites() as made:
        yield made


def peers_seen(daemon: LocalDaemon) -> int:
    """How many peers the daemon sees, itself included; 0 when it does not answer."""
    answer = daemon.try_ask("status")
    return len(answer["peers"]) if answer is not None else 0


def equal_after(replicas: list[LocalDaemon], step: int) -> bool:
    """Whether all replicas have the same bits in the newest state that all have written after `step`."""
    written = [checkpoints(daemon) for daemon in replicas]
    common = set.intersection(*(set(steps) for steps in written))
    if not common or max(common) <= step:
        return False
    first, *others = (weights_in(steps[max(common)]) for steps in written)
    return all(np.array_equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize(
    ("counts", "apart_s", "times"),
    [((3, 3), 60.0, 1), ((1, 5), 60.0, 1), ((3, 3), 15.0, 4), ((3, 3), 300.0, 1), ((3, 3), 900.0, 1)],
    ids=["3 and 3 for a minute", "1 and 5", "a link that flaps", "5 minutes", "15 minutes"],
)
def test_a_split_swarm_grows_together_again(
    tmp_path: Path, sites: Sites, counts: tuple[int, int], apart_s: float, times: int
) -> None:
    """All see all within 90 s of the link's return, and all replicas of a stage then step on with the same bits."""
    manifest = tiny(2, checkpoint={"every": 5, "keep": 400}, optimizer={"target_tokens": 2048, "total_steps": 10**6})
    swarm = LocalSwarm(tmp_path, manifest.to_toml(), corpus=tmp_path.parent / "corpus", launch=sites.launch)
    names = [*(f"a{number}" for number in range(counts[0])), *(f"b{number}" for number in range(counts[1]))]
    try:
        for index, name in enumerate(names):
            sites.add_machine(name[0], name)
            flags = ["--stages", STAGES[index % len(STAGES)]]
            swarm.start(name, flags=flags, environment={"AGORA_SLOWDOWN": "4"})
        daemons = [swarm.daemons[name] for name in names]
        everyone = len(names)
        swarm.until(lambda: all(peers_seen(daemon) == everyone for daemon in daemons), "one view", 180)
        swarm.until(lambda: min(map(last_step, daemons)) >= 5, "the first steps", 180)
        for _ in range(times):
            sites.cut()
            time.sleep(apart_s)
            if apart_s >= 60.0:
                assert all(peers_seen(daemon) < everyone for daemon in daemons), "the link was cut"
            sites.mend()
        back = time.monotonic()
        swarm.until(
            lambda: all(peers_seen(daemon) == everyone for daemon in daemons), "one view again", HEALED_WITHIN_S
        )
        print(f"one view {time.monotonic() - back:.0f} s after the link was back")
        healed = max(map(last_step, daemons))
        stages = [[d for index, d in enumerate(daemons) if STAGES[index % len(STAGES)] == stage] for stage in "01"]
        swarm.until(lambda: all(equal_after(replicas, healed) for replicas in stages), "equal replicas", 120)
        print(f"equal {time.monotonic() - back:.0f} s after the link was back, step {healed}")
        assert sites.cuts == times
        assert not [event for daemon in daemons for event in daemon.events("MicrobatchDropped")]
        swarm.stop()
    finally:
        swarm.kill_all()
