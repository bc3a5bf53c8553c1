"""`swarm export` of a run that trains LoRA: the adapter for peft, and with --merge the whole model."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.errors import DataError, DiskError
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from agora.cli import console, export_command
from agora.cli.console import Failure
from agora.cli.main_swarm import app
from agora.model import StageModule
from agora.node import paths, run_files, runs
from agora.node.settings import SettingsError
from agora.state.checkpoint import write_checkpoint
from agora.state.export_tensors import ExportError
from agora.state.files import replace_tensors
from agora.state.layout import StageState
from agora.train.stage import stage_layout
from agora.tuning.base.store import BaseModelError
from agora.tuning.chat.model_tokenizer import open_training_tokenizer
from tests.cli.test_export import Answer, daemon
from tests.model.tiny_models import DECODER, logits_of, manifest_of, save, some_tokens, stages_of
from tests.tuning.chat_folders import CHATML, write_folder
from tests.tuning.test_lora_layers import LORA, relative_error

STEPS = (5, 7)
SFT = {"kind": "sft"}
DPO = {"kind": "dpo", "preference_loss": "ipo", "beta": 0.3}


@dataclass
class Tuned:
    """A run of two stages that has trained: its data directory, its base model, and its stages as they are now."""

    home: paths.Home
    base: Path
    signed: SignedManifest
    stages: list[StageModule]

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return logits_of([stage.eval() for stage in self.stages], some_tokens())


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder: a Llama with tied embeddings, its tokenizer and its chat template."""
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.delenv("AGORA_BASE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "base", CHATML)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(**{**DECODER, "vocab_size": 400}, tie_word_embeddings=True, eos_token_id=2)
        return save(AutoModelForCausalLM.from_config(config), folder)


def train(base: Path, model: dict[str, Any] = LORA, **sections: dict[str, Any]) -> Tuned:
    """Writes checkpoints of two stages whose averaged matrices are far from zero, and the last ones twice those."""
    data, objective = {"tokenizer": str(base / "tokenizer.json")}, sections.get("objective", SFT)
    data |= {"samples": "chats.jsonl"} if objective["kind"] != "lm" else {}
    sections = {**sections, "objective": objective, "data": {**data, **sections.get("data", {})}}
    signed = SignedManifest.sign(manifest_of(base, 2, model=model, **sections), Identity.generate())
    home, stages = paths.home_at(), stages_of(signed.manifest, base)
    run_files.remember_manifest(home, signed)
    for number, stage in enumerate(stages):
        random, layout = np.random.default_rng(number), stage_layout(signed.manifest, number)
        for _, parameter in stage.trained_parameters():
            parameter.data = torch.from_numpy(random.normal(0, 0.2, tuple(parameter.shape)).astype("f4"))
        flat = layout.flatten({name: p.detach().numpy() for name, p in stage.trained_parameters()})
        moments = {moment.name: flat if moment.name == "average" else 0 * flat for moment in layout.moments}
        state = StageState(number, STEPS[number], 5, 0, layout, 2 * flat, moments)
        write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=1)
    return Tuned(home, base, signed, stages)


@pytest.fixture
def tuned(base: Path) -> Tuned:
    return train(base)


def run(tuned: Tuned, out: str, **options: Any) -> int:
    return export_command.run(tuned.signed.run_id, Path(out), **{"as_json": True, **options})


# --- the adapter


@pytest.mark.parametrize("known", ["base_model", "tokenizer"])
def test_what_a_daemon_has_noted_is_enough_whichever_stages_it_held(
    base: Path, tmp_path: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = train(base, data={"tokenizer": "tokenizer.json"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert not (elsewhere / "tokenizer.json").exists()
    with pytest.raises(DiskError, match="AGORA_BASE_MODEL"):
        run(tuned, "out")
    (elsewhere / "tokenizer.json").write_text("that of another project")
    noted = {"base_model": base, "tokenizer": base / "tokenizer.json"}
    run_files.remember_files(tuned.home, tuned.signed.run_id, run_files.KnownFiles(**{known: noted[known]}))
    assert run(tuned, "out") == console.EXIT_DONE
    assert Path("out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_an_adapter_alone_is_no_model_for_llama_cpp_and_a_merged_one_is(tuned: Tuned) -> None:
    with pytest.raises(Failure, match="--gguf writes a whole model; give --merge"):
        run(tuned, "out", gguf=True)
    assert run(tuned, "out", gguf=True, merge=True, base_model=tuned.base) == console.EXIT_DONE
    loaded = AutoModelForCausalLM.from_pretrained("out", gguf_file="model.gguf")
    assert relative_error(loaded(some_tokens()).logits, tuned.logits()) < 1e-5


def test_a_merge_needs_no_flag_where_a_daemon_has_noted_the_base_model(tuned: Tuned) -> None:
    with pytest.raises(console.Failure, match="--base-model DIR"):
        run(tuned, "out", merge=True)
    run_files.remember_files(tuned.home, tuned.signed.run_id, run_files.KnownFiles(base_model=tuned.base))
    assert run(tuned, "out", merge=True) == console.EXIT_DONE
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert relative_error(loaded(some_tokens()).logits, tuned.logits()) < 1e-5


def test_peft_computes_what_the_swarm_computes(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tuned, "out") == console.EXIT_DONE
    output = json.loads(capsys.readouterr().out)
    base = AutoModelForCausalLM.from_pretrained(tuned.base)
    assert relative_error(base(some_tokens()).logits, tuned.logits()) > 0.01
    loaded = PeftModel.from_pretrained(base, "out").eval()
    assert relative_error(loaded(some_tokens()).logits, tuned.logits()) < 1e-5
    assert output["kind"] == "adapter" and output["stages"] == [{"stage": 0, "step": 5}, {"stage": 1, "step": 7}]
    assert output["parameters"] == sum(p.numel() for stage in tuned.stages for _, p in stage.trained_parameters())


def test_the_folder_has_what_peft_reads_and_says_where_it_comes_from(tuned: Tuned) -> None:
    run(tuned, "out")
    listed = json.loads(Path("out/export.json").read_text())
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    weights = {"adapter_config.json", "adapter_model.safetensors"}
    assert listed["files"].keys() == tokenizer | weights | {"README.md", "run.toml"} and listed["kind"] == "adapter"
    assert {path.name for path in Path("out").iterdir()} == {*listed["files"], "export.json"}
    for name, file in listed["files"].items():
        content = Path("out", name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
    assert all(Path("out", name).read_bytes() == (tuned.base / name).read_bytes() for name in tokenizer)
    assert runs.from_file(Path("out/run.toml"), tuned.home).signed == tuned.signed


def test_a_folder_whose_tokenizer_is_not_the_runs_is_not_exported(base: Path) -> None:
    right = open_training_tokenizer(str(base), 400).fingerprint
    tuned = train(base, data={"tokenizer": str(base), "tokenizer_hash": right})
    assert run(tuned, "out") == console.EXIT_DONE
    assert Path("out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    (base / "chat_template.jinja").write_text("another")
    with pytest.raises(DataError, match="but the run was made with"):
        run(tuned, "other")
    assert not Path("other").exists()


def test_an_adapter_is_one_file_whatever_the_size_of_shards(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    run(tuned, "out", shard_size="1KB", dtype="bf16")
    shown = capsys.readouterr()
    assert "--shard-size has no effect" in shown.err
    assert [path.name for path in Path("out").glob("*.safetensors*")] == ["adapter_model.safetensors"]
    assert (
        json.loads(shown.out)["files"]["adapter_model.safetensors"] < 2.2 * json.loads(shown.out)["parameters"] + 9000
    )


def test_without_the_average_it_is_the_matrices_of_the_last_step(tuned: Tuned) -> None:
    for average in (True, False):
        run(tuned, f"out-{average}", average=average)
    ours, last = (load_file(f"out-{average}/adapter_model.safetensors") for average in (True, False))
    assert ours.keys() == last.keys() and all(np.array_equal(2 * ours[name], last[name]) for name in ours)


def code_of(card: str) -> str:
    """The Python code in a model card."""
    return re.search(r"```python\n(.*?)```", card, re.S)[1]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("objective", ["lm", "sft"])
def test_the_code_on_the_card_works(base: Path, objective: str, merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = train(base, objective={"kind": objective})
    run(tuned, "out", merge=merge, base_model=base if merge else None)
    code = code_of(Path("out/README.md").read_text()).replace("BASE-MODEL", str(base)).replace("=100", "=4")
    assert ("PeftModel" in code) is not merge and ("apply_chat_template" in code) is (objective == "sft")
    monkeypatch.chdir("out")
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue().startswith("<|im_start|>user\nHello<|im_end|>" if objective == "sft" else "The")


def test_the_card_says_what_it_is_what_was_learnt_and_beside_which_weights(base: Path) -> None:
    options = {**LORA, "frozen_as": "nf4", "lora_targets": ["v_proj", "q_proj"], "lora_rslora": True}
    columns = [["prompt", "question"], ["chosen", "better|best"]]
    tuned = train(base, options, objective=DPO, data={"samples": "pairs.jsonl", "columns": columns})
    run(tuned, "out")
    card = Path("out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "- lora\n" in card
    for text in (
        "A LoRA adapter of 1,344 parameters for a Llama decoder",
        "| adapter | LoRA of rank 4, scale 6 / sqrt(rank), dropout 0, in q_proj, v_proj |",
        "| base model while training | nf4 |",
        "| objective | dpo: which of two answers is preferred (ipo loss, beta 0.3) |",
        "| data | pairs.jsonl (prompt from question, chosen from better\\|best) |",
        "stage 0: 5, stage 1: 7",
        "trained beside weights kept as nf4",
        tuned.signed.run_id,
    ):
        assert text in card, text


def collecting(tuned: Tuned, folder: Path) -> Callable[[bool], Any]:
    """A daemon's answer to `collect`: files with the present matrices."""

    async def collect(average: bool) -> Answer:
        for number, stage in enumerate(tuned.stages):
            about = {"run": tuned.signed.run_id, "stage": str(number), "step": "60"}
            tensors = {name: p.detach().numpy() for name, p in stage.trained_parameters()}
            replace_tensors(folder / f"{number}.safetensors", tensors, about)
        files = {str(number): str(folder / f"{number}.safetensors") for number in range(2)}
        return {"files": files, "steps": {"0": 60, "1": 60}}

    return collect


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"loss": 1.23456, "tuning": {"token_accuracy": 0.5}}, ["training loss", "1.235", "token_accuracy", "0.5"]),
        ({"loss": None, "tuning": {}}, []),
        ({"loss": "much"}, []),
        (None, []),
    ],
    ids=["both", "neither", "odd", "none"],
)
def test_a_daemon_tells_the_metrics_for_the_card(
    tuned: Tuned, tmp_path: Path, status: Answer | None, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer() -> Answer:
        assert status is not None
        return status

    others = {} if status is None else {"status": answer}
    with daemon(tuned.home, tuned.signed, collecting(tuned, tmp_path / "collected"), others):
        run(tuned, "out")
    assert json.loads(capsys.readouterr().out)["from"] == "daemon"
    rows = [line for line in Path("out/README.md").read_text().splitlines() if "when the stages were collected" in line]
    assert len(rows) == len(expected) // 2 and all(text in "".join(rows) for text in expected)


# --- merged


@torch.no_grad()
def test_merged_it_is_the_swarms_model_with_a_tied_head(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tuned, "out", merge=True, base_model=tuned.base, shard_size="20KB") == console.EXIT_DONE
    output = json.loads(capsys.readouterr().out)
    shards = [name for name in output["files"] if name.endswith(".safetensors")]
    assert output["kind"] == "merged" and len(shards) > 3 and "model.safetensors.index.json" in output["files"]
    model = AutoModelForCausalLM.from_pretrained("out").eval()
    assert output["parameters"] == sum(p.numel() for p in model.parameters())
    assert relative_error(model(some_tokens()).logits, tuned.logits()) < 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    text = AutoTokenizer.from_pretrained("out")("def", return_tensors="pt")
    assert model.generate(**text, max_new_tokens=3).shape[1] > text["input_ids"].shape[1]
    card = Path("out/README.md").read_text()
    assert "with a LoRA adapter merged into it" in card and "library_name: transformers" in card
    assert "kept as" not in card, "the weights beside which it was trained were not rounded"


@pytest.mark.parametrize(("objective", "ends"), [("sft", [2, 0, 9]), ("lm", 9)])
def test_a_merged_model_ends_its_text_where_the_turns_ended_that_it_learnt(
    base: Path, objective: str, ends: list[int] | int
) -> None:
    """The template ends turns by <|im_end|> (2), completions end by the tokenizer's eos (0), the base model by 9."""
    write_folder(base, CHATML, eos_token="<|begin|>")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**values, "eos_token_id": 9}))
    tuned = train(base, objective={"kind": objective})
    run(tuned, "out", merge=True, base_model=base)
    assert AutoModelForCausalLM.from_pretrained("out").generation_config.eos_token_id == ends


def test_the_card_of_a_merge_into_weights_that_were_rounded_says_so(base: Path) -> None:
    tuned = train(base, {**LORA, "frozen_as": "bf16"})
    run(tuned, "out", merge=True, base_model=base)
    assert (
        "trained beside the base model's weights kept as bf16, and is merged into the"
        in Path("out/README.md").read_text()
    )


def test_bf16_halves_it(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for dtype in ("float32", "bf16"):
        run(tuned, dtype, merge=True, base_model=tuned.base, dtype=dtype)
        sizes.append(json.loads(capsys.readouterr().out)["files"]["model-00001-of-00001.safetensors"])
    assert sizes[1] < 0.6 * sizes[0]
    assert AutoModelForCausalLM.from_pretrained("bf16", dtype="auto").dtype == torch.bfloat16


def test_the_folder_of_the_base_model_is_named_as_for_a_daemon(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="--merge adds the adapter to its base model; .* --base-model DIR"):
        run(tuned, "out", merge=True)
    monkeypatch.setenv("AGORA_BASE_MODEL", str(tuned.base))
    assert run(tuned, "out", merge=True) == console.EXIT_DONE
    monkeypatch.setenv("AGORA_BASE_MODLE", "x")
    with pytest.raises(SettingsError, match="did you mean AGORA_BASE_MODEL"):
        run(tuned, "more", merge=True)


def test_people_are_told_how_each_kind_is_loaded(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    run(tuned, "adapter", as_json=False)
    run(tuned, "merged", merge=True, base_model=tuned.base, as_json=False)
    shown = capsys.readouterr()
    first, second = shown.out.split("exported ")[1:]
    assert "/adapter, as an adapter\n" in first and "PeftModel.from_pretrained(base, '" in first
    assert "/merged, merged into its base model\n" in second and "AutoModelForCausalLM" in second
    assert "hashing the base model in" in shown.err and "checking what is merged" in shown.err


def test_the_command_line_has_both_flags(tuned: Tuned) -> None:
    line = ["export", tuned.signed.run_id, "--out", "out", "--merge", "--base-model", str(tuned.base), "--json"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == console.EXIT_DONE and '"kind": "merged"' in done.output, done.output


# --- mistakes and damages: one sentence, and nothing is written


def test_a_run_that_trains_everything_has_nothing_to_merge(base: Path) -> None:
    tuned = train(base, {}, objective={"kind": "lm"})
    with pytest.raises(Failure, match=r"trains all parameters.*leave --merge out") as failed:
        run(tuned, "out", merge=True, base_model=base)
    assert failed.value.code == console.EXIT_USAGE
    run(tuned, "out")
    exported = AutoModelForCausalLM.from_pretrained("out")
    assert relative_error(exported(some_tokens()).logits, tuned.logits()) < 1e-5
    assert json.loads(Path("out/export.json").read_text())["kind"] == "model"
    assert Path("out/chat_template.jinja").read_text() == CHATML, "as for adapters"


def test_a_base_model_without_merge_is_a_mistake(tuned: Tuned) -> None:
    with pytest.raises(Failure, match="give both, or neither") as failed:
        run(tuned, "out", base_model=tuned.base)
    assert failed.value.code == console.EXIT_USAGE


def damage_hash(tuned: Tuned) -> None:
    weights = tuned.base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def remove_weights(tuned: Tuned) -> None:
    (tuned.base / "model.safetensors").unlink()


def remove_folder(tuned: Tuned) -> None:
    shutil.rmtree(tuned.base)


def remove_tokenizer(tuned: Tuned) -> None:
    (tuned.base / "tokenizer.json").unlink()


def remove_stage(tuned: Tuned) -> None:
    shutil.rmtree(tuned.home.checkpoints(tuned.signed.run_id) / "stage-1")


def overflow(tuned: Tuned) -> None:
    """Matrices that are finite, but whose product is not."""
    rewrite(tuned, lambda values: np.full_like(values, 1e30))


def spoil(tuned: Tuned) -> None:
    rewrite(tuned, lambda values: np.full_like(values, np.nan))


def rewrite(tuned: Tuned, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Writes a newer checkpoint of stage 1, changed."""
    layout = stage_layout(tuned.signed.manifest, 1)
    flat = change(np.zeros(layout.numel, np.float32))
    moments = {moment.name: flat if moment.name == "average" else 0 * flat for moment in layout.moments}
    moments |= {moment.name: np.zeros_like(flat) for moment in layout.moments if moment.name != "average"}
    state = StageState(1, 9, 9, 0, layout, np.zeros_like(flat), moments)
    write_checkpoint(tuned.home.checkpoints(tuned.signed.run_id), tuned.signed.run_id, state, keep=1)


@pytest.mark.parametrize(
    ("damage", "error", "sentence", "merge"),
    [
        (damage_hash, BaseModelError, "model.safetensors has the SHA-256", True),
        (remove_weights, BaseModelError, "has no model.safetensors", True),
        (remove_folder, Failure, "base is not a folder", True),
        (remove_tokenizer, DiskError, "Cannot read the tokenizer file", False),
        (remove_stage, Failure, "stage 1 is missing", False),
        (remove_stage, Failure, "stage 1 is missing", True),
        (spoil, ExportError, "has values that are not finite", False),
        (spoil, ExportError, "has values that are not finite", True),
        (overflow, ExportError, r"model.safetensors: model\.layers\..* has values that are not finite", True),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    tuned: Tuned, damage: Callable[[Tuned], None], error: type[Exception], sentence: str, merge: bool, tmp_path: Path
) -> None:
    damage(tuned)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(error, match=sentence):
        run(tuned, "out", merge=merge, base_model=tuned.base if merge else None)
    assert {path.name for path in tmp_path.iterdir()} - {"sockets"} == before - {"sockets"}
