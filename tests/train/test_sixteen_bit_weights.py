"""Weights in bf16 that are made once a step: all values are those of autocast over float32 weights, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest, preset
from torch import Tensor

from agora.core.step_instructions import StepInstructions
from agora.train import gradients, span_trainer, weight_versions
from agora.train.gradients import add_gradients
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import NO_COPIES, DecodedWork
from tests.train.support import Events, batches_for, microbatch_id
from tests.train.test_weight_versions import Bench

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _gpu_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_trainer, "product_dtype", lambda device: torch.bfloat16)


def by_autocast(bench: Bench, number: int, weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of one microbatch on given float32 weights, under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return bench.by_hand(number, weights)


def equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("span", ["0", "0-1"])
def test_a_kept_graph_gives_the_gradient_of_the_weights_that_its_forward_saw(span: str) -> None:
    bench = Bench("keep", span, stages=3)
    old = bench.weights()
    bench.forward(0)
    bench.step_with(1)
    new = bench.weights()
    assert bench.alive() == 2 and not equal(old[0], new[0])
    bench.backward(0)
    assert equal(bench.sums(), by_autocast(bench, 0, old))
    bench.step()
    bench.forward(2)
    bench.backward(2)
    assert equal(bench.sums(), by_autocast(bench, 2, bench.weights()))


def test_a_forward_that_is_repeated_uses_the_weights_of_the_last_step() -> None:
    bench = Bench("recompute", "0-1", stages=3)
    bench.forward(0)
    bench.step_with(1)
    bench.backward(0)
    assert equal(bench.sums(), by_autocast(bench, 0, bench.weights()))


def test_versions_are_copies_of_two_bytes_a_value_and_the_embedding_is_not_copied() -> None:
    bench = Bench("keep", "0-1", stages=3)
    bench.forward(0)
    bench.step_with(1)
    for stage in bench.trainer.stages.values():
        current, previous = stage.weights.current, stage.weights.previous
        assert previous is not None and previous.weights is current.weights is not None
        matrices = [p for p in current.parameters if p.dim() > 1]
        embeddings = [p for p in matrices if p.dtype == torch.float32]
        assert len(embeddings) == (stage.number == 0)
        assert all(p.untyped_storage().data_ptr() == current.flat.data_ptr() for p in embeddings)
        copied = 2 * sum(p.numel() for p in matrices if p.dtype == torch.bfloat16)
        assert copied <= current.own_bytes == previous.own_bytes <= copied + 4 * SLICE_BLOCK  # vectors
    stage = bench.trainer.stages[1]
    stage.enable_prediction()
    stage.set_instructions(StepInstructions(1))
    bench.forward(2)
    bench.backward(2)
    predicted = stage.training_version(1)
    assert predicted is not stage.weights.current and predicted.weights is None
    assert predicted.own_bytes == stage.weights.current.own_bytes


def test_what_leaves_a_stage_is_its_float32_weights() -> None:
    bench = Bench("keep", "0", stages=3)
    bench.step_with(0)
    stage = bench.trainer.stages[0]
    exported = stage.layout.views(stage.export_state().weights)
    copied = stage.weights.copy_tensors()
    assert all(torch.equal(torch.from_numpy(exported[name]), copied[name]) for name in copied)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in copied.values())


def test_a_loaded_state_is_what_the_next_forward_uses() -> None:
    one, other = Bench("keep", "0", stages=3), Bench("keep", "0", stages=3)
    one.step_with(0)
    other.forward(2)
    other.trainer.stages[0].load_state(one.trainer.stages[0].export_state())
    other.trainer.stashed.drop_graphs()
    assert torch.equal(one.forward(1), other.forward(1))


class Training:
    """A whole model in one span, which learns a few microbatches a step."""

    def __init__(self, manifest: Manifest, steps: int, per_step: int) -> None:
        self.trainer = SpanTrainer(manifest, Span(0, manifest.stage_count - 1), CPU, report=Events(), in_flight=4)
        self._batches = [torch.from_numpy(step[0]) for step in batches_for(manifest, steps * per_step, 1)]
        self._per_step = per_step

    def losses(self) -> Iterator[float]:
        for number, ids in enumerate(self._batches):
            ends = (number + 1) % self._per_step == 0
            for stage in self.trainer.stages.values():
                stage.set_instructions(StepInstructions(1 if ends else 1 << 40))
            batch = TokenBatch.from_wire(ids, has_marks=False)
            found = self.trainer.run_last_stages(DecodedWork(microbatch_id(number), 0, batch.inputs, batch, "train"))
            self.trainer.take_due_steps()
            yield found.loss_sum / found.tokens


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_is_to_the_last_bit_that_of_autocast_over_float32_weights(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = preset("tiny", optimizer={"name": optimizer, "warmup_steps": 1}, schedule={"microbatch": 2})
    copies = list(Training(manifest, 6, 2).losses())
    monkeypatch.setattr(weight_versions, "copied_parameters", lambda module, dtype: NO_COPIES)
    assert copies == list(Training(manifest, 6, 2).losses())
    assert copies[-1] < copies[0]


def test_losses_in_bf16_are_those_in_float32_within_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = preset("tiny", optimizer={"warmup_steps": 1}, schedule={"microbatch": 2})
    in_bf16 = list(Training(manifest, 20, 1).losses())
    monkeypatch.setattr(span_trainer, "product_dtype", lambda device: torch.float32)
    in_float32 = list(Training(manifest, 20, 1).losses())
    assert in_bf16 != in_float32 and in_float32[-1] < 0.9 * in_float32[0]
    assert in_bf16 == pytest.approx(in_float32, rel=1e-2)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_gradients_of_both_kinds_are_added_in_float32(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "converts_before_adding", lambda device: not on_gpu)
    found = [torch.randn(3, 5).bfloat16(), torch.randn(4), torch.randn(2, 2).bfloat16()]
    sums = [torch.randn(part.shape) for part in found]
    expected = [total + part.float() for total, part in zip(sums, found, strict=True)]
    add_gradients(sums, found)
    assert all(map(torch.equal, sums, expected))
