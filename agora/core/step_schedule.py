"""How the replicas of a stage stay in step: by all-reduces of gradients, or by inner steps and fragment syncs. Pure.

In an all-reduce step all replicas step along the mean of their gradients. In an inner step (DiLoCo) each steps along
its own, and after every `averaging.every` of them one of n fragments of the weights is averaged: all weights in n times
as many. Fewer fragments learn more, and send more.

Every reducer of a shard answers how many fragments it wants; if all reducers of a round want something else than now,
all replicas that apply its means change at the same later step. So no vote is needed, and no single reducer of several
can force a change. A reducer asks only once it has wanted a change of that kind for a while: rates that are measured
over some seconds are wrong for as long after a stall or a join.

| the stage takes | and is told to take | from which step on |
|---|---|---|
| all-reduces | inner steps | NOTICE_STEPS after the round's |
| inner steps | all-reduces, or another number of fragments | NOTICE_PASSES passes over all fragments later |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import ALL_STEPS
from agora_protocol.parts import MIN_FRAGMENTS, fragment_count

from agora.core.live_manifest import LiveManifest

ALL_REDUCE: Final = 0  # as a number of fragments: gradients are averaged, and no fragments
# Steps from an all-reduce to the first inner step that its round may decide: two later shares may be closed already.
NOTICE_STEPS: Final = 3
# Passes over all fragments from a fragment sync to the change that it may decide: replicas may be a pass apart.
NOTICE_PASSES: Final = 2
# Minimum number of steps from one change to the next, if one is to all-reduces: replicas fetch a whole state then.
MIN_STEPS_BETWEEN: Final = 100


class SyncSchedule(NamedTuple):
    """How a stage takes its steps: before step number `change_at` (counted from 0) in one way, from it on in another.

    fragments, later_fragments: their number while the stage takes inner steps, or ALL_REDUCE. Equal at all replicas,
    and part of their state.
    """

    fragments: int = ALL_REDUCE
    change_at: int = ALL_STEPS
    later_fragments: int = ALL_REDUCE

    def fragments_at(self, step: int) -> int:
        """Returns the number of fragments if step number `step` is an inner step, else ALL_REDUCE."""
        return self.fragments if step < self.change_at else self.later_fragments

    def is_inner(self, step: int) -> bool:
        """Returns whether step number `step` is an inner step."""
        return self.fragments_at(step) != ALL_REDUCE


ONLY_ALL_REDUCE: Final = SyncSchedule()


def first_sync_schedule(manifest: Manifest) -> SyncSchedule:
    """Returns the sync schedule of a run's start: inner steps after the manifest's all-reduces; none if synchronous."""
    if manifest.exact_steps == ALL_STEPS:
        return ONLY_ALL_REDUCE
    return SyncSchedule(ALL_REDUCE, manifest.exact_steps, fragment_count(manifest.averaging.fraction))


@dataclass(frozen=True, slots=True)
class SyncChangeRule:
    """When a stage's sync schedule changes, by the means that its replicas apply: equal at all of them.

    may_change: whether it may at all: in asynchronous runs whose manifest leaves it to the links. every: inner steps
    from one fragment sync to the next. most_fragments: the manifest's number. first: the run's first sync schedule.
    """

    may_change: bool
    every: int
    most_fragments: int
    first: SyncSchedule = ONLY_ALL_REDUCE

    @classmethod
    def of_run(cls, live: LiveManifest) -> SyncChangeRule:
        """Returns the rule by which a state of any step is judged: with the most fragments that a step may have."""
        rules = [cls.from_manifest(manifest) for manifest in live.of_all_steps]
        return replace(cls.from_manifest(live.core), most_fragments=max(rule.most_fragments for rule in rules))

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> SyncChangeRule:
        """manifest: the one in force at the step whose means are applied."""
        section = manifest.averaging
        most_fragments = fragment_count(section.fraction)
        is_free = section.exact_steps == ALL_STEPS and section.local_steps == "auto" and most_fragments >= MIN_FRAGMENTS
        may_change = is_free and manifest.schedule.kind == "asynchronous"
        return cls(may_change, section.every, most_fragments, first_sync_schedule(manifest))

    def is_possible(self, sync_schedule: SyncSchedule, step: int) -> bool:
        """Returns whether a stage of this run that has taken `step` steps can have `sync_schedule`.

        It has the first sync schedule, or one whose numbers of fragments the rule allows and whose change came or is
        near.
        """
        notice = max(NOTICE_STEPS, NOTICE_PASSES * self.every * max(sync_schedule.fragments, 1))
        is_change = (
            sync_schedule.fragments != sync_schedule.later_fragments and 0 < sync_schedule.change_at <= step + notice
        )
        return sync_schedule == self.first or (
            is_change and all(map(self._may_become, (sync_schedule.fragments, sync_schedule.later_fragments)))
        )

    def after_all_reduce(self, sync_schedule: SyncSchedule, step: int, wanted: int) -> SyncSchedule:
        """Returns the sync schedule after the means of all-reduce `step`, all of which want `wanted` fragments.

        It stays as it is if the stage may not change so, if a change is to come already, and within MIN_STEPS_BETWEEN
        steps of the last one.
        """
        is_settled = sync_schedule == ONLY_ALL_REDUCE or step >= sync_schedule.change_at + MIN_STEPS_BETWEEN
        if wanted == ALL_REDUCE or not self._may_become(wanted) or not is_settled:
            return sync_schedule
        return SyncSchedule(ALL_REDUCE, step + NOTICE_STEPS, wanted)

    def after_fragment_sync(self, sync_schedule: SyncSchedule, step: int, wanted: int) -> SyncSchedule:
        """Returns the sync schedule after the means of the fragment sync due after `step` steps were applied.

        wanted: the number of fragments that all of these means want, or ALL_REDUCE. The sync schedule stays as it is if
        the stage may not change so, or if a change is to come already or came lately: within MIN_STEPS_BETWEEN steps
        before a change to all-reduces, within NOTICE_PASSES passes before any other.
        """
        present = sync_schedule.fragments_at(step - 1)
        notice = NOTICE_PASSES * self.every * present
        pause = MIN_STEPS_BETWEEN if wanted == ALL_REDUCE else notice
        if wanted == present or not self._may_become(wanted) or step < sync_schedule.change_at + pause:
            return sync_schedule
        return SyncSchedule(present, step + notice, wanted)

    def _may_become(self, wanted: int) -> bool:
        return self.may_change and (wanted == ALL_REDUCE or MIN_FRAGMENTS <= wanted <= self.most_fragments)
