"""JSON values: a text of one, and those of a file one by one. No object may have a key twice."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from agora_protocol.errors import DataError

from agora.data.data_file import (
    CHUNK,
    LONGEST_RECORD,
    not_utf8,
)

SPACE: Final = re.compile(r"[ \t\r\n]*")


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


def json_type(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
