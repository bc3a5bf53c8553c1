"""The log on standard error: lines for people on a terminal, JSON lines under systemd; quiet while all is well.

Knows: how an event looks to a person and to journald. Must not know: what to do about it. Nothing reads the log back.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from agora.observe import journal
from agora.observe.events import Event

LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3}
REPEAT_SECONDS = 10.0


def under_systemd(stream: TextIO = sys.stderr) -> bool:
    """Whether standard error is a socket to journald: JOURNAL_STREAM names its device and inode."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


class HumanLog:
    """A reporter's sink: `12:00:01 what happened`; equal sentences within 10 s are told once with their number."""

    def __init__(self, stream: TextIO | None = None, level: str = "info") -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._floor = LEVELS.index(level)
        self._colour = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._last: dict[str, tuple[float, int]] = {}

    def take(self, event: Event, at_unix: float) -> None:
        """Writes the event's sentence when its level is wanted."""
        if LEVELS.index(event.level) < self._floor:
            return
        said = event.describe()
        told_unix, held_back = self._last.get(said, (0.0, 0))
        if event.level != "info" and at_unix - told_unix < REPEAT_SECONDS:
            self._last[said] = (told_unix, held_back + 1)
            return
        self._remember(said, at_unix)
        self._write(event.level, said + (f" ({held_back + 1} times)" if held_back else ""), at_unix)

    def _remember(self, said: str, at_unix: float) -> None:
        if len(self._last) >= 256:
            self._last.clear()
        self._last[said] = (at_unix, 0)

    def _write(self, level: str, said: str, at_unix: float) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(at_unix))
        mark = f"{level} " if level in ("warning", "error") else ""
        line = f"{clock} {mark}{said}"
        if self._colour and level in _COLOURS:
            line = f"{_COLOURS[level]}{line}\x1b[0m"
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """The stream belongs to the process."""


class JsonLog:
    """A reporter's sink for journald: `<priority>{json}` per line, the same fields as the journal file."""

    def __init__(self, stream: TextIO | None = None, level: str = "info") -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._floor = LEVELS.index(level)

    def take(self, event: Event, at_unix: float) -> None:
        """Writes the event when its level is wanted."""
        if LEVELS.index(event.level) >= self._floor:
            line = journal.encode(event, at_unix).decode().rstrip("\n")
            print(f"<{_PRIORITY[event.level]}>{line}", file=self._stream, flush=True)

    def close(self) -> None:
        """The stream belongs to the process."""


def choose(level: str = "info") -> HumanLog | JsonLog:
    """JSON lines when journald listens, lines for people otherwise."""
    return JsonLog(level=level) if under_systemd() else HumanLog(level=level)
