"""A model of the `subspace` family as Hugging Face's transformers knows it: a plain Llama.

What is added to the residual stream in k coordinates becomes what U makes of it, a matrix of all d rows; the embedding
becomes U times the learnt rows, and the fixed rows. Everything else only changes its name: attention, rotary positions
(rotate-half) and SwiGLU are those of LlamaForCausalLM already. Knows: names of tensors, keys of config.json. Must not
know: files, stages, peers; nothing here needs the package transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from agora_protocol.manifest import ModelSection
from numpy.typing import NDArray

from agora.model import fixed
from agora.model.subspace import FIXED_SCALE, INTO_THE_STREAM, outputs_of

Unfold = Callable[[NDArray[np.float32]], NDArray[np.float32]]

OUTSIDE_LAYERS: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE_LAYERS: Final = {
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


def tensor_name(name: str) -> str:
    """The name in LlamaForCausalLM of the parameter with this full name.

    Raises KeyError for a name that no stage of the family has.
    """
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    layers, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    if layers != "layers":
        raise KeyError(name)
    return f"model.layers.{int(index)}.{INSIDE_LAYERS[inside]}"


class Unfolding:
    """How this run's parameters become those of LlamaForCausalLM."""

    def __init__(self, model: ModelSection, seed: int) -> None:
        self._model, self._seed = model, seed
        self._basis = fixed.basis(seed, model.width, model.subspace)

    def of(self, name: str) -> Unfold | None:
        """float32 as a stage has it -> float32 as the Llama has it, [d, n] for [k, n] and [V, d] for [V, k]; None where
        they are the same.
        """
        model = self._model
        if name == "embedding.weight" and model.embedding_is_fixed:
            return self._embedding
        if name.endswith(INTO_THE_STREAM) and outputs_of(model, int(name.split(".")[1])) < model.width:
            return lambda values: self._basis @ values
        return None

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it has then."""
        if self.of(name) is None:
            return stored
        return (stored[0], self._model.width) if name == "embedding.weight" else (self._model.width, *stored[1:])

    def _embedding(self, learnt: NDArray[np.float32]) -> NDArray[np.float32]:
        table = fixed.embedding(self._seed, self._model.vocabulary, self._model.width)
        table *= np.float32(FIXED_SCALE)
        table += learnt if self._model.subspace == self._model.width else learnt @ self._basis.T
        return table


def config(model: ModelSection, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """config.json, for transformers 4 and 5 (rope_theta and torch_dtype are 4's words).

    dtype: "float32" or "bfloat16". end_of_text: the id that ends a document, if there is one.
    """
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


def generation_config(end_of_text: int | None) -> dict[str, Any]:
    """generation_config.json: sampling, as a base model wants it; what ends a document ends the text, and pads."""
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
    }
