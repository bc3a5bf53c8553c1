"""The heart of the suite, through real processes and real streams: a swarm equals a plain PyTorch loop.

The synchronous schedule must equal it step by step; the asynchronous one must end as well, at equal tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agora_protocol.manifest import Manifest

from agora.data.sampling import Sampler
from tests.oracle import Batches, relative_difference, run_plain_loop
from tests.process.harness import (
    Daemon,
    Swarm,
    drained,
    drawn_by,
    microbatches_of_a_step,
    oracle_manifest,
    sampler_of,
    settled,
    steps_of,
    swarm,
    weights_of,
)
from tests.process.heldout import heldout_loss

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

MIN_STEPS = 6
ASYNCHRONOUS_STEPS, ASYNCHRONOUS_MICROBATCHES = 32, 32


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all daemons compute in float32, as the plain loop does: products in bf16 differ by 1e-4."""
    monkeypatch.setenv("AGORA_DEVICE", "cpu")
    monkeypatch.setenv("AGORA_PRECISION", "float32")


def batches_of(manifest: Manifest, sampler: Sampler, origin: str, steps: int) -> Batches:
    """What an only origin drew for its first `steps` steps: a pure function, so nobody has to tell."""
    return drawn_by(manifest, sampler, origin, [microbatches_of_a_step(manifest)] * steps)


def trained(made: Swarm, stages: int, steps: int) -> list[Daemon]:
    """One daemon for each stage, trained for at least `steps` steps and drained."""
    peers = [made.start(f"stage-{k}", str(k)) for k in range(stages)]
    made.until(lambda: len(steps_of(peers[0], 0)) >= steps, f"{steps} steps")
    drained(made, peers[0])
    settled(made, *peers)
    counts = {peers[0].ask("report")["microbatches"]["completed"] // microbatches_of_a_step(made.manifest)}
    if made.manifest.schedule.kind != "synchronous":
        counts = set(range(max(counts) + 1))
    made.until(
        lambda: len(found := {len(steps_of(peer, k)) for k, peer in enumerate(peers)}) == 1 and found <= counts,
        "the last step in every journal",
    )
    return peers


@pytest.mark.parametrize(
    ("stages", "activations", "subspace", "optimizer"),
    [
        (1, "keep", 64, "adamw"),
        (2, "recompute", 64, "adamw"),
        (4, "keep", 64, "adamw"),
        (2, "keep", 12, "adamw"),
        (2, "keep", 28, "muon"),
    ],
)
def test_a_synchronous_swarm_equals_a_plain_loop(
    tmp_path: Path, stages: int, activations: str, subspace: int, optimizer: str
) -> None:
    manifest = oracle_manifest(stages, kind="synchronous", activations=activations, subspace=subspace)
    manifest = manifest.with_values(optimizer={"name": optimizer})
    with swarm(tmp_path, manifest) as made:
        peers = trained(made, stages, MIN_STEPS)
        taken = [steps_of(peer, k) for k, peer in enumerate(peers)]
        count = len(taken[0])
        assert [len(steps) for steps in taken] == [count] * stages
        actual = [weights_of(peer, k) for k, peer in enumerate(peers)]
        losses = [event["loss"] for event in taken[-1]]
        origin = peers[0].peer
        report = peers[0].ask("report")["microbatches"]
        assert report["dropped"] == 0
        assert set(made.stop().values()) == {0}
    plain = run_plain_loop(manifest, batches_of(manifest, sampler_of(manifest, made.corpus), origin, count))
    np.testing.assert_allclose(losses, plain.losses, rtol=1e-5)
    for stage, tensors in enumerate(plain.weights):
        assert tensors.keys() == actual[stage].keys()
        for name, expected in tensors.items():
            assert relative_difference(actual[stage][name], expected) < 1e-5, f"stage {stage} {name}"


def annealed(manifest: Manifest) -> Manifest:
    """With a learning rate that has decayed at the end, so that a step more or less does not decide the comparison.

    A gradient is stale when a step falls between its forward and its backward, so the stale share is about microbatches
    in flight / microbatches per step; runs have far more of the latter. What a larger
    share costs: docs/understand/routing.md.
    """
    base = manifest.model_dump()
    base["schedule"] |= {"microbatch": 2}
    base["optimizer"] |= {"warmup_steps": 6, "total_steps": ASYNCHRONOUS_STEPS, "minimum_ratio": 0.05}
    base["optimizer"] |= {"target_tokens": ASYNCHRONOUS_MICROBATCHES * 2 * 64, "learning_rate": 2e-3}
    return Manifest.model_validate(base)


def trimmed(histogram: list[int]) -> list[int]:
    """Without the empty ages at its end."""
    return histogram[: max(age for age, count in enumerate(histogram) if count) + 1]


def test_the_asynchronous_schedule_ends_where_the_plain_loop_ends(tmp_path: Path) -> None:
    """At equal tokens, within 2 % in held-out loss; its staleness histogram is published and not all zero."""
    manifest = annealed(oracle_manifest(2, kind="asynchronous", activations="keep", codec="bf16"))
    with swarm(tmp_path, manifest) as made:
        peers = trained(made, 2, ASYNCHRONOUS_STEPS)
        actual = [weights_of(peer, k) for k, peer in enumerate(peers)]
        counts = [len(steps_of(peer, k)) for k, peer in enumerate(peers)]
        staleness = {k: peer.ask("report")["staleness"] for k, peer in enumerate(peers)}
        origin = peers[0].peer
        made.stop()
    print("staleness, microbatches by age in steps:", {k: trimmed(ages[str(k)]) for k, ages in staleness.items()})
    histogram = staleness[0]["0"]
    assert sum(histogram[1:]) > 0, "nothing flowed across a step: not asynchronous"
    sampler = sampler_of(manifest, made.corpus)
    plain = run_plain_loop(manifest, batches_of(manifest, sampler, origin, counts[0]))
    ours, theirs = heldout_loss(manifest, sampler, actual), heldout_loss(manifest, sampler, plain.weights)
    print(f"held-out loss: asynchronous {ours:.4f}, plain {theirs:.4f}, after {counts[0]} steps")
    assert ours < theirs * 1.02, f"asynchronous {ours:.4f}, plain {theirs:.4f} after {counts[0]} steps"
    assert theirs < 3.0, "the plain loop itself must have learnt something"
