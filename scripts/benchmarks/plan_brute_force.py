"""The best plan of all plans with groups, for a few machines: every grouping in every order, every cut.

With best[M, j] the best rate of the slowest group when the machines of the set M hold stages 0 to j - 1 in any number
of groups, and R_G the rate of group G:

    best[M, j] = max over groups G within M and stages i of min(best[M - G, i], R_G[i, j])

and any machines that fit the whole model may stand beside the groups, each with whole microbatches. That takes
3^machines x stages^2 steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agora.cost.run_cost import Machine, RunCost
from agora.planning.span_rates import span_rates


def brute_force_rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns the highest rate of all plans, in microbatches per second; 0 if no plan holds all stages."""
    rates = span_rates(cost, machines)
    everyone = (1 << len(machines)) - 1
    groups = [
        rates[[m for m in range(len(machines)) if members >> m & 1]].sum(axis=0) for members in range(everyone + 1)
    ]
    best = np.zeros((everyone + 1, cost.stage_count + 1))
    best[0, 0] = np.inf
    for members in range(1, everyone + 1):
        group = members
        while group:
            np.maximum(
                best[members], np.minimum(best[members ^ group][:, None], groups[group]).max(axis=0), out=best[members]
            )
            group = (group - 1) & members
    alone = [
        sum(rates[m, 0, -1] for m in range(len(machines)) if not members >> m & 1) for members in range(everyone + 1)
    ]
    return float(max(rate + beside for rate, beside in zip(best[1:, cost.stage_count], alone[1:], strict=True)))
