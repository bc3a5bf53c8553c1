"""Opens the rows that a run trains on: made from its samples once per machine, and mapped into memory.

Knows: manifest, data file, tokenizer, cache. Must not know: who takes which row, models, the pipeline. For what a row
is and how it is stored, see row_building.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import Manifest
from numpy.typing import NDArray

from agora.data.data_hashes import check_samples, check_tokenizer
from agora.data.epochs import epoch_order
from agora.data.hashing import seed_key
from agora.data.model_tokenizer import TRAINING_DATE, ModelTokenizer, open_training_tokenizer
from agora.data.record_files import data_files, unreadable_data
from agora.data.row_building import MARK_BITS, RowBuilder, RowSummary, row_dtype
from agora.data.sample_file import open_samples
from agora.data.supervision import tokenise
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids

FORMAT: Final = "agora rows 1"
HELDOUT_KEY: Final = 0x68656C646F757473
PAIR: Final = 2

MarkedRows = NDArray[np.int32]
"""The rows of a microbatch, int32 [2, b, s + 1]: token ids [0], and marks [1]."""


class SampleRows:
    """The training rows and the held-out rows of a run's samples. Each kind is numbered from 0.

    values: all that RowBuilder.iter_arrays has yielded, concatenated. rows_together: how many consecutive rows are one
    item: 2 (a pair) for dpo, 1 otherwise.
    """

    def __init__(self, values: Ids, summary: RowSummary, context: int, rows_together: int, seed: int) -> None:
        self.summary = summary
        self.context = context
        self.rows_together = rows_together
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
        """The number of training rows; for dpo, of training pairs."""
        return self.summary.rows // self.rows_together

    @property
    def fingerprint(self) -> str:
        """The SHA-256 over all training rows, in hex: peers with the same fingerprint train on the same rows."""
        return self.summary.fingerprint

    def samples_in(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many samples each of these training rows [n] has, [n]; the row of a rejected answer has 0."""
        return self._samples_in_rows[self._stored_rows(np.asarray(rows, np.int64), 0)].astype(np.int64)

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> MarkedRows:
        """Returns the training rows with these numbers [b], int32 [2, b, s + 1]: ids and marks.

        A row's inputs are its places 0 to s - 1, its targets the places 1 to s. Raises ValueError for other numbers.
        """
        return self._gather(np.asarray(rows, np.int64), 0)

    def heldout_batches(self, batch: int, limit: int | None = None) -> Iterator[MarkedRows]:
        """Yields at most `limit` batches of held-out rows, each int32 [2, batch, s + 1], the same at every call.

        They are shuffled, so that long and short samples are mixed. Rows that do not fill a last batch are left out; if
        there are fewer than `batch` rows, they are repeated to fill one batch.
        """
        items = epoch_order(seed_key(self._seed, HELDOUT_KEY), 0, self.summary.heldout_rows // self.rows_together)
        rows = (items[:, None] * self.rows_together + np.arange(self.rows_together)).reshape(-1)
        if 0 < len(rows) < batch:
            rows = np.resize(rows, batch)
        count = len(rows) // batch
        for i in range(count if limit is None else min(count, limit)):
            yield self._gather(rows[i * batch : (i + 1) * batch], 1)

    def _stored_rows(self, rows: NDArray[np.int64], side: int) -> NDArray[np.int64]:
        """Converts row numbers [n] to indices of the stored rows [n]. side: 0 for training rows, 1 for held-out ones.

        Raises ValueError for a number that no row has.
        """
        total = int(self._ends[-1, side])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < total:
            raise ValueError(f"a row is not in 0 to {total - 1}")
        chunk = np.searchsorted(self._ends[:, side], rows, side="right")
        rows_before: NDArray[np.int64] = self._before[chunk, side]
        return rows + rows_before

    def _gather(self, rows: NDArray[np.int64], side: int) -> MarkedRows:
        """Copies rows [b] out of the mapped file, as ids and marks int32 [2, b, s + 1]. side: see _stored_rows."""
        values = self._rows[self._stored_rows(rows, side)]
        return np.stack([(values >> MARK_BITS).astype(np.int32), (values & ((1 << MARK_BITS) - 1)).astype(np.int32)])


def open_sample_rows(manifest: Manifest, cache_dir: Path, *, base: Path | None = None) -> SampleRows:
    """Returns the rows of a run whose objective is sft or dpo, from the cache; makes and caches them if necessary.

    base: the folder of relative paths in [data], by default the current one. Of several processes, one makes the rows
    and the others wait; damaged ones are made again. Raises DataError for malformed samples, and when the samples or
    the tokenizer have another hash than the manifest says; ManifestError for the objective lm or a wrong [data];
    DiskError and LocalError when this machine cannot.
    """
    data, model = manifest.data, manifest.model
    if manifest.objective.kind == "lm":
        raise ManifestError("[objective] kind lm has no samples; it draws from [data] corpus.")
    tokenizer = open_training_tokenizer(data.tokenizer, model.vocabulary, base)
    check_tokenizer(tokenizer, data.tokenizer_hash)
    path = (base or Path.cwd()) / Path(data.samples).expanduser()
    dtype = row_dtype(tokenizer.tokenizer.vocabulary, model.context)
    cached = CachedTokens(cache_dir, _signature(manifest, path, tokenizer), dtype)
    values = cached.open_or_write(lambda: _write_rows(cached, manifest, path, tokenizer))
    together = PAIR if manifest.objective.kind == "dpo" else 1
    return SampleRows(values, RowSummary.from_details(cached.details), model.context, together, manifest.seed)


def _write_rows(cached: CachedTokens, manifest: Manifest, path: Path, tokenizer: ModelTokenizer) -> None:
    """Checks the samples' hash, makes their rows, and writes rows and summary to the cache.

    Raises DataError if the hash differs, or as open_samples does.
    """
    data, context, objective = manifest.data, manifest.model.context, manifest.objective.kind
    check_samples(path, data.samples_hash)
    file = open_samples(path, dict(data.columns), objective)
    builder = RowBuilder(
        str(path), objective, context, tokenizer.tokenizer.vocabulary, seed=manifest.seed, heldout=data.heldout
    )
    samples = tokenise(file.samples(), tokenizer, context=context + 1, learn_all=False)
    cached.write(builder.iter_arrays(samples), lambda: builder.summary().to_details())


def _signature(manifest: Manifest, path: Path, tokenizer: ModelTokenizer) -> str:
    """Returns the cache key: SHA-256, in hex, of the data files' paths, sizes and times of change, and of everything
    else that the rows depend on.
    """
    data = manifest.data
    known: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.tokenizer.vocabulary, TRAINING_DATE.isoformat()]
    known += [manifest.objective.kind, manifest.model.context, manifest.seed, data.heldout, sorted(data.columns)]
    known.append(data.samples_hash)  # rows are only cached after the samples were checked against this hash
    for file in data_files(path.resolve()):
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable_data(path, error) from error
        known.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
