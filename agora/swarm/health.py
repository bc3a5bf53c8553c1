"""Decides whether the swarm makes progress, why not, and what to do about it. Pure.

Knows: the view. Must not know: how it was obtained, nor any clock. Steps count, not heartbeats: a swarm whose peers all
answer but whose weights do not change is STALLED.

| state | when |
|---|---|
| PAUSED | this peer rests: its owner paused it, or it is outside its hours (node/pausing.py) |
| UNREACHABLE | the view is empty |
| STALLED | a stage has no serving peer, or took no step for longer than `patience_s` |
| DEGRADED | a stage has taken no step yet, or has a single replica |
| OK | every stage has two replicas or more, and steps |

In a run that is too large to be read whole, replicas are counted by estimate, and patience is longer by twice the time
in which a stage's peers are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agora.swarm.view import PeerView, View

OK, DEGRADED, STALLED, PAUSED, UNREACHABLE = "OK", "DEGRADED", "STALLED", "PAUSED", "UNREACHABLE"
MIN_PATIENCE_S = 60.0
PATIENCE_STEPS = 10.0
"""A stage that took no step for this many usual step times, and for MIN_PATIENCE_S at least, is stalled."""


@dataclass(frozen=True, slots=True)
class Health:
    """The swarm's state (OK, DEGRADED, STALLED, PAUSED or UNREACHABLE), why, and what to do. Immutable.

    why, do: sentences for people; `do` is None if there is nothing to do.
    """

    state: str
    why: str
    do: str | None = None


def assess_health(view: View, stage_count: int, now_unix: float, *, since_unix: float) -> Health:
    """Returns the swarm's health as one peer that works sees it: UNREACHABLE, STALLED, DEGRADED or OK (module's table).

    since_unix: when that peer began to look; time without steps counts only from then on.
    """
    if not view.peers:
        what_to_do = "check the invite's addresses and this machine's network"
        return Health(UNREACHABLE, "no peer of the run can be found", what_to_do)
    empty = [stage for stage in range(stage_count) if not view.replicas(stage)]
    if empty:
        return _judge_vacant(view, empty)
    last: dict[int, float | None] = {}
    for stage in range(stage_count):
        replicas = view.replicas(stage)
        stepped = last[stage] = max((p.stepped_unix for p in replicas if p.stepped_unix is not None), default=None)
        patience_s = _patience_s(replicas) + 2.0 * view.period_s(stage)
        if now_unix - max(stepped or 0.0, since_unix) > patience_s:
            ago = "since this peer began to look" if stepped is None else f"for {now_unix - stepped:.0f} s"
            why = f"stage {stage} took no step {ago}; up to {patience_s:.0f} s are usual"
            what_to_do = f"look at the logs of its peers, and start another with `agora-node join RUN --stages {stage}`"
            return Health(STALLED, why, what_to_do)
    return _judge_stepping(view, last, now_unix)


def _judge_vacant(view: View, empty: list[int]) -> Health:
    """Returns STALLED for stages `empty`, which nobody serves; the advice is to wait if all of them are claimed."""
    names = f"stage {empty[0]} has" if len(empty) == 1 else "stages " + ", ".join(map(str, empty)) + " have"
    unclaimed = [stage for stage in empty if not view.claimants(stage)]
    if not unclaimed:
        return Health(STALLED, f"{names} no serving peer; one is joining", "wait until it serves")
    what_to_do = f"start one with `agora-node join RUN --stages {unclaimed[0]}`; the others wait for it"
    return Health(STALLED, f"{names} no peer", what_to_do)


def _judge_stepping(view: View, last: dict[int, float | None], now_unix: float) -> Health:
    """Returns DEGRADED if a stage has a single replica or has never stepped; otherwise OK.

    last: by stage, the unix time of its last step, None for none.
    """
    steps = [stepped for stepped in last.values() if stepped is not None]
    if len(steps) < len(last):
        waiting = next(stage for stage, stepped in last.items() if stepped is None)
        return Health(DEGRADED, f"stage {waiting} has not taken its first step yet", "wait; the swarm has just started")
    counts = [view.replica_count(stage) for stage in last]
    ago = now_unix - max(steps)
    if min(counts) == 1:
        stage = counts.index(1)
        why = f"stage {stage} has a single peer; last step {ago:.0f} s ago"
        what_to_do = f"the run stalls when it leaves: add one with `agora-node join RUN --stages {stage}`"
        return Health(DEGRADED, why, what_to_do)
    return Health(OK, f"every stage has at least {min(counts)} replicas; last step {ago:.0f} s ago")


def _patience_s(replicas: Sequence[PeerView]) -> float:
    """Returns after how many seconds without a step a stage counts as stalled.

    PATIENCE_STEPS times its usual step time, which is the shortest that any of the replicas has; at least
    MIN_PATIENCE_S.
    """
    usual = min((p.mean_step_s.value for p in replicas if p.mean_step_s.value is not None), default=0.0)
    return max(MIN_PATIENCE_S, PATIENCE_STEPS * usual)
