"""Groups of members that average the same 10 M values: one of the swarm's, one of hivemind's, each as child processes.

Knows: child processes and the orders they take, the loopback's counter. Must not know: torch, ratios, turns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from benchmarks.children import BenchFailed, Child, Nursery, end_children
from benchmarks.machine import Watch, loopback_bytes
from benchmarks.window import START_S

NUMEL: Final = 10_000_000
ROUND_S: Final = 90.0
POLL_S: Final = 0.001
WHOLE: Final = 0.999
"""Share of elements on the mean below which a round did not do what is timed."""
KILL_AT: Final = 0.5
"""Of the bytes of a usual round: when these have passed, one member is killed."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one member has after a round; offsets as `averaging_values.Holding` has them.

    returned: whether the round came to an end here at all; otherwise this is what it held when nobody waited any more.
    """

    returned: bool
    seconds: float
    mean: float
    averaged: float
    error: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a group, from the first member's begin to the last one's end; `megabytes` sent by each member.

    cpu_s: processor time of all members; others: cores that the rest of the machine used meanwhile.
    """

    seconds: float
    megabytes: float
    cpu_s: float
    others: float
    held: list[Held]
    incomplete: int = 0
    """Rounds before it after which not everybody held the mean."""

    @property
    def error(self) -> float:
        """The mean over members of their root mean square distance to the true mean, in units of an offset of 1."""
        return statistics.fmean(held.error for held in self.held)


def offsets(size: int) -> list[float]:
    """The members' offsets: 0, 1, 2, ... and for the last of more than two the mean of these, so that the mean is the
    same without it.
    """
    others = [float(index) for index in range(size - 1)]
    return [*others, statistics.fmean(others) if size > 2 else 1.0]


class Incomplete(BenchFailed):
    """A round ended, and somebody does not hold the mean; or it never came to its middle."""


class Group(ABC):
    """`size` members, each its own process. Subclasses know how they find one another."""

    side: ClassVar[str]
    role: ClassVar[str]

    def __init__(self, size: int, nursery: Nursery, wire: str | None = None, numel: int = NUMEL) -> None:
        """wire: how values travel, in the side's own words; None is its default."""
        self.size, self.wire, self.numel = size, wire, numel
        self._nursery = nursery
        self._members: list[Child] = []
        self._rounds = self._started = 0

    @property
    def name(self) -> str:
        """As the rows have it."""
        return " ".join([self.side, str(self.size), *([self.wire] if self.wire else [])])

    @abstractmethod
    def start(self) -> None:
        """Starts all members, makes them acquainted, and runs one round that nobody counts."""

    def round(self) -> Round:
        """One round of all. Raises Incomplete when a member does not hold the mean, BenchFailed after ROUND_S."""
        begun, watch = loopback_bytes(), Watch(member.pid for member in self._members)
        self._begin_round()
        answers = [member.hear(ROUND_S) for member in self._members]
        sent = loopback_bytes() - begun
        others, cpu_s = watch.elsewhere(), watch.ours()
        if any(not answer["returned"] or answer["averaged"] < WHOLE for answer in answers):
            raise Incomplete(f"{self.name}: a member does not hold the mean after a round")
        return Round(_seconds(answers), sent / 1e6 / self.size, cpu_s, others, [_held(answer) for answer in answers])

    def round_with_a_death(self, megabytes: float) -> list[Held]:
        """A round in whose middle the last member is killed; what the others hold. The group is of no use after it.

        megabytes: that each member sends in a usual round.
        """
        *survivors, victim = self._members
        middle = loopback_bytes() + int(KILL_AT * 1e6 * megabytes * self.size)
        self._begin_round()
        deadline = time.monotonic() + ROUND_S
        while loopback_bytes() < middle:
            if time.monotonic() > deadline:
                raise Incomplete(f"{self.name}: the round never came to its middle")
            time.sleep(POLL_S)
        os.killpg(victim.pid, signal.SIGKILL)
        return [_held(survivor.hear(ROUND_S)) for survivor in survivors]

    def start_again(self) -> None:
        """Ends all members and starts others: who came out of step in a round that failed may stay so."""
        end_children(self._members)
        self._members.clear()
        with contextlib.suppress(Incomplete):  # of the round that nobody counts
            self.start()

    def _begin_round(self) -> None:
        self._rounds += 1
        for member in self._members:
            member.tell({"round": self._rounds})

    def _start_member(self, index: int, **more: object) -> Child:
        given = offsets(self.size)
        self._started += 1
        name = f"{self.name.replace(' ', '-')}-{index}-{self._started}"
        told = {
            "name": name,
            "folder": str(self._nursery.folder),
            "numel": self.numel,
            "size": self.size,
            "wire": self.wire,
            "offset": given[index],
            "true_mean": statistics.fmean(given),
            **more,
        }
        self._members.append(self._nursery.start(name, self.role, told))
        return self._members[-1]


class OurGroup(Group):
    """Members of the swarm: hosts and streams of agora.net, rounds of agora.averaging."""

    side = "agora"
    role = "averaging-agora"

    def start(self) -> None:
        """See Group."""
        for index in range(self.size):
            self._start_member(index)
        known = [member.hear(START_S) for member in self._members]
        meet = {"meet": [[member["peer"], member["addresses"]] for member in known]}
        for member in self._members:
            member.tell(meet)
        for member in self._members:
            member.hear(START_S)
        self.round()


class HivemindGroup(Group):
    """hivemind's DHT and DecentralizedAverager."""

    side = "hivemind"
    role = "averaging-hivemind"

    def start(self) -> None:
        """See Group."""
        peers: Sequence[str] = self._start_member(0, peers=[]).hear(START_S)["addresses"]
        for index in range(1, self.size):
            self._start_member(index, peers=peers)
        for member in self._members[1:]:
            member.hear(START_S)
        self.round()


def _seconds(answers: Sequence[dict[str, Any]]) -> float:
    return float(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers))


def _held(answer: dict[str, Any]) -> Held:
    seconds = answer["end"] - answer["begin"]
    return Held(answer["returned"], seconds, answer["mean"], answer["averaged"], answer["error"])
