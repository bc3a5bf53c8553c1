"""Computes what the run's stages need of a machine, and measures what this machine can do, for placement."""

from __future__ import annotations

from pathlib import Path

import torch
from agora_protocol.errors import AgoraError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.core.machine_limits import usable_threads
from agora.core.tasks import run_in_thread
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import Machine, RunCost
from agora.node.limits.memory import BASE_BYTES, measure_budget
from agora.node.settings import Settings
from agora.swarm.stage_capacity import MachineCapacity, StageNeeds
from agora.train.device import choose_device
from agora.train.machine_profile import find_product_dtype, find_profile
from agora.train.memory import resident_bytes


class CapacityProbe:
    """What this machine can do, for placement, as measured so far. needs: of the run's stages.

    `machine` has the spans that fit once `assess_machine` has returned, and a measured speed after
    `record_measurement`. base_bytes: memory that the daemon takes without stages. dtype: of products on its device;
    None before `assess_machine`, and for one that cannot be used.
    """

    def __init__(self, manifest: Manifest, settings: Settings, folder: Path) -> None:
        """folder: where the profile of an earlier start lies, and a new one is written."""
        self._manifest = manifest
        self._settings = settings
        self._folder = folder
        self._cost = run_cost(manifest)
        # If the owner set a limit, what this process has taken by now counts against it. Otherwise only what is free
        # matters.
        self.base_bytes = max(BASE_BYTES, resident_bytes() if settings.owners_memory.host else 0)
        self._max_span_lengths: tuple[int, ...] = ()
        self._speed = 0.0
        self._bandwidth = 0.0
        self.dtype: torch.dtype | None = None
        self.needs = needs_of(self._cost)

    async def assess_machine(self) -> None:
        """Finds out in which precision this machine computes, which spans fit into the memory that is free now, and how
        fast it computes them.

        Sets torch's number of threads first: the owner's, else as many as compute at the same time here.

        The speed comes from a profile that an earlier start has written, or that is measured now in about a second. If
        measuring would take longer, or fails, the speed stays unknown (0) until `record_measurement`. A speed once
        known is kept.
        """
        # The speed is measured with the same threads that will compute. Without a limit torch takes all cores, even
        # where a quota or cpuset leaves few: then its threads mostly wait for each other.
        torch.set_num_threads(self._settings.threads or min(torch.get_num_threads(), usable_threads()))
        self.dtype = self.dtype or await run_in_thread(self._find_dtype)
        self._max_span_lengths = await run_in_thread(self._longest_spans)
        if not self._speed:
            self._speed = await run_in_thread(self._profiled_speed)

    def _find_dtype(self) -> torch.dtype | None:
        if self._settings.precision == "float32":
            return torch.float32
        try:
            return find_product_dtype(self._folder, self._manifest, choose_device(self._settings.device))
        except (AgoraError, RuntimeError):  # the device itself says what is wrong when stages are built
            return None

    def _longest_spans(self) -> tuple[int, ...]:
        budget = measure_budget(self._settings.device, self._settings.owners_memory, self.dtype)
        cost = run_cost(self._manifest, in_16_bits=budget.in_16_bits, in_flight=1)
        return longest_spans(cost, budget.for_stages(self.base_bytes), self._settings.most_stages)

    def _profiled_speed(self) -> float:
        try:
            device = choose_device(self._settings.device)
            profile = find_profile(self._folder, self._manifest, device, dtype=self.dtype)
        except (AgoraError, RuntimeError):  # the device itself says what is wrong when stages are built
            return 0.0
        if profile is None:
            return 0.0
        stages = self._cost.stage_count
        mean_flops = sum(self._cost.flops(Span(stage, stage)) for stage in range(stages)) / stages
        return profile.flops / mean_flops / self._settings.slowdown

    @property
    def machine(self) -> MachineCapacity:
        return MachineCapacity(self._speed, self._bandwidth, self._max_span_lengths)

    def record_measurement(self, span: Span, service_s: float, bandwidth: float | None) -> float:
        """Records this machine's speed and uplink; returns the microbatches per second that it can do in `span`.

        service_s: device seconds of one microbatch in `span`. bandwidth: of the uplink, in bytes per second; None keeps
        the one recorded last.
        """
        capacity = 1.0 / max(service_s, 1e-9)
        self._speed = capacity * sum(self.needs.work[stage] for stage in span.stages)
        self._bandwidth = bandwidth or self._bandwidth
        return capacity


def needs_of(cost: RunCost) -> StageNeeds:
    """Returns what the run's stages need: work and state bytes of each, and the larger boundary's bytes."""
    boundary_bytes = max(cost.forward_bytes, cost.backward_bytes)
    return StageNeeds(cost.work, boundary_bytes, tuple(stage.state_bytes for stage in cost.stages))


def longest_spans(cost: RunCost, machine: Machine, most_stages: int) -> tuple[int, ...]:
    """Returns, for each first stage, how many stages from it on fit into the memory; 0 if not even that one does.

    Where the machine has host memory beside its device's, optimizer state may lie there. most_stages: the largest
    number to return, 0 for no limit.
    """
    count = cost.stage_count
    length = 0
    longest: list[int] = []
    for first in range(count):
        length = max(0, length - 1)
        while length < min(most_stages or count, count - first):
            span = Span(first, first + length)
            if not any(cost.memory(span, in_host=in_host).fits(machine) for in_host in (False, True)):
                break
            length += 1
        longest.append(length)
    return tuple(longest)
