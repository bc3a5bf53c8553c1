"""The rate of every machine at every span of a run, and a rate that no plan can pass. Pure.

The bound is by prices, from the weak duality of linear programs. Give each stage a price, all prices together 1. A
swarm that does R microbatches per second earns R, which is at most what its machines earn if each takes the span that
pays it best:

    R <= sum over machines of max over spans of rate(machine, span) * price(span)

Every choice of prices gives a bound. Prices fall where machines crowd and rise elsewhere, so that the bound falls to
that of the linear program (multiplicative weights, Arora, Hazan and Kale 2012).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.cost.run_cost import Machine, RunCost

# Microbatches per second; the last two axes are a span's [first stage, last stage + 1]; 0 where that is not a span.
Rates: TypeAlias = NDArray[np.float64]


def span_rates(cost: RunCost, machines: Sequence[Machine]) -> Rates:
    """[machines, stages + 1, stages + 1]; entry [m, begin, end] is the rate at Span(begin, end - 1). Machines that
    differ only in names are computed once.
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


# What each span needs, by the cost model, as arrays. upload, download: bytes per microbatch, [first stage, last stage +
# 1]. flops: operations per microbatch, and device, host: bytes of memory needed there, [training mode, first stage,
# last stage + 1]. Where the last two indices are not a span, the bytes are infinite.
class _SpanNeeds:
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


TURNS: Final = 500  # number of choices of prices that are tried, each derived from the one before
FIRST_STEP: Final = 2.0
# How much prices change at first and at last, as exponents; in between, each is the same part of the one before.
LAST_STEP: Final = 0.002


def rate_upper_bound(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Microbatches per second that no plan exceeds: all links infinitely fast. 0 if no machine fits any stage."""
    linked = [replace(machine, name="", upload=math.inf, download=math.inf) for machine in machines]
    kinds = Counter(replace(machine, flops=1.0) for machine in linked)
    speeds = {kind: sum(machine.flops for machine in linked if replace(machine, flops=1.0) == kind) for kind in kinds}
    rates = span_rates(cost, list(kinds)) * np.array([speeds[kind] for kind in kinds])[:, None, None]
    return _tightest_bound(rates, np.array([stage.forward_flops + stage.backward_flops for stage in cost.stages]))


def _tightest_bound(rates: NDArray[np.float64], first_prices: NDArray[np.float64]) -> float:
    begins, ends = np.triu_indices(rates.shape[-1], 1)
    offered = rates[:, begins, ends]
    rows = np.arange(len(offered))
    stages = rates.shape[-1] - 1
    prices = first_prices / first_prices.sum()
    least = math.inf
    for turn in range(1, TURNS + 1):
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        earned = offered * (sums[ends] - sums[begins])
        best = earned.argmax(axis=1)
        bound = float(earned[rows, best].sum())
        least = min(least, bound)
        if bound <= 0:
            break
        supplied = np.zeros(stages + 1)
        np.add.at(supplied, begins[best], offered[rows, best])
        np.subtract.at(supplied, ends[best], offered[rows, best])
        supply = np.cumsum(supplied)[:-1]
        step = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** (turn / TURNS)
        prices = prices * np.exp(-step * np.clip(supply / bound - 1.0, -4.0, 4.0))
        prices /= prices.sum()
    return least
