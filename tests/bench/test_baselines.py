"""The baselines train the same model on the same data: their first losses are the plain loop's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks.children import Child, ChildProcesses
from benchmarks.contenders import start_moe_stage
from benchmarks.task import manifest_for, prepare_corpus, spec

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "width": 64,
        "subspace": 64,
        "heads": 2,
        "key_value_heads": 1,
        "layers": 4,
        "feed_forward": 96,
        "context": 32,
    },
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
    "data": {"corpus": ()},
}
STEPS = 2
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    text = tmp_path_factory.mktemp("text") / "rhyme.txt"
    text.write_text("one two, buckle my shoe; three four, knock at the door; " * 2000)
    return {**SMALL, "data": {"corpus": (str(text),)}}


@pytest.fixture(scope="module")
def plain_losses(small: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("single")
    with ChildProcesses(folder) as nursery:
        child = nursery.start("single", "single", spec(manifest_for(1, small), folder, 1))
        child.hear(TIMEOUT_S)
        answer = child.ask({"steps": STEPS}, TIMEOUT_S)
    assert answer["tokens"] == STEPS * 16 * manifest_for(1, small).tokens_per_microbatch and answer["seconds"] > 0
    return list(answer["losses"])


def test_the_plain_loop_learns(plain_losses: list[float]) -> None:
    assert all(math.isfinite(loss) for loss in plain_losses) and plain_losses[1] < plain_losses[0]


def test_gloo_1f1b_computes_what_the_plain_loop_does(
    small: dict[str, dict[str, Any]], plain_losses: list[float], tmp_path: Path
) -> None:
    manifest = manifest_for(2, small)
    with ChildProcesses(tmp_path) as nursery:
        ranks = [
            nursery.start(f"gloo-{k}", "gloo", spec(manifest, tmp_path, 1, rank=k, meeting=str(tmp_path / "meeting")))
            for k in range(2)
        ]
        losses = ask_all(ranks, {"steps": STEPS})[-1]["losses"]
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-3)
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_hivemind_moe_computes_what_the_plain_loop_does(
    small: dict[str, dict[str, Any]], plain_losses: list[float], tmp_path: Path
) -> None:
    manifest = manifest_for(2, small)
    prepare_corpus(tmp_path, manifest)
    with ChildProcesses(tmp_path) as nursery:
        peers: list[str] = []
        for k in range(2):
            _, peers = start_moe_stage(nursery, spec(manifest, tmp_path, 1, stage=k, peers=peers), 1)
        trainer = nursery.start("trainer", "moe-trainer", spec(manifest, tmp_path, 1, peers=peers))
        trainer.hear(TIMEOUT_S)
        losses = trainer.ask({"steps": STEPS}, TIMEOUT_S)["losses"]
        window = trainer.ask({"seconds": 3.0}, TIMEOUT_S)
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-3)
    assert losses[1] < losses[0]
    assert window["tokens"] > 0 and window["seconds"] > 0
    assert all(address.startswith("/ip4/127.0.0.1/") for address in peers)


def ask_all(children: list[Child], order: dict[str, object]) -> list[dict[str, Any]]:
    for child in children:
        child.hear(TIMEOUT_S)
    for child in children:
        child.tell(order)
    return [child.hear(TIMEOUT_S) for child in children]
