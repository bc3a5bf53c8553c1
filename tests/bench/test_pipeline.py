"""The pipeline benchmark's frame: fixed names, the same work for all."""

from __future__ import annotations

import pytest
from benchmarks import pipeline, task
from benchmarks.turns import Readings


def test_ratios_have_the_names_of_the_contract() -> None:
    assert list(pipeline.RATIOS) == [
        "swarm2_vs_single",
        "swarm4_vs_single",
        "swarm4_vs_gloo_1f1b",
        "swarm4_vs_hivemind_moe",
    ]


def test_ratios_divide_the_swarm_by_the_others() -> None:
    rates = {"single": 100.0, "swarm2": 110.0, "swarm4": 96.0, "gloo_1f1b": 80.0, "hivemind_moe": 32.0}
    found = {name: Readings([rate], [1.0], [0.0]) for name, rate in rates.items()}
    values = {name: ratio.value for name, ratio in pipeline.training_ratios(found).items()}
    assert values == pytest.approx(
        {"swarm2_vs_single": 1.1, "swarm4_vs_single": 0.96, "swarm4_vs_gloo_1f1b": 1.2, "swarm4_vs_hivemind_moe": 3.0}
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_cut_is_the_same_work(stages: int) -> None:
    manifest, whole = task.manifest_for(stages), task.manifest_for(1)
    assert manifest.stage_count == stages
    assert manifest.with_values(stages={"count": 1}) == whole
    assert manifest.optimizer.target_tokens == task.MICROBATCHES_PER_STEP * manifest.tokens_per_microbatch
