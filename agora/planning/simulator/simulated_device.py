"""A simulated compute device: one job at a time, backwards before forwards, each in order of arrival.

The order of jobs is that of train/device.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from agora.planning.simulator.event_queue import EventQueue


class JobOrder(IntEnum):
    """The order of a device's waiting jobs, the lowest number first, as in train/device.py."""

    BACKWARD = 0
    FORWARD = 1


Job = tuple[float, Callable[[Any], None], Any]


class SimulatedDevice:
    """The compute device of a simulated machine: runs jobs one after the other, in simulated time.

    slowdown: a factor on the seconds of each job; it may be changed at any time, and counts for jobs that start later.
    busy_s: the seconds of all jobs that have started, times the slowdown.
    """

    __slots__ = ("_events", "_queues", "_running", "_stopped", "busy_s", "slowdown")

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._queues: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self._running = False
        self._stopped = False
        self.slowdown = 1.0
        self.busy_s = 0.0

    @property
    def queue_length(self) -> int:
        return len(self._queues[0]) + len(self._queues[1]) + self._running

    def submit(self, order: JobOrder, seconds: float, done: Callable[[Any], None], subject: Any) -> None:
        """Queues a job that takes `seconds`, or starts it if the device is free; calls `done(subject)` at its end.

        subject: what the job is about, such as a visit; `discard` finds the job by it.
        """
        self._queues[order].append((seconds, done, subject))
        if not self._running:
            self._start_next()

    def discard(self, subject: Any) -> None:
        """Removes the queued jobs of `subject`; a job that runs goes on to its end."""
        for queue in self._queues:
            for job in [job for job in queue if job[2] is subject]:
                queue.remove(job)

    def stop(self) -> None:
        """Stops the device for good: no queued job starts, no `done` is called any more, and the queue is kept."""
        self._stopped = True

    def _start_next(self) -> None:
        queue = self._queues[0] or self._queues[1]
        if not queue or self._stopped:
            return
        seconds, done, subject = queue.popleft()
        self._running = True
        self.busy_s += seconds * self.slowdown
        self._events.after(seconds * self.slowdown, self._end, done, subject)

    def _end(self, done: Callable[[Any], None], subject: Any) -> None:
        if self._stopped:
            return
        self._running = False
        done(subject)
        if not self._running:
            self._start_next()
