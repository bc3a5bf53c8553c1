"""Writes every event as one JSON line to DIR/events.jsonl, and reads the lines back.

Each event is one write(2) to a file opened with O_APPEND, so that what was reported before a SIGKILL is in the file
after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora.observe.events import EVENTS, Event

FILE_NAME = "events.jsonl"
MAX_FILE_BYTES = 64 * 2**20
KEPT_FILES = 3  # the current one included


class LineFile:
    """Appends lines to a file, and rotates it before it exceeds `max_file_bytes`; KEPT_FILES are kept."""

    def __init__(self, path: Path, max_file_bytes: int) -> None:
        """The folder of `path` must exist. Raises OSError."""
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._open()

    def append(self, line: bytes) -> None:
        """`line` ends with a newline. Raises OSError, also if only a part of it was written."""
        if self._size and self._size + len(line) > self._max_file_bytes:
            self._rotate()
        written = os.write(self._handle, line)
        self._size += written
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _rotate(self) -> None:
        os.close(self._handle)
        for number in range(KEPT_FILES - 1, 0, -1):
            older, newer = rotated_path(self.path, number), rotated_path(self.path, number - 1)
            if newer.exists():
                newer.replace(older)
        self._open()

    def _open(self) -> None:
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._handle).st_size


class Journal:
    """A reporter's sink that appends events to DIR/events.jsonl."""

    def __init__(self, directory: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """`directory` must exist. Raises OSError."""
        self.path = directory / FILE_NAME
        self._lines = LineFile(self.path, max_file_bytes)

    def take(self, event: Event, at_unix: float) -> None:
        """Appends the event as a line. Raises OSError, also if only a part of the line was written."""
        self._lines.append(encode(event, at_unix))


def rotated_path(path: Path, number: int) -> Path:
    """Returns the path of the file rotated `number` times: events.jsonl, events.jsonl.1 (older), events.jsonl.2 ..."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def encode(event: Event, at_unix: float) -> bytes:
    """With its newline and "at_unix"; numbers that are not finite become null. Raises TypeError for an event not in
    EVENTS.
    """
    fields = {"at_unix": round(at_unix, 6)} | to_json(event)
    finite = {name: _finite_or_none(value) for name, value in fields.items()}
    return (json.dumps(finite, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_finite_or_none, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class JournalTail:
    """Reads the journal, or another LineFile of the directory, that any process writes: all of it, later new lines."""

    directory: Path
    name: str = FILE_NAME
    _inode: int = 0
    _offset: int = 0

    def read_new(self) -> list[dict[str, Any]]:
        """[] without a journal. Lines that are not JSON objects are skipped, an incomplete one is left for later."""
        values: list[Any] = []
        for file in self._unread():
            with file.open("rb") as handle:
                inode = os.fstat(handle.fileno()).st_ino
                offset = self._offset if inode == self._inode else 0
                handle.seek(offset)
                data = handle.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._inode, self._offset = inode, offset + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    values.append(json.loads(line))
        return [value for value in values if isinstance(value, dict)]

    def skip_to_tail(self, most_bytes: int) -> None:
        """Leaves out all but the last `most_bytes` of what is not read yet."""
        for number in range(KEPT_FILES):
            try:
                status = rotated_path(self.directory / self.name, number).stat()
            except OSError:
                return
            is_read = status.st_ino == self._inode
            unread = status.st_size - (self._offset if is_read else 0)
            if unread > most_bytes:
                self._inode, self._offset = status.st_ino, status.st_size - most_bytes
                return
            if is_read:
                return
            most_bytes -= unread

    def _unread(self) -> list[Path]:
        # The file that was read last, under its present name, and every newer one; all if that one was removed.
        files: list[Path] = []
        for number in range(KEPT_FILES):
            candidate = rotated_path(self.directory / self.name, number)
            if not candidate.exists():
                break
            files.insert(0, candidate)
            if candidate.stat().st_ino == self._inode:
                break
        return files


def to_json(event: Event) -> dict[str, Any]:
    """Returns the event's fields by name, and its name as "event". Raises TypeError for an event that EVENTS lacks."""
    name = type(event).__name__
    if EVENTS.get(name) is not type(event):
        raise TypeError(f"{name} is not in the closed list of agora.observe.events")
    return {"event": name} | {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}


def from_json(fields: Mapping[str, Any]) -> Event | None:
    """Unknown fields are ignored; None for an unknown event or a missing field. Checks no values."""
    cls = EVENTS.get(str(fields.get("event")))
    if cls is None:
        return None
    known = {f.name for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {k: tuple(v) if typing.get_origin(hints[k]) is tuple else v for k, v in fields.items() if k in known}
    try:
        return cls(**values)
    except TypeError:
        return None
