"""Writes events to standard error: sentences for people, JSON lines for journald.

Nothing reads the log back.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from agora.core.terminal_text import printable
from agora.observe import journal
from agora.observe.events import Event

LEVELS = ("debug", "info", "warning", "error")  # in rising order
_COLOURS = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3}
REPEAT_INTERVAL_S = 10.0  # seconds for which a sentence that was written is not written again, unless its level is info


def is_journald_stream(stream: TextIO) -> bool:
    """Returns whether systemd's journal reads the stream: JOURNAL_STREAM has the stream's device and inode."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class EventLog:
    """A reporter's sink that writes each event of `level` or above to a stream, standard error by default.

    People get `12:00:01 sentence`. A sentence that is repeated within REPEAT_INTERVAL_S is left out, unless its level
    is info; when it is next written, the line ends with how often it was reported. journald gets each event, as
    `<priority>{json}`. prefix: written before each sentence for people.
    """

    def __init__(self, stream: TextIO | None = None, level: str = "info", prefix: str = "") -> None:
        self._prefix = prefix
        self._stream = stream if stream is not None else sys.stderr
        self._floor = LEVELS.index(level)
        self._is_for_journald = is_journald_stream(self._stream)
        self._colour = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._last: dict[str, tuple[float, int]] = {}  # by sentence: when it was written, how often left out since

    def take(self, event: Event, at_unix: float) -> None:
        if LEVELS.index(event.level) < self._floor:
            return
        if self._is_for_journald:
            line = journal.encode(event, at_unix).decode().rstrip("\n")
            print(f"<{_PRIORITY[event.level]}>{line}", file=self._stream, flush=True)
            return
        sentence = printable(event.describe(), keep="")  # peers wrote parts of some
        written_unix, repeats = self._last.get(sentence, (0.0, 0))
        if event.level != "info" and 0.0 <= at_unix - written_unix < REPEAT_INTERVAL_S:
            self._last[sentence] = (written_unix, repeats + 1)
            return
        if len(self._last) >= 256:
            self._last.clear()
        self._last[sentence] = (at_unix, 0)
        mark = f"{event.level} " if event.level in ("warning", "error") else ""
        line = f"{time.strftime('%H:%M:%S', time.localtime(at_unix))} {self._prefix}{mark}{sentence}"
        line += f" ({repeats + 1} times)" if repeats else ""
        if self._colour and event.level in _COLOURS:
            line = f"{_COLOURS[event.level]}{line}\x1b[0m"
        print(line, file=self._stream, flush=True)
