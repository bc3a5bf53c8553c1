"""Draws an origin's microbatches of samples, each once an epoch across the swarm, and keeps on disk which are done."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from agora_protocol.ids import PeerId
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray

from agora.codec import encode_tokens
from agora.core.span_work import DrawnMicrobatch
from agora.data.draws import epoch_order
from agora.observe.events import DiskTrouble, Report
from agora.state.files import sync_folder
from agora.tuning.chat.sample_rows import SampleRows
from agora.tuning.epochs.assigner import EpochAssigner

KEPT_ORDERS: Final = 4  # maximum number of epochs whose order is cached
ID_DIGITS: Final = 15  # hex digits of the rows' fingerprint that other origins receive: 60 bits


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """How many samples (in dpo runs: pairs) the swarm has trained on, as far as this origin knows.

    epoch: the first epoch that is not complete.
    seen: samples trained on at least once in an epoch, summed over the epochs.
    repeated: how often a sample was trained on again in the same epoch.
    missed: samples not trained on yet, in epochs in progress that are older than the newest.
    """

    epoch: int
    seen: int
    repeated: int
    missed: int


class EpochMicrobatches:
    """Draws one origin's microbatches of samples, and counts what the swarm has trained on.

    microbatch_size: b, rows in a microbatch. session: a number below 2^63 that is used by no other start of any origin.
    live: returns the names of the live origins; called at each draw. assigner: decides which microbatches this origin
    takes; its state is exchanged with the other origins and kept in checkpoints.
    """

    def __init__(
        self,
        rows: SampleRows,
        seed: int,
        microbatch_size: int,
        me: PeerId,
        session: int,
        live: Callable[[], Collection[PeerId]],
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._microbatch_size = microbatch_size
        self._items = microbatch_size // rows.rows_per_item
        self._live = live
        self._orders: dict[int, NDArray[np.int64]] = {}
        count = -(-rows.items // self._items)
        self.assigner = EpochAssigner(seed, me, session, count, int(rows.fingerprint[:ID_DIGITS], 16))

    def draw(self) -> DrawnMicrobatch | None:
        """Takes the next training microbatch and returns it, with its number; None if this origin may open none now.

        The tokens are [2, b, s + 1]: token ids, and the marks of SampleRows.batch. The number is epoch * microbatches
        in an epoch + position in the epoch. The microbatch is in flight until `mark_completed` or `release` is called
        with its number. After None, try again when other origins have sent new states (see EpochAssigner.take_next).
        """
        number = self.assigner.take_next(self._live())
        return (
            None if number is None else DrawnMicrobatch(encode_tokens(self._rows.batch(self.rows_of(number))), number)
        )

    def mark_completed(self, number: int) -> None:
        """Raises ValueError if it was not drawn, or is already completed or released."""
        self.assigner.mark_completed(number, int(self._rows.samples_in(self.rows_of(number)).sum()))

    def release(self, number: int) -> None:
        """Any origin may take it again. Raises ValueError as mark_completed."""
        self.assigner.release(number)

    def heldout_microbatches(self, count: int) -> Iterator[WireTensor]:
        """Yields at most `count` microbatches, equal ones at every call; see SampleRows.heldout_batches."""
        return map(encode_tokens, self._rows.heldout_batches(self._microbatch_size, count))

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Returns the indices of the training rows [b] of microbatch `number`, in the shuffled order of its epoch.

        A dpo pair is two adjacent rows: chosen, then rejected. The last microbatch of an epoch is filled up with the
        epoch's first rows.
        """
        epoch, position = divmod(number, self.assigner.count)
        items = self._items_of(epoch, np.arange(position * self._items, (position + 1) * self._items))
        return _rows_of_items(items, self._rows.rows_per_item)

    def counts(self) -> SampleCounts:
        """Returns how many samples the swarm has trained on, as far as this origin knows; pairs, for dpo."""
        totals = self.assigner.counts()
        each = self._rows.summary.trained
        done = [self._count_samples(part.epoch) for part in totals.epochs]
        first = totals.epochs[0].epoch if totals.epochs else totals.seen // self.assigner.count
        seen = first * each + sum(done)
        return SampleCounts(
            epoch=first,
            seen=seen,
            repeated=max(0, totals.samples - seen),
            missed=sum(each - samples for samples in done[:-1]),
        )

    def _items_of(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_order(self._seed, epoch, self._rows.items)
        return self._orders[epoch][positions % self._rows.items]

    def _count_samples(self, epoch: int) -> int:
        is_done = np.zeros(self._rows.items, np.bool_)
        for first, length in self.assigner.done_ranges(epoch):
            is_done[self._items_of(epoch, np.arange(first * self._items, (first + length) * self._items))] = True
        return int(self._rows.samples_in(_rows_of_items(np.flatnonzero(is_done), self._rows.rows_per_item)).sum())


def _rows_of_items(items: NDArray[np.int64], rows_per_item: int) -> NDArray[np.int64]:
    return (items[:, None] * rows_per_item + np.arange(rows_per_item)).reshape(-1)


# --- which samples were trained on at each checkpoint, so that a resumed run continues from there


# How many steps' states are kept in memory: the checkpoint of such a step may not be written completely yet.
REMEMBERED: Final = 256
KEPT: Final = 4  # how many states the file has: those of the newest checkpoints
MAX_BYTES: Final = 1 << 24  # how many bytes of the file are read; a longer file counts as damaged


class EpochFile:
    """Remembers the epochs' state at each step of stage 0, and writes the state of each checkpoint to the file `path`.

    A state is the tuple of integers that EpochAssigner.snapshot returns: which samples have been trained on. The file
    is read when this object is made; a missing or malformed one counts as empty. A disk error is reported as
    DiskTrouble: the state stays in memory and goes into the file with the next one. Until then a restart would train
    again on the samples since the last good write.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._path = path
        self._report = report
        self._remembered: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._kept = _read(path)
        self._awaited: int | None = None  # a step that `write` was called for before its state was known

    def remember(self, step: int, state: tuple[int, ...]) -> None:
        """Keeps a step's state in memory until REMEMBERED later ones have come. Blocks if `write` waits for it."""
        self._remembered[step] = state
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        if step == self._awaited:
            self.write(step)

    def write(self, step: int) -> None:
        """Writes the state of `step`, which has a checkpoint now, with those of up to KEPT - 1 earlier steps. Blocks.

        If the state is not remembered yet, it is written as soon as `remember` gets it. A file that cannot be written
        is reported as DiskTrouble, not raised; its states stay in memory until the next write.
        """
        state = self._remembered.get(step)
        if state is None:
            self._awaited = step
            return
        self._awaited = None
        # States of later steps come from training that was undone by going back to an older checkpoint.
        earlier = {kept: state for kept, state in self._kept.items() if kept < step}
        self._kept = dict(sorted({**earlier, step: state}.items())[-KEPT:])
        content = json.dumps({"epochs": [[step, list(state)] for step, state in self._kept.items()]})
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("w", encoding="ascii") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            self._report(DiskTrouble(str(self._path), error.strerror or str(error)))

    def latest_up_to(self, step: int) -> tuple[int, ...] | None:
        """At most KEPT states are kept: an older checkpoint may have none."""
        steps = [kept for kept in self._kept if kept <= step]
        return self._kept[max(steps)] if steps else None


def _read(path: Path) -> dict[int, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            content: Any = json.loads(file.read(MAX_BYTES))
        entries = [(step, tuple(state)) for step, state in content["epochs"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not all(type(number) is int for step, state in entries for number in (step, *state)):
        return {}
    return dict(entries)
