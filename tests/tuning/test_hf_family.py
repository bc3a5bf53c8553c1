"""A Hugging Face decoder cut into stages computes what transformers computes whole, learns, and exports again."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.errors import ManifestError, OutOfMemory
from agora_protocol.identity import Identity
from agora_protocol.ids import Span
from agora_protocol.manifest import SignedManifest
from torch import Tensor
from transformers import AutoModelForCausalLM

from agora.cli import export_command
from agora.model import family_of
from agora.node import paths, run_files
from agora.node.limits.memory import MemoryBudget, check_memory
from agora.state.checkpoint import write_checkpoint
from agora.state.layout import StageState
from agora.train.objectives import stage_loss
from agora.train.optimizer import learning_rate, with_moments
from agora.train.weight_versions import StageWeights
from agora.tuning.base.hf_architecture import ARCHITECTURES
from tests.model.tiny_models import (
    CONFIGS,
    hashes,
    logits_of,
    make_model,
    manifest_of,
    save,
    some_tokens,
    stages_of,
)
from tests.train.support import batches_for, pipeline_of, train_step


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


# --- what is computed


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_the_whole_model_however_it_is_cut(
    name: str, is_tied: bool, tmp_path: Path
) -> None:
    whole = make_model(name, tie_word_embeddings=is_tied)
    folder, tokens = save(whole, tmp_path / "base"), some_tokens()
    targets = tokens.roll(-1, dims=1)
    expected = whole(tokens).logits
    stage_loss(expected, targets).backward()
    assert expected.std() > 0.1, "logits that hardly differ would show nothing"
    for count in (1, 2, 3):
        stages = stages_of(manifest_of(folder, count), folder)
        logits = logits_of(stages, tokens)
        assert relative_error(logits, expected) < 1e-5
        stage_loss(logits, targets).backward()
        gradients = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
        for tensor, parameter in whole.named_parameters():
            gradient = gradients.pop(tensor)
            if is_tied and parameter is whole.get_input_embeddings().weight:
                gradient = gradient + gradients.pop("lm_head.weight")
            assert relative_error(gradient, parameter.grad) < 1e-5, tensor
        assert not gradients


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_products_change_the_logits_by_rounding_only(name: str, tmp_path: Path) -> None:
    whole, tokens = make_model(name), some_tokens()
    stages = stages_of(manifest_of(save(whole, tmp_path / "base")), tmp_path / "base")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(logits_of(stages, tokens).float(), whole(tokens).logits.float()) < 0.05


def test_a_negative_token_is_read_as_0_and_a_copied_stage_computes_the_same(tmp_path: Path) -> None:
    manifest = manifest_of(save(make_model("gemma2"), tmp_path / "base"))
    stages, tokens = stages_of(manifest, tmp_path / "base"), some_tokens()
    marked = tokens.clone()
    tokens[:, 7], marked[:, 7] = 0, -1
    logits = logits_of(stages, tokens)
    assert torch.equal(logits_of(stages, marked), logits)
    assert torch.equal(logits_of([copy.deepcopy(stage) for stage in stages], tokens), logits)


def test_the_keys_of_older_configs_are_understood(tmp_path: Path) -> None:
    folder, tokens = save(make_model("llama-biased"), tmp_path / "base"), some_tokens()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": "float32"}
    path.write_text(json.dumps(config))
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert relative_error(logits_of(stages_of(manifest_of(folder), folder), tokens), expected) < 1e-5


def test_dropout_is_off_and_other_keys_of_a_config_reach_nothing(tmp_path: Path) -> None:
    folder, tokens = save(make_model("gpt2"), tmp_path / "base"), some_tokens()
    path = folder / "config.json"
    strange = {"attn_pdrop": 0.9, "resid_pdrop": 0.9, "embd_pdrop": 0.9, "attn_implementation": "strangers/kernel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **strange, "_attn_implementation": "eager", "x": 1}))
    stages = stages_of(manifest_of(folder), folder)
    assert all(stage.training for stage in stages)
    logits = logits_of(stages, tokens)
    assert torch.equal(logits, logits_of(stages, tokens))
    assert relative_error(logits, make_model("gpt2")(tokens).logits) < 1e-5


def test_every_architecture_is_tried_here() -> None:
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(ARCHITECTURES)


# --- what the product asks of a family


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_known_without_files_and_hidden_matrices_are_those_inside_layers(name: str, tmp_path: Path) -> None:
    whole = make_model(name, tie_word_embeddings=False)
    manifest = manifest_of(save(whole, tmp_path / "base"), 3)
    family = family_of(manifest.model)
    stages = [family.parameter_shapes(manifest.layers_of(k)) for k in range(3)]
    assert {n: s for stage in stages for n, s in stage.items()} == {
        n: tuple(p.shape) for n, p in whole.named_parameters()
    }
    assert family.parameter_count(range(3)) == sum(p.numel() for p in whole.parameters())
    hidden = family.hidden_matrices(range(3))
    inside = [n for n, p in whole.named_parameters() if p.ndim == 2 and (".layers." in n or ".h." in n)]
    assert hidden == inside and len(hidden) >= 12


def test_a_machine_without_the_memory_of_a_span_is_told(tmp_path: Path) -> None:
    manifest = manifest_of(save(make_model("llama"), tmp_path / "base"))
    with pytest.raises(OutOfMemory, match="hold fewer stages"):
        check_memory(manifest, Span(0, 1), MemoryBudget(2**20))


def test_a_config_that_transformers_refuses_is_one_sentence(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    path, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    changes: list[dict[str, Any]] = [
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"hidden_act": "no such"},
        {"rope_parameters": {"rope_type": "no such"}},
        {"pad_token_id": 300},
    ]
    for change in changes:
        path.write_text(json.dumps({**config, **change}))
        family = family_of(manifest_of(folder).model)
        with pytest.raises(ManifestError, match="config is not one that transformers can build") as raised:
            family.parameter_shapes(range(1))
        assert "\n" not in str(raised.value)


# --- training and export


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_base_model_is_trained_through_the_pipeline_as_by_transformers(name: str, tmp_path: Path) -> None:
    whole = make_model(name, tie_word_embeddings=False)
    folder = save(whole, tmp_path / "base")
    manifest = manifest_of(folder, 3, optimizer={"average_decay": 0.0, "clip": 0.0})
    steps = batches_for(manifest, 6)

    async def losses() -> list[float]:
        async with pipeline_of(manifest, ["0", "1", "2"], base_model=folder) as pipeline:
            return [await train_step(pipeline, step, number) for number, step in enumerate(steps)]

    section = manifest.optimizer
    adamw = torch.optim.AdamW(
        whole.parameters(), betas=(section.beta1, section.beta2), eps=section.epsilon, weight_decay=0.0
    )
    expected = []
    for number, step in enumerate(steps):
        adamw.param_groups[0]["lr"] = learning_rate(number, section)
        batches = [torch.from_numpy(batch).long() for batch in step]
        loss = torch.stack([stage_loss(whole(ids[:, :-1]).logits, ids[:, 1:]) for ids in batches]).sum()
        mean = loss / sum(ids[:, 1:].numel() for ids in batches)
        adamw.zero_grad()
        mean.backward()
        adamw.step()
        expected.append(mean.item())
    trained = asyncio.run(losses())
    assert trained == pytest.approx(expected, rel=1e-4)
    assert trained[-1] < trained[0] - 0.5


@pytest.mark.parametrize(("name", "is_tied"), [("gemma", True), ("gpt2", True), ("gemma3", True), ("mistral", False)])
def test_the_export_is_a_folder_that_transformers_loads_and_that_another_run_may_begin_with(
    name: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    base = save(make_model(name, tie_word_embeddings=is_tied), tmp_path / "base")
    manifest = manifest_of(base)
    signed, home = SignedManifest.sign(manifest, Identity.generate()), paths.home_at()
    run_files.remember_manifest(home, signed)
    stages = stages_of(manifest, base)
    for number, stage in enumerate(stages):
        with torch.no_grad():
            for seed, parameter in enumerate(stage.parameters()):  # head and embedding are apart afterwards
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.add_(noise, alpha=0.01)
        layout = with_moments(manifest.optimizer, StageWeights(stage, torch.device("cpu")).layout)
        flat = layout.flatten({n: p.detach().numpy() for n, p in stage.named_parameters()})
        arrays = {moment.name: layout.flatten(layout.views(flat)) for moment in layout.moments}
        state = StageState(number, 5, 5, 0, layout, flat, arrays)
        write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=1)
    out, tokens = tmp_path / "out", some_tokens()
    export_command.run("run", out, as_json=True, shard_size="30KB")
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    expected = logits_of(stages, tokens)
    assert relative_error(loaded(tokens).logits, expected) < 1e-5
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
    changed = {"dtype": "float32", "torch_dtype": "float32", "tie_word_embeddings": False}
    assert config == {**original, **changed}
    card = (out / "README.md").read_text()
    assert "trained further from a model that others had trained" in card and "trained from nothing" not in card
    again = manifest_of(out)
    assert len(hashes(out)) > 2
    assert torch.equal(logits_of(stages_of(again, out), tokens), expected)
