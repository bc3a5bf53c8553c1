"""Draws an origin's microbatches from the rows of samples, so that the swarm trains on each once an epoch.

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
from agora.data.epochs import epoch_order
from agora.data.sample_rows import SampleRows
from agora.data.sampling import DrawnMicrobatch

KEPT_ORDERS: Final = 4
ID_DIGITS: Final = 15  # hex digits of the rows' fingerprint that other origins are told: 60 bits


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """What the swarm has trained on, as far as this origin knows: samples, or pairs in dpo runs.

    epoch: the first that is not complete. seen: how many were trained on at least once, summed over the epochs.
    repeated: how many times one was trained on again in the same epoch. missed: how many of earlier epochs than the
    newest are not done yet.
    """

    epoch: int
    seen: int
    repeated: int
    missed: int


class EpochBatches:
    """Draws one origin's microbatches of samples, and counts what the swarm has trained on.

    microbatch: rows in each, b. me: this origin. session: a number below 2^63 that is used by no other start of any
    origin. live: returns the names of the live origins. shares: this origin's part in the epochs, to be exchanged with
    the other origins and kept in checkpoints.
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
        """Returns the next training microbatch, [2, b, s + 1] of ids and marks; None if there is none to take now.

        Its number is epoch * microbatches in an epoch + its place in the epoch. After None, another may be free as soon
        as other origins have told more (see EpochShares.take_next).
        """
        number = self.shares.take_next(self._live())
        return (
            None if number is None else DrawnMicrobatch(encode_tokens(self._rows.batch(self.rows_of(number))), number)
        )

    def mark_completed(self, number: int) -> None:
        """Records that the drawn microbatch of this number is done, with the samples in it."""
        self.shares.mark_completed(number, int(self._rows.samples_in(self.rows_of(number)).sum()))

    def release(self, number: int) -> None:
        """Records that the drawn microbatch of this number is given up: any origin may take it again."""
        self.shares.release(number)

    def heldout(self, count: int) -> Iterator[WireTensor]:
        """Yields at most `count` microbatches of held-out rows, as wire tensors, the same at every call."""
        return map(encode_tokens, self._rows.heldout_batches(self._microbatch, count))

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Returns the indices of the training rows [b] of a microbatch; of a dpo pair, the chosen row precedes."""
        epoch, place = divmod(number, self.shares.count)
        items = self._items_of(epoch, np.arange(place * self._items, (place + 1) * self._items))
        return _rows_of_items(items, self._rows.rows_together)

    def counts(self) -> SampleCounts:
        """Returns how many samples the swarm has trained on, as far as this origin knows."""
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
        """Returns the items at these places [n] of an epoch's order; places beyond its end begin again at the first."""
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_order(self._seed, epoch, self._rows.items)
        return self._orders[epoch][places % self._rows.items]

    def _count_samples(self, epoch: int) -> int:
        """Returns how many samples of an epoch in progress are done, each counted once."""
        is_done = np.zeros(self._rows.items, np.bool_)
        for first, length in self.shares.done_runs(epoch):
            is_done[self._items_of(epoch, np.arange(first * self._items, (first + length) * self._items))] = True
        return int(self._rows.samples_in(_rows_of_items(np.flatnonzero(is_done), self._rows.rows_together)).sum())


def _rows_of_items(items: NDArray[np.int64], rows_together: int) -> NDArray[np.int64]:
    """Returns the indices of the rows of items [n], all rows of an item next to each other: [n * rows_together]."""
    return (items[:, None] * rows_together + np.arange(rows_together)).reshape(-1)
