"""Whether the swarm makes progress, why not, and what to do about it. Pure; judged by steps taken, not by heartbeats.

Knows the view. Must not know how it was obtained, nor any clock. A swarm whose peers all answer but whose weights do
not move is STALLED; one whose every stage steps is not, whatever its heartbeats say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agora.swarm.view import PeerView, View

OK, DEGRADED, STALLED, PAUSED, UNREACHABLE = "OK", "DEGRADED", "STALLED", "PAUSED", "UNREACHABLE"
LEAST_PATIENCE_S = 60.0
PATIENCE_STEPS = 10.0
"""No step for this many usual step times, and for a minute at least, is a stall."""


@dataclass(frozen=True, slots=True)
class Health:
    """state: OK, DEGRADED, STALLED, PAUSED or UNREACHABLE. do: what a reader can do, None when nothing is needed."""

    state: str
    why: str
    do: str | None = None


def judge(view: View, stage_count: int, now_unix: float, *, since_unix: float, paused: bool = False) -> Health:
    """The swarm's health as one peer sees it; `since_unix` is since when it has been looking."""
    if not view.peers and not paused:
        return Health(
            UNREACHABLE, "no peer of the run can be found", "check the invite's addresses and this machine's network"
        )
    if paused:
        return Health(PAUSED, "this peer was paused by its owner", "run `agora-node resume` to go on")
    empty = [stage for stage in range(stage_count) if not view.replicas(stage)]
    if empty:
        return _vacant(view, empty)
    last = {stage: _last_step(view.replicas(stage)) for stage in range(stage_count)}
    for stage, stepped in last.items():
        patience = patience_s(view.replicas(stage))
        if now_unix - max(stepped or 0.0, since_unix) > patience:
            return _still(stage, stepped, now_unix, patience)
    return _moving(view, stage_count, last, now_unix)


def _vacant(view: View, empty: list[int]) -> Health:
    joining = [stage for stage in empty if view.claimants(stage)]
    names = f"stage {empty[0]} has" if len(empty) == 1 else "stages " + ", ".join(map(str, empty)) + " have"
    if len(joining) == len(empty):
        return Health(STALLED, f"{names} no serving peer; one is joining", "wait until it serves")
    vacant = next(stage for stage in empty if stage not in joining)
    return Health(
        STALLED, f"{names} no peer", f"start one with `agora-node join RUN --stages {vacant}`; the others wait for it"
    )


def _still(stage: int, stepped: float | None, now_unix: float, patience: float) -> Health:
    ago = "since this peer began to look" if stepped is None else f"for {now_unix - stepped:.0f} s"
    why = f"stage {stage} took no step {ago}; up to {patience:.0f} s are usual"
    do = f"look at the logs of its peers, and start another with `agora-node join RUN --stages {stage}`"
    return Health(STALLED, why, do)


def _moving(view: View, stage_count: int, last: dict[int, float | None], now_unix: float) -> Health:
    waiting = [stage for stage, stepped in last.items() if stepped is None]
    if waiting:
        return Health(
            DEGRADED, f"stage {waiting[0]} has not taken its first step yet", "wait; the swarm has just started"
        )
    counts = [len(view.replicas(stage)) for stage in range(stage_count)]
    ago = now_unix - max(stepped for stepped in last.values() if stepped is not None)
    if min(counts) == 1:
        stage = counts.index(1)
        why = f"stage {stage} has a single peer; last step {ago:.0f} s ago"
        return Health(
            DEGRADED, why, f"the run stalls when it leaves: add one with `agora-node join RUN --stages {stage}`"
        )
    return Health(OK, f"every stage has at least {min(counts)} replicas; last step {ago:.0f} s ago")


def patience_s(replicas: Sequence[PeerView]) -> float:
    """How long these replicas of a stage may take no step before that is a stall."""
    usual = min((p.step_s for p in replicas if p.step_s is not None), default=0.0)
    return max(LEAST_PATIENCE_S, PATIENCE_STEPS * usual)


def _last_step(replicas: Sequence[PeerView]) -> float | None:
    return max((p.stepped_unix for p in replicas if p.stepped_unix is not None), default=None)
