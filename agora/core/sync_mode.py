"""Which optimizer steps of a stage are exact and which local, in how many slices, and when that changes. Pure.

In an exact step all replicas step along the mean of their gradients. In a local step each steps along its own, and one
of n slices of the weights is averaged afterwards: all weights in n steps. Fewer slices learn more, and send more.

Every owner of a part answers how many slices it wants; if all owners of a round want something else than now, all
replicas that apply its means change at the same later step. So no replica has to ask, and no single owner of several
can force a change. An owner asks for a change only once it has wanted one of that kind for WISH_S seconds: rates that
are measured over some seconds are wrong for as long after a stall or a join.

| the stage takes | an owner wants, if most uplinks carry b bytes for each value and step | from which step on |
|---|---|---|
| exact steps | local steps, if b < NEEDED; in NEEDED / b slices, at least MIN_SLICES | NOTICE_STEPS after the round's |
| local steps | exact ones, if b >= RETURN_FACTOR * NEEDED | NOTICE_PASSES passes over all slices later |
| local steps | NEEDED / b slices, if that is CHANGE_FACTOR times as many or as few as now | the same |

NEEDED: the bytes of a value in the fewest bits. Most uplinks: those of replicas with all but MAX_SLOW_SHARE of the
tokens that all replicas count per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.manifest import ALL_STEPS, Manifest
from agora_protocol.parts import slice_count

EXACT: Final = 0  # as a number of slices: steps are exact, and no slices are averaged
NEEDED_BYTES: Final = 2 / 8 + 1 / 64  # bytes of a value in the fewest bits: normal2
# Minimum number of slices of local steps: in one slice they would send as much as exact steps, and learn less.
MIN_SLICES: Final = 2
# Replicas with less than this share of all tokens per second may have slower uplinks than the way to agree needs.
MAX_SLOW_SHARE: Final = 0.25
# Uplinks are fast enough to return to exact steps if they carry this many times the bytes of gradients.
RETURN_FACTOR: Final = 1.5
CHANGE_FACTOR: Final = 1.5  # the number of slices changes if it should be this many times as large, or as small
# Steps from an exact step to the first local one that its round may decide: two later shares may be closed already.
NOTICE_STEPS: Final = 3
# Passes over all slices from a slice round to the change that it may decide: replicas may be a pass apart.
NOTICE_PASSES: Final = 2
# Seconds for which an owner must have wanted a change before it asks for it: 2 * RATE_DECAY_S. RATE_DECAY_S * ln 3
# seconds after a stall, however long, measured rates are within RETURN_FACTOR of what they were.
WISH_S: Final = 20.0
# Minimum number of steps from one change to the next, if one is to exact steps: replicas fetch a whole state then.
MIN_STEPS_BETWEEN: Final = 100


class StepPlan(NamedTuple):
    """How a stage takes its steps: before step number `change_at` (counted from 0) in one way, from it on in another.

    slices, later_slices: the number of slices of local steps, or EXACT. Equal at all replicas, and part of their state.
    """

    slices: int = EXACT
    change_at: int = ALL_STEPS
    later_slices: int = EXACT

    def slices_at(self, step: int) -> int:
        """Returns the number of slices if step number `step` is local, EXACT if it is exact."""
        return self.slices if step < self.change_at else self.later_slices

    def is_local(self, step: int) -> bool:
        """Returns whether step number `step` is local."""
        return self.slices_at(step) != EXACT


ALL_EXACT: Final = StepPlan()


def first_step_plan(manifest: Manifest) -> StepPlan:
    """Returns the plan with which a run begins: local steps after the manifest's exact ones; none if synchronous."""
    if manifest.exact_steps == ALL_STEPS:
        return ALL_EXACT
    return StepPlan(EXACT, manifest.exact_steps, slice_count(manifest.averaging.fraction))


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


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """When a stage's step plan changes, by the means that its replicas apply: equal at all of them.

    may_change: whether it may at all: in asynchronous runs whose manifest leaves it to the links. every: local steps
    from one slice round to the next. most_slices: the manifest's number of slices. first: the run's first plan.
    """

    may_change: bool
    every: int
    most_slices: int
    first: StepPlan = ALL_EXACT

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> ChangeRule:
        """Returns the rule of a run."""
        section = manifest.averaging
        most_slices = slice_count(section.fraction)
        is_free = section.exact_steps == ALL_STEPS and section.local_steps == "auto" and most_slices >= MIN_SLICES
        may_change = is_free and manifest.schedule.kind == "asynchronous"
        return cls(may_change, section.every, most_slices, first_step_plan(manifest))

    def is_possible(self, plan: StepPlan, step: int) -> bool:
        """Returns whether a stage of this run that has taken `step` steps can have `plan`.

        It has the first plan, or one whose numbers of slices the rule allows, and whose change came or is near.
        """
        notice = max(NOTICE_STEPS, NOTICE_PASSES * self.every * max(plan.slices, 1))
        is_change = plan.slices != plan.later_slices and 0 < plan.change_at <= step + notice
        return plan == self.first or (is_change and all(map(self._may_become, (plan.slices, plan.later_slices))))

    def after_exact_step(self, plan: StepPlan, step: int, wanted: int) -> StepPlan:
        """Returns the plan after the means of exact step `step` were applied, all of which want `wanted` slices.

        It stays as it is if the stage may not change so, if a change is to come already, and within MIN_STEPS_BETWEEN
        steps of the last one.
        """
        is_settled = plan == ALL_EXACT or step >= plan.change_at + MIN_STEPS_BETWEEN
        if wanted == EXACT or not self._may_become(wanted) or not is_settled:
            return plan
        return StepPlan(EXACT, step + NOTICE_STEPS, wanted)

    def after_slice_round(self, plan: StepPlan, step: int, wanted: int) -> StepPlan:
        """Returns the plan after the means of the slice round due after `step` steps were applied.

        wanted: the number of slices that all of these means want, or EXACT. The plan stays as it is if the stage may
        not change so, or if a change is to come already or came lately: within MIN_STEPS_BETWEEN steps before a change
        to exact steps, within NOTICE_PASSES passes before any other.
        """
        present = plan.slices_at(step - 1)
        notice = NOTICE_PASSES * self.every * present
        pause = MIN_STEPS_BETWEEN if wanted == EXACT else notice
        if wanted == present or not self._may_become(wanted) or step < plan.change_at + pause:
            return plan
        return StepPlan(present, step + notice, wanted)

    def _may_become(self, wanted: int) -> bool:
        return self.may_change and (wanted == EXACT or MIN_SLICES <= wanted <= self.most_slices)
