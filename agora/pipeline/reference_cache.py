"""Remembers the log-probabilities of rows of preference pairs under the frozen reference: they never change.

A row is known by its content, so it does not matter in which microbatch of an epoch it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from agora_protocol.tensors import WireTensor

# Maximum number of cached rows, about 200 bytes each. The first ones stay; every epoch asks for the others again.
MAX_ROWS: Final = 1 << 18
KEY_BYTES: Final = 16


class ReferenceCache:
    """Remembers the log-probabilities of at most `max_rows` rows under the frozen reference model, by row content."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._values: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._values)

    def look_up(self, tokens: WireTensor) -> tuple[float, ...] | None:
        """Returns the remembered log-probabilities of a microbatch's b rows, in order; None unless all b are known."""
        found = [self._values.get(key) for key in _row_keys(tokens)]
        known = tuple(value for value in found if value is not None)
        return known if len(known) == len(found) else None

    def remember(self, tokens: WireTensor, log_probabilities: Sequence[float]) -> tuple[float, ...]:
        """Remembers a microbatch's log-probabilities, one for each of its b rows; returns the b values to use.

        For a row that is known already, the first value is kept and returned, so that every epoch compares with the
        same value. Once max_rows are known, a new row is not remembered, and its value is returned as it is.
        """
        kept = []
        for key, value in zip(_row_keys(tokens), log_probabilities, strict=True):
            if key not in self._values and len(self._values) < self._max_rows:
                self._values[key] = value
            kept.append(self._values.get(key, value))
        return tuple(kept)


def _row_keys(tokens: WireTensor) -> list[bytes]:
    values = np.frombuffer(tokens.data, np.dtype(tokens.dtype)).reshape(tokens.shape).astype("<i4")
    rows = np.moveaxis(values, -2, 0)
    return [hashlib.sha256(row.tobytes()).digest()[:KEY_BYTES] for row in rows]
