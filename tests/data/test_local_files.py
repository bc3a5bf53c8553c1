"""Files that a manifest names are found where this machine has them, whatever its author's paths were."""

from __future__ import annotations

from pathlib import Path

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.manifest_sections import DataSection

from agora.data.local_files import LocalFiles

ANN = "/home/ann/model"


def ben(folder: Path) -> Path:
    """Another machine: the base model's folder, with the samples beside it."""
    model = folder / "ben" / "other-name"
    (model / "data").mkdir(parents=True)
    (model / "tokenizer.json").touch()
    (folder / "ben" / "sft.jsonl").touch()
    return model


def section(**values: object) -> DataSection:
    return DataSection.model_validate({"tokenizer": f"{ANN}/tokenizer.json", "samples": "/home/ann/sft.jsonl"} | values)


def found(data: DataSection) -> tuple[str, ...]:
    return (*data.sample_paths, data.tokenizer)


@pytest.mark.parametrize("tokenizer", [f"{ANN}/tokenizer.json", "tokenizer.json"])
def test_a_joiner_with_a_base_model_needs_no_flag_for_what_lies_beside_it(tmp_path: Path, tokenizer: str) -> None:
    model = ben(tmp_path)
    local = LocalFiles((), tmp_path, model)
    assert found(local.localise(section(tokenizer=tokenizer))) == (
        str(tmp_path / "ben" / "sft.jsonl"),
        str(model / "tokenizer.json"),
    )


def test_what_the_owner_says_wins_also_by_another_name(tmp_path: Path) -> None:
    model = ben(tmp_path)
    mine = tmp_path / "renamed.jsonl"
    mine.touch()
    assert found(LocalFiles((mine,), tmp_path, model).localise(section()))[0] == str(mine)
    (tmp_path / "kept").mkdir()
    for name in ("sft.jsonl", "tokenizer.json"):
        (tmp_path / "kept" / name).touch()
    kept = LocalFiles((tmp_path / "kept",), tmp_path, model).localise(section())
    assert found(kept) == (str(tmp_path / "kept" / "sft.jsonl"), str(tmp_path / "kept" / "tokenizer.json"))
    without = LocalFiles((tmp_path / "kept",), tmp_path, None).localise(section(tokenizer="tokenizer.json"))
    assert found(without) == found(kept)


def test_several_files_and_the_data_folder_of_a_base_model_are_found_by_name(tmp_path: Path) -> None:
    model = ben(tmp_path)
    (model / "data" / "more.jsonl").touch()
    data = section(samples=("/x/more.jsonl", "/y/sft.jsonl"))
    assert LocalFiles((), tmp_path, model).localise(data).sample_paths == (
        str(model / "data" / "more.jsonl"),
        str(tmp_path / "ben" / "sft.jsonl"),
    )
    text = DataSection(corpus=("stdlib", "/x/more.jsonl", "texts/*.txt"))
    local = LocalFiles((), tmp_path, model).localise(text)
    assert local.corpus == ("stdlib", str(model / "data" / "more.jsonl"), "texts/*.txt")
    assert local.tokenizer == "bytes"


def test_the_manifests_own_path_is_used_where_it_exists(tmp_path: Path) -> None:
    model = ben(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sft.jsonl").touch()
    local = LocalFiles((), tmp_path / "runs", model)
    assert found(local.localise(section(samples="sft.jsonl")))[0] == str(tmp_path / "runs" / "sft.jsonl")


def test_a_file_that_is_nowhere_is_one_sentence_with_the_flag(tmp_path: Path) -> None:
    for data in (section(), section(samples="", corpus=("/x/text.txt",), tokenizer="bytes")):
        with pytest.raises(LocalError, match="say where it is: --data FILE or FOLDER"):
            LocalFiles((), tmp_path, None).localise(data)
