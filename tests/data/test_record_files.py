"""Records come one at a time from every kind of file; what is malformed is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agora_protocol.errors import DataError, DiskError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agora.data import json_values, record_files, tables
from agora.data.json_values import JsonScanner
from agora.data.record_files import read_records

ROWS = [{"text": "caf\u00e9 \U0001f600", "n": number} for number in range(700)]


def set_longest_record(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (record_files, json_values, tables):
        monkeypatch.setattr(module, "LONGEST_RECORD", size)


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
        ('[{"a": "\udce4"}]', [":1 is not UTF-8 text (byte 0xe4)"]),
    ],
)
def test_malformed_json_is_named_with_its_line(tmp_path: Path, content: str, texts: list[str]) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    refused(path, *texts)


ITEM = '{"prompt": "p", "messages": [{"role": "user"}, {"role": "assistant", "text": "}], [{"}]}'
BAD = {
    "a word": "no",
    "a number": "5",
    "a text": '"{\\"a\\", {"',
    "a list": '[1, {"prompt": "p"}, {}]',
    "no value": '{"prompt": , "messages": [{"role": "user"}]}',
    "no quote": '{"prompt": "p, "messages": [{"role": "user"}, {"role": "assistant"}]}',
    "no quote, and brackets": '{"prompt": "p}, "messages": [{"role": "user"}, {"text": "}, {"}]}',
    "no bracket": '{"prompt": "p", "messages": [{"role": "user"}, {"role": "assistant"}}',
    "no end": '{"prompt": "p", "messages": []',
    "a bracket too many": '{"prompt": "p", "messages": [{"role": "user"}]}}',
    "a line in a text": '{"prompt": "one\ntwo", "messages": [{"role": "user"}]}',
    "a key twice": '{"prompt": "p", "prompt": "q", "messages": []}',
    "a huge number": '{"prompt": ' + "9" * 5000 + ', "messages": []}',
    "deep brackets": '{"prompt": ' + "[" * 20_000 + "]" * 20_000 + ', "messages": []}',
    "not UTF-8": '{"prompt": "\udce4", "messages": [{"role": "user"}]}',
    "nothing": "",
}


@pytest.mark.parametrize("form", ["a line each", "one line", "indented", "data"])
@pytest.mark.parametrize("name", BAD)
def test_of_a_list_every_malformed_item_is_left_out_and_named(tmp_path: Path, name: str, form: str) -> None:
    path, problems = tmp_path / "x.json", []
    items = [ITEM, BAD[name], ITEM, ITEM, BAD[name], BAD[name], ITEM, BAD[name], ITEM]
    if form == "indented":
        good = json.dumps(json.loads(ITEM), indent=2).replace("\n", "\n  ")
        items = [good if item is ITEM else item for item in items]
    between = {"one line": ", ", "indented": ",\n  "}.get(form, ",\n")
    text = "[" + between.replace(", ", "").lstrip(",") + between.join(items) + "\n]"
    path.write_bytes((f'{{"data": {text}}}' if form == "data" else text).encode(errors="surrogateescape"))
    records = list(read_records(path, None, problems.append))
    good = [record.fields for record in records if record.fields == json.loads(ITEM)]
    assert len(good) == 5 and len(records) == (9 if name == "a bracket too many" else 5)
    # Two neighbours on one line, of which nothing says where the first one ends, may be one.
    assert len(problems) in ((4, 3) if form == "one line" else (4,)) or (name == "nothing" and problems)
    assert all(str(path) in str(problem) for problem in problems)
    with pytest.raises(DataError):
        list(read_records(path))


def test_a_list_that_is_cut_or_lacks_commas_loses_no_good_item(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, count, bad in (
        (f"[{ITEM},\n{ITEM},\n{ITEM[:30]}", 2, 1),
        (f"[{ITEM},\n{ITEM}", 2, 1),
        (f"[{ITEM},\n{ITEM},", 2, 1),
        (f"[{ITEM},\n{ITEM},\n]", 2, 0),
        (f"[{ITEM}\n{ITEM},\n{ITEM}]", 2, 1),
        (f"[no\n{ITEM},\n{ITEM}]", 1, 1),
    ):
        problems: list[DataError] = []
        path.write_text(text)
        assert len(list(read_records(path, None, problems.append))) == count and len(problems) == bad, text


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_of_a_list_makes_another_record_of_it(tmp_path: Path, data: st.DataObject) -> None:
    """With a line each, a cut or an insertion anywhere costs at most the records of the lines that it touches."""
    path, problems = tmp_path / "x.json", []
    lines = [json.dumps({"prompt": f"p{n}", "messages": [{"role": "user", "text": '"},{'}] * 3}) for n in range(6)]
    text = "[\n" + ",\n".join(lines) + "\n]"
    at = data.draw(st.integers(2, len(text) - 3))
    cut = data.draw(st.integers(0, 3))
    path.write_text(text[:at] + data.draw(st.text('"{}[],:x', max_size=3)) + text[at + cut :])
    found = [record.fields for record in read_records(path, None, problems.append)]
    whole = [json.loads(line) for line in lines]
    assert len([record for record in found if record in whole]) >= 4
    if len(problems) == 0:
        assert len(found) >= 5


def test_a_line_that_is_no_object_or_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n[1]\n")
    refused(path, ":2 is not a JSON object")
    path.write_bytes(b'{}\n{"a": "\xff"}\n')
    refused(path, ":2 is not UTF-8 text (byte 0xff)")


def test_a_line_longer_than_the_limit_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_longest_record(monkeypatch, 1 << 20)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "x" * (1 << 20)}))
    refused(tmp_path / "x.jsonl", ":1 is longer than 1 MiB; split")
    (tmp_path / "x.txt").write_text("x" * ((1 << 20) + 1))
    refused(tmp_path / "x.txt", "is longer than 1 MiB; split")


def test_files_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file.*correct the path"):
        list(read_records(tmp_path / "none.jsonl"))
    (tmp_path / "x.xlsx").write_text("a,b\n")
    refused(tmp_path / "x.xlsx", "format", "unknown", ".parquet")
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
    set_longest_record(monkeypatch, 1 << 20)
    scanner = JsonScanner(io.StringIO(json.dumps([{"text": "x" * (1 << 20)}])), Path("x.json"))
    scanner.expect("[")
    with pytest.raises(DataError, match="x.json:1 is longer than 1 MiB; split"):
        scanner.take_value()


# --- files that are not what their names say


TEXT = '{"text": "\u767e\u79d1\u5168\u4e66, \u4f60\u597d\u4e16\u754c"}\n'


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt", "x.csv"])
@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ("utf-16", "is UTF-16 text, not UTF-8; convert it, for example with `iconv -f UTF-16 -t UTF-8 x."),
        ("utf-16-le", "is UTF-16LE text"),
        ("utf-16-be", "is UTF-16BE text"),
        ("utf-32", "is UTF-32 text"),
        ("gbk", "perhaps GBK; convert it, for example with `iconv -f GBK -t UTF-8 x."),
    ],
)
def test_text_of_another_encoding_is_named_with_the_command_that_converts_it(
    tmp_path: Path, name: str, encoding: str, says: str
) -> None:
    (tmp_path / name).write_bytes((TEXT * 3).encode(encoding))
    refused(tmp_path / name, "UTF-8", "iconv", says)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("caf\u00e9 \u00fcber", "WINDOWS-1252"),
        ("Gr\u00fc\u00dfe", "WINDOWS-1252"),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", "WINDOWS-1251"),
        ("\u3053\u3093\u306b\u3061\u306f", "SHIFT_JIS"),
    ],
)
def test_other_encodings_are_guessed(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" + json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    refused(tmp_path / "x.jsonl", ":2 is not UTF-8", f"perhaps {encoding}")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5166280\n"


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet", "x.jsonl.gz", "x.jsonl.zst", "x.ndjson"]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    refused(tmp_path / name, "is a git-lfs pointer", "run `git lfs pull`")


def test_pointers_in_a_datasets_folder_are_named(tmp_path: Path) -> None:
    write_datasets_folder(tmp_path / "folder")
    (tmp_path / "folder" / "data-00000-of-00002.arrow").write_bytes(POINTER)
    with pytest.raises(DataError, match="data-00000-of-00002.arrow is a git-lfs pointer"):
        list(read_records(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"{}", mtime=0), "compressed by gzip; rename it to end in .gz"),
        (bz2.compress(b"{}"), "compressed by bzip2"),
        (b"PK\x03\x04rest", "a zip archive; unpack it"),
        (b"PAR1rest", "a parquet table; rename it"),
        (b"\n <!DOCTYPE html><html>", "a web page"),
        (b"SQLite format 3\0", "a database of SQLite"),
        (b"name" + bytes(253) + b"ustar\x0000", "a tar archive; unpack it"),
        (b'{"a": 1}\r{"a": 2}', ":1 ends its lines with CR alone"),
        (b'{"a": 1}\n\0\0\0', ":2 holds bytes of 0"),
    ],
)
def test_content_of_another_kind_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    refused(tmp_path / "x.jsonl", says)


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x"])
def test_a_suffix_that_is_unknown_is_named_by_its_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04rest")
    refused(tmp_path / name, "a zip archive; unpack it")
    (tmp_path / name).write_bytes(b"{}")
    refused(tmp_path / name, f"The format of {tmp_path / name} is unknown")


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    refused(tmp_path / "x.jsonl", "is a pipe or a device", "name -")


def test_files_that_were_joined_have_a_mark_of_utf_8_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('\ufeff{"a": 1}\n\ufeff{"a": 2}\n')
    assert [record.fields["a"] for record in read_records(tmp_path / "x.jsonl")] == [1, 2]


# --- csv, and compressed files


def test_csv_has_texts_with_commas_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "x.CSV"
    path.write_text('prompt,completion\n"a, b","line 1\nline ""2"""\n\nc,\n', encoding="utf-8-sig")
    records = list(read_records(path))
    assert [record.fields for record in records] == [
        {"prompt": "a, b", "completion": 'line 1\nline "2"'},
        {"prompt": "c", "completion": ""},
    ]
    assert [record.where for record in records] == [f"{path}:2", f"{path}:5"]
    for name, text in (("x.tsv", "a\tb\n1,2\t3\n"), ("semicolons.csv", "a;b\n1,2;3\n")):
        (tmp_path / name).write_text(text)
        assert [record.fields for record in read_records(tmp_path / name)] == [{"a": "1,2", "b": "3"}]


TWICE = '{"prompt": "a", "completion": "b", "prompt": "c"}'
GOOD = '{"prompt": "a", "completion": "b"}'


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("x.jsonl", f"{GOOD}\n{TWICE}\n{GOOD}\n", 2),
        ("x.ndjson", TWICE, 1),
        ("x.json", f"[{GOOD},\n{GOOD},\n{TWICE}]", 3),
        ("x.json", f'{{"data": [\n{TWICE}]}}', 2),
        ("x.jsonl", '{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}', 1),
        ("x.jsonl", '{"prompt": "a", "tools": [{"a": {"b": 1, "b": 1}}]}', 1),
    ],
)
def test_a_key_twice_is_named_with_its_line_since_json_drops_the_first_in_silence(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    key = "b" if "tools" in text else "role" if "role" in text else "prompt"
    refused(path, f":{line} has the key {key!r} twice", "remove one")


def test_a_record_with_a_key_twice_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{GOOD}\n{TWICE}\n{GOOD}\n")
    problems: list[DataError] = []
    assert len(list(read_records(path, None, problems.append))) == 2
    assert len(problems) == 1 and ":2 has the key 'prompt' twice" in str(problems[0])


def test_a_table_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, ["text", "text"]), path)
    refused(path, "has the column 'text' twice")


def test_malformed_csv_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n1,2,3\n4,5\n")
    refused(path, ":3 has 3 fields, but the first line names 2")
    problems: list[DataError] = []
    assert [record.fields["a"] for record in read_records(path, None, problems.append)] == ["1", "4"]
    assert len(problems) == 1 and ":3 has 3 fields" in str(problems[0])
    path.write_text("a,b,a\n1,2,3\n")
    refused(path, ":1 names the column 'a' twice")
    path.write_bytes(b"a,b\r1,2\r")
    refused(path, ":1 ends its lines with CR alone")
    path.write_text('a,b\n1,2\n"open,2\n4,5\n')
    refused(path, ":3 is not csv", "close the quote")
    set_longest_record(monkeypatch, 1 << 20)
    path.write_text('a,b\n"' + "x\n" * (1 << 20) + '",2\n')
    refused(path, ":2 is not csv", "1 MiB")


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    compressed: bytes = sink.getvalue().to_pybytes()
    return compressed


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
    ".GZ": gzip.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("name", ["x.jsonl", "list.json", "x.ndjson"])
def test_compressed_files_give_their_records(tmp_path: Path, name: str, suffix: str) -> None:
    writer = WRITERS.get(name, write_lines)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESSED[suffix](writer(tmp_path / name).read_bytes()))
    assert [dict(record.fields) for record in read_records(path)] == ROWS


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_compressed_file_that_was_cut_off_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(COMPRESSED[suffix](json.dumps(ROWS[0]).encode() * 1000)[:-12])
    refused(path, "is damaged or cut off", "again")


def test_a_line_that_decompresses_to_gigabytes_is_refused_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_longest_record(monkeypatch, 1 << 20)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    tracemalloc.start()
    refused(tmp_path / "x.jsonl.gz", ":1 is longer than 1 MiB")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


# --- tables that decode to far more than they are


LONG = "a" * (1 << 20)


def bomb_of_texts(rows: int = 256) -> pa.Table:
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([LONG]))})


def bomb_of_messages(rows: int = 64) -> pa.Table:
    return pa.table({"messages": [[{"role": "user", "content": LONG}] * 4] * rows})


def most_decoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most rows' bytes that were decoded at a time, when all records were read."""
    decoded: list[int] = []
    cut = tables.bounded_slices

    def watched(batch: Any, *arguments: Any) -> Any:
        for part in cut(batch, *arguments):
            decoded.append(int(tables._row_bytes(part.to_struct_array()).sum()))
            yield part

    monkeypatch.setattr(tables, "bounded_slices", watched)
    assert sum(1 for _ in read_records(path)) in (64, 256)
    return max(decoded)


@pytest.mark.parametrize("make", [bomb_of_texts, bomb_of_messages])
@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY"])
def test_a_table_of_some_bytes_that_decodes_to_gigabytes_is_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], pa.Table], encoding: str
) -> None:
    path = tmp_path / "x.parquet"
    plain = {"use_dictionary": False, "column_encoding": encoding} if encoding != "dictionary" else {}
    table = make()
    if pa.types.is_dictionary(table.schema.field(0).type) and plain:
        table = pa.table({"text": [LONG] * 64})
    pq.write_table(table, path, compression="zstd", **plain)
    assert path.stat().st_size < 100_000
    assert most_decoded(path, monkeypatch) <= tables.DECODED_BYTES + (8 << 20)


def test_arrow_files_are_decoded_in_parts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_datasets_folder(tmp_path / "folder")
    table = bomb_of_texts()
    name = "data-00000-of-00002.arrow"
    with pa.OSFile(str(tmp_path / "folder" / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "folder" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert most_decoded(tmp_path / "folder", monkeypatch) <= tables.DECODED_BYTES + (1 << 20)


def test_a_row_longer_than_a_record_may_be_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_longest_record(monkeypatch, 8 << 20)
    pq.write_table(pa.table({"text": ["a", LONG * 9]}), tmp_path / "x.parquet", compression="zstd")
    refused(tmp_path / "x.parquet", "row 2 is longer than 8 MiB; split")
    listed = pa.table({"messages": [[{"content": "a"}], [{"content": LONG}] * 9]})
    pq.write_table(listed, tmp_path / "y.parquet", compression="zstd")
    refused(tmp_path / "y.parquet", "row 2 is longer than 8 MiB; split")


def test_a_column_of_more_values_than_a_file_can_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_VALUES", 1 << 20)
    pq.write_table(pa.table({"n": [[0] * (1 << 21)]}), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "2,097,152 values", "do not trust it")


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", "bb", None, ""]),
        pa.array([["a", "bb"], None, [], ["ccc"]]),
        pa.array([[1, 2], None, [3, 4]], type=pa.list_(pa.int32(), 2)),
        pa.array([{"a": "x", "b": 1}, None, {"a": None, "b": 2}]),
        pa.array([[("k", "v")], None, []], type=pa.map_(pa.string(), pa.string())),
        pa.array(["a", None, "a"]).dictionary_encode(),
        pa.array([b"ab", None], type=pa.binary(2)),
        pa.array([None, None]),
        pa.array([1.5, None]),
        pa.array([[["a"], []], [], [["b", "c"]]]),
    ],
)
def test_the_bytes_of_a_row_do_not_depend_on_its_slice(array: pa.Array) -> None:
    sizes = tables._row_bytes(array).tolist()
    assert len(sizes) == len(array) and all(size >= 0 for size in sizes)
    for start in range(len(array)):
        assert tables._row_bytes(array.slice(start)).tolist() == sizes[start:]
