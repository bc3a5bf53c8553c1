"""A merged model: the base model's files with LoRA's products added, which computes what the stages compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agora.model import StageModule, family_of
from agora.state.export_tensors import write_shards
from agora.tuning.adapters.lora import BLOCK_VALUES, LoraProduct, merged_tensor
from agora.tuning.base.model_files import read_header
from agora.tuning.base.store import BaseModelError
from tests.model.tiny_models import CONFIGS, logits_of, make_model, manifest_of, save, some_tokens, stages_of
from tests.tuning.test_lora_layers import LORA, relative_error, set_matrices


def merged(
    manifest: Any, base: Path, matrices: dict[str, Tensor], out: Path, dtype: Any = "float32"
) -> PreTrainedModel:
    """The merged model as transformers loads it from the folder `out`."""
    family = family_of(manifest.model)
    tensors = family.merged_tensors(base, lambda name: matrices[name].numpy())
    out.mkdir()
    write_shards(out, tensors, dtype, 20_000, lambda _: None)
    for name, content in family.merged_config_files(base, {"bf16": "bfloat16"}.get(dtype, dtype)).items():
        (out / name).write_text(json.dumps(content))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(out).eval()
    return loaded


def with_matrices(manifest: Manifest, base: Path) -> tuple[list[StageModule], dict[str, Tensor]]:
    stages = stages_of(manifest, base)
    return stages, set_matrices(stages)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_has_the_logits_of_the_stages_and_writes_text(name: str, tied: bool, tmp_path: Path) -> None:
    base, tokens = save(make_model(name, tie_word_embeddings=tied), tmp_path / "base"), some_tokens()
    manifest = manifest_of(base, 2, model={**LORA, "lora_rslora": tied})
    stages, matrices = with_matrices(manifest, base)
    model = merged(manifest, base, matrices, tmp_path / "out")
    expected = logits_of(stages, tokens)
    assert relative_error(model(tokens).logits, expected) < 1e-5
    unchanged = AutoModelForCausalLM.from_pretrained(base).eval()
    assert relative_error(unchanged(tokens).logits, expected) > 0.01
    assert model.generate(tokens[:1], max_new_tokens=4, do_sample=False).shape[1] > tokens.shape[1]
    assert model.config.tie_word_embeddings is tied
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in index) is not tied and len(set(index.values())) > 2
    assert index.keys() == {parameter for parameter, _ in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("frozen_as", ["bf16", "nf4"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_the_matrices_are_added_to_the_weights_of_the_files_whatever_stages_keep(
    name: str, frozen_as: str, tmp_path: Path
) -> None:
    base, tokens = save(make_model(name), tmp_path / "base"), some_tokens()
    exact = manifest_of(base, 2, model=LORA)
    stages, matrices = with_matrices(exact, base)
    rounded = manifest_of(base, 2, model={**LORA, "frozen_as": frozen_as})
    model = merged(rounded, base, matrices, tmp_path / "out")
    assert relative_error(model(tokens).logits, logits_of(stages, tokens)) < 1e-5


@torch.no_grad()
def test_only_layers_with_lora_change_and_bf16_files_become_float32_before_they_are_added_to(tmp_path: Path) -> None:
    base = save(make_model("llama").to(torch.bfloat16), tmp_path / "base")
    manifest = manifest_of(base, 2, model={**LORA, "lora_targets": ["v_proj"], "lora_alpha": 2.0})
    _, matrices = with_matrices(manifest, base)
    model = merged(manifest, base, matrices, tmp_path / "out")
    before = load_file(base / "model.safetensors")
    for name, parameter in model.named_parameters():
        expected = before[name].float()
        if "v_proj" in name:
            root = name.removesuffix(".weight")
            a, b = (matrices[f"{root}.lora_{side}.default.weight"] for side in "AB")
            expected = expected + 0.5 * b @ a
        torch.testing.assert_close(parameter.data, expected, rtol=1e-6, atol=1e-7)
    assert model.dtype == torch.float32


@torch.no_grad()
def test_bf16_is_the_merged_model_rounded(tmp_path: Path) -> None:
    base = save(make_model("gemma2"), tmp_path / "base")
    manifest = manifest_of(base, 1, model=LORA)
    _, matrices = with_matrices(manifest, base)
    exact = merged(manifest, base, matrices, tmp_path / "exact")
    merged(manifest, base, matrices, tmp_path / "out", dtype="bf16")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        for name, values in load_file(shard).items():
            assert torch.equal(values, exact.get_parameter(name).bfloat16()), name


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_large_matrix_is_read_in_bounded_blocks_that_are_the_same_each_time(
    is_transposed: bool, tmp_path: Path
) -> None:
    rows, columns = 3, BLOCK_VALUES // 2 + 5
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=random)
    save_file({"w": weight, "v": weight[0].clone()}, tmp_path / "f.safetensors")
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    a, b = torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
    product = LoraProduct(a.numpy, b.numpy, 0.25, is_transposed)
    stored = {tensor.name: tensor for tensor in read_header(tmp_path / "f.safetensors")}
    added = 0.25 * b @ a
    for name, product_or_none, expected in (
        ("w", product, weight + (added.T if is_transposed else added)),
        ("w", None, weight),
        ("v", None, weight[0]),
    ):
        tensor = merged_tensor("model.w", stored[name], product_or_none)
        blocks = list(tensor.read_blocks())
        assert tensor.shape == tuple(expected.shape) and max(block.size for block in blocks) <= BLOCK_VALUES
        values = torch.from_numpy(np.concatenate([block.reshape(-1) for block in blocks])).view(tensor.shape)
        torch.testing.assert_close(values, expected)
        assert all(np.array_equal(x, y) for x, y in zip(blocks, tensor.read_blocks(), strict=True))


# --- what the folder must have


def test_the_folders_own_sampling_comes_along(tmp_path: Path) -> None:
    base = save(make_model("llama"), tmp_path / "base")
    family = family_of(manifest_of(base, model=LORA).model)
    (base / "generation_config.json").unlink(missing_ok=True)
    assert list(family.merged_config_files(base, "bfloat16")) == ["config.json"]
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    files = family.merged_config_files(base, "bfloat16")
    assert files["generation_config.json"] == {"eos_token_id": [1, 2]} and files["config.json"]["dtype"] == "bfloat16"
    ends = family.merged_config_files(base, "bfloat16", (7, 2))["generation_config.json"]
    assert ends == {"eos_token_id": [7, 2, 1]}, "the turns' ends that were learnt, then the folder's own"
    (base / "generation_config.json").write_text("[1]")
    with pytest.raises(BaseModelError, match="generation_config.json is not a JSON object"):
        family.merged_config_files(base, "bfloat16")


def test_another_file_and_a_missing_one_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    base = save(make_model("llama"), tmp_path / "base", shard="20KB")
    family = family_of(manifest_of(base, model=LORA).model)
    shards = sorted(base.glob("*.safetensors"))

    def read(name: str) -> np.ndarray:
        raise AssertionError("nothing is read before the check")

    content = bytearray(shards[-1].read_bytes())
    content[-1] ^= 1
    shards[-1].write_bytes(content)
    with pytest.raises(BaseModelError, match=f"{shards[-1].name} has the SHA-256"):
        family.merged_tensors(base, read)
    shards[0].unlink()
    with pytest.raises(BaseModelError, match=f"has no {shards[0].name}"):
        family.merged_tensors(base, read)


def test_a_family_that_trains_everything_has_nothing_to_merge(tmp_path: Path) -> None:
    family = family_of(Manifest.from_values({}, "test").model)
    with pytest.raises(LookupError):
        family.merged_tensors(tmp_path, lambda name: np.zeros(1, np.float32))
    with pytest.raises(LookupError):
        family.merged_config_files(tmp_path, "float32")
