"""LoRA in the decoder layers of a stage: wraps linear layers with peft's, sets initial values, switches LoRA off.

The names of the trained matrices are peft's, such as model.layers.7.self_attn.q_proj.lora_A.default.weight. Source:
LoRA, arXiv 2106.09685; the scale alpha / sqrt(r): arXiv 2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest_model import HfSection
from torch import Tensor, nn

from agora.core.tuning_packages import import_tuning
from agora.model.family import initial_values

ADAPTER: Final = "default"  # peft's name of the adapter; it is part of the names of its matrices


def lora_targets(model: HfSection, linears: Sequence[str]) -> tuple[str, ...]:
    """Returns which linear layers get LoRA, by the last part of their names: lora_targets, or all if it is empty.

    linears: the last parts of the names of all linear layers in a decoder layer. Raises ManifestError for a target that
    is not among them.
    """
    for name in model.lora_targets:
        if name not in linears:
            raise ManifestError(
                f"[model] lora_targets names {name}, and the linear layers inside this model's layers are "
                f"{', '.join(linears)}; name some of these, or none for all."
            )
    return model.lora_targets or tuple(linears)


def inject_lora(layers: nn.Module, model: HfSection, targets: Sequence[str], *, is_transposed: bool) -> None:
    """Wraps the linear layers in `layers` whose names end in one of `targets` with peft's LoRA layers, in place.

    Freezes all other parameters in `layers`. The LoRA matrices have no useful values until they are set. model: has
    rank, scale and dropout. is_transposed: whether the layers' matrices are [inputs, outputs]. Raises TuningMissing
    without peft.
    """
    peft = import_tuning("peft")
    config = peft.LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        use_rslora=model.lora_rslora,
        lora_dropout=model.lora_dropout,
        target_modules=list(targets),
        fan_in_fan_out=is_transposed,
        init_lora_weights=False,
    )
    marked: Any = layers
    marked.is_loaded_in_4bit = model.frozen_as == "nf4"  # peft asks for it, and then wraps Linear4bit as such
    peft.inject_adapter_in_model(config, layers, ADAPTER)


def initial_lora_values(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the initial values of a named LoRA matrix, float32 [shape]: zeros for B, so that the product is zero.

    A is drawn from the seed, nearly normal, with the standard deviation of peft's own initial values, 1 / sqrt(3 *
    inputs).
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    return initial_values(seed, name, shape, 1 / math.sqrt(3 * shape[1]))


@contextmanager
def adapters_off(stage: nn.Module) -> Iterator[None]:
    """Context manager: inside it, forwards of `stage` leave LoRA out; at its end each layer's former state returns.

    peft's own switch is not used: it also changes which parameters require gradients, and graphs that wait for their
    backward rely on that.
    """
    adapted = import_tuning("peft.tuners.lora").LoraLayer
    layers = [(module, module.disable_adapters) for module in stage.modules() if isinstance(module, adapted)]
    try:
        for layer, _ in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_off in layers:
            layer._disable_adapters = was_off
