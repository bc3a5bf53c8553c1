"""The compute device, and the one thread that runs jobs on it by priority.

Knows: jobs, their order, torch devices. Must not know: what a job computes, microbatches, stages, peers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import torch
from agora_protocol.errors import Busy, DeviceError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PATIENCE_S = 2.0
"""An evaluation that has waited for this many seconds goes before other jobs, but never two in a row."""

MAX_FAILURES = 3
"""After this many failed jobs in a row, the device counts as dead: most CUDA errors are permanent."""
WATCH_S = 0.5
"""Seconds between two looks at the thread and the device."""


class Priority(enum.IntEnum):
    """Job priorities, lowest value first, except that an evaluation is let through after PATIENCE_S.

    A backward comes before forwards: it frees memory, and peers wait for it.
    """

    BACKWARD = 0
    FORWARD = 1
    EVALUATE = 2


@dataclass(slots=True, eq=False)
class _DeviceJob:
    """One call for the device thread, and the future of the task that awaits its result. See DeviceQueue.run.

    then: called after it. queued_at: time.monotonic() when it was queued.
    """

    priority: Priority
    call: Callable[[], Any]
    then: Callable[[], None]
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    queued_at: float = field(default_factory=time.monotonic)


class DeviceQueue:
    """Runs a device's jobs on one thread: backward before forward before evaluation, each in order of arrival."""

    def __init__(
        self,
        *,
        limit: int = 256,
        slowdown: float = 1.0,
        work_clock: Callable[[], float] = time.monotonic,
        fault: Callable[[str], None] = lambda point: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Starts the thread. limit: the most waiting jobs of one priority.

        slowdown: how many times as long each job takes as it would, at least 1; the thread sleeps for the rest.
        work_clock: the seconds by which that is measured, see `work_clock_of`. fault: called with "device.job" at the
        start of each job. failed: called with the exception of a `then`. Both are called on the device thread.
        """
        self.slowdown = slowdown
        self._work_clock = work_clock
        self._limit = limit
        self._fault = fault
        self._failed = failed
        self._queues: dict[Priority, deque[_DeviceJob]] = {priority: deque() for priority in Priority}
        self._last = Priority.EVALUATE
        self._condition = threading.Condition()
        self._closing = False
        self._busy_s = 0.0
        self._born = time.monotonic()
        self._job_started: float | None = None
        self._failures = 0  # jobs in a row in which the device has failed
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    async def run(
        self,
        priority: Priority,
        function: Callable[[*Ts], T],
        *args: *Ts,
        then: Callable[[], None] = lambda: None,
        abandoned: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Runs `function(*args)` on the device thread and returns its result.

        then: called on the device thread after the result was handed back, before any other job; for work that nobody
        waits for. When the caller is cancelled, a queued job never runs; the result of a running one is passed to
        `abandoned` on the event loop. Raises what the function raises, Busy at once when `limit` jobs of this priority
        wait, DeviceError when the thread has ended.
        """
        job, queue = _DeviceJob(priority, lambda: function(*args), then), self._queues[priority]
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise DeviceError("the compute thread has ended; restart this daemon")
            if len(queue) >= self._limit:
                raise Busy(f"{self._limit} {priority.name.lower()} jobs wait for the device; ask another peer")
            queue.append(job)
            self._condition.notify()
        future: asyncio.Future[T] = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait([future])  # cancelling `wait` does not cancel the future
        except asyncio.CancelledError:

            def undo(ended: asyncio.Future[T]) -> None:
                """Passes the result, if any, to `abandoned`; called when a job whose caller was cancelled has ended."""
                if ended.exception() is None:
                    abandoned(ended.result())

            with self._condition, contextlib.suppress(ValueError):  # ValueError: the job is running or has ended
                queue.remove(job)
            future.add_done_callback(undo)
            raise
        return future.result()

    def waiting(self) -> int:
        """Returns the number of queued jobs. From any thread."""
        return sum(map(len, self._queues.values()))

    def busy_fraction(self) -> float:
        """Returns the fraction of the time since the start that the thread spent on jobs, 0 to 1. From any thread."""
        with self._condition:
            now = time.monotonic()
            running = now - self._job_started if self._job_started is not None else 0.0
            return (self._busy_s + running) / max(now - self._born, 1e-9)

    async def watch(self) -> None:
        """Checks the thread and the device every WATCH_S, until cancelled.

        Raises DeviceError when the thread has ended, and after MAX_FAILURES jobs in a row that raised a DeviceError.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._thread.is_alive():
                raise DeviceError("the compute thread has ended; start the daemon again")
            if self._failures >= MAX_FAILURES:
                raise DeviceError(f"the device has failed {self._failures} times in a row; start the daemon again")

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued jobs and waits at most `timeout_s` for the running one; returns whether the thread ended."""
        self._stop("the device queue is closed; this peer is leaving")
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        """Runs jobs until the queue closes; this is the device thread's function. At its end, queued jobs fail."""
        try:
            while (job := self._next()) is not None:
                self._perform(job)
                del job  # its arguments and result must not live until the next job comes
        finally:
            self._stop("the compute thread has ended; restart this daemon")

    def _next(self) -> _DeviceJob | None:
        """Waits for a job; removes and returns the next one, by Priority, then age. None when the queue closes.

        An evaluation that has waited for PATIENCE_S comes first, unless the last job was one.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self.waiting())
            if self._closing:
                return None
            self._job_started = time.monotonic()
            queue, evaluations = next(filter(None, self._queues.values())), self._queues[Priority.EVALUATE]
            if evaluations and self._last is not Priority.EVALUATE:
                queue = evaluations if self._job_started - evaluations[0].queued_at >= PATIENCE_S else queue
            self._last = queue[0].priority
            return queue.popleft()

    def _perform(self, job: _DeviceJob) -> None:
        """Runs one job and sets its future to the result or the error; then calls its `then`.

        An error of `then` is passed to `failed`.
        """
        failure: Exception | None = DeviceError("the compute thread was ended by this job; restart this daemon")
        try:
            self._fault("device.job")
            job.future.set_result(self._call_slowed(job.call))
            self._call_slowed(job.then)
            failure = None
        except Exception as error:  # a job ends here, and its caller's future fails
            failure = error
        finally:
            with self._condition:
                self._failures = self._failures + 1 if isinstance(failure, DeviceError) else 0
                self._busy_s += time.monotonic() - (self._job_started or 0.0)
                self._job_started = None
            if failure is not None and job.future.done():
                self._failed(failure)
            elif failure is not None:
                job.future.set_exception(failure)

    def _call_slowed(self, call: Callable[[], T]) -> T:
        """Calls `call` and returns its result, after `slowdown` times the time that the call took."""
        started = self._work_clock()
        result = call()
        if self.slowdown > 1.0:
            time.sleep((self.slowdown - 1.0) * (self._work_clock() - started))
        return result

    def begin_work(self) -> tuple[float, float]:
        """Returns where both clocks stand, for `work_s`. Call it in a job."""
        return time.monotonic(), self._work_clock()

    def work_s(self, begun: tuple[float, float]) -> float:
        """Returns the seconds that the job's work since `begun` takes here, the sleep that makes it slower included."""
        return time.monotonic() - begun[0] + (self.slowdown - 1.0) * (self._work_clock() - begun[1])

    def _stop(self, reason: str) -> None:
        """Closes the queue, which ends the thread, and fails all queued jobs with a DeviceError that says `reason`."""
        with self._condition:
            self._closing = True
            jobs = [job for queue in self._queues.values() for job in queue]
            for queue in self._queues.values():
                queue.clear()
            self._condition.notify_all()
        for job in jobs:
            job.future.set_exception(DeviceError(reason))


def work_clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock by which a slowed device sleeps: of the thread's own computing where one core does it all.

    There a job that waits for the core, because daemons share it, is not made to wait many times longer.
    """
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.monotonic


def choose_device(name: str) -> torch.device:
    """Returns the device for "auto" (CUDA if there is one, or the CPU), "cpu", "cuda" or "cuda:N".

    Raises DeviceError for another name, and for a device that torch does not see.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch("cuda(:[0-9]+)?", name):
        raise DeviceError(f"device {name!r} is not known; say auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r} was asked for, but torch sees no CUDA device; say --device cpu")
    number = int(name.removeprefix("cuda").lstrip(":") or 0)
    if number >= torch.cuda.device_count():
        raise DeviceError(f"there is no {name!r}; torch sees {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", number)


def has_native_bf16(device: torch.device) -> bool:
    """Returns True only for CUDA devices with bf16 in hardware; False for CPUs, even if they can, and all others."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
