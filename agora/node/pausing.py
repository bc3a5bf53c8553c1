"""Whether the owner of this machine wants the daemon to rest: by a pause, kept in a file, or outside its hours.

Knows: the file, the hours, the local time of day. Must not know: what a daemon does to rest (lifecycle.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError

from agora.node.hours import Hours

LOOK_S: Final = 1.0
"""Seconds between two checks of the time of day."""
BY_OWNER: Final = "paused by its owner"


class OwnersPause:
    """Knows whether the daemon is to rest, and why: a pause by its owner, or the time of day.

    A pause lasts until `resume`, even after a restart. `changed` is set at each pause and resume.
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
        """Why the daemon rests, to complete "this daemon is ..."; "" while it is to work."""
        if self._is_paused:
            return BY_OWNER
        minute = self._minute()
        if self._hours.contains(minute):
            return ""
        return f"outside its hours {self._hours} until {self._hours.next_begin(minute)}"

    @property
    def remedy(self) -> str:
        """A phrase that tells the owner how the rest ends; only meaningful while `reason` is not ""."""
        if self._is_paused:
            return "run `agora-node resume` to go on"
        return "it goes on by itself; `hours` in agora.toml says when"

    def pause(self) -> None:
        """Makes the daemon rest until `resume`. Raises DiskError when a restart will not remember it."""
        self._is_paused = True
        self.changed.set()
        try:
            self._file.touch(mode=0o600)
        except OSError as error:
            text = f"paused, but only until a restart: cannot write {self._file} ({error.strerror})"
            raise DiskError(f"{text}; free some space and pause it again.") from error

    def resume(self) -> str:
        """Ends the owner's pause; returns why the daemon still rests (hours), or "".

        Raises DiskError if the file stays.
        """
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise DiskError(f"Cannot remove {self._file} ({error.strerror}); remove it by hand.") from error
        self._is_paused = False
        self.changed.set()
        return self.reason

    async def wait_until(self, *, resting: bool) -> None:
        """Waits until the daemon is to rest (resting=True), or to work (False); returns at once if that is so."""
        while bool(self.reason) is not resting:
            self.changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _minute(self) -> int:
        """Returns the minute of the day, in local time."""
        local = time.localtime(self._unix())
        return 60 * local.tm_hour + local.tm_min
