"""The demo's JSON object and its verdict. Pure.

Knows: the contract's field names. Must not know: processes, files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agora.cli.demo_books import Books
from agora.cli.demo_plan import Plan


@dataclass(frozen=True, slots=True)
class Result:
    """What only the demo itself knows."""

    target_seconds: float | None  # from the demo's start until stage 0 had taken its steps
    first_microbatch_seconds: float | None  # from the demo's start until the first microbatch was back
    trained: tuple[int, float]  # tokens, and seconds of training, until everything was drained
    evaluated: float | None
    killed: int
    reports: Mapping[str, Mapping[str, Any]]
    run_id: str = ""


def compose(plan: Plan, books: Books, result: Result) -> dict[str, Any]:
    """The object that `swarm demo --json` prints."""
    tokens, seconds = result.trained
    losses = books.losses
    return {
        "schema": 1,
        "run_id": result.run_id,
        "peers": plan.peers,
        "stages": plan.stages,
        "steps": plan.steps,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "loss": {
            "first": _rounded(losses[0]) if losses else None,
            "last": _rounded(losses[-1]) if losses else None,
            "eval": _rounded(result.evaluated),
        },
        "microbatches": {
            "completed": books.completed,
            "rerouted": books.rerouted,
            "dropped": books.lost,
            "counted_twice": books.counted_twice,
            "abandoned_by_killed_origin": books.abandoned,
        },
        "averaging": {
            "rounds": books.rounds,
            "participation": _rounded(books.participation),
            "failed_parts": books.failed_parts,
        },
        "peers_killed": result.killed,
        "peers_joined": sum(peer.joined for peer in books.peers.values()),
        "bytes": {
            "boundary": books.boundary_bytes,
            "averaging": books.averaging_bytes,
            "state": books.state_bytes,
        },
        "link": plan.link,
        "steps_taken": books.step,
        "total_seconds": _rounded(result.target_seconds),
        "first_microbatch_seconds": _rounded(result.first_microbatch_seconds),
        "refused_gradients": books.refused_gradients,
        "start_steps": {str(index): peer.start_steps for index, peer in sorted(books.peers.items())},
        "spans": {str(index): peer.span for index, peer in sorted(books.peers.items())},
        "staleness": {index: report.get("staleness") for index, report in result.reports.items()},
        "busy": {index: report.get("busy_fraction") for index, report in result.reports.items()},
        "losses": [_rounded(loss) for loss in losses],
    }


def verdict(value: Mapping[str, Any]) -> str:
    """Why the demo failed, "" when it did not."""
    loss, microbatches = value["loss"], value["microbatches"]
    if value["steps_taken"] < value["steps"]:
        return f"stage 0 took {value['steps_taken']} of {value['steps']} steps"
    if microbatches["dropped"]:
        return f"{microbatches['dropped']} microbatches were dropped; keep the data with --dir and look at the journals"
    if loss["eval"] is None:
        return "the held-out loss could not be evaluated through the swarm; look at the log of a peer with --dir"
    if loss["first"] is None or (value["steps"] > 1 and not min(loss["last"], loss["eval"]) < loss["first"]):
        return f"the loss did not fall ({loss['first']} -> {loss['last']}); train for more --steps"
    return ""


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
