"""What an origin draws: the sampler's windows as wire tensors, never the same twice, also not after a restart.

Knows: the sampler, the codec's tokens, one small file. Must not know: the pipeline. The counter is reserved in blocks
ahead of its use, so that a killed daemon skips the rest of a block instead of drawing it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agora_protocol.ids import PeerId
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.data import Sampler, sample_id
from agora.observe.events import DiskTrouble, Report

BLOCK = 4096


class OriginBatches:
    """The pipeline's `Batches`: draw(counter) is a pure function of seed, origin and counter + where a start begins."""

    def __init__(self, sampler: Sampler, origin: PeerId, microbatch: int, reserved: Path, report: Report) -> None:
        self._sampler = sampler
        self._origin = origin
        self._microbatch = microbatch
        self._file = reserved
        self._report = report
        self._first = self._read()
        self._reserved = self._first

    def draw(self, counter: int) -> WireTensor:
        """Tokens of this start's `counter`-th training microbatch [b, s + 1]."""
        number = self._first + counter
        if number >= self._reserved:
            self._reserve(number + BLOCK)
        b = self._microbatch
        ids = [sample_id(self._origin, number * b + row) for row in range(b)]
        return encode_tokens(self._sampler.batch(ids))

    def heldout(self, count: int) -> Iterator[WireTensor]:
        """At most `count` microbatches that are never trained on, the same at every call."""
        for tokens in self._sampler.heldout_batches(self._microbatch, count):
            yield encode_tokens(tokens)

    def _read(self) -> int:
        try:
            return max(0, int(self._file.read_text()))
        except (OSError, ValueError):
            return 0

    def _reserve(self, until: int) -> None:
        self._reserved = until
        try:
            temporary = self._file.with_suffix(".new")
            temporary.write_text(str(until))
            temporary.replace(self._file)
        except OSError as error:
            self._report(DiskTrouble(str(self._file), error.strerror or str(error)))
