"""Groups of members that average the same 10 M values.

One group is of the swarm, one of hivemind; each member is a child process.
"""

from __future__ import annotations

import contextlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from benchmarks.children import BenchFailed, Child, ChildProcesses, end_children
from benchmarks.machine import Watch, loopback_bytes
from benchmarks.window import START_S

NUMEL: Final = 10_000_000
ROUND_S: Final = 90.0
# A round in which a smaller share of the elements is on the mean has not done the work that is timed.
WHOLE: Final = 0.999


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a group, from the first member's begin to the last one's end; `megabytes` sent by each member.

    cpu_s: processor time of all members; others: cores that the rest of the machine used meanwhile. error: root mean
    square distance of a member to the true mean, in units of an offset of 1, the mean over members.
    """

    seconds: float
    megabytes: float
    cpu_s: float
    others: float
    error: float
    incomplete: int = 0  # number of rounds before this one after which some member lacked the mean
    # Of the member with the most: processor time of its event loop for each value, and of the loop's longest callback.
    # Only ours say so.
    loop_ns: float = 0.0
    longest_ms: float = 0.0


class Incomplete(BenchFailed):
    """A round has ended, and a member does not hold the mean."""


class Group(ABC):
    """`size` members, each its own process. Subclasses know how they find one another."""

    side: ClassVar[str]
    role: ClassVar[str]

    def __init__(self, size: int, nursery: ChildProcesses, wire: str | None = None, numel: int = NUMEL) -> None:
        """wire: how values travel, in the side's own words; None is its default."""
        self.size, self.wire, self.numel = size, wire, numel
        self._nursery = nursery
        self._members: list[Child] = []
        self._rounds = self._started = 0

    @property
    def name(self) -> str:
        return " ".join([self.side, str(self.size), *([self.wire] if self.wire else [])])

    @abstractmethod
    def start(self) -> None:
        """Starts all members, connects them, and runs one round that is not measured."""

    def round(self) -> Round:
        """Runs one round. Raises Incomplete when a member does not hold the mean, BenchFailed after ROUND_S."""
        begun, watch = loopback_bytes(), Watch(member.pid for member in self._members)
        self._rounds += 1
        for member in self._members:
            member.tell({"round": self._rounds})
        answers = [member.hear(ROUND_S) for member in self._members]
        sent = loopback_bytes() - begun
        others, cpu_s = watch.elsewhere(), watch.ours()
        if any(not answer["returned"] or answer["averaged"] < WHOLE for answer in answers):
            raise Incomplete(f"{self.name}: a member does not hold the mean after a round")
        error = statistics.fmean(answer["error"] for answer in answers)
        loop_ns = 1e9 / self.numel * max(answer.get("loop_s", 0.0) for answer in answers)
        longest_ms = 1e3 * max(answer.get("longest_s", 0.0) for answer in answers)
        return Round(
            _seconds(answers), sent / 1e6 / self.size, cpu_s, others, error, loop_ns=loop_ns, longest_ms=longest_ms
        )

    def start_again(self) -> None:
        """Ends all members and starts others, since a member that lost step in a failed round may not find it again."""
        end_children(self._members)
        self._members.clear()
        with contextlib.suppress(Incomplete):  # this round is not counted
            self.start()

    def _start_member(self, index: int, **more: object) -> Child:
        self._started += 1
        name = f"{self.name.replace(' ', '-')}-{index}-{self._started}"
        child_spec = {
            "name": name,
            "folder": str(self._nursery.folder),
            "numel": self.numel,
            "size": self.size,
            "wire": self.wire,
            "offset": float(index),
            "true_mean": (self.size - 1) / 2,
            **more,
        }
        self._members.append(self._nursery.start(name, self.role, child_spec))
        return self._members[-1]


class OurGroup(Group):
    """Members of the swarm: hosts and streams of agora.net, rounds of agora.replica."""

    side = "agora"
    role = "averaging-agora"
    times_callbacks = False  # on asyncio's own loop, which is slower than a daemon's

    def start(self) -> None:
        for index in range(self.size):
            self._start_member(index, times_callbacks=self.times_callbacks)
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
        peers: Sequence[str] = self._start_member(0, peers=[]).hear(START_S)["addresses"]
        for index in range(1, self.size):
            self._start_member(index, peers=peers)
        for member in self._members[1:]:
            member.hear(START_S)
        self.round()


def _seconds(answers: Sequence[dict[str, Any]]) -> float:
    return float(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers))
