"""The exported tokenizer gives the ids that the run trained on, to whoever loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import ManifestError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from agora.data.tokenizer import JsonTokenizer, byte_tokenizer_json, tokenizer_files

HARD = "h\u00e9llo \u0100 \x00 <s> </s> don't  .  , \u6f22\u5b57\U0001f389\r\n\t \u2019 <|endoftext|>"
BYTEWISE = Tokenizer.from_str(json.dumps(byte_tokenizer_json()))


def loaded(files: dict[str, bytes], folder: Path) -> Any:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text(max_size=50))
def test_byte_ids_are_the_bytes_of_any_text(text: str) -> None:
    ids = BYTEWISE.encode(text).ids
    assert bytes(ids) == text.encode() and BYTEWISE.decode(ids) == text


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_read_as_replacement_characters(data: bytes) -> None:
    assert BYTEWISE.decode(list(data)) == data.decode(errors="replace")


def test_transformers_loads_the_byte_tokenizer_as_it_is(tmp_path: Path) -> None:
    files, end_of_text = tokenizer_files("bytes", 256, 128)
    tokenizer = loaded(files, tmp_path)
    assert end_of_text == 0 and (len(tokenizer), tokenizer.model_max_length) == (256, 128)
    ids = tokenizer(HARD)["input_ids"]
    assert bytes(ids) == HARD.encode() and tokenizer.decode(ids) == HARD


@pytest.mark.parametrize("end", ["<|endoftext|>", None])
def test_a_tokenizer_file_is_taken_as_it_is(tmp_path: Path, end: str | None) -> None:
    source = Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [end] if end else []
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    source.train_from_iterator([Path(__file__).read_text()], trainer)
    source.enable_truncation(4)
    source.save(str(tmp_path / "run.json"))
    files, end_of_text = tokenizer_files("run.json", 300, 64, tmp_path)
    assert files["tokenizer.json"] == (tmp_path / "run.json").read_bytes()
    (tmp_path / "out").mkdir()
    tokenizer = loaded(files, tmp_path / "out")
    text = Path(__file__).read_text()[:300]
    ids = JsonTokenizer(tmp_path / "run.json").encode([text])[0].tolist()
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    assert (end_of_text, tokenizer.eos_token) == ((0, end) if end else (None, None))


def test_a_tokenizer_too_large_for_the_model_is_refused() -> None:
    with pytest.raises(ManifestError, match="vocabulary is 100"):
        tokenizer_files("bytes", 100, 128)


def test_a_tokenizer_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n")
    with pytest.raises(ManifestError, match="is a git-lfs pointer.*git lfs pull"):
        JsonTokenizer(tmp_path / "tokenizer.json")
