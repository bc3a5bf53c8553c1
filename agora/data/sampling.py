"""Which tokens a sample holds: a pure function of (seed, sample id), so that origins never need to talk.

Knows windows, the held-out split and the hash behind both. Must not know files, the pipeline or torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from agora_protocol.errors import ManifestError
from agora_protocol.ids import PeerId
from numpy.typing import NDArray

from agora.data.corpus import Corpus

Tokens = NDArray[np.int32]
Hashes = NDArray[np.uint64]

SCANNED_WINDOWS = 1 << 22
DRAW_KEY = 0x6472617773616D70
SPLIT_KEY = 0x73706C6974776E64


def sample_id(origin: PeerId, counter: int) -> int:
    """The id of an origin's `counter`-th sample: 64 bits of SHA-256, so that origins draw apart without talking."""
    digest = hashlib.sha256(f"agora sample 1\0{origin}\0{counter}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix(values: Hashes, key: int) -> Hashes:
    """splitmix64's output function over `values` [n], started at `key`: uniform 64-bit hashes, equal on all machines.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (splitmix64.c).
    """
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Draws windows of `context` + 1 tokens from a corpus.

    Window i holds tokens [i * context, (i + 1) * context]: neighbours share the one token that is the last target of
    the first and the first input of the second, so no target belongs to two windows. Window i is held out when the
    hash of (seed, i) is below `heldout` of the range; a small corpus keeps at least one window on either side.
    Raises ManifestError when the corpus has too few tokens for that.
    """

    def __init__(self, corpus: Corpus, context: int, heldout: float, seed: int) -> None:
        self.context = context
        self.windows = (len(corpus.tokens) - 1) // context
        needed = 2 if heldout > 0 else 1
        if self.windows < needed:
            raise ManifestError(
                f"The corpus has {len(corpus.tokens)} tokens but [model] context {context} needs at least "
                f"{needed * context + 1}; add text to [data] corpus or lower the context."
            )
        self._tokens = corpus.tokens
        self._draw_key = _key(seed, DRAW_KEY)
        self._split_key = _key(seed, SPLIT_KEY)
        self._scanned = np.arange(0, self.windows, -(-self.windows // SCANNED_WINDOWS), dtype=np.uint64)
        self._limit = self._split_limit(heldout)

    def _split_limit(self, heldout: float) -> np.uint64:
        """Hashes below it are held out; moved, where it must be, so that neither side of a small corpus is empty."""
        if heldout <= 0:
            return np.uint64(0)
        hashes = mix(self._scanned, self._split_key)
        limit = min(int(heldout * 2**64), 2**64 - 1)
        return np.uint64(min(max(limit, int(hashes.min()) + 1), int(hashes.max())))

    def is_held_out(self, windows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each window [n] is never trained on."""
        hashes = mix(windows.astype(np.uint64), self._split_key)
        return np.less(hashes, self._limit)

    def windows_of(self, sample_ids: Sequence[int] | Hashes) -> NDArray[np.int64]:
        """The training window that each sample id [b] draws, uniformly over those not held out."""
        state = mix(np.asarray(sample_ids, np.uint64), self._draw_key)
        drawn = state % np.uint64(self.windows)
        while (again := self.is_held_out(drawn)).any():
            state[again] = mix(state[again], self._draw_key)
            drawn[again] = state[again] % np.uint64(self.windows)
        windows: NDArray[np.int64] = drawn.astype(np.int64)
        return windows

    def batch(self, sample_ids: Sequence[int] | Hashes) -> Tokens:
        """The samples of these ids, int32 [b, context + 1]: inputs [:, :-1], targets [:, 1:]."""
        return self._gather(self.windows_of(sample_ids))

    def sample(self, sample_id: int) -> Tokens:
        """One sample, int32 [context + 1]."""
        tokens: Tokens = self.batch([sample_id])[0]
        return tokens

    def heldout_windows(self) -> NDArray[np.int64]:
        """Held-out windows in the order of their hash, so that any first few are spread over the whole corpus.

        Of a corpus of more than SCANNED_WINDOWS windows, those among that many evenly spread ones.
        """
        hashes = mix(self._scanned, self._split_key)
        held = np.flatnonzero(hashes < self._limit)
        order = np.argsort(hashes[held], kind="stable")
        windows: NDArray[np.int64] = self._scanned[held[order]].astype(np.int64)
        return windows

    def heldout_batches(self, batch: int, limit: int | None = None) -> Iterator[Tokens]:
        """At most `limit` batches of held-out windows, each int32 [batch, context + 1], the same at every call.

        A last part that fills no batch is left out, unless it is all there is: then its windows are repeated.
        """
        windows = self.heldout_windows()
        if 0 < len(windows) < batch:
            windows = np.resize(windows, batch)
        count = len(windows) // batch
        for i in range(count if limit is None else min(count, limit)):
            yield self._gather(windows[i * batch : (i + 1) * batch])

    def _gather(self, windows: NDArray[np.int64]) -> Tokens:
        positions = windows[:, None] * self.context + np.arange(self.context + 1)
        tokens: Tokens = self._tokens[positions].astype(np.int32)
        return tokens


def _key(seed: int, purpose: int) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
