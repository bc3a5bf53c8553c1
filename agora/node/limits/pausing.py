"""Whether the owner of this machine wants the daemon to pause: by a pause, kept in a file, or outside its hours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError

from agora.node.limits.hours import Hours

POLL_S: Final = 1.0  # seconds between two checks of the time of day
BY_OWNER: Final = "paused by its owner"


class OwnersPause:
    """Whether the daemon is to be paused, and why: by its owner's command, or by the time of day.

    The owner's pause lasts until `resume`, even after a restart. changed: set at each pause and resume.
    """

    def __init__(self, file: Path, hours: Hours, unix: Callable[[], float]) -> None:
        """file: exists while the daemon is paused. unix: returns the present time in unix seconds."""
        self._file = file
        self._hours = hours
        self._unix = unix
        self._is_paused = file.exists()
        self.changed = asyncio.Event()

    @property
    def reason(self) -> str:
        if self._is_paused:
            return BY_OWNER
        minute = self._minute()
        if self._hours.contains(minute):
            return ""
        return f"outside its hours {self._hours} until {self._hours.next_begin(minute)}"

    @property
    def remedy(self) -> str:
        if self._is_paused:
            return "run `agora-node resume` to go on"
        return "it goes on by itself; `hours` in agora.toml says when"

    def pause(self) -> None:
        """Pauses the daemon until `resume`, also after a restart, by creating a file.

        Raises DiskError when the file cannot be written; the daemon is then paused until it is restarted.
        """
        self._is_paused = True
        self.changed.set()
        try:
            self._file.touch(mode=0o600)
        except OSError as error:
            text = f"paused, but only until a restart: cannot write {self._file} ({error.strerror})"
            raise DiskError(f"{text}; free some space and pause it again.") from error

    def resume(self) -> str:
        """Ends the owner's pause, if there is one; returns why the daemon stays paused (outside its hours), or "".

        Raises DiskError if the file cannot be removed; the pause goes on then.
        """
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise DiskError(f"Cannot remove {self._file} ({error.strerror}); remove it by hand.") from error
        self._is_paused = False
        self.changed.set()
        return self.reason

    async def wait_until(self, *, paused: bool) -> None:
        """Waits until the daemon is to pause (paused=True), or to work (False); not at all if that holds already."""
        while bool(self.reason) is not paused:
            self.changed.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _minute(self) -> int:
        local = time.localtime(self._unix())
        return 60 * local.tm_hour + local.tm_min
