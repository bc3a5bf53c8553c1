"""The memory that the daemon may take: what is free, what stages need, and how it keeps within its owner's limit."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from agora_protocol.errors import DeviceError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.core.machine_limits import OwnersMemory, least_memory
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import Machine
from agora.observe import events
from agora.pipeline.work_ledger import WorkLedger
from agora.train.device import choose_device, product_dtype
from agora.train.memory import available_bytes, give_back_freed_memory, limit_memory, resident_bytes

BASE_BYTES: Final = 256 * 2**20  # memory of a daemon without stages: torch, the event loop, p2pd
_ADVICE: Final = "free some, or hold fewer stages with --stages."
POLL_INTERVAL_S: Final = 0.5  # seconds between two readings: what is allocated in between may go beyond the limit
# Fractions of the limit at which the reactions of MemoryGuard begin and end.
EASE_FRACTION, SHRINK_FRACTION, REFUSE_FRACTION = 0.8, 0.85, 0.95
# Readings in a row above the limit, with nothing in progress, after which the daemon leaves.
MAX_POLLS_OVER_LIMIT: Final = 60
OWNERS_LIMIT: Final = "memory_gib, its owner's limit"
SHORT: Final = "short of memory"  # completes "this peer is ..." for requesters whose work is refused


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The bytes that a daemon may take. host: of the machine's memory. gpu: of its GPU, None if stages use none.

    host_limit: what limits `host`, in words; "" if nobody asked. in_16_bits: whether layers multiply in bf16
    or fp16.
    """

    host: int
    gpu: int | None = None
    host_limit: str = field(default="", compare=False)
    in_16_bits: bool = False

    def for_stages(self, base_bytes: int) -> Machine:
        """Returns this machine for the planner, with the memory left for stages. Its speed of 1 is a placeholder.

        base_bytes: host memory that the daemon takes without stages. With a GPU, the rest of the host's memory is for
        optimizer state; without one, that rest is the device's memory.
        """
        rest = max(0, self.host - base_bytes)
        return Machine("this machine", 1.0, rest) if self.gpu is None else Machine("this machine", 1.0, self.gpu, rest)


def measure_budget(device: str, owners: OwnersMemory, dtype: torch.dtype | None = None) -> MemoryBudget:
    """Returns the memory that is free now, at most what its owner allows.

    device: as for choose_device. A missing one counts as the CPU: building the stages then raises. dtype: of products;
    None: that of the device.
    """
    host = available_bytes(torch.device("cpu"), within_limit=False)
    try:
        chosen = choose_device(device)
    except DeviceError:
        chosen = torch.device("cpu")
    gpu = available_bytes(chosen, within_limit=False) if chosen.type == "cuda" else None
    in_16_bits = (dtype or product_dtype(chosen)) != torch.float32
    budget = MemoryBudget(host, gpu, least_memory().source, in_16_bits=in_16_bits)
    return limit_budget(budget, owners)


def limit_budget(free: MemoryBudget, owners: OwnersMemory) -> MemoryBudget:
    """Returns a budget of at most what the owner allows."""
    gpu = min(free.gpu, owners.gpu) if free.gpu is not None and owners.gpu else free.gpu
    if not owners.host or free.host <= owners.host:
        return replace(free, gpu=gpu)
    return replace(free, host=owners.host, gpu=gpu, host_limit=OWNERS_LIMIT)


def keeps_state_in_host(manifest: Manifest, span: Span, budget: MemoryBudget, base_bytes: int = BASE_BYTES) -> bool:
    """Returns whether the optimizer state of `span` must lie in host memory, beside the GPU.

    Takes the first way to train, in the planner's order (RunCost.training_modes), that fits into the memory for stages:
    with the usual number of microbatches in flight, else with one. Returns False if no way fits. The order
    prefers moving state to the host to recomputing forward passes.
    """
    machine = budget.for_stages(base_bytes)
    for in_flight in (None, 1):
        cost = run_cost(manifest, in_16_bits=budget.in_16_bits, in_flight=in_flight, can_offload=True)
        fitting = [mode for mode in cost.training_modes(span) if mode.need.fits(machine)]
        if fitting:
            return fitting[0].in_host
    return False


def check_memory(manifest: Manifest, span: Span, budget: MemoryBudget, base_bytes: int = BASE_BYTES) -> str:
    """Returns a text about the memory that daemon and span need at least. Raises OutOfMemory if it gets less.

    On a GPU the optimizer's state may lie in host memory. base_bytes: host memory of the daemon without stages.
    """
    if budget.gpu is not None:
        return _check_gpu_memory(manifest, span, budget, base_bytes)
    need = needed_memory(manifest, span, base_bytes, in_16_bits=budget.in_16_bits)
    if need > budget.host:
        raise OutOfMemory(
            f"Stages {span} need {_in_mib(need)} of memory and {_in_mib(budget.host)} may be used"
            f"{_by(budget.host_limit)}; {_ADVICE}"
        )
    return f"{_in_mib(need)} of {_in_mib(budget.host)} memory needed{_by(budget.host_limit)}"


def _check_gpu_memory(manifest: Manifest, span: Span, budget: MemoryBudget, base_bytes: int) -> str:
    from agora.model import family_of

    machine = budget.for_stages(base_bytes)
    family = family_of(manifest.model)
    for place, state_in_host in (("", False), (", the optimizer's state in host memory", True)):
        need = family.min_memory(manifest, span, in_16_bits=budget.in_16_bits, state_in_host=state_in_host)
        if need.fits(machine):
            return f"{_in_mib(need.device)} of {_in_mib(machine.memory)} GPU memory needed{place}"
    raise OutOfMemory(
        f"Stages {span} need {_in_mib(need.device)} of GPU memory and {_in_mib(need.host)} of host memory at least, "
        f"and {_in_mib(machine.memory)} and {_in_mib(machine.host_memory)} may be used; {_ADVICE}"
    )


def needed_memory(manifest: Manifest, span: Span, base_bytes: int = BASE_BYTES, *, in_16_bits: bool = False) -> int:
    """Returns the least bytes of memory of a daemon that trains `span` without a GPU: `base_bytes`, and the span's.

    in_16_bits: layers multiply in bf16 or fp16.
    """
    from agora.model import family_of

    return base_bytes + int(family_of(manifest.model).min_memory(manifest, span, in_16_bits=in_16_bits).device)


class Reaction(enum.Enum):
    """What the daemon does after one reading of its memory.

    SHRINK: gives freed memory back to the system and reduces the slots. REFUSE: also refuses new work. LEAVE: also
    leaves the run, and ends.
    """

    NOTHING = "nothing"
    SHRINK = "shrink"
    REFUSE = "refuse"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What MemoryGuard keeps between readings. is_refusing: whether new work is refused.

    polls_over: how many readings in a row were above the limit with nothing in progress.
    """

    is_refusing: bool = False
    polls_over: int = 0


def decide_reaction(state: MemoryState, used: int, limit: int, in_progress: int) -> tuple[MemoryState, Reaction]:
    """Returns the next state and the reaction to one reading of the memory.

    LEAVE after MAX_POLLS_OVER_LIMIT readings in a row above the limit with nothing in progress; REFUSE from
    REFUSE_FRACTION of the limit until it is under EASE_FRACTION; SHRINK from SHRINK_FRACTION on; otherwise NOTHING.
    used: resident bytes. limit: how many are allowed. in_progress: number of microbatches in progress.
    """
    fraction = used / limit
    polls_over = state.polls_over + 1 if fraction > 1.0 and in_progress == 0 else 0
    if polls_over >= MAX_POLLS_OVER_LIMIT:
        return replace(state, polls_over=polls_over), Reaction.LEAVE
    if fraction >= REFUSE_FRACTION or (state.is_refusing and fraction >= EASE_FRACTION):
        return MemoryState(True, polls_over), Reaction.REFUSE
    return MemoryState(False, polls_over), Reaction.SHRINK if fraction >= SHRINK_FRACTION else Reaction.NOTHING


class MemoryGuard:
    """Keeps the daemon within its owner's limit, by taking less work before the kernel kills anything.

    | resident memory, of the limit | what follows |
    |---|---|
    | under EASE_FRACTION | nothing; new work is taken again |
    | SHRINK_FRACTION and more | at each reading, freed memory goes back to the kernel, and the slots are cut |
    | REFUSE_FRACTION and more | new work is refused as well, until it is under EASE_FRACTION |
    | above 1, idle, for MAX_POLLS_OVER_LIMIT readings | the daemon leaves in order, and says what it needs |

    A GPU's memory has the same limit: torch refuses what goes beyond, which costs a slot, or is a clean error at the
    start.
    """

    def __init__(self, limit_bytes: int, ledger: WorkLedger, report: events.Report) -> None:
        self._limit = limit_bytes
        self._ledger = ledger
        self._report = report
        self._state = MemoryState()

    async def run(self) -> None:
        """Reads the memory and reacts to it, until cancelled. Raises OutOfMemory if the daemon must leave."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.react_to(await asyncio.to_thread(resident_bytes))

    def react_to(self, used: int) -> None:
        """Reacts to one reading of the resident bytes (`used`), as decide_reaction decides.

        It has the ledger refuse new work or take it again, and reports OwnerTold when the refusals begin. At each
        reaction but NOTHING it returns freed memory to the system and cuts the slots. Then it raises OutOfMemory if the
        reaction is LEAVE.
        """
        former = self._state
        self._state, reaction = decide_reaction(former, used, self._limit, self._ledger.taken)
        self._ledger.set_shortage(SHORT if self._state.is_refusing else "")
        if self._state.is_refusing and not former.is_refusing:
            self._report(events.OwnerTold(f"{self._describe(used)}: it takes no new work until some is free"))
        if reaction is not Reaction.NOTHING:
            give_back_freed_memory()
            self._ledger.reduce_slots(f"the owner's limit of memory is near: {self._describe(used)}")
        if reaction is Reaction.LEAVE:
            raise OutOfMemory(
                f"{self._describe(used)}, with no work in progress; raise --memory, or hold fewer stages."
            )

    def _describe(self, used: int) -> str:
        return f"{used / 2**20:,.0f} MiB of the {self._limit / 2**20:,.0f} MiB allowed are in use"


def limit_device(name: str, owners: OwnersMemory) -> None:
    """Sets the memory limits of this process, which available_bytes keeps to; on a GPU also torch's own.

    name: the device setting, such as "auto" or "cuda:1". Raises DeviceError when there is no such device.
    """
    limit_memory(owners)
    device = choose_device(name)
    if device.type == "cuda" and owners.gpu:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, owners.gpu / total), device)


def _by(limit: str) -> str:
    return f" (limited by {limit})" if limit else ""


def _in_mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
