"""Cuts the numbers of windows or rows into batches of one size. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def cut_batches(numbers: NDArray[np.int64], batch_size: int, limit: int | None) -> Iterator[NDArray[np.int64]]:
    """Yields numbers [n] in batches [batch_size], in their order, at most `limit` batches; None for all.

    Numbers that do not fill a last batch are left out; if there are fewer than `batch_size` in all, they are repeated
    to fill one batch. Yields nothing without numbers.
    """
    if 0 < len(numbers) < batch_size:
        numbers = np.resize(numbers, batch_size)
    count = len(numbers) // batch_size
    for i in range(count if limit is None else min(count, limit)):
        yield numbers[i * batch_size : (i + 1) * batch_size]
