"""Products in fp16, as on Volta and Turing: the gradients of float32, by a scale that only this hop knows of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agora_protocol.ids import Span
from torch import Tensor

from agora.core.span_work import ForwardKey
from agora.cost import activation_bytes
from agora.observe.events import GradientRefused
from agora.train import device, span_trainer
from agora.train.activation_checkpointing import GraphBudget, Kept
from agora.train.gradients import (
    FIRST_SCALE,
    GROWS_AFTER,
    LEAST_SCALE,
    MAX_HALVINGS,
    MOST_SCALE,
    LossScale,
    add_gradients,
)
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import NonFinite, SpanTrainer
from agora.train.weight_versions import DecodedWork
from tests.train.support import Events, batches_for, microbatch_id, small_manifest

CPU = torch.device("cpu")
MANIFEST = small_manifest(stages={"count": 2}, schedule={"activations": "keep"})


def trainer_in(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, stage: int, activations: str = "keep"
) -> tuple[SpanTrainer, Events]:
    monkeypatch.setattr(span_trainer, "product_dtype", lambda device: dtype)
    manifest, events = MANIFEST.with_values(schedule={"activations": activations}), Events()
    return SpanTrainer(manifest, Span(stage, stage), CPU, report=events, in_flight=2), events


def work(stage: int) -> DecodedWork:
    batch = TokenBatch.from_wire(torch.from_numpy(batches_for(MANIFEST, 1)[0][0]), has_marks=False)
    entry = torch.randn(MANIFEST.boundary_shape(), generator=torch.Generator().manual_seed(5))
    return DecodedWork(microbatch_id(0), stage, batch.inputs if stage == 0 else entry, batch, "train")


def backward(trainer: SpanTrainer, size: float = 1.0) -> None:
    random = torch.Generator().manual_seed(6)
    trainer.forward(work(0))
    gradient = size * torch.randn(MANIFEST.boundary_shape(), generator=random)
    trainer.backward(ForwardKey(microbatch_id(0), 0), gradient)


def sum_of(trainer: SpanTrainer) -> Tensor:
    (stage,) = trainer.stages.values()
    return stage.gradient_sum.flat.clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1.0, 30.0])
@pytest.mark.parametrize("activations", ["keep", "recompute", "inputs"])
def test_gradients_of_a_middle_stage_are_those_of_float32(
    size: float, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of 1e-9 are nothing in fp16, but for the scale."""
    if activations == "inputs":
        monkeypatch.setattr(GraphBudget, "choose", lambda *given: Kept.INPUTS)
        activations = "recompute"
    exact, _ = trainer_in(torch.float32, monkeypatch, 0, activations)
    scaled, _ = trainer_in(torch.float16, monkeypatch, 0, activations)
    assert exact.loss_scale.value == 1.0 and scaled.loss_scale.value == FIRST_SCALE
    if size < 1e-6:
        scaled.loss_scale.value = MOST_SCALE
    backward(exact, size)
    backward(scaled, size)
    error = relative_error(sum_of(scaled), sum_of(exact))
    assert 0 < error < (0.15 if size == 1e-9 else 5e-3)


@pytest.mark.parametrize("tokens_at_once", [1000, 5])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_of_the_last_stage_are_those_of_float32_head_and_chunks_of_the_loss_included(
    tokens_at_once: int, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_bytes, "LOGITS_AT_ONCE", tokens_at_once * MANIFEST.model.vocabulary)
    exact, _ = trainer_in(torch.float32, monkeypatch, 1, activations)
    scaled, _ = trainer_in(torch.float16, monkeypatch, 1, activations)
    first, second = exact.run_last_stages(work(1)), scaled.run_last_stages(work(1))
    assert first.gradient is not None and second.gradient is not None
    assert relative_error(second.gradient, first.gradient) < 5e-3
    assert relative_error(sum_of(scaled), sum_of(exact)) < 5e-3
    assert second.loss_sum == pytest.approx(first.loss_sum, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_backward_pass_that_overflows_is_repeated_with_half_the_scale_and_nothing_was_taken(
    stage: int, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Callable[[SpanTrainer], object] = backward if stage == 0 else lambda trainer: trainer.run_last_stages(work(1))
    usual, _ = trainer_in(torch.float16, monkeypatch, stage, activations)
    run(usual)
    too_high, events = trainer_in(torch.float16, monkeypatch, stage, activations)
    too_high.loss_scale.value = 2.0**20
    passes = []
    real = LossScale.accepts

    def count(self: LossScale, norm: Tensor) -> bool:
        passes.append(self.value)
        assert not sum_of(too_high).any(), "nothing was added so far"
        return real(self, norm)

    monkeypatch.setattr(LossScale, "accepts", count)
    run(too_high)
    assert passes == [2.0 ** (20 - number) for number in range(len(passes))] and 1 < len(passes) <= MAX_HALVINGS
    assert too_high.loss_scale.value == passes[-1] and not events.of(GradientRefused)
    assert relative_error(sum_of(too_high), sum_of(usual)) < 2e-3
    assert too_high.stages[stage].progress.tokens_in_share == usual.stages[stage].progress.tokens_in_share > 0
    assert not too_high.stashed


def test_gradients_that_no_scale_makes_finite_are_refused_and_leave_scale_and_sum_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, events = trainer_in(torch.float16, monkeypatch, 0, "recompute")
    trainer.forward(work(0))
    with torch.no_grad():  # the backward runs the forward again
        trainer.stages[0].weights.current.parameters[0].fill_(float("nan"))
    with pytest.raises(NonFinite):
        trainer.backward(ForwardKey(microbatch_id(0), 0), torch.ones(MANIFEST.boundary_shape()))
    assert trainer.loss_scale.value == FIRST_SCALE and not sum_of(trainer).any()
    assert len(events.of(GradientRefused)) == 1


def test_the_scale_doubles_after_many_passes_and_has_bounds() -> None:
    scale, finite, overflow = LossScale(torch.float16), torch.tensor(3.0), torch.tensor(float("inf"))
    assert all(scale.accepts(finite) for _ in range(GROWS_AFTER))
    assert scale.value == 2 * FIRST_SCALE
    assert not scale.accepts(overflow) and scale.value == FIRST_SCALE
    assert all(scale.accepts(finite) for _ in range(40 * GROWS_AFTER)) and scale.value == MOST_SCALE
    for _ in range(20):
        while not scale.accepts(overflow):
            pass
        scale.accepts(finite)
    assert scale.value == MOST_SCALE, "they overflow at every scale"
    scale.value = LEAST_SCALE
    assert scale.accepts(overflow)
    assert LossScale(torch.bfloat16).accepts(overflow), "nothing is read where there is no scale"


def test_gradients_are_divided_by_the_scale_when_they_are_added() -> None:
    sums = [torch.ones(3), torch.ones(2, 2)]
    add_gradients(sums, [torch.full((3,), 8.0), torch.full((2, 2), 4.0, dtype=torch.float16)], 4.0)
    assert torch.equal(sums[0], torch.full((3,), 3.0)) and torch.equal(sums[1], torch.full((2, 2), 2.0))


@pytest.mark.parametrize(
    ("capability", "native", "expected"),
    [
        ((6, 1), False, torch.float32),
        ((7, 0), False, torch.float16),
        ((7, 5), False, torch.float16),
        ((8, 0), True, torch.bfloat16),
        ((9, 0), True, torch.bfloat16),
    ],
)
def test_volta_and_turing_compute_in_fp16(
    capability: tuple[int, int], native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_native_bf16", lambda device: native and device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert device.product_dtype(torch.device("cuda", 0)) == expected
    assert device.product_dtype(CPU) == torch.float32
