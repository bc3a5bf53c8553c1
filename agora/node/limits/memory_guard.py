"""Keeps the daemon within the memory that its owner allows, by taking less work before the kernel kills anything.

| resident memory, of the limit | what follows |
|---|---|
| under EASE_FRACTION | nothing; new work is taken again |
| SHRINK_FRACTION and more | at each reading, freed memory goes back to the kernel, and the slots are cut |
| REFUSE_FRACTION and more | new work is refused as well, until it is under EASE_FRACTION |
| above 1, idle, for MAX_POLLS_OVER_LIMIT readings | the daemon leaves in order, and says what it needs |

A GPU's memory has the same limit: torch refuses what goes beyond, which costs a slot, or is a clean error at the start.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from agora_protocol.errors import OutOfMemory

from agora.observe import events
from agora.train.device import choose_device
from agora.train.memory import give_back_freed_memory, limit_memory, resident_bytes

POLL_S: Final = 0.5  # seconds between two readings: what is allocated in between may go beyond the limit
# Fractions of the limit at which the reactions of the table above begin and end.
EASE_FRACTION, SHRINK_FRACTION, REFUSE_FRACTION = 0.8, 0.85, 0.95
# Readings in a row above the limit, with nothing in progress, after which the daemon leaves.
MAX_POLLS_OVER_LIMIT: Final = 60
SHORT: Final = "short of memory"  # completes "this peer is ..." for callers whose work is refused


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


def judge_memory(state: MemoryState, used: int, limit: int, in_progress: int) -> tuple[MemoryState, Reaction]:
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


class Slots(Protocol):
    """Protocol: what the guard needs of a work ledger, which has a slot for each microbatch in progress."""

    shortage: str  # completes "this peer is ..." while new work is refused for lack of memory; "" while it is taken

    @property
    def taken(self) -> int:
        """Number of microbatches in progress."""

    def reduce_slots(self, reason: str) -> None:
        """Lowers the number of slots to one fewer than are taken or offered now, at least 1. reason: for the log."""


class MemoryGuard:
    """Reads the memory of this process and its children every POLL_S, and takes slots away when memory is short.

    slots: the work ledger, which has a slot for each microbatch in progress.
    """

    def __init__(self, limit_bytes: int, slots: Slots, report: events.Report) -> None:
        self._limit = limit_bytes
        self._slots = slots
        self._report = report
        self._state = MemoryState()

    async def run(self) -> None:
        """Reads the memory every POLL_S, until cancelled, and reacts. Raises OutOfMemory if the daemon must leave."""
        while True:
            await asyncio.sleep(POLL_S)
            self.react_to(await asyncio.to_thread(resident_bytes))

    def react_to(self, used: int) -> None:
        """Reacts to one reading of the resident bytes (`used`), as judge_memory decides.

        Has the ledger refuse new work or take it again, and reports OwnerTold when the refusals begin. At each reaction
        but NOTHING, returns freed memory to the system and cuts the slots. Then raises OutOfMemory if the reaction is
        LEAVE.
        """
        former = self._state
        self._state, reaction = judge_memory(former, used, self._limit, self._slots.taken)
        self._slots.shortage = SHORT if self._state.is_refusing else ""
        if self._state.is_refusing and not former.is_refusing:
            self._report(events.OwnerTold(f"{self._describe(used)}: it takes no new work until some is free"))
        if reaction is not Reaction.NOTHING:
            give_back_freed_memory()
            self._slots.reduce_slots(f"the owner's limit of memory is near: {self._describe(used)}")
        if reaction is Reaction.LEAVE:
            raise OutOfMemory(f"{self._describe(used)}, with no work in progress; raise --memory, or hold fewer stages")

    def _describe(self, used: int) -> str:
        return f"{used / 2**20:,.0f} MiB of the {self._limit / 2**20:,.0f} MiB allowed are in use"


def limit_device(name: str, limit_bytes: int) -> None:
    """Sets the memory limit of this process, which available_bytes keeps to; on a GPU also torch's own limit.

    name: the device setting, such as "auto" or "cuda:1". Raises DeviceError when there is no such device.
    """
    limit_memory(limit_bytes)
    device = choose_device(name)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
