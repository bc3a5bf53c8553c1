"""An accelerator computes one job while the host works on the others: in order, exact when it fails, never idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import uvloop
from agora_protocol.errors import DeviceError, OutOfMemory
from agora_protocol.ids import Span

from agora.codec import BoundaryCodec, gradient_dither_key
from agora.core.span_work import ForwardKey, SpanWork
from agora.observe.events import MicrobatchCounted, TaskFailed
from agora.train import device_worker
from agora.train.accelerator import MAX_LAUNCHED, EmulatedAccelerator, HostAccelerator, Mark, accelerator_of
from agora.train.device import DeviceOptions, DeviceQueue, Launched, Priority
from agora.train.device_worker import DeviceWorker
from tests.train.support import Events, batches_for, microbatch_id, small_manifest, tokens_of

FORWARD_S, BACKWARD_S = 0.040, 0.080  # of one layer of 8b
DECODE_S, ENCODE_S, LAUNCH_S = 0.016, 0.014, 0.004  # on the host, for each job


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, at: float) -> None:
        self.now = max(self.now, at)


class VirtualAccelerator(EmulatedAccelerator):
    """One for whose results the device thread waits in virtual time, where it has nothing else to do.

    worked: when it began and ended each work.
    """

    def __init__(self, clock: VirtualClock, max_launched: int) -> None:
        super().__init__(clock=clock)
        self.clock, self.max_launched = clock, max_launched
        self.worked: list[tuple[float, float]] = []

    def compute(self, seconds: float) -> None:
        super().compute(seconds)
        self.worked.append((self._ends_at - seconds, self._ends_at))

    def mark(self) -> Mark:
        return VirtualMark(super().mark(), self.clock)

    @property
    def gaps(self) -> list[float]:
        """Between one work and the next."""
        return [begin - end for (_, end), (begin, _) in zip(self.worked, self.worked[1:], strict=False)]

    @property
    def busy(self) -> float:
        seconds = sum(end - begin for begin, end in self.worked)
        return seconds / (self.worked[-1][1] - self.worked[0][0])


@dataclass
class VirtualMark:
    mark: Mark
    clock: VirtualClock

    def remaining_s(self) -> float:
        self.clock.advance_to(self.clock.now + self.mark.remaining_s())
        return 0.0


@dataclass
class HeldMark:
    """A mark that the accelerator reaches when the test says so, or at which it fails."""

    reached: threading.Event = field(default_factory=threading.Event)
    failure: str = ""

    def remaining_s(self) -> float:
        if self.reached.is_set() and self.failure:
            raise RuntimeError(self.failure)
        return 0.0 if self.reached.is_set() else 0.001


class HeldAccelerator(HostAccelerator):
    """One whose every mark is held, if `holds`."""

    max_launched = MAX_LAUNCHED

    def __init__(self, holds: bool = True) -> None:
        self.holds = holds
        self.marks: list[HeldMark] = []

    def mark(self) -> Mark:
        self.marks.append(HeldMark())
        if not self.holds:
            self.marks[-1].reached.set()
        return self.marks[-1]

    async def until_launched(self, count: int) -> HeldMark:
        """Waits until so many marks were made; the last of them."""
        while len(self.marks) < count:
            await asyncio.sleep(0.001)
        return self.marks[count - 1]


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 20))


async def queued(queue: DeviceQueue, count: int) -> None:
    while queue.waiting() != count:
        await asyncio.sleep(0)


async def hold(queue: DeviceQueue) -> Callable[[], Awaitable[None]]:
    """Keeps the device thread from all that is queued later, until the function that is returned is called."""
    entered, opened = threading.Event(), threading.Event()

    def job() -> None:
        entered.set()
        assert opened.wait(30)

    task = asyncio.ensure_future(queue.run(Priority.BACKWARD, job))
    await asyncio.to_thread(entered.wait, 30)

    async def release() -> None:
        opened.set()
        await task

    return release


@dataclass
class Timeline:
    """What an accelerator and the device thread did, in virtual time. order: (what, number of the job)."""

    accelerator: VirtualAccelerator
    order: list[tuple[str, int]] = field(default_factory=list)


def timeline_of(max_launched: int, microbatches: int = 30, step_s: float = 0.0) -> Timeline:
    """Of a device that computes forwards and backwards in turn, which are there when it begins.

    The host decodes on a thread of its own, one job after the other; it launches and encodes on the device thread.
    step_s: of what each backward launches after its result.
    """
    clock = VirtualClock()
    timeline = Timeline(VirtualAccelerator(clock, max_launched))

    async def test() -> None:
        queue = DeviceQueue(accelerator=timeline.accelerator)
        release = await hold(queue)

        def job(number: int) -> Launched[None]:
            timeline.order.append(("launch", number))
            clock.advance_to(DECODE_S * (number + 1))
            clock.now += LAUNCH_S
            queue.extend_job(BACKWARD_S if number % 2 else FORWARD_S)

            def encode() -> None:
                clock.now += ENCODE_S
                timeline.order.append(("finish", number))

            return Launched(encode)

        def step(number: int) -> None:
            if step_s and number % 2:
                queue.extend_job(step_s)

        jobs = [
            queue.run(Priority.FORWARD, job, number, is_pass=True, afterwards=partial(step, number))
            for number in range(2 * microbatches)
        ]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await queued(queue, len(jobs))
        await release()
        await asyncio.gather(*tasks)
        await queue.close()

    run(test)
    return timeline


def test_the_device_never_waits_while_the_host_decodes_and_encodes_a_good_part_of_each_jobs_time() -> None:
    device = timeline_of(MAX_LAUNCHED).accelerator
    assert device.busy >= 0.97 and max(device.gaps) == pytest.approx(0.0, abs=1e-9)
    one_at_a_time = timeline_of(1).accelerator
    assert one_at_a_time.busy < 0.85 and min(one_at_a_time.gaps) >= ENCODE_S, "there the device waits in every job"
    assert len(device.worked) == len(one_at_a_time.worked) == 60


def test_nor_does_it_wait_where_steps_are_launched_between_the_passes() -> None:
    device = timeline_of(MAX_LAUNCHED, step_s=0.01).accelerator
    assert len(device.worked) == 90
    assert max(device.gaps[:-1]) == pytest.approx(0.0, abs=1e-9), "but before the last step, which no pass follows"


def test_a_job_is_launched_before_the_last_ones_result_is_read_and_never_a_third() -> None:
    order = timeline_of(MAX_LAUNCHED, 4).order
    assert [number for what, number in order if what == "finish"] == list(range(8)), "results come in order"
    for number in range(7):
        assert order.index(("launch", number + 1)) < order.index(("finish", number))
    for number in range(6):
        assert order.index(("finish", number)) < order.index(("launch", number + 2))


def test_what_is_no_pass_begins_when_nothing_is_outstanding() -> None:
    order: list[str] = []

    async def test() -> None:
        accelerator = HeldAccelerator(holds=False)
        queue = DeviceQueue(accelerator=accelerator)
        release = await hold(queue)

        def job(name: str) -> Launched[None]:
            order.append(name)
            return Launched(lambda: order.append(f"end of {name}"))

        jobs = [
            asyncio.ensure_future(queue.run(Priority.FORWARD, job, name, is_pass="pass" in name))
            for name in ("pass 0", "pass 1", "state", "pass 2", "pass 3")
        ]
        await queued(queue, len(jobs))
        await release()
        await asyncio.gather(*jobs)
        await queue.close()

    run(test)
    assert order == [
        *("pass 0", "pass 1", "end of pass 0", "end of pass 1"),
        *("state", "pass 2", "end of state", "pass 3", "end of pass 2", "end of pass 3"),
    ]


@pytest.mark.parametrize("later", [0, 1])
def test_a_failure_that_comes_late_reaches_its_caller_and_takes_no_result(later: int) -> None:
    called: list[str] = []

    async def test() -> None:
        accelerator = HeldAccelerator()
        queue = DeviceQueue(accelerator=accelerator)

        def job(number: int) -> Launched[int]:
            return Launched(
                lambda: called.append(f"finish {number}") or number, lambda: called.append(f"give up {number}")
            )

        jobs = [asyncio.ensure_future(queue.run(Priority.FORWARD, job, number, is_pass=True)) for number in range(2)]
        await accelerator.until_launched(2)
        accelerator.holds = False
        accelerator.marks[later].failure = "CUDA error: unspecified launch failure"
        for mark in accelerator.marks:
            mark.reached.set()
        with pytest.raises(DeviceError, match="unspecified launch failure"):
            await jobs[later]
        assert await jobs[1 - later] == 1 - later
        assert await queue.run(Priority.FORWARD, lambda: 3) == 3, "the thread goes on"
        await queue.close()

    run(test)
    assert sorted(called) == sorted([f"give up {later}", f"finish {1 - later}"])


def test_a_job_whose_memory_runs_out_late_is_done_again_once_the_others_have_ended() -> None:
    called: list[str] = []

    async def test() -> None:
        accelerator = HeldAccelerator()
        queue = DeviceQueue(accelerator=accelerator)

        def job(number: int) -> Launched[int]:
            called.append(f"launch {number}")

            def finish() -> int:
                if number == 0 and called.count("launch 0") == 1:
                    raise torch.OutOfMemoryError("injected")
                called.append(f"finish {number}")
                return number

            return Launched(finish)

        jobs = [
            asyncio.ensure_future(
                queue.run(
                    Priority.FORWARD,
                    job,
                    number,
                    is_pass=True,
                    free_memory=lambda everything: called.append(f"free {everything}"),
                )
            )
            for number in range(2)
        ]
        await accelerator.until_launched(2)
        accelerator.holds = False
        for mark in accelerator.marks:
            mark.reached.set()
        assert await asyncio.gather(*jobs) == [0, 1]
        await queue.close()

    run(test)
    assert called == ["launch 0", "launch 1", "finish 1", "free False", "launch 0", "finish 0"]


def test_a_launch_that_lacks_memory_waits_for_what_the_jobs_before_it_hold() -> None:
    called: list[str] = []

    async def test() -> None:
        accelerator = HeldAccelerator(holds=False)
        queue = DeviceQueue(accelerator=accelerator)
        release = await hold(queue)

        def job(number: int) -> Launched[None]:
            if number == 1 and "finish 0" not in called:
                raise torch.OutOfMemoryError("injected")
            return Launched(lambda: called.append(f"finish {number}"))

        jobs = [
            asyncio.ensure_future(
                queue.run(Priority.FORWARD, job, number, is_pass=True, free_memory=lambda everything: None)
            )
            for number in range(2)
        ]
        await queued(queue, 2)
        await release()
        await asyncio.gather(*jobs)
        await queue.close()

    run(test)
    assert called == ["finish 0", "finish 1"]


def test_memory_that_stays_short_is_an_error_of_that_job_alone() -> None:
    async def test() -> None:
        queue = DeviceQueue(accelerator=EmulatedAccelerator())
        frees: list[bool] = []

        def fail() -> None:
            raise torch.OutOfMemoryError("injected")

        short = queue.run(
            Priority.FORWARD,
            lambda: Launched(fail),
            is_pass=True,
            free_memory=lambda everything: frees.append(everything),
        )
        with pytest.raises(OutOfMemory):
            await short
        assert frees == [False, True]
        assert await queue.run(Priority.FORWARD, lambda: Launched(lambda: 1), is_pass=True) == 1
        await queue.close()

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_fails_what_was_launched() -> None:
    async def test() -> None:
        accelerator = HeldAccelerator()
        queue = DeviceQueue(accelerator=accelerator)
        launched = asyncio.ensure_future(queue.run(Priority.FORWARD, lambda: Launched(int), is_pass=True))
        await accelerator.until_launched(1)
        deadly = asyncio.ensure_future(queue.run(Priority.FORWARD, exec, "raise SystemExit", is_pass=True))
        for task in (deadly, launched):
            with pytest.raises(DeviceError, match="thread"):
                await task

    run(test)


def test_a_closed_queue_ends_what_was_launched() -> None:
    async def test() -> None:
        accelerator = HeldAccelerator()
        queue = DeviceQueue(accelerator=accelerator)
        jobs = [
            asyncio.ensure_future(queue.run(Priority.FORWARD, lambda: Launched(lambda: 1), is_pass=True))
            for _ in range(2)
        ]
        await accelerator.until_launched(2)
        assert not await queue.close(0.01)
        accelerator.holds = False
        for mark in accelerator.marks:
            mark.reached.set()
        assert await asyncio.gather(*jobs) == [1, 1]
        assert await queue.close()

    run(test)


def test_a_slowed_device_has_one_job_at_a_time() -> None:
    async def test() -> None:
        queue = DeviceQueue(accelerator=HeldAccelerator(holds=False), slowdown=1.001)
        release, order = await hold(queue), list[str]()

        def job(number: int) -> Launched[None]:
            order.append(f"launch {number}")
            return Launched(lambda: order.append(f"finish {number}"))

        jobs = [asyncio.ensure_future(queue.run(Priority.FORWARD, job, n, is_pass=True)) for n in range(2)]
        await queued(queue, 2)
        await release()
        await asyncio.gather(*jobs)
        await queue.close()
        assert order == ["launch 0", "finish 0", "launch 1", "finish 1"]

    run(test)


def test_the_cpu_is_the_thread_itself_and_an_emulated_device_is_not() -> None:
    cpu = accelerator_of(torch.device("cpu"))
    assert cpu.max_launched == 1 and cpu.mark().remaining_s() == 0.0
    assert accelerator_of(torch.device("cpu"), is_emulated=True).max_launched == MAX_LAUNCHED


def test_work_on_an_emulated_device_ends_one_after_the_other_and_not_before_the_real_one() -> None:
    clock, real = VirtualClock(), HeldAccelerator()
    device = EmulatedAccelerator(real, clock)
    device.compute(2.0)
    first = device.mark()
    clock.now = 1.0
    device.compute(3.0)
    second = device.mark()
    assert (first.remaining_s(), second.remaining_s()) == (1.0, 4.0)
    clock.now = 5.0
    assert second.remaining_s() > 0.0, "the real one still computes"
    real.marks[1].reached.set()
    assert second.remaining_s() == 0.0
    clock.now = 7.0
    device.compute(1.0)
    assert device.mark().remaining_s() == 1.0, "it begins when it is launched"


# --- the device worker on it


class Middle:
    """The middle stage of three on an accelerator of the test's, and what arrives there."""

    def __init__(self, worker: DeviceWorker, events: Events) -> None:
        self.worker, self.events = worker, events
        manifest = manifest_of_three()
        self._codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
        random = torch.Generator().manual_seed(3)
        self._entry, self.gradient = (torch.randn(manifest.boundary_shape(), generator=random) for _ in range(2))
        self._tokens = tokens_of(batches_for(manifest, 1)[0][0])

    async def forward(self, number: int) -> bytes:
        boundary = self._codec.encode(self._entry * (1 + number), "forward")
        work = SpanWork(microbatch_id(number), 1, boundary, self._tokens, "train")
        return bytes((await self.worker.forward(work)).data)

    async def backward(self, number: int) -> bytes:
        name = microbatch_id(number)
        gradient = self._codec.encode(self.gradient, "backward", gradient_dither_key(name, 2))
        result = await self.worker.backward(ForwardKey(name, 1), gradient)
        assert result.gradient is not None and result.busy_s > 0.0
        return bytes(result.gradient.data)

    @property
    def counted(self) -> tuple[bool, int, int]:
        """Whether the sum has anything, the tokens in it, and how many microbatches were reported."""
        stage = self.worker.trainer.stages[1]
        counted = len(self.events.of(MicrobatchCounted))
        return bool(stage.gradient_sum.flat.any()), stage.progress.tokens_in_share, counted


def manifest_of_three(**sections: Any) -> Any:
    return small_manifest(
        stages={"count": 3},
        boundary={"codec": "int6/int3"},
        schedule={"activations": "keep", "microbatch": 2},
        **sections,
    )


def with_middle(accelerator: object, test: Callable[[Middle], Awaitable[None]], target_tokens: int = 1 << 30) -> None:
    manifest = manifest_of_three(optimizer={"target_tokens": target_tokens})

    async def whole() -> None:
        events = Events()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_worker, "accelerator_of", lambda device, is_emulated: accelerator)
            worker = await DeviceWorker.create(manifest, Span(1, 1), report=events, device=DeviceOptions("cpu"))
        try:
            await test(Middle(worker, events))
        finally:
            await worker.close()

    run(whole)


def set_all(accelerator: HeldAccelerator) -> None:
    accelerator.holds = False
    for mark in accelerator.marks:
        mark.reached.set()


async def until_held(accelerator: HeldAccelerator, count: int = 1) -> list[HeldMark]:
    while len(held := [mark for mark in accelerator.marks if not mark.reached.is_set()]) < count:
        await asyncio.sleep(0.001)
    return held


def test_a_gradient_is_added_and_counted_when_its_result_is_there_and_not_before() -> None:
    accelerator = HeldAccelerator(holds=False)

    async def test(middle: Middle) -> None:
        await middle.forward(0)
        await middle.forward(1)
        accelerator.holds = True
        passes = [asyncio.ensure_future(middle.backward(number)) for number in range(2)]
        first, _ = await until_held(accelerator, 2)
        assert middle.counted == (False, 0, 0), "both are launched"
        first.reached.set()
        await passes[0]
        assert middle.counted == (True, 32, 1) and not passes[1].done()
        set_all(accelerator)
        await passes[1]
        assert middle.counted == (True, 64, 2)

    with_middle(accelerator, test)


def test_a_backward_that_fails_late_leaves_the_sum_as_it_was_and_the_next_one_counts() -> None:
    accelerator = HeldAccelerator(holds=False)

    async def test(middle: Middle) -> None:
        await middle.forward(0)
        await middle.forward(1)
        accelerator.holds = True
        passes = [asyncio.ensure_future(middle.backward(number)) for number in range(2)]
        first, _ = await until_held(accelerator, 2)
        first.failure = "CUDA error: device-side assert triggered"
        set_all(accelerator)
        with pytest.raises(DeviceError):
            await passes[0]
        await passes[1]
        assert middle.counted == (True, 32, 1)
        assert not middle.worker.trainer.stashed, "neither waits for a backward"

    with_middle(accelerator, test)


def test_a_forward_that_fails_late_is_not_kept() -> None:
    accelerator = HeldAccelerator(holds=False)

    async def test(middle: Middle) -> None:
        accelerator.holds = True
        forward = asyncio.ensure_future(middle.forward(0))
        (held,) = await until_held(accelerator)
        assert len(middle.worker.trainer.stashed) == 1, "a step must not change the weights of its graph"
        held.failure = "CUDA error: device-side assert triggered"
        set_all(accelerator)
        with pytest.raises(DeviceError):
            await forward
        assert not middle.worker.trainer.stashed

    with_middle(accelerator, test)


def test_a_gradient_that_turns_out_implausible_late_is_refused_and_may_be_sent_again() -> None:
    accelerator = HeldAccelerator(holds=False)

    async def test(middle: Middle) -> None:
        expected = [await middle.forward(0), await middle.backward(0)]
        before = middle.worker.trainer.stages[1].gradient_sum.flat.clone()
        assert await middle.forward(0) == expected[0]
        sound, middle.gradient = middle.gradient, middle.gradient * 1e9
        with pytest.raises(Exception, match="plausible"):
            await middle.backward(0)
        assert torch.equal(middle.worker.trainer.stages[1].gradient_sum.flat, before)
        middle.gradient = sound
        assert await middle.backward(0) == expected[1]
        assert middle.counted == (True, 64, 2)

    with_middle(accelerator, test)


def test_steps_between_launched_passes_give_the_same_bits_as_one_job_at_a_time() -> None:
    """Microbatches come in turn, so that each one's weights are the same; steps are taken after every second one."""

    async def passes_of(middle: Middle) -> Sequence[object]:
        found: list[object] = []
        for number in range(0, 8, 2):
            pair = (number, number + 1)
            found += await asyncio.gather(*map(middle.forward, pair))
            found += await asyncio.gather(*map(middle.backward, pair))
            copies = await middle.worker.copy_weights(1)  # a job after the step
            found += [middle.worker.step_of(1), *(values.tobytes() for values in copies.values())]
        return found

    results: list[Sequence[object]] = []

    async def test(middle: Middle) -> None:
        results.append(await passes_of(middle))
        assert middle.worker.step_of(1) == 4
        assert not middle.events.of(TaskFailed)

    for accelerator in (HostAccelerator(), EmulatedAccelerator(), HeldAccelerator(holds=False)):
        with_middle(accelerator, test, target_tokens=64)
    assert results[0] == results[1] == results[2]
