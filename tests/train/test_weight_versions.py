"""The in-place trap: a step between a forward and its backward never lets autograd see half-changed weights."""

from __future__ import annotations

import math
import platform
import random
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.errors import Busy, LocalError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from torch import Tensor
from torch.func import functional_call

from agora.core.span_work import ForwardKey
from agora.core.step_instructions import StepInstructions
from agora.model import family_of
from agora.train import activation_checkpointing, memory
from agora.train.activation_checkpointing import GraphBudget, Kept
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import StageProgress
from agora.train.weight_versions import DecodedWork
from tests.train.support import Events, batches_for, microbatch_id, small_manifest

NEVER = 1 << 40
CPU = torch.device("cpu")


class Bench:
    """A trainer of the first stages of a model, and the same gradients computed by hand."""

    def __init__(
        self, activations: str = "keep", span: str = "0", stages: int = 2, in_flight: int = 8, **sections: Any
    ) -> None:
        sections = {"stages": {"count": stages}, "optimizer": {"warmup_steps": 0}, **sections}
        schedule = {"activations": activations, **sections.pop("schedule", {})}
        self.manifest: Manifest = small_manifest(schedule=schedule, **sections)
        self.events = Events()
        self.span = Span.parse(span)
        self.trainer = SpanTrainer(self.manifest, self.span, CPU, report=self.events, in_flight=in_flight)
        self.step_after(NEVER)
        self.batches = [torch.from_numpy(step[0]) for step in batches_for(self.manifest, 60, 1)]
        shape = (60, *self.manifest.boundary_shape())
        self.gradients = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def forward(self, number: int) -> Tensor:
        tokens = self.batches[number]
        batch = TokenBatch.from_wire(tokens, has_marks=False)
        return self.trainer.forward(DecodedWork(microbatch_id(number), 0, batch.inputs, batch, "train"))[0]

    def backward(self, number: int) -> None:
        assert self.trainer.backward(ForwardKey(microbatch_id(number), 0), self.gradients[number])[0] is None

    def step(self) -> None:
        """An optimizer step now, with whatever was summed."""
        self.step_after(1)
        self.trainer.take_due_steps()
        self.step_after(NEVER)

    def progress(self) -> list[StageProgress]:
        return [stage.progress for stage in self.trainer.stages.values()]

    def step_after(self, tokens: int) -> None:
        for stage in self.span.stages:
            self.trainer.stages[stage].set_instructions(StepInstructions(tokens))

    def step_with(self, number: int) -> None:
        self.forward(number)
        self.backward(number)
        self.step()

    def weights(self) -> list[dict[str, Tensor]]:
        return [self.trainer.stages[stage].weights.copy_tensors() for stage in self.span.stages]

    def sums(self) -> dict[str, Tensor]:
        """The gradient sums by name, copied."""
        stages = [self.trainer.stages[number] for number in self.span.stages]
        pairs = [
            pair
            for stage in stages
            for pair in zip(stage.weights.layout.slots, stage.gradient_sum.tensors, strict=True)
        ]
        return {slot.name: tensor.clone() for slot, tensor in pairs}

    def by_hand(self, number: int, weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients of one microbatch on given weights, by plain autograd."""
        tokens = hidden = self.batches[number][:, :-1]
        leaves = {}
        for stage, values in zip(self.span.stages, weights, strict=True):
            model = self.manifest
            module = family_of(model.model).build_stage(model.layers_of(stage), model.seed)
            fresh = {name: value.clone().requires_grad_() for name, value in values.items()}
            hidden = functional_call(module, fresh, (hidden, tokens))
            leaves |= fresh
        found = torch.autograd.grad(hidden, list(leaves.values()), self.gradients[number])
        return dict(zip(leaves, found, strict=True))

    def alive(self) -> int:
        """The most versions of one stage's weights that are needed: 1, or 2 while graphs on the previous are alive."""
        previous = [self.trainer.stages[stage].weights.previous for stage in self.span.stages]
        return 1 + any(bool(self.trainer.stashed.with_graph_on(version)) for version in previous)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(actual[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


def minus(after: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("span", ["0", "0-1"])
def test_keep_gives_the_gradient_of_the_weights_that_the_forward_saw(span: str) -> None:
    bench = Bench("keep", span, stages=3)
    old = bench.weights()
    bench.forward(0)
    bench.step_with(1)
    new = bench.weights()
    assert bench.alive() == 2
    before = bench.sums()
    assert all(not total.any() for total in before.values())  # the step emptied the sum that both versions share
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, old))
    assert not same(bench.sums(), bench.by_hand(0, new))
    assert bench.alive() == 1


def test_recompute_gives_the_gradient_of_the_weights_of_its_time() -> None:
    bench = Bench("recompute")
    old = bench.weights()
    bench.forward(0)
    bench.step_with(1)
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, bench.weights()))
    assert not same(bench.sums(), bench.by_hand(0, old))
    assert bench.trainer.stages[0].weights.previous is None


def test_a_third_version_is_never_made_the_oldest_graphs_fall_back_to_recompute() -> None:
    bench = Bench("keep")
    first = bench.weights()
    bench.forward(0)
    bench.step_with(1)
    second = bench.weights()
    bench.forward(2)
    bench.step_with(3)
    assert bench.alive() == 2
    assert bench.trainer.stashed.count_graphs() == 1
    bench.backward(2)
    after_two = bench.sums()
    assert same(after_two, bench.by_hand(2, second))
    bench.backward(0)
    mine = minus(bench.sums(), after_two)
    assert same(mine, bench.by_hand(0, bench.weights()))
    assert not same(mine, bench.by_hand(0, first))


def test_an_old_graph_lives_on_while_steps_find_no_graph_on_the_current_weights() -> None:
    bench = Bench("keep")
    old = bench.weights()
    bench.forward(0)
    for number in range(1, 6):
        bench.step_with(number)
        assert bench.alive() == 2
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, old))
    assert bench.progress()[0].staleness[:7] == (5, 0, 0, 0, 0, 1, 0)


def test_a_step_without_live_graphs_changes_the_weights_in_place() -> None:
    bench = Bench("keep")
    before = bench.trainer.stages[0].weights.current
    bench.step_with(0)
    assert bench.trainer.stages[0].weights.current is before
    assert bench.trainer.stages[0].weights.previous is None


@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_forwards_backwards_and_steps_adds_gradients_of_whole_weights(activations: str, seed: int) -> None:
    bench = Bench(activations, "0-1", stages=3)
    choices = random.Random(seed)
    seen: dict[int, tuple[list[dict[str, Tensor]], int]] = {}
    steps = fresh = 0
    for _ in range(40):
        action = choices.choice(["forward", "backward", "backward", "step", "forget"])
        if action == "forward" and len(seen) < 6:
            seen[fresh] = (bench.weights(), steps)
            bench.forward(fresh)
            fresh += 1
        elif action == "backward" and seen:
            number = choices.choice(list(seen))
            weights, at = seen.pop(number)
            before = bench.sums()
            bench.backward(number)
            added = minus(bench.sums(), before)
            on_old, on_new = (same(added, bench.by_hand(number, w)) for w in (weights, bench.weights()))
            assert on_old or on_new
            assert activations != "keep" or on_old or steps - at > 1
            assert activations != "recompute" or on_new
        elif action == "step":
            steps += bool(bench.progress()[0].tokens_in_share)
            bench.step()
        elif action == "forget" and seen and choices.random() < 0.3:
            number = choices.choice(list(seen))
            del seen[number]
            bench.trainer.stashed.forget(ForwardKey(microbatch_id(number), 0))
        assert bench.alive() <= 2
        assert len(bench.trainer.stashed) == len(seen)
        assert bench.progress()[0].step == steps


def test_autograd_itself_raises_should_weights_ever_change_under_a_live_graph() -> None:
    """The fused optimizer does not tell autograd; the trainer does. Here its precaution is left out on purpose."""
    bench = Bench("keep")
    bench.forward(0)
    bench.forward(1)
    bench.backward(1)
    stage = bench.trainer.stages[0]
    stage.optimizer.step(stage.weights.current.flat, stage.gradient_sum.flat, 0, 32)
    stage.gradient_sum.clear()
    before = bench.sums()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.backward(0)
    assert same(bench.sums(), before)


def test_a_failure_in_the_middle_of_a_backward_adds_nothing_at_all() -> None:
    bench = Bench("recompute", "0-1", stages=3)
    bench.forward(0)
    bench.forward(1)
    bench.backward(1)
    before, progress = bench.sums(), bench.progress()

    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("the device broke")

    handle = bench.trainer.stages[0].weights.current.parameters[0].register_hook(fail)
    with pytest.raises(RuntimeError, match="the device broke"):
        bench.backward(0)
    handle.remove()
    assert all(torch.equal(before[name], total) for name, total in bench.sums().items())
    assert bench.progress() == progress


def test_forgetting_frees_the_graph_and_the_former_weights() -> None:
    bench = Bench("keep")
    tokens = bench.batches[0]
    batch = TokenBatch.from_wire(tokens, has_marks=False)
    forward = bench.trainer.forward(DecodedWork(microbatch_id(0), 0, batch.inputs, batch, "train"))[1]
    assert forward is not None
    graph = weakref.ref(forward.output)
    del forward
    bench.step_with(1)
    assert bench.alive() == 2
    bench.trainer.stashed.forget(ForwardKey(microbatch_id(0), 0))
    assert graph() is None
    assert bench.alive() == 1
    with pytest.raises(LocalError, match="sent again"):
        bench.backward(0)


def test_held_forwards_are_bounded_but_a_repeat_takes_no_further_place() -> None:
    bench = Bench("recompute", in_flight=1)
    for number in range(4):
        bench.forward(number)
    bench.forward(3)
    with pytest.raises(Busy, match="4 microbatches"):
        bench.forward(4)
    bench.backward(3)
    bench.forward(4)


@pytest.mark.parametrize(("free", "graphs"), [(1 << 40, 3), (0, 0)])
def test_auto_keeps_graphs_when_memory_allows_and_recomputes_otherwise(
    monkeypatch: pytest.MonkeyPatch, free: int, graphs: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    bench = Bench("auto")
    for number in range(4):
        bench.forward(number)  # the first one is measured, and recomputed
    assert bench.trainer.stashed.count_graphs() == graphs
    b, s, width = bench.manifest.boundary_shape()
    measured = bench.trainer.graphs.bytes_by_entry[0]
    assert 10 * b * s * width * 4 < measured < 100 * b * s * width * 4


class OtherPrograms:
    """Memory of which graphs and other programs take their parts; read anew at each job."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.forward(0)  # its graph is measured
        bench.backward(0)
        self.graph_bytes = bench.trainer.graphs.bytes_by_entry[0]
        self.version_bytes = bench.trainer.stages[0].weights.current.own_bytes
        self.left = 0  # for graphs and what must be free beside them
        self._bench = bench
        monkeypatch.setattr(activation_checkpointing, "MEMORY_READING_LIFETIME_S", 0.0)
        monkeypatch.setattr(memory, "available_bytes", lambda device: self.left - bench.trainer.stashed.graph_bytes)

    def leave_room_for(self, graphs: float) -> None:
        """For so many graphs in the half of the memory that graphs may take, and a second version of the weights."""
        self.left = int(2 * (graphs * self.graph_bytes + self.version_bytes))

    def kept(self) -> list[bool]:
        """Of each microbatch that waits for its backward, the oldest first."""
        stashed = self._bench.trainer.stashed
        assert 2 * (stashed.graph_bytes + self.version_bytes) <= self.left or not stashed.graph_bytes
        return [forward.output is not None for forward in stashed._forwards.values()]


@pytest.mark.parametrize(("room", "kept"), [(0.5, 0), (1.99, 0), (2.01, 1), (4.5, 3), (6.99, 5), (7.01, 6), (100, 6)])
def test_auto_keeps_as_many_graphs_as_memory_has_room_for_and_leaves_room_for_one(
    monkeypatch: pytest.MonkeyPatch, room: float, kept: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    bench = Bench("auto")
    others = OtherPrograms(bench, monkeypatch)
    others.leave_room_for(room)
    for number in range(1, 7):
        bench.forward(number)
        assert sum(others.kept()) == min(number, kept)
    # A backward makes room for the graph of the next forward.
    bench.backward(1)
    bench.forward(7)
    assert others.kept() == [number < kept for number in range(1, 6)] + [kept > 0]


def test_graphs_whose_memory_others_take_are_given_up_the_newest_first_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    bench, all_kept = Bench("auto"), Bench("keep")
    all_kept.forward(0)
    all_kept.backward(0)
    others = OtherPrograms(bench, monkeypatch)
    others.leave_room_for(8)
    for number in range(1, 6):
        bench.forward(number)
        all_kept.forward(number)
    assert others.kept() == [True] * 5
    others.leave_room_for(3)
    bench.forward(6)
    all_kept.forward(6)
    assert others.kept() == [True, True, False, False, False, False]
    others.leave_room_for(0.5)
    for number in (4, 6, 1, 2, 3, 5):
        bench.backward(number)
        all_kept.backward(number)
    for name, total in all_kept.sums().items():
        assert torch.equal(total, bench.sums()[name])


def test_auto_keeps_inputs_without_room_for_a_graph_and_gives_them_up_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    bench, all_kept = Bench("auto", model={"layers": 12}), Bench("keep", model={"layers": 12})
    all_kept.forward(0)
    all_kept.backward(0)
    others = OtherPrograms(bench, monkeypatch)
    others.leave_room_for(0.4)  # with the version of the weights, for almost one graph
    for number in range(1, 6):
        bench.forward(number)
        all_kept.forward(number)
    stashed = bench.trainer.stashed

    def kept() -> list[int]:
        return [len(forward.layer_outputs) for forward in stashed._forwards.values()]

    assert kept() == [5, 5, 5, 0, 0]
    assert stashed.graph_bytes == 3 * 5 * math.prod(bench.manifest.boundary_shape()) * 4
    others.leave_room_for(-0.25)
    bench.forward(6)
    all_kept.forward(6)
    assert kept() == [5, 5, 0, 0, 0, 0], "the newest are given up"
    for number in (4, 6, 1, 2, 3, 5):
        bench.backward(number)
        all_kept.backward(number)
    for name, total in all_kept.sums().items():
        assert torch.equal(total, bench.sums()[name])


def test_after_a_shortage_fewer_graphs_are_kept_until_some_have_been_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 40)
    budget = GraphBudget("auto", CPU)
    budget.record_measured(0, 100)
    assert budget.choose(0, 700, 0) is Kept.GRAPH
    budget.record_shortage(800)
    assert budget.choose(0, 500, 0) is Kept.GRAPH
    answers = [budget.choose(0, 600, 0) for _ in range(10)]
    assert answers == [Kept.NOTHING] * 8 + [Kept.GRAPH] * 2
    budget.record_shortage(0)
    assert budget.choose(0, 600, 0) is Kept.GRAPH, "without graphs, it was not they that lacked memory"


@pytest.mark.parametrize(
    ("free", "kept"),
    [
        (2 * (100 + 100) + 2 * 20, Kept.GRAPH),
        (2 * 100, Kept.NOTHING),  # a second forward in one graph costs no more than kept inputs
        (2 * 99, Kept.INPUTS),
        (2 * (10 + 10 + 25 + 20), Kept.INPUTS),  # own, those of a second forward and its graph, other weights
        (2 * (10 + 10 + 25 + 20) - 2, Kept.NOTHING),
    ],
)
def test_the_inputs_of_layers_are_kept_where_there_is_no_room_for_a_graph_of_all(
    monkeypatch: pytest.MonkeyPatch, free: int, kept: Kept
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    budget = GraphBudget("auto", CPU)
    budget.record_measured(0, 100, inputs_bytes=10, layer_bytes=25)
    assert budget.choose(0, 0, 20) is kept
    assert budget.bytes_of(0, kept) == {Kept.GRAPH: 100, Kept.INPUTS: 10, Kept.NOTHING: 0}[kept]


@pytest.mark.parametrize("span", ["0", "0-1"])
def test_kept_inputs_give_the_bits_of_a_kept_graph_with_a_step_in_between(
    monkeypatch: pytest.MonkeyPatch, span: str
) -> None:
    graphs = Bench("keep", span, stages=3, model={"layers": 6})
    monkeypatch.setattr(GraphBudget, "choose", lambda *given: Kept.INPUTS)
    inputs = Bench("recompute", span, stages=3, model={"layers": 6})
    for bench in (graphs, inputs):
        bench.forward(0)
        bench.step_with(1)
        bench.forward(2)
        assert bench.alive() == 2, "the weights of the first forward are still needed"
        bench.backward(2)
        bench.backward(0)
        assert bench.alive() == 1
    for name, total in graphs.sums().items():
        assert torch.equal(total, inputs.sums()[name]), name


def test_kept_inputs_that_are_given_up_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Bench("keep")
    monkeypatch.setattr(GraphBudget, "choose", lambda *given: Kept.INPUTS)
    inputs = Bench("recompute")
    for bench in (graphs, inputs):
        for number in range(4):
            bench.forward(number)
    assert inputs.trainer.stashed.count_graphs() == 4
    inputs.trainer.free_memory(False)
    assert [bool(f.layer_outputs) for f in inputs.trainer.stashed._forwards.values()] == [True, True, False, False]
    for bench in (graphs, inputs):
        for number in (3, 0, 2, 1):
            bench.backward(number)
    for name, total in graphs.sums().items():
        assert torch.equal(total, inputs.sums()[name]), name


def test_available_memory_is_what_the_machine_has_at_most() -> None:
    available = memory.available_bytes(CPU)
    assert 0 < available < 1 << 50


FREED = """
import resource
from concurrent.futures import ThreadPoolExecutor
import torch
from agora.train import memory
from agora.train.objectives import TokenBatch

assert memory.keep_freed_memory()
faults = []

def work():
    for _ in range(8):  # small blocks that others keep split the heap in the first three or four
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensors = [torch.ones(1 << 20) for _ in range(20)]
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        kept = memory.freed_bytes()
        del tensors
        print(memory.freed_bytes() - kept)

with ThreadPoolExecutor(1) as pool:
    pool.submit(work).result()
print(faults[-1])
"""
"""In a process of its own, where no other thread takes or frees memory meanwhile."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_what_a_thread_frees_is_used_again_without_page_faults_and_counts_as_available() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120, check=True)
    *freed, faults = map(int, done.stdout.split())
    assert min(freed) >= 20 * (4 << 20)
    assert faults < 200  # of 20,480 pages


def test_kept_and_recomputed_gradients_agree_when_no_step_comes_between() -> None:
    kept, recomputed = Bench("keep"), Bench("recompute")
    for bench in (kept, recomputed):
        for number in range(3):
            bench.forward(number)
        for number in range(3):
            bench.backward(number)
    for name, total in kept.sums().items():
        np.testing.assert_array_equal(total, recomputed.sums()[name])
