"""Decides when a silent peer counts as gone.

Deterministic: a LivenessCheck changes only itself, and only by the calls to it; `now` is an argument.
"""

from __future__ import annotations

import math
from enum import Enum


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
