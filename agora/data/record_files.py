"""Reads the records of a data file one by one: JSON lines, a JSON list, parquet, a `datasets` folder, a text file.

At most one record of a JSON file, or ROWS rows of a table, is in memory.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from agora_protocol.errors import DataError, DiskError, LocalError

from agora.data.tokenizer import DATA_EXTRA

LONGEST_RECORD: Final = 64 << 20  # characters or bytes
CHUNK: Final = 1 << 20  # characters that are read at a time
ROWS: Final = 256  # rows of a table that are converted at a time
ONE_A_LINE: Final = "write one JSON object a line, or a list of objects in a .json file"
STATE_FILE: Final = "state.json"
SPLITS_FILE: Final = "dataset_dict.json"

DECODER: Final = json.JSONDecoder()
SPACE: Final = re.compile(r"[ \t\r\n]*")
DATA_LIST: Final = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as the file has it: `fields` by column name. where: "FILE:LINE", or "FILE row N" of a table."""

    fields: Mapping[str, Any]
    where: str


def read_records(path: Path, columns: Collection[str] | None = None) -> Iterator[RawRecord]:
    """Yields the records of a file or `datasets` folder, in the file's order. The suffix decides the format (READERS).

    columns: which columns of a table (parquet, `datasets`) to read, None for all; columns that a table does not have
    are ignored, and other formats ignore `columns`. The file is opened when the first record is asked for. Raises
    DiskError if the file cannot be read, DataError for an unknown suffix and for a malformed table or record (with the
    line in JSON and text), LocalError without the package that a format needs.
    """
    if path.is_dir():
        read: Reader = _read_datasets_folder
    elif path.suffix in READERS or not path.exists():
        read = READERS.get(path.suffix, read_lines)
    else:
        known = " or ".join(", ".join(READERS).rsplit(", ", 1))
        raise DataError(f"The format of {path} is unknown; rename or convert it to {known}.")
    try:
        yield from read(path, columns)
    except OSError as error:
        raise unreadable_data(path, error) from error


def data_files(path: Path) -> list[Path]:
    """In the order in which they are read; they need not exist. Raises DataError for a folder that is not of
    `datasets`.
    """
    return _arrow_files(path) if path.is_dir() else [path]


def unreadable_data(path: Path, error: OSError) -> DiskError:
    return DiskError(f"Cannot read {path} ({error.strerror or error}); correct the path or its permissions.")


# Yields the records of a file; its arguments are those of read_records.
Reader = Callable[[Path, Collection[str] | None], Iterator[RawRecord]]


def read_lines(path: Path, columns: Collection[str] | None = None) -> Iterator[RawRecord]:
    """Raises OSError, and DataError, with the line's number, for one over LONGEST_RECORD bytes or no JSON object."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_RECORD + 1)
            where = f"{path}:{number}"
            if not line:
                return
            if len(line) > LONGEST_RECORD:
                raise DataError(f"{where} is longer than {LONGEST_RECORD >> 20} MiB; split that record.")
            if line.strip():
                try:
                    value = json.loads(line.rstrip(b"\r\n"))
                except (ValueError, RecursionError) as error:
                    problem = f"{where} is not JSON ({_describe_json_error(error)}); {ONE_A_LINE}, or remove the line."
                    raise DataError(problem) from error
                yield _check_record(value, where)


def _describe_json_error(error: Exception) -> str:
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else repr(str(error)[:200])


def _check_record(value: object, where: str) -> RawRecord:
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object; {ONE_A_LINE}.")
    return RawRecord(value, where)


def _read_json(path: Path, columns: Collection[str] | None) -> Iterator[RawRecord]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        scanner = JsonScanner(file, path)
        try:
            first = scanner.next_character()
            has_data_key = first == "{" and scanner.accept(DATA_LIST)
            if first == "[" or has_data_key:
                yield from _list_items(scanner, "}" if has_data_key else "")
                return
        except UnicodeDecodeError as error:
            problem = f"{path}:{scanner.line} or a line soon after it is not UTF-8 text; convert the file with iconv."
            raise DataError(problem) from error
    yield from read_lines(path, columns)


def _list_items(scanner: JsonScanner, closing: str) -> Iterator[RawRecord]:
    scanner.expect("[")
    while scanner.next_character() != "]":
        where = f"{scanner.path}:{scanner.line}"
        if scanner.next_character() != "{":
            raise DataError(f"{where} has something other than an object in the list; {ONE_A_LINE}.")
        yield _check_record(scanner.take_value(), where)
        if scanner.next_character() != "]":
            scanner.expect(",")
    scanner.expect("]")
    if closing:
        scanner.expect(closing)
    if scanner.next_character():
        raise DataError(f"{scanner.path}:{scanner.line} has something after the list's end; {ONE_A_LINE}.")


class JsonScanner:
    """Reads JSON values one by one, with little more than one of them in memory. line: from 1."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self.path = path
        self.line = 1
        self._file = file
        self._text = ""
        self._at = 0

    def next_character(self) -> str:
        """Skips white space and returns the next character without skipping it; "" at the end of the file."""
        while True:
            self._advance(_end_of_space(self._text, self._at))
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def expect(self, expected: str) -> None:
        """Skips white space and the character `expected`. Raises DataError, with the line, if another one follows."""
        found = self.next_character()
        if found != expected:
            actual = repr(found) if found else "the end of the file"
            problem = f"{self.path}:{self.line} has {actual} where {expected!r} is expected; correct the JSON there."
            raise DataError(problem)
        self._advance(self._at + 1)

    def accept(self, pattern: re.Pattern[str]) -> bool:
        """Skips what `pattern` matches in the text read so far; returns whether it matched."""
        match = pattern.match(self._text, self._at)
        if match:
            self._advance(match.end())
        return match is not None

    def take_value(self) -> object:
        """Raises DataError, with the line, if it is malformed or longer than LONGEST_RECORD characters."""
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # the text read so far may end within the value
                may_go_on = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16
                if not (may_go_on and len(self._text) - self._at <= LONGEST_RECORD and self._read_more()):
                    raise self._malformed_error(error.pos - self._at, error.msg) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, too many brackets
                raise self._malformed_error(0, str(error)[:200]) from error
            else:
                if end - self._at > LONGEST_RECORD:
                    raise DataError(
                        f"{self.path}:{self.line} is longer than {LONGEST_RECORD >> 20} MiB; split that record."
                    )
                self._advance(end)
                return value

    def _malformed_error(self, offset: int, reason: str) -> DataError:
        line = self.line + self._text.count("\n", self._at, self._at + offset)
        begins = f" in the record that begins at line {self.line}" if line != self.line else ""
        return DataError(f"{self.path}:{line} is not JSON ({reason}{begins}); correct or remove that record.")

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read_more(self) -> bool:
        # At least as much as is here already: the text doubles, and a long value is scanned only a few times.
        piece = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._text = self._text[self._at :] + piece
        self._at = 0
        return bool(piece)


def _end_of_space(text: str, start: int) -> int:
    match = SPACE.match(text, start)
    return match.end() if match else start


def _read_text(path: Path, columns: Collection[str] | None) -> Iterator[RawRecord]:
    with path.open("rb") as file:
        content = file.read(LONGEST_RECORD + 1)
    if len(content) > LONGEST_RECORD:
        raise DataError(f"{path} is longer than {LONGEST_RECORD >> 20} MiB; split it.")
    try:
        yield RawRecord({"text": content.decode("utf-8-sig")}, f"{path}:1")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line} is not UTF-8 text; convert the file, for example with iconv.") from error


def _read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[RawRecord]:
    pyarrow = import_pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = [name for name in table.schema_arrow.names if columns is None or name in columns]
            yield from _iter_rows(table.iter_batches(batch_size=ROWS, columns=names, use_threads=False), path)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise unreadable_table(path, error) from error


def _read_datasets_folder(path: Path, columns: Collection[str] | None) -> Iterator[RawRecord]:
    pyarrow = import_pyarrow(path)
    rows_before = 0
    for file in _arrow_files(path):
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    wanted = [name for name in batch.schema.names if columns is None or name in columns]
                    slices = (batch.select(wanted).slice(start, ROWS) for start in range(0, batch.num_rows, ROWS))
                    yield from _iter_rows(slices, path, rows_before)
                    rows_before += batch.num_rows
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise unreadable_table(file, error) from error


def _arrow_files(folder: Path) -> list[Path]:
    if (folder / SPLITS_FILE).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE_FILE}"))
        raise DataError(f"{folder} holds the splits {', '.join(map(repr, splits))}; give the folder of one of them.")
    if not (folder / STATE_FILE).is_file():
        problem = f"{folder} is not a folder that `Dataset.save_to_disk` wrote: it has no {STATE_FILE}; give a file."
        raise DataError(problem)
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside of the folder")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{folder / STATE_FILE} does not list the arrow files of its folder; save the data set again."
        raise DataError(problem) from error
    return [folder / name for name in names]


def import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise LocalError(f"Reading {path} needs the package pyarrow; {DATA_EXTRA}") from error
    return pyarrow


def _iter_rows(batches: Iterable[Any], path: Path, rows_before: int = 0) -> Iterator[RawRecord]:
    number = rows_before
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield RawRecord(fields, f"{path} row {number}")


def unreadable_table(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a readable table ({str(error)[:200]!r}); fetch or write it again.")


def check_text(value: object, where: str) -> str:
    """Returns `value` if it is a string that UTF-8 can encode. Raises DataError, which names `where`, otherwise."""
    if not isinstance(value, str):
        raise DataError(f"{where} is {json_type(value)}, not text; convert it to a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"{where} holds half a surrogate pair, which is not text; correct or remove the record."
        raise DataError(problem) from error
    return value


def json_type(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


# The function that reads a file, by its suffix.
READERS: Final[dict[str, Reader]] = {
    ".jsonl": read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
