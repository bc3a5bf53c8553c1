"""Opens the rows that a run trains on: made from its samples once per machine, and mapped into memory.

For
what a row is and how it is stored, see row_building.py.
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

from agora.data.batch_cutting import cut_batches
from agora.data.hashing import epoch_order, seed_key
from agora.data.record_files import data_files, unreadable_data
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids
from agora.tuning.chat.data_hashes import check_samples, check_tokenizer
from agora.tuning.chat.model_tokenizer import TRAINING_DATE, ModelTokenizer, open_training_tokenizer
from agora.tuning.chat.row_building import MARK_BITS, RowBuilder, RowSummary, row_dtype
from agora.tuning.chat.sample_file import open_samples
from agora.tuning.chat.supervision import tokenise

FORMAT: Final = "agora rows 1"
HELDOUT_KEY: Final = 0x68656C646F757473  # goes into the hash that shuffles held-out rows
PAIR: Final = 2  # rows of a preference pair

MarkedRows = NDArray[np.int32]  # the rows of a microbatch, int32 [2, b, s + 1]: token ids [0], and marks [1]


class SampleRows:
    """The training rows and the held-out rows of a run's samples. Each kind is numbered from 0.

    values: all arrays that RowBuilder.iter_arrays has yielded, concatenated; usually memory-mapped.
    context: s, the inputs of a row.
    rows_together: how many consecutive rows are one item: 2 (a pair) for dpo, 1 otherwise.
    seed: the run's seed, which orders the held-out rows.
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
        return self.summary.rows // self.rows_together

    @property
    def fingerprint(self) -> str:
        return self.summary.fingerprint

    def samples_in(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many samples each of the training rows with these numbers [n] has, [n].

        Of a dpo pair, the chosen row has 1, the rejected one 0. Raises ValueError for a number that no row has.
        """
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
        items = epoch_order(seed_key(self._seed, HELDOUT_KEY), 0, self.summary.heldout_rows // self.rows_together)
        rows = (items[:, None] * self.rows_together + np.arange(self.rows_together)).reshape(-1)
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
    tokenizer = open_training_tokenizer(data.tokenizer, model.vocabulary, base)
    check_tokenizer(tokenizer, data.tokenizer_hash)
    path = (base or Path.cwd()) / Path(data.samples).expanduser()
    dtype = row_dtype(tokenizer.tokenizer.vocabulary, model.context)
    cached = CachedTokens(cache_dir, _signature(manifest, path, tokenizer), dtype)
    values = cached.open_or_write(lambda: _write_rows(cached, manifest, path, tokenizer))
    together = PAIR if manifest.objective.kind == "dpo" else 1
    return SampleRows(values, RowSummary.from_details(cached.details), model.context, together, manifest.seed)


def _write_rows(cached: CachedTokens, manifest: Manifest, path: Path, tokenizer: ModelTokenizer) -> None:
    data = manifest.data
    context = manifest.model.context
    objective = manifest.objective.kind
    check_samples(path, data.samples_hash)
    file = open_samples(path, dict(data.columns), objective)
    builder = RowBuilder(
        str(path), objective, context, tokenizer.tokenizer.vocabulary, seed=manifest.seed, heldout=data.heldout
    )
    samples = tokenise(file.samples(), tokenizer, context=context + 1, supervise_all=False)
    cached.write(builder.iter_arrays(samples), lambda: builder.summary().to_details())


def _signature(manifest: Manifest, path: Path, tokenizer: ModelTokenizer) -> str:
    data = manifest.data
    parts: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.tokenizer.vocabulary, TRAINING_DATE.isoformat()]
    parts += [manifest.objective.kind, manifest.model.context, manifest.seed, data.heldout, sorted(data.columns)]
    parts.append(data.samples_hash)  # rows are only cached after the samples were checked against this hash
    for file in data_files(path.resolve()):
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable_data(path, error) from error
        parts.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
