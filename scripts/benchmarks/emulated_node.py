"""`agora-node` on an accelerator that takes AGORA_EMULATED_MS for a pass, while the processor computes nothing for it.

    python -m benchmarks.emulated_node join ...

Layers, loss and gradients are constants of the right shapes. Boundaries and their gradients, which the device encodes
and decodes, too, are so once in each direction, and then the same is sent again. All else is a daemon's: reading,
checking and hashing what comes, dither, sums, steps, messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agora.cli import main_node
from agora.codec import BoundaryCodec
from agora.train import span_trainer
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork, StashedForward, WeightVersion

SMALL = 1e-6


@functools.lru_cache(maxsize=64)
def constant(shape: torch.Size) -> Tensor:
    """Returns SMALL of this shape, shared by all."""
    return torch.full(shape, SMALL)


def run_nothing(trainer: SpanTrainer, work: DecodedWork, *args: object) -> Tensor:
    """Takes the place of SpanTrainer._run."""
    if work.entry_stage > 0:
        return work.entry.detach()
    width = vars(trainer.stages[0].weights.current.module)["_model"].subspace
    return constant(torch.Size((*work.batch.inputs.shape, width)))


def no_loss(trainer: SpanTrainer, work: DecodedWork) -> tuple[Tensor, tuple[Tensor, ...], Sequence[WeightVersion]]:
    """Takes the place of SpanTrainer._run_to_loss."""
    stages = [trainer.stages[number] for number in range(work.entry_stage, trainer.span.last + 1)]
    return torch.tensor(1.0), (), tuple(stage.training_version() for stage in stages)


def no_gradients(trainer: SpanTrainer, forward: StashedForward, gradient: Tensor | None = None) -> object:
    """Takes the place of SpanTrainer._compute_gradients."""
    are_predicted = vars(SpanTrainer)["_are_predicted"](trainer, forward)
    of_entry = constant(forward.work.entry.shape) if forward.work.entry_stage > 0 else None
    parameters = [constant(parameter.shape) for version in forward.versions for parameter in version.parameters]
    return vars(span_trainer)["_Gradients"](forward, are_predicted, of_entry, parameters, torch.tensor(SMALL))


def once(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Takes the place of a method of BoundaryCodec whose argument number `place` is the direction."""
    made: dict[str, Any] = {}

    def first_result(codec: BoundaryCodec, *args: Any, **kwargs: Any) -> Any:
        direction = args[place]
        if direction not in made:
            made[direction] = method(codec, *args, **kwargs)
        found = made[direction]
        return found.detach() if isinstance(found, Tensor) else found

    return first_result


if __name__ == "__main__":
    for name, place in (("encode_on_device", 1), ("decode_parts", 2)):
        setattr(BoundaryCodec, name, once(getattr(BoundaryCodec, name), place))
    for name, replacement in (("_run", run_nothing), ("_run_to_loss", no_loss), ("_compute_gradients", no_gradients)):
        setattr(SpanTrainer, name, replacement)
    main_node.main()
