"""A data set of the Hub is named by its id: its files for training are fetched, or a sentence says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agora_protocol.errors import DataError
from huggingface_hub import constants

from agora.tuning.chat.hub_data import fetch_data_set, training_files
from agora.tuning.chat.sample_file import open_samples
from agora.tuning.chat.sample_formats import ReadingCounts, ReadingRules
from tests.tuning.hub_server import COMMIT, REPO, FakeHub, serve

ROW = {"prompt": "a", "completion": "b"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name in ("data/train-00000.jsonl", "data/train-00001.jsonl", "data/test-00000.jsonl", "script.py", "README.md"):
        (folder / name).write_text(json.dumps(ROW | {"id": name}) + "\n")
    (folder / "dataset_infos.json").write_text("{}")
    with serve(FakeHub(folder)) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


def test_the_files_for_training_are_fetched_and_nothing_else(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fetch_data_set(Path(REPO))
    assert sorted(hub.fetched) == ["data/train-00000.jsonl", "data/train-00001.jsonl"]
    assert len(list(open_samples(files, ReadingRules()).samples(ReadingCounts()))) == 2
    assert fetch_data_set(Path(f"{REPO}@{COMMIT}:data")) == files
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="could be fetched from the Hub"):
        fetch_data_set(Path(REPO))


def test_what_is_no_data_set_is_named_and_files_are_not_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file other/set, and no data set .* could be fetched"):
        fetch_data_set(Path("other/set"))
    asked = hub.requests
    for name in ("chats.jsonl", "folder/chats.jsonl.gz", "/a/b", "a/b/c", str(tmp_path)):
        assert fetch_data_set(Path(name)) == ()
    assert hub.requests == asked


@pytest.mark.parametrize(
    ("present", "part", "wanted"),
    [
        (["data/train-0.parquet", "data/test-0.parquet"], None, ["data/train-0.parquet"]),
        (["b.jsonl.zst", "a.jsonl", "notes.txt"], None, ["a.jsonl", "b.jsonl.zst"]),
        (["en/train.json", "de/train.json"], "de", ["de/train.json"]),
        (["test.jsonl"], "test.jsonl", ["test.jsonl"]),
        (["training.csv", "test.csv"], None, ["training.csv"]),
    ],
)
def test_files_are_chosen_by_split_and_part(present: list[str], part: str | None, wanted: list[str]) -> None:
    assert training_files(present, part, "org/set") == wanted


@pytest.mark.parametrize(
    ("present", "part", "says"),
    [
        (["script.py", "README.md"], None, "no file of records for training"),
        (["test.jsonl"], None, "no file of records for training"),
        (["en/train.json", "de/train.json"], None, r"several parts \(de, en\); choose one: org/set:FOLDER"),
        (["en/train.json"], "fr", "for training in fr"),
        ([f"{number}.jsonl" for number in range(65)], None, "65 files, more than the 64"),
    ],
)
def test_what_cannot_be_chosen_is_said(present: list[str], part: str | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        training_files(present, part, "org/set")
