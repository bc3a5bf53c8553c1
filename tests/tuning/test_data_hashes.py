"""What a file or a tokenizer is hashed to does not depend on the machine, and changes with what training sees."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path

import pytest
from agora_protocol.errors import DataError, DiskError
from datasets import Dataset

from agora.tuning.chat.model_tokenizer import open_model_tokenizer
from agora.tuning.chat.sample_file import check_samples, hash_samples
from tests.tuning.chat_folders import CHATML, CHATML_WITH_BLOCKS, write_folder

NOW = datetime(2026, 7, 1)


def test_the_hash_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 5_000_000)
    assert hash_samples([path]) == hashlib.sha256(b"x" * 5_000_000).hexdigest()
    check_samples([path], hash_samples([path]))
    check_samples([path], "")
    with pytest.raises(DataError, match=r"copy the file from a peer that trains, or found a new run"):
        check_samples([path], "0" * 64)


def test_the_hash_of_a_datasets_folder_is_that_of_its_arrow_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    Dataset.from_dict({"text": [str(n) for n in range(100)]}).save_to_disk(str(folder), num_shards=3)
    files = sorted(folder.glob("*.arrow"))
    assert len(files) == 3
    before = hash_samples([folder])
    assert before == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    (folder / "dataset_info.json").write_text("{}")
    assert hash_samples([folder]) == before


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"Cannot read .*nowhere\.jsonl \(No such file"):
        hash_samples([tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match=r"is neither a folder that .* with a state\.json, nor holds"):
        hash_samples([tmp_path])


def test_the_hash_of_a_tokenizer_follows_its_template_and_tokens_and_nothing_else(tmp_path: Path) -> None:
    def hashed(name: str, template: str | None = CHATML, **settings: object) -> str:
        return open_model_tokenizer(write_folder(tmp_path / name, template, **settings), NOW).fingerprint

    plain = hashed("a")
    assert hashed("b", transformers_version="9") == plain
    assert open_model_tokenizer(tmp_path / "a", datetime(2030, 1, 1)).fingerprint == plain
    in_settings = write_folder(tmp_path / "c")
    settings = json.loads((in_settings / "tokenizer_config.json").read_text())
    (in_settings / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
    assert open_model_tokenizer(in_settings, NOW).fingerprint == plain
    others = {hashed("d", CHATML_WITH_BLOCKS), hashed("e", None), hashed("f", eos_token="<|begin|>")}
    others.add(open_model_tokenizer(None, NOW).fingerprint)
    assert len(others) == 4 and plain not in others
    content = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(content))
    assert open_model_tokenizer(tmp_path / "a", NOW).fingerprint not in {plain, *others}


def test_another_tokenizer_names_both_hashes_and_the_files(tmp_path: Path) -> None:
    tokenizer = open_model_tokenizer(None, NOW)
    tokenizer.require_hash(tokenizer.fingerprint)
    tokenizer.require_hash("")
    with pytest.raises(DataError, match=f"SHA-256 {tokenizer.fingerprint}, .* 2{{64}} .* copy tokenizer.json"):
        tokenizer.require_hash("2" * 64)
