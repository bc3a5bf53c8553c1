"""The compute device, and the one thread that launches jobs on it by priority, and hands on their results."""

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
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, TypeVarTuple

import torch
from agora_protocol.errors import Busy, DeviceError, OutOfMemory

from agora.train.accelerator import Accelerator, HostAccelerator, Mark
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


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """What a job's function returns whose result the device still computes.

    finish: called on the device thread once all that the function launched has ended; returns the job's result. Only it
    may change what other jobs see, and only once it has read that the result is good.
    give_up: called instead where the device has failed meanwhile.
    """

    finish: Callable[[], T]
    give_up: Callable[[], None] = lambda: None


@dataclass(slots=True, eq=False)
class _DeviceJob:
    priority: Priority
    call: Callable[[], Any]
    afterwards: Callable[[], None]
    free_memory: FreeMemory | None
    is_pass: bool
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    queued_at: float = field(default_factory=time.monotonic)
    launched_at: float = 0.0


@dataclass(slots=True)
class _Outstanding:
    # Work that the accelerator may still compute: of a job, or with None what came after a job's result.
    job: _DeviceJob | None
    launched: Launched[Any] | None
    mark: Mark

    def remaining_s(self) -> float:
        try:
            return self.mark.remaining_s()
        except RuntimeError:  # it is over, and who ends it will have the error
            return 0.0


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Which device a span is computed on, and how.

    name: "auto", "cpu", "cuda", "cuda:N" or "mps", see choose_device.
    state_in_host: the optimizer's state is in host memory, see OptimizerOffload.
    slowdown: factor on the time of each job, at least 1.
    emulated_s: what a stage's forward pass takes on an EmulatedAccelerator, see JobTimes; 0: as long as it takes.
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
    """The seconds of jobs on an EmulatedAccelerator: a small, fast model imitates a large one's timing on a GPU.

    forward_s: of one stage's forward pass. A backward pass takes twice as much, as it has twice the operations. A step
    takes a quarter: the optimizer of a large model takes 1 to 3 % of a step's passes.
    """

    forward_s: float = 0.0

    def passes_s(self, stages: int, *, forward: bool, backward: bool) -> float:
        """Returns the seconds of one microbatch's passes through so many stages."""
        return stages * self.forward_s * (forward + 2 * backward)

    @property
    def step_s(self) -> float:
        return self.forward_s / 4


class DeviceLoad(NamedTuple):
    """Seconds since the start of a device's queue: of its jobs, and of what they waited in the queue, all summed."""

    busy_s: float
    queued_s: float


class DeviceQueue:
    """The queue of a device's jobs, and the thread that launches them one after the other until `close`.

    Jobs run in order of Priority, and of one priority the oldest first. But an evaluation that has waited for
    MAX_EVALUATION_WAIT_S comes first, unless the last job was an evaluation.

    A job that is a pass may be launched while the accelerator still computes the one before, whose result is then
    handed on as soon as it is there: so the accelerator does not wait for the host. Every other job begins when all
    results before it were handed on.
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
        accelerator: Accelerator | None = None,
    ) -> None:
        """Starts the thread, which also calls `fault` and `on_error`.

        limit: maximum number of waiting jobs of one priority; backwards, which end earlier work, have none.
        slowdown: factor on the time that each job takes, at least 1; the thread sleeps for the additional time, and
        then there is one job at a time.
        work_clock: returns seconds, by which a job's time is measured for `slowdown`.
        fault: called with "device.job" at the start of each job.
        on_error: called with the exception of an `afterwards`.
        is_idle: whether the device has nothing to compute at this moment; called by `watch`, or by `sample_idleness`;
        None for a device that is the thread itself.
        accelerator: on which the jobs launch their work; None: they do it themselves.
        """
        self._accelerator = accelerator or HostAccelerator()
        self._outstanding: deque[_Outstanding] = deque()
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
        self._busy_since: float | None = None  # None while there is no job
        self._last_ended_at = self._started_at
        self._job_began_at = self._started_at  # of the job whose result is made
        self._call_started = 0.0  # by the work clock
        self._failures = 0  # jobs in a row in which the device has failed
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    async def run(
        self,
        priority: Priority,
        function: Callable[[*Ts], T | Launched[T]],
        *args: *Ts,
        afterwards: Callable[[], None] = lambda: None,
        free_memory: FreeMemory | None = None,
        on_abandoned: Callable[[T], None] = lambda result: None,
        keeps_result: bool = False,
        is_pass: bool = False,
    ) -> T:
        """Runs `function(*args)` on the device thread and returns its result.

        afterwards: called on the device thread after the result was handed back, before any other job begins but passes
        that were launched ahead, for work that no caller waits for; not called if the function raised. free_memory: if
        memory does not suffice, `free_memory(False)` is called and the job is tried again; if it fails again,
        `free_memory(True)`, and a third and last time. So function and afterwards must change nothing when they fail
        for lack of memory. When the caller is cancelled, a queued job never runs; the result of a running one is passed
        to `on_abandoned` on the event loop. With keeps_result, for what cannot be undone, the first cancellation of a
        running job does nothing, and its result is returned. is_pass: it may begin while the accelerator computes the
        pass before. Where `function` returns Launched, the result is that of its `finish`; if that lacks memory,
        `function` is called again.

        Raises the function's own exception, but torch's as OutOfMemory or DeviceError; Busy without waiting when
        `limit` jobs of this priority wait, never for a backward; DeviceError when the queue is closed or the thread has
        ended. No error keeps a tensor of the job alive.
        """
        job = _DeviceJob(priority, lambda: function(*args), afterwards, free_memory, is_pass)
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

    @property
    def launches_ahead(self) -> bool:
        """Whether the device thread launches a job while the accelerator computes another."""
        return self._max_launched > 1

    def waiting(self) -> int:
        """Returns the number of queued jobs, without those that were launched."""
        return sum(map(len, self._queues.values()))

    def busy_fraction(self) -> float:
        """Returns the fraction of the time since the start in which there was a job, sleeps of `slowdown` included."""
        return self.load().busy_s / max(time.monotonic() - self._started_at, 1e-9)

    def load(self) -> DeviceLoad:
        """Returns the seconds so far; busy_s has those of the running jobs and the sleeps of `slowdown`, too."""
        with self._condition:
            running = time.monotonic() - self._busy_since if self._busy_since is not None else 0.0
            return DeviceLoad(self._busy_s + running, self._queued_s)

    def sample_idleness(self) -> None:
        """Looks once whether the device is idle inside a job: then it waits for the host, which launches too slowly."""
        since = self._busy_since
        if self._is_idle is None or since is None:
            return
        try:
            is_idle = self._is_idle()
        except RuntimeError:  # a device that fails says so to its next job
            return
        if self._busy_since == since:  # otherwise the device may have been asked after the job
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
            while True:
                if (job := self._next_job()) is not None:
                    self._launch(job)
                elif self._outstanding:
                    self._end()
                else:
                    return
                del job  # its arguments and result must not live until the next job comes
        finally:
            self._stop("The device thread has ended; start the daemon again.")
            for job in (outstanding.job for outstanding in self._outstanding):
                if job is not None:
                    job.future.set_exception(DeviceError("The device thread has ended; start the daemon again."))

    def _next_job(self) -> _DeviceJob | None:
        # None: the oldest outstanding work is to be ended, or there is none, and the queue is closed.
        with self._condition:
            while not self._closing:
                # First what keeps the accelerator supplied.
                if (queue := self._next_queue()) and self._may_launch(queue[0]):
                    job = queue.popleft()
                    self._last_priority = job.priority
                    job.launched_at = time.monotonic()
                    self._queued_s += job.launched_at - job.queued_at
                    if self._busy_since is None:
                        self._busy_since = job.launched_at
                    return job
                remaining_s = self._outstanding[0].remaining_s() if self._outstanding else None
                if remaining_s == 0.0:
                    return None
                self._condition.wait(remaining_s)
            return None

    def _next_queue(self) -> deque[_DeviceJob] | None:
        evaluations = self._queues[Priority.EVALUATE]
        if evaluations and self._last_priority is not Priority.EVALUATE:
            waited_s = time.monotonic() - evaluations[0].queued_at
            if waited_s >= MAX_EVALUATION_WAIT_S:
                return evaluations
        return next(filter(None, self._queues.values()), None)

    @property
    def _max_launched(self) -> int:
        return 1 if self.slowdown > 1.0 else self._accelerator.max_launched

    def _may_launch(self, job: _DeviceJob) -> bool:
        if not job.is_pass:
            return not self._outstanding
        # What came after a result does not count: a step must not keep the next pass from being launched behind it.
        return sum(outstanding.job is not None for outstanding in self._outstanding) < self._max_launched

    def _launch(self, job: _DeviceJob) -> None:
        self._job_began_at = job.launched_at
        is_launched = False
        failure: Exception | None = DeviceError("The device thread was ended by this job; start the daemon again.")
        try:
            _, fault = self._attempt(partial(self._fault, "device.job"))
            if fault is not None:
                failure = fault
            else:
                begun, failure = self._attempt(partial(self._begin, job), self._freeing(job))
                if begun is not None:
                    self._outstanding.append(begun)
                    is_launched = True
                del begun
        finally:
            if not is_launched:
                self._conclude(job, failure)
        if is_launched and self._max_launched == 1:
            self._end()

    def _begin(self, job: _DeviceJob) -> _Outstanding:
        result = job.call()
        launched = result if isinstance(result, Launched) else Launched(lambda: result)
        return _Outstanding(job, launched, self._accelerator.mark())

    def _end(self) -> None:
        outstanding = self._outstanding.popleft()
        job = outstanding.job
        failure: Exception | None = DeviceError("The device thread was ended by this job; start the daemon again.")
        try:
            if job is None:
                _, failure = self._attempt(partial(self._wait, outstanding.mark))
                return
            complete, whole = partial(self._complete, outstanding), partial(self._whole, job)
            result, failure = self._attempt(complete, self._freeing(job), whole)
            if failure is None:
                job.future.set_result(result)
                del result
                # The caller has its result already: nobody waits for this.
                _, failure = self._attempt(job.afterwards, self._freeing(job))
                if self._accelerator.max_launched > 1:
                    mark, failed = self._attempt(self._accelerator.mark)
                    failure = failure or failed
                    if mark is not None:
                        self._outstanding.append(_Outstanding(None, None, mark))
        finally:
            self._conclude(job, failure)

    def _complete(self, outstanding: _Outstanding) -> Any:
        # Nothing else may keep what was launched: its gradients are freed before a step is taken, or the job repeated.
        job, launched = outstanding.job, outstanding.launched
        outstanding.launched = None
        assert job is not None and launched is not None
        try:
            self._wait(outstanding.mark)
        except RuntimeError:
            launched.give_up()
            raise
        self._job_began_at = max(job.launched_at, self._last_ended_at)
        return launched.finish()

    def _whole(self, job: _DeviceJob) -> Any:
        return self._complete(self._begin(job))

    def _wait(self, mark: Mark) -> None:
        while (remaining_s := mark.remaining_s()) > 0.0:
            time.sleep(remaining_s)

    def _freeing(self, job: _DeviceJob) -> FreeMemory | None:
        if (free_memory := job.free_memory) is None:
            return None

        def free(everything: bool) -> None:
            while self._outstanding:  # their gradients take memory, too
                self._end()
            free_memory(everything)

        return free

    def _conclude(self, job: _DeviceJob | None, failure: Exception | None) -> None:
        with self._condition:
            self._failures = self._failures + 1 if isinstance(failure, DeviceError) else 0
            self._last_ended_at = time.monotonic()
            if not self._outstanding and self._busy_since is not None:
                self._busy_s += self._last_ended_at - self._busy_since
                self._busy_since = None
        if failure is not None and (job is None or job.future.done()):
            self._on_error(failure)
        elif failure is not None and job is not None:
            job.future.set_exception(failure)

    def _attempt(
        self, call: Callable[[], T], free_memory: FreeMemory | None = None, again: Callable[[], T] | None = None
    ) -> tuple[T, None] | tuple[None, Exception]:
        # again: in the place of `call`, once it has failed.
        for frees_everything in (False, True, None):
            try:
                with _device_errors():
                    self._call_started = self._work_clock()
                    result = call()
                    if (sleep_s := self._sleep_s()) > 0.0:
                        time.sleep(sleep_s)
                    return result, None
            except Exception as error:  # a job ends here, and its caller's future fails
                failure = error
            # Its traceback keeps all that the job's frames hold, and the caller may keep the error for long.
            drop_frames(failure)
            if free_memory is None or frees_everything is None or not isinstance(failure, OutOfMemory):
                break
            self._attempt(partial(free_memory, frees_everything))
            call = again or call
        return None, failure

    def _sleep_s(self) -> float:
        return (self.slowdown - 1.0) * (self._work_clock() - self._call_started)

    def extend_job(self, seconds: float) -> None:
        """Adds to the time that an emulated accelerator takes for what the running function launches. Call it in it."""
        self._accelerator.compute(seconds)

    def job_s(self) -> float:
        """Returns the seconds that the running job has taken, plus those that it will sleep for them.

        Without those in which it waited for the accelerator to end the job before. Call it in the job's `finish`.
        """
        return time.monotonic() - self._job_began_at + self._sleep_s()

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
