"""The compute device, and the one thread that runs jobs on it by priority."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, TypeVarTuple

import torch
from agora_protocol.errors import Busy, DeviceError, OutOfMemory

from agora.train.gpu_support import unused_gpus_remark, why_cuda_device_unsupported

# Frees memory of the device that is not needed: a part of it, or with True all.
FreeMemory: TypeAlias = Callable[[bool], None]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# An evaluation that has waited for this many seconds goes before other jobs, but never two in a row.
MAX_EVALUATION_WAIT_S = 2.0

# After this many jobs in a row that raised DeviceError, the device counts as dead: most CUDA errors are permanent.
MAX_FAILURES = 3
# What the errors say of torch's CPU allocator and CUDA's runtime, cuBLAS, cuDNN and their like, and C++.
NO_MEMORY: Final = re.compile(r"can't allocate memory|out of memory|_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|bad_alloc")
PRECISIONS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float32"}
WATCH_INTERVAL_S = 0.5  # seconds between two checks of the thread and the device
SAMPLE_INTERVAL_S: Final = 0.04  # seconds between two looks at whether the device is idle
MAX_SAMPLES: Final = 1500  # of the last jobs: those of a minute
MIN_SAMPLES: Final = 20  # fewer say nothing


class Priority(enum.IntEnum):
    """Job priorities, lowest value first, except that an evaluation goes first after MAX_EVALUATION_WAIT_S.

    A backward pass comes before forward passes: it frees memory, and peers wait for it.
    """

    BACKWARD = 0
    FORWARD = 1
    EVALUATE = 2


@dataclass(slots=True, eq=False)
class _DeviceJob:
    priority: Priority
    call: Callable[[], Any]
    afterwards: Callable[[], None]
    free_memory: FreeMemory | None
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    queued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Which device a span is computed on, and how.

    name: "auto", "cpu", "cuda", "cuda:N" or "mps", see choose_device.
    state_in_host: the optimizer's state is in host memory, see OptimizerOffload.
    slowdown: factor on the time of each job, at least 1.
    emulated_s: what a stage's forward pass takes at least, see JobTimes; 0: as long as it takes.
    fault: test hook, called with "device.job" at the start of each job.
    compile: "auto" or "never", see compiles_on. compiled_code: the folder that keeps what was compiled.
    dtype: of products; None: that of the device, see product_dtype.
    """

    name: str = "auto"
    state_in_host: bool = False
    slowdown: float = 1.0
    emulated_s: float = 0.0
    fault: Callable[[str], None] = lambda point: None
    compile: str = "auto"
    compiled_code: Path | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class JobTimes:
    """The least seconds of jobs, so that a small, fast model can imitate the timing of a large one on an accelerator.

    forward_s: of one stage's forward pass. A backward pass takes twice as much, as it has twice the operations. A step
    takes a quarter: the optimizer of a large model takes 1 to 3 % of a step's passes.
    """

    forward_s: float = 0.0

    def passes_s(self, stages: int, *, forward: bool, backward: bool) -> float:
        """Returns the least seconds of one microbatch's passes through so many stages."""
        return stages * self.forward_s * (forward + 2 * backward)

    @property
    def step_s(self) -> float:
        return self.forward_s / 4


class DeviceLoad(NamedTuple):
    """Seconds since the start of a device's queue: of its jobs, and of what they waited in the queue, all summed."""

    busy_s: float
    queued_s: float


class DeviceQueue:
    """The queue of a device's jobs, and the thread that runs them one at a time until `close`.

    Jobs run in order of Priority, and of one priority the oldest first. But an evaluation that has waited for
    MAX_EVALUATION_WAIT_S comes first, unless the last job was an evaluation.
    """

    def __init__(
        self,
        *,
        limit: int = 256,
        slowdown: float = 1.0,
        work_clock: Callable[[], float] = time.monotonic,
        fault: Callable[[str], None] = lambda point: None,
        on_error: Callable[[Exception], None] = lambda error: None,
        is_idle: Callable[[], bool] | None = None,
    ) -> None:
        """Starts the thread, which also calls `fault` and `on_error`.

        limit: maximum number of waiting jobs of one priority; backwards, which end earlier work, have none.
        slowdown: factor on the time that each job takes, at least 1; the thread sleeps for the additional time.
        work_clock: returns seconds, by which a job's time is measured for `slowdown`.
        fault: called with "device.job" at the start of each job.
        on_error: called with the exception of an `afterwards`.
        is_idle: whether the device has nothing to compute at this moment; called by `watch`, or by `sample_idleness`;
        None for a device that is the thread itself.
        """
        self._is_idle = is_idle
        self._was_idle: deque[bool] = deque(maxlen=MAX_SAMPLES)
        self.slowdown = slowdown
        self._work_clock = work_clock
        self._limit = limit
        self._fault = fault
        self._on_error = on_error
        self._queues: dict[Priority, deque[_DeviceJob]] = {priority: deque() for priority in Priority}
        self._last_priority = Priority.EVALUATE
        self._condition = threading.Condition()
        self._closing = False
        self._busy_s = self._queued_s = 0.0
        self._started_at = time.monotonic()
        self._job_started_at: float | None = None
        self._call_started = 0.0  # by the work clock
        self._least_s = 0.0  # of the running call, by the monotonic clock
        self._failures = 0  # jobs in a row in which the device has failed
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    async def run(
        self,
        priority: Priority,
        function: Callable[[*Ts], T],
        *args: *Ts,
        afterwards: Callable[[], None] = lambda: None,
        free_memory: FreeMemory | None = None,
        on_abandoned: Callable[[T], None] = lambda result: None,
        keeps_result: bool = False,
    ) -> T:
        """Runs `function(*args)` on the device thread and returns its result.

        afterwards: called on the device thread after the result was handed back, before any other job, for work that
        no caller waits for; not called if the function raised. free_memory: if given, function and afterwards must
        change nothing when memory does not suffice; then it is called with False, and what failed is tried once more;
        should that fail, too, with True, and it is tried a last time. When the caller is cancelled, a queued job never
        runs; the result of a running one is passed to `on_abandoned` on the event loop. With keeps_result, for what
        cannot be undone, the first cancellation of a running job does nothing, and its result is returned. Raises the
        function's own exception, but torch's as OutOfMemory or DeviceError; Busy without waiting when `limit` jobs of
        this priority wait, never for a backward;
        DeviceError when the queue is closed or the thread has ended. No error keeps a tensor of the
        job alive.
        """
        job = _DeviceJob(priority, lambda: function(*args), afterwards, free_memory)
        queue = self._queues[priority]
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise DeviceError("The device thread has ended; start the daemon again.")
            # A backward ends earlier work, so their number is bounded already; a refusal would lose that work.
            if priority is not Priority.BACKWARD and len(queue) >= self._limit:
                raise Busy(f"{self._limit} {priority.name.lower()} jobs wait for the device; ask another peer")
            queue.append(job)
            self._condition.notify()
        future: asyncio.Future[T] = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait([future])  # cancelling `wait` does not cancel the future
        except asyncio.CancelledError:

            def hand_over(ended: asyncio.Future[T]) -> None:
                if ended.exception() is None:
                    on_abandoned(ended.result())

            with self._condition:
                never_runs = job in queue
                if never_runs:
                    queue.remove(job)
            if never_runs or not keeps_result:
                future.add_done_callback(hand_over)
                raise
            if (caller := asyncio.current_task()) is not None:
                caller.uncancel()
            await asyncio.wait([future])
        return future.result()

    def waiting(self) -> int:
        """Returns the number of queued jobs, without the one that runs."""
        return sum(map(len, self._queues.values()))

    def busy_fraction(self) -> float:
        """Returns the fraction of the time since the start that the thread spent on jobs and sleeps of `slowdown`."""
        return self.load().busy_s / max(time.monotonic() - self._started_at, 1e-9)

    def load(self) -> DeviceLoad:
        """Returns the seconds so far; busy_s has those of the running job and the sleeps of `slowdown`, too."""
        with self._condition:
            running = time.monotonic() - self._job_started_at if self._job_started_at is not None else 0.0
            return DeviceLoad(self._busy_s + running, self._queued_s)

    def sample_idleness(self) -> None:
        """Looks once whether the device is idle inside a job: then it waits for the host, which launches too slowly."""
        job = self._job_started_at
        if self._is_idle is None or job is None:
            return
        try:
            is_idle = self._is_idle()
        except RuntimeError:  # a device that fails says so to its next job
            return
        if self._job_started_at == job:  # otherwise the device may have been asked after the job
            self._was_idle.append(is_idle)

    def idle_fraction(self) -> float | None:
        """Returns the fraction of the jobs' time, in the last minute or so, in which the device was idle.

        None for a device that cannot be, and before MIN_SAMPLES looks.
        """
        was_idle = tuple(self._was_idle)
        return sum(was_idle) / len(was_idle) if len(was_idle) >= MIN_SAMPLES else None

    async def watch(self) -> None:
        """Checks the thread, and how its last jobs ended, every WATCH_INTERVAL_S seconds, until cancelled; samples
        idleness.

        Raises DeviceError when the thread has ended, and after MAX_FAILURES jobs in a row that raised a DeviceError.
        """
        while True:
            checked_at = time.monotonic()
            while self._is_idle is not None and time.monotonic() < checked_at + WATCH_INTERVAL_S:
                await asyncio.sleep(SAMPLE_INTERVAL_S)
                self.sample_idleness()
            await asyncio.sleep(0.0 if self._is_idle is not None else WATCH_INTERVAL_S)
            if not self._thread.is_alive():
                raise DeviceError("The device thread has ended; start the daemon again.")
            if self._failures >= MAX_FAILURES:
                raise DeviceError(f"The device has failed {self._failures} times in a row; start the daemon again.")

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued and later jobs with DeviceError, and lets the running one end; returns whether it has."""
        self._stop("The device queue is closed; this peer is leaving.")
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._perform(job)
                del job  # its arguments and result must not live until the next job comes
        finally:
            self._stop("The device thread has ended; start the daemon again.")

    def _next_job(self) -> _DeviceJob | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self.waiting())
            if self._closing:
                return None
            self._job_started_at = time.monotonic()
            queue = next(filter(None, self._queues.values()))
            evaluations = self._queues[Priority.EVALUATE]
            if evaluations and self._last_priority is not Priority.EVALUATE:
                waited_s = self._job_started_at - evaluations[0].queued_at
                queue = evaluations if waited_s >= MAX_EVALUATION_WAIT_S else queue
            self._last_priority = queue[0].priority
            self._queued_s += self._job_started_at - queue[0].queued_at
            return queue.popleft()

    def _perform(self, job: _DeviceJob) -> None:
        failure: Exception | None = DeviceError("The device thread was ended by this job; start the daemon again.")
        try:
            _, fault = self._attempt(partial(self._fault, "device.job"))
            result, failure = (None, fault) if fault else self._attempt(job.call, job.free_memory)
            if failure is None:
                job.future.set_result(result)
                del result
                # The caller has its result already: nobody waits for this.
                _, failure = self._attempt(job.afterwards, job.free_memory)
        finally:
            with self._condition:
                self._failures = self._failures + 1 if isinstance(failure, DeviceError) else 0
                self._busy_s += time.monotonic() - (self._job_started_at or 0.0)
                self._job_started_at = None
            if failure is not None and job.future.done():
                self._on_error(failure)
            elif failure is not None:
                job.future.set_exception(failure)

    def _attempt(
        self, call: Callable[[], T], free_memory: FreeMemory | None = None
    ) -> tuple[T, None] | tuple[None, Exception]:
        for frees_everything in (False, True, None):
            try:
                with _device_errors():
                    self._call_started, self._least_s = self._work_clock(), 0.0
                    began = time.monotonic()
                    result = call()
                    if (sleep_s := self._sleep_s(time.monotonic() - began)) > 0.0:
                        time.sleep(sleep_s)
                    return result, None
            except Exception as error:  # a job ends here, and its caller's future fails
                failure = error
            # Its traceback keeps all that the job's frames hold, and the caller may keep the error for long.
            drop_frames(failure)
            if free_memory is None or frees_everything is None or not isinstance(failure, OutOfMemory):
                break
            self._attempt(partial(free_memory, frees_everything))
        return None, failure

    def _sleep_s(self, taken_s: float) -> float:
        slowed_s = (self.slowdown - 1.0) * (self._work_clock() - self._call_started)
        return max(slowed_s, self._least_s - taken_s)

    def extend_job(self, seconds: float) -> None:
        """Adds to the seconds that the running call takes at least: the thread sleeps for the rest. Call it in it."""
        self._least_s += seconds

    def job_s(self) -> float:
        """Returns the seconds that the running job has taken, plus those that it will sleep for them. Call it in it."""
        taken_s = time.monotonic() - (self._job_started_at or 0.0)
        return taken_s + max(0.0, self._sleep_s(taken_s))

    def _stop(self, reason: str) -> None:
        with self._condition:
            self._closing = True
            jobs = [job for queue in self._queues.values() for job in queue]
            for queue in self._queues.values():
                queue.clear()
            self._condition.notify_all()
        for job in jobs:
            job.future.set_exception(DeviceError(reason))


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory("The device is out of memory; hold fewer stages or microbatches.") from error
        first_line = (str(error).splitlines() or [repr(error)])[0][:200]
        raise DeviceError(f"The device failed ({first_line}); start the daemon again.") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of torch, numpy or Python says that memory did not suffice, the device's or the host's.

    torch raises its own OutOfMemoryError only where its own allocator fails: the CPU's, pinned memory, and what cuBLAS,
    cuDNN and others allocate for themselves give a RuntimeError.
    """
    if isinstance(error, (OutOfMemory, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def drop_frames(error: BaseException) -> None:
    """Turns the tracebacks of an error and of those behind it into notes, and drops all that their frames hold."""
    waiting: list[BaseException | None] = [error]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            waiting += [current.__cause__, current.__context__]
            if current.__traceback__ is not None:
                current.add_note("".join(traceback.format_tb(current.__traceback__)))
                traceback.clear_frames(current.__traceback__)
                current.__traceback__ = None  # a frame that was cleared still holds its function's closure


def work_clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the work_clock for a DeviceQueue of `device`."""
    # With one thread its own processor time: the time that a job waits for a core, which daemons of one machine share,
    # is then not multiplied by `slowdown`.
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.monotonic


def choose_device(name: str) -> torch.device:
    """Returns the device for "auto", "cpu", "cuda" (cuda:0), "cuda:N" or "mps" (the GPU of Apple's processors).

    "auto": the first CUDA device that torch sees and has kernels for, otherwise the CPU; never mps, on which nothing
    was tested. Raises DeviceError for another name, and for a device that torch does not see or has no kernels for.
    """
    if name == "auto":
        seen = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
        usable = next((number for number in seen if not why_cuda_device_unsupported(number)), None)
        return torch.device("cpu") if usable is None else torch.device("cuda", usable)
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceError("Device 'mps' was asked for, but torch sees no GPU of Apple; else say --device cpu.")
        return torch.device("mps")
    if not re.fullmatch("cuda(:[0-9]+)?", name):
        raise DeviceError(f"Device {name!r} is not known; say auto, cpu, cuda, cuda:N or mps.")
    if not torch.cuda.is_available():
        unseen = unused_gpus_remark() or "torch sees no CUDA device"
        raise DeviceError(f"Device {name!r} was asked for, but {unseen}; else say --device cpu.")
    number = int(name.removeprefix("cuda").lstrip(":") or 0)
    if number >= torch.cuda.device_count():
        raise DeviceError(f"There is no {name!r}; torch sees {torch.cuda.device_count()} CUDA device(s).")
    if unsupported := why_cuda_device_unsupported(number):
        raise DeviceError(f"Device {name!r} cannot be used: {unsupported}")
    return torch.device("cuda", number)


def all_devices() -> list[str]:
    """Returns the names of the GPUs that torch sees and has kernels for, or ["cpu"]."""
    seen = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return [f"cuda:{number}" for number in seen if not why_cuda_device_unsupported(number)] or ["cpu"]


def product_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which layers multiply on `device`: bf16, fp16 on Volta and Turing, or float32.

    Of a CPU always float32: whether its bf16 is faster depends on the layers, see machine_profile.find_product_dtype.
    """
    if has_native_bf16(device):
        return torch.bfloat16
    # Their tensor cores take fp16; older cards have none, and those of Pascal are slower in fp16 than in float32.
    has_tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
    return torch.float16 if has_tensor_cores else torch.float32


def has_native_bf16(device: torch.device) -> bool:
    """Returns whether `device` is a CUDA device with bf16 in hardware; False for every CPU."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
