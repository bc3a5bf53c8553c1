"""Decides whether a microbatch's graph is kept until its backward, by what graphs take and what memory is left."""

from __future__ import annotations

import time

import torch

from agora.train import memory

MEASURE_MEMORY_S = 1.0  # for which a measurement of the available memory is used


class GraphMemory:
    """Whether graphs are kept: with "keep" all, with "recompute" none, with "auto" those for which memory suffices.

    bytes_by_entry: bytes of one microbatch's graph, by the stage that it entered, once measured ("auto" only).
    """

    def __init__(self, activations: str, device: torch.device, in_flight: int) -> None:
        """activations: the manifest's. in_flight: microbatches that are usually between forward and backward."""
        self._activations = activations
        self._device = device
        self._in_flight = in_flight
        self._available_bytes, self._measured_at = 0, -MEASURE_MEMORY_S
        self.bytes_by_entry: dict[int, int] = {}

    def must_measure(self, entry_stage: int) -> bool:
        """Returns whether the graph of microbatches that enter at `entry_stage` must be measured before a decision."""
        return self._activations == "auto" and entry_stage not in self.bytes_by_entry

    def keeps_one(self, entry_stage: int) -> bool:
        """Returns whether to keep the graph of a forward whose backward follows immediately."""
        if self._activations != "auto":
            return self._activations == "keep"
        return memory.graphs_fit(self.bytes_by_entry[entry_stage], 1, 0, self._available())

    def keeps_another(self, entry_stage: int, kept: int, version_bytes: int) -> bool:
        """Returns whether to keep the graph of a forward whose backward comes later.

        With "auto" if memory suffices for the graphs of all microbatches in flight of which none is kept yet, at least
        one. kept: how many are. version_bytes: of second versions of the weights that may become necessary.
        """
        if self._activations != "auto":
            return self._activations == "keep"
        to_come = max(self._in_flight - kept, 1)
        return memory.graphs_fit(self.bytes_by_entry[entry_stage], to_come, version_bytes, self._available())

    def _available(self) -> int:
        now = time.monotonic()
        if now - self._measured_at >= MEASURE_MEMORY_S:
            self._available_bytes, self._measured_at = memory.available_bytes(self._device), now
        return self._available_bytes
