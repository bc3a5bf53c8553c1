"""Decides whether the swarm makes progress, why not, and what to do about it. Pure.

Steps count, not heartbeats: a swarm whose peers all answer but whose weights do not change is STALLED.

| state | when |
|---|---|
| PAUSED | this peer is paused: by its owner, outside its hours, or while its machine is in use |
| UNREACHABLE | the view is empty |
| COMPLETED | every stage has taken `total_steps`, and this peer's owner has not chosen to go on |
| STALLED | a stage has no serving peer, or took no step within its time limit |
| DEGRADED | a stage has not taken its first step, still within its time limit; or it has a single replica |
| OK | every stage has two replicas or more, and steps |

Of a single stage these are OK, DEGRADED, STALLED and COMPLETED, and WAITING: there is no fault in it, or only that it
has a single replica, but another stage stalls the run.

A stage's time limit is LIMIT_STEPS of its usual step times, at least MIN_STALL_LIMIT_S. In a run that is too large to
be read whole, replicas are counted by estimate, and the time limit is longer by twice the time in which a stage's peers
are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agora.swarm.run_end import has_ended
from agora.swarm.view import PeerView, View

OK, DEGRADED, STALLED, PAUSED, UNREACHABLE = "OK", "DEGRADED", "STALLED", "PAUSED", "UNREACHABLE"
COMPLETED = "COMPLETED"
WAITING = "WAITING"  # of a stage alone: nothing is wrong with it but that the run is STALLED by another one
MIN_STALL_LIMIT_S = 60.0
# A stage that took no step for this many usual step times, and for MIN_STALL_LIMIT_S at least, is stalled.
LIMIT_STEPS = 10.0


@dataclass(frozen=True, slots=True)
class Health:
    """The swarm's state as one peer sees it. why, advice: sentences for people. stages: of each; () if unknown."""

    state: str
    why: str
    advice: str | None = None
    stages: tuple[Health, ...] = field(default=(), compare=False)


def assess_health(
    view: View,
    stage_count: int,
    now_unix: float,
    *,
    since_unix: float,
    total_steps: int = 0,
    own_steps: Mapping[int, int] = MappingProxyType({}),
) -> Health:
    """Returns the swarm's health as a running peer sees it in its view; never PAUSED.

    The reason names the stage with the worst fault; of several equally bad ones, the first.
    since_unix: when the peer began to look; time without steps counts only from then on. total_steps: the run's end, 0
    where it goes on. own_steps: see run_end.has_ended.
    """
    if not view.peers:
        advice = "check the invite's addresses and this machine's network"
        return Health(UNREACHABLE, "no peer of the run can be found", advice)
    judged = [_judge_stage(view, stage, now_unix, since_unix) for stage in range(stage_count)]
    empty = [stage for stage in range(stage_count) if not view.replicas(stage)]
    if not empty and has_ended(view, stage_count, total_steps, own_steps):
        why = f"the run has taken its {total_steps:,} steps, and trains no more"
        found = Health(COMPLETED, why, "export it with `swarm export RUN --out DIR`, before its peers leave")
        return replace(found, stages=(found,) * stage_count)
    worst, found = max(judged, key=lambda pair: pair[0])  # of equals, the first stage
    if len(empty) > 1:
        found = _judge_vacant(view, empty)
    elif worst == _FINE:
        count = min(map(view.replica_count, range(stage_count)))
        found = Health(
            OK, f"every stage has at least {count} replicas; {_last_step(view, range(stage_count), now_unix)}"
        )
    if found.state == STALLED:
        judged = [(fault, _wait_for_others(stage, found) if fault < _NEW else stage) for fault, stage in judged]
    return replace(found, stages=tuple(stage for _, stage in judged))


def _wait_for_others(stage: Health, run: Health) -> Health:
    # Its own steps are recent, but no microbatch comes through the run any more.
    return Health(WAITING, f"{stage.why}; it waits, since {run.why}", stage.advice)


# How much each fault of a stage weighs: the run's health is that of the stage with the heaviest.
_FINE, _SINGLE, _NEW, _STANDING, _EMPTY = range(5)


def _judge_stage(view: View, stage: int, now_unix: float, since_unix: float) -> tuple[int, Health]:
    replicas = view.replicas(stage)
    if not replicas:
        return _EMPTY, _judge_vacant(view, [stage])
    stepped = max((p.stepped_unix for p in replicas if p.stepped_unix is not None), default=None)
    limit_s = _step_limit_s(replicas) + 2.0 * view.period_s(stage)
    if now_unix - max(stepped or 0.0, since_unix) > limit_s:
        ago = "since this peer began to look" if stepped is None else f"for {now_unix - stepped:.0f} s"
        waits = next((f"; a peer of it says: {p.waits_for}" for p in replicas if p.waits_for), "")
        why = f"stage {stage} took no step {ago}; up to {limit_s:.0f} s are usual{waits}"
        advice = f"look at the logs of its peers, and start another with `agora-node join RUN --stages {stage}`"
        return _STANDING, Health(STALLED, why, advice)
    if stepped is None:
        why = f"stage {stage} has not taken its first step yet"
        return _NEW, Health(DEGRADED, why, "wait; the swarm has just started")
    count, ago = view.replica_count(stage), _last_step(view, [stage], now_unix)
    if count == 1:
        advice = f"start another with `agora-node join RUN --stages {stage}`: the run stalls when this one leaves"
        return _SINGLE, Health(DEGRADED, f"stage {stage} has a single peer; {ago}", advice)
    return _FINE, Health(OK, f"stage {stage} has {count} replicas; {ago}")


def _judge_vacant(view: View, empty: list[int]) -> Health:
    names = f"stage {empty[0]} has" if len(empty) == 1 else "stages " + ", ".join(map(str, empty)) + " have"
    unclaimed = [stage for stage in empty if not view.claimants(stage)]
    if not unclaimed:
        if len(empty) > 1:
            return Health(STALLED, f"{names} no serving peer; peers are joining", "wait until they serve")
        return Health(STALLED, f"{names} no serving peer; one is joining", "wait until it serves")
    advice = f"start one with `agora-node join RUN --stages {unclaimed[0]}`; the others wait for it"
    return Health(STALLED, f"{names} no peer", advice)


def _last_step(view: View, stages: Iterable[int], now_unix: float) -> str:
    stepped = [seen.stepped_unix for stage in stages for seen in view.replicas(stage) if seen.stepped_unix is not None]
    return f"last step {now_unix - max(stepped):.0f} s ago"


def _step_limit_s(replicas: Sequence[PeerView]) -> float:
    usual = min((p.mean_step_s.value for p in replicas if p.mean_step_s.value is not None), default=0.0)
    return max(MIN_STALL_LIMIT_S, LIMIT_STEPS * usual)
