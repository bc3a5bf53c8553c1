"""Decides what a stage does next together with its replicas. Pure.

docs/understand/averaging.md has the rules as a table. ReplicaGroup carries out what is decided.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest

from agora.core.stepping import StepPolicy
from agora.core.sync_mode import ALL_EXACT, StepPlan
from agora.replica import replica_progress
from agora.replica.replica_progress import unreachable_replicas

# A replica of an asynchronous run that is more steps than this behind the others fetches their state.
MAX_STEPS_BEHIND: Final = 20
# Seconds that a synchronous stage stays behind the leading stage before it takes over that stage's step number.
RESUME_AFTER_S: Final = 15.0
# Fraction of a step's duration for which a replica still counts tokens after another one has closed its share.
CLOSE_AFTER_FRACTION: Final = 0.25
# Maximum seconds for which a replica still counts tokens after another one has closed its share; also the seconds while
# the duration of a step is unknown.
MAX_CLOSE_AFTER_S: Final = 2.0
# Maximum number of steps that a replica with local steps may be behind the others; beyond it, it catches up.
MAX_LOCAL_LAG: Final = 8


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does next; it has no effect until ReplicaGroup carries it out.

    | kind | the stage |
    |---|---|
    | wait | does nothing now |
    | slice round | starts slice round `number` in the background |
    | replay | takes step `number`, which other replicas have taken, along the mean gradient that they keep of it |
    | catch up | sets its step to `number`, as others have; may first step along its own gradient |
    | step | takes its step, whose tokens are all counted, along this replica's own gradient |
    | step together | takes step `number` along the mean gradient of all replicas; closes its share if that is open |
    | fetch | fetches another replica's state of at least `at_least` steps; the others are at `number` |

    sources: the replicas from which a state is fetched; empty: from all other live ones.
    """

    kind: Literal["wait", "slice round", "replay", "catch up", "step", "step together", "fetch"]
    number: int = 0
    at_least: int = 0
    sources: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionConfig:
    """The manifest's settings for steps."""

    target_tokens: int  # tokens of a step, counted by all replicas together
    synchronous: bool
    max_steps_behind: int  # a replica that is more steps behind the others fetches their state

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> ActionConfig:
        """Returns the manifest's step configuration; max_steps_behind: 1 if synchronous, else MAX_STEPS_BEHIND."""
        synchronous = manifest.schedule.kind == "synchronous"
        max_steps_behind = 1 if synchronous else MAX_STEPS_BEHIND
        return cls(manifest.optimizer.target_tokens, synchronous, max_steps_behind)


@dataclass(frozen=True, slots=True)
class OwnStage:
    """This replica of a stage: how far it is, and what it is doing."""

    counts: replica_progress.ReplicaCounts
    # Which of the stage's steps are local; all others are exact, along the mean gradient of all replicas.
    plan: StepPlan = ALL_EXACT
    quota: int = 0  # tokens at which its share of a step is closed, 0 when unknown
    step_s: float = 0.0  # seconds in which all replicas count a step's tokens, 0 when unknown
    is_leaving: bool = False  # whether this peer is leaving the run
    is_busy: bool = False  # whether a step, a fetch or a catch-up is running
    slice_due: int | None = None  # the slice round to begin, None if none is due
    # When the stage fell behind the run's leading stage, on the loop's clock; None if it is not behind.
    behind_since: float | None = None
    # Replicas to fetch the state from, because this one has applied other means, see replicas_to_fetch_from; or ().
    diverged_from: tuple[PeerId, ...] = ()
    in_progress: int = 0  # number of microbatches in progress here that belong to the open share


@dataclass(frozen=True, slots=True)
class OtherReplicas:
    """The other replicas of a stage. known: the progress they reported. listed: the ids that this peer's view names.

    leading_step: steps taken by the stage of the run that has taken the most.
    """

    known: replica_progress.KnownReplicas
    listed: Collection[PeerId]
    leading_step: int = 0


def next_action(now: float, own: OwnStage, others: OtherReplicas, config: ActionConfig) -> tuple[Action, str]:
    """Returns what the stage does next, by the first rule that applies, and the reason in words.

    The rules, in order: wait while leaving or busy; fetch if diverged; begin the slice round that is due; fetch, replay
    or catch up if behind the others or the leading stage; wait while tokens are missing; take the step, alone or, once
    others answer, together. docs/understand/averaging.md has them as a table. now: seconds on the clock of the
    times in `own` and `others`.
    """
    if own.is_leaving:
        return Action("wait"), "this peer is leaving"
    if own.is_busy:
        return Action("wait"), "a step or a fetch is running"
    step, tokens = own.counts.step, own.counts.tokens
    if own.diverged_from:
        reason = f"it has applied other means than {', '.join(own.diverged_from)}"
        return Action("fetch", step, step, own.diverged_from), reason
    if own.slice_due is not None:
        return Action("slice round", own.slice_due), f"slice round {own.slice_due} is due"
    replicas, live = counting_replicas(now, others)
    reachable = len(replicas - unreachable_replicas(others.known, replicas, now))
    listed_live = replica_progress.live_replicas(others.known, others.listed, now)
    reached = replica_progress.step_to_catch_up_to(listed_live, reachable, step, tokens, config.target_tokens)
    if decision := _action_if_behind(now, own, reached, others.leading_step, config):
        return decision
    closed = own.counts.open_step > step
    is_local = own.plan.is_local(step)
    must_follow = reached > step and not is_local
    incomplete = "" if closed or must_follow else _why_incomplete(now, own, live, config)
    if incomplete:
        return Action("wait"), incomplete
    if not closed and (is_local or not replicas):
        if tokens == 0:
            return Action("wait"), "nothing was counted here; the others take the step"
        return Action("step"), "all tokens are counted"
    if replicas and reachable == 0:
        return Action("wait"), f"{', '.join(sorted(replicas))} did not answer, and may still be alive"
    return Action("step together", step), f"all tokens of step {step} are counted"


def _action_if_behind(
    now: float, own: OwnStage, reached: int, leading_step: int, config: ActionConfig
) -> tuple[Action, str] | None:
    step, behind = own.counts.step, reached - own.counts.step
    if behind > config.max_steps_behind:
        at_least = reached if config.synchronous else step + 1
        return Action("fetch", reached, at_least), f"{behind} steps behind the others"
    if own.counts.open_step > step:
        return None
    is_local = own.plan.is_local(step)
    if behind > 0 and not config.synchronous and not is_local:
        return Action("replay", step), f"the others have taken step {reached}"
    if behind > MAX_LOCAL_LAG and is_local:
        return Action("catch up", reached), f"the others have taken step {reached}"
    if own.behind_since is not None and now - own.behind_since >= RESUME_AFTER_S:
        return Action("catch up", leading_step), f"another stage of the run is at step {leading_step}"
    return None


def _why_incomplete(now: float, own: OwnStage, live: replica_progress.KnownReplicas, config: ActionConfig) -> str:
    step, tokens = own.counts.step, own.counts.tokens
    missing = config.target_tokens - tokens - replica_progress.count_tokens(live, step)
    if missing <= 0:
        return ""
    if config.synchronous:
        return f"{missing} tokens are missing"
    closed_at = replica_progress.first_closed_at(live, step)
    timeout_s = min(CLOSE_AFTER_FRACTION * own.step_s, MAX_CLOSE_AFTER_S) if own.step_s else MAX_CLOSE_AFTER_S
    is_late = closed_at is not None and now - closed_at >= timeout_s
    if is_late or (0 < own.quota <= tokens and not own.in_progress):
        return ""
    return f"{tokens} of the {own.quota} tokens of its share are counted"


def step_policy(
    step: int,
    replicas: Collection[PeerId],
    live: replica_progress.KnownReplicas,
    quota: int,
    config: ActionConfig,
    *,
    is_local: bool,
    by_device: bool = True,
) -> StepPolicy:
    """Returns the device thread's policy for the open step, number `step`: when it takes the step or closes its share.

    | the step is | own_tokens | closes_share |
    |---|---|---|
    | synchronous, or there are no `replicas` (`alone`) | the target less the tokens of `live`, at least 1 | no |
    | local | quota, or the target if the quota is unknown | no |
    | exact | quota | if by_device, and the quota is known |

    replicas, live: as counting_replicas returns them. quota: tokens at which this replica's share is closed, 0 when
    unknown. is_local: whether the open step is local. by_device: False where origins wait for means: there the
    microbatches in progress still belong to the share, so that next_action closes it, and not the device thread.
    """
    target = config.target_tokens
    alone = not replicas
    if config.synchronous or alone:
        return StepPolicy(target, True, step, replica_progress.tokens_to_go(live, step, target), alone)
    if is_local:
        return StepPolicy(target, True, step, quota or target)
    return StepPolicy(target, True, step, quota, closes_share=quota > 0 and by_device)


def counting_replicas(now: float, others: OtherReplicas) -> tuple[set[PeerId], replica_progress.KnownReplicas]:
    """Returns the ids of the other replicas that belong to a step, and the progress of the live ones among them by id.

    now: seconds on the clock of the times in `others`. See replica_progress.round_members.
    """
    members = replica_progress.round_members(others.known, others.listed, now)
    return members, replica_progress.live_replicas(others.known, members, now)
