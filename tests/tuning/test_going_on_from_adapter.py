"""A run that goes on from an adapter: it begins as peft does with it, or is refused before anything is signed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from agora_protocol.errors import LocalError, ManifestError
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agora.cli import new_command
from agora.cli.console import Failure
from agora.cli.new_command import TuningChoice, manifest_of_base_model
from agora.core.hub_files import ADAPTER_CONFIG_FILE
from agora.cost.manifest_cost import run_cost
from agora.data.tokenizer import byte_tokenizer_json
from agora.model import family_of
from agora.train.weight_versions import StageWeights
from agora.tuning.adapters.lora import matrices_by_weight
from agora.tuning.adapters.peft_folder import check_adapter, read_adapter
from agora.tuning.base.store import BaseModelError
from agora.tuning.hf_family import adapter_tensors
from tests.model.tiny_models import CONFIGS, logits_of, make_model, manifest_of, save, some_tokens, stages_of
from tests.tuning.test_lora_layers import LORA, relative_error, set_matrices

FILE = "adapter_model.safetensors"
PROJECTIONS = {"gpt2": ["c_attn"]}


def make_base(name: str, folder: Path) -> Path:
    save(make_model(name), folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


@torch.no_grad()
def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter as peft writes it, with matrices B other than zero."""
    values: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**values | options))
    for number, (name, parameter) in enumerate(adapted.named_parameters()):
        if ".lora_B." in name:
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    adapted.save_pretrained(folder)
    return folder


def begun(base: Path, adapter: Path, **choice: Any) -> Manifest:
    return manifest_of_base_model(base, "run", TuningChoice(adapter=adapter, frozen_as="float32", **choice)).manifest


def both_in_one(tmp_path: Path, base: Path, adapter: Path) -> Path:
    """A folder with the files of both, such as a peer's store is."""
    folder = tmp_path / "both"
    shutil.copytree(base, folder)
    shutil.copy(adapter / FILE, folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


# --- what a run begins as


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "lora_alpha": 2.5}, {"target_modules": "all-linear", "lora_dropout": 0.25}],
    ids=str,
)
@pytest.mark.parametrize("name", CONFIGS)
def test_step_0_has_the_logits_of_peft_with_the_adapter(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    base, tokens = make_base(name, tmp_path / "base"), some_tokens()
    targets = {"target_modules": PROJECTIONS[name]} if name in PROJECTIONS else {}
    adapter = make_adapter(base, tmp_path / "adapter", **targets | options)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    manifest = begun(base, adapter)
    stages = stages_of(manifest, both_in_one(tmp_path, base, adapter))
    logits = logits_of([stage.eval() for stage in stages], tokens)
    assert relative_error(logits, loaded(tokens).logits) < 1e-5
    with loaded.disable_adapter():
        assert relative_error(logits, loaded(tokens).logits) > 0.01
    assert isinstance(manifest.model, HfSection)
    assert manifest.model.lora_dropout == options.get("lora_dropout", 0.0)
    assert Manifest.from_toml(manifest.to_toml()) == manifest


def test_an_exported_adapter_is_gone_on_from_and_exported_again_with_what_was_learnt(tmp_path: Path) -> None:
    base = make_base("qwen3", tmp_path / "base")
    first = manifest_of(base, 2, model={**LORA, "lora_rslora": True, "lora_dropout": 0.5})
    learnt = set_matrices(stages_of(first, base))
    exported = export(first, learnt, tmp_path / "first")
    manifest = begun(base, exported)
    stages = stages_of(manifest, both_in_one(tmp_path, base, exported))
    trained = {name: p.detach().clone() for stage in stages for name, p in stage.trained_parameters()}
    assert trained.keys() == learnt.keys() and all(torch.equal(trained[name], learnt[name]) for name in learnt)
    again = export(manifest, trained, tmp_path / "second")
    assert (again / ADAPTER_CONFIG_FILE).read_text() == (exported / ADAPTER_CONFIG_FILE).read_text().replace(
        '"base_model_name_or_path": null', '"base_model_name_or_path": "base"'
    )
    assert (again / FILE).read_bytes() == (exported / FILE).read_bytes()
    assert "begun as the adapter of SHA-256" in family_of(manifest.model).describe().adapter


def export(manifest: Manifest, matrices: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir()
    family = family_of(manifest.model)
    exported = family.exported_tensors(range(3), manifest.seed)
    save_file({one.name: matrices[one.source] for one in exported}, folder / FILE, {"format": "pt"})
    for file, content in family.config_files("float32", None).items():
        (folder / file).write_text(json.dumps(content))
    return folder


def test_another_adapter_is_another_run_and_its_tensors_are_in_the_list(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    plain = manifest_of_base_model(base, "run", TuningChoice(trained="lora", frozen_as="float32")).manifest
    first = begun(base, adapter)
    second = begun(base, make_adapter(base, tmp_path / "other", lora_alpha=8))
    assert len({plain.run_id, first.run_id, second.run_id}) == 3
    assert isinstance(plain.model, HfSection) and isinstance(first.model, HfSection)
    assert plain.model.tensors_hash != first.model.tensors_hash and plain.model.files == plain.model.weights
    stage = stages_of(first, both_in_one(tmp_path, base, adapter))[0]
    a, b = matrices_by_weight(adapter_tensors(stage))["model.layers.0.self_attn.q_proj.weight"]
    assert adapter_tensors(stage)[a].shape == (4, 32) and adapter_tensors(stage)[b].shape == (32, 4)


def test_bf16_matrices_begin_as_their_float32_values(base: Path, adapter: Path, tmp_path: Path) -> None:
    rounded = {name: values.to(torch.bfloat16) for name, values in load_file(adapter / FILE).items()}
    save_file(rounded, adapter / FILE, {"format": "pt"})
    stages = stages_of(begun(base, adapter), both_in_one(tmp_path, base, adapter))
    for stage in stages:
        for name, parameter in stage.trained_parameters():
            stored = rounded[f"base_model.model.{name}".replace(".default.", ".")]
            assert parameter.dtype == torch.float32 and torch.equal(parameter, stored.float())


# --- what is refused


Change = Callable[[Path], None]


def config_with(**values: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config | values))

    return change


def tensors_with(change_tensors: Callable[[dict[str, Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        change_tensors(tensors)
        save_file(tensors, folder / FILE, {"format": "pt"})

    return change


FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Change, str]] = {
    "another kind": (config_with(peft_type="LOHA"), "peft_type is 'LOHA'.*merge it"),
    "DoRA": (config_with(use_dora=True), "use_dora = true.*merge it"),
    "biases": (config_with(bias="all"), "bias = .*merge it"),
    "modules": (config_with(modules_to_save=["lm_head"]), "modules_to_save.*merge it"),
    "ranks by layer": (config_with(rank_pattern={"q_proj": 8}), "rank_pattern.*merge it"),
    "alphas by layer": (config_with(alpha_pattern={"q_proj": 8}), "alpha_pattern.*merge it"),
    "some layers": (config_with(layers_to_transform=[0, 1]), "layers_to_transform.*merge it"),
    "tokens": (config_with(trainable_token_indices=[1]), "trainable_token_indices.*merge it"),
    "of the future": (config_with(use_something_new=3), "use_something_new = 3.*merge it"),
    "a changed base": (config_with(init_lora_weights="pissa_niter_4"), "changes the base model too"),
    "an expression": (config_with(target_modules="(a+)+q_proj"), "is not a list of names; write"),
    "the head": (config_with(target_modules=["q_proj", "lm_head"]), "inside of layers only"),
    "one layer": (config_with(target_modules=["layers.0.self_attn.q_proj"]), "leaves out model.layers.1"),
    "of GPT-2": (config_with(target_modules=["c_attn"]), "names no linear layer"),
    "fewer targets": (config_with(target_modules=["q_proj"]), "v_proj.*which is no LoRA matrix"),
    "more targets": (config_with(target_modules=["q_proj", "v_proj", "o_proj"]), "has no .*o_proj"),
    "another rank": (config_with(r=8), r"has the shape \[4, 32\], and rank and base model give it \[8, 32\]"),
    "no rank": (config_with(r="4"), "r '4' is not a rank"),
    "rank 0": (config_with(r=0), "r 0 is not a rank"),
    "a true rank": (config_with(r=True), "r True is not a rank"),
    "alpha of text": (config_with(lora_alpha="6"), "lora_alpha '6'"),
    "alpha below 0": (config_with(lora_alpha=-1), "lora_alpha -1"),
    "alpha not a number": (config_with(lora_alpha=float("nan")), "lora_alpha nan"),
    "dropout of 1": (config_with(lora_dropout=1), "lora_dropout 1"),
    "rslora of text": (config_with(use_rslora="yes"), "use_rslora 'yes'"),
    "no text": (lambda folder: (folder / ADAPTER_CONFIG_FILE).write_bytes(b"\xff\xfe"), "Cannot read"),
    "no JSON": (
        lambda folder: (folder / ADAPTER_CONFIG_FILE).write_text("[" * 100_000) and None,
        "is not a JSON object",
    ),
    "a list": (lambda folder: (folder / ADAPTER_CONFIG_FILE).write_text("[]") and None, "is not a JSON object"),
    "endless": (lambda folder: (folder / ADAPTER_CONFIG_FILE).write_text(" " * 10**6) and None, "has more than"),
    "no config": (
        lambda folder: (folder / ADAPTER_CONFIG_FILE).unlink(),
        "no adapter_config.json, so it is no adapter",
    ),
    "no matrices": (lambda folder: (folder / FILE).unlink(), "has no adapter_model.safetensors; load"),
    "pickled": (
        lambda folder: (folder / FILE).rename(folder / "adapter_model.bin") and None,
        "only adapter_model.bin, which is pickled; load",
    ),
    "a pointer": (
        lambda folder: (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\n") and None,
        "git-lfs",
    ),
    "torn": (lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1]) and None, "safetensors"),
    "a huge header": (
        lambda folder: (folder / FILE).write_bytes((2**62).to_bytes(8, "little") + b"{}") and None,
        "longer than the file",
    ),
    "a tensor less": (tensors_with(lambda tensors: tensors.pop(FIRST_A)), "has no .*layers.0.self_attn.q_proj.lora_A"),
    "a tensor more": (tensors_with(lambda tensors: tensors.update({"x": torch.zeros(1)})), "has x, which is no LoRA"),
    "float64": (tensors_with(lambda tensors: tensors.update({FIRST_A: tensors[FIRST_A].double()})), "neither F32"),
    "not finite": (tensors_with(lambda tensors: tensors[FIRST_A].fill_(float("inf"))), "not finite"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=list(REFUSED))
def test_an_adapter_that_does_not_fit_is_refused_by_new_with_what_to_do(
    change: Change, words: str, base: Path, adapter: Path
) -> None:
    begun(base, adapter)
    change(adapter)
    with pytest.raises(BaseModelError, match=words) as refused:
        begun(base, adapter)
    assert str(refused.value).count("\n") == 0 and ";" in str(refused.value)


def test_an_adapter_of_another_base_model_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    wide = save(make_model("qwen3"), tmp_path / "wide")
    shutil.copy(base / "tokenizer.json", wide)
    with pytest.raises(BaseModelError, match="name the base model that the adapter was made for: --base-model DIR"):
        begun(wide, adapter)
    model = manifest_of(base, model={"base_name": f"org/base@{'a' * 40}"}).model
    assert isinstance(model, HfSection)
    for changes, fits in (
        ({"base_model_name_or_path": "org/base", "revision": None}, True),
        ({"base_model_name_or_path": "Org/Base", "revision": "main"}, True),
        ({"base_model_name_or_path": "/home/ann/base"}, True),
        ({"base_model_name_or_path": "./base"}, True),
        ({"base_model_name_or_path": None}, True),
        ({"base_model_name_or_path": "org/other"}, False),
        ({"base_model_name_or_path": "org/base", "revision": "b" * 40}, False),
    ):
        config_with(**changes)(adapter)
        if fits:
            assert read_adapter(adapter, model).base_name == (changes["base_model_name_or_path"] or "")
        else:
            with pytest.raises(BaseModelError, match=r"was made for org/.*, not for org/base@a"):
                read_adapter(adapter, model)


def test_what_an_adapter_cannot_be_gone_on_with_is_said_by_its_flag(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="leave --train all out"):
        manifest_of_base_model(base, "run", TuningChoice(adapter=adapter, trained="all"))
    with pytest.raises(BaseModelError, match="is not a folder; name"):
        begun(base, tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter_hash": "0"}, "which is not a SHA-256"),
        ({"trained": "all"}, 'use trained = "lora"'),
        ({"tensors_hash": ""}, "needs a tensors_hash"),
        ({"weights": [["adapter_model.safetensors", "a" * 64]]}, "names one file twice"),
    ],
)
def test_a_manifest_that_no_peer_could_follow_is_refused(
    changes: dict[str, Any], words: str, base: Path, adapter: Path
) -> None:
    with pytest.raises(ManifestError, match=words):
        begun(base, adapter).with_values(model=changes)


# --- the reference of dpo is the model as it began: with the adapter


def pairs_in(folder: Path) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "p ", "chosen": "good", "rejected": "bad"}) + "\n")
    return file


def test_new_says_that_dpo_compares_with_the_adapter(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for choice, is_said in (
        (TuningChoice(adapter=adapter, data=(pairs_in(tmp_path),)), True),
        (TuningChoice(data=(pairs_in(tmp_path),)), False),
        (TuningChoice(adapter=adapter), False),
    ):
        new_command.run(tmp_path / f"{is_said}{len(choice.data)}.toml", None, base, None, choice)
        assert ("reference    the base model with this adapter" in capsys.readouterr().err) == is_said
        (tmp_path / f"{is_said}{len(choice.data)}.toml").unlink()


@torch.no_grad()
@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_reference_stays_the_model_with_the_adapter_whatever_is_learnt(
    name: str, frozen_as: str, tmp_path: Path
) -> None:
    base, tokens = make_base(name, tmp_path / "base"), some_tokens()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=PROJECTIONS.get(name, ["q_proj", "v_proj"]))
    choice = TuningChoice(adapter=adapter, frozen_as=frozen_as, data=(pairs_in(tmp_path),))
    manifest = manifest_of_base_model(base, "run", choice).manifest
    assert manifest.objective.kind == "dpo"
    stages = stages_of(manifest, both_in_one(tmp_path, base, adapter))
    begun_as = logits_of(stages, tokens)
    for stage in stages:
        stage.keep_reference()
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    # As the trainer does, which computes on versions that share what does not change.
    versions = [StageWeights(stage, torch.device("cpu")) for stage in stages]
    modules = [weights.twin().current.module for weights in versions]
    trained = [parameter for stage in stages for _, parameter in stage.trained_parameters()]
    for module in modules:
        for _, parameter in module.trained_parameters():
            parameter.add_(0.1)
    learnt = logits_of(modules, tokens)
    assert relative_error(learnt, begun_as) > 0.01
    with modules[0].as_reference(), modules[1].as_reference():
        assert torch.equal(logits_of(modules, tokens), begun_as)
    assert torch.equal(logits_of(modules, tokens), learnt)
    with pytest.raises(ZeroDivisionError), modules[0].as_reference():
        raise ZeroDivisionError
    assert torch.equal(logits_of(modules, tokens), learnt)
    # What is kept is neither trained, averaged, checkpointed nor exported.
    assert [[name for name, _ in stage.named_parameters()] for stage in stages] == names
    assert all(a is b for a, b in zip(trained, (p for s in stages for _, p in s.trained_parameters()), strict=True))


def test_a_graph_made_before_stays_whole_beside_the_reference(base: Path, adapter: Path, tmp_path: Path) -> None:
    tokens = some_tokens()
    stages = stages_of(begun(base, adapter), both_in_one(tmp_path, base, adapter))
    for stage in stages:
        stage.keep_reference()
    trained = [parameter for stage in stages for _, parameter in stage.trained_parameters()]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1)
    expected = torch.autograd.grad(logits_of(stages, tokens).sum(), trained)
    loss = logits_of(stages, tokens).sum()
    with stages[0].as_reference(), stages[1].as_reference(), torch.no_grad():
        logits_of(stages, tokens)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, trained), expected, strict=True))


def test_only_dpo_that_begins_with_an_adapter_counts_the_kept_copy(base: Path, adapter: Path, tmp_path: Path) -> None:
    pairs = pairs_in(tmp_path)
    manifests = [
        manifest_of_base_model(base, "run", TuningChoice(adapter=named, frozen_as="float32", data=(pairs,))).manifest
        for named in (adapter, None)
    ]
    same_sizes = {"lora_rank": 4, "lora_targets": ["q_proj", "v_proj"]}
    manifests[1] = manifests[1].with_values(model=same_sizes)
    ours, plain = (run_cost(manifest).stages[0] for manifest in manifests)
    assert ours.trained_bytes - plain.trained_bytes == 4 * ours.trained_values == 4 * plain.trained_values


@pytest.mark.parametrize(
    "changes",
    [{"lora_alpha": 7.0}, {"lora_rslora": True}, {"lora_dropout": 0.1}, {"lora_targets": ["q_proj"]}],
    ids=str,
)
def test_a_founder_whose_manifest_was_edited_away_from_the_adapter_signs_nothing(
    changes: dict[str, Any], base: Path, adapter: Path
) -> None:
    manifest = begun(base, adapter)
    assert isinstance(manifest.model, HfSection)
    check_adapter(manifest.model, adapter)
    (key,) = changes
    edited = manifest.with_values(model=changes).model
    assert isinstance(edited, HfSection)
    with pytest.raises(BaseModelError, match=rf"\[model\] {key} is .* .swarm new --adapter"):
        check_adapter(edited, adapter)


def test_an_adapter_that_has_changed_since_is_not_the_runs(base: Path, adapter: Path) -> None:
    manifest = begun(base, adapter)
    assert isinstance(manifest.model, HfSection)
    tensors_with(lambda tensors: tensors[FIRST_A].add_(1))(adapter)
    with pytest.raises(LocalError, match=r"has the SHA-256 .*leave --adapter out: peers give it"):
        check_adapter(manifest.model, adapter)
    plain = manifest_of(base, model=LORA).model
    assert isinstance(plain, HfSection)
    with pytest.raises(LocalError, match="this run begins with no adapter; leave it out, or write"):
        check_adapter(plain, adapter)
