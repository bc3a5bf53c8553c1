"""Decides which tokens a sample of a corpus has: a function of seed and sample id, so origins need not coordinate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from agora_protocol.errors import ManifestError
from agora_protocol.ids import PeerId
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray

from agora.codec import encode_tokens
from agora.core.span_work import DrawnMicrobatch
from agora.data.draws import Hashes, cut_batches, heldout_threshold, seed_key, splitmix64
from agora.data.tokenizer import Ids
from agora.observe.events import DiskTrouble, Report, TaskFailed

Tokens = NDArray[np.int32]

# At most this many windows, evenly spread over the corpus, are hashed to find the held-out ones.
SCANNED_WINDOWS = 1 << 22
DRAW_KEY = 0x6472617773616D70  # goes into the hash that draws windows
SPLIT_KEY = 0x73706C6974776E64  # goes into the hash that chooses held-out windows
MIXTURE_KEY = 0x6D69787475726573  # goes into the hash that chooses a sample's source
LOOKED_AT = 4096  # windows of a source that are looked at for one that is not held out
RESERVED_AT_ONCE = 4096  # microbatch numbers that are reserved with one write to the disk


def sample_id(origin: PeerId, counter: int) -> int:
    """Returns a 64-bit id for an origin's sample number `counter`, from a SHA-256 of origin and counter."""
    digest = hashlib.sha256(f"agora sample 1\0{origin}\0{counter}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Sampler:
    """Draws samples, which are windows of `context` + 1 tokens, from a corpus. Equal sample ids give equal samples.

    windows: how many windows the corpus has; the tokens after the last one are not used. Window i holds the tokens
    i * context to (i + 1) * context, both included: no target belongs to two windows. heldout: the fraction of the
    windows, 0 to 1, that are held out for evaluation, chosen by the hash of (seed, i); if above 0, at least one window
    is held out and one is not. Raises ManifestError when the corpus has too few tokens.
    """

    def __init__(self, tokens: Ids, context: int, heldout: float, seed: int, ends: Sequence[int] = ()) -> None:
        """ends: for each source of the corpus how many tokens it and those before it have; empty: there is one."""
        self.context = context
        self.windows = (len(tokens) - 1) // context
        needed = 2 if heldout > 0 else 1
        if self.windows < needed:
            raise ManifestError(
                f"The corpus has {len(tokens)} tokens but [model] context {context} needs at least "
                f"{needed * context + 1}; add text to [data] corpus or lower the context."
            )
        self._tokens = tokens
        self._draw_key = seed_key(seed, DRAW_KEY)
        self._split_key = seed_key(seed, SPLIT_KEY)
        self._scanned = np.arange(0, self.windows, -(-self.windows // SCANNED_WINDOWS), dtype=np.uint64)
        self._limit = np.uint64(0)  # windows with a hash below it are held out
        if heldout > 0:
            # heldout_threshold moves it if no window, or every window, of a small corpus would be held out
            self._limit = heldout_threshold(splitmix64(self._scanned, self._split_key), heldout)
        self._mixture_key = seed_key(seed, MIXTURE_KEY)
        # A source has the windows that begin in it. One of which all windows are held out is never drawn.
        bounds = np.minimum(-(-np.array([0, *(ends or [len(tokens)])]) // context), self.windows)
        self._starts, self._counts = bounds[:-1].astype(np.uint64), np.diff(bounds).astype(np.uint64)
        self._is_drawn = np.array(
            [not self.is_held_out(np.arange(a, min(b, a + LOOKED_AT))).all() for a, b in pairwise(bounds)]
        )

    def is_held_out(self, windows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Returns for each window number [n] whether the window is held out from training, bool [n]."""
        return np.less(splitmix64(windows.astype(np.uint64), self._split_key), self._limit)

    def windows_of(self, sample_ids: Sequence[int] | Hashes, weights: Sequence[float] = ()) -> NDArray[np.int64]:
        """Returns, for each sample id, the number of its window among all windows of the corpus, [b]; never held out.

        The windows are drawn uniformly, by the hash of (seed, id), from those that are not held out; a held-out window
        is redrawn. Every call gives the same windows; two ids may have the same one. weights: how often each source is
        drawn, relative to the others; empty: by its size.
        """
        ids = np.asarray(sample_ids, np.uint64)
        first, count = self._ranges(ids, weights)
        state = splitmix64(ids, self._draw_key)
        drawn = first + state % count
        while (rejected := self.is_held_out(drawn)).any():
            state[rejected] = splitmix64(state[rejected], self._draw_key)
            drawn[rejected] = first[rejected] + state[rejected] % count[rejected]
        return drawn.astype(np.int64)

    def _ranges(self, ids: Hashes, weights: Sequence[float]) -> tuple[Hashes, Hashes]:
        # For each sample the first of the windows that it is drawn from, and how many these are.
        shares = np.where(self._is_drawn, np.array(weights), 0.0) if len(weights) == len(self._starts) else np.zeros(1)
        if not shares.any():
            return np.zeros(len(ids), np.uint64), np.full(len(ids), self.windows, np.uint64)
        uniform = splitmix64(ids, self._mixture_key) / 2.0**64
        chosen = np.searchsorted(np.cumsum(shares) / shares.sum(), uniform, side="right")
        chosen = np.minimum(chosen, np.flatnonzero(shares)[-1])  # a hash next to 2^64 is 1.0 as a float
        return self._starts[chosen], self._counts[chosen]

    def batch(self, sample_ids: Sequence[int] | Hashes, weights: Sequence[float] = ()) -> Tokens:
        """Returns the training samples with these ids [b], int32 [b, context + 1]: inputs [:, :-1], targets [:, 1:]."""
        return self._gather(self.windows_of(sample_ids, weights))

    def heldout_windows(self) -> NDArray[np.int64]:
        """Returns the numbers of the held-out windows, int64 [n], the lowest hash first: a pseudorandom order.

        Of a corpus with more than SCANNED_WINDOWS windows, only that many, evenly spread, are looked at.
        """
        hashes = splitmix64(self._scanned, self._split_key)
        held = np.flatnonzero(hashes < self._limit)
        order = np.argsort(hashes[held], kind="stable")
        return self._scanned[held[order]].astype(np.int64)

    def heldout_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Tokens]:
        """int32 [batch_size, context + 1], the same at every call; see cut_batches."""
        for windows in cut_batches(self.heldout_windows(), batch_size, limit):
            yield self._gather(windows)

    def _gather(self, windows: NDArray[np.int64]) -> Tokens:
        positions = windows[:, None] * self.context + np.arange(self.context + 1)
        tokens: Tokens = self._tokens[positions].astype(np.int32)
        return tokens


class CorpusMicrobatches:
    """Draws an origin's microbatches of a corpus, numbered upwards, each number once, also after a restart.

    A microbatch is a function of seed, origin and number. Blocks of RESERVED_AT_ONCE numbers are reserved in the file
    `reserved` before they are used; after a restart the rest of a block is skipped. Only if that file is missing,
    unreadable or malformed, or could not be written, numbers are drawn again. microbatch_size: samples in a microbatch.
    weights: returns how often each source of the corpus is drawn now, see Sampler.windows_of; may be replaced.
    report: gets DiskTrouble if the file cannot be written, TaskFailed if it cannot be read.
    """

    def __init__(self, sampler: Sampler, origin: PeerId, microbatch_size: int, reserved: Path, report: Report) -> None:
        self._sampler = sampler
        self._origin = origin
        self._microbatch_size = microbatch_size
        self._file = reserved
        self._report = report
        self.weights: Callable[[], Sequence[float]] = tuple
        self._next = 0
        try:
            self._next = max(0, int(reserved.read_text()))
        except FileNotFoundError:
            pass  # the first start
        except (OSError, ValueError) as error:
            report(TaskFailed("read the last microbatch's number", f"{reserved}: {error}; numbers begin at 0 again"))
        self._reserved = self._next

    def draw(self) -> DrawnMicrobatch:
        """Draws the next microbatch, token ids [b, s + 1]. A disk error is reported, not raised."""
        number = self._next
        b = self._microbatch_size
        if number >= self._reserved:
            self._reserve(number + RESERVED_AT_ONCE)
        self._next += 1
        ids = [sample_id(self._origin, number * b + row) for row in range(b)]
        return DrawnMicrobatch(encode_tokens(self._sampler.batch(ids, self.weights())), number)

    def mark_completed(self, number: int) -> None:
        """Does nothing: no number is drawn twice, completed or not. See EpochMicrobatches.mark_completed."""

    def release(self, number: int) -> None:
        """Does nothing: a microbatch that was given up is not drawn again. See EpochMicrobatches.release."""

    def heldout_microbatches(self, count: int) -> Iterator[WireTensor]:
        """Yields at most `count` microbatches, equal ones at every call; see Sampler.heldout_batches."""
        return map(encode_tokens, self._sampler.heldout_batches(self._microbatch_size, count))

    def _reserve(self, end: int) -> None:
        self._reserved = end
        try:
            temporary = self._file.with_suffix(".new")
            temporary.write_text(str(end))
            temporary.replace(self._file)
        except OSError as error:
            self._report(DiskTrouble(str(self._file), error.strerror or str(error)))
