"""Decides when a run ends: whether it is over, at which step its stages stop, and what its origins still send. Pure.

A run is over once every one of its stages has taken `total_steps` optimizer steps. A peer knows its own stages' steps;
of other stages it sees what their peers publish, which is some seconds old.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from agora.core.live_manifest import LiveManifest
from agora.swarm.view import View

# What an origin still sends: "" all that it can; "last" what other stages may lack for their last step; "over" nothing.
OriginEnd = Literal["", "last", "over"]


def has_ended(
    view: View, stage_count: int, total_steps: int, own_steps: Mapping[int, int] = MappingProxyType({})
) -> bool:
    """Returns whether every stage has taken `total_steps`; False for 0, a run without an end.

    own_steps: steps of the stages that this peer holds; no claim of others ends the run before these have ended. For
    another stage its median replica counts (of two, the higher one), so that one peer's claim decides nothing.
    """

    def step_of(stage: int) -> int:
        steps = [seen.step_of(stage) for seen in view.replicas(stage)]
        return own_steps.get(stage, statistics.median_high(steps) if steps else 0)

    return total_steps > 0 and all(step_of(stage) >= total_steps for stage in range(stage_count))


class RunEnd:
    """The end of a run as a peer sees it that holds stages.

    Each method gets the peer's present view, and `own_steps`, the steps that each of its stages has taken. An amendment
    can move the end: the manifest in force says where it is.
    """

    def __init__(self, live: LiveManifest, *, goes_on: bool) -> None:
        """goes_on: this peer's owner has chosen that it trains on after the end."""
        self._live = live
        self._goes_on = goes_on
        self._is_synchronous = live.core.schedule.kind == "synchronous"
        self._stage_count = live.core.stage_count
        self._over_at = 0  # the total_steps that every stage was seen to have taken

    @property
    def total_steps(self) -> int:
        """After how many steps the run ends for this peer; 0 where its owner goes on."""
        return 0 if self._goes_on else self._live.total_steps

    def has_ended(self, view: View, own_steps: Mapping[int, int]) -> bool:
        """Returns whether every stage has taken the run's last step, also where the owner goes on; see has_ended."""
        return has_ended(view, self._stage_count, self._live.total_steps, own_steps)

    def is_over(self, view: View, own_steps: Mapping[int, int]) -> bool:
        """Returns whether every stage was once seen to have ended; always False where the owner goes on."""
        total_steps = self._live.total_steps
        if not self._goes_on and self.has_ended(view, own_steps):
            # It stays over when a peer leaves, or comes back and has not said yet how many steps it has taken.
            self._over_at = total_steps
        return self._over_at == total_steps

    def stops_at(self, view: View, own_steps: Mapping[int, int]) -> int:
        """Returns after how many steps this peer's stages stop; 0 if they go on."""
        # Origins send on until they see that all stages have ended, which takes the directory some seconds: the stages
        # must not step along that. Of peers of the run only those whose owners go on take more steps.
        total_steps = self._live.total_steps
        if self._goes_on:
            return 0
        if self._is_synchronous:  # replicas step together or not at all, so none could show that it goes on
            return 0 if self.is_over(view, own_steps) else total_steps
        goes_on = any(step > total_steps for seen in view.peers.values() for step in seen.steps)
        return 0 if goes_on else total_steps

    def of_origin(self, view: View, own_steps: Mapping[int, int]) -> OriginEnd:
        """Returns what this peer's origin still sends; `own_steps` has stage 0."""
        if self._goes_on or own_steps[0] < self._live.total_steps:
            return ""
        if self.is_over(view, own_steps) or self._is_a_stage_unknown(view, own_steps):
            return "over"
        return "last"

    def _is_a_stage_unknown(self, view: View, own_steps: Mapping[int, int]) -> bool:
        # It may have taken all of its steps: a peer that joins an ended run must not begin to draw.
        others = (stage for stage in range(self._stage_count) if stage not in own_steps)
        return any(not any(seen.steps for seen in view.replicas(stage)) for stage in others)
