"""`./scripts/bench uneven`: real daemons of uneven speed, with the spans of a plan and with equal ones.

Each daemon's device is slowed down (AGORA_SLOWDOWN: it sleeps), so that two cores carry all of them; the slowest is
ten times slower than the fastest. The plan knows the profile of this machine, in seconds of the processor, and each
daemon's slowdown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset

from agora.cli.local_swarm import Launch, LocalSwarm, SwarmFailed, start_interpreter
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import Machine, RunCost
from agora.planning.plan import Plan
from agora.planning.search import make_plan
from agora.train.machine_profile import measure_profile
from benchmarks.children import BenchFailed, start_node
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report
from benchmarks.simulate_real import Observation, RealPeer, observe

STAGES: Final = 8
# How many stages a machine of the plan has the memory for; with more, each would hold the whole model.
MAX_STAGES_COMPARED: Final = 4
MICROBATCH, IN_FLIGHT = 2, 8
# Large enough that steps, whose waits the plan does not know, are rare while a swarm is observed.
MICROBATCHES_PER_STEP: Final = 1024
BASE: Final = 32.0
FACTORS: Final = (1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 10.0, 10.0)  # each daemon's slowdown, as a multiple of BASE
PROFILE_S: Final = 3.0
WARM: Final = 48  # microbatches before a swarm is observed: each daemon has had some, and routing knows its speed
WARM_EVEN: Final = 16  # microbatches before a swarm is observed whose routing does not learn, and which is slow
SHORT_S, LONG_S = 40.0, 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """One swarm. launch: how its daemons are started. warm: the microbatches before it is observed."""

    name: str
    peers: Sequence[RealPeer]
    launch: Launch = start_interpreter
    warm: int = WARM


def manifest() -> Manifest:
    """Returns the preset tiny with one layer a stage, in eight stages."""
    tokens = MICROBATCHES_PER_STEP * MICROBATCH * preset("tiny").model.context
    return preset(
        "tiny",
        model={"layers": STAGES},
        stages={"count": STAGES},
        schedule={"microbatch": MICROBATCH, "max_in_flight": IN_FLIGHT, "activations": "keep"},
        optimizer={"target_tokens": tokens},
    )


def plan_spans(cost: RunCost, flops: float) -> Plan:
    """Returns the plan for the daemons. flops: operations per second of this machine, not slowed down."""
    memory = max(
        cost.memory(Span(first, first + MAX_STAGES_COMPARED - 1)).device
        for first in range(STAGES - MAX_STAGES_COMPARED + 1)
    )
    machines = [Machine(f"peer-{n}", flops / (BASE * factor), memory) for n, factor in enumerate(FACTORS)]
    return make_plan(cost, machines, random.Random(0))


def make_planned_case(plan: Plan) -> Case:
    """Returns the swarm that a plan describes. Raises BenchFailed if it leaves a machine idle."""
    spans = [assignment.span for assignment in plan.assignments]
    if None in spans:
        raise BenchFailed("the plan leaves a machine idle; MAX_STAGES_COMPARED is too small")
    peers = [RealPeer(str(span), BASE * factor) for span, factor in zip(spans, FACTORS, strict=True)]
    return Case("spans of the plan", peers)


def equal_case() -> Case:
    """Returns the same daemons with two stages each, fast beside slow, and even routing."""
    order = [0, 2, 4, 6, 7, 5, 3, 1]  # each pair of stages has one of the four fast ones and one of the slow ones
    spans = [Span(2 * (place % 4), 2 * (place % 4) + 1) for place in range(len(FACTORS))]
    peers = [RealPeer(str(span), BASE * FACTORS[index]) for span, index in zip(spans, order, strict=True)]
    return Case("equal spans, even routing", peers, partial(start_node, "benchmarks.uniform_node"), WARM_EVEN)


def one_stage_case() -> Case:
    """Returns a last stage with two replicas, one ten times slower, behind three that are faster together."""
    return Case(
        "1x and 10x in one stage",
        [
            *(RealPeer(f"0-{STAGES - 2}", BASE) for _ in range(3)),
            RealPeer(str(STAGES - 1), 3.0 * BASE),
            RealPeer(str(STAGES - 1), 30.0 * BASE),
        ],
    )


def possible_rate(seen: Observation) -> float:
    """Returns the microbatches per second of the slowest stage, if every device always worked as fast as it did."""
    rates = [0.0] * STAGES
    for span, device_s in zip(seen.spans, seen.device_s, strict=True):
        for stage in span.stages:
            rates[stage] += 1.0 / device_s
    return min(rates)


def run(quick: bool, folder: Path) -> Report:
    """Measures this machine, plans, and lets three swarms train. Raises BenchFailed when one ends by itself."""
    seconds, described = SHORT_S if quick else LONG_S, manifest()
    cost = run_cost(described)
    torch.set_num_threads(1)
    profile = measure_profile(described, torch.device("cpu"), PROFILE_S, clock=time.process_time)
    plan = plan_spans(cost, profile.flops)
    report = Report("uneven", "Uneven machines: real daemons with the spans of a plan", describe())
    observed = partial(_observe_case, folder, described, seconds, report)
    planned = observed(make_planned_case(plan), plan.rate)
    equal = observed(equal_case(), None)
    one_stage = observed(one_stage_case(), None)
    last = [1.0 / s for s, span in zip(one_stage.device_s, one_stage.spans, strict=True) if span.first == STAGES - 1]
    report.ratios = {
        "of_plan": Ratio(planned.rate / plan.rate, ">= 0.9", "throughput by what the plan predicts from the profile"),
        "of_possible": Ratio(
            planned.rate / possible_rate(planned), ">= 0.9", "the same by what the devices' own seconds allow"
        ),
        "vs_equal_spans": Ratio(planned.rate / equal.rate, ">= 1.3", "by equal spans with even routing"),
        "ten_to_one": Ratio(one_stage.rate / sum(last), ">= 0.95", "two replicas, 10:1, by the sum of their rates"),
    }
    report.notes = [
        f"Preset tiny with {STAGES} layers in {STAGES} stages, {MICROBATCH} rows; 8 daemons slowed down by "
        f"{BASE:.0f} times {', '.join(f'{factor:.0f}' for factor in FACTORS)}. In the plan machines have memory for "
        f"{MAX_STAGES_COMPARED} stages.",
        "planned: from the profile, in processor time. possible: by the daemons' own device seconds, waits for a core "
        "included. On a busy machine these are longer than the profile says, and of_plan is lower.",
    ]
    return report


def _observe_case(
    folder: Path, described: Manifest, seconds: float, report: Report, case: Case, predicted: float | None
) -> Observation:
    place, started = folder / case.name.replace(" ", "-"), time.monotonic()
    place.mkdir()
    swarm = LocalSwarm(
        place, described.to_toml(), corpus=folder / "corpus", flags=["--allow-files"], launch=case.launch
    )
    try:
        seen = observe(swarm, case.peers, seconds, case.warm)
    except SwarmFailed as failed:
        raise BenchFailed(f"{case.name}: {failed}") from failed
    finally:
        swarm.stop()
    row: dict[str, Cell] = {
        "swarm": case.name,
        "spans": " ".join(peer.stages for peer in case.peers),
        "slowdowns": " ".join(f"{peer.slowdown:.0f}" for peer in case.peers),
        "microbatches_s": seen.rate,
        "planned": predicted,
        "possible": possible_rate(seen),
        "took_s": round(time.monotonic() - started, 1),
    }
    report.rows.append(row)
    return seen
