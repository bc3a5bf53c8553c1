"""Finds the files that a corpus names, in a fixed order, and reads their documents piece by piece.

At most one piece of a file is in memory: a document, or a few MB of a long .txt.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora_protocol.errors import DataError, DiskError, ManifestError

from agora.core.user_paths import expand_home
from agora.data.data_file import READ_ERRORS, format_suffix, import_pyarrow, known_suffixes, not_utf8, open_text
from agora.data.record_files import check_text, read_lines
from agora.data.tables import parquet_batches

STDLIB = "stdlib"
TEXT_FIELD = "text"
PIECE_BYTES = 4 << 20  # bytes of a .txt that are read at a time

# Folders of the standard library that are left out: some distributions do not ship them.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive text of one document: all of it, or a part. ends_document: this piece is the document's last one."""

    text: str
    ends_document: bool


Reader = Callable[[Path], Iterator[Piece]]  # yields the text of a file piece by piece, in its order


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the corpus. read: the function that reads files of its format."""

    path: Path
    read: Reader

    def pieces(self) -> Iterator[Piece]:
        """Raises DiskError, DataError for malformed content, LocalError without the package that the format needs."""
        try:
            yield from self.read(self.path)
        except READ_ERRORS as error:
            raise unreadable_file(self.path, error) from error


def unreadable_file(path: Path, error: Exception) -> DataError | DiskError:
    """The error for READ_ERRORS, as record_files.unreadable_data; it names [data] corpus."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = error.strerror or error
        return DiskError(f"Cannot read {path} ({reason}); correct [data] corpus or the file's permissions.")
    return DataError(f"Corpus file {path} is damaged or cut off ({str(error)[:200]!r}); fetch or write it again.")


def find_files(sources: Sequence[str], base: Path) -> list[SourceFile]:
    """Returns the files that `sources` name, each once, in the order of the sources.

    A source is "stdlib" (the running Python's standard library), a file, a folder (all files below it in a known
    format, sorted by path) or a glob (sorted by path). Relative paths start at `base`. Raises ManifestError for no
    source, for a source without a file, or a named or globbed file in an unknown format; DiskError if the
    operating system cannot look a source up.
    """
    if not sources:
        raise ManifestError(f"[data] corpus is empty; name files, globs or {STDLIB!r}.")
    files: dict[Path, SourceFile] = {}
    for source in sources:
        try:
            for file in _find_source_files(source, base):
                files.setdefault(file.path, file)
        except OSError as error:
            raise unreadable_file(base / source, error) from error
    return list(files.values())


def _find_source_files(source: str, base: Path) -> list[SourceFile]:
    if source == STDLIB:
        return stdlib_files()
    given = expand_home(source)
    path = base / given
    formats = known_suffixes(READERS)
    if path.is_dir():
        paths = [file for file in path.rglob("*") if format_suffix(file) in READERS]
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
        if format_suffix(file) not in READERS:
            raise ManifestError(f"The format of corpus file {file} is unknown; rename it to end in {formats}.")
    return [SourceFile(file.resolve(), READERS[format_suffix(file)]) for file in files]


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """None: the running Python's. Sorted; without the folders of NOT_STDLIB and _sysconfigdata*.py. Raises
    ManifestError if none is left.
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
    with contextlib.suppress(UnicodeDecodeError):
        yield Piece(path.read_bytes().decode(), True)


def _read_text(path: Path) -> Iterator[Piece]:
    rest = ""
    read = 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_text(path) as file:
        while block := file.read(PIECE_BYTES):
            try:
                rest += decoder.decode(block)
            except UnicodeDecodeError as error:
                near = f"near byte {read + len(block) - len(error.object) + error.start}"
                raise not_utf8(path, f"Corpus file {path}, {near},", error.object[error.start :], error) from error
            read += len(block)
            cut = rest.rfind("\n") + 1 or (len(rest) if len(rest) >= PIECE_BYTES else 0)
            if cut:
                yield Piece(rest[:cut], False)
                rest = rest[cut:]
    try:
        rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise not_utf8(path, f"Corpus file {path}, at its end,", error.object, error) from error
    if read:
        yield Piece(rest, True)


def _read_jsonl(path: Path) -> Iterator[Piece]:
    for record in read_lines(path):
        if TEXT_FIELD not in record.fields:
            raise _missing_text_error(record.where, "field", sorted(map(str, record.fields)))
        if text := check_text(record.fields[TEXT_FIELD], f"{record.where} {TEXT_FIELD!r}"):
            yield Piece(text, True)


def _missing_text_error(where: str, kind: str, present: Sequence[str]) -> DataError:
    if TEXT_FIELD in present:
        return DataError(f"{where} has a {kind} 'text' that is not a string; convert it to one.")
    names = ", ".join(present[:20]) or "none"
    return DataError(f"{where} has no {kind} 'text' (present: {names}); rename the one that holds the text to 'text'.")


def _read_parquet(path: Path) -> Iterator[Piece]:
    pyarrow = import_pyarrow(path)
    is_checked = False
    for batch in parquet_batches(path, (TEXT_FIELD,)):
        if not is_checked:
            _check_text_column(path, batch.schema, pyarrow.types)
            is_checked = True
        yield from (Piece(text, True) for text in batch.column(0).to_pylist() if text)


def _check_text_column(path: Path, schema: Any, types: Any) -> None:
    if TEXT_FIELD not in schema.names:
        raise _missing_text_error(str(path), "column", _parquet_columns(path))
    kind = schema.field(TEXT_FIELD).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise _missing_text_error(str(path), "column", schema.names)


def _parquet_columns(path: Path) -> list[str]:
    names: list[str] = import_pyarrow(path).parquet.read_schema(path).names
    return names


# The function that reads a file, by its suffix. Another format is another entry.
READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
