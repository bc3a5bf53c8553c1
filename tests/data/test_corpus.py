"""Text of every format becomes the same tokens, once; what cannot be read is one sentence that says what to do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agora_protocol.errors import DataError, DiskError, LocalError, ManifestError

from agora.data import json_values, record_files, tables, text_sources, token_cache
from agora.data.corpus import open_corpus, open_corpus_parts
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import ByteTokenizer, Ids

DOCUMENTS = ["def f():\n    return 1\n", "caf\u00e9 \u20ac \U0001f600", "x"]
EXPECTED = b"".join(document.encode() + b"\0" for document in DOCUMENTS)


def opened(tmp_path: Path, *sources: str) -> Ids:
    return open_corpus(sources, ByteTokenizer(), tmp_path / "cache", base=tmp_path)


def text_of(corpus: Ids) -> bytes:
    return corpus.tobytes()


def write_txt(folder: Path) -> None:
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(document.encode())


def write_jsonl(path: Path, rows: Sequence[object] | None = None) -> None:
    rows = [{"text": document, "id": 1} for document in DOCUMENTS] if rows is None else rows
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*"))


# --- formats


def test_a_glob_of_text_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write_txt(tmp_path)
    corpus = opened(tmp_path, "*.txt")
    assert text_of(corpus) == EXPECTED
    assert corpus.dtype == np.uint8 and not corpus.flags.writeable


def test_jsonl_and_parquet_give_the_same_tokens_as_text(tmp_path: Path) -> None:
    write_txt(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl")
    pq.write_table(pa.table({"id": [1, 2, 3], "text": DOCUMENTS}), tmp_path / "rows.parquet")
    assert {text_of(opened(tmp_path, source)) for source in ("*.txt", "rows.jsonl", "rows.parquet")} == {EXPECTED}
    assert len([path for path in cache_files(tmp_path) if path.suffix == ".tokens"]) == 1


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_string_columns_and_nulls_of_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([DOCUMENTS[0], None, *DOCUMENTS[1:], ""], pa.string()).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "rows.parquet", row_group_size=2)
    assert text_of(opened(tmp_path, "rows.parquet")) == EXPECTED


def test_empty_lines_and_empty_texts_of_jsonl_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": ""}\n{"text": "b"}')
    assert text_of(opened(tmp_path, "rows.jsonl")) == b"a\0b\0"


def test_a_folder_is_every_known_file_below_it(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a.txt").write_text("one")
    (tmp_path / "data" / "z.jsonl").write_text('{"text": "two"}\n')
    (tmp_path / "data" / "ignored.bin").write_bytes(b"\xff")
    assert text_of(opened(tmp_path, "data")) == b"one\0two\0"
    assert text_of(opened(tmp_path, "data/**/*.txt")) == b"one\0"


def test_sources_keep_their_order_and_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    write_txt(tmp_path)
    assert text_of(opened(tmp_path, "2.txt", "0.txt", "*.txt")) == (
        b"x\0" + DOCUMENTS[0].encode() + b"\0" + DOCUMENTS[1].encode() + b"\0"
    )


def test_a_base_folder_with_pattern_characters_is_taken_literally(tmp_path: Path) -> None:
    odd = tmp_path / "[odd]*"
    odd.mkdir()
    (odd / "a.txt").write_text("text")
    assert text_of(opened(odd, "*.txt")) == b"text\0"
    assert text_of(opened(odd, "a.txt")) == b"text\0"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_long_text_is_streamed_without_changing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text_sources, "PIECE_BYTES", size)
    text = "\ufeff" + "".join(f"line {i} \u20ac\U0001f600\r\n" for i in range(20)) + "no end " * 20
    (tmp_path / "long.txt").write_bytes(text.encode())
    (tmp_path / "next.txt").write_bytes(b"next")
    assert text_of(opened(tmp_path, "*.txt")) == text[1:].encode() + b"\0next\0"


def test_pieces_of_long_text_end_where_lines_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "PIECE_BYTES", 64)
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    (file,) = text_sources.find_files(["long.txt"], tmp_path)
    pieces = list(file.pieces())
    assert len(pieces) > 5
    assert all(piece.text.endswith("\n") for piece in pieces[:-1])
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_stdlib_is_real_source_text_of_some_megabytes(tmp_path: Path) -> None:
    corpus = opened(tmp_path, "stdlib")
    assert 8e6 < len(corpus) < 25e6
    assert text_of(corpus).count(b"\0") > 400, "one separator for each document"
    text = text_of(corpus)
    assert b"class Thread:" in text and b"def dumps(obj, *, skipkeys" in text


def test_stdlib_leaves_out_tests_packages_and_what_differs_between_machines(tmp_path: Path) -> None:
    kept = ["b.py", "a/x.py", "z.py"]
    left = ["test/t.py", "a/tests/t.py", "site-packages/p.py", "_sysconfigdata_linux.py", "a/notes.txt"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    files = text_sources.stdlib_files(tmp_path)
    assert [piece.text for file in files for piece in file.pieces()] == ["a/x.py", "b.py", "z.py"]
    with pytest.raises(ManifestError, match="no standard library source in .*; install the full Python"):
        text_sources.stdlib_files(tmp_path / "nowhere")


# --- the cache


def test_a_second_opening_reads_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_txt(tmp_path)
    first = opened(tmp_path, "*.txt")
    monkeypatch.setattr(text_sources.SourceFile, "pieces", lambda file: pytest.fail(f"read {file.path} again"))
    again = opened(tmp_path, "*.txt")
    assert text_of(again) == text_of(first) == EXPECTED


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write_txt(tmp_path)
    before = opened(tmp_path, "*.txt")
    (tmp_path / "2.txt").write_text("other")
    after = opened(tmp_path, "*.txt")
    assert text_of(after).endswith(b"\0other\0")
    assert text_of(before) == EXPECTED, "who has the old tokens keeps them"


@pytest.mark.parametrize("what", ["grows", "is replaced", "one more"])
def test_a_corpus_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As one that a program still writes, or a download that another one renews."""
    write_txt(tmp_path)
    honest = text_sources.SourceFile.pieces

    def pieces(file: text_sources.SourceFile) -> Iterator[Any]:
        yield from honest(file)
        if what == "grows":
            with (tmp_path / "0.txt").open("a") as grown:
                grown.write("more")
        elif what == "one more":
            (tmp_path / "9.txt").write_text("more")
        else:
            (tmp_path / "new").write_bytes((tmp_path / "2.txt").read_bytes())
            os.utime(tmp_path / "new", ns=(0, 0))
            (tmp_path / "new").replace(tmp_path / "2.txt")

    monkeypatch.setattr(text_sources.SourceFile, "pieces", pieces)
    with pytest.raises(DataError, match=r"\*.txt has changed while it was read.* wait until nothing writes there"):
        opened(tmp_path, "*.txt")
    assert not list((tmp_path / "cache").glob("index/*.json"))
    monkeypatch.setattr(text_sources.SourceFile, "pieces", honest)
    opened(tmp_path, "*.txt")


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[:-5]
    elif how == "empty":
        data = bytearray()
    elif how == "a flipped bit":
        data[3] ^= 1
    elif how == "tokens lost":
        del data[2:4]
    elif how == "longer":
        data += b"more"
    path.write_bytes(data)


def cached_after(tmp_path: Path) -> tuple[CachedTokens, Path]:
    """Builds the cache of the three text files. Returns its entry and the file of its tokens."""
    write_txt(tmp_path)
    opened(tmp_path, "*.txt")
    (index,) = (tmp_path / "cache" / "index").glob("*.json")
    (path,) = (tmp_path / "cache").glob("*.tokens")
    return CachedTokens(tmp_path / "cache", index.stem, np.dtype(np.uint8)), path


@pytest.mark.parametrize("how", ["truncated", "empty", "a flipped bit", "tokens lost", "longer"])
def test_a_damaged_cache_file_is_rebuilt(tmp_path: Path, how: str) -> None:
    cached, path = cached_after(tmp_path)
    damage(path, how)
    assert cached.open() is None
    assert text_of(opened(tmp_path, "*.txt")) == EXPECTED
    assert cached.open() is not None


def test_damage_in_any_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "BLOCK_BYTES", 7)
    cached, path = cached_after(tmp_path)
    whole = path.read_bytes()
    for position in range(len(EXPECTED)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x80]) + whole[position + 1 :])
        assert cached.open() is None, position


def test_every_truncation_of_the_tokens_or_the_index_is_found(tmp_path: Path) -> None:
    cached, path = cached_after(tmp_path)
    (index,) = (tmp_path / "cache" / "index").glob("*.json")
    for file in (path, index):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert cached.open() is None, (file, length)
        file.write_bytes(whole)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"digest": 3}', b'{"digest": "../../a", "crc32": 7}'])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    write_txt(tmp_path)
    opened(tmp_path, "*.txt")
    (index,) = (tmp_path / "cache" / "index").glob("*.json")
    index.write_bytes(content)
    assert text_of(opened(tmp_path, "*.txt")) == EXPECTED


def test_wider_ids_are_stored_in_the_narrowest_type(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        def __init__(self, vocabulary: int) -> None:
            self.vocabulary = vocabulary
            self.fingerprint = f"wide {vocabulary}"

        def encode(self, texts: Sequence[str]) -> list[Ids]:
            return [np.array([ord(character) for character in text], np.uint32) for text in texts]

    (tmp_path / "a.txt").write_text("\u20ac")
    for vocabulary, dtype in ((65_536, np.uint16), (70_000, np.uint32)):
        corpus = open_corpus(["a.txt"], Wide(vocabulary), tmp_path / "cache", base=tmp_path)
        assert corpus.dtype == dtype and corpus.tolist() == [0x20AC, 0]
    with pytest.raises(ManifestError, match="token id 8364 but says that its vocabulary is 1000; use another"):
        open_corpus(["a.txt"], Wide(1000), tmp_path / "cache", base=tmp_path)


def test_several_processes_can_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 50_000)
    code = (
        "import sys; from pathlib import Path; from agora.data.corpus import open_corpus;"
        "from agora.data.tokenizer import ByteTokenizer; sys.stdin.readline(); root = Path(sys.argv[1]);"
        "print(open_corpus(['*.txt'], ByteTokenizer(), root / 'cache', base=root).sum())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    sums = {process.communicate("go\n", timeout=60)[0] for process in started}
    assert sums == {f"{sum(b'some text') * 50_000 + 10 * 50_000}\n"}
    assert all(process.returncode == 0 for process in started)
    assert [path.suffix for path in cache_files(tmp_path)].count(".tokens") == 1
    assert not list((tmp_path / "cache").rglob("building-*"))


def test_building_does_not_wait_for_ever_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_txt(tmp_path)
    monkeypatch.setattr("agora.data.token_cache.LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(BlockingIOError()))
    assert text_of(opened(tmp_path, "*.txt")) == EXPECTED


def test_what_a_killed_builder_left_is_removed_later(tmp_path: Path) -> None:
    write_txt(tmp_path)
    (tmp_path / "cache").mkdir()
    old, young = tmp_path / "cache" / "building-old", tmp_path / "cache" / "building-young"
    old.write_text("x")
    young.write_text("x")
    os.utime(old, (0, 0))
    opened(tmp_path, "*.txt")
    assert young.exists() and not old.exists()


# --- errors


def refused(tmp_path: Path, *sources: str) -> str:
    with pytest.raises((DataError, ManifestError, LocalError)) as caught:
        opened(tmp_path, *sources)
    text = str(caught.value)
    assert "\n" not in text and (text[0].isupper() or text[0] in "/[")
    assert not [path for path in cache_files(tmp_path) if path.suffix == ".tokens"], "nothing half-built may stay"
    assert not list(tmp_path.rglob("building-*"))
    return text


def test_a_missing_file_or_empty_pattern_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/nowhere.txt does not exist; correct 'nowhere.txt'" in refused(tmp_path, "nowhere.txt")
    assert "'no*.txt' in [data] corpus matches no file" in refused(tmp_path, "no*.txt")
    (tmp_path / "empty").mkdir()
    assert "holds no .txt, .jsonl, .ndjson or .parquet file" in refused(tmp_path, "empty")
    assert "corpus is empty; name files" in refused(tmp_path)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    assert "a.docx is unknown; rename it to end in .txt, .jsonl, .ndjson or .parquet" in refused(tmp_path, "a.docx")


def test_files_without_any_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")
    assert "a.txt, b.txt holds no text; name other files" in refused(tmp_path, "a.txt", "b.txt")


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "PIECE_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"good text\n" * 3 + b"caf\xe9 latin")
    message = refused(tmp_path, "a.txt")
    assert "a.txt, near byte 33, is not UTF-8 text (byte 0xe9), perhaps WINDOWS-1252" in message and "iconv" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"texts": "a", "id": 3}', "{}:2 has no field 'text' (present: id, texts); rename"),
        ("{}", "{}:2 has no field 'text' (present: none)"),
        ('{"text": 5}', "{}:2 'text' is a number, not text; convert it to a string"),
        ('["a"]', "{}:2 is not a JSON object; write one JSON object a line"),
        ('{"text": "a"', "{}:2 is not JSON (Expecting"),
        ("[" * 100_000, "{}:2 is not JSON ("),
        ('{"text": "\\ud800"}', "{}:2 'text' holds half a surrogate pair"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    assert said.format(path) in refused(tmp_path, "rows.jsonl")


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (record_files, json_values, tables):
        monkeypatch.setattr(module, "LONGEST_RECORD", 1 << 20)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * (1 << 20)}))
    assert "rows.jsonl:1 is longer than 1 MiB; split" in refused(tmp_path, "rows.jsonl")


def test_a_parquet_file_without_a_text_column_lists_those_present(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "id": [1]}), tmp_path / "a.parquet")
    assert "a.parquet has no column 'text' (present: content, id); rename" in refused(tmp_path, "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert "a.parquet has a column 'text' that is not a string" in refused(tmp_path, "a.parquet")


@pytest.mark.parametrize("keep", [0, 3, 4, 100, -20])
def test_a_broken_parquet_file_says_so(tmp_path: Path, keep: int) -> None:
    pq.write_table(pa.table({"text": ["some text"] * 1000}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:keep])
    assert "a.parquet" in refused(tmp_path, "a.parquet")


@pytest.mark.parametrize("module", ["pyarrow", "pyarrow.parquet"])
def test_a_missing_package_is_answered_with_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, module, None)
    assert "needs the package pyarrow; install it with: pip install 'agora-swarm[data]'" in refused(
        tmp_path, "a.parquet"
    )


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_txt(tmp_path)

    really_open = Path.open

    def guarded(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded)
    assert f"Cannot read {tmp_path}/0.txt (Permission denied); correct" in refused(tmp_path, "*.txt")


def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_txt(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space is left for the token cache in" in refused(tmp_path, "*.txt")


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    write_txt(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="Cannot write the token cache in .*Not a directory"):
        open_corpus(["0.txt"], ByteTokenizer(), tmp_path / "file" / "cache", base=tmp_path)


def test_the_parts_of_a_corpus_are_its_sources_also_from_a_cache_of_before(tmp_path: Path) -> None:
    for name, text in (("a.txt", "aaaa"), ("b.txt", "bb"), ("c.txt", "ccc")):
        (tmp_path / name).write_text(text)
    sources = ["b.txt", "*.txt"]
    how: Any = {"base": tmp_path}
    ids, ends = open_corpus_parts(sources, ByteTokenizer(), tmp_path / "cache", **how)
    texts = [bytes(ids[a:b].astype(np.uint8)) for a, b in pairwise((0, *ends))]
    assert texts[0].startswith(b"bb") and texts[1].startswith(b"aaaa") and b"ccc" in texts[1] and ends[-1] == len(ids)
    assert open_corpus_parts(sources, ByteTokenizer(), tmp_path / "cache", **how)[1] == ends
    (index,) = (tmp_path / "cache" / "index").glob("*.json")
    index.write_text(json.dumps({key: it for key, it in json.loads(index.read_text()).items() if "details" not in key}))
    again, found = open_corpus_parts(sources, ByteTokenizer(), tmp_path / "cache", **how)
    assert found == ends and again.tolist() == ids.tolist()
    assert open_corpus_parts(["a.txt"], ByteTokenizer(), tmp_path / "cache", **how)[1] == (5,)
