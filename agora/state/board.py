"""Which chunk of a state to ask which source for next. Pure: `now` is passed in, nothing is sent or awaited here.

Knows chunks by number, sources by peer id, and how long chunks took. Must not know bytes, snapshots, or calls.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from agora_protocol.ids import PeerId

STEAL_FACTOR: Final = 2.0  # a chunk that takes this many times the usual is asked of another source as well
STEAL_AFTER_S: Final = 0.5  # never sooner
UNKNOWN_S: Final = 2.5  # what counts as usual before a first chunk has arrived
REMEMBERED: Final = 32


class Board:
    """Chunks 0..count-1: missing, asked of a source, of several when the first ones are slow, or here.

    A source takes the lowest missing chunk. When none is missing it doubles the call that has been open longest, if
    that one takes unusually long: so a slow or hung source delays the end by one chunk, not by its share.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.here: set[int] = set()
        self.fetched_again = 0  # chunks of which a call failed
        self.doubled = 0  # calls for a chunk that another source was at already
        self._asked: dict[int, dict[PeerId, float]] = {}
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._next = 0
        self._returned: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return len(self.here) == self.count

    def take(self, peer: PeerId, now: float) -> int | None:
        """The chunk to ask `peer` for, noted as asked; None when it can do nothing useful now."""
        chunk = self._missing()
        if chunk is None and (chunk := self._overdue(peer, now)) is not None:
            self.doubled += 1
        if chunk is not None:
            self._asked.setdefault(chunk, {})[peer] = now
        return chunk

    def arrived(self, chunk: int, peer: PeerId, now: float) -> list[PeerId]:
        """`chunk` is here, whole, from `peer`; the peers whose calls for it are needless now."""
        asked = self._asked.pop(chunk, {})
        if (began := asked.pop(peer, None)) is not None:
            self._took.append(now - began)
        self.here.add(chunk)
        return list(asked)

    def failed(self, chunk: int, peer: PeerId) -> None:
        """The call to `peer` for `chunk` ended without it."""
        asked = self._asked.get(chunk, {})
        asked.pop(peer, None)
        if not asked and self._asked.pop(chunk, None) is not None and chunk not in self.here:
            self.fetched_again += 1
            self._returned.append(chunk)

    def forget(self, chunk: int) -> None:
        """A chunk that was here is not good enough any more."""
        self.here.remove(chunk)
        self._returned.append(chunk)

    def usual_s(self) -> float:
        """How long a chunk takes, as the median of the last ones."""
        return statistics.median(self._took) if self._took else UNKNOWN_S

    def _missing(self) -> int | None:
        if self._returned:
            return self._returned.pop(0)
        while self._next < self.count and (self._next in self.here or self._next in self._asked):
            self._next += 1
        if self._next == self.count:
            return None
        self._next += 1
        return self._next - 1

    def _overdue(self, peer: PeerId, now: float) -> int | None:
        patience = max(STEAL_AFTER_S, STEAL_FACTOR * self.usual_s())
        open_calls = ((max(asked.values()), chunk) for chunk, asked in self._asked.items() if peer not in asked)
        began, chunk = min(open_calls, default=(now, -1))
        return chunk if now - began > patience else None
