"""Every parameter has a name in LlamaForCausalLM, with the same shape, and every parameter there is one of ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agora_protocol.manifest import ModelSection
from transformers import LlamaConfig, LlamaForCausalLM

from agora.model import hf, parameter_shapes

MODEL = ModelSection(width=48, subspace=48, layers=3, heads=6, key_value_heads=2, feed_forward=80, vocabulary=99)


def test_names_and_shapes_are_those_of_transformers_own_llama() -> None:
    ours = {hf.tensor_name(name): shape for name, shape in parameter_shapes(MODEL, range(3), 0, 1).items()}
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**hf.config(MODEL, "float32", None)))
    assert ours == {name: tuple(p.shape) for name, p in theirs.named_parameters()}


def test_a_strange_name_is_refused() -> None:
    for name in ("layers.0.attention.sideways.weight", "rows.0.attention_norm.weight", "table"):
        with pytest.raises(KeyError):
            hf.tensor_name(name)


def test_every_value_of_the_config_is_understood() -> None:
    understood = LlamaConfig(**hf.config(MODEL.model_copy(update={"rope_theta": 777.0}), "bfloat16", 5))
    assert understood.rope_parameters["rope_theta"] == 777.0 and understood.dtype == torch.bfloat16
    assert (understood.num_key_value_heads, understood.head_dim, understood.vocab_size) == (2, 8, 99)
    assert (understood.eos_token_id, understood.tie_word_embeddings) == (5, False)


@pytest.mark.parametrize(("subspace", "embedding"), [(24, "auto"), (48, "fixed")])
def test_what_is_unfolded_has_the_shapes_of_transformers_own_llama(subspace: int, embedding: str) -> None:
    model = MODEL.model_copy(update={"subspace": subspace, "embedding": embedding})
    unfolding, ours = hf.Unfolding(model, 3), {}
    for name, shape in parameter_shapes(model, range(3), 0, 1).items():
        values, unfold = np.ones(shape, np.float32), unfolding.of(name)
        unfolded = values if unfold is None else unfold(values)
        assert unfolded.dtype == np.float32 and unfolded.shape == unfolding.shape(name, shape)
        ours[hf.tensor_name(name)] = unfolded.shape
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**hf.config(model, "float32", None)))
    assert ours == {name: tuple(p.shape) for name, p in theirs.named_parameters()}
