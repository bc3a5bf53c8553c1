"""What contenders of the pipeline benchmark have in common: a measured window, a timeout, the sharing of cores."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.machine import usable_cores

START_S = 120.0
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Window:
    """What a contender did in one measured window; `trained` counts also what filled and drained its pipeline."""

    tokens: int
    seconds: float
    trained: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def stage_threads(stages: int) -> int:
    """Returns the threads of each stage process: cores / stages, at least 1."""
    return max(1, usable_cores() // stages)


def print_progress(text: str) -> None:
    """Prints a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)
