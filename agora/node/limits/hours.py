"""The hours of the day at which the owner lets the daemon work. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DAY_MINUTES: Final = 24 * 60
MAX_RANGES: Final = 24
_RANGE: Final = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")


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
