"""The result of a demo: its JSON object, its summary for people, and whether it failed. Pure.

Knows: the names of the result's fields. Must not know: processes, files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agora.cli.demo_plan import DemoPlan
from agora.cli.demo_totals import DemoTotals


@dataclass(frozen=True, slots=True)
class Measured:
    """What the demo has measured itself, beside the totals of the journals."""

    target_seconds: float  # from the demo's start until stage 0 had taken its steps
    first_microbatch_seconds: float | None  # from the demo's start until the first microbatch was back
    trained: tuple[int, float]  # tokens, and seconds of training, until everything was drained
    heldout_loss: float | None
    killed: int
    reports: Mapping[str, Mapping[str, Any]]
    run_id: str = ""


def result_of(plan: DemoPlan, totals: DemoTotals, measured: Measured) -> dict[str, Any]:
    """Returns the object that `swarm demo --json` prints."""
    tokens, seconds = measured.trained
    losses, peers = totals.losses, sorted(totals.peers.items())
    return {
        "schema": 1,
        "run_id": measured.run_id,
        "peers": plan.peers,
        "stages": plan.stages,
        "steps": plan.steps,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "loss": {
            "first": _rounded(losses[0]) if losses else None,
            "last": _rounded(losses[-1]) if losses else None,
            "eval": _rounded(measured.heldout_loss),
        },
        "microbatches": _microbatches(totals),
        "averaging": {
            "rounds": len(totals.finished_rounds),
            "participation": _rounded(totals.participation),
            "failed_parts": totals.failed_parts,
        },
        "peers_killed": measured.killed,
        "peers_joined": sum(peer.has_joined for _, peer in peers),
        "bytes": {
            kind: sum(getattr(peer.traffic, f"{kind}_bytes") for _, peer in peers)
            for kind in ("boundary", "averaging", "state")
        },
        "link": plan.link,
        "steps_taken": totals.step,
        "total_seconds": _rounded(measured.target_seconds),
        "first_microbatch_seconds": _rounded(measured.first_microbatch_seconds),
        "refused_gradients": totals.refused_gradients,
        "start_steps": {str(index): peer.start_steps for index, peer in peers},
        "spans": {str(index): peer.span for index, peer in peers},
        "staleness": {index: report.get("staleness") for index, report in measured.reports.items()},
        "busy": {index: report.get("busy_fraction") for index, report in measured.reports.items()},
        "losses": [_rounded(loss) for loss in losses],
    }


def _microbatches(totals: DemoTotals) -> dict[str, int]:
    """Returns what became of the microbatches."""
    return {
        "completed": totals.completed,
        "rerouted": totals.rerouted,
        "dropped": totals.lost,
        "counted_twice": totals.counted_twice,
        "abandoned_by_killed_origin": totals.abandoned,
    }


def failure_of(result: Mapping[str, Any]) -> str:
    """Returns why the demo failed and what to do, or "" when it did not fail."""
    loss, microbatches = result["loss"], result["microbatches"]
    if result["steps_taken"] < result["steps"]:
        return f"stage 0 took {result['steps_taken']} of {result['steps']} steps"
    if microbatches["dropped"]:
        return f"{microbatches['dropped']} microbatches were dropped; keep the data with --dir and look at the journals"
    if loss["eval"] is None:
        return "the held-out loss could not be evaluated through the swarm; look at the log of a peer with --dir"
    if loss["first"] is None or (result["steps"] > 1 and not min(loss["last"], loss["eval"]) < loss["first"]):
        return f"the loss did not fall ({loss['first']} -> {loss['last']}); train for more --steps"
    return ""


def summary_of(result: Mapping[str, Any]) -> list[str]:
    """Returns the result in a few lines for people."""
    loss, microbatches = result["loss"], result["microbatches"]
    return [
        f"loss          {_shown(loss['first'])} -> {_shown(loss['last'])}, held-out {_shown(loss['eval'])}",
        f"steps         {result['steps_taken']} of stage 0 in {result['seconds']:.1f} s, "
        f"{result['tokens_per_second']:,.0f} tokens/s",
        f"microbatches  {microbatches['completed']} completed, {microbatches['rerouted']} rerouted, "
        f"{microbatches['dropped']} dropped, {microbatches['counted_twice']} counted twice",
        f"peers         {result['peers_joined']} joined, {result['peers_killed']} killed; first microbatch after "
        f"{_shown(result['first_microbatch_seconds'], 1)} s",
    ]


def _shown(value: float | None, digits: int = 3) -> str:
    """Returns a number as text, "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    """Returns a number with four digits behind the point; None for None and for what JSON cannot have."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
