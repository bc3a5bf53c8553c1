"""Which optimizer steps of a stage are exact and which are local, and when the replicas change, by their uplinks. Pure.

Knows: which uplinks are too slow for gradients, rates of replicas, step numbers. Must not know: how an uplink is
measured (averaging.gradient_wire says what is too slow), calls, weights.

Every owner of a part answers whether it wants a change; if all owners of a round do, all replicas that apply its means
change at the same later step. So no replica has to ask, and no single owner of several can force a change.

| the stage takes | the owner wants a change if slow replicas have, of the rates of all | which steps change |
|---|---|---|
| exact steps | MIN_SLOW_SHARE or more | those from NOTICE_STEPS after the round's step on become local |
| local steps | less than MAX_SLOW_SHARE_TO_RETURN | those from NOTICE_PASSES passes over all slices on become exact |

A replica is slow if its uplink carries no gradients in the fewest bits. At least MIN_STEPS_BETWEEN steps lie between
two changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId
from agora_protocol.manifest import ALL_STEPS, Manifest
from agora_protocol.parts import slice_count

MIN_SLOW_SHARE: Final = 0.25
"""Share of the rates from which slow uplinks are reason enough for local steps, with which all replicas learn less."""
MAX_SLOW_SHARE_TO_RETURN: Final = 0.125
"""Share of the rates below which slow uplinks are no reason to go on with local steps."""
NOTICE_STEPS: Final = 3
"""Steps from an exact step to the first local one that its round may decide: two later shares may be closed already."""
NOTICE_PASSES: Final = 2
"""Passes over all slices from a slice round to the exact step that it may decide: replicas may be a pass apart."""
MIN_STEPS_BETWEEN: Final = 100
"""Minimum number of steps between two changes: to return, replicas fetch a whole state."""


class LocalSteps(NamedTuple):
    """Which optimizer steps of a stage are local: those numbered first to end - 1, counted from 0.

    In a local step every replica steps along its own gradient, and a slice of the weights is averaged afterwards. All
    other steps are exact: along the mean gradient of all replicas. Equal at all replicas of a stage, and part of its
    state. end: ALL_STEPS while it is not known when the local steps end.
    """

    first: int = ALL_STEPS
    end: int = ALL_STEPS

    def has(self, step: int) -> bool:
        """Returns whether step number `step` is local."""
        return self.first <= step < self.end


NO_LOCAL_STEPS: Final = LocalSteps()


def local_steps_of(manifest: Manifest) -> LocalSteps:
    """Returns the local steps with which a run begins: all after the manifest's exact ones; none if synchronous."""
    return LocalSteps(first=manifest.exact_steps)


def may_change(manifest: Manifest) -> bool:
    """Returns whether the run's stages may change between exact and local steps while it goes on.

    False for synchronous runs, where the manifest says when local steps begin, and where it says that there are none.
    """
    section = manifest.averaging
    is_free = section.exact_steps == ALL_STEPS and section.local_steps == "auto"
    return is_free and manifest.schedule.kind == "asynchronous"


def slow_share(rates: Mapping[PeerId, float | None], slow: Collection[PeerId]) -> float:
    """Returns the share of the sum of all rates that the `slow` replicas have; 0 if all rates are 0.

    rates: tokens per second of the stage's replicas; None, unknown, counts as the median of the known ones.
    """
    known = [rate for rate in rates.values() if rate is not None]
    median = statistics.median(known) if known else 1.0
    filled = {peer: median if rate is None else rate for peer, rate in rates.items()}
    total = sum(filled.values())
    return sum(filled[peer] for peer in slow if peer in filled) / total if total else 0.0


def wants_change(is_local: bool, rates: Mapping[PeerId, float | None], slow: Collection[PeerId]) -> tuple[bool, str]:
    """Returns whether a stage should change from exact steps to local ones, or back, and the reason in words.

    is_local: whether it takes local steps now. rates: tokens per second of its live replicas, None where unknown. slow:
    those of them whose uplinks are too slow for gradients in the fewest bits.
    """
    share = slow_share(rates, slow)
    reason = f"replicas with {share:.0%} of the stage's rate have uplinks too slow for gradients in 2 bits"
    if is_local:
        return len(rates) > 1 and share < MAX_SLOW_SHARE_TO_RETURN, reason
    return share >= MIN_SLOW_SHARE, reason


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """When a stage's steps change their kind, by the means that its replicas apply: equal at all of them.

    may_change: see the function. pass_steps: steps in which every slice has its round once.
    """

    may_change: bool
    pass_steps: int

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> ChangeRule:
        """Returns the rule of a run."""
        section = manifest.averaging
        return cls(may_change(manifest), section.every * slice_count(section.fraction))

    def after_exact_step(self, local: LocalSteps, step: int, is_change_wanted: bool) -> LocalSteps:
        """Returns which steps are local after the means of exact step `step` were applied.

        is_change_wanted: whether all of these means want a change. It is ignored if the stage may not change, within
        MIN_STEPS_BETWEEN steps of the last change, and when the first local step is decided already.
        """
        is_pending = step < local.first < ALL_STEPS
        is_early = local.end < ALL_STEPS and step < local.end + MIN_STEPS_BETWEEN
        if not self.may_change or not is_change_wanted or is_pending or is_early:
            return local
        return LocalSteps(first=step + NOTICE_STEPS)

    def after_slice_round(self, local: LocalSteps, step: int, is_change_wanted: bool) -> LocalSteps:
        """Returns which steps are local after the means of the slice round due after `step` steps were applied.

        is_change_wanted: whether all of these means want a change. It is ignored if the stage may not change, within
        MIN_STEPS_BETWEEN steps of the first local one, and when their end is decided already.
        """
        is_early = step < local.first + MIN_STEPS_BETWEEN
        if not self.may_change or not is_change_wanted or local.end < ALL_STEPS or is_early:
            return local
        return local._replace(end=step + NOTICE_PASSES * self.pass_steps)
