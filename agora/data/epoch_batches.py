"""Draws an origin's microbatches from the rows of samples, so that the swarm does each once an epoch; counts samples.

Knows: rows, the order of an epoch, this origin's shares of the epochs. Must not know: the pipeline, messages, files.

Microbatch j of epoch e holds items j * n to (j + 1) * n - 1 in the order of the epoch, where an item is a row, or a
pair of rows in dpo runs, and n is how many of them a microbatch holds. The last one of an epoch is filled up with the
epoch's first items; those repeats are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.ids import PeerId
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray

from agora.codec import encode_tokens
from agora.data.epoch_shares import EpochShares
from agora.data.epochs import order
from agora.data.sample_rows import SampleRows
from agora.data.sampling import DrawnMicrobatch

KEPT_ORDERS: Final = 4
ID_DIGITS: Final = 15  # hex digits of the fingerprint that are told to others: 60 bits


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """What the swarm has trained on, as far as this origin knows: samples, or pairs in dpo runs.

    epoch: the first that is not complete. seen: those trained on at least once, in every epoch anew. repeated: how
    often one was trained on again in the same epoch. missed: those of epochs before the newest that are not done yet.
    """

    epoch: int
    seen: int
    repeated: int
    missed: int


class EpochBatches:
    """An origin's microbatches of samples.

    microbatch: rows in each, b. me, session: this origin, and a number below 2^63 that no other start of any has. live:
    returns the names of the live origins. `shares` is what is told to the other origins, and kept in checkpoints.
    """

    def __init__(
        self,
        rows: SampleRows,
        seed: int,
        microbatch: int,
        me: PeerId,
        session: int,
        live: Callable[[], Collection[PeerId]],
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._microbatch = microbatch
        self._items = microbatch // rows.rows_together
        self._live = live
        self._orders: dict[int, NDArray[np.int64]] = {}
        count = -(-rows.items // self._items)
        self.shares = EpochShares(seed, me, session, count, int(rows.fingerprint[:ID_DIGITS], 16))

    def draw(self) -> DrawnMicrobatch | None:
        """Returns the next training microbatch, [2, b, s + 1] of ids and marks.

        Its number is epoch * microbatches in an epoch + place. None if there is none until others have told more.
        """
        number = self.shares.take_next(self._live())
        return (
            None if number is None else DrawnMicrobatch(encode_tokens(self._rows.batch(self.rows_of(number))), number)
        )

    def completed(self, number: int) -> None:
        """Records that a microbatch which was drawn is done."""
        self.shares.completed(number, int(self._rows.samples_in(self.rows_of(number)).sum()))

    def released(self, number: int) -> None:
        """Records that a microbatch which was drawn is dropped: any origin may take it."""
        self.shares.released(number)

    def heldout(self, count: int) -> Iterator[WireTensor]:
        """Yields at most `count` microbatches of held-out rows, as wire tensors, the same at every call."""
        return map(encode_tokens, self._rows.heldout_batches(self._microbatch, count))

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Returns the training rows [b] of a microbatch; those of a pair follow each other, the chosen one first."""
        epoch, place = divmod(number, self.shares.count)
        items = self._items_of(epoch, np.arange(place * self._items, (place + 1) * self._items))
        return _rows_of_items(items, self._rows.rows_together)

    def counts(self) -> SampleCounts:
        """Returns the samples that the swarm has trained on, as far as this origin knows."""
        shares, each = self.shares.counts(), self._rows.summary.trained
        done = [self._count_samples(part.epoch) for part in shares.epochs]
        first = shares.epochs[0].epoch if shares.epochs else shares.seen // self.shares.count
        seen = first * each + sum(done)
        return SampleCounts(
            epoch=first,
            seen=seen,
            repeated=max(0, shares.samples - seen),
            missed=sum(each - samples for samples in done[:-1]),
        )

    def _items_of(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the items at these places [n] of an epoch's order; after the last one the first follows."""
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order(self._seed, epoch, self._rows.items)
        return self._orders[epoch][places % self._rows.items]

    def _count_samples(self, epoch: int) -> int:
        """Returns how many samples of an epoch in progress are done, each counted once."""
        is_done = np.zeros(self._rows.items, np.bool_)
        for first, length in self.shares.done_runs(epoch):
            is_done[self._items_of(epoch, np.arange(first * self._items, (first + length) * self._items))] = True
        return int(self._rows.samples_in(_rows_of_items(np.flatnonzero(is_done), self._rows.rows_together)).sum())


def _rows_of_items(items: NDArray[np.int64], rows_together: int) -> NDArray[np.int64]:
    """Returns the rows of items [n], all rows of an item after each other [n * rows_together]."""
    return (items[:, None] * rows_together + np.arange(rows_together)).reshape(-1)
