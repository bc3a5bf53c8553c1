"""Reads the sizes of a decoder's tensors from a manifest's model section, for every family and every config. Pure.

Knows: which linear layers, norms and biases each kind of decoder has, and the sizes that its config leaves out. Must
not know: torch, transformers, what a tensor costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agora_protocol.base_config import parse_config, sizes_in
from agora_protocol.manifest import HfSection, ModelSection, SubspaceSection

Frozen = Literal["float32", "bf16", "nf4"]
LinearInput = Literal["attention", "attended", "feed-forward", "inner"]
"""What a linear layer reads: the normed stream before attention, the heads' output, the normed stream before the
feed-forward, or the feed-forward's inner values. Layers that read the same value share one copy of it."""
USUAL_WIDTHS: Final[dict[str, dict[str, int]]] = {
    "llama": {"intermediate_size": 11_008, "num_attention_heads": 32},
    "mistral": {"intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"intermediate_size": 22_016, "num_attention_heads": 32, "num_key_value_heads": 32},
    "qwen3": {"intermediate_size": 22_016, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"intermediate_size": 24_576, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
"""Sizes that transformers uses where a config.json leaves them out, by model_type."""
USUAL_SOFTCAP: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Soft caps that transformers uses for gemma2 where its config leaves them out."""

WINDOWED: Final = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Model types some of whose layers may attend to a window of the latest tokens only."""
WINDOW_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6}
"""In configs that name no layer types, every n-th layer attends to all earlier tokens; n by model_type."""


@dataclass(frozen=True, slots=True)
class LinearSize:
    """The sizes of one linear layer of a decoder layer; immutable.

    last_outputs: its number of outputs in the model's last layer; 0 means the same as in the other layers.
    """

    name: str
    reads: LinearInput
    inputs: int
    outputs: int
    has_bias: bool = False
    last_outputs: int = 0

    def outputs_in(self, *, is_last: bool) -> int:
        """Returns the number of outputs in a decoder layer. is_last: whether that is the model's last layer."""
        return self.last_outputs if is_last and self.last_outputs else self.outputs


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder; immutable.

    width: values of a token inside a layer. stream: values of a token in the residual stream and the embedding. norms:
    norms of `width` values in a layer. norm_vectors: vectors of each norm. heads, head_width, key_value_width: of
    attention. head_norms: whether queries and keys are normed. positions: rows of learnt positions. attends_to_all:
    whether attention is eager and keeps all pairs. masked_layers: those whose attention takes a mask, for its window.
    copies_attended: whether the heads' output is copied before its projection. caps_logits: whether logits are capped.
    is_gated: whether the feed-forward has a gate. fixed_vocabulary: number of token ids that have a fixed embedding row
    in addition to their learnt one. frozen_as: the format in which frozen weights are kept; None if all weights are
    trained. lora_rank, lora_targets, dropout: LoRA's settings.
    """

    width: int
    stream: int
    layers: int
    vocabulary: int
    heads: int
    head_width: int
    key_value_width: int
    linears: tuple[LinearSize, ...]
    norms: int = 2
    norm_vectors: int = 1
    head_norms: bool = False
    positions: int = 0
    attends_to_all: bool = False
    masked_layers: frozenset[int] = frozenset()
    copies_attended: bool = False
    caps_logits: bool = False
    is_gated: bool = True
    fixed_vocabulary: int = 0
    frozen_as: Frozen | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    dropout: float = 0.0

    @property
    def query_width(self) -> int:
        """Number of values of a token in all query heads together."""
        return self.heads * self.head_width

    @property
    def inner_width(self) -> int:
        """Number of inner values of a token in the feed-forward."""
        return next(linear.inputs for linear in self.linears if linear.reads == "inner")

    def is_last(self, layer: int) -> bool:
        """Returns whether layer number `layer` is the model's last."""
        return layer == self.layers - 1

    def has_lora(self, linear: LinearSize) -> bool:
        """Returns whether a linear layer has LoRA; all have it if the run trains LoRA and names no targets."""
        return self.frozen_as is not None and (not self.lora_targets or linear.name in self.lora_targets)


def decoder_sizes(model: ModelSection) -> DecoderSizes:
    """Returns the sizes of a run's model. Raises TypeError for a family that has no formula here."""
    match model:
        case SubspaceSection():
            return _subspace_sizes(model)
        case HfSection():
            config = parse_config(model.config)
            return _gpt2_sizes(model, config) if config["model_type"] == "gpt2" else _llama_sizes(model, config)
        case _:
            raise TypeError(f"no formula for the model family {model.family}")


def _subspace_sizes(model: SubspaceSection) -> DecoderSizes:
    """Returns the sizes of the subspace family; output projections have `subspace` rows, in the last layer `width`."""
    head_width = model.width // model.heads
    key_value_width, last = model.key_value_heads * head_width, model.width
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
            LinearSize("output", "attended", model.width, model.subspace, last_outputs=last),
            LinearSize("gate", "feed-forward", model.width, model.feed_forward),
            LinearSize("up", "feed-forward", model.width, model.feed_forward),
            LinearSize("down", "inner", model.feed_forward, model.subspace, last_outputs=last),
        ),
        copies_attended=True,
        fixed_vocabulary=model.vocabulary if model.is_embedding_fixed else 0,
    )


def _llama_sizes(model: HfSection, config: Mapping[str, Any]) -> DecoderSizes:
    """Returns the sizes of a Hugging Face decoder that is built like Llama: also Mistral, Qwen and Gemma."""
    kind, width = sizes_in(dict(config)).model_type, model.width
    usual = USUAL_WIDTHS[kind]

    def size_of(key: str, otherwise: int = 0) -> int:
        """Returns the size `key` of the config; without it transformers' usual one; without that `otherwise`."""
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
        attends_to_all=bool(_softcap(config, kind, "attn_logit_softcapping")),
        caps_logits=bool(_softcap(config, kind, "final_logit_softcapping")),
        masked_layers=frozenset(n for n in range(model.layers) if _has_window(config, kind, n, model.context)),
        **_training(model),
    )


def _gpt2_sizes(model: HfSection, config: Mapping[str, Any]) -> DecoderSizes:
    """Returns the sizes of GPT-2: one matrix for queries, keys and values, biases everywhere, learnt positions."""
    width, heads = model.width, int(config.get("n_head") or 12)
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
        **_training(model),
    )


def _training(model: HfSection) -> dict[str, Any]:
    """Returns the fields of DecoderSizes that say what is trained, by name; {} if all weights are."""
    if model.trained == "all":
        return {}
    targets = model.lora_targets
    return {
        "frozen_as": model.frozen_as,
        "lora_rank": model.lora_rank,
        "lora_targets": targets,
        "dropout": model.lora_dropout,
    }


def _softcap(config: Mapping[str, Any], kind: str, key: str) -> float:
    """Returns config[key], the soft cap of attention scores or logits in Gemma 2 and 3.

    kind: the model type; the result is 0 for types other than these. Without the key, Gemma 2 has its USUAL_SOFTCAP.
    """
    usual = USUAL_SOFTCAP[key] if kind == "gemma2" else 0.0
    return float(config.get(key, usual) or 0.0) if kind in ("gemma2", "gemma3_text") else 0.0


def _has_window(config: Mapping[str, Any], kind: str, layer: int, context: int) -> bool:
    """Returns whether a layer attends to a window shorter than `context`, so that its attention takes a mask."""
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
