"""Reads the sizes of a decoder's tensors from a manifest's model section, for every family and every config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agora_protocol.base_config import parse_config, sizes_in
from agora_protocol.manifest_model import HfSection, ModelSection, SubspaceSection

Frozen = Literal["float32", "bf16", "nf4"]
# What a linear layer reads: the normed stream before attention, the heads' output, the normed stream before the
# feed-forward, or the feed-forward's inner values. Layers that read the same value share one copy of it.
LinearInput = Literal["attention", "attended", "feed-forward", "inner"]
# Sizes that transformers uses where a config.json leaves them out, by model_type.
DEFAULT_SIZES: Final[dict[str, dict[str, int]]] = {
    "llama": {"intermediate_size": 11_008, "num_attention_heads": 32},
    "mistral": {"intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"intermediate_size": 22_016, "num_attention_heads": 32, "num_key_value_heads": 32},
    "qwen3": {"intermediate_size": 22_016, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"intermediate_size": 24_576, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
# Soft caps that transformers uses for gemma2 where its config leaves them out.
DEFAULT_SOFTCAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

# Model types some of whose layers may attend to a window of the latest tokens only.
WINDOWED: Final = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
# In configs that name no layer types, every n-th layer attends to all earlier tokens; n by model_type.
WINDOW_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6}


@dataclass(frozen=True, slots=True)
class LinearSize:
    """The sizes of one linear layer of a decoder layer; immutable."""

    name: str  # the last part of its name in the model, by which LoRA targets it
    input_kind: LinearInput  # linear layers of a decoder layer with the same one share one copy of that value
    inputs: int
    outputs: int
    has_bias: bool = False
    last_layer_outputs: int = 0  # number of outputs in the model's last layer; 0: the same as in the other layers

    def outputs_in(self, *, is_last: bool) -> int:
        return self.last_layer_outputs if is_last and self.last_layer_outputs else self.outputs


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder's layers, the format of its frozen ones, and how it attends; immutable."""

    width: int  # values of a token inside a layer
    stream: int  # values of a token in the residual stream and the embedding
    layers: int  # their number
    vocabulary: int
    heads: int  # number of query heads
    head_width: int
    key_value_width: int  # values of a token in all key heads together, and in all value heads
    linears: tuple[LinearSize, ...]  # the linear layers of one decoder layer
    norms: int = 2  # norms of `width` values in a layer
    norm_vectors: int = 1  # parameter vectors of each norm
    head_norms: bool = False  # whether queries and keys are normed
    positions: int = 0  # rows of learnt positions
    is_attention_eager: bool = False  # whether attention is eager and keeps the s x s matrix
    masked_layers: frozenset[int] = frozenset()  # numbers of the layers whose attention takes a mask, for its window
    copies_attended: bool = False  # whether the heads' output is copied before its projection
    casts_inputs_once: bool = False  # whether linear layers of one input share its bf16 copy
    caps_logits: bool = False  # whether logits are soft-capped
    is_gated: bool = True  # whether the feed-forward has a gate
    fixed_vocabulary: int = 0  # number of token ids that have a fixed embedding row in addition to their learnt one
    frozen_as: Frozen | None = None  # the format in which frozen weights are kept; None if all weights are trained
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    dropout: float = 0.0  # LoRA's

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def inner_width(self) -> int:
        return next(linear.inputs for linear in self.linears if linear.input_kind == "inner")

    def is_last(self, layer: int) -> bool:
        return layer == self.layers - 1

    def has_lora(self, linear: LinearSize) -> bool:
        return self.frozen_as is not None and (not self.lora_targets or linear.name in self.lora_targets)


def decoder_sizes(model: ModelSection) -> DecoderSizes:
    """Returns the sizes of a run's model; those that its config.json leaves out are transformers' defaults.

    Raises TypeError for a model family other than subspace and hf.
    """
    match model:
        case SubspaceSection():
            return _subspace_sizes(model)
        case HfSection():
            config = parse_config(model.config)
            return _gpt2_sizes(model, config) if config["model_type"] == "gpt2" else _llama_sizes(model, config)
        case _:
            raise TypeError(f"no formula for the model family {model.family}")


def _subspace_sizes(model: SubspaceSection) -> DecoderSizes:
    head_width = model.width // model.heads
    key_value_width = model.key_value_heads * head_width
    last = model.width
    return DecoderSizes(
        width=model.width,
        stream=model.subspace,
        layers=model.layers,
        vocabulary=model.vocabulary,
        heads=model.heads,
        head_width=head_width,
        key_value_width=key_value_width,
        linears=(
            LinearSize("query", "attention", model.width, model.width),
            LinearSize("key", "attention", model.width, key_value_width),
            LinearSize("value", "attention", model.width, key_value_width),
            LinearSize("output", "attended", model.width, model.subspace, last_layer_outputs=last),
            LinearSize("gate", "feed-forward", model.width, model.feed_forward),
            LinearSize("up", "feed-forward", model.width, model.feed_forward),
            LinearSize("down", "inner", model.feed_forward, model.subspace, last_layer_outputs=last),
        ),
        copies_attended=True,
        casts_inputs_once=True,
        fixed_vocabulary=model.vocabulary if model.is_embedding_fixed else 0,
    )


def _llama_sizes(model: HfSection, config: Mapping[str, Any]) -> DecoderSizes:
    kind = sizes_in(dict(config)).model_type
    width = model.width
    usual = DEFAULT_SIZES[kind]

    def size_of(key: str, otherwise: int = 0) -> int:
        return int(config.get(key) or usual.get(key) or otherwise)

    heads = size_of("num_attention_heads")
    head_width = size_of("head_dim", width // heads)
    queries, shared = heads * head_width, size_of("num_key_value_heads", heads) * head_width
    inner = size_of("intermediate_size")
    all_biased = kind != "mistral" and bool(config.get("attention_bias"))
    read_biased, inner_biased = all_biased or kind == "qwen2", kind == "llama" and bool(config.get("mlp_bias"))
    if kind == "qwen2":
        all_biased = False
    return DecoderSizes(
        width=width,
        stream=width,
        layers=model.layers,
        vocabulary=model.vocabulary,
        heads=heads,
        head_width=head_width,
        key_value_width=shared,
        linears=(
            LinearSize("q_proj", "attention", width, queries, read_biased),
            LinearSize("k_proj", "attention", width, shared, read_biased),
            LinearSize("v_proj", "attention", width, shared, read_biased),
            LinearSize("o_proj", "attended", queries, width, all_biased),
            LinearSize("gate_proj", "feed-forward", width, inner, inner_biased),
            LinearSize("up_proj", "feed-forward", width, inner, inner_biased),
            LinearSize("down_proj", "inner", inner, width, inner_biased),
        ),
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        head_norms=kind in ("qwen3", "gemma3_text"),
        is_attention_eager=bool(_softcap(config, kind, "attn_logit_softcapping")),
        caps_logits=bool(_softcap(config, kind, "final_logit_softcapping")),
        masked_layers=frozenset(n for n in range(model.layers) if _has_window(config, kind, n, model.context)),
        **_training_fields(model),
    )


def _gpt2_sizes(model: HfSection, config: Mapping[str, Any]) -> DecoderSizes:
    width = model.width
    heads = int(config.get("n_head") or 12)
    inner = int(config.get("n_inner") or 4 * width)
    return DecoderSizes(
        width=width,
        stream=width,
        layers=model.layers,
        vocabulary=model.vocabulary,
        heads=heads,
        head_width=width // heads,
        key_value_width=width,
        linears=(
            LinearSize("c_attn", "attention", width, 3 * width, has_bias=True),
            LinearSize("c_proj", "attended", width, width, has_bias=True),
            LinearSize("c_fc", "feed-forward", width, inner, has_bias=True),
            LinearSize("c_proj", "inner", inner, width, has_bias=True),
        ),
        norm_vectors=2,
        positions=sizes_in(dict(config)).positions,
        is_gated=False,
        **_training_fields(model),
    )


def _training_fields(model: HfSection) -> dict[str, Any]:
    if model.trained == "all":
        return {}
    return {
        "frozen_as": model.frozen_as,
        "lora_rank": model.lora_rank,
        "lora_targets": model.lora_targets,
        "dropout": model.lora_dropout,
    }


def _softcap(config: Mapping[str, Any], kind: str, key: str) -> float:
    usual = DEFAULT_SOFTCAPS[key] if kind == "gemma2" else 0.0
    return float(config.get(key, usual) or 0.0) if kind in ("gemma2", "gemma3_text") else 0.0


def _has_window(config: Mapping[str, Any], kind: str, layer: int, context: int) -> bool:
    # Returns whether a layer attends to a window shorter than `context` tokens, so that its attention takes a mask.
    # kind: the model type;
    window = config.get("sliding_window", 4096)
    if kind not in WINDOWED or window is None or context <= int(window):
        return False
    if kind == "mistral":
        return True
    if types := config.get("layer_types"):
        return bool(types[layer] == "sliding_attention")
    if kind in ("qwen2", "qwen3"):
        return bool(config.get("use_sliding_window")) and layer >= int(config.get("max_window_layers", 28))
    return (layer + 1) % int(config.get("sliding_window_pattern") or WINDOW_PATTERNS[kind]) != 0
