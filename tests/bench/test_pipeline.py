"""The pipeline benchmark's frame: fixed names, alternating turns, the same work for all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from agora.bench import pipeline, task
from agora.bench.children import BenchFailed
from agora.bench.freezer import Freezer
from agora.bench.window import Window


class Fake:
    processes, threads, note = 1, 1, "fake"

    def __init__(self, name: str, log: list[str], tokens: int = 1000) -> None:
        self.name, self.log, self.tokens = name, log, tokens

    def groups(self) -> list[int]:
        return [ord(self.name[0])]

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def measure(self, seconds: float) -> Window:
        self.log.append(self.name)
        return Window(self.tokens, 2.0, self.tokens)


class NoFreezer(Freezer):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def freeze(self, groups: Iterable[int]) -> None:
        self.log += [f"freeze {chr(group)}" for group in groups]

    def thaw(self, groups: Iterable[int]) -> None:
        self.log += [f"thaw {chr(group)}" for group in groups]


def test_ratios_have_the_names_of_the_contract() -> None:
    assert list(pipeline.RATIOS) == [
        "swarm2_vs_single",
        "swarm4_vs_single",
        "swarm4_vs_gloo_1f1b",
        "swarm4_vs_hivemind_moe",
    ]


def test_turns_alternate_and_all_are_started_before_any_is_measured() -> None:
    log: list[str] = []
    found = pipeline.alternate([Fake("a", log), Fake("b", log)], pipeline.Effort(3, 1.0, 1), NoFreezer(log))
    turns = [entry for entry in log if not entry.startswith(("freeze", "thaw"))]
    assert turns == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert {name: readings.rates for name, readings in found.items()} == {"a": [500.0] * 3, "b": [500.0] * 3}
    assert all(len(readings.elsewhere) == 3 for readings in found.values())


def test_everybody_but_the_one_measured_is_frozen() -> None:
    log: list[str] = []
    pipeline.alternate([Fake("a", log), Fake("b", log)], pipeline.Effort(1, 1.0, 1), NoFreezer(log))
    assert log == "start a,freeze a,start b,freeze b,thaw a,a,freeze a,thaw b,b,freeze b".split(",")


def test_a_contender_that_trains_nothing_fails_the_bench() -> None:
    with pytest.raises(BenchFailed, match="idle trained nothing"):
        pipeline.alternate([Fake("idle", [], tokens=0)], pipeline.QUICK, NoFreezer([]))


def test_ratios_divide_the_swarm_by_the_others() -> None:
    rates = {"single": 100.0, "swarm2": 110.0, "swarm4": 96.0, "gloo_1f1b": 80.0, "hivemind_moe": 32.0}
    found = {name: pipeline.Readings([rate], [1.0], [0.0]) for name, rate in rates.items()}
    values = {name: ratio.value for name, ratio in pipeline.training_ratios(found).items()}
    assert values == pytest.approx(
        {"swarm2_vs_single": 1.1, "swarm4_vs_single": 0.96, "swarm4_vs_gloo_1f1b": 1.2, "swarm4_vs_hivemind_moe": 3.0}
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_cut_is_the_same_work(stages: int) -> None:
    manifest, whole = task.manifest_for(stages), task.manifest_for(1)
    assert manifest.stage_count == stages
    assert manifest.replaced(stages={"count": 1}) == whole
    assert manifest.optimizer.target_tokens == task.MICROBATCHES_PER_STEP * manifest.tokens_per_microbatch


def test_a_busy_machine_is_said_first() -> None:
    assert pipeline.calmness({"a": pipeline.Readings([1.0], [1.0], [0.01])}) == []
    busy = {name: pipeline.Readings([1.0], [1.0], [used]) for name, used in {"a": 0.0, "b": 1.0}.items()}
    (note,) = pipeline.calmness(busy)
    assert note.startswith("THE MACHINE WAS NOT CALM")
