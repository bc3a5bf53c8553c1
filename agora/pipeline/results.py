"""What this peer has already answered, kept so that a repeat is answered and not counted twice: pure, bounded.

Knows keys, bytes and ages. Must not know asyncio, peers or what an answer means. The bound is bytes, entries and age;
what falls out is forgotten, and a repeat of it would be counted again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agora_protocol.ids import MicrobatchId

from agora.pipeline.interfaces import HopAnswer

DEFAULT_BYTES = 256 << 20
DEFAULT_AGE_S = 900.0
MOST_ENTRIES = 65536
ENTRY_BYTES = 512
"""What an entry costs beside its tensors, roughly; evaluation answers have no tensors at all."""


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """What makes two requests the same work: the microbatch and the stage at which it enters this peer."""

    microbatch: MicrobatchId
    stage: int


class ResultCache:
    """The newest answers, at most `max_bytes` of them and none older than `max_age_s`."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES, max_age_s: float = DEFAULT_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[WorkKey, tuple[float, HopAnswer]] = OrderedDict()
        self._stages: dict[MicrobatchId, int] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: WorkKey, now: float) -> HopAnswer | None:
        """The answer given to this work, if it is still kept."""
        self._expire(now)
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def entered_elsewhere(self, key: WorkKey, now: float) -> int | None:
        """The other stage at which this microbatch has already been through this peer, if it has."""
        self._expire(now)
        stage = self._stages.get(key.microbatch)
        return None if stage in (None, key.stage) else stage

    def put(self, key: WorkKey, answer: HopAnswer, now: float) -> None:
        """Keeps an answer; the oldest make room. One that alone exceeds the bound is kept until the next comes."""
        self._drop(key)
        self._entries[key] = (now, answer)
        self._stages[key.microbatch] = key.stage
        self.nbytes += answer.nbytes + ENTRY_BYTES
        while len(self._entries) > 1 and (self.nbytes > self._max_bytes or len(self._entries) > MOST_ENTRIES):
            self._drop(next(iter(self._entries)))

    def _expire(self, now: float) -> None:
        while self._entries:
            key, (kept_at, _) = next(iter(self._entries.items()))
            if now - kept_at <= self._max_age_s:
                return
            self._drop(key)

    def _drop(self, key: WorkKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry[1].nbytes + ENTRY_BYTES
            if self._stages.get(key.microbatch) == key.stage:
                del self._stages[key.microbatch]
