"""The Hugging Face model types that can be trained: their classes in transformers, and what surrounds their layers.

transformers is imported when a class of it is needed, never before. Of a config.json, only the keys listed here are
passed to it: a manifest comes from strangers, and other keys could choose what code runs. Dropout is off, because a
forward that is repeated for its backward must give the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agora_protocol.base_config import parse_config, sizes_in
from agora_protocol.manifest_model import HfSection

from agora.core.tuning_packages import import_tuning

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
        """`prefix` + `name`, such as LlamaDecoderLayer. Raises TuningMissing."""
        return getattr(self._import("modeling"), f"{self.prefix}{name}")

    def make_config(self, model: HfSection) -> Any:
        """Makes transformers' own config object from those keys of the model's config.json that are in `keys`.

        Dropout is off. Attention is torch's fused one ("sdpa"), or "eager" for models that cap the attention's logits,
        which fused attention cannot. Raises TuningMissing without transformers, and errors of many types from
        transformers' own checks of the config.
        """
        values = {key: value for key, value in parse_config(model.config).items() if key in self.keys}
        config_class = getattr(self._import("configuration"), self.config_class or f"{self.prefix}Config")
        config = config_class(**values, **self.dropout)
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        return config

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


def architecture_of(model: HfSection) -> HfArchitecture:
    """Raises ValueError for a config that no checked manifest has."""
    return ARCHITECTURES[sizes_in(parse_config(model.config)).model_type]
