"""Records come one at a time from every kind of file; what is malformed is named by file and line."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agora_protocol.errors import DataError, DiskError
from hypothesis import given
from hypothesis import strategies as st

from agora.data import record_files
from agora.data.record_files import JsonScanner, read_records

ROWS = [{"text": "caf\u00e9 \U0001f600", "n": number} for number in range(700)]


def write_lines(path: Path) -> Path:
    path.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return path


def write_list(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8-sig")
    return path


def write_data_list(path: Path) -> Path:
    path.write_text(json.dumps({"data": ROWS}, ensure_ascii=False))
    return path


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100)
    return path


def write_datasets_folder(path: Path) -> Path:
    """As `Dataset.save_to_disk` writes it: arrow streams, and state.json with their names."""
    path.mkdir()
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, rows in zip(names, (ROWS[:300], ROWS[300:]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "x.jsonl": write_lines,
    "list.json": write_list,
    "data.json": write_data_list,
    "lines.json": write_lines,
    "x.parquet": write_parquet,
    "folder": write_datasets_folder,
}


def refused(path: Path, *texts: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_records(path))
    for text in (str(path), *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_its_records_in_order(tmp_path: Path, name: str) -> None:
    records = list(read_records(WRITERS[name](tmp_path / name)))
    assert [dict(record.fields) for record in records] == ROWS


@pytest.mark.parametrize(
    ("name", "where"),
    [("x.jsonl", ":5"), ("list.json", ":10"), ("data.json", ":1"), ("x.parquet", " row 3"), ("folder", " row 3")],
)
def test_a_record_says_where_it_stands(tmp_path: Path, name: str, where: str) -> None:
    path = WRITERS[name](tmp_path / name)
    assert list(read_records(path))[2].where == f"{path}{where}"


@pytest.mark.parametrize("name", ["x.parquet", "folder"])
def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path, name: str) -> None:
    first = next(read_records(WRITERS[name](tmp_path / name), {"text", "absent"}))
    assert set(first.fields) == {"text"}


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("roses\nare red\n")
    assert [record.fields for record in read_records(tmp_path / "poem.txt")] == [{"text": "roses\nare red\n"}]


def test_one_malformed_line_among_many_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": "x"})] * 20_000
    lines[12_345] = '{"text": "x'
    path.write_text("\n".join(lines))
    refused(path, ":12346 is not JSON", "Unterminated string", "remove the line")


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('[{"a": 1},\n{"a": }]', [":2 is not JSON", "Expecting value"]),
        ('[{"a": 1},\n{"a":\n\n"b]', [":4 is not JSON", "begins at line 2", "Unterminated"]),
        ('[{"a": 1}\n{"a": 1}]', [":2 has '{' where ',' is expected"]),
        ('[{"a": 1}', [":1 has the end of the file where ',' is expected"]),
        ('[{"a": 1}] x', ["after the list's end"]),
        ("[\n[1]]", [":2 has something other than an object"]),
        ('{"data": [{"a": 1}], "more": 1}', ["has ',' where '}' is expected"]),
        ('{"rows": [\n{"a": 1}]}', [":1 is not JSON", "a list of objects in a .json file"]),
        ("5", [":1 is not a JSON object"]),
        ('[{"a": ' + "[" * 100_000, [":1 is not JSON"]),
        ('[{"a": ' + "9" * 5000 + "}]", [":1 is not JSON"]),
        ('[{"a": "\udce4"}]', [":1 or a line soon after it is not UTF-8"]),
    ],
)
def test_malformed_json_is_named_with_its_line(tmp_path: Path, content: str, texts: list[str]) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    refused(path, *texts)


def test_a_line_that_is_no_object_or_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n[1]\n")
    refused(path, ":2 is not a JSON object")
    path.write_bytes(b'{}\n{"a": "\xff"}\n')
    refused(path, ":2 is not JSON")


def test_a_line_longer_than_the_limit_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "LONGEST_RECORD", 1 << 20)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "x" * (1 << 20)}))
    refused(tmp_path / "x.jsonl", ":1 is longer than 1 MiB; split")
    (tmp_path / "x.txt").write_text("x" * ((1 << 20) + 1))
    refused(tmp_path / "x.txt", "is longer than 1 MiB; split")


def test_files_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file.*correct the path"):
        list(read_records(tmp_path / "none.jsonl"))
    (tmp_path / "x.csv").write_text("a,b\n")
    refused(tmp_path / "x.csv", "format", "unknown", ".parquet")
    (tmp_path / "x.parquet").write_text("no table")
    refused(tmp_path / "x.parquet", "not a readable table", "fetch or write it again")
    (tmp_path / "x.txt").write_bytes(b"one\ntwo \xff")
    refused(tmp_path / "x.txt", ":2 is not UTF-8")


def test_folders_that_are_no_data_set_say_what_to_do(tmp_path: Path) -> None:
    refused(tmp_path, "no state.json; give a file")
    write_datasets_folder(tmp_path / "train")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    refused(tmp_path, "splits 'train'; give the folder of one")
    for state in ("[]", "{}", '{"_data_files": [{"filename": "../secret.arrow"}]}', "no"):
        (tmp_path / "train" / "state.json").write_text(state)
        refused(tmp_path / "train", "does not list the arrow files")
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "dataset_info.json"}]}')
    refused(tmp_path / "train", "not a readable table")


def test_a_long_json_list_is_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("w") as file:
        file.write("[" + ",\n".join([json.dumps({"text": "word " * 200})] * 30_000) + "]")
    tracemalloc.start()
    count = sum(1 for _ in read_records(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 30_000 and path.stat().st_size > 30e6 and peak < 10e6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(), JSON), max_size=8), st.sampled_from([None, 1]), st.integers(1, 40))
def test_the_scanner_takes_what_json_wrote_whatever_the_size_of_its_reads(
    rows: list[dict[str, Any]], indent: int | None, read: int
) -> None:
    class ShortReads(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return super().read(read)

    scanner = JsonScanner(ShortReads(json.dumps(rows, indent=indent)), Path("x.json"))
    taken = []
    scanner.expect("[")
    while scanner.next_character() != "]":
        taken.append(scanner.take_value())
        if scanner.next_character() == ",":
            scanner.expect(",")
    assert taken == rows


def test_a_value_longer_than_the_limit_is_refused_also_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "LONGEST_RECORD", 1 << 20)
    scanner = JsonScanner(io.StringIO(json.dumps([{"text": "x" * (1 << 20)}])), Path("x.json"))
    scanner.expect("[")
    with pytest.raises(DataError, match="x.json:1 is longer than 1 MiB; split"):
        scanner.take_value()
