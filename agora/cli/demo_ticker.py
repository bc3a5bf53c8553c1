"""What a demo shows while it runs: a progress bar on a terminal, plain lines elsewhere, all on standard error.

Knows: terminals. Must not know: where the numbers come from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agora.cli.console import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 2.0


class Ticker:
    """Shows step, loss, tokens/s and peers; a line at most every 2 s where there is no terminal."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last_line = 0.0
        self._last_text = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def show(self, step: int, loss: float | None, tokens_per_second: float, peers: int, seconds: float) -> None:
        """The present state."""
        shown_loss = f"{loss:.3f}" if loss is not None else "-"
        text = f"loss {shown_loss}  {tokens_per_second:,.0f} tokens/s  {peers} peers"
        if sys.stderr.isatty():
            self._show_bar(step, text)
            return
        line = f"step {min(step, self._steps)}/{self._steps}  {text}"
        now = time.monotonic()
        if now - self._last_line >= LINE_SECONDS and line != self._last_text:
            say(f"{line}  {seconds:.0f} s")
            self._last_line, self._last_text = now, line

    def note(self, text: str) -> None:
        """A line about something that happened."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            say(text)

    def _show_bar(self, step: int, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task(text, total=self._steps)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=min(step, self._steps), description=text)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def summary(self, value: Mapping[str, Any], *, quiet: bool) -> None:
        """The result for people: on standard output, or on standard error when JSON has that."""
        loss, microbatches = value["loss"], value["microbatches"]
        lines = [
            f"loss          {_number(loss['first'])} -> {_number(loss['last'])}, held-out {_number(loss['eval'])}",
            f"steps         {value['steps_taken']} of stage 0 in {value['seconds']:.1f} s, "
            f"{value['tokens_per_second']:,.0f} tokens/s",
            f"microbatches  {microbatches['completed']} completed, {microbatches['rerouted']} rerouted, "
            f"{microbatches['dropped']} dropped, {microbatches['counted_twice']} counted twice",
            f"peers         {value['peers_joined']} joined, {value['peers_killed']} killed; first microbatch after "
            f"{_number(value['first_microbatch_seconds'], 1)} s",
        ]
        for line in lines:
            print(line, file=sys.stderr if quiet else sys.stdout)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
