"""Freezes process groups with SIGSTOP while others are measured, and always lets them continue in the end.

A stopped process does not notice that its parent is gone, so a guardian process does: when the benchmark dies, the
guardian kills the groups that were named to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Self

_GUARDIAN = """
import contextlib, os, signal, sys
for group in sys.stdin.read().split():
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(group), signal.SIGKILL)
"""


class Freezer:
    """Freezes and thaws process groups of this benchmark; leaving the `with` thaws all."""

    def __init__(self) -> None:
        self._frozen: set[int] = set()
        self._known: set[int] = set()
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def guardian_pid(self) -> int:
        return self._guardian.pid

    def freeze(self, groups: Iterable[int]) -> None:
        """Stops every process of these groups where it is."""
        for group in groups:
            self._tell_guardian(group)
            self._frozen.add(group)
            _signal(group, signal.SIGSTOP)

    def thaw(self, groups: Iterable[int]) -> None:
        """Lets every process of these groups continue."""
        for group in groups:
            self._frozen.discard(group)
            _signal(group, signal.SIGCONT)

    def close(self) -> None:
        """Thaws what is frozen and ends the guardian."""
        self.thaw(tuple(self._frozen))
        self._guardian.kill()
        self._guardian.wait()
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell_guardian(self, group: int) -> None:
        if group not in self._known and self._guardian.stdin is not None:
            self._known.add(group)
            self._guardian.stdin.write(f"{group}\n".encode())
            self._guardian.stdin.flush()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
