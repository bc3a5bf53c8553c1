"""Optimizer state in host memory: the same steps to the last bit, in pieces, and an average that can be evaluated."""

from __future__ import annotations

import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset

from agora.train import optimizer_offload
from agora.train.optimizer_offload import OptimizerOffload, bytes_on_device
from agora.train.span_trainer import SpanTrainer

CPU = torch.device("cpu")
WHOLE = Span(0, 0)
STEPS = 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every tensor of the tiny model has several; a multiple of the CPU's vectors, for equal bits."""
    monkeypatch.setattr(optimizer_offload, "PIECE", 1 << 12)


def manifest_with(optimizer: str) -> Manifest:
    return preset("tiny", model={"layers": 2}, stages={"count": 1}, optimizer={"name": optimizer, "average_decay": 0.9})


def trainer(manifest: Manifest, *, state_in_host: bool) -> SpanTrainer:
    return SpanTrainer(manifest, WHOLE, CPU, report=lambda event: None, in_flight=1, state_in_host=state_in_host)


def take_steps(span: SpanTrainer) -> None:
    """Takes STEPS steps along the same random gradients for every caller."""
    stage, rng = span.stages[0], torch.Generator().manual_seed(5)
    for number in range(STEPS):
        gradient = torch.randn(stage.layout.numel, generator=rng)
        stage.layout.clear_padding(gradient)
        stage.step_with_gradient(number, gradient, tokens=7)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "muon", "adamw8bit"])
def test_state_in_host_memory_takes_the_same_steps_to_the_last_bit(optimizer: str) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    manifest = manifest_with(optimizer)
    on_device, in_host = trainer(manifest, state_in_host=False), trainer(manifest, state_in_host=True)
    for span in (on_device, in_host):
        take_steps(span)
    first, second = on_device.stages[0].export_state(), in_host.stages[0].export_state()
    assert first.step == second.step == STEPS
    assert (first.weights == second.weights).all()
    assert all((first.moments[name] == second.moments[name]).all() for name in first.moments)


def test_a_state_moves_between_machines_of_both_kinds() -> None:
    manifest = manifest_with("muon")
    on_device, in_host = trainer(manifest, state_in_host=False), trainer(manifest, state_in_host=True)
    take_steps(on_device)
    in_host.stages[0].load_state(on_device.stages[0].export_state())
    gradient = torch.ones(in_host.stages[0].layout.numel)
    for span in (on_device, in_host):
        span.stages[0].step_with_gradient(STEPS, gradient.clone(), tokens=1)
    assert (on_device.stages[0].export_state().weights == in_host.stages[0].export_state().weights).all()


def test_the_average_of_the_weights_is_evaluated_from_host_memory() -> None:
    manifest = manifest_with("adamw")
    spans = [trainer(manifest, state_in_host=in_host) for in_host in (False, True)]
    for span in spans:
        take_steps(span)
    flats = [span.stages[0].evaluation_weights.flat for span in spans]
    assert torch.equal(*flats)
    held = spans[1].stages[0].optimizer.average
    assert held is not None and flats[1].data_ptr() != held.data_ptr(), "a copy for the device"


def test_pieces_cover_ranges_without_a_gap() -> None:
    ranges = [slice(3, 3 + 5000), slice(9000, 9001), slice(9100, 9100)]
    pieces = list(OptimizerOffload(CPU, in_host=True).pieces(ranges))
    assert [element for piece in pieces for element in range(piece.start, piece.stop)] == [
        element for whole in ranges for element in range(whole.start, whole.stop)
    ]
    assert max(piece.stop - piece.start for piece in pieces) == 1 << 12
    assert list(OptimizerOffload(CPU).pieces(ranges[:2])) == ranges[:2]


def test_a_block_that_raises_changes_no_state_in_host_memory() -> None:
    state = torch.zeros(4)
    access = OptimizerOffload(CPU, in_host=True).access(bytes_on_device(state))
    with pytest.raises(ValueError, match="in between"), access.on_device(state) as (copy,):
        copy.fill_(1.0)
        raise ValueError("in between")
    assert not state.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_moments_take_host_memory_and_the_steps_are_the_same() -> None:
    device, flats = torch.device("cuda", 0), []
    manifest = manifest_with("adamw")
    for in_host in (False, True):
        span = SpanTrainer(manifest, WHOLE, device, report=lambda event: None, in_flight=1, state_in_host=in_host)
        take_steps(span)
        assert all((moment.device.type == "cpu") == in_host for moment in span.stages[0].moments.values())
        flats.append(span.stages[0].export_state().weights)
    assert (flats[0] == flats[1]).all()
