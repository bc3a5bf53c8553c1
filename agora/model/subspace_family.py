"""The `subspace` family: makes its stages, and exports its model as Hugging Face's LlamaForCausalLM.

In an export, a matrix whose output is added to the residual stream's k coordinates is multiplied by U, so that it has
all d rows, and the embedding becomes the learnt rows times U^T plus the fixed rows. Other tensors only get another
name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from agora_protocol.manifest_model import SubspaceSection
from numpy.typing import NDArray

from agora.core.hub_files import CONFIG_FILE, GENERATION_CONFIG_FILE
from agora.model import fixed_tensors
from agora.model.family import Family, StageModule
from agora.model.subspace_stage import FIXED_SCALE, STREAM_PROJECTIONS, SubspaceStage, stream_width
from agora.state.export_tensors import ExportedTensor
from agora.state.model_card import ModelDescription

EMBEDDING: Final = "embedding.weight"
LLAMA_NAMES: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LLAMA_LAYER_NAMES: Final = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}


class SubspaceFamily(Family):
    """The model family `subspace` for the sizes of one manifest: makes SubspaceStages, exports a LlamaForCausalLM.

    See Family for the methods that it overrides.
    """

    def __init__(self, model: SubspaceSection) -> None:
        self._model = model

    def make_meta_stage(self, layers: range) -> StageModule:
        return SubspaceStage(self._model, layers)

    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        return [self._exported_tensor(name, shape, seed) for name, shape in self.parameter_shapes(layers).items()]

    def config_files(
        self, dtype: str, end_of_text: int | None, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
        tokens = {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
        llama = _llama_config(self._model, dtype, end_of_text)
        return {CONFIG_FILE: llama, GENERATION_CONFIG_FILE: sampling | tokens}

    def describe(self) -> ModelDescription:
        model = self._model
        return ModelDescription(
            kind="A Llama-style decoder",
            shape=f"width {model.width}, {model.layers} layers, {model.heads} attention heads, "
            f"{model.key_value_heads} key/value heads, feed-forward {model.feed_forward}, "
            f"vocabulary {model.vocabulary}",
        )

    def _exported_tensor(self, name: str, shape: tuple[int, ...], seed: int) -> ExportedTensor:
        model = self._model
        llama = llama_name(name)
        if name == EMBEDDING and model.is_embedding_fixed:
            full = (shape[0], model.width)
            return ExportedTensor(name, llama, full, shape, lambda rows: self._expand_embedding(rows, seed))
        if name.endswith(STREAM_PROJECTIONS) and stream_width(model, int(name.split(".")[1])) < model.width:
            expanded = (model.width, *shape[1:])
            return ExportedTensor(name, llama, expanded, shape, lambda matrix: self._basis(seed) @ matrix)
        return ExportedTensor(name, llama, shape)

    def _expand_embedding(self, learnt: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
        model = self._model
        table = fixed_tensors.derive_embedding(seed, model.vocabulary, model.width)
        table *= np.float32(FIXED_SCALE)
        table += learnt if model.subspace == model.width else learnt @ self._basis(seed).T
        return table

    def _basis(self, seed: int) -> NDArray[np.float32]:
        return _cached_basis(seed, self._model.width, self._model.subspace)


_cached_basis = functools.lru_cache(maxsize=1)(fixed_tensors.derive_basis)


def llama_name(name: str) -> str:
    """Converts a parameter's full name to its name in LlamaForCausalLM. Raises KeyError for an unknown name."""
    if not name.startswith("layers."):
        return LLAMA_NAMES[name]
    _, index, inside = name.split(".", 2)
    return f"model.layers.{index}.{LLAMA_LAYER_NAMES[inside]}"


def _llama_config(model: SubspaceSection, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    # transformers 4 reads rope_theta and torch_dtype, transformers 5 rope_parameters and dtype.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
