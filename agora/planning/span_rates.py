"""Computes the rate of every machine at every span of a run, as one array that a search can look up. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.cost.run_cost import Machine, RunCost

# Microbatches per second; the last two axes are a span's [first stage, last stage + 1]; 0 where that is not a span.
Rates: TypeAlias = NDArray[np.float64]


def span_rates(cost: RunCost, machines: Sequence[Machine]) -> Rates:
    """Returns the rate of each machine at each span, shape [machines, stages + 1, stages + 1].

    Entry [m, begin, end] equals `cost.rate(machines[m], Span(begin, end - 1)).microbatches`. Machines that differ only
    in their names are computed once. The array takes 8 x machines x (stages + 1)^2 bytes.
    """
    needs = _SpanNeeds(cost)
    known: dict[tuple[float, ...], Rates] = {}
    size = cost.stage_count + 1
    rates = np.empty((len(machines), size, size))
    for index, machine in enumerate(machines):
        kind = (machine.flops, machine.memory, machine.host_memory, machine.upload, machine.download)
        if kind not in known:
            known[kind] = needs.rates_of(machine)
        rates[index] = known[kind]
    return rates


class _SpanNeeds:
    """What each span needs, by the cost model, as arrays.

    upload, download: bytes per microbatch, [first stage, last stage + 1]. flops: operations per microbatch, and device,
    host: bytes of memory needed there, [training mode, first stage, last stage + 1]. Where the last two indices are not
    a span, the bytes are infinite.
    """

    def __init__(self, cost: RunCost) -> None:
        size = cost.stage_count + 1
        modes = len(list(cost.training_modes(Span(0, 0))))
        self.upload, self.download = np.zeros((size, size)), np.zeros((size, size))
        self.flops = np.zeros((modes, size, size))
        self.device, self.host = np.full((modes, size, size), math.inf), np.full((modes, size, size), math.inf)
        for begin in range(cost.stage_count):
            for end in range(begin + 1, size):
                self._set((begin, end), cost, Span(begin, end - 1))

    def _set(self, index: tuple[int, int], cost: RunCost, span: Span) -> None:
        self.upload[index], self.download[index] = cost.upload_bytes(span), cost.download_bytes(span)
        for number, mode in enumerate(cost.training_modes(span)):
            self.flops[(number, *index)] = mode.flops
            self.device[(number, *index)], self.host[(number, *index)] = mode.need.device, mode.need.host

    def rates_of(self, machine: Machine) -> Rates:
        fits = (self.device <= machine.memory) & (self.host <= machine.host_memory)
        first = np.argmax(fits, axis=0)[None]
        flops = np.take_along_axis(self.flops, first, axis=0)[0]
        seconds = np.maximum(flops / machine.flops, self.upload / machine.upload)
        np.maximum(seconds, self.download / machine.download, out=seconds)
        rates: Rates = np.divide(1.0, seconds, out=np.zeros_like(seconds), where=fits.any(axis=0))
        return rates
