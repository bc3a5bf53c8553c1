"""Bytes and tokenizer files become ids of the narrowest type; a file that is none says what it should be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.errors import DataError, DiskError, ManifestError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agora.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer, token_dtype

TEXT = "def peer(name):\n    return f'{name} \u00e4\u20ac\U0001f600'\n"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A byte-level BPE of 300 ids, trained on this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_are_the_ids_and_nothing_is_added() -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([TEXT])
    assert ids.dtype == np.uint8 and ids.tobytes() == TEXT.encode()
    assert tokenizer.separator.tolist() == [0]


def test_a_tokenizer_file_encodes_whole_documents(trained: Path) -> None:
    tokenizer = JsonTokenizer(trained)
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.vocabulary == 300 and ids.dtype == np.uint16
    assert 4 < len(ids) < len(TEXT.encode()), "the file's own truncation must not cut documents"
    assert Tokenizer.from_file(str(trained)).decode(ids.tolist()) == TEXT
    assert tokenizer.separator.tolist() == [0]
    several = [one.tolist() for one in tokenizer.encode([TEXT, "", "x"])]
    assert several == [ids.tolist(), [], tokenizer.encode(["x"])[0].tolist()]


def test_ids_become_their_text_again_and_no_text_ends_in_an_error(trained: Path) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(trained)):
        (ids,) = tokenizer.encode([TEXT])
        assert tokenizer.decode(ids.tolist()) == TEXT
    assert ByteTokenizer().decode([0x41, 0xE2, 0x82, 0x42]) == "A\ufffdB"
    assert JsonTokenizer(trained).decode([2**31]) == ""


def test_without_an_end_of_text_token_a_newline_separates(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "\n": 7}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "words.json"))
    opened = JsonTokenizer(tmp_path / "words.json")
    assert opened.separator.tolist() == [7]
    assert opened.vocabulary == 8, "ids may have gaps: the largest counts"


def test_the_fingerprint_follows_the_content(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(trained.read_bytes())
    assert JsonTokenizer(copy).fingerprint == JsonTokenizer(trained).fingerprint
    copy.write_bytes(trained.read_bytes() + b"\n")
    assert JsonTokenizer(copy).fingerprint != JsonTokenizer(trained).fingerprint != ByteTokenizer.fingerprint


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4"), (128256, "u4")]
)
def test_ids_take_the_narrowest_type(vocabulary: int, dtype: str) -> None:
    assert token_dtype(vocabulary) == np.dtype(f"<{dtype}")


def test_a_manifest_names_bytes_or_a_path(trained: Path) -> None:
    assert open_tokenizer("bytes", 256).vocabulary == 256
    assert open_tokenizer("tokenizer.json", 300, base=trained.parent).vocabulary == 300


def test_a_model_with_too_few_ids_is_told_how_many(trained: Path) -> None:
    with pytest.raises(ManifestError, match=r"token id 299 but \[model\] vocabulary is 256; use vocabulary = 300"):
        open_tokenizer(str(trained), 256)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"nowhere\.json \(No such file or directory\); give the path"):
        open_tokenizer("nowhere.json", 256, base=tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"version": "1.0", "model": 3}'])
def test_a_file_that_is_no_tokenizer_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ManifestError, match=r"bad\.json is not a tokenizer file \(.+\); give one as"):
        JsonTokenizer(tmp_path / "bad.json")


def with_token(trained: Path, content: str, number: int) -> Path:
    rules = json.loads(trained.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    rules["added_tokens"].append({"id": number, "content": content, **flags, "special": True})
    path = trained.with_name(f"with-{number}.json")
    path.write_text(json.dumps(rules))
    return path


@pytest.mark.parametrize("token", ["<picture>", "[PAD]", "<image_soft_token>"])
def test_an_added_token_without_a_row_does_no_harm_until_a_text_has_it(trained: Path, token: str) -> None:
    number = 300
    path = with_token(trained, token, number)
    tokenizer = open_tokenizer(str(path), 300)
    assert isinstance(tokenizer, JsonTokenizer) and tokenizer.vocabulary == 300
    assert tokenizer.encode([TEXT])[0].tolist() == JsonTokenizer(trained).encode([TEXT])[0].tolist()
    for encode in (tokenizer.encode, lambda texts: tokenizer.encode_with_offsets(texts, add_special=True)):
        with pytest.raises(DataError, match=re.escape(f"the token '{token}' (id {number})")):
            encode([TEXT, f"a {token} b"])
    assert JsonTokenizer(path).encode([token])[0].tolist() == [number]


def test_an_ordinary_token_or_an_end_of_text_without_a_row_is_refused(trained: Path, tmp_path: Path) -> None:
    for path, rows in ((trained, 299), (with_token(trained, "<picture>", 300), 200)):
        with pytest.raises(ManifestError, match="has token id 299 but"):
            open_tokenizer(str(path), rows)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ManifestError, match="has token id 2 but"):
        open_tokenizer(str(tmp_path / "words.json"), 2)
