"""`swarm plan`: shows which machine should hold which stages of a run, at what speed, and what would help."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DiskError, InputError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.cli import console
from agora.cli.plan_agreement import PlannedAgreement, plan_agreement
from agora.cli.stage_sources import find_run
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import ALL_ACTIVATIONS, Machine, RunCost
from agora.node import paths, runs
from agora.planning.drawing import picture_lines, picture_svg, plan_table
from agora.planning.peers_file import PeersFile, read_peers
from agora.planning.plan import Assignment, Plan
from agora.planning.search import MachineGain, explain_bottleneck, gain_of_one_more, make_plan

SEED: Final = 0  # seed of the search: the same file gives the same plan
MAX_KINDS: Final = 12  # maximum number of kinds of machines for which the command says what one more would add


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The flags of `swarm plan`. added: the only kind of which to try one more machine, None for each kind."""

    run: str
    peers: Path
    picture: Path | None = None
    added: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedRun:
    name: str
    cost: RunCost
    plan: Plan
    agreement: PlannedAgreement
    gains: tuple[MachineGain, ...]
    remarks: tuple[str, ...]  # on speeds that nobody has measured


def run(options: PlanOptions, *, as_json: bool) -> int:
    """Raises InputError for a wrong file, OutOfMemory when the machines cannot hold the model, and what find_manifest
    raises.
    """
    peers = read_peers(_read_peers_file(options.peers), str(options.peers))
    manifest = find_manifest(options.run)
    planned = plan_run(manifest, peers, options.added)
    if options.picture is not None:
        title = f"{planned.name}: {_describe_speed(planned)}"
        _write_picture(options.picture, picture_svg(planned.cost, planned.plan, title))
    if as_json:
        console.print_json(plan_fields(planned))
    else:
        bar_character = "\N{FULL BLOCK}" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
        print("\n".join(plan_lines(planned, bar_character)))
    return console.EXIT_DONE


def find_manifest(text: str) -> Manifest:
    """text: a manifest file, an invite, or a joined run's name, id or prefix. Raises InputError, Failure,
    ManifestError, DiskError.
    """
    reference = runs.resolve(text, paths.home_at())
    return reference.draft if reference.draft is not None else find_run(text, ()).signed.manifest


def plan_run(manifest: Manifest, peers: PeersFile, added: str | None = None) -> PlannedRun:
    """added: the only kind to try; None for each, up to MAX_KINDS. Raises InputError for an unknown kind and a machine
    that can hold no stage, OutOfMemory.
    """
    can_offload = any(machine.host_memory for machine in peers.machines)
    cost = run_cost(manifest, in_16_bits=peers.in_16_bits, can_offload=can_offload)
    check_fits(cost, peers.machines)
    plan = make_plan(cost, peers.machines, random.Random(SEED))
    kinds = peers.kinds[:MAX_KINDS] if added is None else (peers.find_kind(added),)
    gains = tuple(gain_of_one_more(cost, plan, kind, random.Random(SEED)) for kind in kinds)
    return PlannedRun(manifest.name, cost, plan, plan_agreement(manifest, cost, plan), gains, peers.remarks)


def check_fits(cost: RunCost, machines: tuple[Machine, ...]) -> None:
    """Raises InputError if any of `machines` has too little memory for every stage; it names the first such machine."""
    stages = [Span(stage, stage) for stage in range(cost.stage_count)]
    needs = [mode.need for stage in stages for mode in cost.training_modes(stage)]
    for machine in machines:
        if not any(need.fits(machine) for need in needs):
            least = min(need.device for need in needs) / 1e9
            raise InputError(
                f"Machine {machine.name} has {machine.memory / 1e9:,.2f} GB for stages and the smallest stage needs "
                f"{least:,.2f} GB; leave it out, or cut the model into more stages."
            )


def plan_lines(planned: PlannedRun, bar_character: str) -> list[str]:
    cost = planned.cost
    plan = planned.plan
    return [
        f"{planned.name}: {_describe_speed(planned)} with {len(plan.assignments)} machines, {cost.stage_count} stages; "
        f"activations: {_describe_activations(planned)}",
        "",
        *plan_table(cost, plan),
        "",
        *picture_lines(cost, plan, fill=bar_character),
        "",
        f"bottleneck: {explain_bottleneck(cost, plan)}",
        f"agreement: {planned.agreement.sentence}",
        *planned.remarks,
        *(f"one more {gain.machine.name}: {_describe_gain(cost, gain)}" for gain in planned.gains),
    ]


def plan_fields(planned: PlannedRun) -> dict[str, Any]:
    cost = planned.cost
    plan = planned.plan
    wires = planned.agreement.wires
    slowest = plan.bottleneck.stages
    return {
        "schema": 1,
        "run": planned.name,
        "stages": cost.stage_count,
        "activations": cost.activations or "auto",
        "microbatches_per_second": plan.rate,
        "tokens_per_second": plan.rate * cost.tokens,
        "bottleneck": {
            "stages": [slowest.first, slowest.last],
            "limit": plan.bottleneck.limit,
            "why": explain_bottleneck(cost, plan),
        },
        "stage_tokens_per_second": [rate * cost.tokens for rate in plan.stage_rates],
        "agreement": {"step_seconds": planned.agreement.step_s, "why": planned.agreement.sentence},
        "machines": [
            _machine_fields(cost, assignment) | {"gradient_wire": wires[place].name if place in wires else None}
            for place, assignment in enumerate(plan.assignments)
        ],
        "remarks": list(planned.remarks),
        "one_more": [
            {"kind": gain.machine.name, "tokens_per_second": gain.rate_with * cost.tokens, "factor": gain.factor}
            for gain in planned.gains
        ],
    }


def _machine_fields(cost: RunCost, assignment: Assignment) -> dict[str, Any]:
    span = assignment.span
    return {
        "name": assignment.machine.name,
        "span": None if span is None else [span.first, span.last],
        "share": assignment.share,
        "tokens_per_second": assignment.rate.microbatches * cost.tokens,
        "limit": None if span is None else assignment.rate.limit,
        "activations": None if span is None else assignment.rate.activations,
        "optimizer_in_host": assignment.rate.in_host,
    }


def _describe_activations(planned: PlannedRun) -> str:
    assignments = planned.plan.assignments
    counts = Counter(each.rate.activations for each in assignments if each.span is not None)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counts[name]} {name}" for name in ALL_ACTIVATIONS if name in counts)


def _describe_speed(planned: PlannedRun) -> str:
    return f"{planned.plan.rate * planned.cost.tokens:,.0f} tokens/s expected"


def _describe_gain(cost: RunCost, gain: MachineGain) -> str:
    if gain.factor < 1.0005:  # placement would not let it in for so little
        return "no faster, it would stand by"
    return f"{gain.rate_with * cost.tokens:,.0f} tokens/s, {100 * (gain.factor - 1):.1f} % more"


def _read_peers_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"There is no file {path}; write your machines into it, see `swarm plan --help`.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; is it a list of machines in TOML?") from None
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror}); check its owner and mode.") from error


def _write_picture(path: Path, text: str) -> None:
    try:
        paths.replace_text(path, text)
    except OSError as error:
        raise DiskError(f"Cannot write {path} ({error.strerror}); choose another file for --picture.") from error
