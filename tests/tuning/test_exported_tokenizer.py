"""The tokenizer's files of an export: the folder's own with its chat template, or the plain one that was learnt."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import DataError, ManifestError
from transformers import AutoTokenizer

from agora.data.tokenizer import open_tokenizer
from agora.tuning.chat.conversations import ChatMessage, Conversation
from agora.tuning.chat.model_tokenizer import (
    open_model_tokenizer,
    open_training_tokenizer,
    pretrained_tokenizer_files,
    read_chat_template,
)
from tests.tuning.chat_folders import CHATML, write_folder

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure? \u20ac"},
]


def exported(source: str, out: Path, base: Path | None = None, *, learns_samples: bool = True) -> Any:
    """The tokenizer of an export as transformers loads it."""
    files = pretrained_tokenizer_files(source, 400, 64, base, learns_samples=learns_samples)
    out.mkdir()
    for name, content in files.items():
        (out / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(out)


def test_a_folders_files_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", CHATML, model_max_length=77)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|begin|>"}')
    (folder / "notes.txt").write_text("not the tokenizer's")
    tokenizer = exported("base/tokenizer.json", tmp_path / "out", tmp_path)
    expected = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in expected)
    original = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 77
    assert tokenizer.eos_token == "<|im_end|>"
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert rendered == original.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer("2 + 2")["input_ids"] == original("2 + 2")["input_ids"]


def test_a_folder_is_named_as_well_as_its_tokenizer_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", CHATML)
    named = [
        pretrained_tokenizer_files(f"base{end}", 400, 64, tmp_path, learns_samples=True)
        for end in ("", "/tokenizer.json")
    ]
    assert named[0] == named[1]
    assert "chat_template.jinja" in named[0]
    assert (
        open_tokenizer("base", 400, base=tmp_path).fingerprint
        == open_tokenizer("base/tokenizer.json", 400, base=tmp_path).fingerprint
    )


@pytest.mark.parametrize("source", ["base", "base/tokenizer.json", "bytes"])
def test_a_tokenizer_that_is_not_the_runs_is_refused(source: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", CHATML)
    expected = open_training_tokenizer(source, 400, tmp_path).fingerprint
    pretrained_tokenizer_files(source, 400, 64, tmp_path, learns_samples=True, expected_hash=expected)
    (folder / "chat_template.jinja").write_text(CHATML + "!")
    changed = expected if source != "bytes" else "0" * 64
    with pytest.raises(DataError, match=r"has the SHA-256 .*, but the run was made with .* copy tokenizer\.json"):
        pretrained_tokenizer_files(source, 400, 64, tmp_path, learns_samples=True, expected_hash=changed)


@pytest.mark.parametrize("source", ["bytes", "folder", "no eos"])
def test_without_a_template_the_one_that_training_renders_by_comes_along(source: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base")
    if source == "no eos":
        (folder / "tokenizer_config.json").unlink()
    tokenizer = exported("bytes" if source == "bytes" else "base/tokenizer.json", tmp_path / "out", tmp_path)
    trained = open_model_tokenizer(None if source == "bytes" else folder, datetime.now())
    messages = tuple(ChatMessage(message["role"], message["content"]) for message in CHAT)
    expected = trained.template.render(Conversation(messages), "a test")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == expected
    asked = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert asked == f"{expected}\nAssistant: "
    assert trained.end_of_turn in expected


def test_a_run_on_text_gets_no_template_that_it_did_not_have(tmp_path: Path) -> None:
    write_folder(tmp_path / "base")
    assert exported("base/tokenizer.json", tmp_path / "out", tmp_path, learns_samples=False).chat_template is None
    assert exported("bytes", tmp_path / "bytes", learns_samples=False).chat_template is None


def test_a_template_in_the_settings_is_enough(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", chat_template=CHATML)
    assert exported("base/tokenizer.json", tmp_path / "out", tmp_path).chat_template == CHATML
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_file_of_another_name_gets_new_settings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", CHATML)
    (folder / "tokenizer.json").rename(folder / "run.json")
    tokenizer = exported("base/run.json", tmp_path / "out", tmp_path, learns_samples=False)
    assert tokenizer.model_max_length == 64
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not a JSON object; fetch"),
        ("special_tokens_map.json", b"[1]", "special_tokens_map.json is not a JSON object; fetch"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not text; fetch"),
    ],
)
def test_a_malformed_file_is_named(name: str, content: bytes, error: str, tmp_path: Path) -> None:
    (write_folder(tmp_path / "base", CHATML) / name).write_bytes(content)
    with pytest.raises(DataError, match=error):
        exported("base/tokenizer.json", tmp_path / "out", tmp_path)


def test_a_tokenizer_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="vocabulary is 100"):
        pretrained_tokenizer_files("bytes", 100, 128, tmp_path, learns_samples=True)


@pytest.mark.parametrize("source", ["base/tokenizer.json", "bytes"])
def test_a_template_that_was_chosen_for_training_is_exported_without_its_generation_blocks(
    tmp_path: Path, source: str
) -> None:
    write_folder(tmp_path / "base", CHATML)
    template = read_chat_template("chatml", None)
    files = pretrained_tokenizer_files(source, 400, 64, tmp_path, learns_samples=True, template=template)
    exported = files["chat_template.jinja"].decode()
    assert "generation" not in exported.replace("generation_prompt", "").partition("-#}")[2]
    assert exported.count("if true") == 1 and "<|im_start|>" in exported
