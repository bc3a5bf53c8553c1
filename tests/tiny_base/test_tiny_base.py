"""`./scripts/tiny-base`: a folder that transformers and `swarm data` read, the same again for the same steps."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_base import model_folder
from tiny_base.__main__ import app
from tiny_base.example_data import dpo_records, sft_records, shout
from tiny_base.model_folder import TinyBase, make_base
from tiny_base.pretraining import CONTEXT, PEAK_RATE, WARMUP_STEPS, Budget, learning_rate, split_windows
from tiny_base.pretraining_text import documents
from tiny_base.stdlib_docs import DocumentedName, SourceText, documented_names
from typer.testing import CliRunner

from agora.cli.console import EXIT_USAGE, Failure
from agora.data import text_sources
from agora.data.text_sources import stdlib_files
from agora.tuning.chat.chat_template import split_supervised
from agora.tuning.chat.model_tokenizer import open_model_tokenizer
from agora.tuning.chat.sample_file import open_samples
from agora.tuning.chat.sample_formats import ReadingCounts, ReadingRules
from agora.tuning.chat.supervision import tokenise

SOME_FILES = 30
CHAT = [{"role": "user", "content": "What does json.dumps do?"}, {"role": "assistant", "content": "Serialize."}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyBase]:
    """A base model after two steps, made of some of the library's files, and what was said of it."""
    folder = tmp_path_factory.mktemp("tiny") / "base"
    return folder, make_base(folder, stdlib_files()[:SOME_FILES], Budget(2, 0.0), seed=3)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_steps_and_seed_make_the_same_files(made: tuple[Path, TinyBase], tmp_path: Path) -> None:
    folder, report = made
    again = make_base(tmp_path / "again", stdlib_files()[:SOME_FILES], Budget(2, 0.0), seed=3)
    assert hashes(tmp_path / "again") == hashes(folder)
    assert again.pretrained.last_loss == report.pretrained.last_loss
    assert again.text == report.text
    assert set(hashes(folder)) == {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "data/sft.jsonl", "data/dpo.jsonl"),
    }


def test_transformers_loads_it_with_its_chat_template_and_assistant_masks(made: tuple[Path, TinyBase]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, report = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == report.parameters
    assert 2_000_000 < report.parameters < 5_000_000
    assert len(tokenizer) == report.vocabulary
    assert (model.config.eos_token_id, tokenizer.eos_token, tokenizer.pad_token) == (2, "<|im_end|>", "<|endoftext|>")
    rendered: dict[str, Any] = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = rendered["input_ids"], rendered["assistant_masks"]
    answer = [token for token, is_answer in zip(ids, mask, strict=True) if is_answer]
    assert tokenizer.decode(answer) == "Serialize.<|im_end|>"
    assert ids == open_model_tokenizer(folder, datetime.now()).tokenizer.encode([tokenizer.decode(ids)])[0].tolist()
    asked = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n")
    with torch.no_grad():
        assert model(input_ids=torch.tensor([ids])).logits.shape == (1, len(ids), report.vocabulary)


def test_the_data_files_are_recognised_and_their_answers_are_what_is_learnt(made: tuple[Path, TinyBase]) -> None:
    folder, report = made
    tokenizer = open_model_tokenizer(folder, datetime.now())
    for name, format_name, objective, sides in (("sft", "chat", "sft", 1), ("dpo", "preference", "dpo", 2)):
        file = open_samples([folder / "data" / f"{name}.jsonl"], ReadingRules())
        assert (file.files[0].reader.format.name, file.objective) == (format_name, objective)
        samples = list(tokenise(file, ReadingCounts(), tokenizer, CONTEXT))
        assert len(samples) == report.examples[f"{name}.jsonl"] > 20
        assert all(len(sample) == sides and not any(part.truncated for part in sample) for sample in samples)
        first = samples[0][0]
        (learnt,) = [
            text for text, is_trainable in split_supervised(first.text, first.supervised_ranges()) if is_trainable
        ]
        assert learnt.endswith(".<|im_end|>")
        assert learnt[0].isupper()


def test_the_command_prints_one_object_and_refuses_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = stdlib_files()[:SOME_FILES]
    monkeypatch.setattr(text_sources, "stdlib_files", lambda: some)
    done = CliRunner().invoke(app, [str(tmp_path / "base"), "--steps", "1", "--json"])
    assert done.exit_code == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["schema"], value["steps"], value["context"], value["seed"]) == (1, 1, CONTEXT, 0)
    assert value["tokens"] == value["steps"] * 4 * CONTEXT
    assert 7 < value["heldout_loss"] < 9
    assert "swarm new run.toml --base-model" in done.stderr
    assert "%|" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"], "nothing half written stays"
    for arguments, says in (
        ([str(tmp_path / "base")], "is not empty; name a new folder"),
        ([str(tmp_path / "new"), "--steps", "1", "--seconds", "5"], "two ends of pretraining"),
    ):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, Failure)
        assert says in str(refused.exception)
        assert refused.exception.code == EXIT_USAGE
    assert CliRunner().invoke(app, [str(tmp_path / "new"), "--steps", "0"]).exit_code == EXIT_USAGE
    assert not (tmp_path / "new").exists()


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_folder, "write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_base(tmp_path / "base", stdlib_files()[:SOME_FILES], Budget(1, 0.0), seed=0)
    assert not list(tmp_path.iterdir())


def test_a_documented_name_is_a_sentence_of_its_own() -> None:
    text = '''
def one(a, b=1):
    """Return the sum of both."""
class Two(Base):
    """Hold things together

    And more."""
    async def three(self): "a lower case summary is none"
    def four(self):
        """Begin a sentence that does not
        end in its first line."""
    def _private(self): "Keep this to yourself, please."
    def five(self): "Serve a purpose of some kind:"
'''
    assert documented_names([SourceText("pkg.mod", text), SourceText("broken", "def (")]) == [
        DocumentedName("pkg.mod.one", "one(a, b=1)", "Return the sum of both."),
        DocumentedName("pkg.mod.Two", "Two(Base)", "Hold things together."),
        DocumentedName("pkg.mod.Two.five", "five(self)", "Serve a purpose of some kind."),
    ]


def test_the_worse_answer_of_a_preference_is_shouted_or_of_another_name() -> None:
    names = [DocumentedName(f"m.f{n}", f"f{n}(x)", f"Return the number {n % 3}.") for n in range(7)]
    rejected = [record["rejected"][0]["content"] for record in dpo_records(names)]
    assert rejected[:3] == ["RETURN THE NUMBER 0!!!", "Return the number 2.", "RETURN THE NUMBER 2!!!"]
    assert len(rejected) == 6
    assert all(r["chosen"] != r["rejected"] for r in dpo_records([names[0], names[3], names[6]]))
    assert shout("Ok so.") == "OK SO!!!"
    questions = [record["messages"][0]["content"] for record in sft_records(names)]
    assert {text.split()[0] for text in questions} == {"What", "Describe"}


def test_some_files_are_also_conversations() -> None:
    paragraphs = "\n\n".join(f"paragraph number {number} of them" for number in range(5))
    texts = list(documents([SourceText(f"m{number}", paragraphs) for number in range(4)]))
    assert len(texts) == 5
    assert all(text.endswith("<|endoftext|>") for text in texts)
    assert texts[4].count("<|im_start|>assistant\n") == 2
    assert "user\nparagraph number 2 of them<|im_end|>" in texts[4]


def test_the_learning_rate_rises_then_falls_with_the_budget_whatever_it_counts() -> None:
    assert learning_rate(0, 0.0) == pytest.approx(PEAK_RATE / WARMUP_STEPS)
    assert learning_rate(10**6, 0.5) == pytest.approx(PEAK_RATE / 2)
    assert learning_rate(10**6, 1.2) == 0.0
    assert Budget(4, 90.0).spent(1, 1000.0) == 0.25
    assert Budget(None, 90.0).spent(1000, 45.0) == 0.5


def test_held_out_windows_are_apart_from_those_that_are_trained_on() -> None:
    ids = torch.arange(10 * CONTEXT + 7)
    windows = split_windows(ids, torch.Generator().manual_seed(0))
    assert (len(windows.trained), len(windows.heldout)) == (5, 5)
    firsts = [*windows.trained[:, 0].tolist(), *windows.heldout[:, 0].tolist()]
    assert sorted(firsts) == [CONTEXT * number for number in range(10)]
    with pytest.raises(ValueError, match="give more text"):
        split_windows(ids[: 2 * CONTEXT], torch.Generator())
