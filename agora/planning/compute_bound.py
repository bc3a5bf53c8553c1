"""A rate that no plan can pass, even if machines could change their spans all the time: a bound by prices. Pure.

Source: weak duality of linear programs.

Give each stage a price, all prices together 1. A swarm that does R microbatches per second earns R, which is at most
what its machines earn if each takes the span that pays it best:

    R <= sum over machines of max over spans of rate(machine, span) * price(span)

Every choice of prices gives a bound. Prices fall where machines crowd and rise elsewhere, so that the bound falls to
that of the linear program (multiplicative weights, Arora, Hazan and Kale 2012).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agora.cost.run_cost import Machine, RunCost
from agora.planning.span_rates import span_rates

TURNS: Final = 500  # number of choices of prices that are tried, each derived from the one before
FIRST_STEP: Final = 2.0
# How much prices change at first and at last, as exponents; in between, each is the same part of the one before.
LAST_STEP: Final = 0.002


def compute_bound(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns an upper bound, in microbatches per second, on the rate of every plan for `machines`.

    The bound counts compute and memory only: all links are taken as infinitely fast. 0 if no machine fits any stage.
    """
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
