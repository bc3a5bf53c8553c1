"""The pipeline benchmark's frame: fixed names, alternating turns, the same work for all."""

from __future__ import annotations

import pytest

from agora.bench import pipeline, task
from agora.bench.children import BenchFailed
from agora.bench.window import Window


class Fake:
    processes, threads, note = 1, 1, "fake"

    def __init__(self, name: str, log: list[str], tokens: int = 1000) -> None:
        self.name, self.log, self.tokens = name, log, tokens

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def measure(self, seconds: float) -> Window:
        self.log.append(self.name)
        return Window(self.tokens, 2.0)


def test_ratios_have_the_names_of_the_contract() -> None:
    assert list(pipeline.RATIOS) == [
        "swarm2_vs_single",
        "swarm4_vs_single",
        "swarm4_vs_gloo_1f1b",
        "swarm4_vs_hivemind_moe",
    ]


def test_turns_alternate_and_all_are_started_before_any_is_measured() -> None:
    log: list[str] = []
    rates = pipeline.alternate([Fake("a", log), Fake("b", log)], pipeline.Effort(3, 1.0, 1))
    assert log == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert rates == {"a": [500.0] * 3, "b": [500.0] * 3}


def test_a_contender_that_trains_nothing_fails_the_bench() -> None:
    with pytest.raises(BenchFailed, match="idle trained nothing"):
        pipeline.alternate([Fake("idle", [], tokens=0)], pipeline.QUICK)


def test_ratios_divide_the_swarm_by_the_others() -> None:
    rates = {"single": [100.0], "swarm2": [110.0], "swarm4": [96.0], "gloo_1f1b": [80.0], "hivemind_moe": [32.0]}
    values = {name: ratio.value for name, ratio in pipeline.training_ratios(rates).items()}
    assert values == pytest.approx(
        {"swarm2_vs_single": 1.1, "swarm4_vs_single": 0.96, "swarm4_vs_gloo_1f1b": 1.2, "swarm4_vs_hivemind_moe": 3.0}
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_cut_is_the_same_work(stages: int) -> None:
    manifest, whole = task.manifest_for(stages), task.manifest_for(1)
    assert manifest.stage_count == stages
    assert manifest.replaced(stages={"count": 1}) == whole
    assert manifest.optimizer.target_tokens == task.MICROBATCHES_PER_STEP * manifest.tokens_per_microbatch
