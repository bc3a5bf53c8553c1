"""The files of a LoRA adapter as peft reads them: adapter_config.json, and the names in adapter_model.safetensors.

Also finds which matrices belong to which weight, and the factor with which their product is added to that weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from agora_protocol.manifest_model import HfSection

from agora.tuning.adapters.lora import ADAPTER, lora_targets
from agora.tuning.base.hf_architecture import architecture_of

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_ROOT: Final = "base_model.model."


def adapter_config(model: HfSection) -> dict[str, Any]:
    """Returns the content of peft's adapter_config.json for a run that trains LoRA.

    base_model_name_or_path is null: the manifest has the base model's hashes, but not its name. Raises ManifestError
    for targets that the model does not have.
    """
    architecture = architecture_of(model)
    alpha = model.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
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
    """Converts a LoRA matrix's parameter name in the run to its name in peft's adapter_model.safetensors."""
    return ADAPTER_ROOT + name.replace(f".{ADAPTER}.", ".")


def matrices_by_weight(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the LoRA matrices of each weight: the weight's name in the base model -> the run's names of (A, B).

    names: the run's names of LoRA matrices; others are ignored. Looks only for A: whether B is in `names` is not
    checked.
    """
    a, b = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
    return {name.replace(a, "."): (name, name.replace(a, b)) for name in names if a in name}


def lora_scaling(model: HfSection) -> float:
    """Returns the LoRA scaling, the factor of the product B A: alpha / r, or alpha / sqrt(r) with lora_rslora."""
    return model.lora_alpha / (math.sqrt(model.lora_rank) if model.lora_rslora else model.lora_rank)
