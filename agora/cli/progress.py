"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere.

Knows: terminals. Must not know: what is being done.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from agora.cli.console import print_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 2.0


class ProgressDisplay:
    """Shows what is being done and how far it has come; a `with` around the work leaves the terminal as it was."""

    def __init__(self, what: str, total: float | None = None) -> None:
        """total: how much there is to do, in bytes for `advance`, else in any unit; None when nobody knows."""
        self._what, self._total = what, total
        self._done = 0.0
        self._began = self._last_line = time.monotonic()
        self._last_text = what
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        if not sys.stderr.isatty():
            print_line(self._what)
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, nbytes: int) -> None:
        """Shows that so many bytes more are done."""
        self._done += nbytes
        total = f" of {self._total / 1e6:,.0f}" if self._total else ""
        self.show(self._done, f"{self._what}  {self._done / 1e6:,.0f}{total} MB")

    def show(self, done: float, text: str) -> None:
        """Shows `text` and that `done` of the total is done; without a terminal, new text at most every 2 s."""
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif now - self._last_line >= LINE_SECONDS and text != self._last_text:
            print_line(f"{text}  {now - self._began:.0f} s")
            self._last_line, self._last_text = now, text

    def note(self, text: str) -> None:
        """Prints a line about something that happened, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print_line(text)
