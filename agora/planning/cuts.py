"""Cuts a model into spans for given groups of machines so that the slowest group is fastest, exactly. Pure.

The dynamic program of PipeDream and of many later planners, for sums of rates: with g[s, j] the best rate of the
slowest of the first s groups when they hold stages 0 to j - 1, and R_s[i, j] the rate of group s at stages i to j - 1,

    g[0, 0] = infinity;    g[s, j] = max over i of min(g[s - 1, i], R_s[i, j]);    the answer is g[groups, stages].

A rate of 0 is never chosen if there is another way, so that the answer is 0 only if the groups cannot hold the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.cost.run_cost import Machine, RunCost
from agora.planning.span_rates import Rates, span_rates

# For each machine the number of its group, from 0 on in the order of the stages; or IDLE_GROUP or ALONE.
Groups: TypeAlias = NDArray[np.int64]
IDLE_GROUP: Final = -1  # instead of a group's number: the machine is in no group yet, or stays idle
# Instead of a group's number: the machine holds the whole model and does whole microbatches by itself.
ALONE: Final = -2


@dataclass(frozen=True, slots=True)
class Cuts:
    """The span of each group, in order, and the slowest group's rate in microbatches per second. Immutable."""

    spans: tuple[Span, ...]
    rate: float


def best_cuts(rates: Rates, group_of: Groups, group_count: int) -> Cuts | None:
    """Returns the Cuts (spans and rate) that maximise the slowest group's rate; None if none give all a rate above 0.

    rates: as span_rates returns them. group_of: the group of each machine, 0 to group_count - 1; machines with a
    negative number are left out. Since each group gets at least one stage, group s can only begin at stages s to
    s + stages - group_count; only that window of each array is summed.
    """
    offsets = rates.shape[-1] - group_count  # the number of stages at which one group can begin
    if offsets < 1:
        return None
    nothing_held = np.zeros(offsets)
    nothing_held[0] = np.inf
    best_rates, windows = [nothing_held], []
    for group in range(group_count):
        window = np.zeros((offsets, offsets))
        for machine in np.flatnonzero(group_of == group):  # faster than one sum, which copies all of their rates
            window += rates[machine, group : group + offsets, group + 1 : group + 1 + offsets]
        windows.append(window)
        best_rates.append(np.minimum(best_rates[-1][:, None], window).max(axis=0))
    if not best_rates[-1][-1] > 0:
        return None
    spans: list[Span] = []
    end = offsets - 1
    for group in reversed(range(group_count)):
        begin = int(np.minimum(best_rates[group], windows[group][:, end]).argmax())
        spans.append(Span(group + begin, group + end))
        end = begin
    return Cuts(tuple(reversed(spans)), float(best_rates[-1][-1]))


def rates_in_groups(rates: Rates, cuts: Cuts) -> Rates:
    """Returns the rate that each machine would have at each group's span in `cuts`, shape [machines, groups].

    rates: as span_rates returns them.
    """
    begins = [span.first for span in cuts.spans]
    ends = [span.last + 1 for span in cuts.spans]
    return rates[:, begins, ends]


def cut_for_groups(cost: RunCost, groups: Sequence[Sequence[Machine]]) -> Cuts | None:
    """Returns the cuts that make the slowest of the `groups` of machines fastest; each group gets one stage or more.

    groups: in the order of their stages. A machine whose memory is too small for its group's span adds nothing to the
    rate. Returns None if there are fewer stages than groups, or if in all cuts a group's rate is 0.
    """
    machines = [machine for group in groups for machine in group]
    group_of = np.array([number for number, group in enumerate(groups) for _ in group], dtype=np.int64)
    return best_cuts(span_rates(cost, machines), group_of, len(groups))
