"""Decides what a stage does next together with its replicas. Pure.

Knows: how far this replica and the others are, and the run's configuration. Must not know: calls, tensors, any clock.
docs/averaging.md has the rules as a table. ReplicaGroup carries out what is decided.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest

from agora.averaging import agreement
from agora.averaging.agreement import unreachable_replicas
from agora.stepping import StepPolicy

MOST_BEHIND: Final = 20
"""Steps behind the others beyond which a replica of an asynchronous run fetches their state."""
RESUME_S: Final = 15.0
"""Seconds for which a synchronous stage is behind the leading stage before it takes that one's step number."""
CLOSE_AFTER: Final = 0.25
"""Share of a step's duration for which a replica goes on counting after another one has closed its part."""
MOST_CLOSE_AFTER_S: Final = 2.0
LOCAL_LAG: Final = 8
"""Steps that a replica with local steps may be behind the others and go on as it is."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does next.

    | what | the stage |
    |---|---|
    | wait | does nothing now |
    | slice round | agrees on slice `number` of its weights with the other replicas, in the background |
    | replay | takes step `number`, which the others have taken, along the mean gradient that they keep of it |
    | follow | takes over step number `number` of the others; one step behind, it steps along its own gradient first |
    | step | takes its step, whose tokens are all counted, along this replica's own gradient |
    | step together | takes step `number` along the mean gradient of all replicas; closes its part if it is open |
    | recover | fetches another replica's state of at least `at_least` steps; the others are at `number` |

    sources: the replicas whose state is fetched; empty for all others.
    """

    what: Literal["wait", "slice round", "replay", "follow", "step", "step together", "recover"]
    number: int = 0
    at_least: int = 0
    sources: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionConfig:
    """What the manifest says about stepping.

    exact_steps: number of first steps that are taken along the mean gradient of all replicas. most_behind: steps behind
    the others beyond which only their state helps.
    """

    target_tokens: int
    synchronous: bool
    exact_steps: int
    most_behind: int

    @classmethod
    def of(cls, manifest: Manifest) -> ActionConfig:
        """Returns what the manifest says; in a synchronous run two steps behind is too far."""
        synchronous = manifest.schedule.kind == "synchronous"
        most_behind = 1 if synchronous else MOST_BEHIND
        return cls(manifest.optimizer.target_tokens, synchronous, manifest.exact_steps, most_behind)

    def is_exact(self, step: int) -> bool:
        """Returns step < exact_steps: the first steps of a run are taken along the mean gradient of all replicas."""
        return step < self.exact_steps


@dataclass(frozen=True, slots=True)
class OwnStage:
    """This replica of a stage: how far it is, and what it is doing.

    quota: tokens at which its part of a step is closed, 0 where none is known. step_s: seconds in which all replicas
    count a step's tokens, 0 before it is known. busy: whether an exact step, a fetch or a catch-up is running.
    slice_due: the slice round that is to begin, None without one. behind_since: when it fell behind the run's leading
    stage, None when it is not. diverged_from: the replicas that are right where it is not, see divergence. in_hand:
    microbatches in work here that count for this step, as origins wait for its mean.
    """

    counts: agreement.Counts
    quota: int = 0
    step_s: float = 0.0
    leaving: bool = False
    busy: bool = False
    slice_due: int | None = None
    behind_since: float | None = None
    diverged_from: tuple[PeerId, ...] = ()
    in_hand: int = 0


@dataclass(frozen=True, slots=True)
class OtherReplicas:
    """The other replicas of a stage: what they reported, who is in the view; the step of the run's furthest stage."""

    known: agreement.KnownReplicas
    listed: Collection[PeerId]
    leading_step: int = 0


def next_action(now: float, own: OwnStage, others: OtherReplicas, config: ActionConfig) -> tuple[Action, str]:
    """Returns what the stage does next, by the first rule that applies, and why. now: on the clock of `others`."""
    if own.leaving:
        return Action("wait"), "this peer is leaving"
    if own.busy:
        return Action("wait"), "a step or a fetch is running"
    step, tokens = own.counts.step, own.counts.tokens
    if own.diverged_from:
        reason = f"it has taken in other means than {', '.join(own.diverged_from)}"
        return Action("recover", step, step, own.diverged_from), reason
    if own.slice_due is not None:
        return Action("slice round", own.slice_due), f"slice round {own.slice_due} is due"
    replicas, live = counting_replicas(now, others)
    present = len(replicas - unreachable_replicas(others.known, replicas, now))
    followed = agreement.live_replicas(others.known, others.listed, now)
    reached = agreement.step_to_follow(followed, present, step, tokens, config.target_tokens)
    behind = reached - step
    if behind > config.most_behind:
        at_least = reached if config.synchronous else step + 1
        return Action("recover", reached, at_least), f"{behind} steps behind the others"
    closed = own.counts.part > step
    if behind > 0 and not closed and not config.synchronous and config.is_exact(step):
        return Action("replay", step), f"the others have taken step {reached}"
    if not closed and behind > (1 if config.is_exact(step) else LOCAL_LAG):
        return Action("follow", reached), f"the others have taken step {reached}"
    if not closed and own.behind_since is not None and now - own.behind_since >= RESUME_S:
        return Action("follow", others.leading_step), f"another stage of the run is at step {others.leading_step}"
    waits_for = "" if (behind and config.is_exact(step)) or closed else _why_incomplete(now, own, live, config)
    if waits_for:
        return Action("wait"), waits_for
    if not closed and (not config.is_exact(step) or not replicas):
        if tokens == 0:
            return Action("wait"), "nothing was counted here; the others take the step"
        return Action("step"), "all tokens are counted"
    if replicas and present == 0:
        return Action("wait"), f"{', '.join(sorted(replicas))} did not answer, and may still be alive"
    return Action("step together", step), f"all tokens of step {step} are counted"


def _why_incomplete(now: float, own: OwnStage, live: agreement.KnownReplicas, config: ActionConfig) -> str:
    """Returns why this replica goes on counting for its step; "" when the step, or its part of it, is complete.

    A step is complete when all replicas together have counted its tokens. In asynchronous runs its part is complete
    before, when it has its quota, or when another replica closed its own CLOSE_AFTER of a step ago.
    """
    step, tokens = own.counts.step, own.counts.tokens
    missing = config.target_tokens - tokens - agreement.count_tokens(live, step)
    if missing <= 0:
        return ""
    if config.synchronous:
        return f"{missing} tokens are missing"
    closed_at = agreement.closed_since(live, step)
    patience_s = min(CLOSE_AFTER * own.step_s, MOST_CLOSE_AFTER_S) if own.step_s else MOST_CLOSE_AFTER_S
    is_late = closed_at is not None and now - closed_at >= patience_s
    if is_late or (0 < own.quota <= tokens and not own.in_hand):
        return ""
    return f"{tokens} of the {own.quota} tokens of its part are counted"


def step_policy(
    part: int,
    replicas: Collection[PeerId],
    live: agreement.KnownReplicas,
    quota: int,
    config: ActionConfig,
    *,
    by_device: bool = True,
) -> StepPolicy:
    """Returns the device thread's policy for step number `part`; its part of it is closed at `quota`.

    replicas, live: as counting_replicas returns them. by_device: whether the device thread closes the part of an exact
    step at the very microbatch; not in synchronous runs, nor where origins wait for means: there what is in work counts
    too.
    """
    target, alone = config.target_tokens, not replicas
    if config.synchronous or alone:
        return StepPolicy(target, config.exact_steps, part, agreement.tokens_to_go(live, part, target), alone)
    if not config.is_exact(part):
        return StepPolicy(target, config.exact_steps, part, quota or target)
    return StepPolicy(target, config.exact_steps, part, quota, closes_part=quota > 0 and by_device)


def counting_replicas(now: float, others: OtherReplicas) -> tuple[set[PeerId], agreement.KnownReplicas]:
    """Returns the replicas that count for a step, and what is known of the live ones among them."""
    members = agreement.round_members(others.known, others.listed, now)
    return members, agreement.live_replicas(others.known, members, now)
