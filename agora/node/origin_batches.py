"""Draws an origin's microbatches from its text, never the same twice, also not after a restart.

Knows: the sampler, the codec's tokens, one small file. Must not know: the pipeline. Numbers are reserved on disk in
blocks before they are used, so that a killed daemon skips the rest of a block and draws nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agora_protocol.ids import PeerId
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.data.sampling import Sampler, sample_id
from agora.observe.events import DiskTrouble, Report

BLOCK = 4096


class OriginBatches:
    """The pipeline's BatchSource: a microbatch is a function of the seed, the origin and its number."""

    def __init__(self, sampler: Sampler, origin: PeerId, microbatch: int, reserved: Path, report: Report) -> None:
        self._sampler = sampler
        self._origin = origin
        self._microbatch = microbatch
        self._file = reserved
        self._report = report
        self._first = self._read_reserved()
        self._reserved = self._first

    def draw(self, counter: int) -> WireTensor:
        """Returns the tokens [b, s + 1] of training microbatch number `counter` since this object was made."""
        number = self._first + counter
        if number >= self._reserved:
            self._reserve(number + BLOCK)
        b = self._microbatch
        ids = [sample_id(self._origin, number * b + row) for row in range(b)]
        return encode_tokens(self._sampler.batch(ids))

    def heldout(self, count: int) -> Iterator[WireTensor]:
        """Yields at most `count` microbatches that are never trained on, the same at every call."""
        for tokens in self._sampler.heldout_batches(self._microbatch, count):
            yield encode_tokens(tokens)

    def _read_reserved(self) -> int:
        """Returns the first number that was never reserved on this machine."""
        try:
            return max(0, int(self._file.read_text()))
        except (OSError, ValueError):
            return 0

    def _reserve(self, until: int) -> None:
        """Reserves all numbers below `until`; without space on the disk they are only reserved in memory."""
        self._reserved = until
        try:
            temporary = self._file.with_suffix(".new")
            temporary.write_text(str(until))
            temporary.replace(self._file)
        except OSError as error:
            self._report(DiskTrouble(str(self._file), error.strerror or str(error)))
