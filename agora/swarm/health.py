"""Decides whether the swarm makes progress, why not, and what to do about it. Pure.

Steps count, not heartbeats: a swarm whose peers all answer but whose weights do not change is STALLED.

| state | when |
|---|---|
| PAUSED | this peer is paused: by its owner, or it is outside its hours; see node/limits/pausing.py |
| UNREACHABLE | the view is empty |
| COMPLETED | every stage has taken `total_steps`, and this peer's owner has not chosen to go on |
| STALLED | a stage has no serving peer, or took no step within its time limit |
| DEGRADED | a stage has not taken its first step, still within its time limit; or it has a single replica |
| OK | every stage has two replicas or more, and steps |

A stage's time limit is LIMIT_STEPS of its usual step times, at least MIN_LIMIT_S. In a run that is too large to be read
whole, replicas are counted by estimate, and the time limit is longer by twice the time in which a stage's peers are
read again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agora.swarm.view import PeerView, View

OK, DEGRADED, STALLED, PAUSED, UNREACHABLE = "OK", "DEGRADED", "STALLED", "PAUSED", "UNREACHABLE"
COMPLETED = "COMPLETED"
MIN_LIMIT_S = 60.0
LIMIT_STEPS = 10.0  # A stage that took no step for this many usual step times, and for MIN_LIMIT_S at least, is stalled


@dataclass(frozen=True, slots=True)
class Health:
    """The swarm's state as one peer sees it. why, advice: sentences for people."""

    state: str
    why: str
    advice: str | None = None


def has_ended(
    view: View, stage_count: int, total_steps: int, own_steps: Mapping[int, int] = MappingProxyType({})
) -> bool:
    """Returns whether every stage has taken `total_steps`; False for 0, a run without an end.

    own_steps: steps of the stages that this peer holds; no claim of others ends the run before these have ended. For
    another stage its median replica counts (of two, the higher one), so that one peer's claim decides nothing.
    """

    def step_of(stage: int) -> int:
        steps = [seen.step_of(stage) for seen in view.replicas(stage)]
        return own_steps.get(stage, statistics.median_high(steps) if steps else 0)

    return total_steps > 0 and all(step_of(stage) >= total_steps for stage in range(stage_count))


def assess_health(
    view: View,
    stage_count: int,
    now_unix: float,
    *,
    since_unix: float,
    total_steps: int = 0,
    own_steps: Mapping[int, int] = MappingProxyType({}),
) -> Health:
    """Returns the swarm's health as a running peer sees it in its view; never PAUSED. The first stage at fault is
    named.

    since_unix: when the peer began to look; time without steps counts only from then on. total_steps: the run's end, 0
    where it goes on. own_steps: see has_ended.
    """
    if not view.peers:
        advice = "check the invite's addresses and this machine's network"
        return Health(UNREACHABLE, "no peer of the run can be found", advice)
    empty = [stage for stage in range(stage_count) if not view.replicas(stage)]
    if empty:
        return _judge_vacant(view, empty)
    if has_ended(view, stage_count, total_steps, own_steps):
        why = f"the run has taken its {total_steps:,} steps, and trains no more"
        return Health(COMPLETED, why, "export it with `swarm export RUN --out DIR`; its peers may leave then")
    last: dict[int, float | None] = {}
    for stage in range(stage_count):
        replicas = view.replicas(stage)
        stepped = last[stage] = max((p.stepped_unix for p in replicas if p.stepped_unix is not None), default=None)
        limit_s = _step_limit_s(replicas) + 2.0 * view.period_s(stage)
        if now_unix - max(stepped or 0.0, since_unix) > limit_s:
            ago = "since this peer began to look" if stepped is None else f"for {now_unix - stepped:.0f} s"
            why = f"stage {stage} took no step {ago}; up to {limit_s:.0f} s are usual"
            advice = f"look at the logs of its peers, and start another with `agora-node join RUN --stages {stage}`"
            return Health(STALLED, why, advice)
    return _judge_stepping(view, last, now_unix)


def _judge_vacant(view: View, empty: list[int]) -> Health:
    names = f"stage {empty[0]} has" if len(empty) == 1 else "stages " + ", ".join(map(str, empty)) + " have"
    unclaimed = [stage for stage in empty if not view.claimants(stage)]
    if not unclaimed:
        if len(empty) > 1:
            return Health(STALLED, f"{names} no serving peer; peers are joining", "wait until they serve")
        return Health(STALLED, f"{names} no serving peer; one is joining", "wait until it serves")
    advice = f"start one with `agora-node join RUN --stages {unclaimed[0]}`; the others wait for it"
    return Health(STALLED, f"{names} no peer", advice)


def _judge_stepping(view: View, last: dict[int, float | None], now_unix: float) -> Health:
    steps = [stepped for stepped in last.values() if stepped is not None]
    if len(steps) < len(last):
        waiting = next(stage for stage, stepped in last.items() if stepped is None)
        return Health(DEGRADED, f"stage {waiting} has not taken its first step yet", "wait; the swarm has just started")
    counts = [view.replica_count(stage) for stage in last]
    ago = now_unix - max(steps)
    if min(counts) == 1:
        stage = counts.index(1)
        why = f"stage {stage} has a single peer; last step {ago:.0f} s ago"
        advice = f"the run stalls when it leaves: add one with `agora-node join RUN --stages {stage}`"
        return Health(DEGRADED, why, advice)
    return Health(OK, f"every stage has at least {min(counts)} replicas; last step {ago:.0f} s ago")


def _step_limit_s(replicas: Sequence[PeerView]) -> float:
    usual = min((p.mean_step_s.value for p in replicas if p.mean_step_s.value is not None), default=0.0)
    return max(MIN_LIMIT_S, LIMIT_STEPS * usual)
