"""Linear layers whose matrix is frozen and kept in fewer bits than float32.

| frozen_as | matrices in layers        | embeddings, head | vectors (norms, biases)     |
|-----------|---------------------------|------------------|-----------------------------|
| float32   | as transformers has them  | float32          | float32                     |
| bf16      | Bf16Linear                | bf16             | float32, rounded to bf16    |
| nf4       | Nf4Linear (nf4_linear.py) | bf16             | float32, rounded to bf16    |

Vectors are a thousandth of a model; kept as float32 they need no special case in norms and biases. The residual stream
is float32 throughout. Products are in the dtype of torch's autocast if that is on, and in float32 if it is off: then a
matrix is converted to float32 for each product. A CPU without native bf16 therefore never emulates bf16; it computes in
float32 with weights that were rounded once.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from agora.core.optional_packages import import_tuning
from agora.tuning.adapters.frozen_linear import Bf16Linear, FrozenLinear

FrozenAs = Literal["float32", "bf16", "nf4"]


def freeze(stage: nn.Module, layers: nn.Module, frozen_as: FrozenAs) -> None:
    """Freezes every parameter of a stage on the meta device; replaces modules by ones that keep it as `frozen_as`.

    In place: the linear layers in `layers`, the stage's decoder layers, become layers of that format, the head becomes
    a Bf16Linear, embeddings become bf16; "float32" replaces nothing. Raises PackageMissing without a package.
    """
    if frozen_as != "float32":
        _replace_linears(layers, frozen_as)
        _replace_linears(stage, "bf16")  # those outside of the layers: the head
        for module in stage.modules():
            if isinstance(module, nn.Embedding):
                module.to(torch.bfloat16)
    stage.requires_grad_(False)


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Raises PackageMissing without transformers."""
    transposed = import_tuning("transformers.pytorch_utils").Conv1D
    return {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, transposed))}


def _replace_linears(module: nn.Module, frozen_as: FrozenAs) -> None:
    for name, linear in linear_layers(module).items():
        if not isinstance(linear, FrozenLinear):
            module.set_submodule(name, _frozen_like(linear, frozen_as))


def _frozen_like(linear: nn.Module, frozen_as: FrozenAs) -> FrozenLinear:
    is_transposed = not isinstance(linear, nn.Linear)
    matrix = linear.get_parameter("weight")
    bias = getattr(linear, "bias", None)
    outputs, inputs = matrix.shape[::-1] if is_transposed else matrix.shape
    kind: Any = Bf16Linear
    if frozen_as == "nf4":
        import_tuning("bitsandbytes")
        from agora.tuning.adapters.nf4_linear import Nf4Linear

        kind = Nf4Linear
    frozen: FrozenLinear = kind(inputs, outputs, bias is not None)
    frozen.is_transposed = is_transposed
    return frozen


def allocate(stage: nn.Module) -> None:
    """Moves a stage from the meta device to the CPU, in place, with undefined values, except the frozen matrices.

    load_matrix allocates each frozen matrix, so that the matrices never all take float32 memory at the same time.
    """
    for module in stage.modules():
        for name, tensor in list(module.named_parameters(recurse=False)):
            if not (isinstance(module, FrozenLinear) and tensor is module.weight):
                empty = torch.empty_like(tensor, device="cpu")
                module.register_parameter(name, nn.Parameter(empty, requires_grad=tensor.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def load_parameter(stage: nn.Module, name: str, values: Tensor, frozen_as: FrozenAs | None) -> None:
    """Sets the parameter of this full name, in an allocated stage, to the float32 values of a file.

    The matrix of a FrozenLinear is converted to that layer's format. Other parameters keep their dtype; their values
    are first rounded to bf16, unless frozen_as is "float32", or None because all parameters of the stage are trained.
    """
    owner, _, own_name = name.rpartition(".")
    module = stage.get_submodule(owner)
    if isinstance(module, FrozenLinear) and own_name == "weight":
        module.load_matrix(values)
    else:
        rounded = values if frozen_as in (None, "float32") else values.to(torch.bfloat16)
        module.get_parameter(own_name).copy_(rounded)
