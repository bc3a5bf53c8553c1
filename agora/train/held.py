"""Microbatches between their forward and their backward, and which version of the weights their graphs need.

Knows: what is kept of a forward. Must not know: how forwards are computed, optimizers, peers, clocks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from agora_protocol.errors import Busy, LocalError
from agora_protocol.ids import MicrobatchId
from torch import Tensor

from agora.model import Context
from agora.train.weights import Bank

LIMIT_PER_SEAT = 4
"""Held forwards and queued jobs beyond this many times the announced microbatches in flight are refused."""


class NonFinite(LocalError):
    """This peer's own computation gave NaN or infinity from finite input; nothing was added."""

    code = "non-finite"


@dataclass(slots=True)
class Held:
    """What the backward of one microbatch needs: always the entry, and in `keep` the graph on `banks`.

    entry: the float32 boundary [b, s, d] entering stage `first`, or at stage 0 the token ids [b, s].
    output: the end of the graph; None when the backward computes the forward again.
    """

    first: int
    entry: Tensor
    context: Context
    supervised: int
    steps: tuple[int, ...]
    seconds: float
    output: Tensor | None = None
    banks: tuple[Bank, ...] = ()

    def drop_graph(self) -> None:
        """From now on the backward computes the forward again, with the weights of its time."""
        self.output, self.banks = None, ()


class HeldForwards:
    """All of them, by microbatch and entered stage: a microbatch may pass a span twice, entered at different stages.

    Bounded. `forget` may be called from any thread, the rest on the device thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[tuple[MicrobatchId, int], Held] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def check_room(self, microbatch: MicrobatchId, first: int) -> None:
        """Raises Busy when one more microbatch would exceed the limit."""
        if len(self._held) >= self._limit and (microbatch, first) not in self._held:
            raise Busy(f"{self._limit} microbatches wait for their backward here; ask another peer")

    def keep(self, microbatch: MicrobatchId, held: Held) -> None:
        """Replaces what an earlier forward of the same microbatch from the same stage left."""
        with self._lock:
            self._held[microbatch, held.first] = held

    def take(self, microbatch: MicrobatchId, first: int | None = None) -> Held:
        """Removes and returns what is held of the microbatch, entered at `first` (None: wherever it was entered).

        Raises LocalError when it was forgotten or never there, or when None does not say which of two is meant.
        """
        with self._lock:
            found = self._keys(microbatch, first)
            if len(found) > 1:
                raise LocalError(f"microbatch {microbatch.hex()} is held from stages {found[0][1]} and {found[1][1]}")
            if not found:
                raise LocalError(f"no forward of microbatch {microbatch.hex()} is held here; it has to be sent again")
            return self._held.pop(found[0])

    def forget(self, microbatch: MicrobatchId, first: int | None = None) -> None:
        """Frees what is held of it, if anything."""
        with self._lock:
            for key in self._keys(microbatch, first):
                del self._held[key]

    def forget_this(self, microbatch: MicrobatchId, held: Held) -> None:
        """Frees exactly this forward; one that has replaced it stays."""
        with self._lock:
            if self._held.get((microbatch, held.first)) is held:
                del self._held[microbatch, held.first]

    def _keys(self, microbatch: MicrobatchId, first: int | None) -> list[tuple[MicrobatchId, int]]:
        if first is not None:
            return [(microbatch, first)] if (microbatch, first) in self._held else []
        return [key for key in self._held if key[0] == microbatch]

    def live_graphs(self) -> int:
        """How many keep their graph."""
        return sum(held.output is not None for held in list(self._held.values()))

    def graphs_on(self, bank: Bank | None) -> list[Held]:
        """Those whose graph needs this version of a stage's weights."""
        return [held for held in list(self._held.values()) if held.output is not None and bank in held.banks]
