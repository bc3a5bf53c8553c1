"""Whether the owner of this machine wants the daemon to pause.

There are three reasons for a pause: the owner's command, which a file keeps; a time outside the hours of work; and,
with `when_idle`, somebody who uses the machine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError

from agora.core.clock import boot_time
from agora.node.limits.machine_use import MachineUse

DAY_MINUTES: Final = 24 * 60
MAX_RANGES: Final = 24
_RANGE: Final = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")
POLL_INTERVAL_S: Final = 1.0  # seconds between two checks of the time of day
BY_OWNER: Final = "paused by its owner"


@dataclass(frozen=True, slots=True)
class Hours:
    """The hours of work: ranges of minutes of the day, [begin, end), in local time; () is all day.

    A range whose end is not after its begin goes on past midnight; one that ends at midnight may end with 0 or 1440.
    str() gives a text that `parse` reads.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parses FROM-TO[,FROM-TO], each time HH or HH:MM; "" is all day. Raises ValueError for other text."""
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        if len(parts) > MAX_RANGES:
            raise ValueError(f"more than {MAX_RANGES} ranges of hours; write fewer")
        return cls(tuple(map(_parse_range, parts)))

    def contains(self, minute: int) -> bool:
        """Returns whether this minute of the day, from 0 to 1439, is within the hours."""
        return not self.ranges or any(
            begin <= minute < end if begin < end else minute >= begin or minute < end for begin, end in self.ranges
        )

    def next_begin(self, minute: int) -> str:
        """Returns when the first range from `minute` on begins, today or tomorrow, as HH:MM; "" if it is all day."""
        begins = [begin for begin, _ in self.ranges]
        return _format_minute(min(begins, key=lambda begin: (begin - minute) % DAY_MINUTES)) if begins else ""

    def __str__(self) -> str:
        return ",".join(f"{_format_minute(begin)}-{_format_minute(end)}" for begin, end in self.ranges)


def _parse_range(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a range of hours; write 22-07 or 22:30-07:00, and several with commas")
    begin_h, begin_m, end_h, end_m = (int(group or 0) for group in match.groups())
    begin, end = 60 * begin_h + begin_m, 60 * end_h + end_m
    if max(begin, end) > DAY_MINUTES or max(begin_m, end_m) > 59 or begin == end:
        raise ValueError(f"{text!r} has a time that no day has, or no length; write 22-07 or 22:30-07:00")
    return begin % DAY_MINUTES, end


def _format_minute(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


class Pausing:
    """Whether the daemon is to be paused, and why: by its owner's command, the time of day, or the machine's use.

    The owner's pause lasts until `resume`, even after a restart. changed: set whenever it may begin or end.
    """

    def __init__(
        self,
        file: Path,
        hours: Hours,
        unix: Callable[[], float],
        idle_s: float = 0.0,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """file: exists while the daemon is paused. unix: returns the present time in unix seconds. idle_s: seconds for
        which nobody must have used the machine after a use. clock: returns the time in which `MachineUse` is noted.
        """
        self._file = file
        self._hours = hours
        self._unix = unix
        self._idle_s = idle_s
        self._clock = clock
        self._use = MachineUse()
        self._is_paused = file.exists()
        self.changed = asyncio.Event()

    @property
    def reason(self) -> str:
        return self._reason(in_full=False)

    @property
    def full_reason(self) -> str:
        """The reason with what uses the machine: for its owner, never for other peers."""
        return self._reason(in_full=True)

    def _reason(self, *, in_full: bool) -> str:
        if self._is_paused:
            return BY_OWNER
        minute = self._minute()
        if not self._hours.contains(minute):
            return f"outside its hours {self._hours} until {self._hours.next_begin(minute)}"
        return self._use.pause_reason(self._clock(), self._idle_s, in_full=in_full)

    @property
    def remedy(self) -> str:
        if self._is_paused:
            return "run `agora-node resume` to go on"
        if self._hours.contains(self._minute()):
            return "it goes on by itself; `idle_minutes` in agora.toml says when"
        return "it goes on by itself; `hours` in agora.toml says when"

    def note_use(self, use: MachineUse) -> None:
        """Takes the latest use of the machine, by which the daemon pauses or goes on."""
        self._use = use
        self.changed.set()

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
        """Ends the owner's pause, if there is one; returns why the daemon stays paused all the same, or "".

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
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _minute(self) -> int:
        local = time.localtime(self._unix())
        return 60 * local.tm_hour + local.tm_min
