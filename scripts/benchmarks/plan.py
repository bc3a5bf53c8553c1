"""`./scripts/bench plan`: our plans beside brute force and beside other planners' rules, and the time of a plan."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora_protocol.errors import OutOfMemory

from agora.cost.run_cost import Machine, RunCost
from agora.planning.search import make_plan
from agora.planning.span_rates import rate_upper_bound
from benchmarks.machine import describe
from benchmarks.plan_baselines import baseline_rates
from benchmarks.plan_brute_force import brute_force_rate
from benchmarks.plan_cases import random_machines, random_run
from benchmarks.plan_workloads import CLUSTERS, HOME_SWARMS, MODELS, home_machines, machines_of, tuning_cost
from benchmarks.report import Cell, Ratio, Report

RULES: Final = ("proportional", "one_chain", "petals", "zorse", "cephalo")
AS_GOOD: Final = 0.9995  # our plan is first if no other rule's plan is better by more than this fraction
WHY_SECOND: Final[Mapping[str, str]] = {
    "cephalo": "its ring does not cut the model, so that no whole layers have to match the groups' speeds",
    "petals": "its spans overlap, ours are equal or apart",
}


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: random cases beside brute force, random swarms beside the bound, plans that are timed."""

    cases: int
    swarms: int
    timed: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One swarm and model: the rates of ours and of the other rules, as parts of the compute bound.

    spans: how many different spans our plan has.
    """

    swarm: str
    model: str
    tokens_per_s: float
    spans: int
    ours: float
    theirs: Mapping[str, float]


def run(quick: bool, folder: Path) -> Report:
    """Plans for random swarms, published clusters and home machines; nothing is trained."""
    amount = Amount(cases=80, swarms=3, timed=1) if quick else Amount(cases=400, swarms=12, timed=5)
    of_best = of_brute_force(amount.cases)
    of_bound = [_of_bound(tuning_cost("70B", "layers"), _home_swarm(seed)) for seed in range(amount.swarms)]
    compared = [compare(swarm, model) for swarm in (*CLUSTERS, *HOME_SWARMS) for model in MODELS]
    seconds = statistics.median(_seconds_128(seed) for seed in range(amount.timed))
    ratios = {
        "vs_brute_force_mean": Ratio(
            statistics.mean(of_best), ">= 0.99", "rate by that of the best plan, random cases"
        ),
        "vs_brute_force_worst": Ratio(min(of_best), ">= 0.97", "the same, the worst case"),
        **{f"vs_{rule}": _mean_ratio(compared, rule) for rule in RULES if rule != "one_chain"},
        "share_of_bound_32": Ratio(statistics.mean(of_bound), ">= 0.98", "rate by compute bound, 32 mixed, 70B"),
        "seconds_128_peers": Ratio(seconds, "<= 1", "seconds of a plan for 128 mixed machines and 80 stages"),
    }
    notes = _notes(amount, len(of_best), min(of_bound), compared)
    title = "Plans: ours beside brute force and beside other planners' rules"
    return Report("plan", title, describe(), [_row(found) for found in compared], ratios, notes)


def of_brute_force(cases: int) -> list[float]:
    """Returns our rate by that of the best plan, for each random swarm of 2 to 6 machines that can hold its model."""
    found = []
    for seed in range(cases):
        rng = random.Random(seed)
        cost = random_run(rng, rng.randint(4, 10))
        machines = random_machines(rng, cost, rng.randint(2, 6))
        best = brute_force_rate(cost, machines)
        if best > 0:
            found.append(_rate(cost, machines) / best)
    return found


def compare(swarm: str, model: str) -> Comparison:
    """Returns how our plan and those of the other rules compare for one swarm and model."""
    cost, machines = tuning_cost(model), machines_of(swarm, model)
    bound = rate_upper_bound(cost, machines)
    plan = make_plan(cost, machines, random.Random(0))
    spans = len({found.span for found in plan.assignments if found.span is not None})
    theirs = {rule: rate / bound for rule, rate in baseline_rates(cost, machines).items()}
    return Comparison(swarm, model, plan.rate * cost.tokens, spans, plan.rate / bound, theirs)


def standing(found: Comparison) -> str:
    """Returns "yes" if no other rule is faster than ours, else which one is, by how much, and why."""
    rule = max(found.theirs, key=lambda name: found.theirs[name])
    ahead = found.theirs[rule] / found.ours if found.ours > 0 else math.inf
    if ahead <= 1 / AS_GOOD:
        return "yes"
    return f"no: {rule} by {ahead - 1:.1%}; {WHY_SECOND.get(rule, 'the search missed it')}"


def _row(found: Comparison) -> dict[str, Cell]:
    return {
        "machines": found.swarm,
        "model": found.model,
        "tokens_per_s": found.tokens_per_s,
        "spans": found.spans,
        "ours": found.ours,
        **{rule: found.theirs[rule] or "does not fit" for rule in RULES},
        "ours first": standing(found),
    }


def _mean_ratio(compared: Sequence[Comparison], rule: str) -> Ratio:
    theirs = statistics.mean(found.theirs[rule] for found in compared)
    ours = statistics.mean(found.ours for found in compared)
    return Ratio(ours / theirs if theirs > 0 else math.inf, "> 1", f"our mean part of the bound by that of {rule}")


def _rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    try:
        return make_plan(cost, machines, random.Random(0)).rate
    except OutOfMemory:
        return 0.0


def _home_swarm(seed: int) -> list[Machine]:
    return home_machines("70B", random.Random(seed), 32)


def _of_bound(cost: RunCost, machines: Sequence[Machine]) -> float:
    return _rate(cost, machines) / rate_upper_bound(cost, machines)


def _seconds_128(seed: int) -> float:
    cost, machines = tuning_cost("70B"), home_machines("70B", random.Random(seed), 128, residential=True)
    begin = time.process_time()
    make_plan(cost, machines, random.Random(seed))
    return time.process_time() - begin


def _notes(amount: Amount, feasible: int, worst_of_bound: float, compared: Sequence[Comparison]) -> list[str]:
    unfit = {rule: sum(found.theirs[rule] == 0 for found in compared) for rule in RULES}
    return [
        f"Brute force: {amount.cases} random swarms of 2 to 6 machines and 4 to 10 stages; {feasible} of them can hold "
        "their model; every grouping in every order, every cut. share_of_bound_32: the mean over "
        f"{amount.swarms} random swarms on 0.2-1 Gbit/s that keep one layer's graph at a time; the worst has "
        f"{worst_of_bound:.4f}.",
        "spans: different ones of ours. ours and the columns after it: "
        "the rate as a part of the compute bound (all machines always computing, at whichever spans suit them from "
        "moment to moment), by one cost model: nothing was trained. A ratio divides the means of these columns; what "
        f"does not fit counts as 0 ({', '.join(f'{rule} {count}' for rule, count in unfit.items())} "
        f"of {len(compared)} rows).",
        "QLoRA of rank 16, one layer a stage, sequences of 1,024 tokens, boundaries int4; each machine keeps the "
        "graphs for which it has the memory, the ring of cephalo repeats each forward once. Speeds: "
        "layer times published by Zorse and Cephalo (70B: the speeds of 33B); 90 % of the memory less 3 GB; head and "
        "embedding counted. The clusters' links are an assumption: 10 Gbit/s each way. Averaging between replicas is "
        "counted for nobody, the gathers of weights in cephalo's ring are (a step has 1,048,576 tokens).",
        "The other rules follow what is published; they are not the other projects' programs. proportional: one chain, "
        "layers by FLOPs, as Zagora describes it. petals: the weakest window, then three turns in which everyone "
        "chooses again. zorse: groups of one kind, layers by group speed, the best of all group sizes. cephalo: state "
        "by memory, batch by speed, one ring. one_chain: one chain with our exact cuts.",
        "seconds_128_peers: processor time, 128 mixed machines on residential links, 70B.",
    ]
