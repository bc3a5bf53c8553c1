"""Computes what the run's stages ask of a machine, and measures what this machine can do, for placement.

Knows: the run's costs, this machine's memory and profile, the measured times of its work. Must not know: the view,
other peers, what is decided.
"""

from __future__ import annotations

from pathlib import Path

import torch
from agora_protocol.errors import AgoraError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.node import doctor
from agora.node.settings import Settings
from agora.plan.cost import RunCost
from agora.plan.cost_of_run import run_cost
from agora.plan.profile import find_profile
from agora.swarm.placement import Ability, StageDemands
from agora.threads import run_in_thread
from agora.train.device import choose_device
from agora.train.memory import available_bytes, resident_bytes


class OwnAbility:
    """Measures this machine's ability for placement. demands: what the run's stages ask of a machine.

    `ability` is complete once `look_at_machine` has returned, and more exact after each `measure`.
    """

    def __init__(self, manifest: Manifest, settings: Settings, folder: Path) -> None:
        """folder: where the profile of an earlier start lies."""
        self._manifest = manifest
        self._settings = settings
        self._folder = folder
        self._cost = run_cost(manifest)
        # With a limit, what this process has taken by now counts against it; else only what is free matters.
        self.base_bytes = max(doctor.BASE_BYTES, resident_bytes() if settings.memory_bytes else 0)
        self._longest: tuple[int, ...] = ()
        self._speed = 0.0
        self._bandwidth = 0.0
        self.demands = demands_of(self._cost)

    async def look_at_machine(self) -> None:
        """Finds out which spans fit into the memory that is free now, and how fast this machine computes.

        The speed comes from a profile that an earlier start has written, or that is measured now in about a second.
        Where that would take longer, it stays unknown (0) until `measure`.
        """
        self._longest = await run_in_thread(self._longest_spans)
        if not self._speed:
            self._speed = await run_in_thread(self._profiled_speed)

    def _longest_spans(self) -> tuple[int, ...]:
        """Returns for each first stage how many stages fit into the memory that is free now, see longest_spans."""
        free, settings = available_bytes(torch.device("cpu"), within_limit=False), self._settings
        allowed = doctor.allowed_bytes(free, settings.memory_gib) - self.base_bytes
        return longest_spans(run_cost(self._manifest, in_flight=1), allowed, settings.most_stages)

    def _profiled_speed(self) -> float:
        """Returns the speed by the machine's profile, in stages of mean work per second; 0 where there is none."""
        try:
            profile = find_profile(self._folder, self._manifest, choose_device(self._settings.device))
        except (AgoraError, RuntimeError):  # the device itself says what is wrong when stages are built
            return 0.0
        if profile is None:
            return 0.0
        stages = self._cost.stage_count
        mean_flops = sum(self._cost.flops(Span(stage, stage)) for stage in range(stages)) / stages
        return profile.flops / mean_flops / self._settings.slowdown

    @property
    def ability(self) -> Ability:
        """What this machine can do, as far as it is known: 0 for an unknown speed or bandwidth."""
        return Ability(self._speed, self._bandwidth, self._longest)

    def measure(self, span: Span, service_s: float, bandwidth: float | None) -> float:
        """Records how fast this machine is; returns the microbatches per second that it can do in `span`.

        service_s: device seconds of one microbatch in `span`. bandwidth: of the uplink, in bytes per second, or None.
        """
        capacity = 1.0 / max(service_s, 1e-9)
        self._speed = capacity * sum(self.demands.work[stage] for stage in span.stages)
        self._bandwidth = bandwidth or self._bandwidth
        return capacity


def demands_of(cost: RunCost) -> StageDemands:
    """Returns what the run's stages ask of a machine."""
    boundary_bytes = max(cost.forward_bytes, cost.backward_bytes)
    return StageDemands(cost.work, boundary_bytes, tuple(stage.state_bytes for stage in cost.stages))


def longest_spans(cost: RunCost, allowed_bytes: float, most_stages: int) -> tuple[int, ...]:
    """Returns for each first stage how many stages from it on fit into `allowed_bytes`; 0 if it does not fit itself.

    most_stages: the largest number to return, 0 for no limit.
    """
    count, length = cost.stage_count, 0
    longest: list[int] = []
    for first in range(count):
        length = max(0, length - 1)
        while length < min(most_stages or count, count - first):
            if cost.memory(Span(first, first + length)).device > allowed_bytes:
                break
            length += 1
        longest.append(length)
    return tuple(longest)
