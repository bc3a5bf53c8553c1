"""Predicts how the replicas of a planned run agree: the format of each machine's gradients, or inner steps. Pure.

| the manifest says | some machine's upload carries not even the smallest format | then |
|---|---|---|
| synchronous | - | gradients in float32, whatever the uploads carry |
| gradients of all steps | no | each machine sends the largest format that its upload carries in a step |
| gradients of all steps | yes, and they do much of a stage's work (SyncChangeRule) | the stage takes inner steps |
| gradients of all steps | yes, but they do little of it | their gradients come late, and are lost in part |
| the same, and `averaging.local_steps` is never | yes | steps last longer; the advice is inner steps |
| gradients of the first steps | as in the row above | as above; later ones are inner steps, with slices |
| inner steps | - | slices of the weights; the advice is gradients if every upload carries the manifest's format |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import ALL_STEPS

from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule
from agora.cost.run_cost import RunCost
from agora.planning.plan import Plan
from agora.replica.sync_rules import (
    GradientCompression,
    MeasuredUplink,
    ReplicaUplink,
    choose_fragment_count,
    choose_gradient_compression,
)

GRADIENTS: Final = f"averaging.exact_steps = {ALL_STEPS}"


@dataclass(frozen=True, slots=True)
class PlannedAgreement:
    """How the machines of a plan will agree with the other replicas of their stages.

    wires: by the machine's place in the plan, the format in which it will send gradients, also if the run takes local
    steps; no entry for a machine whose stages no other machine holds. step_s: expected seconds of an optimizer step.
    sentence: what will happen, and what to write into the manifest instead if that is better.
    """

    wires: dict[int, GradientCompression]
    step_s: float
    sentence: str


def plan_agreement(manifest: Manifest, cost: RunCost, plan: Plan) -> PlannedAgreement:
    """Returns how the machines of `plan` will agree; choose_gradient_compression decides for each, as in the daemon."""
    step_s = manifest.optimizer.target_tokens / (plan.rate * cost.tokens)
    if manifest.schedule.kind == "synchronous":
        return PlannedAgreement({}, step_s, "synchronous steps average gradients in float32.")
    wires = {
        place: _gradient_wire(manifest, cost, plan, assignment.span, assignment.machine.upload, step_s)
        for place, assignment in enumerate(plan.assignments)
        if assignment.span is not None and _replicas(plan, assignment.span) > 1
    }
    return PlannedAgreement(wires, step_s, _agreement_sentence(manifest, plan, wires, step_s))


def _replicas(plan: Plan, span: Span) -> int:
    spans = [each.span for each in plan.assignments if each.span is not None]
    return max(sum(stage in held for held in spans) for stage in span.stages)


def _gradient_wire(
    manifest: Manifest, cost: RunCost, plan: Plan, span: Span, upload: float, step_s: float
) -> GradientCompression:
    values = round(sum(cost.stages[stage].trained_values for stage in span.stages))
    section = manifest.averaging
    replicas, uplink = _replicas(plan, span), MeasuredUplink(upload)
    return choose_gradient_compression(section.gradient_wire, values, replicas, uplink, step_s, section.share_of_uplink)


def _agreement_sentence(manifest: Manifest, plan: Plan, wires: dict[int, GradientCompression], step_s: float) -> str:
    if not wires:
        return "no stage has two machines; nothing is averaged."
    too_slow = [place for place, wire in wires.items() if not wire.fits]
    if manifest.exact_steps == 0:
        sentence = "inner steps, and slices of the weights are averaged"
        is_needless = not any(wire.is_limited for wire in wires.values())
        return (
            f"{sentence}; every upload carries gradients: {GRADIENTS} learns more." if is_needless else f"{sentence}."
        )
    counts = Counter(wire.name for wire in wires.values()).most_common()
    formats = ", ".join(f"{count} in {name}" for name, count in counts)
    steps = "every step" if manifest.exact_steps == ALL_STEPS else f"the first {manifest.exact_steps:,} steps"
    sentence = f"gradients of {steps} of {step_s:,.3g} s: {formats}"
    if manifest.exact_steps < ALL_STEPS:
        sentence += "; later ones are inner steps, with slices of the weights"
    if not too_slow:
        return f"{sentence}."
    slowest = min(too_slow, key=lambda place: plan.assignments[place].machine.upload)
    name, reason = plan.assignments[slowest].machine.name, wires[slowest].reason
    sentence += f"; {len(too_slow)} upload too slowly, {_consequence(manifest, plan, wires)}"
    return f"{sentence}; {name} {reason}."


def _consequence(manifest: Manifest, plan: Plan, wires: dict[int, GradientCompression]) -> str:
    rule = SyncChangeRule.from_manifest(manifest)
    if not rule.may_change:
        return "so that steps last longer: inner steps (averaging.exact_steps = 0) need a twentieth"
    local = []
    for stage in range(manifest.stage_count):
        uplinks = [
            ReplicaUplink(assignment.share, wires[place].carried)
            for place, assignment in enumerate(plan.assignments)
            if assignment.span is not None and stage in assignment.span and place in wires
        ]
        slices, _ = choose_fragment_count(ALL_REDUCE, uplinks, rule.most_fragments)
        if slices != ALL_REDUCE:
            local.append(f"stage {stage} in {slices} slices")
    if not local:
        return "so that their gradients come late and are lost in part"
    return f"so that inner steps will be taken: {', '.join(local)}"
