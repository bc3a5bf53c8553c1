"""LoRA in a stage: it computes and learns what peft does on the whole model, and begins the same on every peer."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from torch import Tensor, nn
from transformers import PreTrainedModel

from agora.model import StageModule, family_of
from agora.train.objectives import stage_loss
from agora.train.optimizer import learning_rate
from agora.train.weight_versions import StageWeights
from agora.tuning.adapters.frozen_layers import linear_layers
from agora.tuning.base.hf_architecture import architecture_of
from agora.tuning.base.store import BaseModelError
from tests.model.tiny_models import CONFIGS, logits_of, make_model, manifest_of, save, some_tokens, stages_of
from tests.train.support import batches_for, pipeline_of, train_step

LORA: dict[str, Any] = {"trained": "lora", "frozen_as": "float32", "lora_rank": 4, "lora_alpha": 6.0}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


@torch.no_grad()
def set_matrices(stages: list[StageModule]) -> dict[str, Tensor]:
    """Gives the B matrices values other than zero; returns all trained matrices by name."""
    trained = {name: parameter for stage in stages for name, parameter in stage.trained_parameters()}
    for number, (name, parameter) in enumerate(sorted(trained.items())):
        if ".lora_B." in name:
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


@torch.no_grad()
def with_peft(whole: PreTrainedModel, model: HfSection, matrices: dict[str, Tensor]) -> nn.Module:
    """The whole model with peft's own LoRA around it, and these matrices in it."""
    architecture = architecture_of(model)
    config = peft.LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        use_rslora=model.lora_rslora,
        target_modules=list(model.lora_targets or architecture.linears),
        fan_in_fan_out=architecture.is_transposed,
    )
    adapted: nn.Module = peft.get_peft_model(whole, config)
    ours = {f"base_model.model.{name}": values for name, values in matrices.items()}
    theirs = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        parameter.copy_(ours[name])
    return adapted


# --- what is computed


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_peft_on_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = make_model(name)
    folder, tokens = save(whole, tmp_path / "base"), some_tokens()
    targets = tokens.roll(-1, dims=1)
    manifest = manifest_of(folder, 1, model=LORA)
    adapted = with_peft(whole, manifest.model, set_matrices(stages_of(manifest, folder)))
    expected = adapted(tokens).logits
    stage_loss(expected, targets).backward()
    for count in (1, 2, 3):
        stages = stages_of(manifest_of(folder, count, model=LORA), folder)
        set_matrices(stages)
        logits = logits_of(stages, tokens)
        assert relative_error(logits, expected) < 1e-5
        stage_loss(logits, targets).backward()
        gradients = {f"base_model.model.{n}": p.grad for stage in stages for n, p in stage.trained_parameters()}
        for tensor, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                assert relative_error(gradients.pop(tensor), parameter.grad) < 1e-5, tensor
        assert not gradients
        assert all(p.grad is None for stage in stages for p in stage.parameters() if not p.requires_grad)


@pytest.mark.parametrize("is_rank_stabilised", [False, True])
def test_the_product_counts_alpha_over_r_times_or_over_its_root(is_rank_stabilised: bool, tmp_path: Path) -> None:
    whole, tokens = make_model("qwen3"), some_tokens()
    folder = save(whole, tmp_path / "base")
    manifest = manifest_of(folder, 2, model={**LORA, "lora_rslora": is_rank_stabilised, "lora_targets": ["v_proj"]})
    stages = stages_of(manifest, folder)
    matrices = set_matrices(stages)
    assert relative_error(logits_of(stages, tokens), with_peft(whole, manifest.model, matrices)(tokens).logits) < 1e-5
    scaling = 6.0 / (math.sqrt(4) if is_rank_stabilised else 4)
    merged = make_model("qwen3")
    with torch.no_grad():
        for layer in range(3):
            root = f"model.layers.{layer}.self_attn.v_proj"
            product = matrices[f"{root}.lora_B.default.weight"] @ matrices[f"{root}.lora_A.default.weight"]
            merged.get_parameter(f"{root}.weight").add_(product, alpha=scaling)
    assert relative_error(logits_of(stages, tokens), merged(tokens).logits) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_as_reference_the_logits_are_exactly_those_of_the_base_model(name: str, tmp_path: Path) -> None:
    folder, tokens = save(make_model(name), tmp_path / "base"), some_tokens()
    base = logits_of(stages_of(manifest_of(folder), folder), tokens)
    stages = stages_of(manifest_of(folder, model=LORA), folder)
    assert torch.equal(logits_of(stages, tokens), base), "B begins as zeros"
    set_matrices(stages)
    adapted = logits_of(stages, tokens)
    assert relative_error(adapted, base) > 0.01
    with stages[0].as_reference(), stages[1].as_reference():
        assert torch.equal(logits_of(stages, tokens), base)
        with stages[1].as_reference():
            pass
        assert torch.equal(logits_of(stages, tokens), base)
        assert sum(1 for _ in stages[0].trained_parameters()) > 0
    assert torch.equal(logits_of(stages, tokens), adapted)
    with pytest.raises(ZeroDivisionError), stages[0].as_reference():
        raise ZeroDivisionError
    assert torch.equal(logits_of(stages, tokens), adapted)


def test_a_model_that_is_trained_in_all_parameters_has_no_base_at_hand(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    (stage,) = stages_of(manifest_of(folder, 1), folder)
    with pytest.raises(LookupError, match="keeps no model as it began"):
        stage.as_reference()


def test_a_graph_made_before_stays_whole_while_adapters_are_off(tmp_path: Path) -> None:
    folder, tokens = save(make_model("llama"), tmp_path / "base"), some_tokens()
    (stage,) = stages_of(manifest_of(folder, 1, model=LORA), folder)
    set_matrices([stage])
    trained = [parameter for _, parameter in stage.trained_parameters()]
    expected = torch.autograd.grad(stage(tokens).sum(), trained)
    loss = stage(tokens).sum()
    with stage.as_reference(), torch.no_grad():
        stage(tokens)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, trained), expected, strict=True))


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
def test_dropout_is_that_of_train_mode_and_follows_torchs_seed(frozen_as: str, tmp_path: Path) -> None:
    folder, tokens = save(make_model("qwen2"), tmp_path / "base"), some_tokens()
    (stage,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as, "lora_dropout": 0.5}), folder)
    (plain,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as}), folder)
    for made in (stage, plain):
        set_matrices([made])
    with torch.no_grad():
        expected = plain(tokens)
        assert torch.equal(plain.eval()(tokens), expected), "beside dropout, nothing depends on the mode"
        assert torch.equal(stage.eval()(tokens), expected)
        assert torch.equal(plain.train()(tokens), expected)
        stage.train()
        drawn = []
        with torch.random.fork_rng():
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                drawn.append(stage(tokens))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], expected)


# --- what is trained


@pytest.mark.parametrize("name", CONFIGS)
def test_the_linear_layers_of_the_table_are_those_that_there_are(name: str, tmp_path: Path) -> None:
    whole = make_model(name)
    manifest = manifest_of(save(whole, tmp_path / "base"))
    architecture = architecture_of(manifest.model)
    layers = whole.get_submodule(f"{architecture.root}.{architecture.layers}")
    linear = linear_layers(layers)
    assert {n.rpartition(".")[2] for n in linear} == set(architecture.linears)
    assert {not isinstance(m, nn.Linear) for m in linear.values()} == {architecture.is_transposed}


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
@pytest.mark.parametrize("name", ["llama-biased", "gpt2"])
def test_only_the_matrices_are_trained_float32_and_counted(name: str, frozen_as: str, tmp_path: Path) -> None:
    whole = make_model(name)
    manifest = manifest_of(save(whole, tmp_path / "base"), 3, model={**LORA, "frozen_as": frozen_as})
    family, stages = family_of(manifest.model), stages_of(manifest, tmp_path / "base")
    for number, stage in enumerate(stages):
        trained = dict(stage.trained_parameters())
        assert trained and all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
        shapes = {name: tuple(p.shape) for name, p in trained.items()}
        layers = manifest.layers_of(number)
        assert family.parameter_shapes(layers) == shapes
        assert family.hidden_matrices(layers) == stage.hidden_matrices() == list(shapes)
        assert family.parameter_count(layers) == sum(p.numel() for p in trained.values())
    expected = {
        (4, m.weight.shape[0] if name == "gpt2" else m.in_features)
        for m in linear_layers(whole.get_submodule("transformer.h" if name == "gpt2" else "model.layers")).values()
    }
    shapes = family.parameter_shapes(range(3))
    assert {shape for name, shape in shapes.items() if ".lora_A." in name} == expected


def test_targets_are_the_named_layers_and_a_name_that_matches_nothing_is_one_sentence(tmp_path: Path) -> None:
    folder = save(make_model("qwen2"), tmp_path / "base")
    manifest = manifest_of(folder, model={**LORA, "lora_targets": ["q_proj", "down_proj"]})
    shapes = family_of(manifest.model).parameter_shapes(range(1, 2))
    assert list(shapes) == [
        "model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "model.layers.1.self_attn.q_proj.lora_B.default.weight",
        "model.layers.1.mlp.down_proj.lora_A.default.weight",
        "model.layers.1.mlp.down_proj.lora_B.default.weight",
    ]
    for name in ("c_attn", "lm_head", "embed_tokens"):
        manifest = manifest_of(folder, model={**LORA, "lora_targets": ["q_proj", name]})
        with pytest.raises(ManifestError, match=f"names {name}, .* are q_proj, k_proj, .*, down_proj; name some"):
            family_of(manifest.model).check_machine(folder)


# --- initial values


def initial_matrices(manifest: Manifest, folder: Path) -> dict[str, Tensor]:
    stages = stages_of(manifest, folder)
    return {name: p.detach() for stage in stages for name, p in stage.trained_parameters()}


@pytest.mark.parametrize("frozen_as", ["float32", "nf4"])
def test_initial_matrices_do_not_depend_on_the_cut_and_are_spread_as_pefts(frozen_as: str, tmp_path: Path) -> None:
    whole = make_model("mistral")
    folder, options = save(whole, tmp_path / "base"), {**LORA, "frozen_as": frozen_as, "lora_rank": 64}
    first, *others = (initial_matrices(manifest_of(folder, count, model=options), folder) for count in (1, 2, 3))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    theirs = dict(peft.get_peft_model(whole, peft.LoraConfig(r=64, target_modules=["q_proj"])).named_parameters())
    for name, values in first.items():
        if ".lora_B." in name:
            assert not values.any()
        elif "q_proj" in name:
            assert float(values.std() / theirs[f"base_model.model.{name}"].detach().std()) == pytest.approx(1, abs=0.1)
    seeded = manifest_of(folder, 1, model=options).model_copy(update={"seed": 7})
    other_seed = initial_matrices(seeded, folder)
    assert all(".lora_B." in name or not torch.equal(other_seed[name], first[name]) for name in first)


# --- as weights of a trained stage


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
def test_versions_of_the_weights_share_what_is_frozen(frozen_as: str, tmp_path: Path) -> None:
    folder, tokens = save(make_model("llama-biased"), tmp_path / "base"), some_tokens()
    (stage,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as}), folder)
    set_matrices([stage])
    expected = stage(tokens)
    weights = StageWeights(stage, torch.device("cpu"), stage.hidden_matrices())
    assert [slot.name for slot in weights.layout.slots] == [name for name, _ in stage.trained_parameters()]
    weights.begin_version()
    assert weights.previous is not None
    current, previous = weights.current.module, weights.previous.module
    assert torch.equal(current(tokens), expected) and torch.equal(previous(tokens), expected)
    frozen = {name: p for name, p in stage.named_parameters() if not p.requires_grad}
    for module in (current, previous):
        named = dict(module.named_parameters())
        assert all(named[name] is parameter for name, parameter in frozen.items())
    states = [m.quant_state for m in current.modules() if getattr(m, "quant_state", None) is not None]
    assert not states, "scales belong to the shared parameter alone, or each version would have a copy"
    weights.current.flat.zero_()
    assert relative_error(current(tokens), expected) > 0.01 and torch.equal(previous(tokens), expected)
    current(tokens).sum().backward()
    with current.as_reference():
        without = current(tokens)
    assert torch.equal(without, current(tokens)), "its matrices are zeros"


def test_a_stage_with_given_matrices_reads_the_rest_from_files(tmp_path: Path) -> None:
    folder, tokens = save(make_model("gemma3"), tmp_path / "base"), some_tokens()
    manifest = manifest_of(folder, 1, model={**LORA, "frozen_as": "nf4"})
    family, (stage,) = family_of(manifest.model), stages_of(manifest, folder)
    matrices = {name: values.numpy() for name, values in set_matrices([stage]).items()}
    loaded = family.load_stage(range(3), manifest.seed, matrices, folder)
    assert torch.equal(loaded(tokens), stage(tokens))
    assert torch.equal(copy.deepcopy(loaded)(tokens), stage(tokens))
    with pytest.raises(BaseModelError, match="--base-model DIR"):
        family.load_stage(range(3), manifest.seed, matrices)
    matrices.popitem()
    with pytest.raises(KeyError):
        family.load_stage(range(3), manifest.seed, matrices, folder)


def test_lora_is_trained_through_the_pipeline_as_by_peft(tmp_path: Path) -> None:
    whole = make_model("qwen2")
    folder = save(whole, tmp_path / "base")
    manifest = manifest_of(folder, 3, model=LORA, optimizer={"average_decay": 0.0, "clip": 0.0})
    steps = batches_for(manifest, 6)

    async def losses() -> list[float]:
        async with pipeline_of(manifest, ["0", "1", "2"], base_model=folder) as pipeline:
            return [await train_step(pipeline, step, number) for number, step in enumerate(steps)]

    trained = asyncio.run(losses())
    adapted = with_peft(whole, manifest.model, initial_matrices(manifest, folder))
    section = manifest.optimizer
    adamw = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad],
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=0.0,
    )
    expected = []
    for number, step in enumerate(steps):
        adamw.param_groups[0]["lr"] = learning_rate(number, section)
        batches = [torch.from_numpy(batch).long() for batch in step]
        loss = torch.stack([stage_loss(adapted(ids[:, :-1]).logits, ids[:, 1:]) for ids in batches]).sum()
        mean = loss / sum(ids[:, 1:].numel() for ids in batches)
        adamw.zero_grad()
        mean.backward()
        adamw.step()
        expected.append(mean.item())
    assert trained == pytest.approx(expected, rel=1e-4)
    assert trained[-1] < trained[0] - 0.1
