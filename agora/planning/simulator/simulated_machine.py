"""A simulated machine: its compute device, its access link, and what a microbatch costs both.

Rates and delays of the link are those of net/shaping/link.py, the order of jobs is that of train/device.py.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from agora.core.fair_shares import TokenBucket
from agora.net.shaping.link import DelayLine, LinkSpec
from agora.planning.simulator.event_queue import EventQueue


@dataclass(frozen=True, slots=True)
class Workload:
    """What a microbatch costs. work: of each stage, in seconds on a machine of speed 1, forward and backward together.

    forward_share: the forward's fraction of the work.
    boundary_bytes: sent to the next stage for each microbatch.
    gradient_bytes: sent back by the next stage for each microbatch.
    slots: maximum number of microbatches that a peer holds at the same time.
    """

    work: tuple[float, ...]
    boundary_bytes: float
    gradient_bytes: float
    forward_share: float = 1.0 / 3.0
    slots: int = 128

    @property
    def stages(self) -> int:
        return len(self.work)

    def seconds(self, first: int, last: int, speed: float) -> float:
        return sum(self.work[first : last + 1]) / speed


class JobOrder(IntEnum):
    """The order of a device's waiting jobs, the lowest number first, as in train/device.py."""

    BACKWARD = 0
    FORWARD = 1


Job = tuple[float, Callable[[Any], None], Any]


class SimulatedDevice:
    """Runs jobs one after the other. slowdown: a factor on jobs that start later."""

    __slots__ = ("_events", "_queues", "_running", "_stopped", "slowdown")

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._queues: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self._running = False
        self._stopped = False
        self.slowdown = 1.0

    @property
    def queue_length(self) -> int:
        return len(self._queues[0]) + len(self._queues[1]) + self._running

    def submit(self, order: JobOrder, seconds: float, done: Callable[[Any], None], subject: Any) -> None:
        self._queues[order].append((seconds, done, subject))
        if not self._running:
            self._start_next()

    def discard(self, subject: Any) -> None:
        """A job that runs goes on to its end."""
        for queue in self._queues:
            for job in [job for job in queue if job[2] is subject]:
                queue.remove(job)

    def stop(self) -> None:
        self._stopped = True

    def _start_next(self) -> None:
        queue = self._queues[0] or self._queues[1]
        if not queue or self._stopped:
            return
        seconds, done, subject = queue.popleft()
        self._running = True
        self._events.after(seconds * self.slowdown, self._end, done, subject)

    def _end(self, done: Callable[[Any], None], subject: Any) -> None:
        if self._stopped:
            return
        self._running = False
        done(subject)
        if not self._running:
            self._start_next()


class SimulatedLink:
    """A queue in each direction at the link's rate, then latency, jitter and retransmissions."""

    __slots__ = ("_down", "_up", "spec")

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._up, self._down = TokenBucket(spec.rate), TokenBucket(spec.rate)

    def send(self, to: SimulatedLink, size: float, now: float, rng: random.Random) -> float:
        """When the last byte arrives. Reserves this upload and that download, of which the slower decides."""
        whole_bytes = int(size)
        sent_at = self._up.take(whole_bytes, now)
        taken_at = to._down.take(whole_bytes, max(now, sent_at - size / self.spec.rate))
        return DelayLine(self.spec, rng).arrival(whole_bytes, max(sent_at, taken_at))

    def outward_delay_s(self) -> float:
        """Half of this link's round trip; the answer takes half of the other's."""
        return self.spec.rtt_s / 2.0

    def round_trip_to(self, to: SimulatedLink) -> float:
        """Returns the seconds of a round trip on idle links: (rtt_a + rtt_b) / 2, see docs/use/links.md."""
        return (self.spec.rtt_s + to.spec.rtt_s) / 2.0
