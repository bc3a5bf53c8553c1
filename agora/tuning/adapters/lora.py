"""LoRA as peft has it: layers around frozen ones, names and files of an adapter, and the merge W + scale * B A.

The names of the trained matrices are peft's, such as model.layers.7.self_attn.q_proj.lora_A.default.weight. Source:
LoRA, arXiv 2106.09685; the scale alpha / sqrt(r): arXiv 2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest_model import HfSection
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from agora.core.optional_packages import import_tuning
from agora.model.family import initial_values
from agora.state.export_tensors import TensorBlocks
from agora.tuning.base.hf_architecture import architecture_of
from agora.tuning.base.model_files import StoredTensor

KEPT: Final = "kept"  # the buffer beside a LoRA matrix that has the values with which the run began
ADAPTER: Final = "default"  # peft's name of the adapter; it is part of the names of its matrices


def lora_targets(model: HfSection, linears: Sequence[str]) -> tuple[str, ...]:
    """Returns which of the linear layers `linears` get LoRA: lora_targets, or all if it is empty.

    Raises ManifestError for a target that is not among them.
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

    Freezes all other parameters in `layers`. The LoRA matrices have no useful values until they are set. is_transposed:
    whether the layers' matrices are [inputs, outputs]. Raises PackageMissing without peft.
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


def keep_adapters(stage: nn.Module) -> None:
    """Keeps a copy of every LoRA matrix in `stage`, for adapters_as_kept: a buffer, which all weight versions share."""
    for linear in _lora_linears(stage):
        linear.register_buffer(KEPT, linear.get_parameter("weight").detach().clone(), persistent=False)


@contextmanager
def adapters_as_kept(stage: nn.Module) -> Iterator[None]:
    """Context manager: inside it, forwards of `stage` without gradients use the matrices that keep_adapters kept."""
    learnt = [(linear, linear.get_parameter("weight")) for linear in _lora_linears(stage)]
    try:
        for linear, weight in learnt:
            # Other tensors, not other values: graphs that wait for their backward have the learnt ones.
            kept = nn.Parameter(linear.get_buffer(KEPT), requires_grad=weight.requires_grad)
            linear.register_parameter("weight", kept)
        yield
    finally:
        for linear, weight in learnt:
            linear.register_parameter("weight", weight)


def _lora_linears(stage: nn.Module) -> list[nn.Module]:
    adapted = import_tuning("peft.tuners.lora").LoraLayer
    layers: list[Any] = [module for module in stage.modules() if isinstance(module, adapted)]
    return [matrices[ADAPTER] for layer in layers for matrices in (layer.lora_A, layer.lora_B)]


# --- the adapter's files as peft reads them


ADAPTER_ROOT: Final = "base_model.model."


def adapter_config(model: HfSection) -> dict[str, Any]:
    """Returns the content of peft's adapter_config.json for a run that trains LoRA.

    base_model_name_or_path is what the manifest calls the base model, null if it has no name for it. Raises
    ManifestError for targets that the model does not have.
    """
    architecture = architecture_of(model)
    base_name, _, revision = model.base_name.partition("@") if "/" in model.base_name else (model.base_name, "", "")
    alpha = model.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or None,
        "revision": revision or None,  # of the base model
        "r": model.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": model.lora_dropout,
        "use_rslora": model.lora_rslora,
        "target_modules": sorted(lora_targets(model, architecture.linears)),
        "fan_in_fan_out": architecture.is_transposed,
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def adapter_tensor_name(name: str) -> str:
    return ADAPTER_ROOT + name.replace(f".{ADAPTER}.", ".")


def matrices_by_weight(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the weight's name in the base model -> the run's names of its LoRA matrices (A, B)."""
    a, b = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
    return {name.replace(a, "."): (name, name.replace(a, b)) for name in names if a in name}


def lora_scaling(model: HfSection) -> float:
    """Returns the LoRA scaling, the factor of the product B A: alpha / r, or alpha / sqrt(r) with lora_rslora."""
    return model.lora_alpha / (math.sqrt(model.lora_rank) if model.lora_rslora else model.lora_rank)


# --- the merge: a block of rows at a time is in memory as float32, with the small matrices A and B


# Maximum number of values of a block, 4 MiB of float32; a block has at least one row, which may be longer.
BLOCK_VALUES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """What LoRA adds to a matrix W [outputs, inputs] of a file: scale * B A, with A [r, inputs] and B [outputs, r].

    The product is not computed yet. read_a, read_b: read and return A and B. is_transposed: whether the file has W as
    [inputs, outputs].
    """

    read_a: Callable[[], NDArray[np.float32]]
    read_b: Callable[[], NDArray[np.float32]]
    scale: float
    is_transposed: bool

    def factors(self) -> tuple[Tensor, Tensor]:
        """Reads A and B; returns two matrices, [rows, r] and [r, columns], whose product is added to the file's W.

        They are (scale * B, A), or for a transposed file (scale * A^T, B^T).
        """
        a = torch.from_numpy(self.read_a())
        b = torch.from_numpy(self.read_b())
        left, right = (a.T, b.T) if self.is_transposed else (b, a)
        return self.scale * left, right


def merged_tensor(name: str, stored: StoredTensor, product: LoraProduct | None) -> TensorBlocks:
    """Returns the tensor `name` of the merged model: the base model's tensor, plus `product` if there is one.

    Nothing is read yet: the file and the LoRA matrices are read when the result's blocks are read.
    """
    return TensorBlocks(name, stored.shape, partial(_merged_blocks, stored, product), f"{stored.path}: {stored.name}")


def _merged_blocks(stored: StoredTensor, product: LoraProduct | None) -> Iterator[NDArray[np.float32]]:
    row_values = math.prod(stored.shape[1:])
    rows = max(1, BLOCK_VALUES // max(1, row_values))
    factors = product.factors() if product is not None else None
    with safe_open(stored.path, framework="pt") as reader:
        values = reader.get_slice(stored.name)
        for start in range(0, stored.shape[0], rows):
            block = values[start : start + rows].to(torch.float32)
            if factors is not None:
                block = torch.addmm(block, factors[0][start : start + rows], factors[1])
            yield block.numpy()
