"""Keeps the daemon within the memory that its owner allows, by taking less work before the kernel kills anything.

Knows: resident memory, the limit, the table below. Must not know: what the memory is used for.

| resident memory, of the limit | what follows |
|---|---|
| under EASE_SHARE | nothing; new work is taken again |
| SHRINK_SHARE and more | freed memory is given back to the kernel, and one seat is given up at each look |
| REFUSE_SHARE and more | new work is refused as well, until it is under EASE_SHARE |
| above 1, with nothing in hand, for PATIENCE_LOOKS | the daemon leaves in order, and says what it needs |

A GPU's memory has the same limit: torch refuses what goes beyond, which costs a seat, or is a clean error at the start.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from agora_protocol.errors import OutOfMemory

from agora.observe import events
from agora.train.device import choose_device
from agora.train.memory import give_back_freed_memory, limit_memory, resident_bytes

LOOK_S: Final = 0.5
"""Seconds between two readings: what is allocated in between may go beyond the limit."""
EASE_SHARE, SHRINK_SHARE, REFUSE_SHARE = 0.8, 0.85, 0.95
"""Parts of the limit at which the reactions of the table above begin and end."""
PATIENCE_LOOKS: Final = 60
"""Readings in a row above the limit, with nothing in hand, after which the daemon leaves."""
SHORT: Final = "short of memory"
"""Completes "this peer is ..." for callers whose work is refused."""


class Reaction(enum.Enum):
    """What the daemon does after one reading of its memory, by the module's table."""

    NOTHING = "nothing"
    SHRINK = "shrink"
    REFUSE = "refuse"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What is kept between readings. looks_over: how many in a row were above the limit with nothing in hand."""

    is_refusing: bool = False
    looks_over: int = 0


def judge_memory(state: MemoryState, used: int, limit: int, in_hand: int) -> tuple[MemoryState, Reaction]:
    """Returns the next state and the reaction to a reading, by the module's table.

    used, limit: resident bytes, and how many are allowed. in_hand: microbatches in work.
    """
    share = used / limit
    looks_over = state.looks_over + 1 if share > 1.0 and in_hand == 0 else 0
    if looks_over >= PATIENCE_LOOKS:
        return replace(state, looks_over=looks_over), Reaction.LEAVE
    if share >= REFUSE_SHARE or (state.is_refusing and share >= EASE_SHARE):
        return MemoryState(True, looks_over), Reaction.REFUSE
    return MemoryState(False, looks_over), Reaction.SHRINK if share >= SHRINK_SHARE else Reaction.NOTHING


class Seats(Protocol):
    """Protocol: what the guard needs of a work ledger."""

    shortage: str
    """Completes "this peer is ..." while new work is refused for it; "" when it is not."""

    @property
    def taken(self) -> int:
        """How many microbatches are in work."""

    def give_up_a_seat(self, reason: str) -> None:
        """Lowers how many microbatches may be in work at once to one fewer than now. reason: for the log."""


class MemoryGuard:
    """Reads the memory of this process and its children every LOOK_S, and takes seats away when it is short."""

    def __init__(self, limit_bytes: int, seats: Seats, report: events.Report) -> None:
        self._limit = limit_bytes
        self._seats = seats
        self._report = report
        self._state = MemoryState()

    async def run(self, read: Callable[[], int] | None = None) -> None:
        """Calls `look` every LOOK_S until cancelled. Raises OutOfMemory when the limit cannot be kept.

        read: returns the resident bytes; tests replace it.
        """
        read = read or resident_bytes
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(await asyncio.to_thread(read))

    def look(self, used: int) -> None:
        """Reacts to one reading of the resident bytes (`used`), as judge_memory decides.

        Near the limit it refuses new work and tells the owner, once; with each reaction it returns freed memory to the
        system and gives up a seat. Raises OutOfMemory when the daemon must leave.
        """
        former = self._state
        self._state, reaction = judge_memory(former, used, self._limit, self._seats.taken)
        self._seats.shortage = SHORT if self._state.is_refusing else ""
        if self._state.is_refusing and not former.is_refusing:
            self._report(events.OwnerTold(f"{self._describe(used)}: it takes no new work until some is free"))
        if reaction is not Reaction.NOTHING:
            give_back_freed_memory()
            self._seats.give_up_a_seat(f"the owner's limit of memory is near: {self._describe(used)}")
        if reaction is Reaction.LEAVE:
            raise OutOfMemory(f"{self._describe(used)}, with no work in hand; raise --memory, or hold fewer stages")

    def _describe(self, used: int) -> str:
        """Returns a phrase with what is used and what is allowed."""
        return f"{used / 2**20:,.0f} MiB of the {self._limit / 2**20:,.0f} MiB allowed are in use"


def limit_device(name: str, limit_bytes: int) -> None:
    """Sets the memory limit of this process: for what is planned, and for torch on a GPU that `name` means.

    Raises DeviceError when there is no such device.
    """
    limit_memory(limit_bytes)
    device = choose_device(name)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
