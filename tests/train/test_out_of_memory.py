"""Out of memory at any allocation of a step: it is taken or not, to the last bit, or the others see that it is torn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset
from torch.utils._python_dispatch import TorchDispatchMode

from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage

CPU = torch.device("cpu")
TOKENS = 7
Action = Callable[[Stage], object]


class FailingAllocation(TorchDispatchMode):
    """Context manager: allocation number `fails_at` (1 is the first) of new tensor memory raises OutOfMemoryError."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.allocations = 0
        self._fails_at = fails_at

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A result without alias is new memory; views and what changes in place have one.
        if any(result.alias_info is None and "Tensor" in str(result.type) for result in func._schema.returns):
            self.allocations += 1
            if self.allocations == self._fails_at:
                raise torch.OutOfMemoryError(f"injected at {func}")
        return func(*args, **kwargs or {})


def manifest_with(optimizer: str) -> Manifest:
    model = {"width": 16, "layers": 1, "heads": 2, "key_value_heads": 2, "feed_forward": 32, "context": 8}
    section = {"name": optimizer, "average_decay": 0.9, "clip": 0.1}
    return preset("tiny", model=model, stages={"count": 1}, optimizer=section)


def stage_after_a_step(optimizer: str, *, in_host: bool) -> Stage:
    manifest = manifest_with(optimizer)
    trainer = SpanTrainer(manifest, Span(0, 0), CPU, report=lambda event: None, in_flight=1, state_in_host=in_host)
    stage = trainer.stages[0]
    stage.step_with_gradient(0, random_gradient(stage, 0), tokens=TOKENS)
    stage.sum.flat.copy_(random_gradient(stage, 1))
    stage.record_microbatch("m", TOKENS, 3.0, stage.step)
    return stage


def random_gradient(stage: Stage, seed: int) -> torch.Tensor:
    gradient = torch.randn(stage.layout.numel, generator=torch.Generator().manual_seed(seed))
    stage.layout.clear_padding(gradient)
    return gradient


def everything(stage: Stage) -> dict[str, object]:
    """All that a later step depends on, for a comparison to the last bit."""
    tensors = {"weights": stage.weights.current.flat, "sum": stage.sum.flat, **stage.moments}
    share = stage.progress.open_step - stage.step
    return {
        **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "counts": (stage.step, stage.optimizer.updates, stage.tokens_stepped, share),
        "totals": repr(stage.sum.totals),
        "progress": (stage.progress.tokens_in_share, stage.progress.tokens_total, stage.progress.history),
    }


def step_along_mean(stage: Stage) -> None:
    stage.step_with_gradient(stage.step, random_gradient(stage, 2), tokens=2 * TOKENS)


ACTIONS: dict[str, Action] = {
    "step along the own sum": lambda stage: stage.catch_up(stage.step + 1),
    "step along a mean": step_along_mean,
    "close the share": lambda stage: stage.take_gradient_share(),
}


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "muon"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_step_that_lacks_memory_is_taken_or_not_or_leaves_the_history(
    action: str, optimizer: str, *, in_host: bool
) -> None:
    act = ACTIONS[action]
    whole = stage_after_a_step(optimizer, in_host=in_host)
    before = everything(whole)
    with FailingAllocation(0) as counted:
        act(whole)
    after = everything(whole)
    assert counted.allocations
    assert before != after
    torn = 0
    for number in range(1, counted.allocations + 1):
        stage = stage_after_a_step(optimizer, in_host=in_host)
        assert everything(stage) == before, "equal stages, so that states can be compared"
        with pytest.raises(torch.OutOfMemoryError), FailingAllocation(number):
            act(stage)
        found = everything(stage)
        if found == before:
            act(stage)
            assert everything(stage) == after, "the step can be taken again"
        elif found != after:
            torn += 1
            history = stage.progress.history
            assert history[stage.step] not in (whole.progress.history.get(stage.step), 0), "the others notice"
            assert stage.sum.totals.tokens in (0, TOKENS)
            assert bool(stage.sum.flat.any()) == bool(stage.sum.totals.tokens)
            stage.load_state(whole.export_state())
            assert stage.export_state().weights.tobytes() == whole.export_state().weights.tobytes()
            assert stage.progress.history_hash == whole.progress.history_hash
    # Where nothing is allocated between the first change and the last, no step can be torn.
    if (optimizer, in_host) == ("adamw", False) or action == "close the share":
        assert torn == 0
