"""Remembers what the reference said of rows of preference pairs: frozen weights say the same in every epoch.

A row is known by its content, so it does not matter in which microbatch of an epoch it comes. Knows: rows as bytes,
log-probabilities. Must not know: who was asked, epochs, the pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from agora_protocol.tensors import WireTensor

MAX_ROWS: Final = 1 << 18
"""Rows remembered, some 200 bytes of memory each. Of more rows the first ones stay: every epoch asks for the others."""
KEY_BYTES: Final = 16


class ReferenceCache:
    """The log-probabilities of rows under the reference, by the rows' content."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        """max_rows: the most rows that are remembered."""
        self._max_rows = max_rows
        self._values: dict[bytes, float] = {}

    def __len__(self) -> int:
        """Number of rows that are remembered."""
        return len(self._values)

    def look_up(self, tokens: WireTensor) -> tuple[float, ...] | None:
        """Returns the log-probabilities of a microbatch's rows [b]; None unless all of them are known."""
        found = [self._values.get(key) for key in _row_keys(tokens)]
        known = tuple(value for value in found if value is not None)
        return known if len(known) == len(found) else None

    def remember(self, tokens: WireTensor, log_probabilities: Sequence[float]) -> tuple[float, ...]:
        """Remembers what an answer said of a microbatch's rows [b], and returns what is now held of them.

        A row that was known keeps its first value, so that it is compared with the same one in every epoch.
        """
        told = []
        for key, value in zip(_row_keys(tokens), log_probabilities, strict=True):
            if key not in self._values and len(self._values) < self._max_rows:
                self._values[key] = value
            told.append(self._values.get(key, value))
        return tuple(told)


def _row_keys(tokens: WireTensor) -> list[bytes]:
    """Returns a key of each row [b] of token ids [b, s + 1], or of ids and marks [2, b, s + 1].

    The dtype does not count: a row travels as the narrowest one that the whole microbatch fits into.
    """
    values = np.frombuffer(tokens.data, np.dtype(tokens.dtype)).reshape(tokens.shape).astype("<i4")
    rows = np.moveaxis(values, -2, 0)
    return [hashlib.sha256(row.tobytes()).digest()[:KEY_BYTES] for row in rows]
