"""The compute device and the one thread that works on it.

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
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

import torch
from agora_protocol.errors import Busy, DeviceError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_LIMIT = 256
PATIENCE_S = 2.0
"""A busy device always has a forward waiting: an evaluation that waited this long goes between two other jobs."""


class Priority(enum.IntEnum):
    """What goes first. A backward frees memory and is awaited all the way upstream, so it comes before new forwards."""

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


class _Job:
    """One call for the device thread, and the future of whoever awaits it."""

    __slots__ = ("abandoned", "call", "future", "loop", "priority", "queued_at", "then", "waiting")

    def __init__(
        self,
        priority: Priority,
        call: Callable[[], Any],
        then: Callable[[], None] | None,
        abandoned: Callable[[Any], None] | None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.priority = priority
        self.call = call
        self.then = then
        self.abandoned = abandoned
        self.waiting = True
        self.queued_at = time.monotonic()


class DeviceQueue:
    """One compute thread and its bounded queue: backward before forward before evaluation, first come first served.

    `fault` is called with "device.job" at the start of each job, on the device thread. `failed` hears of an exception
    in a `then`, which nobody awaits. One queue per device, so that kernels of two jobs never compete for it.
    """

    def __init__(
        self,
        *,
        name: str = "device",
        limit: int = DEFAULT_LIMIT,
        fault: Callable[[str], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._limit = limit
        self._fault = fault
        self._failed = failed
        self._queues: dict[Priority, deque[_Job]] = {priority: deque() for priority in Priority}
        self._last = Priority.EVALUATE
        self._condition = threading.Condition()
        self._closing = False
        self._jobs = 0
        self._busy_s = 0.0
        self._born = time.monotonic()
        self._job_started: float | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(
        self,
        priority: Priority,
        function: Callable[[*Ts], T],
        *args: *Ts,
        then: Callable[[], None] | None = None,
        abandoned: Callable[[T], None] | None = None,
    ) -> T:
        """The result of `function(*args)`, computed on the device thread.

        `then` runs right after the result was handed back and before any other job: work that nobody needs to wait for.
        When the waiter is cancelled, a job still queued is dropped; one that already runs is finished, and if it
        succeeds `abandoned` is called with its result on the loop, so that its effects can be undone.
        Raises Busy at once when `limit` jobs of this priority wait, DeviceError when the thread is gone or closing.
        """
        job = _Job(priority, lambda: function(*args), then, abandoned)
        self._push(job)
        try:
            result: T = await job.future
        except asyncio.CancelledError:
            self._withdraw(job)
            _undo_delivered(job)
            raise
        return result

    def statistics(self) -> DeviceStatistics:
        """How busy the device thread is; may be called from any thread."""
        with self._condition:
            now = time.monotonic()
            running = now - self._job_started if self._job_started is not None else 0.0
            return DeviceStatistics(self._jobs, self._busy_s + running, now - self._born, self._waiting())

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails what is queued, lets the running job end, and waits for the thread for at most `timeout_s`.

        False when the thread still works then; it is a daemon thread and does not keep the process alive.
        """
        self._stop("the device queue is closed; this peer is leaving")
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def _push(self, job: _Job) -> None:
        queue = self._queues[job.priority]
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise DeviceError("the compute thread has ended; restart this daemon")
            if len(queue) >= self._limit:
                raise Busy(f"{self._limit} {job.priority.name.lower()} jobs wait for the device; ask another peer")
            queue.append(job)
            self._condition.notify()

    def _withdraw(self, job: _Job) -> None:
        """Takes out a job whose waiter went away, so that cancelled jobs never fill the queue."""
        with self._condition:
            if job.waiting:
                self._queues[job.priority].remove(job)
                job.waiting = False

    def _work(self) -> None:
        """The device thread. What ends it (SystemExit, a broken interpreter) fails everything that waits."""
        try:
            while (job := self._next()) is not None:
                self._perform(job)
                del job  # its arguments and result must not live until the next job comes
        finally:
            self._stop("the compute thread has ended; restart this daemon")

    def _next(self) -> _Job | None:
        with self._condition:
            while not self._closing and not self._waiting():
                self._condition.wait()
            if self._closing:
                return None
            self._job_started = time.monotonic()
            job = self._choose(self._job_started).popleft()
            job.waiting = False
            self._last = job.priority
            return job

    def _choose(self, now: float) -> deque[_Job]:
        evaluations = self._queues[Priority.EVALUATE]
        patient = not evaluations or now - evaluations[0].queued_at < PATIENCE_S
        if not patient and self._last is not Priority.EVALUATE:
            return evaluations
        return next(queue for queue in self._queues.values() if queue)

    def _perform(self, job: _Job) -> None:
        """One job and its `then`. What is no Exception ends the thread, after its waiter was told."""
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
        except Exception as error:  # a job ends here, and whoever waits for it hears why
            failure = error
        finally:
            self._account()
            if failure is not None:
                self._tell(job, failure, delivered)

    def _tell(self, job: _Job, failure: Exception, delivered: bool) -> None:
        if not delivered:
            self._deliver(job, None, failure)
        elif self._failed is not None:
            self._failed(failure)

    def _account(self) -> None:
        with self._condition:
            if self._job_started is not None:
                self._busy_s += time.monotonic() - self._job_started
            self._job_started = None
            self._jobs += 1

    def _deliver(self, job: _Job, result: object, error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(_settle, job, result, error)

    def _stop(self, reason: str) -> None:
        with self._condition:
            self._closing = True
            jobs = [job for queue in self._queues.values() for job in queue]
            for queue in self._queues.values():
                queue.clear()
            for job in jobs:
                job.waiting = False
            self._condition.notify_all()
        for job in jobs:
            self._deliver(job, None, DeviceError(reason))


def _settle(job: _Job, result: object, error: Exception | None) -> None:
    """On the loop: hands the outcome to the waiter, or undoes it when nobody waits any more."""
    if not job.future.done():
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
    elif error is None and job.future.cancelled() and job.abandoned is not None:
        job.abandoned(result)


def _undo_delivered(job: _Job) -> None:
    """The outcome arrived in the same turn of the loop as the cancellation: it is there, and nobody takes it."""
    delivered = job.future.done() and not job.future.cancelled()
    if delivered and job.future.exception() is None and job.abandoned is not None:
        job.abandoned(job.future.result())


def choose_device(name: str) -> torch.device:
    """The device for "auto" (the first CUDA device, else the CPU), "cpu", "cuda" or "cuda:N"; raises DeviceError."""
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
    """Whether the device multiplies bf16 in hardware. The CPU is left out: few have it and the emulation is slow."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def autocast(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Matrix products in bf16 inside this context when `enabled`; a context that does nothing otherwise."""
    if not enabled:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = torch.autocast(device.type, dtype=torch.bfloat16)
    return context
