"""Decides what a stage does next: its steps, whether they are all-reduces or inner steps, how gradients are compressed.

Pure: no clock, no call. The daemon, the simulator and the tests call the same functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from agora_protocol.codec_names import WIRE_NAMES, WireName
from agora_protocol.ids import PeerId
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.manifest import Manifest

from agora.core.sync_mode import ALL_REDUCE, MIN_FRAGMENTS, StepPolicy
from agora.replica.view import (
    KnownReplicas,
    StageView,
    believe,
    count_tokens,
    first_closed_at,
    live_replicas,
    round_members,
    step_to_catch_up_to,
    tokens_to_go,
    unreachable_replicas,
)

# A replica of an asynchronous run that is more steps than this behind the others fetches their state.
MAX_STEPS_BEHIND: Final = 20
# Seconds that a synchronous stage stays behind the leading stage before it takes over that stage's step number.
RESUME_AFTER_S: Final = 15.0
# Fraction of a step's duration for which a replica still counts tokens after another one has closed its share.
CLOSE_AFTER_FRACTION: Final = 0.25
# Maximum seconds for which a replica still counts tokens after another one has closed its share; also the seconds while
# the duration of a step is unknown.
MAX_CLOSE_AFTER_S: Final = 2.0
# Maximum number of steps that a replica with inner steps may be behind the others; beyond it, it catches up.
MAX_LOCAL_LAG: Final = 8

NEEDED_BYTES: Final = 2 / 8 + 1 / 64  # bytes of a value in the fewest bits: normal2
# Replicas with less than this share of all tokens per second may have slower uplinks than the mode needs.
MAX_SLOW_FRACTION: Final = 0.25
# Uplinks are fast enough to return to all-reduces if they carry this many times the bytes of gradients.
RETURN_FACTOR: Final = 1.5
CHANGE_FACTOR: Final = 1.5  # the number of fragments changes if it should be this many times as large, or as small
# Seconds for which a reducer must have wanted a change before it asks for it: 2 * RATE_DECAY_S. RATE_DECAY_S * ln 3
# seconds after a stall, however long, measured rates are within RETURN_FACTOR of what they were.
WISH_S: Final = 20.0

SCALE_BYTES: Final = 1 / QUANTISER_BLOCK
# Bytes of one value in each format; the smallest format first.
BYTES: Final[dict[WireName, float]] = {
    "normal2": 2 / 8 + SCALE_BYTES,
    "normal3": 3 / 8 + SCALE_BYTES,
    "normal4": 4 / 8 + SCALE_BYTES,
    "int8": 1 + SCALE_BYTES,
    "bf16": 2.0,
    "float32": 4.0,
}
DOUBLING_STEPS: Final = 200  # an uplink counts as twice as fast after this many steps in which it was never full
MAX_DOUBLINGS: Final = 20.0
MENTIONED_GROWTH: Final = 1.05  # the least factor that the reason mentions


# --- what a stage does next


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does next; it has no effect until it is performed.

    | kind | the stage |
    |---|---|
    | wait | does nothing now |
    | fragment sync | starts fragment sync `number` in the background |
    | replay | takes step `number`, which other replicas have taken, along the mean gradient that they keep of it |
    | catch up | sets its step to `number`, as others have; may first step along its own gradient |
    | step | takes its step, whose tokens are all counted, along this replica's own gradient |
    | step together | takes step `number` along the mean gradient of all replicas; closes its share if that is open |
    | fetch | fetches another replica's state of at least `at_least` steps; the others are at `number` |

    sources: the replicas from which a state is fetched; empty: from all other live ones.
    """

    kind: Literal["wait", "fragment sync", "replay", "catch up", "step", "step together", "fetch"]
    number: int = 0
    at_least: int = 0
    sources: tuple[PeerId, ...] = ()


WAIT: Final = Action("wait")
Decision = tuple[Action, str]  # what the stage does next, and the reason in words


@dataclass(frozen=True, slots=True)
class StepRule:
    """The manifest's settings for steps."""

    target_tokens: int  # tokens of a step, counted by all replicas together
    synchronous: bool
    max_steps_behind: int  # a replica that is more steps behind the others fetches their state

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> StepRule:
        synchronous = manifest.schedule.kind == "synchronous"
        return cls(manifest.optimizer.target_tokens, synchronous, 1 if synchronous else MAX_STEPS_BEHIND)


# A view, and what follows from it at one moment; the rules share it, so that it is computed once. members: the other
# replicas that belong to the step; `reachable` of them are not unreachable, `live` have reported. reached: the step
# that the others have reached, or this replica's own when it is not behind.
@dataclass(frozen=True, slots=True)
class _Situation:
    view: StageView
    now: float
    rule: StepRule
    members: Collection[PeerId]
    live: KnownReplicas
    reachable: int
    reached: int

    @property
    def step(self) -> int:
        return self.view.counts.step

    @property
    def is_inner_step(self) -> bool:
        return self.view.plan.is_inner(self.step)

    @property
    def is_share_closed(self) -> bool:
        return self.view.counts.open_step > self.step


def decide(view: StageView, now: float, rule: StepRule) -> Decision:
    """The first rule that has something to do, with its reason, which `status`, log and tests share.

    now: seconds on the clock of the times in `view`. docs/understand/averaging.md has the rules as a table.
    """
    if idle := wait_if_leaving(view) or wait_if_busy(view):
        return idle
    situation = _look_at(view, now, rule)
    return (
        fetch_if_diverged(situation)
        or sync_fragment_if_due(situation)
        or fetch_if_far_behind(situation)
        or replay_if_behind(situation)
        or catch_up_with_replicas(situation)
        or catch_up_with_leading_stage(situation)
        or wait_for_tokens(situation)
        or step_alone(situation)
        or wait_for_answers(situation)
        or step_together(situation)
    )


def _look_at(view: StageView, now: float, rule: StepRule) -> _Situation:
    members, live = counting_replicas(view, now)
    reachable = len(members - unreachable_replicas(view.known, members, now))
    listed_live = believe(live_replicas(view.known, view.listed, now), view.counts, view.shares)
    step, tokens = view.counts.step, view.counts.tokens
    reached = step_to_catch_up_to(listed_live, reachable, step, tokens, rule.target_tokens)
    return _Situation(view, now, rule, members, live, reachable, reached)


def counting_replicas(view: StageView, now: float) -> tuple[set[PeerId], KnownReplicas]:
    """Returns the ids of the other replicas that belong to a step, and the live ones' progress as far as believed."""
    members = round_members(view.known, view.listed, now)
    return members, believe(live_replicas(view.known, members, now), view.counts, view.shares)


def wait_if_leaving(view: StageView) -> Decision | None:
    return (WAIT, "this peer is leaving") if view.is_leaving else None


def wait_if_busy(view: StageView) -> Decision | None:
    return (WAIT, "a step or a fetch is running") if view.is_busy else None


def fetch_if_diverged(situation: _Situation) -> Decision | None:
    if not situation.view.diverged_from:
        return None
    sources = situation.view.diverged_from
    return Action(
        "fetch", situation.step, situation.step, sources
    ), f"it has applied other means than {', '.join(sources)}"


def sync_fragment_if_due(situation: _Situation) -> Decision | None:
    if (due := situation.view.sync_due) is None:
        return None
    return Action("fragment sync", due), f"fragment sync {due} is due"


def fetch_if_far_behind(situation: _Situation) -> Decision | None:
    behind = situation.reached - situation.step
    if behind <= situation.rule.max_steps_behind:
        return None
    at_least = situation.reached if situation.rule.synchronous else situation.step + 1
    return Action("fetch", situation.reached, at_least), f"{behind} steps behind the others"


def replay_if_behind(situation: _Situation) -> Decision | None:
    # While a share that was closed here awaits its mean, the stage only fetches: its reducers have the mean.
    if (
        situation.is_share_closed
        or situation.rule.synchronous
        or situation.is_inner_step
        or situation.reached <= situation.step
    ):
        return None
    return Action("replay", situation.step), f"the others have taken step {situation.reached}"


def catch_up_with_replicas(situation: _Situation) -> Decision | None:
    if situation.is_share_closed or not situation.is_inner_step or situation.reached - situation.step <= MAX_LOCAL_LAG:
        return None
    return Action("catch up", situation.reached), f"the others have taken step {situation.reached}"


def catch_up_with_leading_stage(situation: _Situation) -> Decision | None:
    behind_since = situation.view.behind_since
    if situation.is_share_closed or behind_since is None or situation.now - behind_since < RESUME_AFTER_S:
        return None
    return Action(
        "catch up", situation.view.leading_step
    ), f"another stage of the run is at step {situation.view.leading_step}"


def wait_for_tokens(situation: _Situation) -> Decision | None:
    """Waits while this replica still counts tokens for its step.

    | complete is | when |
    |---|---|
    | the step | this replica and the live others have together counted its tokens |
    | the share, asynchronous | it has its quota, and no microbatch that belongs to it is in progress |
    | the share, asynchronous | another replica closed its own CLOSE_AFTER_FRACTION of a step ago |
    """
    view, tokens = situation.view, situation.view.counts.tokens
    must_follow = situation.reached > situation.step and not situation.is_inner_step
    missing = situation.rule.target_tokens - tokens - count_tokens(situation.live, situation.step)
    if situation.is_share_closed or must_follow or missing <= 0:
        return None
    if situation.rule.synchronous:
        return WAIT, f"{missing} tokens are missing"
    closed_at = first_closed_at(situation.live, situation.step)
    timeout_s = min(CLOSE_AFTER_FRACTION * view.step_s, MAX_CLOSE_AFTER_S) if view.step_s else MAX_CLOSE_AFTER_S
    is_late = closed_at is not None and situation.now - closed_at >= timeout_s
    if is_late or (0 < view.quota <= tokens and not view.in_progress):
        return None
    return WAIT, f"{tokens} of the {view.quota} tokens of its share are counted"


def step_alone(situation: _Situation) -> Decision | None:
    if situation.is_share_closed or (situation.members and not situation.is_inner_step):
        return None
    if situation.view.counts.tokens == 0:
        return WAIT, "nothing was counted here; the others take the step"
    return Action("step"), "all tokens are counted"


def wait_for_answers(situation: _Situation) -> Decision | None:
    if not situation.members or situation.reachable:
        return None
    return WAIT, f"{', '.join(sorted(situation.members))} did not answer, and may still be alive"


def step_together(situation: _Situation) -> Decision:
    return Action("step together", situation.step), f"all tokens of step {situation.step} are counted"


def step_policy(
    step: int,
    replicas: Collection[PeerId],
    live: KnownReplicas,
    quota: int,
    rule: StepRule,
    *,
    is_inner: bool,
    by_device: bool = True,
) -> StepPolicy:
    """Returns the device thread's policy for the open step, number `step`: when it takes the step or closes its share.

    | the step is | own_tokens | closes_share |
    |---|---|---|
    | synchronous, or there are no `replicas` (`alone`) | the target less the tokens of `live`, at least 1 | no |
    | an inner step | quota, or the target if the quota is unknown | no |
    | an all-reduce | quota | if by_device, and the quota is known |

    replicas, live: as counting_replicas returns them. quota: tokens at which this replica's share is closed, 0 when
    unknown. by_device: False where origins wait for means: there the microbatches in progress still belong to the
    share, so that `decide` closes it, and not the device thread.
    """
    target = rule.target_tokens
    alone = not replicas
    if rule.synchronous or alone:
        return StepPolicy(target, True, step, tokens_to_go(live, step, target), alone)
    if is_inner:
        return StepPolicy(target, True, step, quota or target)
    return StepPolicy(target, True, step, quota, closes_share=quota > 0 and by_device)


# --- all-reduces, or inner steps and fragment syncs (DiLoCo)
#
# | the stage takes | a reducer wants, if most uplinks carry b bytes for each value and step |
# |---|---|
# | all-reduces | inner steps, if b < NEEDED_BYTES; in NEEDED_BYTES / b fragments, at least MIN_FRAGMENTS |
# | inner steps | all-reduces, if b >= RETURN_FACTOR * NEEDED_BYTES |
# | inner steps | NEEDED_BYTES / b fragments, if that is CHANGE_FACTOR times as many or as few as now |
#
# Most uplinks: those of replicas with all but MAX_SLOW_FRACTION of the tokens that all replicas count per second.
# When a change that all reducers of a round want takes effect says ChangeRule.


class ReplicaUplink(NamedTuple):
    """A replica's tokens per second, None if unknown, and the bytes that its uplink carries for each value and step.

    carried: infinite if nothing ever waits for the uplink.
    """

    rate: float | None
    carried: float = math.inf


def carried_by_most(uplinks: Sequence[ReplicaUplink]) -> float:
    """Returns the bytes for each value and step that most uplinks carry; infinite without uplinks.

    That is the least value such that replicas whose uplinks carry less have less than MAX_SLOW_FRACTION of all rates.
    An unknown rate counts as the median of the known ones.
    """
    known = [uplink.rate for uplink in uplinks if uplink.rate is not None]
    median = statistics.median(known) if known else 1.0
    rates = [median if uplink.rate is None else uplink.rate for uplink in uplinks]
    slower = 0.0
    for rate, uplink in sorted(zip(rates, uplinks, strict=True), key=lambda item: item[1].carried):
        slower += rate
        if slower >= MAX_SLOW_FRACTION * sum(rates):
            return uplink.carried
    return math.inf


def wanted_fragments(present: int, uplinks: Sequence[ReplicaUplink], most_fragments: int) -> tuple[int, str]:
    """Returns the number of fragments that a stage should have, or ALL_REDUCE, and the reason in words; see the table.

    present: the number that it has now, or ALL_REDUCE. uplinks: of all live replicas. most_fragments: the manifest's.
    """
    carried = carried_by_most(uplinks)
    if math.isinf(carried):
        reason = "most uplinks are never full"
    else:
        reason = f"most uplinks carry {carried:.2g} bytes for each value and step, gradients need {NEEDED_BYTES:.2g}"
    if carried >= NEEDED_BYTES * (1.0 if present == ALL_REDUCE else RETURN_FACTOR):
        return ALL_REDUCE if len(uplinks) > 1 else present, reason
    wanted = most_fragments if carried == 0 else min(math.ceil(NEEDED_BYTES / carried), most_fragments)
    wanted = max(wanted, MIN_FRAGMENTS)
    is_near = present != ALL_REDUCE and present / CHANGE_FACTOR < wanted < present * CHANGE_FACTOR
    return present if is_near else wanted, reason


class Wish(NamedTuple):
    """What kind of change a reducer wants for a stage, and since when it has wanted that without a break.

    kind: "none", "all-reduces", "more fragments" (inner steps instead of all-reduces, too) or "fewer fragments".
    since: in seconds, on the clock of `now`.
    """

    kind: str = "none"
    since: float = 0.0

    def after(self, present: int, wanted: int, now: float) -> Wish:
        """Returns the wish of a reducer that wants `wanted` fragments now, where the stage has `present`."""
        kind = "more fragments" if wanted > present else "fewer fragments"
        if wanted in (present, ALL_REDUCE):
            kind = "none" if wanted == present else "all-reduces"
        return self if kind == self.kind else Wish(kind, now)

    def is_held(self, now: float) -> bool:
        """Returns whether it has been wanted for WISH_S seconds, so that the reducer may ask for it."""
        return now - self.since >= WISH_S


# --- gradient compression
#
# Each of n replicas sends (n - 1) / n of its gradient to reducers, and its 1 / n of the mean to n - 1 members: in total
# 2 (n - 1) / n values for each element. Every sender chooses for itself, since a message names its format.


class MeasuredUplink(NamedTuple):
    """A peer's uplink. rate: measured while it was full, in bytes per second, None if it never was.

    steps: optimizer steps since the rate was last measured. Only a full uplink is measured; fewer bits fill it no more,
    so that one that has become faster would never be noticed. So the rate that counts grows with these steps, until
    more bits fill the uplink again.
    """

    rate: float | None = None
    steps: int = 0

    def after_step(self, rate: float | None) -> MeasuredUplink:
        """Returns the uplink after a further step. rate: as measured by now; the same as before if it was not full."""
        return MeasuredUplink(rate, self.steps + 1 if rate == self.rate else 0)

    @property
    def growth(self) -> float:
        return math.exp2(min(self.steps / DOUBLING_STEPS, MAX_DOUBLINGS))


class GradientCompression(NamedTuple):
    """The format in which a replica sends gradients, and the reason in words.

    is_limited: whether the uplink is too slow for the manifest's format. carried: bytes that it carries for each value
    and step; infinite if that is not known, because nothing waits for it.
    """

    name: WireName
    reason: str
    is_limited: bool = False
    carried: float = math.inf

    @property
    def fits(self) -> bool:
        return self.carried >= BYTES[self.name]


def choose_gradient_compression(
    largest: WireName, numel: int, replicas: int, uplink: MeasuredUplink, step_s: float | None, fraction: float
) -> GradientCompression:
    """Returns the largest format, up to the manifest's, whose bytes can be sent in a step; if none can, the smallest.

    A format fits if its bytes <= fraction * rate * growth * step_s, with the uplink's rate and growth; a replica sends
    2 * (n - 1) / n * numel values in a step. With an unknown rate or step_s, or for one replica, returns
    the manifest's.

    numel: elements of the stages held.
    replicas: n, the number of replicas, this one included.
    step_s: seconds in which all replicas count a step's tokens, None if unknown. Not the measured duration of steps: a
    full uplink stretches it, and the longer steps would seem to leave room for more bytes.
    largest: the manifest's format. fraction: part of the uplink that gradients may use.
    """
    if uplink.rate is None or step_s is None or replicas < 2:
        return GradientCompression(largest, f"{largest}: nothing waits for its uplink")
    values = 2 * (replicas - 1) / replicas * numel
    budget = fraction * uplink.rate * uplink.growth * step_s
    allowed = [name for name in WIRE_NAMES if BYTES[name] <= BYTES[largest]]
    fitting = [name for name in allowed if values * BYTES[name] <= budget]
    chosen = fitting[-1] if fitting else allowed[0]
    needed = values * BYTES[chosen]
    reason = f"{chosen}: {needed / 1e6:.3g} MB in a step of {step_s:.2g} s; {fraction:.0%} of its uplink of "
    reason += f"{uplink.rate * 8e-6:.3g} Mbit/s "
    if uplink.growth >= MENTIONED_GROWTH:
        reason += f"(taken as {uplink.growth:.2g} times that: it was never full for {uplink.steps} steps) "
    reason += f"carries {budget / 1e6:.3g} MB"
    if needed > budget:
        reason += ", which is too little"
    return GradientCompression(chosen, reason, chosen != largest or needed > budget, budget / values)
