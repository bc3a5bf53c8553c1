"""The compute device, and the one thread that runs jobs on it by priority.

Knows: jobs, their order, torch devices. Must not know: what a job computes, microbatches, stages, peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
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

DEFAULT_LIMIT = 256
PATIENCE_S = 2.0
"""An evaluation that has waited this long goes before other jobs, at most every second time: a busy device always has
a forward waiting."""


class Priority(enum.IntEnum):
    """Order of jobs. A backward frees memory and is awaited by every peer upstream: it comes before new forwards."""

    BACKWARD = 0
    FORWARD = 1
    EVALUATE = 2


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Since the start: finished jobs, seconds of work (the running job included), seconds alive; jobs waiting now."""

    jobs: int
    busy_s: float
    alive_s: float
    waiting: int

    @property
    def busy_fraction(self) -> float:
        """Share of the time that the device thread was working, 0 to 1."""
        return self.busy_s / self.alive_s if self.alive_s > 0 else 0.0


@dataclass(slots=True, eq=False)
class _DeviceJob:
    """One call for the device thread, and the future of the task that awaits it. See DeviceQueue.run."""

    priority: Priority
    call: Callable[[], Any]
    then: Callable[[], None] | None
    abandoned: Callable[[Any], None] | None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Any] = field(init=False)
    queued_at: float = field(default_factory=time.monotonic)
    is_queued: bool = True

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class DeviceQueue:
    """One compute thread and its bounded queue: backward before forward before evaluation, in order of arrival.

    Make one queue for each device, so that kernels of two jobs never compete for it.
    """

    def __init__(
        self,
        *,
        limit: int = DEFAULT_LIMIT,
        fault: Callable[[str], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Starts the thread. limit: most jobs of one priority that wait. Both functions run on the device thread.

        fault: is called with "device.job" at the start of each job. failed: is called with the exception of a `then`,
        which nobody awaits.
        """
        self._limit = limit
        self._fault = fault
        self._failed = failed
        self._queues: dict[Priority, deque[_DeviceJob]] = {priority: deque() for priority in Priority}
        self._last = Priority.EVALUATE
        self._condition = threading.Condition()
        self._closing = False
        self._jobs = 0
        self._busy_s = 0.0
        self._born = time.monotonic()
        self._job_started: float | None = None
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    async def run(
        self,
        priority: Priority,
        function: Callable[[*Ts], T],
        *args: *Ts,
        then: Callable[[], None] | None = None,
        abandoned: Callable[[T], None] | None = None,
    ) -> T:
        """Runs `function(*args)` on the device thread and returns its result.

        then: runs right after the result was handed back, before any other job; for work that nobody waits for.
        abandoned: is called on the event loop with the result when the caller was cancelled while the job ran, so that
        its effects can be undone. A job that is still queued when its caller is cancelled never runs.
        Raises Busy at once when `limit` jobs of this priority wait, and DeviceError when the thread has ended.
        """
        job = _DeviceJob(priority, lambda: function(*args), then, abandoned)
        self._push(job)
        try:
            result: T = await job.future
        except asyncio.CancelledError:
            self._withdraw(job)
            _undo_delivered(job)
            raise
        return result

    def statistics(self) -> DeviceStatistics:
        """How busy the device thread is. From any thread."""
        with self._condition:
            now = time.monotonic()
            running = now - self._job_started if self._job_started is not None else 0.0
            return DeviceStatistics(self._jobs, self._busy_s + running, now - self._born, self._waiting())

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued jobs, lets the running one end, and waits for the thread for at most `timeout_s`.

        Returns False when the thread still works then; it is a daemon thread and does not keep the process alive.
        """
        self._stop("the device queue is closed; this peer is leaving")
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _waiting(self) -> int:
        """Number of queued jobs."""
        return sum(map(len, self._queues.values()))

    def _push(self, job: _DeviceJob) -> None:
        """Queues a job and wakes the thread. Raises Busy or DeviceError."""
        queue = self._queues[job.priority]
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise DeviceError("the compute thread has ended; restart this daemon")
            if len(queue) >= self._limit:
                raise Busy(f"{self._limit} {job.priority.name.lower()} jobs wait for the device; ask another peer")
            queue.append(job)
            self._condition.notify()

    def _withdraw(self, job: _DeviceJob) -> None:
        """Takes a job whose caller was cancelled out of the queue, if it is still there."""
        with self._condition:
            if job.is_queued:
                self._queues[job.priority].remove(job)
                job.is_queued = False

    def _work(self) -> None:
        """The device thread: runs jobs until the queue closes. Whatever ends the thread fails all queued jobs."""
        try:
            while (job := self._next()) is not None:
                self._perform(job)
                del job  # its arguments and result must not live until the next job comes
        finally:
            self._stop("the compute thread has ended; restart this daemon")

    def _next(self) -> _DeviceJob | None:
        """Waits for a job and takes it out of the queue. Returns None when the queue closes."""
        with self._condition:
            while not self._closing and not self._waiting():
                self._condition.wait()
            if self._closing:
                return None
            self._job_started = time.monotonic()
            job = self._choose(self._job_started).popleft()
            job.is_queued = False
            self._last = job.priority
            return job

    def _choose(self, now: float) -> deque[_DeviceJob]:
        """Returns the queue from which the next job is taken: the first that is not empty, or see PATIENCE_S."""
        evaluations = self._queues[Priority.EVALUATE]
        is_overdue = bool(evaluations) and now - evaluations[0].queued_at >= PATIENCE_S
        if is_overdue and self._last is not Priority.EVALUATE:
            return evaluations
        return next(queue for queue in self._queues.values() if queue)

    def _perform(self, job: _DeviceJob) -> None:
        """Runs one job and its `then`. What is not an Exception ends the thread, after failing the caller's future."""
        failure: Exception | None = DeviceError("the compute thread was ended by this job; restart this daemon")
        delivered = False
        try:
            if self._fault is not None:
                self._fault("device.job")
            self._deliver(job, job.call(), None)
            delivered = True
            if job.then is not None:
                job.then()
            failure = None
        except Exception as error:  # a job ends here, and its caller's future fails
            failure = error
        finally:
            self._count_job()
            if failure is not None and not delivered:
                self._deliver(job, None, failure)
            elif failure is not None and self._failed is not None:
                self._failed(failure)

    def _count_job(self) -> None:
        """Adds the job that has just ended to the statistics."""
        with self._condition:
            if self._job_started is not None:
                self._busy_s += time.monotonic() - self._job_started
            self._job_started = None
            self._jobs += 1

    def _deliver(self, job: _DeviceJob, result: object, error: Exception | None) -> None:
        """Hands the outcome of a job to its caller's event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(_settle, job, result, error)

    def _stop(self, reason: str) -> None:
        """Closes the queue and fails all queued jobs with a DeviceError that says `reason`."""
        with self._condition:
            self._closing = True
            jobs = [job for queue in self._queues.values() for job in queue]
            for queue in self._queues.values():
                queue.clear()
            for job in jobs:
                job.is_queued = False
            self._condition.notify_all()
        for job in jobs:
            self._deliver(job, None, DeviceError(reason))


def _settle(job: _DeviceJob, result: object, error: Exception | None) -> None:
    """Runs on the event loop: sets the outcome of a job's future, or undoes the job when its caller was cancelled."""
    if not job.future.done():
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
    elif error is None and job.future.cancelled() and job.abandoned is not None:
        job.abandoned(result)


def _undo_delivered(job: _DeviceJob) -> None:
    """Undoes a job whose result arrived in the same turn of the event loop as the cancellation of its caller."""
    delivered = job.future.done() and not job.future.cancelled()
    if delivered and job.future.exception() is None and job.abandoned is not None:
        job.abandoned(job.future.result())


def choose_device(name: str) -> torch.device:
    """Returns the device for "auto" (the first CUDA device, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises DeviceError when this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (":" in name and not (index.isascii() and index.isdigit())):
        raise DeviceError(f"device {name!r} is not known; say auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r} was asked for, but torch sees no CUDA device; say --device cpu")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise DeviceError(f"there is no {name!r}; torch sees {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", number)


def has_native_bf16(device: torch.device) -> bool:
    """Returns whether the device multiplies bf16 in hardware. False for a CPU: few can, and the emulation is slow."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def autocast(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which matrix products run in bf16 if `enabled`, and which does nothing otherwise."""
    if not enabled:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = torch.autocast(device.type, dtype=torch.bfloat16)
    return context
