"""Decides what a stage does next among its replicas.

Pure: no clock, no call. Tests run every rule with made-up views.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest

from agora.core.step_instructions import StepInstructions
from agora.replica.stage_view import (
    KnownReplicas,
    StageView,
    cap_reported_tokens,
    closing_times,
    count_tokens,
    missing_tokens,
    reached_step,
)

# A replica of an asynchronous run that is more steps than this behind the others fetches their state.
MAX_STEPS_BEHIND: Final = 20
# Seconds that a synchronous stage stays behind the leading stage before it takes over that stage's step number.
STAGE_CATCH_UP_AFTER_S: Final = 15.0
# Fraction of a step's expected duration for which a replica goes on counting after two others have closed their
# shares; after one alone see LONE_CLOSE_FRACTION.
CLOSE_AFTER_FRACTION: Final = 0.25
# One replica alone may be lying about its closed share. So it closes this one's only after this fraction of the step's
# expected duration. The step then lacks at most what the next one may add, see MAX_CORRECTION. In inner steps one
# suffices, CLOSE_AFTER_FRACTION later: that keeps the replicas in phase.
LONE_CLOSE_FRACTION: Final = 0.7
# Maximum seconds for which a replica goes on counting after others have closed their shares; also the seconds while
# the duration of a step is unknown.
MAX_CLOSE_AFTER_S: Final = 2.0
# Maximum number of steps that a replica with inner steps may be behind the others; beyond it, it catches up.
MAX_INNER_STEPS_BEHIND: Final = 8


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does next; it has no effect until it is performed.

    | kind | the stage |
    |---|---|
    | wait | does nothing now |
    | fragment sync | starts fragment sync `number` in the background |
    | replay | takes step `number`, which other replicas have taken, along the mean gradient that they keep of it |
    | catch up | sets its step to `number`, as others have; may first step along its own gradient |
    | step | takes its step along this replica's own gradient; its share is complete |
    | step together | takes step `number` along the mean gradient of all replicas; closes its share if that is open |
    | fetch | fetches another replica's state of at least `at_least` steps; the others are at `number` |

    sources: the replicas from which a state is fetched; empty: from all other live ones.
    """

    kind: Literal["wait", "fragment sync", "replay", "catch up", "step", "step together", "fetch"]
    number: int = 0
    at_least: int = 0
    sources: tuple[PeerId, ...] = ()


WAIT: Final = Action("wait")


class Decision(NamedTuple):
    """What the stage does next, and the reason in words."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The manifest's settings for steps."""

    target_tokens: int  # tokens of a step, counted by all replicas together
    synchronous: bool
    max_steps_behind: int  # a replica that is more steps behind the others fetches their state

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> StepSettings:
        """manifest: the one in force at the step that is decided about."""
        synchronous = manifest.schedule.kind == "synchronous"
        return cls(manifest.optimizer.target_tokens, synchronous, 1 if synchronous else MAX_STEPS_BEHIND)


@dataclass(frozen=True, slots=True)
class Situation:
    """A view and what follows from it now, computed once for all rules.

    now: seconds on the clock of the times in `view`.
    members: the other replicas that belong to the step.
    live: those of them that have reported and are live, with their tokens as far as they are believed.
    reachable: how many of the members are not suspected.
    reached: the step that the others have reached, or this replica's own.
    """

    view: StageView
    now: float
    settings: StepSettings
    members: Collection[PeerId]
    live: KnownReplicas
    reachable: int
    reached: int

    @classmethod
    def of(cls, view: StageView, now: float, settings: StepSettings) -> Situation:
        membership = view.membership
        members, suspected = frozenset(membership.members), membership.suspected
        live = cap_reported_tokens(membership.live, view.counts, view.shares)
        listed_live = cap_reported_tokens(membership.listed_live, view.counts, view.shares)
        # Replicas that never shared this one's history cannot make it catch up, however many there are; only the tokens
        # that they report count, within bounds.
        voters = {peer: it for peer, it in listed_live.items() if view.voters is None or peer in view.voters}
        rest = {peer: it for peer, it in listed_live.items() if peer not in voters}
        voting = members if view.voters is None else members.intersection(view.voters)
        step, tokens = view.counts.step, view.counts.tokens + count_tokens(rest, view.counts.step)
        reached = reached_step(voters, len(voting.difference(suspected)), step, tokens, settings.target_tokens)
        return cls(view, now, settings, members, live, len(members.difference(suspected)), reached)

    @property
    def step(self) -> int:
        return self.view.counts.step

    @property
    def is_inner_step(self) -> bool:
        return self.view.sync_schedule.is_inner(self.step)

    @property
    def is_share_closed(self) -> bool:
        return self.view.counts.open_step > self.step

    @property
    def all_shares_closed(self) -> bool:
        others = [last.direct.open_step for peer, last in self.live.items() if peer in self.members]
        return self.is_share_closed and all(open_step > self.step for open_step in others)


def decide(situation: Situation) -> Decision:
    """Returns the decision of the first rule that applies, with its reason, which `swarm status` prints.

    docs/understand/averaging.md has the rules as a table.
    """
    return (
        wait_if_leaving(situation)
        or wait_if_busy(situation)
        or fetch_if_diverged(situation)
        or sync_fragment_if_due(situation)
        or fetch_if_far_behind(situation)
        or replay_if_behind(situation)
        or catch_up_with_replicas(situation)
        or catch_up_with_leading_stage(situation)
        or wait_at_end(situation)
        or wait_for_tokens(situation)
        or step_alone(situation)
        or wait_for_answers(situation)
        or step_together(situation)
    )


def wait_if_leaving(situation: Situation) -> Decision | None:
    return Decision(WAIT, "this peer is leaving") if situation.view.is_leaving else None


def wait_if_busy(situation: Situation) -> Decision | None:
    return Decision(WAIT, "a step, a fetch or a catch-up is running") if situation.view.is_busy else None


def fetch_if_diverged(situation: Situation) -> Decision | None:
    if not situation.view.diverged_from:
        return None
    sources = situation.view.diverged_from
    return Decision(
        Action("fetch", situation.step, situation.step, sources),
        f"it has applied other means than {', '.join(sources)}",
    )


def sync_fragment_if_due(situation: Situation) -> Decision | None:
    if (due := situation.view.sync_due) is None:
        return None
    return Decision(Action("fragment sync", due), f"fragment sync {due} is due")


def fetch_if_far_behind(situation: Situation) -> Decision | None:
    behind = situation.reached - situation.step
    if behind <= situation.settings.max_steps_behind:
        return None
    at_least = situation.reached if situation.settings.synchronous else situation.step + 1
    return Decision(Action("fetch", situation.reached, at_least), f"{behind} steps behind the others")


def replay_if_behind(situation: Situation) -> Decision | None:
    # A closed share has been or will be sent; stepping together then returns the mean that its reducers keep.
    if (
        situation.is_share_closed
        or situation.settings.synchronous
        or situation.is_inner_step
        or situation.reached <= situation.step
    ):
        return None
    return Decision(Action("replay", situation.step), _taken_steps(situation))


def catch_up_with_replicas(situation: Situation) -> Decision | None:
    if (
        situation.is_share_closed
        or not situation.is_inner_step
        or situation.reached - situation.step <= MAX_INNER_STEPS_BEHIND
    ):
        return None
    return Decision(Action("catch up", situation.reached), _taken_steps(situation))


def _taken_steps(situation: Situation) -> str:
    return f"the others have taken {situation.reached} steps, this replica {situation.step}"


def catch_up_with_leading_stage(situation: Situation) -> Decision | None:
    behind_since = situation.view.behind_since
    if situation.is_share_closed or behind_since is None or situation.now - behind_since < STAGE_CATCH_UP_AFTER_S:
        return None
    return Decision(
        Action("catch up", situation.view.leading_step),
        f"another stage of the run is at step {situation.view.leading_step}",
    )


def wait_at_end(situation: Situation) -> Decision | None:
    stops_at = situation.view.stops_at
    if not 0 < stops_at <= situation.step or situation.reached > situation.step:
        return None
    return Decision(WAIT, f"the run has taken its {stops_at} steps")


def wait_for_tokens(situation: Situation) -> Decision | None:
    """Waits while this replica still counts tokens for its step.

    | what is complete | when |
    |---|---|
    | the step | this replica and the live others have together counted its tokens |
    | the share of an all-reduce | it rounds to no microbatch, and another one closed its own |
    | the share, asynchronous | it has its quota, and no microbatch that belongs to it is in progress |
    | the share, asynchronous | two others closed theirs CLOSE_AFTER_FRACTION of a step ago, or MAX_CLOSE_AFTER_S |
    | the share of an all-reduce | one other closed its own then, and this one is open for LONE_CLOSE_FRACTION |
    | the share of an inner step | one other closed its own then |
    | the share, synchronous | the others have taken the step |
    """
    view, tokens = situation.view, situation.view.counts.tokens
    must_follow = situation.reached > situation.step and not situation.is_inner_step
    missing = situation.settings.target_tokens - tokens - count_tokens(situation.live, situation.step)
    if situation.is_share_closed or must_follow or missing <= 0:
        return None
    if situation.settings.synchronous:
        return Decision(WAIT, f"{missing} tokens are missing")
    timeout_s = min(CLOSE_AFTER_FRACTION * view.step_s, MAX_CLOSE_AFTER_S) if view.step_s else MAX_CLOSE_AFTER_S
    closings = closing_times(situation.live, situation.step)
    if closings and not view.quota and not situation.is_inner_step:
        return None  # nobody waits for a replica from which nothing is expected
    late = sum(situation.now - at >= timeout_s for at in closings)
    may_one_close = situation.is_inner_step or view.open_fraction >= LONE_CLOSE_FRACTION
    is_late = late >= 2 or (late == 1 and may_one_close)
    if is_late or (0 < view.quota <= tokens and not view.in_progress):
        return None
    if 0 < view.quota <= tokens:
        return Decision(WAIT, f"its share is full; {view.in_progress} microbatches of it are still in progress")
    if not view.quota:
        return Decision(WAIT, f"{tokens} tokens are counted; its share of a step rounds to no microbatch")
    return Decision(WAIT, f"{tokens} of the {view.quota} tokens of its share are counted")


def step_alone(situation: Situation) -> Decision | None:
    if situation.is_share_closed or (situation.members and not situation.is_inner_step):
        return None
    if situation.view.counts.tokens == 0:
        return Decision(WAIT, "nothing was counted here; the others take the step")
    if situation.settings.synchronous:
        return Decision(Action("step"), "all tokens are counted")
    return Decision(Action("step"), "this replica's share is complete, and the step needs no mean")


def wait_for_answers(situation: Situation) -> Decision | None:
    if not situation.members or situation.reachable:
        return None
    return Decision(WAIT, f"{', '.join(sorted(situation.members))} did not answer, and may still be alive")


def step_together(situation: Situation) -> Decision:
    action = Action("step together", situation.step)
    if situation.settings.synchronous:
        return Decision(action, f"all tokens of step {situation.step} are counted")
    return Decision(action, f"this replica's share of step {situation.step} is complete")


def step_instructions(situation: Situation, *, device_closes_share: bool = True) -> StepInstructions:
    """Returns the device thread's instructions for the open step: when it takes the step or closes its share.

    | the step is | own_tokens | closes_share |
    |---|---|---|
    | synchronous, or there are no other members (`alone`) | the target less the tokens of the live, at least 1 | no |
    | an inner step | quota, or the target if the quota is 0 | no |
    | an all-reduce | quota | if device_closes_share, and the quota is not 0 |

    device_closes_share: False where origins wait for means and open nothing before: there the microbatches in progress
    still belong to the share, so that `decide` closes it, and not the device thread.
    """
    view, target = situation.view, situation.settings.target_tokens
    step, quota, alone, end = view.counts.open_step, view.quota, not situation.members, view.stops_at
    if situation.settings.synchronous or alone:
        return StepInstructions(target, True, step, missing_tokens(situation.live, step, target), alone, stops_at=end)
    if view.sync_schedule.is_inner(step):
        return StepInstructions(target, True, step, quota or target, stops_at=end)
    closes = quota > 0 and device_closes_share
    return StepInstructions(target, True, step, quota, closes_share=closes, stops_at=end)
