"""Out of memory at any allocation of a stage's changes: each is made or not made, to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from agora_protocol.errors import DeviceError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest, preset
from torch.utils._python_dispatch import _disable_current_modes

from agora.core.step_instructions import StepInstructions
from agora.core.step_schedule import SyncSchedule
from agora.observe.events import StepTorn
from agora.state.layout import StageState
from agora.train import optimizer_offload, span_trainer
from agora.train.device import is_out_of_memory
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage
from tests.train.failing_allocation import FailingAllocation
from tests.train.support import Events

CPU = torch.device("cpu")
TOKENS = 7
INNER = SyncSchedule(0, 2, 3)  # an all-reduce, then inner steps
OPTIMIZERS = ["adamw", "nadam", "muon", "adamw8bit"]
Action = Callable[[Stage], object]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that state in host memory crosses in several pieces."""
    monkeypatch.setattr(optimizer_offload, "PIECE", 1 << 10)


@pytest.fixture(autouse=True, params=["float32", "bf16"])
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    monkeypatch.setattr(span_trainer, "product_dtype", lambda device: dtype)


def manifest_with(optimizer: str) -> Manifest:
    model = {"width": 16, "layers": 1, "heads": 2, "key_value_heads": 2, "feed_forward": 32, "context": 8}
    section = {"name": optimizer, "average_decay": 0.9, "clip": 0.1}
    return preset("tiny", model=model, stages={"count": 1}, optimizer=section)


def stage_after_a_step(optimizer: str, *, in_host: bool, report: Events | None = None) -> Stage:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    manifest = manifest_with(optimizer)
    trainer = SpanTrainer(
        manifest, Span(0, 0), CPU, report=Events() if report is None else report, in_flight=1, state_in_host=in_host
    )
    stage = trainer.stages[0]
    stage.step_with_gradient(0, random_gradient(stage, 0), tokens=TOKENS)
    count_gradient(stage, 1)
    return stage


def count_gradient(stage: Stage, seed: int) -> None:
    stage.gradient_sum.flat.copy_(random_gradient(stage, seed))
    stage.record_microbatch("m", TOKENS, 3.0, stage.step)


def random_gradient(stage: Stage, seed: int) -> torch.Tensor:
    gradient = torch.randn(stage.layout.numel, generator=torch.Generator().manual_seed(seed))
    stage.layout.clear_padding(gradient)
    return gradient


def everything(stage: Stage) -> dict[str, object]:
    """All that a later step depends on, for a comparison to the last bit."""
    tensors = {"weights": stage.weights.current.flat, "sum": stage.gradient_sum.flat, **stage.moments}
    progress = stage.progress
    version = stage.weights.current
    return {
        "version": [parameter.detach().float().numpy().tobytes() for parameter in version.parameters],
        **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "counts": (stage.step, stage.optimizer.updates, stage.tokens_stepped, progress.open_step, stage.sync_schedule),
        "totals": repr(stage.gradient_sum.totals),
        "progress": (progress.tokens_in_share, progress.tokens_total, progress.history, progress.is_torn),
    }


def step_along_mean(stage: Stage) -> None:
    stage.step_with_gradient(stage.step, random_gradient(stage, 2), tokens=2 * TOKENS)


@functools.cache
def another_state(optimizer: str) -> StageState:
    with _disable_current_modes():
        other = stage_after_a_step(optimizer, in_host=False)
        other.catch_up(2)
        return other.export_state()


ACTIONS: dict[str, Action] = {
    "step along the own sum": lambda stage: stage.catch_up(stage.step + 1),
    "step along a mean": step_along_mean,
    "close the share": lambda stage: stage.close_share(),
    "load a state": lambda stage: stage.load_state(another_state(stage.optimizer.section.name)),
    "export the state": lambda stage: stage.export_state(),
}


def fail_at_every_allocation(
    make: Callable[[], Stage], act: Action, *, changes: bool = True, fresh: bool = False, allocates: bool = True
) -> None:
    """fresh: with a new stage for each, because what a failed attempt has allocated may serve the next one."""
    whole = make()
    before = everything(whole)
    with FailingAllocation() as counted:
        act(whole)
    after = everything(whole)
    assert bool(counted.allocations) >= allocates and changes == (before != after)
    stage = make()
    assert everything(stage) == before, "equal stages, so that states can be compared"
    for number in range(1, counted.allocations + 1):
        stage = make() if fresh else stage
        with pytest.raises(torch.OutOfMemoryError), FailingAllocation(number):
            act(stage)
        assert not stage.optimizer.is_changing
        assert everything(stage) == before, f"allocation {number} of {counted.allocations}"
    act(stage)
    assert everything(stage) == after, "the step can be taken again"


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("action", [name for name in ACTIONS if name != "export the state"])
def test_what_lacks_memory_changes_nothing_and_can_be_done_again(action: str, optimizer: str, *, in_host: bool) -> None:
    allocates = action != "load a state"  # it copies what came, but for moments in 8 bits
    make = functools.partial(stage_after_a_step, optimizer, in_host=in_host)
    fail_at_every_allocation(make, ACTIONS[action], allocates=allocates)


def test_a_state_that_cannot_be_exported_for_lack_of_memory_is_as_it_was() -> None:
    # float32 states are copied by numpy; those in 8 bits are decoded by torch.
    fail_at_every_allocation(
        lambda: stage_after_a_step("adamw8bit", in_host=False), ACTIONS["export the state"], changes=False
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_step_before_inner_steps_has_the_outer_parameters_or_is_not_taken(optimizer: str) -> None:
    def before_inner_steps() -> Stage:
        stage = stage_after_a_step(optimizer, in_host=False)
        stage.sync_schedule = INNER
        return stage

    fail_at_every_allocation(before_inner_steps, step_along_mean, fresh=True)
    stage = before_inner_steps()
    step_along_mean(stage)
    assert torch.equal(stage.moments["anchor"], stage.weights.current.flat)


@pytest.mark.parametrize("alone", [False, True])
def test_a_fragment_is_synced_or_not(*, alone: bool) -> None:
    def in_inner_steps() -> Stage:
        stage = stage_after_a_step("adamw", in_host=False)
        stage.sync_schedule = INNER
        step_along_mean(stage)
        return stage

    def sync(stage: Stage) -> None:
        blocks = np.arange(stage.layout.numel // SLICE_BLOCK, dtype=np.int64)
        outer, snapshot = stage.outer_gradient(blocks) or pytest.fail("no inner steps")
        stage.outer_step(stage.step + 1, blocks, snapshot, None if alone else (2 * outer + 1, (True,)))

    fail_at_every_allocation(in_inner_steps, sync)


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "muon"])
def test_weights_whose_prediction_lacked_memory_are_predicted_again(optimizer: str, *, in_host: bool) -> None:
    def predicting() -> Stage:
        stage = stage_after_a_step(optimizer, in_host=in_host)
        stage.enable_prediction()
        stage.set_instructions(StepInstructions(TOKENS + 1))
        stage.close_share()
        count_gradient(stage, 3)
        stage.training_version()
        return stage

    whole = predicting()
    one_step = whole.training_version().flat.clone()
    before = everything(whole)
    with FailingAllocation() as counted:
        version = whole.training_version(TOKENS)
    two_steps = version.flat
    assert counted.allocations and not torch.equal(one_step, two_steps)
    stage = predicting()
    for number in range(1, counted.allocations + 1):
        with pytest.raises(torch.OutOfMemoryError), FailingAllocation(number):
            stage.training_version(TOKENS)
        assert torch.equal(stage.training_version().flat, one_step), "not what the failed prediction has left"
    assert torch.equal(stage.training_version(TOKENS).flat, two_steps)
    assert everything(stage) == before


def test_a_device_that_fails_within_a_step_tears_it_and_the_stage_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    stage, whole = stage_after_a_step("adamw", in_host=False, report=events), stage_after_a_step("adamw", in_host=False)

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal"):
        patch.setattr(torch.autograd.graph, "increment_version", fail)
        stage.catch_up(2)
    assert stage.progress.is_torn and [event.step for event in events.of(StepTorn)] == [1]
    assert not stage.gradient_sum.flat.any() and not stage.gradient_sum.totals.tokens, (
        "the step has overwritten the sum"
    )
    whole.catch_up(2)
    stage.load_state(whole.export_state())
    assert not stage.progress.is_torn
    assert everything(stage)["weights"] == everything(whole)["weights"]
    assert stage.progress.history_hash == whole.progress.history_hash


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "std::bad_alloc",
    ],
)
def test_allocations_that_fail_outside_torchs_allocator_count_as_out_of_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory"),
        DeviceError("the device failed"),
    ],
)
def test_other_failures_do_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(OutOfMemory("here"))
