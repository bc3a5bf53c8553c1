"""Packs tokenised samples into training rows, chunk by chunk, and holds some samples out for evaluation.

A row has s + 1 positions, for s inputs and the s targets after them. Each is stored as one value, 4 * id + marks.

| objective | a row holds | a sample is left out when |
|---|---|---|
| sft | as many sequences as fit, best-fit decreasing within a chunk | none of its tokens is supervised |
| dpo | one sequence; the rows of a pair follow each other, the chosen one first | one side has no supervised token |

Sequences were cut to s + 1 tokens beforehand. Samples that were cut, and samples that are left out, are counted.

The unused rest of a row is filled with one more sequence, of id 0, without a supervised token. A chunk ends when it has
CHUNK_TOKENS tokens, or enough for CHUNK_ROWS rows if that is more: only one chunk is in memory.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np
from agora_protocol.errors import DataError
from agora_protocol.tensors import BEGINS, SUPERVISED
from numpy.typing import NDArray

from agora.data.hashing import mix, seed_key, split_limit
from agora.data.tokenizer import Ids, token_dtype
from agora.tuning.chat.record_formats import Objective
from agora.tuning.chat.sequence_packing import assign_rows, fill_rows
from agora.tuning.chat.supervision import TokenSample, TokenSequence

MARK_BITS: Final = 2  # the lowest bits of a stored value, which are the marks of its token
CHUNK_TOKENS: Final = 1 << 21  # minimum number of tokens in a chunk, except the last
CHUNK_ROWS: Final = 64  # minimum number of rows that a chunk's tokens could fill, except the last
# Domain separator ("samplesp") of the hash that chooses held-out samples: other hashes do not depend on it.
SPLIT_KEY: Final = 0x73616D706C657370

_NO_OFFSETS: Final = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Counts of the rows made from a data file, and the fingerprint of those rows. A preference pair is one sample."""

    # For each chunk, in stored order, how many training rows and how many held-out rows it has.
    chunks: tuple[tuple[int, int], ...]
    fingerprint: str  # SHA-256 over all training rows, in hex, equal for peers that train on the same rows
    samples: int  # all samples of the file
    heldout: int  # samples in held-out rows
    left_out: int  # samples in no row
    truncated: int  # samples that were cut
    tokens: int  # tokens in the training rows, without the filling at the rows' ends
    supervised: int  # how many of `tokens` are supervised

    @property
    def rows(self) -> int:
        return sum(training for training, _ in self.chunks)

    @property
    def heldout_rows(self) -> int:
        return sum(heldout for _, heldout in self.chunks)

    @property
    def trained(self) -> int:
        return self.samples - self.heldout - self.left_out

    def to_details(self) -> dict[str, Any]:
        """Returns the fields as a dict of values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Self:
        """Returns the summary whose `to_details` returned `details`, also after a round trip through JSON."""
        return cls(**{**details, "chunks": tuple((training, heldout) for training, heldout in details["chunks"])})


def row_dtype(vocabulary: int, context: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the narrowest unsigned dtype for both the values of a row (4 * id + marks) and its number of samples."""
    return token_dtype(max(vocabulary << MARK_BITS, context + 2))


@dataclass(frozen=True, slots=True)
class _SampleChunk:
    """Samples to be packed together. numbers: for each sample its number in the file, from 0; parallel to `samples`."""

    samples: list[TokenSample]
    numbers: list[int]


class RowBuilder:
    """Makes the rows of one data file, once: call `iter_arrays`, then `summary`.

    name: the file, for errors.
    context: s, the inputs of a row.
    vocabulary: the number of token ids.
    seed: the run's seed.
    heldout: the fraction of the samples to hold out, chosen by the hash of (seed, number of the sample in the file); 0
    for none.
    """

    def __init__(
        self, name: str, objective: Objective, context: int, vocabulary: int, *, seed: int, heldout: float
    ) -> None:
        self._name = name
        self._is_packed = objective != "dpo"
        self._context = context
        self._vocabulary = vocabulary
        self._heldout = heldout
        self._dtype = row_dtype(vocabulary, context)
        self._split_key = seed_key(seed, SPLIT_KEY)
        self._digest = hashlib.sha256(f"agora rows 1\0{objective}\0{context}\0".encode())
        self._chunks: list[tuple[int, int]] = []
        self._samples_in_rows = array("q")
        self._samples = self._held = self._left_out = self._truncated = self._tokens = self._supervised = 0

    def iter_arrays(self, samples: Iterable[TokenSample]) -> Iterator[Ids]:
        """Yields flat arrays: for each chunk the values of its training rows, then of its held-out rows, s + 1 a row.

        The last array has the number of samples in each row, in the same order. A value is 4 * token id + marks.
        samples: sequences of at most s + 1 tokens; a sample is left out if one of its sequences has no supervised
        token. Raises DataError if an id is outside of the vocabulary, and, after all rows, if too few samples are left.
        """
        for chunk in self._cut_chunks(samples):
            training, heldout = self._split(chunk)
            rows = self._pack(training)
            self._digest.update(_split_ids_and_marks(rows).tobytes())
            self._supervised += int(np.count_nonzero(rows & SUPERVISED))
            self._tokens += sum(len(part.ids) for sample in training for part in sample)
            yield rows.reshape(-1)
            heldout_rows = self._pack(heldout)
            yield heldout_rows.reshape(-1)
            self._held += len(heldout)
            self._chunks.append((len(rows), len(heldout_rows)))
        self._check_enough()
        yield np.array(self._samples_in_rows, self._dtype)

    def summary(self) -> RowSummary:
        """Returns the summary of the rows that `iter_arrays` has yielded; call it after the last array."""
        return RowSummary(
            chunks=tuple(self._chunks),
            fingerprint=self._digest.hexdigest(),
            samples=self._samples,
            heldout=self._held,
            left_out=self._left_out,
            truncated=self._truncated,
            tokens=self._tokens,
            supervised=self._supervised,
        )

    def _cut_chunks(self, samples: Iterable[TokenSample]) -> Iterator[_SampleChunk]:
        limit = max(CHUNK_TOKENS, CHUNK_ROWS * (self._context + 1))
        chunk = _SampleChunk([], [])
        tokens = 0
        for number, sample in enumerate(samples):
            self._samples += 1
            self._truncated += any(part.truncated for part in sample)
            if not all(part.supervised.any() for part in sample):
                self._left_out += 1
                continue
            chunk.samples.append(tuple(map(_without_text, sample)))
            chunk.numbers.append(number)
            tokens += sum(len(part.ids) for part in sample)
            if tokens >= limit:
                yield chunk
                chunk = _SampleChunk([], [])
                tokens = 0
        if chunk.samples:
            yield chunk

    def _split(self, chunk: _SampleChunk) -> tuple[list[TokenSample], list[TokenSample]]:
        # If `heldout` is above 0 and the first chunk has at least two samples, it gets samples of both kinds, so that a
        # short file has both.
        if not self._heldout:
            return chunk.samples, []
        hashes = mix(np.array(chunk.numbers, np.uint64), self._split_key)
        is_first = not self._chunks
        limit = split_limit(hashes, self._heldout) if is_first else np.uint64(int(self._heldout * 2**64))
        is_held = hashes < limit
        return list(itertools.compress(chunk.samples, ~is_held)), list(itertools.compress(chunk.samples, is_held))

    def _pack(self, samples: Sequence[TokenSample]) -> Ids:
        places = self._context + 1
        sequences = [part for sample in samples for part in sample]
        if self._is_packed:
            members = assign_rows([len(part.ids) for part in sequences], places)
            self._samples_in_rows.extend(map(len, members))
        else:
            members = [[number] for number in range(len(sequences))]
            self._samples_in_rows.extend([1, 0] * len(samples))
        packed = fill_rows(sequences, members, places)
        if packed.tokens.size and not 0 <= packed.tokens.min() <= packed.tokens.max() < self._vocabulary:
            raise DataError(
                f"The tokenizer gave {self._name} token id {packed.tokens.max()} but says that its vocabulary is "
                f"{self._vocabulary}; use another tokenizer file."
            )
        # the first place of a row, and each whose segment is another than that of the place before
        begins = np.diff(packed.segments, prepend=-1) != 0
        marks = packed.supervised * np.int32(SUPERVISED) | begins * np.int32(BEGINS)
        values: Ids = ((packed.tokens << MARK_BITS) | marks).astype(self._dtype)
        return values

    def _check_enough(self) -> None:
        kept = self._samples - self._left_out
        needed = 2 if self._heldout else 1
        if kept >= needed:
            return
        why = "" if not self._left_out else f" ({self._left_out:,} have no supervised token in {self._context:,})"
        remedy = " or set [data] heldout = 0" if kept else ""
        remedy = f"raise [model] context{remedy}" if self._left_out else f"add samples{remedy}"
        raise DataError(
            f"{self._name} has {kept} of the {needed} samples that training needs at least{why}; {remedy}; "
            "`swarm data` shows what each sample trains."
        )


def _without_text(sequence: TokenSequence) -> TokenSequence:
    # The arrays are copied because slices would keep the truncated tokens in memory.
    return TokenSequence(sequence.ids.copy(), sequence.supervised.copy(), _NO_OFFSETS, "", sequence.truncated)


def _split_ids_and_marks(rows: Ids) -> NDArray[np.int32]:
    values = rows.astype("<i4")
    return np.stack([values >> MARK_BITS, values & (SUPERVISED | BEGINS)], axis=1)
