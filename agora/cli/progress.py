"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere.

Knows: terminals. Must not know: what is being done.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from agora.cli.console import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 2.0


class Bar:
    """Shows `what` and how much of `total` bytes is done (None: nobody knows); a `with` around the work."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            self._start_bar()
        else:
            say(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._total and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            say(f"{self._what}  {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB")

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.start()
