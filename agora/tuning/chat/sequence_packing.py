"""Packs sequences of tokens into rows of one length, with segments and positions that keep them apart in attention.

Best-fit decreasing (Johnson et al., SIAM J. Computing 1974): the
longest sequence first, each into the fullest row that still has room. Nothing is split, and the same lengths give the
same rows on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agora.tuning.chat.supervision import TokenSequence


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of packed sequences; each array is [rows, context].

    tokens: int32 ids, 0 where a row is unused.
    supervised: whether each token is a supervised target.
    segments: int32, 1 for a row's first sequence, 2 for its second ..., 0 where the row is unused; tokens attend within
    their segment.
    positions: int32, from 0 in each segment.
    """

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    segments: NDArray[np.int32]
    positions: NDArray[np.int32]


def assign_rows(lengths: ArrayLike, context: int) -> list[list[int]]:
    """Assigns sequences to rows by best-fit decreasing; returns for each row the indices of its sequences.

    The longest sequence comes first; each goes into the fullest row that has room for it, or else into a new row. No
    sequence is split. lengths: tokens of each sequence [n]. context: tokens of a row. Raises ValueError for a length
    that is not from 1 to `context`.
    """
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    if len(sizes) and not (sizes.min() >= 1 and sizes.max() <= context):
        raise ValueError(f"a length is not in 1 to {context}")
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the rooms above 0 that some row has, sorted
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        index = bisect_left(rooms, size)
        if index == len(rooms):
            row, room = len(rows), context
            rows.append([])
        else:
            room = rooms[index]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[index]
        rows[row].append(number)
        if room_left := room - size:
            if not rows_by_room[room_left]:
                insort(rooms, room_left)
            rows_by_room[room_left].append(row)
    return rows


def fill_rows(sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]], context: int) -> PackedRows:
    """Copies sequences into rows of `context` tokens: a row's sequences one after another, then zeros.

    rows: for each row the indices of its members in `sequences`, such as assign_rows returns. Segments count from 1 in
    each row, positions from 0 in each sequence.
    """
    shape = len(rows), context
    packed = PackedRows(
        np.zeros(shape, np.int32), np.zeros(shape, np.bool_), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    )
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, 1):
            sequence = sequences[number]
            part = slice(start, start + len(sequence.ids))
            packed.tokens[row, part] = sequence.ids
            packed.supervised[row, part] = sequence.supervised
            packed.segments[row, part] = segment
            packed.positions[row, part] = np.arange(len(sequence.ids))
            start = part.stop
    return packed
