"""Reads the records of a data file one by one: JSON lines, a JSON list, csv, parquet, a `datasets` folder, a text file.

Lines, lists, csv and text may be compressed (COMPRESSIONS). At most one record of such a file, or some rows of a table,
is in memory.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from agora_protocol.errors import DataError, DiskError
from numpy.typing import NDArray

from agora.core.optional_packages import import_optional
from agora.data.tokenizer import LFS_POINTER, LFS_WORDS

LONGEST_RECORD: Final = 64 << 20  # characters or bytes
CHUNK: Final = 1 << 20  # characters that are read at a time
ROWS: Final = 256  # rows of a table that are decoded at a time
ONE_A_LINE: Final = "write one JSON object a line, or a list of objects in a .json file"
STATE_FILE: Final = "state.json"
SPLITS_FILE: Final = "dataset_dict.json"

SPACE: Final = re.compile(r"[ \t\r\n]*")
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
        if path.is_dir():
            read: Reader = _read_datasets_folder
        elif not path.exists():
            read = read_lines
        elif not path.is_file():
            raise DataError(
                f"{path} is a pipe or a device, and data is read more than once; name - and redirect standard input, "
                "or write it to a file."
            )
        elif (suffix := format_suffix(path)) in READERS:
            read = READERS[suffix]
        else:
            with path.open("rb") as file:
                refuse_other_content(file.read(HEAD), path)
            raise DataError(f"The format of {path} is unknown; rename or convert it to {known_suffixes(READERS)}.")
        yield from read(path, columns, on_bad)
    except READ_ERRORS as error:
        raise unreadable_data(path, error) from error


def data_files(path: Path) -> list[Path]:
    """Returns the files in the order in which they are read; they need not exist.

    Raises DataError for a folder that the package datasets has not saved.
    """
    return _arrow_files(path) if path.is_dir() else [path]


# What opening, reading and decompressing a file raises.
READ_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


def unreadable_data(path: Path, error: Exception) -> DataError | DiskError:
    """The error for READ_ERRORS: DiskError if the operating system refused, DataError if what it read is damaged."""
    if isinstance(error, OSError) and error.errno is not None:
        return DiskError(f"Cannot read {path} ({error.strerror or error}); correct the path or its permissions.")
    return DataError(f"{path} is damaged or cut off ({str(error)[:200]!r}); fetch or write it again.")


# Yields the records of a file; its arguments are those of read_records.
Reader = Callable[[Path, Collection[str] | None, OnBad | None], Iterator[RawRecord]]


class KeyTwice(DataError):
    """Raised for a JSON object with a key twice, of which json takes the last in silence. Says no place."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyTwice(f"has the key {twice!r:.60} twice in one object; remove one of them, or rename it.")
    return made


DECODER: Final = json.JSONDecoder(object_pairs_hook=_object_of)


def parse_json(text: str) -> Any:
    """json.loads, but raises KeyTwice where that would take one of two values in silence."""
    return json.loads(text, object_pairs_hook=_object_of)


# --- opening a file, and what is said of one that is not what its name says

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
HEAD: Final = 512  # bytes at the beginning of a file by which it is judged

# The first bytes of a file -> what it is and what to do.
CONTENTS: Final[tuple[tuple[bytes, str], ...]] = (
    (LFS_POINTER, LFS_WORDS),
    (b"PAR1", "a parquet table; rename it to end in .parquet"),
    (b"ARROW1", "an arrow file; convert it to .parquet"),
    (b"\x1f\x8b", "compressed by gzip; rename it to end in .gz, such as x.jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; rename it to end in .zst, such as x.jsonl.zst"),
    (b"BZh", "compressed by bzip2; rename it to end in .bz2, such as x.jsonl.bz2"),
    (b"\xfd7zXZ\0", "compressed by xz; rename it to end in .xz, such as x.jsonl.xz"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"SQLite format 3\0", "a database of SQLite; export its table as .csv"),
)
TAR: Final = slice(257, 262), b"ustar"
WEB_PAGES: Final = (b"<!doctype html", b"<html")
BOMS: Final = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


def format_suffix(path: Path) -> str:
    """Returns the suffix that says a file's format, in lower case: ".jsonl" for a.JSONL and for a.jsonl.gz."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix


def known_suffixes(readers: Mapping[str, object]) -> str:
    """Returns the suffixes in `readers` for an error sentence: ".a, .b or .c"."""
    return " or ".join(", ".join(readers).rsplit(", ", 1))


def open_text(path: Path) -> io.BufferedReader:
    """Opens a file of text for reading bytes, and decompresses it if its suffix says so.

    Raises DataError, which names what the file is instead, for what is no text in UTF-8 by its first bytes; OSError.
    """
    with path.open("rb") as raw:
        beginning = raw.read(HEAD)
    if path.suffix.lower() not in COMPRESSIONS or beginning.startswith(LFS_POINTER):
        refuse_other_content(beginning, path)
    with ExitStack() as closing:
        file = closing.enter_context(_decompressed(path))
        head = file.peek(HEAD)[:HEAD]
        refuse_other_content(head, path)
        if encoding := _wide_encoding(head):
            raise DataError(f"{path} is {encoding} text, not UTF-8; {_iconv(path, encoding)}.")
        closing.pop_all()  # the caller closes it
    return file


def refuse_other_content(head: bytes, path: Path) -> None:
    """Raises DataError if the first bytes of a file are those of CONTENTS, a tar archive or a web page, and says so."""
    for beginning, kind in CONTENTS:
        if head.startswith(beginning):
            raise DataError(f"{path} is {kind}.")
    if head[TAR[0]] == TAR[1]:
        raise DataError(f"{path} is a tar archive; unpack it.")
    if head.lstrip().lower().startswith(WEB_PAGES):
        raise DataError(
            f"{path} is a web page, perhaps an error of the site that it came from; download the file again."
        )


def not_utf8(path: Path, where: str, text: bytes, error: UnicodeDecodeError) -> DataError:
    """The error for text that is not UTF-8: names the byte, the encoding that it looks like, and the command."""
    encoding = _guess_encoding(text)
    byte = error.object[error.start]
    return DataError(f"{where} is not UTF-8 text (byte 0x{byte:02x}), perhaps {encoding}; {_iconv(path, encoding)}.")


def _iconv(path: Path, encoding: str) -> str:
    into = shlex.quote(f"utf8-{path.name}")
    return f"convert it, for example with `iconv -f {encoding} -t UTF-8 {shlex.quote(path.name)} > {into}`"


def _decompressed(path: Path) -> io.BufferedReader:
    match path.suffix.lower():
        case ".gz":
            stream: Any = gzip.open(path)  # noqa: SIM115, closed with the reader
        case ".bz2":
            stream = bz2.open(path)  # noqa: SIM115
        case ".xz":
            stream = lzma.open(path)  # noqa: SIM115
        case ".zst":
            stream = import_pyarrow(path).input_stream(str(path), compression="zstd")
        case _:
            return path.open("rb")
    return io.BufferedReader(stream)


def _wide_encoding(head: bytes) -> str | None:
    for bom, name in BOMS:
        if head.startswith(bom):
            return name
    match [byte != 0 for byte in head[:4]]:
        case [True, False, True, False]:
            return "UTF-16LE"
        case [False, True, False, True]:
            return "UTF-16BE"
        case [True, False, False, False] | [False, False, False, True]:
            return "UTF-32"
    return None


def _guess_encoding(text: bytes) -> str:
    # Of two bytes each, GBK's frequent characters begin with 0xb0 to 0xd7, Cyrillic small letters are 0xe0 to 0xff, and
    # those of Japanese kana begin with 0x82 or 0x83. Letters of Latin-1 stand alone, or two together.
    text = text[:CHUNK]
    if len(re.findall(rb"[\x82\x83][\x40-\xf1]", text)) * 2 > len(re.findall(rb"[\x81-\xfc][\x40-\xfc]", text)):
        return "SHIFT_JIS"
    if not re.search(rb"[\x80-\xff]{3}", text):
        return "WINDOWS-1252"
    runs = re.findall(rb"[\x80-\xff]{2,}", text)
    leads = [run[index] for run in runs for index in range(0, len(run) - 1, 2)]
    if leads and sum(0xB0 <= lead <= 0xD7 for lead in leads) * 2 > len(leads):
        return "GBK"
    if leads and sum(lead >= 0xC0 for lead in leads) * 2 > len(leads):
        return "WINDOWS-1251"
    return "WINDOWS-1252"


# --- lines


def read_lines(path: Path, columns: Collection[str] | None = None, on_bad: OnBad | None = None) -> Iterator[RawRecord]:
    """Yields the JSON object of each line that is not blank, as a record. `columns` is ignored.

    Raises OSError, and DataError, with the line's number, for a line that is longer than LONGEST_RECORD bytes or is not
    a JSON object; with `on_bad` it is told of these instead.
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


TEXT: Final = r'"[^"\\]*(?:\\.[^"\\]*)*"'
TOKEN: Final = re.compile(rf"{TEXT}|[\[\]{{}},]", re.DOTALL)
NEXT_OBJECT: Final = re.compile(r",[ \t\r\n]*(?=\{)")
FIRST_KEY: Final = re.compile(rf"\{{[ \t\r\n]*({TEXT})[ \t\r\n]*:", re.DOTALL)
NOT_UTF8: Final = re.compile("[\udc80-\udcff]")  # how surrogateescape has such bytes


class JsonScanner:
    """Reads JSON values one by one, with little more than one of them in memory. line: from 1."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self.path = path
        self.line = 1
        self._file = file
        self._text = ""
        self._at = 0
        self._indent = ""  # the white space that the current line begins with
        self._is_indenting = True  # whether there is only white space so far in the current line

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
                self._require_utf8(min(error.pos + 1, len(self._text)))
                may_go_on = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16
                if not (may_go_on and len(self._text) - self._at <= LONGEST_RECORD and self._read_more()):
                    raise self._malformed_error(error.pos - self._at, error.msg) from error
            except KeyTwice as error:
                raise DataError(f"{self.path}:{self.line} {error}") from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, too many brackets
                raise self._malformed_error(0, str(error)[:200]) from error
            else:
                self._require_utf8(end)
                if end - self._at > LONGEST_RECORD:
                    raise DataError(
                        f"{self.path}:{self.line} is longer than {LONGEST_RECORD >> 20} MiB; split that record."
                    )
                self._advance(end)
                return value

    def skip_item(self, error: DataError, keys: Collection[str]) -> bool:
        """Skips the malformed item of a list that begins here, up to the comma behind it or to the next item.

        False if no other item follows, at the end of the file. keys: those of items of this list, by which an object is
        known to be an item and not a part of one. Raises `error` if no other item begins within LONGEST_RECORD.
        """
        while (end := self._find_next(keys, is_whole=False)) is None:
            if len(self._text) - self._at > LONGEST_RECORD:
                raise error
            if not self._read_more():
                end = self._find_next(keys, is_whole=True)
                break
        self._advance(len(self._text) if end is None else end)
        return end is not None

    def _find_next(self, keys: Collection[str], *, is_whole: bool) -> int | None:
        # The nearest of: where the brackets are closed; an object at the beginning of a line as far to the left as this
        # one; an object that can be read, with this item's first key and keys as other items have them.
        # is_whole: the text ends with the file.
        text, closed = self._text, self._closed_at(is_whole)
        for match in NEXT_OBJECT.finditer(text, self._at, len(text) if closed is None else closed):
            if self._begins_line(match):
                return match.end()
            with suppress(ValueError, RecursionError):
                if self._has_first_key(match.end()):
                    found = DECODER.raw_decode(text, match.end())[0].keys()
                    if not keys or found <= set(keys) or found >= set(keys):
                        return match.end()
        return closed

    def _begins_line(self, match: re.Match[str]) -> bool:
        return match.group().endswith(f"\n{self._indent}")

    def _has_first_key(self, at: int) -> bool:
        # Whether the object at `at` begins with the key that the item which begins here begins with.
        own, other = FIRST_KEY.match(self._text, self._at), FIRST_KEY.match(self._text, at)
        return own is not None and other is not None and own.group(1) == other.group(1)

    def _closed_at(self, is_whole: bool) -> int | None:
        depth, is_object = 0, self._text.startswith("{", self._at)
        for match in TOKEN.finditer(self._text, self._at):
            sign = match.group()
            if sign in ("[", "{"):
                depth += 1
            elif depth:
                depth -= sign in ("]", "}")
            elif sign == ",":
                # Where a quotation mark is missing, what looks closed may be within a text.
                item = NEXT_OBJECT.match(self._text, match.start())
                if not is_object or (item and (self._begins_line(item) or self._has_first_key(item.end()))):
                    return match.start()
            elif sign == "]" and is_whole and self._text[match.end() :].strip() in ("", "}"):
                return match.start()
        return None

    def _require_utf8(self, end: int) -> None:
        bad = NOT_UTF8.search(self._text, self._at, end)
        if bad is None:
            return
        line = self.line + self._text.count("\n", self._at, bad.start())
        text = self._text[self._at : max(end, bad.start() + CHUNK)].encode("utf-8", "surrogateescape")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, f"{self.path}:{line}", text, error) from error

    def _malformed_error(self, offset: int, reason: str) -> DataError:
        line = self.line + self._text.count("\n", self._at, self._at + offset)
        begins = f" in the record that begins at line {self.line}" if line != self.line else ""
        return DataError(f"{self.path}:{line} is not JSON ({reason}{begins}); correct or remove that record.")

    def _advance(self, end: int) -> None:
        before, newline, tail = self._text[self._at : end].rpartition("\n")
        self.line += before.count("\n") + len(newline)
        if newline:
            self._indent, self._is_indenting = "", True
        if self._is_indenting:
            rest = tail.lstrip(" \t")
            self._indent += tail[: len(tail) - len(rest)]
            self._is_indenting = not rest
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


# A file of some hundred bytes can decode to gigabytes: a column says once what all of its rows hold, and compresses. So
# texts stay shared (dictionary-encoded) until their decoded bytes are known, and only so many rows are decoded at once.
DECODED_BYTES: Final = 16 << 20  # decoded bytes of rows that are in memory together, if not one row has more
BATCH_BYTES: Final = 32 << 20  # of a table's column, not decoded, that are read at once
MOST_VALUES: Final = 1 << 26  # of a column's chunk, in lists too
MOST_EXPANSION: Final = 1000  # uncompressed by compressed bytes of a chunk that is larger than LARGE_CHUNK
LARGE_CHUNK: Final = 1 << 30
VALUE_BYTES: Final = 16  # at least, of any value


def _read_parquet(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    yield from _iter_rows(parquet_batches(path, columns), path)


def parquet_batches(path: Path, columns: Collection[str] | None) -> Iterator[Any]:
    """Yields the rows of a parquet table as pyarrow.RecordBatch, each with at most DECODED_BYTES or one row.

    columns: None for all. Raises DataError for a malformed table and for a value longer than LONGEST_RECORD, before it
    is decoded; OSError, LocalError without pyarrow.
    """
    pyarrow = import_pyarrow(path)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not head.startswith(b"PAR1"):
        refuse_other_content(head, path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = [name for name in table.schema_arrow.names if columns is None or name in columns]
            shared = _dictionary_columns(table.metadata)
        row = 0
        # Without pre_buffer, and with a buffer, pages are read one by one instead of whole row groups.
        options = {"read_dictionary": sorted(shared), "pre_buffer": False, "buffer_size": CHUNK}
        with pyarrow.parquet.ParquetFile(path, **options) as table:
            for group in range(table.num_row_groups):
                rows = _rows_at_once(table.metadata.row_group(group), names, shared, path)
                for batch in table.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                    yield from bounded_slices(batch, path, row)
                    row += batch.num_rows
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise unreadable_table(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise unreadable_table(path, error) from error


def _dictionary_columns(metadata: Any) -> set[str]:
    # pyarrow cannot read the encodings DELTA_* of texts as dictionaries.
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}
    return texts - {chunk.path_in_schema for chunk in chunks if any("DELTA" in name for name in chunk.encodings)}


def _rows_at_once(group: Any, names: Collection[str], shared: Collection[str], path: Path) -> int:
    # Many at once where texts are shared: each batch has the texts of all batches before it.
    rows = max(int(group.num_rows), 1)
    for chunk in (group.column(index) for index in range(group.num_columns)):
        if chunk.path_in_schema.partition(".")[0] not in names:
            continue
        size = max(int(chunk.total_uncompressed_size), 1)
        expansion = size / max(chunk.total_compressed_size, 1)
        if chunk.num_values > MOST_VALUES or (size > LARGE_CHUNK and expansion > MOST_EXPANSION):
            raise DataError(
                f"{path} has {chunk.num_values:,} values of {size >> 20:,} MiB in one row group of the column "
                f"{chunk.path_in_schema!r}, made of {chunk.total_compressed_size:,} bytes; write it again with smaller "
                "row groups, or do not trust it."
            )
        if chunk.path_in_schema in shared or chunk.physical_type != "BYTE_ARRAY":
            limit = max(group.num_rows * BATCH_BYTES // size, ROWS)
        else:
            limit = min(BATCH_BYTES // size, ROWS)  # each row may decode to as much as the whole chunk has
        rows = min(rows, max(limit, 1))
    return rows


def _read_datasets_folder(path: Path, columns: Collection[str] | None, on_bad: OnBad | None) -> Iterator[RawRecord]:
    yield from _iter_rows(_arrow_batches(path, columns), path)


def _arrow_batches(path: Path, columns: Collection[str] | None) -> Iterator[Any]:
    pyarrow = import_pyarrow(path)
    row = 0
    for file in _arrow_files(path):
        with file.open("rb") as opened:
            refuse_other_content(opened.read(HEAD), file)
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    wanted = [name for name in batch.schema.names if columns is None or name in columns]
                    yield from bounded_slices(batch.select(wanted), path, row)
                    row += batch.num_rows
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise unreadable_table(file, error) from error


def bounded_slices(batch: Any, path: Path, rows_before: int) -> Iterator[Any]:
    """Cuts a pyarrow.RecordBatch into slices of at most ROWS rows and DECODED_BYTES, or of one row.

    Raises DataError, with the row's number, for a row that decodes to more than LONGEST_RECORD.
    """
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        sizes = sum((_row_bytes(column) for column in part.columns), np.zeros(part.num_rows, np.int64))
        if len(sizes) and int(sizes.max()) > LONGEST_RECORD:
            number = rows_before + start + int(sizes.argmax()) + 1
            raise DataError(f"{path} row {number} is longer than {LONGEST_RECORD >> 20} MiB; split that record.")
        first = 0
        while first < part.num_rows:
            count = max(1, int(np.searchsorted(np.cumsum(sizes[first:]), DECODED_BYTES, side="right")))
            yield part.slice(first, count)
            first += count


def _row_bytes(array: Any) -> NDArray[np.int64]:
    # What each row of a pyarrow.Array decodes to, [n], although its texts may be stored once for many rows.
    return np.asarray(_decoded_bytes(array), np.int64)


def _decoded_bytes(array: Any) -> Any:
    import pyarrow
    import pyarrow.compute

    types, kind = pyarrow.types, array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _row_bytes(array.storage)
    if types.is_dictionary(kind):
        sizes = np.append(_row_bytes(array.dictionary), 0)  # the last: of a null
        indices = array.indices.fill_null(len(sizes) - 1) if array.null_count else array.indices
        return sizes[indices.to_numpy(zero_copy_only=False).astype(np.int64)]
    if types.is_struct(kind):
        children = (_row_bytes(array.field(index)) for index in range(kind.num_fields))
        return sum(children, np.full(len(array), VALUE_BYTES, np.int64))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        inner = _row_bytes(array.values.slice(offsets[0], offsets[-1] - offsets[0]))  # of a slice only its own
        ends = np.concatenate([[0], np.cumsum(inner)])
        offsets -= offsets[0]
        return ends[offsets[1:]] - ends[offsets[:-1]] + VALUE_BYTES
    if types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return _row_bytes(values).reshape(len(array), kind.list_size).sum(axis=1) + VALUE_BYTES
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64) + VALUE_BYTES
    if types.is_null(kind) or types.is_boolean(kind) or types.is_primitive(kind) or types.is_decimal(kind):
        return np.full(len(array), VALUE_BYTES, np.int64)
    if types.is_fixed_size_binary(kind):
        return np.full(len(array), kind.byte_width + VALUE_BYTES, np.int64)
    raise DataError(f"A column of the type {kind} is not read; write it as text, numbers, lists or structs.")


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
    for module in ("pyarrow.ipc", "pyarrow.parquet"):
        import_optional(module, f"Reading {path}", "data")
    return import_optional("pyarrow", f"Reading {path}", "data")


def _iter_rows(batches: Iterable[Any], path: Path) -> Iterator[RawRecord]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path} has the column {twice!r:.60} twice; rename one of them.")
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
    ".ndjson": read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
