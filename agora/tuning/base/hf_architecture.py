"""The Hugging Face model types that can be trained: their classes in transformers, and what surrounds their layers.

transformers is imported when a class of it is needed, never before. Of a config.json, only the keys listed here are
passed to it: a manifest comes from strangers, and other keys could choose what code runs. What they make is compared
with what all keys make. Dropout is off, because a forward that is repeated for its backward must give the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agora_protocol.base_config import parse_config, sizes_in
from agora_protocol.manifest_model import HfSection

from agora.core.optional_packages import import_tuning
from agora.core.terminal_text import one_line
from agora.tuning.packed_attention import PACKED, register

SHARED_KEYS: Final = frozenset({"vocab_size", "pad_token_id", "tie_word_embeddings"})
DECODER_KEYS: Final = SHARED_KEYS | {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}
WINDOW_KEYS: Final = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
GEMMA_KEYS: Final = frozenset({"hidden_activation", "attention_bias"})
GEMMA_2_KEYS: Final = frozenset(
    {"query_pre_attn_scalar", "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping"}
)
GPT2_KEYS: Final = SHARED_KEYS | {
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
}
# Keys that change nothing in a decoder's forward here. They are left out of the config to compare with as well: some
# choose code that runs, some how long a list is made.
INERT_KEYS: Final = frozenset(
    {
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "experts_implementation",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_cross_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "tie_last_hidden_states",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Keys that no config class lists and that transformers' forward reads if they are there -> the value that changes
# nothing.
READ_IF_SET: Final[dict[str, Any]] = {
    "is_causal": True,
    **dict.fromkeys(("attention_chunk_size", "kv_sharing_modes", "per_layer_config")),
    **dict.fromkeys(("decoder", "generator", "text_config", "text_encoder")),
}
NO_DROPOUT: Final = {"attention_dropout": 0.0}
NO_GPT2_DROPOUT: Final = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
DECODER_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2_LINEARS: Final = ("c_attn", "c_proj", "c_fc")


@dataclass(frozen=True, slots=True)
class HfArchitecture:
    """One Hugging Face model type: names of its classes and modules in transformers, and what surrounds its layers.

    | field                          | meaning                                                                      |
    |--------------------------------|------------------------------------------------------------------------------|
    | display_name                   | the name in texts for users                                                  |
    | module                         | the folder in transformers.models                                            |
    | prefix                         | how the names of its classes begin                                           |
    | keys                           | the keys of config.json that are passed to transformers                      |
    | config_class                   | the whole name of its config class; "" for `prefix` and "Config"             |
    | layer_class, norm_class        | names of classes without the prefix; norm_class is "" for torch's LayerNorm  |
    | root, embedding, positions,    | names of the whole model's parts, in transformers and in files; positions is |
    | layers, norm                   | "" without learnt positions                                                  |
    | epsilon                        | the key of the norms' epsilon                                                |
    | has_rotary                     | whether layers need rotary positions                                         |
    | rotary_by_type                 | whether rotary positions differ between the types of layers                  |
    | windows                        | which layers attend only to the last `sliding_window` tokens                 |
    | scales_embedding               | whether embeddings are multiplied by the square root of the width            |
    | linears                        | how the names of a layer's linear layers end                                 |
    | is_transposed                  | whether linear layers have their matrix as [inputs, outputs]                 |
    | dropout                        | the config's keys and values that switch dropout off                         |
    """

    display_name: str
    module: str
    prefix: str
    keys: frozenset[str]
    config_class: str = ""
    layer_class: str = "DecoderLayer"
    norm_class: str = "RMSNorm"
    root: str = "model"
    embedding: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    epsilon: str = "rms_norm_eps"
    has_rotary: bool = True
    rotary_by_type: bool = False
    windows: Literal["none", "all", "by type"] = "none"
    scales_embedding: bool = False
    linears: tuple[str, ...] = DECODER_LINEARS
    is_transposed: bool = False
    dropout: dict[str, float] = field(default_factory=lambda: NO_DROPOUT)

    def load_class(self, name: str) -> Any:
        """Returns transformers' class `prefix` + `name`, such as LlamaDecoderLayer. Raises PackageMissing."""
        return getattr(self._import("modeling"), f"{self.prefix}{name}")

    def make_config(self, model: HfSection) -> Any:
        """Makes transformers' own config object from those keys of the model's config.json that are in `keys`.

        Dropout is off. Attention is torch's fused one (PACKED), or "eager" for models that cap the attention's logits,
        which fused attention cannot. Raises PackageMissing without transformers, errors of many types from
        transformers' own checks of the config, and ConfigRefused if transformers makes another model of the whole file,
        or none that computes.
        """
        values = {key: value for key, value in parse_config(model.config).items() if key in self.keys}
        config_class = getattr(self._import("configuration"), self.config_class or f"{self.prefix}Config")
        config = config_class(**values, **self.dropout)
        require_equal(config, parse_config(model.config))
        self._require_computable(config, parse_config(model.config).get("layer_types"))
        register()
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else PACKED
        return config

    def _require_computable(self, config: Any, layer_types: Any) -> None:
        # What transformers itself fails at, some of it only in the first forward.
        heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", 1)
        if heads % shared:
            raise ConfigRefused(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")
        window = getattr(config, "sliding_window", None)
        if window is not None and window < 1:
            raise ConfigRefused(f"sliding_window is {_shorten(window)}, and a token attends at least to itself")
        has_window = window is not None
        if self.windows == "by type":
            if not has_window and "sliding_attention" in config.layer_types:
                raise ConfigRefused("layer_types has sliding_attention, and there is no sliding_window")
            return
        kind = "sliding_attention" if has_window and self.windows == "all" else "full_attention"
        if layer_types is not None and layer_types != [kind] * config.num_hidden_layers:
            raise ConfigRefused(f"layer_types has others than {kind}, the one type of layer of {self.display_name}")

    def window_of(self, config: Any, layer: int) -> int | None:
        """How many of the last tokens, itself included, a token of the layer attends to; None: all before it.

        layer: its number in the whole model. Raises ValueError as type_of.
        """
        if self.windows == "none" or (self.windows == "by type" and self.type_of(config, layer) != "sliding_attention"):
            return None
        window: int | None = config.sliding_window
        return window

    def type_of(self, config: Any, layer: int) -> str:
        """ "full_attention" or "sliding_attention". Raises ValueError for another type."""
        kind = str(config.layer_types[layer])
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind[:40]!r}")
        return kind

    def _import(self, kind: str) -> Any:
        return import_tuning(f"transformers.models.{self.module}.{kind}_{self.module}")


# The model types by `model_type` of config.json.
ARCHITECTURES: Final[dict[str, HfArchitecture]] = {
    "llama": HfArchitecture("Llama", "llama", "Llama", DECODER_KEYS | {"attention_bias", "mlp_bias"}),
    "mistral": HfArchitecture("Mistral", "mistral", "Mistral", DECODER_KEYS | {"sliding_window"}, windows="all"),
    "qwen2": HfArchitecture("Qwen2", "qwen2", "Qwen2", DECODER_KEYS | WINDOW_KEYS, windows="by type"),
    "qwen3": HfArchitecture(
        "Qwen3", "qwen3", "Qwen3", DECODER_KEYS | WINDOW_KEYS | {"attention_bias"}, windows="by type"
    ),
    "gemma": HfArchitecture("Gemma", "gemma", "Gemma", DECODER_KEYS | GEMMA_KEYS, scales_embedding=True),
    "gemma2": HfArchitecture(
        "Gemma 2",
        "gemma2",
        "Gemma2",
        DECODER_KEYS | GEMMA_KEYS | GEMMA_2_KEYS,
        windows="by type",
        scales_embedding=True,
    ),
    "gemma3_text": HfArchitecture(
        "Gemma 3",
        "gemma3",
        "Gemma3",
        DECODER_KEYS | GEMMA_KEYS | GEMMA_2_KEYS | {"rope_local_base_freq", "sliding_window_pattern"},
        config_class="Gemma3TextConfig",
        windows="by type",
        rotary_by_type=True,
        scales_embedding=True,
    ),
    "gpt2": HfArchitecture(
        "GPT-2",
        "gpt2",
        "GPT2",
        GPT2_KEYS,
        layer_class="Block",
        norm_class="",
        root="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        epsilon="layer_norm_epsilon",
        has_rotary=False,
        linears=GPT2_LINEARS,
        is_transposed=True,
        dropout=NO_GPT2_DROPOUT,
    ),
}


class ConfigRefused(Exception):
    """A config.json of which a run would not compute the model that transformers computes; the text names a field."""


def require_equal(config: Any, values: dict[str, Any]) -> None:
    """Raises ConfigRefused unless `config` equals, in all that a forward reads, what transformers makes of `values`.

    values: of the whole config.json, and changed by this. Also raises what transformers raises for them.
    """
    for key, neutral in READ_IF_SET.items():
        if values.get(key, neutral) != neutral:
            raise ConfigRefused(f"{key} is {_shorten(values[key])}, which no run computes")
    known = {key: value for key, value in values.items() if key not in INERT_KEYS and not key.startswith("_")}
    ours, theirs = config.to_dict(), type(config).from_dict(known).to_dict()
    for key in ours.keys() - INERT_KEYS:
        if ours[key] != theirs.get(key):
            raise ConfigRefused(f"{key} is {_shorten(theirs.get(key))} in transformers, {_shorten(ours[key])} in a run")


def _shorten(value: object) -> str:
    return one_line(str(value), 60)


def architecture_of(model: HfSection) -> HfArchitecture:
    """Raises ValueError for a config that no checked manifest has."""
    return ARCHITECTURES[sizes_in(parse_config(model.config)).model_type]
