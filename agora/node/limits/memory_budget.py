"""How much memory a machine offers to the stages of a run, and whether their optimizer state must lie beside a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from agora_protocol.errors import DeviceError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.cost.machine import Machine
from agora.cost.run_cost import run_cost
from agora.train.device import choose_device
from agora.train.memory import available_bytes


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The bytes that a daemon may take. host: of the machine's memory. gpu: of its GPU, None if stages use none."""

    host: int
    gpu: int | None = None

    def for_stages(self, base_bytes: int) -> Machine:
        """Returns this machine for the planner, with the memory that is left for stages; its speed of 1 means nothing.

        base_bytes: host memory that the daemon takes without stages. With a GPU, the rest of the host's memory is for
        optimizer state; without one, that rest is the device's memory.
        """
        rest = max(0, self.host - base_bytes)
        return Machine("this machine", 1.0, rest) if self.gpu is None else Machine("this machine", 1.0, self.gpu, rest)


def measure_offer(device: str, limit_gib: float) -> MemoryOffer:
    """Returns the memory that is free now, at most the owner's limit in GiB on each device (0: no limit).

    device: "auto", "cpu", "cuda" or "cuda:N". A missing one counts as the CPU: building the stages then raises.
    """
    host = available_bytes(torch.device("cpu"), within_limit=False)
    try:
        chosen = choose_device(device)
    except DeviceError:
        chosen = torch.device("cpu")
    gpu = available_bytes(chosen, within_limit=False) if chosen.type == "cuda" else None
    return limit_offer(MemoryOffer(host, gpu), limit_gib)


def limit_offer(free: MemoryOffer, limit_gib: float) -> MemoryOffer:
    """Returns an offer with at most `limit_gib` GiB of each kind of memory; 0: no limit."""
    if not limit_gib:
        return free
    limit = int(limit_gib * 2**30)
    return MemoryOffer(min(free.host, limit), None if free.gpu is None else min(free.gpu, limit))


def keeps_state_in_host(manifest: Manifest, span: Span, machine: Machine) -> bool:
    """Returns whether the optimizer state of `span` must lie in host memory, beside the GPU.

    Takes the first way to train, in the planner's order (RunCost.training_modes), that fits into `machine`, the memory
    for stages: with the usual number of microbatches in flight, else with one. Returns False if no way fits. The order
    prefers moving state to the host to recomputing forward passes.
    """
    for in_flight in (None, 1):
        cost = run_cost(manifest, in_flight=in_flight, can_offload=True)
        fitting = [mode for mode in cost.training_modes(span) if mode.need.fits(machine)]
        if fitting:
            return fitting[0].in_host
    return False
