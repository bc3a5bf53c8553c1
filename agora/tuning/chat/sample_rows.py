"""The rows that a run trains on: samples packed into rows, once per machine, and mapped into memory.

A row has s + 1 positions, for s inputs and the s targets after them. Each is stored as one value, 4 * id + marks.

| objective | a row holds | a sample is left out when |
|---|---|---|
| sft | as many sequences as fit, best-fit decreasing within a chunk | none of its tokens is supervised |
| dpo | one sequence; the rows of a pair follow each other, the chosen one first | one side has no supervised token |

Two sides of a pair that have become equal count as if they had none.

Sequences were cut to s + 1 tokens beforehand. Samples that were cut, and samples that are left out, are counted. The
unused rest of a row is filled with one more sequence, of id 0, without a supervised token. A chunk ends when it has
CHUNK_TOKENS tokens, or enough for CHUNK_ROWS rows if that is more: only one chunk is in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from agora_protocol.errors import DataError, ManifestError
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import BEGINS, SUPERVISED
from numpy.typing import ArrayLike, NDArray

from agora.core.user_paths import expand_home
from agora.data.data_file import changed_while_read, unreadable_data
from agora.data.draws import cut_batches, epoch_order, heldout_threshold, seed_key, splitmix64
from agora.data.record_files import data_files
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids, token_dtype
from agora.tuning.chat.model_tokenizer import TRAINING_DATE, ModelTokenizer, open_training_tokenizer
from agora.tuning.chat.sample_file import check_samples, find_sample_files, open_samples
from agora.tuning.chat.sample_formats import Objective, ReadingCounts, ReadingRules
from agora.tuning.chat.supervision import TokenSample, TokenSequence, tokenise

# --- packing: best-fit decreasing (Johnson et al., SIAM J. Computing 1974); the same rows on every machine


@dataclass(frozen=True, slots=True)
class RowArrays:
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

    The longest comes first; each goes into the fullest row that has room for it, or else into a new row. lengths:
    tokens of each sequence [n], each from 1 to `context`, the tokens of a row.
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


def fill_rows(sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]], context: int) -> RowArrays:
    """Copies sequences into rows of `context` tokens, one after another, then zeros. rows: as assign_rows returns."""
    shape = len(rows), context
    packed = RowArrays(
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


# --- building the rows of a data file


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
    # Left out while reading: malformed records, answers labelled bad, samples longer than the context, those that a
    # column excludes.
    malformed: int = 0
    labelled_bad: int = 0
    too_long: int = 0
    excluded: int = 0

    @property
    def rows(self) -> int:
        return sum(training for training, _ in self.chunks)

    @property
    def heldout_rows(self) -> int:
        return sum(heldout for _, heldout in self.chunks)

    @property
    def trained(self) -> int:
        return self.samples - self.heldout - self.left_out

    def sentence(self) -> str:
        """Returns the counts for people."""
        counted = {
            "cut": self.truncated,
            "left out": self.left_out,
            "malformed": self.malformed,
            "labelled bad": self.labelled_bad,
            "excluded": self.excluded,
            "too long": self.too_long,
        }
        always = ("cut", "left out")
        others = ", ".join(f"{count:,} {what}" for what, count in counted.items() if count or what in always)
        return (
            f"{self.trained:,} samples in {self.rows:,} rows, {self.supervised:,} supervised tokens; "
            f"{self.heldout:,} held out, {others}"
        )

    def to_details(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Self:
        return cls(**{**details, "chunks": tuple((training, heldout) for training, heldout in details["chunks"])})


def row_dtype(vocabulary: int, context: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the narrowest unsigned dtype for both the values of a row (4 * id + marks) and its number of samples."""
    return token_dtype(max(vocabulary << MARK_BITS, context + 2))


# Samples to be packed together. numbers: for each sample its number in the file, from 0; parallel to `samples`.
@dataclass(frozen=True, slots=True)
class _SampleChunk:
    samples: list[TokenSample]
    numbers: list[int]


class RowBuilder:
    """Makes the rows of one data file, once: call `iter_arrays`, then `summary`.

    name: the file, for errors. context: s, the inputs of a row. heldout: the fraction of the samples to hold out,
    chosen by the hash of (seed, number of the sample in the file); 0 for none. counts: of the records that did not
    become samples, complete once all samples were read.
    """

    def __init__(
        self,
        name: str,
        objective: Objective,
        context: int,
        vocabulary: int,
        counts: ReadingCounts,
        *,
        seed: int,
        heldout: float,
    ) -> None:
        self._counts = counts
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
        counts = self._counts
        return RowSummary(
            chunks=tuple(self._chunks),
            fingerprint=self._digest.hexdigest(),
            samples=self._samples,
            heldout=self._held,
            left_out=self._left_out,
            truncated=self._truncated,
            tokens=self._tokens,
            supervised=self._supervised,
            malformed=len(counts.problems),
            labelled_bad=counts.labelled_bad,
            too_long=counts.too_long,
            excluded=counts.excluded,
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
        if not self._heldout:
            return chunk.samples, []
        hashes = splitmix64(np.array(chunk.numbers, np.uint64), self._split_key)
        is_first = not self._chunks  # heldout_threshold finds samples of both kinds: a short file has only this chunk
        limit = heldout_threshold(hashes, self._heldout) if is_first else np.uint64(int(self._heldout * 2**64))
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
        counts = self._counts
        left_out = (
            (self._left_out, f"have no supervised token in {self._context:,}"),
            (counts.too_long, f"are longer than the context of {self._context:,}, and [data] too_long is drop"),
            (counts.labelled_bad, "are labelled bad"),
            (counts.excluded, "are excluded by a column"),
            (len(counts.problems), "are malformed"),
        )
        reasons = ", ".join(f"{count:,} {what}" for count, what in left_out if count)
        why = f" ({reasons})" if reasons else ""
        remedy = "raise [model] context" if self._left_out or counts.too_long else "add samples"
        raise DataError(
            f"{self._name} has {kept} of the {needed} samples that training needs at least{why}; "
            f"{remedy}{' or set [data] heldout = 0' if kept else ''}; `swarm data` shows what each sample trains."
        )


def _without_text(sequence: TokenSequence) -> TokenSequence:
    # The arrays are copied because slices would keep the truncated tokens in memory.
    return TokenSequence(sequence.ids.copy(), sequence.supervised.copy(), _NO_OFFSETS, "", sequence.truncated)


def _split_ids_and_marks(rows: Ids) -> NDArray[np.int32]:
    values = rows.astype("<i4")
    return np.stack([values >> MARK_BITS, values & (SUPERVISED | BEGINS)], axis=1)


# --- the rows, from the cache


FORMAT: Final = "agora rows 2"
HELDOUT_KEY: Final = 0x68656C646F757473  # goes into the hash that shuffles held-out rows
PAIR: Final = 2  # rows of a preference pair

MarkedRows = NDArray[np.int32]  # the rows of a microbatch, int32 [2, b, s + 1]: token ids [0], and marks [1]


class SampleRows:
    """The training rows and the held-out rows of a run's samples. Each kind is numbered from 0.

    values: all arrays that RowBuilder.iter_arrays has yielded, concatenated; usually memory-mapped.
    context: s, the inputs of a row.
    rows_per_item: how many consecutive rows are one item: 2 (a pair) for dpo, 1 otherwise.
    seed: the run's seed, which orders the held-out rows.
    """

    def __init__(self, values: Ids, summary: RowSummary, context: int, rows_per_item: int, seed: int) -> None:
        self.summary = summary
        self.context = context
        self.rows_per_item = rows_per_item
        self._seed = seed
        counts = np.array(summary.chunks, np.int64).reshape(-1, 2)
        stored = int(counts.sum())
        self._rows = values[: stored * (context + 1)].reshape(stored, context + 1)
        self._samples_in_rows = values[stored * (context + 1) :]
        # stored place of a row = its number + what the other side has stored before it
        ends = np.cumsum(counts, axis=0)
        self._ends = ends
        self._before = np.stack([ends[:, 1] - counts[:, 1], ends[:, 0]], axis=1)

    @property
    def items(self) -> int:
        return self.summary.rows // self.rows_per_item

    @property
    def fingerprint(self) -> str:
        return self.summary.fingerprint

    def samples_in(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] for rows [n]. Of a dpo pair the chosen row has 1, the rejected one 0. Raises ValueError."""
        return self._samples_in_rows[self._stored_rows(np.asarray(rows, np.int64), 0)].astype(np.int64)

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> MarkedRows:
        """Returns the training rows with these numbers [b], int32 [2, b, s + 1]: token ids, and marks of each token.

        The marks are bits: supervised, and begins a sequence. A row's inputs are its places 0 to s - 1, its targets the
        places 1 to s. Raises ValueError for a number that no training row has.
        """
        return self._gather(np.asarray(rows, np.int64), 0)

    def heldout_batches(self, batch_size: int, limit: int | None = None) -> Iterator[MarkedRows]:
        """Yields at most `limit` batches of held-out rows, each int32 [2, batch_size, s + 1]; equal ones at every call.

        The rows are shuffled by the seed, so that long and short samples are mixed; pairs stay together. For rows that
        do not fill a batch see cut_batches. Without held-out rows, yields nothing. limit: None for all batches.
        """
        items = epoch_order(seed_key(self._seed, HELDOUT_KEY), 0, self.summary.heldout_rows // self.rows_per_item)
        rows = (items[:, None] * self.rows_per_item + np.arange(self.rows_per_item)).reshape(-1)
        for batch in cut_batches(rows, batch_size, limit):
            yield self._gather(batch, 1)

    def _stored_rows(self, rows: NDArray[np.int64], side: int) -> NDArray[np.int64]:
        total = int(self._ends[-1, side])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < total:
            raise ValueError(f"a row is not in 0 to {total - 1}")
        chunk = np.searchsorted(self._ends[:, side], rows, side="right")
        rows_before: NDArray[np.int64] = self._before[chunk, side]
        return rows + rows_before

    def _gather(self, rows: NDArray[np.int64], side: int) -> MarkedRows:
        values = self._rows[self._stored_rows(rows, side)]
        return np.stack([(values >> MARK_BITS).astype(np.int32), (values & ((1 << MARK_BITS) - 1)).astype(np.int32)])


def open_sample_rows(manifest: Manifest, cache_dir: Path, *, base: Path | None = None) -> SampleRows:
    """Returns the rows of a run whose objective is sft or dpo, memory-mapped from a cache file in `cache_dir`.

    If the cache has no intact rows of this run, makes them from the samples and caches them first; of several
    processes, one does and the others wait. base: the folder of relative paths in [data], by default the current one.
    Raises DataError for malformed samples, and when the samples or the tokenizer have another hash than in the
    manifest; ManifestError for the objective lm or a wrong [data]; DiskError when a file cannot be read or written,
    LocalError without a package.
    """
    data = manifest.data
    model = manifest.model
    if manifest.objective.kind == "lm":
        raise ManifestError("[objective] kind lm has no samples; it draws from [data] corpus.")
    tokenizer = open_training_tokenizer(data.tokenizer, model.vocabulary, base, template=data.chat_template)
    tokenizer.require_hash(data.tokenizer_hash)
    paths = [(base or Path.cwd()) / expand_home(name) for name in data.sample_paths]
    dtype = row_dtype(tokenizer.tokenizer.vocabulary, model.context)
    signature = _signature(manifest, paths, tokenizer)
    cached = CachedTokens(cache_dir, signature, dtype)

    def check_unchanged() -> None:
        if _signature(manifest, paths, tokenizer) != signature:
            raise changed_while_read(", ".join(map(str, paths)))

    values = cached.open_or_write(lambda: _write_rows(cached, manifest, paths, tokenizer, check_unchanged))
    together = PAIR if manifest.objective.kind == "dpo" else 1
    return SampleRows(values, RowSummary.from_details(cached.details), model.context, together, manifest.seed)


def _write_rows(
    cached: CachedTokens,
    manifest: Manifest,
    paths: Sequence[Path],
    tokenizer: ModelTokenizer,
    check_unchanged: Callable[[], None],
) -> None:
    data = manifest.data
    context = manifest.model.context
    objective = manifest.objective.kind
    check_samples(paths, data.samples_hash)
    file = open_samples(paths, ReadingRules.of_manifest(data), objective)
    counts = ReadingCounts()
    vocabulary = tokenizer.tokenizer.vocabulary
    builder = RowBuilder(file.name, objective, context, vocabulary, counts, seed=manifest.seed, heldout=data.heldout)
    samples = tokenise(file, counts, tokenizer, context + 1)

    def details() -> dict[str, Any]:
        check_unchanged()  # the samples' hash was checked in an earlier reading
        return builder.summary().to_details()

    cached.write(builder.iter_arrays(samples), details)


def _signature(manifest: Manifest, paths: Sequence[Path], tokenizer: ModelTokenizer) -> str:
    data = manifest.data
    parts: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.tokenizer.vocabulary, TRAINING_DATE.isoformat()]
    parts += [manifest.objective.kind, manifest.model.context, manifest.seed, data.heldout, sorted(data.columns)]
    parts += [sorted(data.roles), data.role_order, data.skip_bad, data.too_long]
    parts.append(data.samples_hash)  # rows are only cached after the samples were checked against this hash
    for path in find_sample_files([path.resolve() for path in paths]):
        for file in data_files(path):
            try:
                stat = file.stat()
            except OSError as error:
                raise unreadable_data(path, error) from error
            parts.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
