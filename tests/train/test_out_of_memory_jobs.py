"""Out of memory at any allocation of a job: it is tried again with fewer kept graphs, and no microbatch is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from agora_protocol.errors import OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor

from agora.codec import BoundaryCodec, gradient_dither_key
from agora.core.span_work import ForwardKey, SpanWork
from agora.observe.events import TaskFailed
from agora.state.layout import StageState
from agora.train import span_trainer
from agora.train.activation_checkpointing import GraphBudget, Kept
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker
from tests.train.failing_allocation import FailingAllocation, FaultyJobs
from tests.train.support import Events, batches_for, microbatch_id, small_manifest, tokens_of

MODEL = {"width": 16, "layers": 3, "heads": 2, "key_value_heads": 2, "feed_forward": 32, "context": 8}


@pytest.fixture(autouse=True, params=["float32", "bf16"])
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    monkeypatch.setattr(span_trainer, "product_dtype", lambda device: dtype)


class Bench:
    """The middle stage of three, and the last one: two daemons' device workers, one microbatch per step."""

    def __init__(
        self, manifest: Manifest, middle: DeviceWorker, last: DeviceWorker, faults: FaultyJobs, events: Events
    ) -> None:
        self.middle, self.last, self.faults, self.events = middle, last, faults, events
        self._codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
        random = torch.Generator().manual_seed(3)
        self._entry, self._gradient = (torch.randn(manifest.boundary_shape(), generator=random) for _ in range(2))
        self._tokens = tokens_of(batches_for(manifest, 1)[0][0])
        # The codec keeps what it draws once for its rotations.
        self._codec.encode(self._gradient, "backward", gradient_dither_key(microbatch_id(0), 2))
        self.first_state: StageState | None = None

    def work(self, number: int, stage: int) -> SpanWork:
        return SpanWork(microbatch_id(number), stage, self._boundary, self._tokens, "train")

    @property
    def _boundary(self) -> WireTensor:
        return self._codec.encode(self._entry, "forward")

    async def forward(self, number: int) -> bytes:
        return bytes((await self.middle.forward(self.work(number, 1))).data)

    async def backward(self, number: int) -> object:
        microbatch = microbatch_id(number)
        gradient = self._codec.encode(self._gradient, "backward", gradient_dither_key(microbatch, 2))
        result = await self.middle.backward(ForwardKey(microbatch, 1), gradient)
        assert result.gradient is not None
        return bytes(result.gradient.data)

    async def run_last(self, number: int) -> object:
        result = await self.last.run_last_stages(self.work(number, 2))
        assert result.gradient is not None
        return result.loss_sum, bytes(result.gradient.data)

    async def evaluate(self, number: int) -> object:
        work = SpanWork(microbatch_id(number), 2, self._boundary, self._tokens, "evaluate")
        return (await self.last.run_last_stages(work)).loss_sum

    async def evaluate_middle(self, number: int) -> object:
        return bytes((await self.middle.forward(replace(self.work(number, 1), purpose="evaluate"))).data)

    async def share(self, number: int) -> object:
        return (await self.middle.close_share(1)).values.numpy().tobytes()

    async def step(self, number: int) -> object:
        mean = torch.ones(self.middle.layout(1).numel)
        await self.middle.step_with_gradient(1, self.middle.step_of(1), mean, 5)
        return None

    async def load(self, number: int) -> object:
        assert self.first_state is not None
        await self.middle.load_state(self.first_state)
        return None

    async def copy(self, number: int) -> object:
        return {name: values.tobytes() for name, values in (await self.middle.copy_weights(1)).items()}

    async def copy_last(self) -> None:
        await self.last.copy_weights(2)

    async def states(self) -> list[tuple[object, ...]]:
        found = []
        for worker, stage in ((self.middle, 1), (self.last, 2)):
            state = await worker.export_state(stage)
            found.append(
                (
                    *[(name, values.tobytes()) for name, values in state.arrays.items()],
                    state.step,
                    state.updates,
                    state.tokens_total,
                    state.history_hash,
                    worker.trainer.stages[stage].gradient_sum.flat.numpy().tobytes(),
                    worker.trainer.stages[stage].progress.tokens_in_share,
                )
            )
        return found


@asynccontextmanager
async def bench_of(**sections: Any) -> AsyncIterator[Bench]:
    manifest = small_manifest(
        **{
            "model": MODEL,
            "stages": {"count": 3},
            "boundary": {"codec": "int6/int3"},
            "schedule": {"activations": "keep", "microbatch": 2},
            "optimizer": {"name": "adamw", "target_tokens": 16},
            **sections,
        }
    )
    faults, events = FaultyJobs(), Events()
    workers = [
        await DeviceWorker.create(manifest, span, report=events, device=DeviceOptions("cpu", fault=faults))
        for span in (Span(1, 1), Span(2, 2))
    ]
    try:
        bench = Bench(manifest, workers[0], workers[1], faults, events)
        bench.first_state = await bench.middle.export_state(1)
        yield bench
    finally:
        for worker in workers:
            await worker.close()


Job = Callable[[Bench, int], Awaitable[object]]
# Jobs that are done with each microbatch, one after the other.
CYCLES: dict[str, tuple[Job, ...]] = {
    "forward and backward": (Bench.forward, Bench.backward),
    "last stage": (Bench.run_last,),
    "step along a mean": (Bench.share, Bench.step),
    "state": (Bench.load, Bench.copy, Bench.evaluate),
}


@pytest.mark.parametrize(
    ("cycle", "activations"),
    [
        *((cycle, "keep") for cycle in CYCLES),
        ("forward and backward", "auto"),
        ("forward and backward", "inputs"),
        ("last stage", "recompute"),
    ],
)
def test_whatever_allocation_fails_in_a_job_it_gives_the_same_result_and_the_same_state(
    cycle: str, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each allocation of each job fails once. Beside it the same microbatches pass workers in which nothing fails."""

    async def whole() -> None:
        jobs = CYCLES[cycle]
        setting, layers = ("recompute", 6) if activations == "inputs" else (activations, 3)
        if activations == "inputs":
            monkeypatch.setattr(GraphBudget, "choose", lambda *given: Kept.INPUTS)
        sections = {"schedule": {"activations": setting}, "model": {**MODEL, "layers": layers}}
        async with bench_of(**sections) as faulty, bench_of(**sections) as sound:
            numbers = itertools.count()
            for failing in jobs:
                for fails_at in itertools.count(1):
                    number = next(numbers)
                    injected = FailingAllocation(fails_at)
                    for job in jobs:
                        faulty.faults.next_job = injected if job is failing else None
                        found, expected = await job(faulty, number), await job(sound, number)
                        assert found == expected, f"{job.__name__}, when {failing.__name__} fails at {fails_at}"
                    if not injected.has_fired:
                        break
                assert fails_at > 1 or failing is Bench.load, f"{failing.__name__} allocates"
                assert await faulty.states() == await sound.states(), failing.__name__
            assert not faulty.middle.trainer.stashed and not faulty.events.of(TaskFailed)

    asyncio.run(whole())


@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_a_job_that_lacks_memory_takes_that_of_the_newest_graphs_first_and_of_all_if_it_must(activations: str) -> None:
    async def whole() -> None:
        no_step = {"name": "adamw", "target_tokens": 1600}
        schedule = {"activations": activations, "microbatch": 2}
        async with bench_of(schedule=schedule, optimizer=no_step) as faulty, bench_of(optimizer=no_step) as sound:
            for bench in (faulty, sound):
                await bench.forward(0)
                await bench.backward(0)  # with "auto", its graph was measured
                for number in range(1, 6):
                    await bench.forward(number)
            stashed = faulty.middle.trainer.stashed
            assert stashed.count_graphs() == 5
            faulty.faults.next_job = injected = FailingAllocation(1)
            assert await faulty.evaluate_middle(9) == await sound.evaluate_middle(9) and injected.has_fired
            kept = [forward.output is not None for forward in stashed._forwards.values()]
            assert kept == [True, True, False, False, False]
            faulty.faults.next_job = injected = FailingAllocation(1, times=2)
            assert await faulty.evaluate_middle(9) == await sound.evaluate_middle(9) and injected.has_fired
            assert stashed.count_graphs() == 0
            for number in range(1, 6):
                assert await faulty.backward(number) == await sound.backward(number)
            assert await faulty.states() == await sound.states()

    asyncio.run(whole())


# Each with what comes before it, and whose kept graph it has to give up.
FAILING_JOBS: dict[str, tuple[Job, Job | None]] = {
    "forward": (Bench.forward, None),
    "backward": (Bench.backward, Bench.forward),
    "last stage": (Bench.run_last, None),
    "share": (Bench.share, Bench.forward),
    "step": (Bench.step, Bench.forward),
}


@pytest.fixture
def _without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collector")
@pytest.mark.parametrize("name", FAILING_JOBS)
def test_the_tensors_of_a_failed_job_are_dead_while_its_error_is_kept(name: str) -> None:
    """From some allocation on all fail, so that the second attempt fails, too. The garbage collector does not run."""

    async def whole() -> None:
        job, before = FAILING_JOBS[name]
        async with bench_of() as bench:
            errors = []
            state = await bench.states()
            for fails_at in itertools.count(1):
                if before is not None:
                    await before(bench, fails_at)
                    assert bench.middle.trainer.stashed.count_graphs() == 1
                bench.faults.next_job = injected = FailingAllocation(fails_at, persists=True)
                try:
                    await job(bench, fails_at)
                except OutOfMemory as error:
                    errors.append(error)
                if not injected.has_fired or len(errors) < fails_at:
                    break  # it is done, at most what comes after its answer has failed
                await bench.copy(fails_at)
                await bench.copy_last()
                # Weights that a graph needed have been copied: the copy is what the stage has now.
                version = bench.middle.trainer.stages[1].weights.current
                current = [version.flat, *version.parameters]
                assert injected.alive(but=current) == 0, f"of a job whose allocation {fails_at} failed"
                assert bench.middle.trainer.stashed.count_graphs() == 0
                bench.middle.drop_forward(ForwardKey(microbatch_id(fails_at), 1))
                assert await bench.states() == state
            assert errors
            # They still say where.
            assert all("failing_allocation.py" in str(getattr(e.__cause__, "__notes__", "")) for e in errors)

    asyncio.run(whole())
