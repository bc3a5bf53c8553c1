"""A config.json is the model that transformers makes of it, for every model type and old or odd keys, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.base_config import UNSUPPORTED
from agora_protocol.errors import ManifestError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agora.model import family_of
from agora.tuning.base.hf_architecture import ARCHITECTURES, INERT_KEYS, READ_IF_SET
from tests.model.tiny_models import CONFIGS, logits_of, manifest_of, some_tokens, stages_of

LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TYPES = ["full_attention", "sliding_attention", "full_attention"]

# Changes of a config.json; None removes a key.
QUIRKS: dict[str, dict[str, Any]] = {
    "original length at the top, longrope": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": LONG_ROPE,
        "original_max_position_embeddings": 16,
    },
    "original length at the top, yarn": {
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": YARN,
        "original_max_position_embeddings": 16,
    },
    "original length at the top, llama3, new form": {
        "rope_parameters": {**LLAMA_3, "rope_theta": 10000.0},
        "original_max_position_embeddings": 16,
    },
    "original length inside": {"rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 16}},
    "linear, old form": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "both forms": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_scaling": YARN},
    "theta at the top": {"rope_parameters": None, "rope_theta": 77.0},
    "theta in both places": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 9.0},
    "by types of layers": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 55.0} for kind in set(TYPES)},
        "layer_types": TYPES,
    },
    "half of a head is rotated, at the top": {"partial_rotary_factor": 0.5},
    "half of a head is rotated, inside": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}
    },
    "types of layers, all of them full": {"layer_types": ["full_attention"] * 3},
    "types of layers, all of them with windows": {"layer_types": ["sliding_attention"] * 3},
    "by types of layers, all of them full": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 55.0}},
        "layer_types": ["full_attention"] * 3,
    },
    "types of layers": {"layer_types": TYPES},
    "types of layers without windows": {"layer_types": TYPES, "sliding_window": None, "use_sliding_window": False},
    "a window": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "no window": {"sliding_window": None},
    "a window of nothing": {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0},
    "wide heads": {"head_dim": 24},
    "no size of heads": {"head_dim": None},
    "one key for each head": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "tied by default": {"tie_word_embeddings": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "another activation": {"hidden_act": "gelu", "activation_function": "relu", "hidden_activation": "relu"},
    "no causal mask": {"is_causal": False},
    "a causal mask": {"is_causal": True},
    "layers that differ": {"per_layer_config": {"1": {"head_dim": 8}}},
    "a part of a larger model": {"text_config": {"hidden_size": 8}},
    "an aliased size": {"num_attention_heads": 2, "n_head": 2},
    "a softer scale": {"query_pre_attn_scalar": 4, "scale_attn_weights": False, "attn_logit_softcapping": 5.0},
    "layers scaled by their number": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "a pattern of windows": {"layer_types": None, "sliding_window_pattern": 2, "rope_local_base_freq": 30.0},
    "no caps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "other caps": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "an inner width": {"n_inner": 40},
    "the activation's older key alone": {"hidden_activation": None, "hidden_act": "gelu"},
    "coarse norms": {"rms_norm_eps": 0.1, "layer_norm_epsilon": 0.1},
    "rotation of Gemma 3 as it was published": {
        "rope_parameters": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 30.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "windows from the third layer on": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2},
    "dropout": {"attention_dropout": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "what transformers does not read": {"unsloth_fixed": True, "rotary_emb_base": 3, "x": [1], "_name_or_path": "a/b"},
    "what only samples text": {"temperature": 0.1, "top_k": 3, "repetition_penalty": 1.5, "pretraining_tp": 2},
    "a type and labels of a classifier": {"torch_dtype": "float32", "num_labels": 7, "problem_type": "regression"},
}


NAMES = [name for name in CONFIGS if name != "llama-biased"]


# What transformers computes and a run does not: the quirk and "*" or a model, and the field that the refusal names.
REFUSED = {
    ("no causal mask", "*"): "is_causal",
    ("layers that differ", "*"): "per_layer_config",
    ("a part of a larger model", "*"): "text_config",
    ("a window of nothing", "qwen3"): "sliding_window",  # transformers computes something of masks without a token
    **{
        (quirk, "mistral"): "layer_types"
        for quirk in QUIRKS
        if quirk.startswith("types of layers") and "all of them with" not in quirk
    },
}


def write_config(folder: Path, name: str, changes: dict[str, Any]) -> None:
    values = {**CONFIGS[name]().to_dict(), **changes}
    kept = {key: value for key, value in values.items() if key not in changes or value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kept))


@torch.no_grad()
def make_logits(folder: Path) -> Tensor:
    """What transformers computes of the folder's config.json with random weights, which it writes there."""
    text = (folder / "config.json").read_text()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    logits: Tensor = model(some_tokens()).logits
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return logits


def refusal_of(folder: Path) -> str:
    """Why a run refuses the config, before any of its weights is read."""
    (folder / "model.safetensors").touch()
    with pytest.raises(ManifestError) as raised:
        family_of(manifest_of(folder).model).parameter_shapes(range(3))
    return str(raised.value)


@pytest.mark.parametrize("quirk", QUIRKS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_an_odd_config_are_those_of_transformers_or_it_is_refused(
    name: str, quirk: str, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    write_config(folder, name, QUIRKS[quirk])
    try:
        expected = make_logits(folder)
    except Exception:  # transformers fails in many ways at what it cannot compute
        assert "config" in refusal_of(folder)
        return
    if (quirk, name) in REFUSED or (quirk, "*") in REFUSED:
        assert f": {(REFUSED.get((quirk, name)) or REFUSED[quirk, '*'])} " in refusal_of(folder)
        return
    found = logits_of(stages_of(manifest_of(folder), folder), some_tokens())
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_list_that_a_stranger_makes_long_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    write_config(folder, "llama", {"num_labels": 10**12, "torch_dtype": "no such", "attn_implementation": "a/kernel"})
    (folder / "model.safetensors").touch()
    assert family_of(manifest_of(folder).model).parameter_count(range(3)) > 0


# What transformers reads and a forward does not depend on, beside what is inert: plans of several devices, names, other
# kinds of models.
NOT_OF_A_FORWARD = {
    *("base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan"),
    *("default_rope_type", "gradient_checkpointing", "is_heterogeneous", "name_or_path"),
    *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_a_forward_of_transformers_reads_is_compared_or_refused(name: str) -> None:
    read: set[str] = set()
    usual: Any = type(CONFIGS[name]())

    class Recorded(usual):
        def __getattribute__(self, attribute: str) -> Any:
            read.add(attribute)
            return super().__getattribute__(attribute)

    config = AutoModelForCausalLM.from_config(CONFIGS[name]()).config  # with the attention that it takes
    model_class = type(AutoModelForCausalLM.from_config(config))
    config.__class__ = Recorded
    read.clear()
    with torch.no_grad():
        model_class(config).eval()(some_tokens())
    architecture = ARCHITECTURES[usual.model_type]
    compared = architecture.keys | INERT_KEYS | READ_IF_SET.keys() | UNSUPPORTED.keys() | usual.attribute_map.keys()
    values = {each for each in read if not each.startswith("_") and not callable(getattr(usual, each, None))}
    # Only the cache of a generation reads these two where the type has no windows; layer_types are compared.
    assert values - compared - NOT_OF_A_FORWARD - {"layer_types", "sliding_window"} == set()
    assert {"vocab_size", "pad_token_id"} <= values, "what is read is recorded"
