"""Reads the records of a data file one by one: JSON lines, a JSON list, csv, parquet, a `datasets` folder, a text file.

Lines, lists, csv and text may be compressed (COMPRESSIONS). At most one record of such a file, or some rows of a table,
is in memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError

from agora.data.data_file import (
    HEAD,
    LONGEST_RECORD,
    READ_ERRORS,
    format_suffix,
    known_suffixes,
    not_utf8,
    open_text,
    refuse_other_content,
    unreadable_data,
)
from agora.data.json_values import JsonScanner, KeyTwice, json_type, parse_json
from agora.data.tables import arrow_batches, arrow_files, parquet_batches

ONE_A_LINE: Final = "write one JSON object a line, or a list of objects in a .json file"

DATA_LIST: Final = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as the file has it: `fields` by column name. where: "FILE:LINE", or "FILE row N" of a table."""

    fields: Mapping[str, Any]
    where: str


# Is told of a malformed record, which is then left out.
OnBad = Callable[[DataError], None]


def read_records(
    path: Path, columns: Collection[str] | None = None, on_bad: OnBad | None = None
) -> Iterator[RawRecord]:
    """Yields the records of a file or `datasets` folder, in the file's order. The suffix decides the format (READERS).

    columns: which columns of a table (parquet, `datasets`) to read, None for all; columns that a table does not have
    are ignored, and other formats ignore `columns`. on_bad: without it the first malformed record is raised; what makes
    the rest of a file unreadable always is. The file is opened when the first record is asked for. Raises DiskError if
    the file cannot be read, DataError for an unknown suffix and for a malformed table or record (with the line in JSON
    and text), LocalError without the package that a format needs.
    """
    try:
        yield from _find_reader(path)(path, columns, on_bad)
    except READ_ERRORS as error:
        raise unreadable_data(path, error) from error


def _find_reader(path: Path) -> Reader:
    if path.is_dir():
        return _read_datasets_folder
    if not path.exists():
        return read_lines  # raises that there is no such file
    if not path.is_file():
        raise DataError(
            f"{path} is a pipe or a device, and data is read more than once; name - and redirect standard input, "
            "or write it to a file."
        )
    if (suffix := format_suffix(path)) in READERS:
        return READERS[suffix]
    with path.open("rb") as file:
        refuse_other_content(file.read(HEAD), path)
    raise DataError(f"The format of {path} is unknown; rename or convert it to {known_suffixes(READERS)}.")


def data_files(path: Path) -> list[Path]:
    """Returns the files in the order in which they are read; they need not exist.

    Raises DataError for a folder that the package datasets has not saved.
    """
    return arrow_files(path) if path.is_dir() else [path]


# Yields the records of a file; its arguments are those of read_records.
Reader = Callable[[Path, Collection[str] | None, OnBad | None], Iterator[RawRecord]]


# --- lines


def read_lines(path: Path, columns: Collection[str] | None = None, on_bad: OnBad | None = None) -> Iterator[RawRecord]:
    """Yields the JSON object of each line that is not blank, as a record. `columns` is ignored.

    Raises OSError, and DataError, with the line's number, for a line that is longer than LONGEST_RECORD bytes or is not
    a JSON object; with `on_bad` these errors are passed to it instead.
    """
    for number, line in _numbered_lines(path):
        where = f"{path}:{number}"
        try:
            if len(line) > LONGEST_RECORD or line.strip():
                yield _read_object_line(line, number, path, where)
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(error)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    # Of a longer line the first LONGEST_RECORD + 1 bytes.
    with open_text(path) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_RECORD + 1)
            if not line:
                return
            yield number, line
            while len(line) > LONGEST_RECORD and not line.endswith(b"\n"):
                line = file.readline(LONGEST_RECORD + 1)


def _read_object_line(line: bytes, number: int, path: Path, where: str) -> RawRecord:
    if len(line) > LONGEST_RECORD:
        raise DataError(f"{where} is longer than {LONGEST_RECORD >> 20} MiB; split that record.")
    try:
        # Files that were joined have the mark of UTF-8 in the middle, too.
        value = parse_json(line.decode().removeprefix("\ufeff").rstrip("\r\n"))
    except KeyTwice as error:
        raise DataError(f"{where} {error}") from None
    except UnicodeDecodeError as error:
        raise not_utf8(path, where, line, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            _bad_line(line, where)
            or (f"{where} is not JSON ({_describe_json_error(error)}); {ONE_A_LINE}, or remove the line.")
        ) from error
    return _check_record(value, where)


def _bad_line(line: bytes, where: str) -> str:
    if b"\0" in line:
        return f"{where} holds bytes of 0, as where a disk was full or a copy was cut; fetch or write the file again."
    if b"\r" in line.rstrip(b"\r\n"):
        return f"{where} ends its lines with CR alone; convert the file, for example with `tr '\\r' '\\n'`."
    return ""


def _describe_json_error(error: Exception) -> str:
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else repr(str(error)[:200])


def _check_record(value: object, where: str) -> RawRecord:
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object; {ONE_A_LINE}.")
    return RawRecord(value, where)


# --- csv


def _read_csv(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    csv.field_size_limit(LONGEST_RECORD)
    lines = _CsvLines(path)
    rows = csv.reader(lines, delimiter=lines.delimiter, strict=True)
    names: list[str] | None = None
    while True:
        lines.begin_row()
        where = f"{path}:{lines.first}"
        try:
            row = next(rows, None)
            if row is None:
                return
            if names is None:
                names = row
                if twice := next((name for name in names if name and names.count(name) > 1), None):
                    raise DataError(f"{where} names the column {twice!r:.60} twice; rename one of them.")
            elif row:
                yield RawRecord(_csv_fields(names, row, where), where)
        except csv.Error as error:
            problem = _bad_line(lines.latest, where) or (
                f"{where} is not csv ({str(error)[:200]}, up to line {lines.number}); close the quote or double it."
            )
            if on_bad is None:
                raise DataError(problem) from error
            on_bad(DataError(problem))
        except DataError as error:
            if on_bad is None or names is None:
                raise
            on_bad(error)


def _csv_fields(names: list[str], row: list[str], where: str) -> dict[str, str]:
    if len(row) != len(names):
        raise DataError(
            f"{where} has {len(row)} fields, but the first line names {len(names)}; correct the line, or quote a field "
            "that has a comma or a line break."
        )
    return dict(zip(names, row, strict=True))


class _CsvLines:
    def __init__(self, path: Path) -> None:
        self.number = 0
        self.first = 1  # the number of the line at which the present row begins
        self._path = path
        self._lines = _numbered_lines(path)
        self._bytes = 0
        self.latest = b""
        with open_text(path) as file:
            heading = file.readline(HEAD * 128)
        # Spreadsheets of many countries write semicolons.
        usual = b"\t" if format_suffix(path) == ".tsv" else b","
        self.delimiter = max((usual, b",", b";", b"\t"), key=heading.count).decode()

    def __iter__(self) -> Iterator[str]:
        return self

    def begin_row(self) -> None:
        self.first = self.number + 1
        self._bytes = 0

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        self.latest = line
        self._bytes += len(line)
        if self._bytes > LONGEST_RECORD:
            raise csv.Error(f"longer than {LONGEST_RECORD >> 20} MiB")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, f"{self._path}:{self.number}", line, error) from error


# --- a list in a JSON file


def _read_json(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    # Bytes that are not UTF-8 stay in the text until the scanner comes to the record that has them.
    with io.TextIOWrapper(open_text(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        scanner = JsonScanner(file, path)
        first = scanner.next_character()
        has_data_key = first == "{" and scanner.accept(DATA_LIST)
        if first == "[" or has_data_key:
            yield from _list_items(scanner, "}" if has_data_key else "", on_bad)
            return
    yield from read_lines(path, columns, on_bad)


def _list_items(scanner: JsonScanner, closing: str, on_bad: OnBad | None) -> Iterator[RawRecord]:
    scanner.expect("[")
    keys: frozenset[str] = frozenset()  # of the items so far
    needs_comma = False
    while True:
        try:
            if scanner.next_character() == "]":
                _end_list(scanner, closing)
                return
            if needs_comma:
                scanner.expect(",")
                needs_comma = False
                continue
            record = _take_item(scanner)
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(error)
            needs_comma = False
            if not scanner.skip_item(error, keys):
                return
            if scanner.next_character() == ",":
                scanner.expect(",")
        else:
            yield record
            keys |= record.fields.keys()
            needs_comma = True


def _end_list(scanner: JsonScanner, closing: str) -> None:
    scanner.expect("]")
    if closing:
        scanner.expect(closing)
    if scanner.next_character():
        raise DataError(f"{scanner.path}:{scanner.line} has something after the list's end; {ONE_A_LINE}.")


def _take_item(scanner: JsonScanner) -> RawRecord:
    first, where = scanner.next_character(), f"{scanner.path}:{scanner.line}"
    if not first:
        scanner.expect("]")
    if first != "{":
        raise DataError(f"{where} has something other than an object in the list; {ONE_A_LINE}.")
    return _check_record(scanner.take_value(), where)


# --- a text file


def _read_text(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    with open_text(path) as file:
        content = file.read(LONGEST_RECORD + 1)
    if len(content) > LONGEST_RECORD:
        raise DataError(f"{path} is longer than {LONGEST_RECORD >> 20} MiB; split it.")
    try:
        yield RawRecord({"text": content.decode("utf-8-sig")}, f"{path}:1")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise not_utf8(path, f"{path}:{line}", content[error.start :], error) from error


# --- tables


def _read_parquet(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    yield from _iter_rows(parquet_batches(path, columns), path)


def _read_datasets_folder(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    yield from _iter_rows(arrow_batches(path, columns), path)


def _iter_rows(batches: Iterable[Any], path: Path) -> Iterator[RawRecord]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path} has the column {twice!r:.60} twice; rename one of them.")
        for fields in batch.to_pylist():
            number += 1
            yield RawRecord(fields, f"{path} row {number}")


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


# The function that reads a file, by its suffix.
READERS: Final[dict[str, Reader]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
