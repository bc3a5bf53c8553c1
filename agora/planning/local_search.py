"""Groups of machines and their spans: the best cuts for given groups, exactly, and better groups for the slowest one.

The cuts are the dynamic program of PipeDream and of many later planners, for sums of rates: with g[s, j] the best rate
of the slowest of the first s groups when they hold stages 0 to j - 1, and R_s[i, j] the rate of group s at stages i to
j - 1,

    g[0, 0] = infinity;    g[s, j] = max over i of min(g[s - 1, i], R_s[i, j]);    the answer is g[groups, stages].

A rate of 0 is never chosen if there is another way, so that the answer is 0 only if the groups cannot hold the model.

With the cuts fixed, a machine has one rate in each group, so that all moves and swaps of the slowest group are compared
in one array operation. When no exchange helps, the cuts are made again, until new cuts do not help either.
Deterministic: random changes draw from a generator that the caller gives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.cost.run_cost import Machine, RunCost
from agora.planning.span_rates import Rates, span_rates

# For each machine the number of its group, from 0 on in the order of the stages; or IDLE_GROUP or WHOLE_MODEL.
Groups: TypeAlias = NDArray[np.int64]
IDLE_GROUP: Final = -1  # instead of a group's number: the machine is in no group yet, or stays idle
# Instead of a group's number: the machine holds the whole model and does whole microbatches by itself.
WHOLE_MODEL: Final = -2


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
    """Of each machine at each group's span, [machines, groups]."""
    begins = [span.first for span in cuts.spans]
    ends = [span.last + 1 for span in cuts.spans]
    return rates[:, begins, ends]


def cut_for_groups(cost: RunCost, groups: Sequence[Sequence[Machine]]) -> Cuts | None:
    """Of groups in the order of their stages, the cuts by which the slowest is fastest; None if no cuts give all a
    rate.
    """
    machines = [machine for group in groups for machine in group]
    group_of = np.array([number for number, group in enumerate(groups) for _ in group], dtype=np.int64)
    return best_cuts(span_rates(cost, machines), group_of, len(groups))


SMALLEST_GAIN: Final = 1e-9  # A relative gain below this is a rounding error, which could let the search run in circles


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of machines and their spans. group_of: group number, IDLE_GROUP or WHOLE_MODEL. rate_alone: of all
    WHOLE_MODEL, in sum.
    """

    group_of: Groups
    cuts: Cuts
    rate_alone: float

    @property
    def group_count(self) -> int:
        return len(self.cuts.spans)

    @property
    def rate(self) -> float:
        return self.cuts.rate + self.rate_alone


def improve(rates: Rates, group_of: Groups, group_count: int) -> Grouping | None:
    """Cuts, moves and swaps until none makes it faster. Machines that are WHOLE_MODEL stay so. None if no cuts give all
    groups a rate.
    """
    cuts = best_cuts(rates, group_of, group_count)
    if cuts is None:
        return None
    best = Grouping(group_of, cuts, float(rates[group_of == WHOLE_MODEL, 0, -1].sum()))
    while True:
        exchanged = _exchange(rates_in_groups(rates, best.cuts), best.group_of)
        cuts = best_cuts(rates, exchanged, group_count)
        if cuts is None or cuts.rate <= best.cuts.rate * (1 + SMALLEST_GAIN):
            return best
        best = Grouping(exchanged, cuts, best.rate_alone)


def perturb(rates: Rates, grouping: Grouping, rng: random.Random) -> Groups:
    """One to four random moves or swaps, with no regard to the rate; there may be no cuts for the result."""
    group_of = grouping.group_of.copy()
    if grouping.group_count > 1 and rng.random() < 0.25:
        one, other = rng.sample(range(grouping.group_count), 2)
        group_of[grouping.group_of == one], group_of[grouping.group_of == other] = other, one
    for _ in range(rng.randint(1, 3)):
        one, other = rng.randrange(len(group_of)), rng.randrange(len(group_of))
        if grouping.group_count > 1 and rates[one, 0, -1] > 0 and rng.random() < 0.5:
            group_of[one] = WHOLE_MODEL if group_of[one] != WHOLE_MODEL else rng.randrange(grouping.group_count)
        elif rng.random() < 0.5 and WHOLE_MODEL not in (group_of[one], group_of[other]):
            group_of[one], group_of[other] = group_of[other], group_of[one]
        else:
            group_of[one] = rng.randrange(grouping.group_count)
    return group_of


def random_groups(rates: Rates, group_count: int, rng: random.Random) -> Groups:
    """A random group for each machine; of those that can hold the whole model about half are WHOLE_MODEL."""
    fits_all = (rates[:, 0, -1] > 0) & (group_count > 1)
    return np.array(
        [WHOLE_MODEL if fits and rng.random() < 0.5 else rng.randrange(group_count) for fits in fits_all.tolist()]
    )


def assign_idle(rates: Rates, grouping: Grouping) -> Grouping:
    """Each unused machine joins the slowest group whose span it can hold, in turn. The cuts are not changed."""
    at_spans = rates_in_groups(rates, grouping.cuts)
    return replace(grouping, group_of=_place_unused(at_spans, grouping.group_of))


def _exchange(at_spans: Rates, group_of: Groups) -> Groups:
    group_of = _place_unused(at_spans, group_of)
    if at_spans.shape[1] < 2:
        return group_of
    totals = _group_rates(at_spans, group_of)
    for _ in range(4 * len(group_of)):
        slowest = int(totals.argmin())
        others = np.flatnonzero((group_of != slowest) & (group_of >= 0))
        members = np.flatnonzero(group_of == slowest)
        gain, mine, theirs = _best_exchange(at_spans, group_of, totals, members, others)
        if gain <= totals[slowest] * (1 + SMALLEST_GAIN):
            break
        if mine >= 0:
            group_of[mine] = group_of[theirs]
        group_of[theirs] = slowest
        totals = _group_rates(at_spans, group_of)
    return group_of


def _best_exchange(
    at_spans: Rates, group_of: Groups, totals: Rates, members: Groups, others: Groups
) -> tuple[float, int, int]:
    if not len(others):
        return 0.0, -1, -1
    slowest = int(totals.argmin())
    theirs = group_of[others]
    leaving = np.concatenate([[0.0], at_spans[members, slowest]])
    arriving = np.concatenate([np.zeros((1, len(others))), at_spans[np.ix_(members, theirs)]])
    ours_after = totals[slowest] - leaving[:, None] + at_spans[others, slowest][None, :]
    theirs_after = (totals[theirs] - at_spans[others, theirs])[None, :] + arriving
    after = np.minimum(np.minimum(ours_after, theirs_after), _min_rates_of_others(totals, slowest)[theirs][None, :])
    row, column = divmod(int(after.argmax()), len(others))
    return float(after[row, column]), int(members[row - 1]) if row else -1, int(others[column])


def _min_rates_of_others(totals: Rates, slowest: int) -> Rates:
    order = [group for group in np.argsort(totals, kind="stable") if group != slowest]
    rest = np.full(len(totals), totals[order[0]])
    rest[order[0]] = totals[order[1]] if len(order) > 1 else np.inf
    return rest


def _place_unused(at_spans: Rates, group_of: Groups) -> Groups:
    group_of = group_of.copy()
    totals = _group_rates(at_spans, group_of)
    machines = np.arange(len(group_of))
    own = at_spans[machines, np.maximum(group_of, 0)]
    unused = (group_of == IDLE_GROUP) | ((group_of >= 0) & (own <= 0))
    for machine in machines[unused & (at_spans.max(axis=1) > 0)]:
        fitting = np.where(at_spans[machine] > 0, totals, np.inf)
        group = int(fitting.argmin())
        group_of[machine] = group
        totals[group] += at_spans[machine, group]
    return group_of


def _group_rates(at_spans: Rates, group_of: Groups) -> Rates:
    placed = np.flatnonzero(group_of >= 0)
    totals = np.zeros(at_spans.shape[1])
    np.add.at(totals, group_of[placed], at_spans[placed, group_of[placed]])
    return totals
