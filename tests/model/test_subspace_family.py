"""Every parameter has a name in LlamaForCausalLM, with the same shape, and every parameter there is one of ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agora_protocol.manifest_model import SubspaceSection
from transformers import LlamaConfig, LlamaForCausalLM

from agora.model import family_of
from agora.model.subspace_family import llama_name

MODEL = SubspaceSection(width=48, subspace=48, layers=3, heads=6, key_value_heads=2, feed_forward=80, vocabulary=99)
WHOLE = range(3)


def config(model: SubspaceSection, dtype: str = "float32", end_of_text: int | None = None) -> LlamaConfig:
    return LlamaConfig(**family_of(model).config_files(dtype, end_of_text)["config.json"])


def shapes_in_transformers(model: SubspaceSection) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        llama = LlamaForCausalLM(config(model))
    return {name: tuple(p.shape) for name, p in llama.named_parameters()}


def test_names_and_shapes_are_those_of_transformers_own_llama() -> None:
    shapes = family_of(MODEL).parameter_shapes(WHOLE)
    assert {llama_name(name): shape for name, shape in shapes.items()} == shapes_in_transformers(MODEL)
    tensors = family_of(MODEL).exported_tensors(WHOLE, 3)
    assert {tensor.source: tensor.shape for tensor in tensors} == shapes


def test_a_strange_name_is_refused() -> None:
    for name in ("layers.0.attention.sideways.weight", "rows.0.attention_norm.weight", "table"):
        with pytest.raises(KeyError):
            llama_name(name)


def test_every_value_of_the_config_is_understood() -> None:
    understood = config(MODEL.model_copy(update={"rope_theta": 777.0}), "bfloat16", 5)
    assert understood.rope_parameters["rope_theta"] == 777.0 and understood.dtype == torch.bfloat16
    assert (understood.num_key_value_heads, understood.head_dim, understood.vocab_size) == (2, 8, 99)
    assert (understood.eos_token_id, understood.tie_word_embeddings) == (5, False)


@pytest.mark.parametrize(("subspace", "embedding"), [(24, "auto"), (48, "fixed")])
def test_what_is_converted_has_the_shapes_of_transformers_own_llama(subspace: int, embedding: str) -> None:
    model = MODEL.model_copy(update={"subspace": subspace, "embedding": embedding})
    family, exported = family_of(model), {}
    for tensor in family.exported_tensors(WHOLE, 3):
        shape = tensor.shape if tensor.source_shape is None else tensor.source_shape
        assert shape == family.parameter_shapes(WHOLE)[tensor.source]
        values = np.ones(shape, np.float32)
        converted = values if tensor.convert is None else tensor.convert(values)
        assert converted.dtype == np.float32 and converted.shape == tensor.shape
        exported[tensor.name] = converted.shape
    assert exported == shapes_in_transformers(model)
