"""Replicas come and go while the stage averages: the run must not notice, in what it learns or in what it loses."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.manifest import Manifest

from tests.process.harness import Daemon, Swarm, drained, last_step, nothing_lost, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

KILLS, BETWEEN_S, REPLICAS, BATCHES = 12, 10.0, 3, 64


def manifest() -> Manifest:
    return tiny(
        2,
        averaging={"round_s": 3.0},
        optimizer={"target_tokens": 4096, "warmup_steps": 20, "total_steps": 100_000},
    )


def heldout_loss(made: Swarm, origin: Daemon) -> float:
    """Of what the swarm has learnt, the origin drained."""
    drained(made, origin)
    return float(origin.ask("evaluate", timeout_s=120, batches=BATCHES)["loss"])


def rounds(daemons: list[Daemon]) -> list[dict[str, Any]]:
    return [event for daemon in daemons for event in daemon.events("RoundDone", what="gradient")]


def test_one_of_three_replicas_killed_every_ten_seconds_for_two_minutes(tmp_path: Path) -> None:
    rng = random.Random(11)
    (tmp_path / "disturbed").mkdir()
    (tmp_path / "calm").mkdir()
    with swarm(tmp_path / "disturbed", manifest()) as made:
        origin = made.start("origin", "0")
        replicas = [made.start(f"replica-{number}", "1") for number in range(REPLICAS)]
        made.serving()
        everyone = list(replicas)
        made.until(lambda: min(len(rounds([d])) for d in replicas) >= 2, "all replicas to average")
        for number in range(KILLS):
            began = time.monotonic()
            made.until(lambda: sum(d.is_serving for d in replicas) >= 2, "another one that has the state")
            victim = rng.choice([d for d in replicas if d.is_serving])
            victim.kill()
            replicas.remove(victim)
            replicas.append(made.start(f"fresh-{number}", "1"))
            everyone.append(replicas[-1])
            made.until(lambda began=began: time.monotonic() - began >= BETWEEN_S, "ten seconds to pass")
        step = last_step(origin)
        disturbed = heldout_loss(made, origin)
        made.stop()
        nothing_lost(made, origin)
        assert sum(d.end_is_intended for d in everyone) >= KILLS
        averaged = rounds(everyone)
        joined = [d for d in everyone[REPLICAS:] if rounds([d])]
    with swarm(tmp_path / "calm", manifest()) as made:
        origin = made.start("origin", "0")
        for number in range(REPLICAS):
            made.start(f"replica-{number}", "1")
        made.until(lambda: last_step(origin) >= step, f"step {step} undisturbed", within_s=400)
        calm = heldout_loss(made, origin)
        made.stop()
    took_part = sum(e["contributors"] for e in averaged) / sum(e["members"] for e in averaged)
    said = f"step {step}: loss {disturbed:.4f} and {calm:.4f} undisturbed; {took_part:.3f} took part in {len(averaged)}"
    print(said)
    assert len(joined) >= KILLS // 2, "those who came took part in rounds"
    assert took_part >= 0.85, said
    assert disturbed <= 1.02 * calm, said
