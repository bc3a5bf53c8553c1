"""The facade: what a peer may send and what is refused, spans entered in the middle, counting, forgetting, faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.errors import DeviceError, LocalError, ManifestError, NotMyStage, ProtocolError
from agora_protocol.ids import Span
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.span_work import ForwardKey, SpanResult, SpanWork
from agora.core.step_instructions import StepInstructions
from agora.observe.events import GradientRefused, MicrobatchCounted, StepTaken, TaskFailed
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker
from tests.train.support import (
    Events,
    batches_for,
    microbatch_id,
    never_step,
    pipeline_of,
    small_manifest,
    tokens_of,
    train_step,
    values_of,
    wire,
)

M = microbatch_id(0)


def with_worker(span: str, test: Callable[[DeviceWorker], Awaitable[None]], stages: int = 2, **options: Any) -> Events:
    """Runs the test on one DeviceWorker; the events it reported."""
    events = Events()

    async def whole() -> None:
        async with pipeline_of(small_manifest(stages={"count": stages}), [span], report=events, **options) as (worker,):
            await asyncio.wait_for(test(worker), 60)

    asyncio.run(whole())
    return events


def a_batch(number: int = 0) -> WireTensor:
    return tokens_of(batches_for(small_manifest(), number + 1)[number][0])


def a_boundary(fill: float | None = None) -> WireTensor:
    shape = small_manifest().boundary_shape()
    values = np.random.default_rng(3).standard_normal(shape) if fill is None else np.full(shape, fill)
    return wire(values)


def spoiled(value: float) -> WireTensor:
    values = values_of(a_boundary()).copy()
    values[1, 2, 3] = value
    return wire(values)


def bf16_boundary() -> WireTensor:
    shape = small_manifest().boundary_shape()
    return WireTensor("bf16", shape, memoryview(bytes(2 * int(np.prod(shape)))))


BAD_BOUNDARIES = {
    "transposed": wire(np.zeros((16, 2, 32))),
    "short": wire(np.zeros((2, 15, 32))),
    "flat": wire(np.zeros((2 * 16 * 32,))),
    "bf16": bf16_boundary(),
    "nan": spoiled(float("nan")),
    "inf": spoiled(float("inf")),
    "minus inf": spoiled(float("-inf")),
    "none": None,
}
BAD_TOKENS = {
    "short": encode_tokens(np.zeros((2, 16), np.int32)),
    "float": wire(np.zeros((2, 17))),
    "id too large": encode_tokens(np.full((2, 17), 256, np.int32)),
    "id too small": encode_tokens(np.full((2, 17), -2, np.int32)),
}


@pytest.mark.parametrize("name", BAD_BOUNDARIES)
def test_a_boundary_that_the_run_does_not_allow_is_refused(name: str) -> None:
    async def test(worker: DeviceWorker) -> None:
        for train in (True, False):
            with pytest.raises(ProtocolError) as refused:
                await worker.run_last_stages(SpanWork(M, 1, BAD_BOUNDARIES[name], a_batch(), train))
            assert refused.value.code == "bad-tensor"
        assert worker.progress()[0].tokens_total == 0

    with_worker("1", test)


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_tokens_that_the_run_does_not_allow_are_refused(name: str) -> None:
    async def test(worker: DeviceWorker) -> None:
        with pytest.raises(ProtocolError) as refused:
            await worker.forward(SpanWork(M, 0, None, BAD_TOKENS[name], "train"))
        assert refused.value.code == "bad-tensor"

    with_worker("0", test)


def test_stage_0_takes_no_boundary_and_a_stage_outside_the_span_is_not_run() -> None:
    async def test(worker: DeviceWorker) -> None:
        with pytest.raises(ProtocolError, match="token ids only"):
            await worker.forward(SpanWork(M, 0, a_boundary(), a_batch(), "train"))
        with pytest.raises(NotMyStage):
            await worker.forward(SpanWork(M, 2, a_boundary(), a_batch(), "train"))
        with pytest.raises(NotMyStage):
            await worker.run_last_stages(SpanWork(M, 0, None, a_batch(), "train"))

    with_worker("0-1", test, stages=4)


@pytest.mark.parametrize("name", [n for n in BAD_BOUNDARIES if n != "none"])
def test_a_bad_gradient_is_refused_and_a_good_one_from_another_replica_may_follow(name: str) -> None:
    async def test(worker: DeviceWorker) -> None:
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        with pytest.raises(ProtocolError):
            await worker.backward(ForwardKey(M, 0), BAD_BOUNDARIES[name])
        assert worker.progress()[0].tokens_total == 0
        assert (await worker.backward(ForwardKey(M, 0), a_boundary())).gradient is None
        assert worker.progress()[0].tokens_total == 32

    events = with_worker("0", test)
    refused = 1 if name in ("nan", "inf", "minus inf") else 0
    assert [e.microbatch for e in events.of(GradientRefused)] == [M.hex()] * refused
    assert len(events.of(MicrobatchCounted)) == 1


def test_a_gradient_that_would_overflow_here_is_refused_and_another_peers_gradient_takes_its_place() -> None:
    async def test(worker: DeviceWorker) -> None:
        untouched = await worker.copy_weights(0)
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        with pytest.raises(ProtocolError, match="plausible"):
            await worker.backward(ForwardKey(M, 0), a_boundary(3e38))  # finite, as its sender may say
        sums = worker.trainer.stages[0].gradient_sum.flat
        assert not sums.any()
        (progress,) = worker.progress()
        assert (progress.tokens_total, progress.step, progress.refused_nonfinite) == (0, 0, 1)
        assert all((untouched[name] == value).all() for name, value in (await worker.copy_weights(0)).items())
        await worker.backward(ForwardKey(M, 0), a_boundary())
        assert sums.any(), "the microbatch was sent on to another peer, whose gradient counts"

    assert len(with_worker("0", test).of(GradientRefused)) == 1


@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
@pytest.mark.parametrize("stages", ["1", "1-2"])
def test_a_gradient_that_is_refused_after_its_backward_leaves_no_trace(activations: str, stages: str) -> None:
    manifest = small_manifest(stages={"count": 4}, schedule={"activations": activations})

    async def whole() -> None:
        async with pipeline_of(manifest, [stages, stages], report=Events()) as (worker, clean):
            for each in (worker, clean):
                never_step(each)
                await each.forward(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
            for _ in range(3):
                with pytest.raises(ProtocolError, match="plausible"):
                    await worker.backward(ForwardKey(M, 1), a_boundary(1e9))
                assert len(worker.trainer.stashed) == 1 and worker.trainer.stashed.count_graphs() == 0
            expected = values_of((await clean.backward(ForwardKey(M, 1), a_boundary())).gradient)
            np.testing.assert_array_equal(
                values_of((await worker.backward(ForwardKey(M, 1), a_boundary())).gradient), expected
            )
            for number in worker.span.stages:
                sums = [each.trainer.stages[number].gradient_sum.flat for each in (worker, clean)]
                assert torch.equal(*sums)
            assert len(worker.trainer.stashed) == 0

    asyncio.run(whole())


def test_a_sum_that_is_not_finite_takes_no_step_and_training_goes_on_after_it() -> None:
    async def test(worker: DeviceWorker) -> None:
        worker.set_step_instructions(1, StepInstructions(64))
        untouched = await worker.copy_weights(1)
        await worker.run_last_stages(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
        worker.trainer.stages[1].gradient_sum.flat[5] = float("inf")
        await worker.run_last_stages(SpanWork(microbatch_id(1), 1, a_boundary(), a_batch(), "train"))
        assert all((untouched[name] == value).all() for name, value in (await worker.copy_weights(1)).items())
        (progress,) = worker.progress()
        assert (progress.step, progress.tokens_in_share, progress.tokens_total, progress.refused_nonfinite) == (
            0,
            0,
            0,
            1,
        )
        for number in (2, 3):
            await worker.run_last_stages(SpanWork(microbatch_id(number), 1, a_boundary(), a_batch(), "train"))
        changed = await worker.copy_weights(1)
        assert any((untouched[name] != value).any() for name, value in changed.items())
        assert all(np.isfinite(value).all() for value in changed.values())
        assert worker.progress()[0].step == 1

    events = with_worker("1", test)
    assert [e.stage for e in events.of(GradientRefused)] == [1]
    (step,) = events.of(StepTaken)
    assert (step.stage, step.step, step.tokens) == (1, 1, 64)


def test_the_tokens_before_a_step_are_those_the_swarm_says() -> None:
    async def test(worker: DeviceWorker) -> None:
        worker.set_step_instructions(1, StepInstructions(32))
        for number in range(3):
            await worker.run_last_stages(SpanWork(microbatch_id(number), 1, a_boundary(), a_batch(), "train"))
        await worker.copy_weights(1)
        (progress,) = worker.progress()
        assert (progress.step, progress.tokens_in_share, progress.tokens_total) == (3, 0, 96)

    events = with_worker("1", test)
    assert [step.loss is not None for step in events.of(StepTaken)] == [True] * 3


def test_targets_that_are_not_supervised_are_not_counted() -> None:
    async def test(worker: DeviceWorker) -> None:
        ids = batches_for(small_manifest(), 1)[0][0].copy()
        ids[0, -5:] = -1
        done = await worker.run_last_stages(SpanWork(M, 1, a_boundary(), encode_tokens(ids), "train"))
        assert done.tokens == 27
        assert worker.progress()[0].tokens_in_share == 27

    with_worker("1", test)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_span_entered_in_the_middle_runs_and_counts_only_from_there(activations: str) -> None:
    manifest = small_manifest(stages={"count": 4}, schedule={"activations": activations})

    async def whole() -> None:
        async with pipeline_of(manifest, ["0-2", "1", "2"], report=Events()) as (span, one, two):
            for worker in (span, one, two):
                never_step(worker)
            out = await span.forward(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
            middle = await one.forward(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
            end = await two.forward(SpanWork(M, 2, middle, a_batch(), "train"))
            np.testing.assert_array_equal(values_of(out), values_of(end))
            mine = (await span.backward(ForwardKey(M, 1), a_boundary())).gradient
            theirs = (
                await one.backward(ForwardKey(M, 1), (await two.backward(ForwardKey(M, 2), a_boundary())).gradient)
            ).gradient
            np.testing.assert_array_equal(values_of(mine), values_of(theirs))
            assert [p.tokens_in_share for p in span.progress()] == [0, 32, 32]
            assert not span.trainer.stages[0].gradient_sum.flat.any()
            np.testing.assert_array_equal(
                span.trainer.stages[2].gradient_sum.flat, two.trainer.stages[2].gradient_sum.flat
            )

    asyncio.run(whole())


def test_the_last_span_entered_in_the_middle_finishes_from_there() -> None:
    async def test(worker: DeviceWorker) -> None:
        never_step(worker)
        done = await worker.run_last_stages(SpanWork(M, 2, a_boundary(), a_batch(), "train"))
        assert done.gradient is not None
        assert done.gradient.shape == small_manifest().boundary_shape()
        assert [p.tokens_in_share for p in worker.progress()] == [0, 32, 32]

    events = with_worker("1-3", test, stages=4)
    assert [(e.stages, e.tokens) for e in events.of(MicrobatchCounted)] == [((2, 3), 32)]


def test_evaluation_holds_and_counts_nothing_and_agrees_with_training() -> None:
    async def test(worker: DeviceWorker) -> None:
        seen = await worker.run_last_stages(SpanWork(M, 1, a_boundary(), a_batch(), "evaluate"))
        assert seen.gradient is None
        assert worker.progress()[0].tokens_total == 0
        assert not worker.trainer.stages[1].gradient_sum.flat.any()
        trained = await worker.run_last_stages(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
        assert trained.loss_sum == pytest.approx(seen.loss_sum)

    assert len(with_worker("1", test).of(MicrobatchCounted)) == 1

    async def forward_only(worker: DeviceWorker) -> None:
        await worker.forward(SpanWork(M, 0, None, a_batch(), "evaluate"))
        assert len(worker.trainer.stashed) == 0

    with_worker("0", forward_only)


def test_a_forgotten_microbatch_has_to_be_sent_again() -> None:
    async def test(worker: DeviceWorker) -> None:
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        worker.drop_forward(ForwardKey(M, 0))
        worker.drop_forward(ForwardKey(M, 0))
        with pytest.raises(LocalError, match="sent again"):
            await worker.backward(ForwardKey(M, 0), a_boundary())

    with_worker("0", test)


def test_two_works_under_one_microbatch_id_keep_their_forwards_apart_if_other_tensors_were_sent() -> None:
    """One of the senders may be a liar that knows the id; the other gets the gradient of what it has sent."""
    manifest = small_manifest(stages={"count": 3})

    async def whole() -> None:
        async with pipeline_of(manifest, ["1", "1"], report=Events()) as (both, alone):
            sent = {b"true": a_boundary(), b"false": a_boundary(0.25)}
            expected = {}
            for content, boundary in sent.items():
                await alone.forward(SpanWork(M, 1, boundary, a_batch(), "train"))
                expected[content] = values_of((await alone.backward(ForwardKey(M, 1), a_boundary())).gradient)
                await both.forward(SpanWork(M, 1, boundary, a_batch(), "train", content_digest=content))
            both.drop_forward(ForwardKey(M, 1, b"neither"))
            for content in sent:
                gradient = (await both.backward(ForwardKey(M, 1, content), a_boundary())).gradient
                np.testing.assert_array_equal(values_of(gradient), expected[content])
            assert (expected[b"true"] != expected[b"false"]).any()

    asyncio.run(whole())


def test_a_microbatch_that_enters_a_span_twice_keeps_its_two_forwards_apart() -> None:
    """A caller that lost patience asks another peer, and that one may enter this span one stage later."""
    manifest = small_manifest(stages={"count": 4})

    async def whole() -> None:
        async with pipeline_of(manifest, ["1-2", "1-2"], report=Events()) as (both, alone):
            expected = {}
            for first in (1, 2):
                await alone.forward(SpanWork(M, first, a_boundary(), a_batch(), "train"))
                expected[first] = values_of((await alone.backward(ForwardKey(M, first), a_boundary())).gradient)
                await both.forward(SpanWork(M, first, a_boundary(), a_batch(), "train"))
            for first in (1, 2):
                gradient = (await both.backward(ForwardKey(M, first), a_boundary())).gradient
                np.testing.assert_array_equal(values_of(gradient), expected[first])
            await both.forward(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
            await both.forward(SpanWork(M, 2, a_boundary(), a_batch(), "train"))
            both.drop_forward(ForwardKey(M, 2))
            assert (await both.backward(ForwardKey(M, 1), a_boundary())).gradient is not None

    asyncio.run(whole())


def test_undoing_an_abandoned_forward_spares_the_one_that_replaced_it() -> None:
    async def test(worker: DeviceWorker) -> None:
        stashed = worker.trainer.stashed
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        old = stashed.find(ForwardKey(M, 0))
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        stashed.forget(ForwardKey(M, 0), only=old)
        assert len(stashed) == 1
        new = stashed.find(ForwardKey(M, 0))
        stashed.forget(ForwardKey(M, 0), only=new)
        assert len(stashed) == 0

    with_worker("0", test)


def test_a_forward_whose_waiter_goes_away_leaves_nothing_behind() -> None:
    entered, opened = threading.Event(), threading.Event()
    armed, jobs = False, 0

    def fault(point: str) -> None:
        nonlocal jobs
        jobs += 1
        assert point == "device.job"
        if armed:
            entered.set()
            assert opened.wait(30)

    async def test(worker: DeviceWorker) -> None:
        nonlocal armed
        armed = True
        running = asyncio.ensure_future(worker.forward(SpanWork(M, 0, None, a_batch(), "train")))
        await asyncio.to_thread(entered.wait, 30)
        queued = asyncio.ensure_future(worker.forward(SpanWork(microbatch_id(1), 0, None, a_batch(), "train")))
        await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        await asyncio.wait([running, queued])
        armed = False
        opened.set()
        await worker.copy_weights(0)
        await asyncio.sleep(0)
        assert len(worker.trainer.stashed) == 0
        assert jobs == 3  # building, the first forward, the weights: the queued one never ran

    with_worker("0", test, device=DeviceOptions("cpu", fault=fault))


@pytest.mark.parametrize("stage", [0, 1])
def test_what_counts_a_microbatch_returns_its_result_though_its_waiter_was_cancelled(stage: int) -> None:
    entered, opened = threading.Event(), threading.Event()
    armed = False

    def fault(point: str) -> None:
        if armed:
            entered.set()
            assert opened.wait(30)

    def count(worker: DeviceWorker, number: int) -> asyncio.Future[SpanResult]:
        if stage == 0:
            return asyncio.ensure_future(worker.backward(ForwardKey(microbatch_id(number), 0), a_boundary()))
        work = SpanWork(microbatch_id(number), 1, a_boundary(), a_batch(), "train")
        return asyncio.ensure_future(worker.run_last_stages(work))

    async def test(worker: DeviceWorker) -> None:
        nonlocal armed
        never_step(worker)
        if stage == 0:
            for number in range(2):
                await worker.forward(SpanWork(microbatch_id(number), 0, None, a_batch(), "train"))
        armed = True
        running = count(worker, 0)
        await asyncio.to_thread(entered.wait, 30)
        queued = count(worker, 1)
        await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        await asyncio.wait([queued])
        assert queued.cancelled() and not running.done()
        armed = False
        opened.set()
        assert (await running).busy_s > 0
        assert worker.progress()[0].tokens_in_share == 32

    events = with_worker(str(stage), test, device=DeviceOptions("cpu", fault=fault))
    assert len(events.of(MicrobatchCounted)) == 1


def test_an_error_of_the_device_names_itself_and_spares_the_queue() -> None:
    async def test(worker: DeviceWorker) -> None:
        def broken(*arguments: object) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")

        hook = (
            worker.trainer.stages[0]
            .weights.current.module.get_submodule("layers")
            .get_submodule("0")
            .register_forward_pre_hook(broken)
        )
        with pytest.raises(DeviceError, match=r"unspecified launch failure\)"):
            await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        hook.remove()
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))

    with_worker("0", test)


def test_a_step_that_fails_does_not_fail_the_microbatch_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(worker: DeviceWorker) -> None:
        def broken(*arguments: object) -> None:
            raise RuntimeError("no memory for the moments")

        worker.set_step_instructions(1, StepInstructions(32))
        monkeypatch.setattr(worker.trainer.stages[1].optimizer, "step", broken)
        done = await worker.run_last_stages(SpanWork(M, 1, a_boundary(), a_batch(), "train"))
        assert done.tokens == 32
        await worker.copy_weights(1)

    assert [e.task for e in with_worker("1", test).of(TaskFailed)] == ["device"] * 2, "tried again after the next job"


def test_the_answer_reports_the_device_time_of_the_whole_hop() -> None:
    async def test(worker: DeviceWorker) -> None:
        await worker.forward(SpanWork(M, 0, None, a_batch(), "train"))
        forward = worker.trainer.stashed.find(ForwardKey(M, 0))
        assert (await worker.backward(ForwardKey(M, 0), a_boundary())).busy_s > forward.device_s > 0

    with_worker("0", test)


def test_replicas_of_a_stage_start_from_the_same_weights_whatever_their_span() -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(stages={"count": 4}), ["1", "0-2"]) as (alone, span):
            mine, theirs = await alone.copy_weights(1), await span.copy_weights(1)
            assert mine.keys() == theirs.keys()
            assert all((mine[name] == theirs[name]).all() for name in mine)

    asyncio.run(whole())


def test_bf16_boundaries_train_close_to_float32_ones() -> None:
    async def losses(codec: str) -> list[float]:
        manifest = small_manifest(boundary={"codec": codec}, schedule={"activations": "keep"})
        async with pipeline_of(manifest, ["0", "1"]) as pipeline:
            return [await train_step(pipeline, step, n) for n, step in enumerate(batches_for(manifest, 8))]

    exact, rounded = asyncio.run(losses("float32")), asyncio.run(losses("bf16"))
    assert exact != rounded
    np.testing.assert_allclose(rounded, exact, rtol=2e-3)


def test_an_unknown_device_is_refused_before_anything_is_built() -> None:
    async def whole() -> None:
        with pytest.raises(DeviceError, match="not known"):
            await DeviceWorker.create(small_manifest(), Span(0, 0), report=Events(), device=DeviceOptions("tpu"))

    before = threading.active_count()
    asyncio.run(whole())
    assert threading.active_count() == before


def test_what_cannot_be_built_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ManifestError("no such family")

    monkeypatch.setattr("agora.train.span_trainer.family_of", refuse)

    async def whole() -> None:
        with pytest.raises(ManifestError, match="no such family"):
            await DeviceWorker.create(small_manifest(), Span(0, 0), report=Events(), device=DeviceOptions("cpu"))
        assert "device" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(whole())


@pytest.mark.parametrize(("dtype", "words"), [(None, "float32"), (torch.bfloat16, "bf16")])
def test_a_worker_computes_in_the_precision_that_it_is_given(dtype: torch.dtype | None, words: str) -> None:
    async def test() -> None:
        async with pipeline_of(small_manifest(), ["0"], device=DeviceOptions("cpu", dtype=dtype)) as (worker,):
            assert worker.precision == words
            dtypes = {p.dtype for p in worker.trainer.stages[0].weights.current.module.parameters()}
            assert (torch.bfloat16 in dtypes) == (dtype is not None)

    asyncio.run(test())
