"""The files of an adapter: peft loads them over the base model and computes what the swarm's stages compute."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import ManifestError
from peft import PeftConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agora.core.hub_files import ADAPTER_CONFIG_FILE
from agora.model import family_of
from agora.state.model_card import ExportDescription, model_card
from agora.tuning.adapters.lora import adapter_config, adapter_tensor_name
from tests.model.tiny_models import CONFIGS, logits_of, make_model, manifest_of, save, some_tokens, stages_of
from tests.tuning.test_lora_layers import LORA, relative_error, set_matrices


@pytest.mark.parametrize("options", [{}, {"lora_rslora": True, "lora_alpha": 2.5, "lora_dropout": 0.25}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_what_is_exported_and_has_the_logits_of_the_stages(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, tokens = save(make_model(name), tmp_path / "base"), some_tokens()
    manifest = manifest_of(folder, 2, model={**LORA, **options})
    family, stages = family_of(manifest.model), stages_of(manifest, folder)
    matrices = set_matrices(stages)
    exported = {
        tensor.name: matrices[tensor.source]
        for stage in range(2)
        for tensor in family.exported_tensors(manifest.layers_of(stage), manifest.seed)
    }
    assert len(exported) == len(matrices)
    out = tmp_path / "adapter"
    out.mkdir()
    save_file(exported, out / "adapter_model.safetensors", {"format": "pt"})
    for file, content in family.config_files("float32", None).items():
        (out / file).write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="peft")
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    expected = logits_of([stage.eval() for stage in stages], tokens)
    assert relative_error(loaded(tokens).logits, expected) < 1e-5
    with loaded.disable_adapter():
        assert relative_error(loaded(tokens).logits, expected) > 0.01
    config = PeftConfig.from_pretrained(out)
    assert (config.r, config.lora_alpha) == (4, options.get("lora_alpha", 6)) and config.bias == "none"


def test_every_exported_shape_is_that_of_the_stage(tmp_path: Path) -> None:
    manifest = manifest_of(save(make_model("gpt2"), tmp_path / "base"), model={**LORA, "frozen_as": "nf4"})
    family = family_of(manifest.model)
    for tensor in family.exported_tensors(range(3), 0):
        assert tensor.shape == family.parameter_shapes(range(3))[tensor.source] and tensor.convert is None


def test_names_are_those_of_peft_and_the_config_has_what_the_manifest_says(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert adapter_tensor_name(name) == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    folder = save(make_model("llama"), tmp_path / "base")
    config = adapter_config(manifest_of(folder, model={**LORA, "lora_targets": ["v_proj", "q_proj"]}).model)
    assert config["target_modules"] == ["q_proj", "v_proj"] and config["lora_alpha"] == 6
    assert config["base_model_name_or_path"] is None and config["peft_type"] == "LORA"
    with pytest.raises(ManifestError, match="names c_fc"):
        adapter_config(manifest_of(folder, model={**LORA, "lora_targets": ["c_fc"]}).model)


@pytest.mark.parametrize(
    ("base_name", "named", "revision"),
    [
        ("Qwen/Qwen3-0.6B@c1899de", "Qwen/Qwen3-0.6B", "c1899de"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("my base@2", "my base@2", None),
        ("", None, None),
    ],
)
def test_the_adapter_and_its_card_name_the_base_model(
    base_name: str, named: str | None, revision: str | None, tmp_path: Path
) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    manifest = manifest_of(folder, model={**LORA, "base_name": base_name})
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter_config(manifest.model)))
    config = PeftConfig.from_pretrained(tmp_path)
    assert (config.base_model_name_or_path, config.revision) == (named, revision)
    described = family_of(manifest.model).describe()
    exported = ExportDescription(1, "float32", "a test", average=False, kind="adapter")
    card = model_card(manifest, described, {0: 1}, exported)
    loaded = f'"{named or "BASE-MODEL"}"' + (f', revision="{revision}"' if revision else "")
    assert f"AutoModelForCausalLM.from_pretrained({loaded})" in card
    assert ("\nbase_model: Qwen/Qwen3-0.6B\n" in card.split("---")[1]) == base_name.startswith("Qwen/")


@pytest.mark.parametrize(
    "base_name", ["/home/founder/base", "../base", "..", "a/b/c", "a\nb", "a\\b", "\u202ea", "a" * 256, "org/"]
)
def test_a_base_models_name_is_no_path_and_can_be_shown(base_name: str, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    with pytest.raises(ManifestError, match="base_name"):
        manifest_of(folder, model={"base_name": base_name})


def test_a_run_that_trains_all_parameters_exports_a_model_and_no_adapter(tmp_path: Path) -> None:
    family = family_of(manifest_of(save(make_model("llama"), tmp_path / "base")).model)
    assert list(family.config_files("float32", None)) == ["config.json"]
    assert all(tensor.name == tensor.source for tensor in family.exported_tensors(range(3), 0))
