"""The manifest's section of a base model: what a config.json decides, what is refused, and that it bounds strangers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agora_protocol.base_config import MODEL_TYPES, canonical_config, parse_config, sizes_in
from agora_protocol.errors import ManifestError
from agora_protocol.identity import Identity
from agora_protocol.limits import MAX_CONFIG_BYTES, MAX_WEIGHT_FILES
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.manifest_model import HfSection

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
WEIGHTS = [["model-00001-of-00002.safetensors", "a" * 64], ["model-00002-of-00002.safetensors", "0" * 64]]


def manifest(config: Any = None, **changes: Any) -> Manifest:
    text = config if isinstance(config, str) else json.dumps(CONFIG if config is None else config, indent=2)
    model = {"family": "hf", "config": text, "weights": WEIGHTS, "context": 32, **changes}
    return Manifest.from_values({"model": model}, "run.toml")


def test_the_sizes_come_from_the_config_and_the_text_becomes_canonical() -> None:
    run = manifest()
    assert isinstance(run.model, HfSection)
    assert (run.model.layers, run.model.width, run.model.vocabulary) == (4, 32, 300)
    assert run.boundary_shape() == (8, 32, 32)
    assert run.model.config == canonical_config(CONFIG) and json.loads(run.model.config) == CONFIG
    assert manifest(json.dumps(CONFIG)).run_id == run.run_id


def test_it_is_written_read_signed_and_hashed_like_any_other() -> None:
    run = manifest()
    assert 'config = \'{"architectures":' in run.to_toml()
    assert Manifest.from_toml(run.to_toml()) == run
    signed = SignedManifest.sign(run, Identity.generate())
    assert SignedManifest.from_bytes(signed.to_bytes()) == signed
    assert SignedManifest.from_toml(signed.to_toml()) == signed
    other = run.with_values(model={"weights": [[WEIGHTS[0][0], "b" * 64]]})
    assert other.run_id != run.run_id


def test_gpt2_has_names_of_its_own_for_the_sizes() -> None:
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "vocab_size": 257, "n_positions": 48}
    run = manifest(config)
    assert (run.model.layers, run.model.boundary_width, run.model.vocabulary) == (3, 24, 257)
    with pytest.raises(ManifestError, match="context 49 is more than the 48 positions"):
        manifest(config, context=49)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_type_is_known(model_type: str) -> None:
    names = {"n_layer": 2, "n_embd": 8, "n_positions": 16} if model_type == "gpt2" else {}
    assert sizes_in({**CONFIG, **names, "model_type": model_type}).model_type == model_type


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "has no config, so there is no base model; write the manifest with `swarm new run.toml --base-model DIR`"),
        ("{", "config is not JSON"),
        ("[1]", "config is not a JSON object"),
        ('{"a": NaN}', "config is not JSON .NaN is not a number."),
        ("[" * 9000, "config (nests too deeply|is not JSON)"),
        ({**CONFIG, "model_type": "bert"}, "config has model_type 'bert'; a run can train llama, mistral"),
        ({**CONFIG, "model_type": ["llama"]}, "config has model_type a list; a run can train"),
        ({**CONFIG, "auto_map": {"AutoModel": "x.Y"}}, "has auto_map: the model is computed by code of its own"),
        ({**CONFIG, "quantization_config": {"bits": 4}}, "quantised; use the folder of the unquantised model"),
        ({**CONFIG, "hidden_size": None}, "config has hidden_size None, which is not a size"),
        ({**CONFIG, "num_hidden_layers": True}, "config has num_hidden_layers True, which is not a size"),
        ({**CONFIG, "vocab_size": 10**30}, "config has vocab_size a huge integer, which is not a size"),
    ],
)
def test_a_config_that_cannot_be_trained_is_one_sentence(config: Any, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as raised:
        manifest(config)
    assert str(raised.value).startswith("run.toml: [model] ") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 3}, "layers 3 is not the 4 of config; remove it"),
        ({"width": 64}, "width 64 is not the 32 of config"),
        ({"context": 65}, "context 65 is more than the 64 positions that the model knows; use context = 64"),
        ({"weights": []}, "weights names no file"),
        (
            {"weights": [["../x.safetensors", "a" * 64]]},
            "'../x.safetensors', which is not a name of a safetensors file",
        ),
        ({"weights": [["/x.safetensors", "a" * 64]]}, "which is not a name of a safetensors file"),
        (
            {"weights": [["pytorch_model.bin", "a" * 64]]},
            "'pytorch_model.bin', which is not a name of a safetensors file",
        ),
        ({"weights": [["a.safetensors", "A" * 64]]}, "which is not a SHA-256"),
        ({"weights": [["a.safetensors", "a" * 64]] * 2}, "weights names one file twice"),
        ({"weights": [["a.safetensors"]]}, "weights"),
        ({"weights": [[f"{i}.safetensors", "a" * 64] for i in range(MAX_WEIGHT_FILES + 1)]}, "at most 256 items"),
        ({"config": "x" * (MAX_CONFIG_BYTES + 1)}, "config"),
        ({"heads": 4}, "has no key 'heads'; use one of family, layers, width"),
    ],
)
def test_a_wrong_value_is_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says) as raised:
        manifest(**changes)
    assert "\n" not in str(raised.value)


def test_as_many_files_as_are_allowed_fit_into_a_manifest() -> None:
    names = [f"model-{i:05d}-of-00256.safetensors" for i in range(MAX_WEIGHT_FILES)]
    padded = {**CONFIG, "architectures": ["x" * (MAX_CONFIG_BYTES - 400)]}
    run = manifest(padded, weights=[[name, "a" * 64] for name in names])
    signed = SignedManifest.sign(run, Identity.generate())
    assert SignedManifest.from_bytes(signed.to_bytes()) == signed


def test_the_canonical_text_is_ascii_and_its_own_canonical_text() -> None:
    text = canonical_config({"b": "\u00e9\u2028", "a": [1, 0.5, None, {"d": True, "c": "'"}]})
    assert text == '{"a":[1,0.5,null,{"c":"\'","d":true}],"b":"\\u00e9\\u2028"}'
    assert canonical_config(parse_config(text)) == text
