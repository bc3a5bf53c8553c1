"""Decides when a transfer that does not progress is given up, so that what it holds is free again.

Deterministic: a StallDetector changes only itself, and only by the calls to it; `now` is an argument.
"""

from __future__ import annotations

from typing import Final

STALLED_S: Final = 15.0  # seconds in which a transfer must bring at least one byte
PRESSED_S: Final = 3.0  # seconds over which a transfer must bring MIN_BYTES_PER_S while others wait for memory
MIN_BYTES_PER_S: Final = 2048.0  # the minimum rate of a transfer while others wait for memory


class StallDetector:
    """Decides when one direction of one stream makes no progress: call `is_stalled` about twice a second."""

    def __init__(self) -> None:
        self._since: float | None = None  # the start of the present time window; None while nothing is under way
        self._moved = 0

    def is_stalled(self, now: float, moved: int, *, under_way: bool, pressed: bool) -> bool:
        """Returns whether the transfer has moved too few bytes for too long; False while none is under way.

        Too few: none in STALLED_S or, while `pressed`, less than MIN_BYTES_PER_S over PRESSED_S. A transfer is judged
        at the end of each such time window, then the next one begins; within a window this returns False. moved: bytes
        that the stream has moved in this direction since it began. pressed: others wait for memory.
        """
        if not under_way:
            self._since = None
            return False
        if self._since is None:
            self._since, self._moved = now, moved
            return False
        elapsed, gained = now - self._since, moved - self._moved
        if pressed and elapsed >= PRESSED_S:
            is_too_slow = gained < MIN_BYTES_PER_S * elapsed
        elif elapsed >= STALLED_S:
            is_too_slow = gained <= 0
        else:
            return False
        self._since, self._moved = now, moved
        return is_too_slow
