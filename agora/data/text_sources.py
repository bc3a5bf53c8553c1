"""Finds the files that a corpus names, in a fixed order, and reads their documents piece by piece.

Knows: .txt, .jsonl, .parquet, globs, folders, the running Python's standard library. Must not know: tokens, the cache.
At most one piece of a file is in memory: a document, or a few MB of a long .txt.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora_protocol.errors import DiskError, LocalError, ManifestError

from agora.data.tokenizer import DATA_EXTRA

STDLIB = "stdlib"
TEXT_FIELD = "text"
PIECE_BYTES = 4 << 20
LINE_BYTES = 64 << 20
PARQUET_ROWS = 256

NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Folders of the standard library that are left out: some distributions do not ship them. The rest is equal everywhere.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive text of one document, all or part of it. ends_document: it is the document's last piece."""

    text: str
    ends_document: bool


Reader = Callable[[Path], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the corpus, and the function that reads its format."""

    path: Path
    read: Reader

    def pieces(self) -> Iterator[Piece]:
        """Reads the file piece by piece. Raises DiskError, ManifestError or LocalError with the file's name."""
        try:
            yield from self.read(self.path)
        except OSError as error:
            raise unreadable_file(self.path, error) from error


def unreadable_file(path: Path, error: OSError) -> DiskError:
    """Returns the error to raise when the operating system cannot read `path`."""
    return DiskError(
        f"Cannot read {path} ({error.strerror or error}); correct [data] corpus or the file's permissions."
    )


def find_files(sources: Sequence[str], base: Path) -> list[SourceFile]:
    """Returns the files that `sources` name, each once, in the order of the sources.

    | source                | its files                                                |
    |-----------------------|----------------------------------------------------------|
    | "stdlib"              | the running Python's standard library                    |
    | a file                | itself                                                   |
    | a folder              | all files below it in a known format, sorted by name     |
    | a glob                | the files that match, sorted by name                     |

    Relative paths start at `base`. Raises ManifestError for a source without a file, or a file in an unknown format.
    """
    if not sources:
        raise ManifestError(f"[data] corpus is empty; name files, globs or {STDLIB!r}.")
    files: dict[Path, SourceFile] = {}
    for source in sources:
        try:
            for file in _files_of(source, base):
                files.setdefault(file.path, file)
        except OSError as error:
            raise unreadable_file(base / source, error) from error
    return list(files.values())


def _files_of(source: str, base: Path) -> list[SourceFile]:
    """Returns the files of one source of find_files's table, sorted. Raises ManifestError as find_files does."""
    if source == STDLIB:
        return stdlib_files()
    given = Path(source).expanduser()
    path = base / given
    formats = " or ".join(", ".join(READERS).rsplit(", ", 1))
    if path.is_dir():
        paths = [file for file in path.rglob("*") if file.suffix in READERS]
        problem = f"Folder {path} holds no {formats} file; correct {source!r} in [data] corpus."
    elif path.exists() or not glob.has_magic(source):
        paths = [path]
        problem = f"Corpus file {path} does not exist; correct {source!r} in [data] corpus (try {STDLIB!r})."
    else:
        paths = [base / name for name in glob.glob(str(given), root_dir=base, recursive=True)]
        problem = f"The pattern {source!r} in [data] corpus matches no file below {base}; correct it."
    files = sorted(file for file in paths if file.is_file())
    if not files:
        raise ManifestError(problem)
    for file in files:
        if file.suffix not in READERS:
            raise ManifestError(f"The format of corpus file {file} is unknown; rename it to end in {formats}.")
    return [SourceFile(file.resolve(), READERS[file.suffix]) for file in files]


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """Returns the source files of Python's standard library, sorted by path: some 12 MB, one document per file.

    Left out are the folders of NOT_STDLIB and `_sysconfigdata*`, and when they are read also files that are not UTF-8:
    two machines with the same Python release read the same text. root: None for the running Python's.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        paths += [Path(folder, name) for name in sources]
    if not paths:
        raise ManifestError(
            f"This Python has no standard library source in {root}, which [data] corpus {STDLIB!r} needs; "
            "install the full Python, or name .txt files."
        )
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    return [SourceFile(path, _read_source) for path in paths]


def _read_source(path: Path) -> Iterator[Piece]:
    """Yields the whole text of a Python source file as one document; yields nothing when it is not UTF-8."""
    with contextlib.suppress(UnicodeDecodeError):
        yield Piece(path.read_bytes().decode(), True)


def _read_text(path: Path) -> Iterator[Piece]:
    """Yields a text file as one document, in pieces that end at the end of a line if there is one in PIECE_BYTES."""
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
    """Decodes the next chunk of a file, from byte `offset`; characters may span chunks; an empty chunk ends it.

    Raises ManifestError for bytes that are not UTF-8.
    """
    try:
        return decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"Corpus file {path} is not UTF-8 text (near byte {offset + error.start}); "
            "convert it, for example with `iconv -f ISO-8859-1 -t UTF-8`."
        ) from error


def _read_jsonl(path: Path) -> Iterator[Piece]:
    """Yields one document per line: the "text" of a JSON object. Empty lines and empty texts are skipped."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line, where = file.readline(LINE_BYTES + 1), f"Line {number} of {path}"
            if not line:
                return
            if len(line) > LINE_BYTES:
                raise ManifestError(f"{where} is longer than {LINE_BYTES >> 20} MiB; split that document.")
            if line.strip() and (text := _text_of(line, where)):
                yield Piece(text, True)


def _text_of(line: bytes, where: str) -> str:
    """Returns the field "text" of the JSON object in `line`. where: the line's name in errors.

    Raises ManifestError for a line that is not JSON or no object, and when "text" is absent, no string, or half a
    surrogate pair.
    """
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
    """Returns the error that field or column (`kind`) "text" is absent, or no string (`wrong_type`).

    present: the names of the fields or columns that are there.
    """
    names = ", ".join(present[:20]) or "none"
    if wrong_type:
        return ManifestError(f"{where} has a {kind} 'text' that is not a string; convert it to one.")
    return ManifestError(
        f"{where} has no {kind} 'text' (present: {names}); rename the one that holds the text to 'text'."
    )


def _read_parquet(path: Path) -> Iterator[Piece]:
    """Yields one document per row: its column "text". Nulls and empty texts are skipped."""
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
    """Raises ManifestError unless a parquet file has a column "text" of strings."""
    import pyarrow.types as types

    if TEXT_FIELD not in schema.names:
        raise _no_text(str(path), "column", schema.names, False)
    kind = schema.field(TEXT_FIELD).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise _no_text(str(path), "column", schema.names, True)


READERS: dict[str, Reader] = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
"""The function that reads a file, by its suffix. Another format is another entry."""
