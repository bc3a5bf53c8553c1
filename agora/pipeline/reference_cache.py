"""What an origin remembers of the frozen reference model of dpo: it asks once for each row, and not in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from agora_protocol.tensors import WireTensor

# Maximum number of rows whose reference is remembered, at about 200 bytes each. The first ones stay; for the others
# every epoch asks again.
MAX_ROWS: Final = 1 << 18
KEY_BYTES: Final = 16


class ReferenceCache:
    """Remembers the log-probabilities of rows of preference pairs under the frozen reference: they never change."""

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

        A row that is known already keeps its first value, so that every epoch compares with the same one.
        """
        kept = []
        for key, value in zip(_row_keys(tokens), log_probabilities, strict=True):
            if key not in self._values and len(self._values) < self._max_rows:
                self._values[key] = value
            kept.append(self._values.get(key, value))
        return tuple(kept)


def _row_keys(tokens: WireTensor) -> list[bytes]:
    # The key of a row is its content, so it does not matter in which microbatch of an epoch the row is. The cast makes
    # keys comparable: tokens are sent in the narrowest dtype that fits the whole microbatch.
    values = np.frombuffer(tokens.data, np.dtype(tokens.dtype)).reshape(tokens.shape).astype("<i4")
    rows = np.moveaxis(values, -2, 0)
    return [hashlib.sha256(row.tobytes()).digest()[:KEY_BYTES] for row in rows]
