"""Decides when the peer at the other end of a connection counts as gone, or its transfer as stalled. Deterministic."""

from __future__ import annotations

import math
from enum import Enum
from typing import Final


class Verdict(Enum):
    """What to do about a peer now: nothing, ping it, or close its connection."""

    ALIVE = "nothing"
    PING = "ask whether it is there"
    GONE = "give it up"


class LivenessCheck:
    """Decides whether the peer at the other end of one connection is still there; asked about twice a second."""

    def __init__(self, silence_s: float, answer_s: float, now: float) -> None:
        self._silence_s, self._answer_s = silence_s, answer_s
        self.alive_at = now  # when `decide` last saw a sign of life, or nothing owed
        self._pinged_at = math.inf  # infinity: the peer need not answer a ping
        self._flushed = 0
        self._had_backlog = False

    def decide(self, now: float, *, owed: bool, heard_at: float, flushed: int, backlog: int) -> Verdict:
        """Returns PING after `silence_s` without a sign of life, GONE after `answer_s` more without one, else ALIVE.

        PING is returned once in each such silence.

        owed: whether an answer is awaited and this side is reading; if not, the peer counts as alive.
        heard_at: when the peer's last byte came.
        flushed: bytes that the kernel has taken so far.
        backlog: bytes that wait to be taken. A backlog that shrinks is a sign of life too: on a slow link the peer is
        still reading the request.
        """
        if not owed or (self._had_backlog and flushed > self._flushed):
            self.alive_at = now
        self._flushed, self._had_backlog = flushed, backlog > 0
        self.alive_at = max(self.alive_at, heard_at)
        if self.alive_at >= self._pinged_at:
            self._pinged_at = math.inf
        if now - self._pinged_at > self._answer_s:
            return Verdict.GONE
        if now - self.alive_at > self._silence_s and self._pinged_at == math.inf:
            self._pinged_at = now
            return Verdict.PING
        return Verdict.ALIVE


STALL_TIMEOUT_S: Final = 15.0  # seconds in which a transfer must bring at least one byte
PRESSURE_WINDOW_S: Final = 3.0  # seconds over which a transfer must bring MIN_BYTES_PER_S while others wait for memory
MIN_BYTES_PER_S: Final = 2048.0  # the minimum rate of a transfer while others wait for memory


class StallDetector:
    """Decides when one direction of one stream makes no progress: call `is_stalled` about twice a second."""

    def __init__(self) -> None:
        self._since: float | None = None  # the start of the present time window; None while nothing is under way
        self._moved = 0

    def is_stalled(self, now: float, moved: int, *, under_way: bool, pressed: bool) -> bool:
        """Returns whether the transfer has moved too few bytes for too long; False while none is under way.

        Too few is none in STALL_TIMEOUT_S or, while `pressed`, less than MIN_BYTES_PER_S over PRESSURE_WINDOW_S. A
        transfer is judged at the end of each such time window, then the next one begins; within a window this returns
        False. moved: bytes that the stream has moved in this direction since it began. pressed: others wait for memory.
        """
        if not under_way:
            self._since = None
            return False
        if self._since is None:
            self._since, self._moved = now, moved
            return False
        elapsed, gained = now - self._since, moved - self._moved
        if pressed and elapsed >= PRESSURE_WINDOW_S:
            is_too_slow = gained < MIN_BYTES_PER_S * elapsed
        elif elapsed >= STALL_TIMEOUT_S:
            is_too_slow = gained <= 0
        else:
            return False
        self._since, self._moved = now, moved
        return is_too_slow
