"""Sources of text -> a stream of documents: files found, in a fixed order, and read piece by piece.

Knows .txt, .jsonl, .parquet, globs, folders and the running Python's standard library. Holds at most one piece of a
file in memory (a document, or a few MB of a long .txt). Must not know tokens or the cache.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agora_protocol.errors import AgoraError, DiskError, LocalError, ManifestError

from agora.data.tokenizer import DATA_EXTRA

STDLIB = "stdlib"
TEXT_FIELD = "text"
PIECE_BYTES = 4 << 20
LINE_BYTES = 64 << 20
PARQUET_ROWS = 256

# Tests, bundled installers and byte code are left out: distributions ship them or not, the rest is the same everywhere.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document; `ends` when it is the document's last."""

    text: str
    ends: bool


Reader = Callable[[Path], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and how to read it."""

    path: Path
    read: Reader

    def pieces(self) -> Iterator[Piece]:
        """The file's text, in order. Raises DiskError, ManifestError or LocalError with the file's name."""
        try:
            yield from self.read(self.path)
        except AgoraError:
            raise
        except OSError as error:
            raise unreadable(self.path, error) from error


def unreadable(path: Path, error: OSError) -> DiskError:
    """What to raise when the operating system does not give the file."""
    return DiskError(
        f"Cannot read {path} ({error.strerror or error}); correct [data] corpus or the file's permissions."
    )


def expand(sources: Sequence[str], base: Path) -> list[SourceFile]:
    """The files that `sources` name, each once, in the order of the sources (files of a glob or folder sorted by name).

    A source is "stdlib", a file, a folder (every file below it in a known format) or a glob; relative paths start at
    `base`. Raises ManifestError for a source that names nothing or a file in an unknown format.
    """
    if not sources:
        raise ManifestError(f"[data] corpus is empty; name files, globs or {STDLIB!r}.")
    files: dict[Path, SourceFile] = {}
    for source in sources:
        try:
            found = _files_of(source, base)
        except OSError as error:
            raise unreadable(base / source, error) from error
        for file in found:
            files.setdefault(file.path, file)
    return list(files.values())


def _files_of(source: str, base: Path) -> list[SourceFile]:
    if source == STDLIB:
        return stdlib_files()
    given = Path(source).expanduser()
    path = base / given
    if path.is_dir():
        return _folder_files(path, source)
    if path.exists():
        return [SourceFile(path.resolve(), _reader_of(path))]
    if not glob.has_magic(source):
        raise ManifestError(f"Corpus file {path} does not exist; correct {source!r} in [data] corpus (try {STDLIB!r}).")
    found = sorted(base / name for name in glob.glob(str(given), root_dir=base, recursive=True))
    found = [file for file in found if file.is_file()]
    if not found:
        raise ManifestError(f"The pattern {source!r} in [data] corpus matches no file below {base}; correct it.")
    return [SourceFile(file.resolve(), _reader_of(file)) for file in found]


def _folder_files(folder: Path, source: str) -> list[SourceFile]:
    found = sorted(file for file in folder.rglob("*") if file.suffix in READERS and file.is_file())
    if not found:
        raise ManifestError(f"Folder {folder} holds no {_formats()} file; correct {source!r} in [data] corpus.")
    return [SourceFile(file.resolve(), READERS[file.suffix]) for file in found]


def _reader_of(path: Path) -> Reader:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ManifestError(f"The format of corpus file {path} is unknown; rename it to end in {_formats()}.")
    return reader


def _formats() -> str:
    *most, last = READERS
    return f"{', '.join(most)} or {last}"


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """The running Python's standard library as source text: some 12 MB, one document per file, sorted by path.

    Left out: the folders of NOT_STDLIB, files that are not UTF-8, and `_sysconfigdata*` (differs from machine to
    machine), so that two machines with the same Python release read the same text.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise ManifestError(
            f"This Python has no standard library source in {root}, which [data] corpus {STDLIB!r} needs; "
            "install the full Python, or name .txt files."
        )
    found.sort(key=lambda path: path.relative_to(root).as_posix())
    return [SourceFile(path, _read_source) for path in found]


def _read_source(path: Path) -> Iterator[Piece]:
    try:
        yield Piece(path.read_bytes().decode(), True)
    except UnicodeDecodeError:
        return


def _read_text(path: Path) -> Iterator[Piece]:
    """One document, in pieces that end at a line's end where there is one within PIECE_BYTES."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, read_bytes = "", 0
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            rest += _decoded(decoder, chunk, path, read_bytes)
            read_bytes += len(chunk)
            cut = rest.rfind("\n") + 1 or (len(rest) if len(rest) >= PIECE_BYTES else 0)
            if cut:
                yield Piece(rest[:cut], False)
                rest = rest[cut:]
    rest += _decoded(decoder, b"", path, read_bytes)
    if read_bytes:
        yield Piece(rest, True)


def _decoded(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, offset: int) -> str:
    try:
        return decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"Corpus file {path} is not UTF-8 text (near byte {offset + error.start}); "
            "convert it, for example with `iconv -f ISO-8859-1 -t UTF-8`."
        ) from error


def _read_jsonl(path: Path) -> Iterator[Piece]:
    """One document per line: a JSON object whose "text" is a string. Empty lines and empty texts are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.strip() and (text := _text_of(line, f"Line {number} of {path}")):
                yield Piece(text, True)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            raise ManifestError(f"Line {number} of {path} is longer than {LINE_BYTES >> 20} MiB; split that document.")
        yield line


def _text_of(line: bytes, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is not JSON ({str(error)[:200]}); correct or remove the line.") from error
    if not isinstance(row, dict):
        raise ManifestError(f'{where} is not a JSON object; each line must look like {{"text": "..."}}.')
    text = row.get(TEXT_FIELD)
    if not isinstance(text, str):
        raise _no_text(where, "field", sorted(map(str, row)), TEXT_FIELD in row)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ManifestError(
            f"{where} holds half a surrogate pair, which is no text; correct or remove the line."
        ) from error
    return text


def _no_text(where: str, kind: str, present: Sequence[str], wrong_type: bool) -> ManifestError:
    names = ", ".join(present[:20]) or "none"
    if wrong_type:
        return ManifestError(f"{where} has a {kind} 'text' that is not a string; convert it to one.")
    return ManifestError(
        f"{where} has no {kind} 'text' (present: {names}); rename the one that holds the text to 'text'."
    )


def _read_parquet(path: Path) -> Iterator[Piece]:
    """One document per row of the string column "text"; nulls and empty texts are skipped."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise LocalError(f"Reading {path} needs the package pyarrow; {DATA_EXTRA}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_columns(table.schema_arrow, path)
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[TEXT_FIELD], use_threads=False):
                yield from (Piece(text, True) for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{path} is not a readable parquet file ({str(error)[:200]}); fetch or write it again."
        ) from error


def _check_columns(schema: Any, path: Path) -> None:
    import pyarrow.types as types

    if TEXT_FIELD not in schema.names:
        raise _no_text(str(path), "column", schema.names, False)
    kind = schema.field(TEXT_FIELD).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise _no_text(str(path), "column", schema.names, True)


READERS: dict[str, Reader] = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
