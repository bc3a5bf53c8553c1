"""The config.json of a Hugging Face model inside a manifest: its canonical text, and the sizes that it gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol.fields import describe
from agora_protocol.limits import MAX_CONFIG_BYTES

# The values of `model_type` that a run can train.
MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2")
# The keys of config.json for each size: the usual one, and GPT-2's.
SIZE_KEYS: Final[dict[str, tuple[str, str]]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "vocabulary": ("vocab_size", "vocab_size"),
    "positions": ("max_position_embeddings", "n_positions"),
}
# Keys of config.json that must be false, null or empty, and why a model that sets one is refused.
UNSUPPORTED: Final[dict[str, str]] = {
    "auto_map": "is computed by code of its own, which is never run",
    "quantization_config": "is quantised; use the folder of the unquantised model",
    "add_cross_attention": "has cross-attention, which is not a decoder alone",
    "use_bidirectional_attention": "attends to later tokens, and cannot learn to predict them",
}


@dataclass(frozen=True, slots=True)
class BaseSizes:
    """The sizes in a config.json. width: values of a token between layers. positions: most tokens of a sequence."""

    model_type: str
    layers: int
    width: int
    vocabulary: int
    positions: int


def canonical_config(config: dict[str, Any]) -> str:
    """Returns the config's canonical text, as manifests contain it: ASCII JSON in one line, keys sorted."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_config(text: str) -> dict[str, Any]:
    """Returns the values in the text of a config.json. Raises ValueError, with the reason, for anything else."""
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"is longer than {MAX_CONFIG_BYTES} characters")
    try:
        config = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({str(error)[:80]})") from None
    if not isinstance(config, dict):
        raise ValueError("is not a JSON object")
    return config


def sizes_in(config: dict[str, Any]) -> BaseSizes:
    """Returns the sizes that a parsed config.json gives. Raises ValueError for a model that no run can train."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"has model_type {describe(model_type)}; a run can train {', '.join(MODEL_TYPES)}")
    for key, reason in UNSUPPORTED.items():
        if config.get(key):
            raise ValueError(f"has {key}: the model {reason}")
    sizes = {name: _size(config, keys[model_type == "gpt2"]) for name, keys in SIZE_KEYS.items()}
    return BaseSizes(model_type, **sizes)


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"has {key} {describe(value)}, which is not a size")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
