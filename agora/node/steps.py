"""The steps of a daemon's start: each has a name, is timed, and is told when it ends.

Knows: names and seconds. Must not know: what a step does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agora.node.service import Notifier
from agora.observe.events import Report, StartStep


@dataclass
class Note:
    """What a step found, in a few words."""

    text: str = ""


class Steps:
    """`with steps.step("host") as note:` reports StartStep("host", seconds, note.text) when the block ends well."""

    def __init__(self, report: Report, notifier: Notifier) -> None:
        self._report = report
        self._notifier = notifier
        self.current = ""

    @contextmanager
    def step(self, name: str) -> Iterator[Note]:
        """Times one step; a step that raises leaves its name in `current`, which the daemon's error mentions."""
        note, began = Note(), time.perf_counter()
        self.current = name
        self._notifier.send(STATUS=f"starting: {name}", EXTEND_TIMEOUT_USEC=300_000_000)
        yield note
        self._report(StartStep(name, time.perf_counter() - began, note.text))
        self.current = ""
