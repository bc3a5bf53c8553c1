"""The device queue: who goes first, what happens to cancelled jobs, how it ends, and what its failures look like."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import uvloop
from agora_protocol.errors import Busy, DeviceError

from agora.train import device
from agora.train.accelerator import EmulatedAccelerator
from agora.train.device import DeviceQueue, JobTimes, Launched, Priority, choose_device, work_clock_of


class Gate:
    """A job that occupies the device thread until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)

    async def occupy(self, queue: DeviceQueue) -> asyncio.Task[None]:
        task = asyncio.ensure_future(queue.run(Priority.FORWARD, self))
        await asyncio.to_thread(self.entered.wait, 30)
        return task


def run(test: Callable[[DeviceQueue], object], **options: object) -> None:
    """Runs the test on uvloop, with a queue that is closed at its end."""

    async def whole() -> None:
        queue = DeviceQueue(**options)
        try:
            await test(queue)
        finally:
            await queue.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(whole(), 60))


async def all_queued(queue: DeviceQueue, count: int) -> None:
    while queue.waiting() != count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(5))
def test_backward_goes_before_forward_before_evaluation_and_equals_in_order(seed: int) -> None:
    async def test(queue: DeviceQueue) -> None:
        gate, order = Gate(), []
        await gate.occupy(queue)
        asked = [
            (priority, number) for number, priority in enumerate(random.Random(seed).choices(list(Priority), k=40))
        ]
        jobs = [asyncio.ensure_future(queue.run(priority, order.append, (priority, n))) for priority, n in asked]
        await all_queued(queue, len(jobs))
        gate.opened.set()
        await asyncio.gather(*jobs)
        assert order == sorted(asked)

    run(test)


def test_a_job_that_comes_later_overtakes_those_of_lower_priority() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate, order = Gate(), []
        await gate.occupy(queue)
        forward = asyncio.ensure_future(queue.run(Priority.FORWARD, order.append, "forward"))
        await all_queued(queue, 1)
        backward = asyncio.ensure_future(queue.run(Priority.BACKWARD, order.append, "backward"))
        await all_queued(queue, 2)
        gate.opened.set()
        await asyncio.gather(forward, backward)
        assert order == ["backward", "forward"]

    run(test)


def test_an_evaluation_is_not_starved_by_a_device_that_is_always_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAX_EVALUATION_WAIT_S", 0.0)

    async def test(queue: DeviceQueue) -> None:
        gate, order = Gate(), []
        await gate.occupy(queue)
        names = ["e0", "e1", "f0", "f1"]
        priority = {"e": Priority.EVALUATE, "f": Priority.FORWARD}
        jobs = [asyncio.ensure_future(queue.run(priority[name[0]], order.append, name)) for name in names]
        await all_queued(queue, 4)
        gate.opened.set()
        await asyncio.gather(*jobs)
        assert order == ["e0", "f0", "e1", "f1"]  # at most every other job

    run(test)


def test_a_cancelled_waiters_queued_job_never_runs_and_frees_its_place() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate, order = Gate(), []
        await gate.occupy(queue)
        doomed = asyncio.ensure_future(queue.run(Priority.FORWARD, order.append, "doomed"))
        await all_queued(queue, 1)
        doomed.cancel()
        await all_queued(queue, 0)
        kept = asyncio.ensure_future(queue.run(Priority.FORWARD, order.append, "kept"))
        await all_queued(queue, 1)
        gate.opened.set()
        await kept
        assert doomed.cancelled()
        assert order == ["kept"]

    run(test, limit=1)


def test_a_job_cancelled_while_it_runs_is_finished_and_undone() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate, undone = Gate(), asyncio.Event()
        task = asyncio.ensure_future(queue.run(Priority.FORWARD, gate, on_abandoned=lambda result: undone.set()))
        await asyncio.to_thread(gate.entered.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        assert not undone.is_set()
        gate.opened.set()
        await asyncio.wait_for(undone.wait(), 30)
        assert task.cancelled()

    run(test)


def test_the_queue_is_bounded_for_each_priority() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        await gate.occupy(queue)
        jobs = [asyncio.ensure_future(queue.run(Priority.FORWARD, time.sleep, 0)) for _ in range(3)]
        await all_queued(queue, 3)
        with pytest.raises(Busy, match="3 forward jobs"):
            await queue.run(Priority.FORWARD, time.sleep, 0)
        backward = asyncio.ensure_future(queue.run(Priority.BACKWARD, time.sleep, 0))
        await all_queued(queue, 4)
        gate.opened.set()
        await asyncio.gather(backward, *jobs)

    run(test, limit=3)


def test_a_full_queue_refuses_no_backward_since_the_work_before_it_would_be_lost() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        running = await gate.occupy(queue)
        jobs = [asyncio.ensure_future(queue.run(Priority.BACKWARD, int, number)) for number in range(3)]
        await all_queued(queue, 3)
        gate.opened.set()
        assert await asyncio.gather(*jobs) == [0, 1, 2]
        await running

    run(test, limit=1)


def test_an_error_reaches_its_waiter_and_the_thread_goes_on() -> None:
    async def test(queue: DeviceQueue) -> None:
        with pytest.raises(ZeroDivisionError):
            await queue.run(Priority.FORWARD, divmod, 1, 0)
        assert await queue.run(Priority.FORWARD, divmod, 7, 2) == (3, 1)

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_fails_everyone_who_waits() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        await gate.occupy(queue)
        deadly = asyncio.ensure_future(queue.run(Priority.FORWARD, exec, "raise SystemExit"))
        behind = asyncio.ensure_future(queue.run(Priority.FORWARD, time.sleep, 0))
        await all_queued(queue, 2)
        gate.opened.set()
        for task in (deadly, behind):
            with pytest.raises(DeviceError, match="thread"):
                await task
        with pytest.raises(DeviceError, match="ended"):
            await queue.run(Priority.FORWARD, time.sleep, 0)

    run(test)


def test_then_runs_after_the_answer_and_before_the_next_job_and_its_failure_is_told() -> None:
    failures: list[Exception] = []

    async def test(queue: DeviceQueue) -> None:
        gate, order = Gate(), []
        await queue.run(Priority.FORWARD, order.append, "job", afterwards=gate)  # answered before `afterwards` ends
        following = asyncio.ensure_future(queue.run(Priority.BACKWARD, order.append, "next"))
        await all_queued(queue, 1)
        assert order == ["job"]
        gate.opened.set()
        await following
        await queue.run(Priority.FORWARD, order.append, "failing", afterwards=lambda: divmod(1, 0) and None)
        await queue.run(Priority.FORWARD, order.append, "after")
        assert order[-2:] == ["failing", "after"]

    run(test, on_error=failures.append)
    assert [type(error) for error in failures] == [ZeroDivisionError]


def test_closing_takes_bounded_time_although_a_job_hangs() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        running = await gate.occupy(queue)
        waiting = asyncio.ensure_future(queue.run(Priority.BACKWARD, time.sleep, 0))
        await all_queued(queue, 1)
        begun = time.monotonic()
        assert not await queue.close(0.1)
        assert time.monotonic() - begun < 2
        with pytest.raises(DeviceError, match="closed"):
            await waiting
        gate.opened.set()
        await running  # what runs is finished and answered
        assert await queue.close()

    run(test)


def test_the_fault_point_is_reached_once_for_each_job() -> None:
    points: list[str] = []

    async def test(queue: DeviceQueue) -> None:
        for _ in range(3):
            await queue.run(Priority.FORWARD, time.sleep, 0)

    run(test, fault=points.append)
    assert points == ["device.job"] * 3


def test_busy_time_is_measured_while_a_job_runs_and_after() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        task = await gate.occupy(queue)
        early = queue.busy_fraction()
        while queue.busy_fraction() <= early:
            await asyncio.sleep(0.001)
        gate.opened.set()
        await task
        await queue.run(Priority.FORWARD, time.sleep, 0)
        assert 0 < queue.busy_fraction() <= 1

    run(test)


def test_devices_are_chosen_by_name_and_refused_with_advice() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(DeviceError, match="say auto, cpu, cuda, cuda:N or mps"):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="--device cpu"):
            choose_device("cuda:0")
    assert not device.has_native_bf16(torch.device("cpu"))


def test_apples_gpu_is_used_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps") == torch.device("mps") != choose_device("auto")
    assert device.product_dtype(choose_device("mps")) == torch.float32
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no GPU of Apple; else say --device cpu"):
        choose_device("mps")


def test_a_device_counts_as_dead_after_failures_in_a_row_and_not_after_others() -> None:
    def fail() -> None:
        raise DeviceError("no")

    async def test(queue: DeviceQueue) -> None:
        for failures in (device.MAX_FAILURES - 1, device.MAX_FAILURES):
            for _ in range(failures):
                with pytest.raises(DeviceError, match="no"):
                    await queue.run(Priority.FORWARD, fail)
            if failures < device.MAX_FAILURES:
                await queue.run(Priority.FORWARD, lambda: None)
        with pytest.raises(DeviceError, match="3 times in a row"):
            await queue.watch()

    run(test)


def test_a_device_whose_thread_ended_is_noticed() -> None:
    async def test(queue: DeviceQueue) -> None:
        with pytest.raises(DeviceError):
            await queue.run(Priority.FORWARD, sys.exit)
        with pytest.raises(DeviceError, match="thread has ended"):
            await queue.watch()

    run(test)


def test_a_slowed_device_takes_its_factor_longer_for_each_job() -> None:
    async def test(queue: DeviceQueue) -> None:
        started = time.monotonic()
        await queue.run(Priority.FORWARD, time.sleep, 0.05)
        assert time.monotonic() - started >= 4 * 0.05

    run(test, slowdown=4.0)


def test_a_slowed_device_may_reckon_by_a_clock_of_its_work_and_says_what_it_took() -> None:
    """By that clock each job works for a second, whatever the wall's clock says; the sleeps are a thousandth of it."""
    worked = itertools.count()
    found = []

    async def test(queue: DeviceQueue) -> None:
        def job() -> None:
            found.append(queue.job_s())

        started = time.monotonic()
        await queue.run(Priority.FORWARD, job)
        assert time.monotonic() - started >= 0.002

    run(test, slowdown=1.001, work_clock=lambda: float(next(worked)))
    assert 0.001 <= found[0] < 1.0


def test_an_emulated_job_lasts_its_set_time_with_hardly_any_work_and_says_so() -> None:
    found = []

    async def test(queue: DeviceQueue) -> None:
        def job(part_s: float) -> Launched[None]:
            queue.extend_job(part_s)
            queue.extend_job(part_s)  # two passes, of which each adds its own
            return Launched(lambda: found.append(queue.job_s()))

        started, worked = time.monotonic(), time.process_time()
        await queue.run(Priority.FORWARD, job, 0.05, afterwards=lambda: queue.extend_job(0.03))
        await queue.run(Priority.FORWARD, lambda: None)  # what the last job set does not hold for this one
        taken_s = time.monotonic() - started
        assert 0.13 <= taken_s < 0.13 + 0.05 + (time.process_time() - worked) + 1.0
        assert queue.load().busy_s >= 0.13

    run(test, accelerator=EmulatedAccelerator())
    assert 0.1 <= found[0] < 0.1 + 1.0


def test_a_job_longer_than_its_set_time_is_not_made_longer() -> None:
    async def test(queue: DeviceQueue) -> None:
        def job() -> Launched[float]:
            queue.extend_job(0.02)
            time.sleep(0.03)
            return Launched(queue.job_s)

        job_s = await queue.run(Priority.FORWARD, job)
        assert 0.03 <= job_s < 0.05 + 1.0

    run(test, accelerator=EmulatedAccelerator())


def test_passes_through_stages_take_one_part_forward_two_backward_and_a_step_a_quarter() -> None:
    times = JobTimes(0.1)
    assert times.passes_s(2, forward=True, backward=False) == pytest.approx(0.2)
    assert times.passes_s(1, forward=False, backward=True) == pytest.approx(0.2)
    assert times.passes_s(2, forward=True, backward=True) == pytest.approx(0.6)
    assert times.step_s == pytest.approx(0.025)
    assert JobTimes().passes_s(9, forward=True, backward=True) == JobTimes().step_s == 0.0


def test_what_jobs_wait_in_the_queue_is_added_up() -> None:
    async def test(queue: DeviceQueue) -> None:
        gate = Gate()
        blocking = await gate.occupy(queue)
        waiting = [asyncio.ensure_future(queue.run(Priority.FORWARD, lambda: None)) for _ in range(3)]
        await all_queued(queue, 3)
        began, before = time.monotonic(), queue.load().queued_s
        while time.monotonic() < began + 0.02:
            await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(blocking, *waiting)
        assert queue.load().queued_s - before >= 3 * 0.02

    run(test)


def test_one_core_counts_its_own_work_and_more_cores_the_time() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert work_clock_of(torch.device("cpu")) is time.thread_time
        torch.set_num_threads(2)
        assert work_clock_of(torch.device("cpu")) is time.monotonic
    finally:
        torch.set_num_threads(threads)
    assert work_clock_of(torch.device("cuda")) is time.monotonic
