"""How a device is used is counted: idle while a job runs, its memory, and what it could do by its data sheet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agora.train.device import MIN_SAMPLES, DeviceQueue, Priority
from agora.train.device_use import DeviceReading, gauge_of, measured_peak, peak_flops, processor_name
from tests.train.support import pipeline_of, small_manifest


def run_in_job(look: Callable[[DeviceQueue], None], is_idle: Callable[[], bool] | None) -> float | None:
    """What idle_fraction says at the end, of a queue of which `look` was called while one job ran."""

    async def test() -> float | None:
        queue = DeviceQueue(is_idle=is_idle)
        began, may_end = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def job() -> None:
            loop.call_soon_threadsafe(began.set)
            may_end.wait(60)

        try:
            running = asyncio.create_task(queue.run(Priority.FORWARD, job))
            await began.wait()
            look(queue)
            may_end.set()
            await running
            return queue.idle_fraction()
        finally:
            may_end.set()
            await queue.close()

    return asyncio.run(test())


def looks(count: int) -> Callable[[DeviceQueue], None]:
    def look(queue: DeviceQueue) -> None:
        for _ in range(count):
            queue.sample_idleness()

    return look


def test_the_share_of_a_jobs_time_in_which_the_device_waits_is_what_was_seen() -> None:
    answers = [number % 4 == 0 for number in range(4 * MIN_SAMPLES)]
    assert run_in_job(looks(len(answers)), iter(answers).__next__) == 0.25
    assert run_in_job(looks(MIN_SAMPLES), lambda: False) == 0.0
    assert run_in_job(looks(MIN_SAMPLES), lambda: True) == 1.0


def test_few_looks_say_nothing_nor_does_a_device_that_is_the_thread_or_that_fails() -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error")

    assert run_in_job(looks(MIN_SAMPLES - 1), lambda: True) is None
    assert run_in_job(looks(MIN_SAMPLES), None) is None
    assert run_in_job(looks(MIN_SAMPLES), fail) is None


def test_before_and_after_jobs_the_device_is_not_asked() -> None:
    async def test() -> None:
        queue = DeviceQueue(is_idle=lambda: pytest.fail("it was asked"))
        queue.sample_idleness()
        await queue.run(Priority.FORWARD, lambda: None)
        assert await queue.close()  # a caller has its result a little before the job ends
        queue.sample_idleness()

    asyncio.run(test())


def test_a_job_that_ended_while_the_device_was_asked_does_not_count() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        running: list[asyncio.Future[None]] = []
        began, may_end = asyncio.Event(), threading.Event()

        def job() -> None:
            loop.call_soon_threadsafe(began.set)
            may_end.wait(60)

        def end_job() -> bool:
            may_end.set()
            asyncio.run_coroutine_threadsafe(asyncio.wait(running), loop).result(60)
            asyncio.run_coroutine_threadsafe(queue.run(Priority.FORWARD, lambda: None), loop).result(60)
            return True

        queue = DeviceQueue(is_idle=end_job)
        try:
            for _ in range(MIN_SAMPLES):
                began.clear()
                may_end.clear()
                running[:] = [asyncio.ensure_future(queue.run(Priority.FORWARD, job))]
                await began.wait()
                await asyncio.to_thread(queue.sample_idleness)
            assert queue.idle_fraction() is None
        finally:
            may_end.set()
            await queue.close()

    asyncio.run(test())


def test_watching_looks_while_a_job_runs() -> None:
    async def test() -> None:
        seen = threading.Event()
        queue = DeviceQueue(is_idle=lambda: seen.set() is None)
        watching = asyncio.create_task(queue.watch())
        try:
            assert await queue.run(Priority.FORWARD, seen.wait, 60)
        finally:
            watching.cancel()
            await queue.close()

    asyncio.run(test())


class FakeGpu:
    """A device of 80 GB that does a million operations a second."""

    can_idle = True

    def read(self) -> DeviceReading:
        return DeviceReading("Fake 80 GB", 20 * 10**9, 80 * 10**9, 1e6)

    def is_idle(self) -> bool:
        return False


def test_a_worker_tells_what_its_gauge_reads_and_a_cpu_its_name_and_memory() -> None:
    async def test() -> None:
        async with pipeline_of(small_manifest(), ["0"], gauge=FakeGpu()) as (worker,):
            assert worker.read_device() == FakeGpu().read() and worker.idle_fraction() is None
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            reading = worker.read_device()
            assert reading.name and reading.peak_flops is None and worker.idle_fraction() is None
            assert 0 < reading.memory_used < reading.memory_total

    asyncio.run(test())
    assert not gauge_of(torch.device("cpu")).can_idle


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4070", 58.3),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A1000", None),
        ("NVIDIA B200", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_and_of_no_other_card(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_peak_can_be_measured() -> None:
    assert 0 < measured_peak(torch.device("cpu"), size=64, repeats=2) < 1e16


def test_a_processor_has_the_kernels_name_or_that_of_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nmodel name\t: other\n")
    assert processor_name(tmp_path / "cpuinfo") == "AMD EPYC 7B13"
    assert processor_name(tmp_path / "none")
