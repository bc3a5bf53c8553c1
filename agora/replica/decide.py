"""Decides what a stage does next together with its replicas, and in which format it sends gradients. Pure.

docs/understand/averaging.md has the rules as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from agora_protocol.codec_names import WIRE_NAMES, WireName
from agora_protocol.ids import PeerId
from agora_protocol.limits import QUANTISER_BLOCK

from agora.core.sync_mode import EXACT, MIN_SLICES, StepPolicy
from agora.replica.view import (
    ActionConfig,
    KnownReplicas,
    OtherReplicas,
    OwnStage,
    count_tokens,
    counting_replicas,
    first_closed_at,
    live_replicas,
    step_to_catch_up_to,
    tokens_to_go,
    unreachable_replicas,
)

# --- next_action

# Decides what a stage does next together with its replicas. Pure.
#
# docs/understand/averaging.md has the rules as a table. ReplicaGroup carries out what is decided.

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


def next_action(now: float, own: OwnStage, others: OtherReplicas, config: ActionConfig) -> tuple[Action, str]:
    """Returns what the stage does next, by the first rule that applies, and the reason in words.

    The rules, in order: wait while leaving or busy; fetch if diverged; begin the slice round that is due; fetch, replay
    or catch up if behind the others or the leading stage; wait while tokens are missing; take the step, alone or, once
    others answer, together. docs/understand/averaging.md has them as a table. now: seconds on the clock of the times in
    `own` and `others`.
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
    listed_live = live_replicas(others.known, others.listed, now)
    reached = step_to_catch_up_to(listed_live, reachable, step, tokens, config.target_tokens)
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


def _why_incomplete(now: float, own: OwnStage, live: KnownReplicas, config: ActionConfig) -> str:
    step, tokens = own.counts.step, own.counts.tokens
    missing = config.target_tokens - tokens - count_tokens(live, step)
    if missing <= 0:
        return ""
    if config.synchronous:
        return f"{missing} tokens are missing"
    closed_at = first_closed_at(live, step)
    timeout_s = min(CLOSE_AFTER_FRACTION * own.step_s, MAX_CLOSE_AFTER_S) if own.step_s else MAX_CLOSE_AFTER_S
    is_late = closed_at is not None and now - closed_at >= timeout_s
    if is_late or (0 < own.quota <= tokens and not own.in_progress):
        return ""
    return f"{tokens} of the {own.quota} tokens of its share are counted"


def step_policy(
    step: int,
    replicas: Collection[PeerId],
    live: KnownReplicas,
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
        return StepPolicy(target, True, step, tokens_to_go(live, step, target), alone)
    if is_local:
        return StepPolicy(target, True, step, quota or target)
    return StepPolicy(target, True, step, quota, closes_share=quota > 0 and by_device)


# --- gradient_wire

# Chooses in how many bits a replica sends gradients, from what its uplink carries in a step. Pure.
#
# Each of n replicas sends (n - 1) / n of its gradient to owners, and its 1 / n of the mean to n - 1 members: in total
# 2 (n - 1) / n values for each element. Every sender chooses for itself, since a message names its format.

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


class GradientWire(NamedTuple):
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


def choose_gradient_wire(
    manifest_wire: WireName, numel: int, replicas: int, uplink: MeasuredUplink, step_s: float | None, fraction: float
) -> GradientWire:
    """Returns the largest format, up to `manifest_wire`, whose bytes can be sent in a step; if none can, the smallest.

    A format fits if its bytes <= fraction * rate * growth * step_s, with the uplink's rate and growth; a replica sends
    2 * (n - 1) / n * numel values in a step. With an unknown rate or step_s, or for one replica, returns
    `manifest_wire`.

    numel: elements of the stages held.
    replicas: n, the number of replicas, this one included.
    step_s: seconds in which all replicas count a step's tokens, None if unknown. Not the measured duration of steps: a
    full uplink stretches it, and the longer steps would seem to leave room for more bytes.
    fraction: part of the uplink that gradients may use.
    """
    if uplink.rate is None or step_s is None or replicas < 2:
        return GradientWire(manifest_wire, f"{manifest_wire}: nothing waits for its uplink")
    values = 2 * (replicas - 1) / replicas * numel
    budget = fraction * uplink.rate * uplink.growth * step_s
    allowed = [name for name in WIRE_NAMES if BYTES[name] <= BYTES[manifest_wire]]
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
    return GradientWire(chosen, reason, chosen != manifest_wire or needed > budget, budget / values)


NEEDED_BYTES: Final = 2 / 8 + 1 / 64  # bytes of a value in the fewest bits: normal2


# Replicas with less than this share of all tokens per second may have slower uplinks than the way to agree needs.
MAX_SLOW_SHARE: Final = 0.25


# Uplinks are fast enough to return to exact steps if they carry this many times the bytes of gradients.
RETURN_FACTOR: Final = 1.5


CHANGE_FACTOR: Final = 1.5  # the number of slices changes if it should be this many times as large, or as small


# Seconds for which an owner must have wanted a change before it asks for it: 2 * RATE_DECAY_S. RATE_DECAY_S * ln 3
# seconds after a stall, however long, measured rates are within RETURN_FACTOR of what they were.
WISH_S: Final = 20.0


class ReplicaUplink(NamedTuple):
    """A replica's tokens per second, None if unknown, and the bytes that its uplink carries for each value and step.

    carried: infinite if nothing ever waits for the uplink.
    """

    rate: float | None
    carried: float = math.inf


def carried_by_most(uplinks: Sequence[ReplicaUplink]) -> float:
    """Returns the bytes for each value and step that most uplinks carry; infinite without uplinks.

    That is the least value such that replicas whose uplinks carry less have less than MAX_SLOW_SHARE of all rates. An
    unknown rate counts as the median of the known ones.
    """
    known = [uplink.rate for uplink in uplinks if uplink.rate is not None]
    median = statistics.median(known) if known else 1.0
    rates = [median if uplink.rate is None else uplink.rate for uplink in uplinks]
    slower = 0.0
    for rate, uplink in sorted(zip(rates, uplinks, strict=True), key=lambda item: item[1].carried):
        slower += rate
        if slower >= MAX_SLOW_SHARE * sum(rates):
            return uplink.carried
    return math.inf


def wanted_slices(present: int, uplinks: Sequence[ReplicaUplink], most_slices: int) -> tuple[int, str]:
    """Returns the number of slices that a stage should have, or EXACT, and the reason in words; see the module's table.

    present: the number that it has now, or EXACT. uplinks: of all live replicas. most_slices: the manifest's number.
    """
    carried = carried_by_most(uplinks)
    if math.isinf(carried):
        reason = "most uplinks are never full"
    else:
        reason = f"most uplinks carry {carried:.2g} bytes for each value and step, gradients need {NEEDED_BYTES:.2g}"
    if carried >= NEEDED_BYTES * (1.0 if present == EXACT else RETURN_FACTOR):
        return EXACT if len(uplinks) > 1 else present, reason
    wanted = most_slices if carried == 0 else min(math.ceil(NEEDED_BYTES / carried), most_slices)
    wanted = max(wanted, MIN_SLICES)
    is_near = present != EXACT and present / CHANGE_FACTOR < wanted < present * CHANGE_FACTOR
    return present if is_near else wanted, reason


class Wish(NamedTuple):
    """What kind of change an owner wants for a stage, and since when it has wanted that without a break.

    kind: "none", "exact steps", "more slices" (local steps instead of exact ones, too) or "fewer slices". since: in
    seconds, on the clock of `now`.
    """

    kind: str = "none"
    since: float = 0.0

    def after(self, present: int, wanted: int, now: float) -> Wish:
        """Returns the wish of an owner that wants `wanted` slices now, where the stage has `present`."""
        kind = "more slices" if wanted > present else "fewer slices"
        if wanted in (present, EXACT):
            kind = "none" if wanted == present else "exact steps"
        return self if kind == self.kind else Wish(kind, now)

    def is_held(self, now: float) -> bool:
        """Returns whether it has been wanted for WISH_S seconds, so that the owner may ask for it."""
        return now - self.since >= WISH_S
