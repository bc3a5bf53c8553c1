"""Replicas of a stage: one step together is one step of all their batches; states, and steps caught up with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.errors import LocalError, NotMyStage, ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest

from agora.core.span_work import ForwardKey, SpanWork
from agora.core.step_instructions import ShareClosed, StageStepped, StepInstructions
from agora.observe.events import GradientLate, GradientRefused, StepsSkipped, StepTaken
from agora.state.layout import StageState
from agora.train.device_worker import DeviceWorker
from agora.train.optimizer import momentum_product
from tests.oracle import PlainRun, relative_difference, run_plain_loop
from tests.train.support import (
    Events,
    batches_for,
    microbatch_id,
    never_step,
    pipeline_of,
    read_steps,
    small_manifest,
    tokens_of,
    train_step,
)
from tests.train.test_weight_blocks import FragmentBench
from tests.train.test_weight_versions import same

STEPS = 20
MICROBATCHES = 5
TOLERANCE = 1e-4


def uneven_batches(manifest: Manifest) -> list[list[np.ndarray]]:
    """Five microbatches a step, some of their targets not supervised."""
    random, steps = np.random.default_rng(7), batches_for(manifest, STEPS, MICROBATCHES)
    for ids in (ids for step in steps for ids in step):
        ids[0, ids.shape[1] - random.integers(0, 9) :] = -1
    return steps


# --- a step together


async def exchange(stage: Sequence[DeviceWorker], number: int) -> None:
    """One step of a stage's replicas along the exact mean of their gradients."""
    shares = [await worker.close_share(number) for worker in stage]
    tokens = sum(share.tokens for share in shares)
    mean = sum((share.values.double() * share.tokens for share in shares), torch.zeros(1)) / tokens
    for worker, share in zip(stage, shares, strict=True):
        await worker.step_with_gradient(number, share.step, mean.float(), tokens)


async def train_together(manifest: Manifest, batches: list[list[np.ndarray]], replicas: int = 3) -> PlainRun:
    """Trains two stages of `replicas` each, every microbatch through a replica of each stage drawn by lot."""
    random, losses = np.random.default_rng(1), []
    async with pipeline_of(manifest, ["0"] * replicas + ["1"] * replicas, report=Events()) as workers:
        stages = workers[:replicas], workers[replicas:]
        for worker in workers:
            worker.set_step_instructions(worker.span.first, StepInstructions(1, averages=True))
        for number, step in enumerate(batches):
            loss, tokens = 0.0, 0
            for i, ids in enumerate(step):
                first, last = (stage[random.integers(replicas)] for stage in stages)
                m, wired = microbatch_id(number * 100 + i), tokens_of(ids)
                done = await last.run_last_stages(
                    SpanWork(m, 1, await first.forward(SpanWork(m, 0, None, wired, "train")), wired, "train")
                )
                assert done.gradient is not None
                await first.backward(ForwardKey(m, 0), done.gradient)
                loss, tokens = loss + done.loss_sum, tokens + done.tokens
            losses.append(loss / tokens)
            for k, stage in enumerate(stages):
                assert [c.progress()[0].step for c in stage] == [number] * replicas
                await exchange(stage, k)
        weights = [[await worker.copy_weights(k) for worker in stage] for k, stage in enumerate(stages)]
    for first_copy, *others in weights:
        assert all(np.array_equal(copy[name], first_copy[name]) for copy in others for name in first_copy)
    return PlainRun(losses, [stage[0] for stage in weights])


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["adamw", "nadam", "muon"])
def test_three_replicas_of_two_stages_train_as_one_process_on_all_their_batches(name: str, activations: str) -> None:
    manifest = small_manifest(optimizer={"name": name}, schedule={"activations": activations})
    batches = uneven_batches(manifest)
    expected = run_plain_loop(manifest, batches)
    found = asyncio.run(train_together(manifest, batches))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)
    for mine, plain in zip(found.weights, expected.weights, strict=True):
        assert max(relative_difference(mine[name], plain[name]) for name in plain) < TOLERANCE


def test_replicas_without_a_single_microbatch_take_part_with_nothing_and_take_the_same_step() -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0", "0"]) as (worker, idle):
            await one_microbatch(worker, 0)
            mine, nothing = await worker.close_share(0), await idle.close_share(0)
            assert (mine.tokens, nothing.tokens) == (32, 0)
            assert not nothing.values.any()
            for worker in (worker, idle):
                await worker.step_with_gradient(0, 0, mine.values, 32)
            first, second = await worker.export_state(0), await idle.export_state(0)
            assert same_state(first, second)
            assert (second.step, second.updates, second.tokens_total) == (1, 1, 0)

    asyncio.run(whole())


async def one_microbatch(worker: DeviceWorker, number: int) -> None:
    """A microbatch through stage 0, with an arbitrary gradient."""
    wired = tokens_of(batches_for(small_manifest(), number + 1)[number][0])
    out = await worker.forward(SpanWork(microbatch_id(number), 0, None, wired, "train"))
    await worker.backward(ForwardKey(microbatch_id(number), 0), out)


def with_stage_0(test: Any, **overrides: Any) -> Events:
    """Runs the test on a DeviceWorker of stage 0 that takes no step of its own accord; the events it reported."""
    events = Events()

    async def whole() -> None:
        async with pipeline_of(small_manifest(**overrides), ["0"], report=events) as (worker,):
            never_step(worker)
            await asyncio.wait_for(test(worker), 60)

    asyncio.run(whole())
    return events


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_gradient_that_comes_after_the_share_was_given_goes_into_the_next_step(kind: str) -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        share = await worker.close_share(0)
        await one_microbatch(worker, 1)
        (progress,) = worker.progress()
        assert (progress.step, progress.tokens_in_share, progress.tokens_total) == (0, 32, 64)
        again = await worker.close_share(0)
        assert torch.equal(again.values, share.values) and again.tokens == 32
        await worker.step_with_gradient(0, 0, share.values, 32)
        (progress,) = worker.progress()
        assert (progress.step, progress.tokens_in_share, progress.tokens_total) == (1, 32, 64)
        late = await worker.close_share(0)
        assert (late.step, late.tokens, bool(late.values.any())) == (1, 32, True)

    told = [
        (late.stage, late.step, late.microbatch, late.tokens)
        for late in with_stage_0(test, schedule={"kind": kind}).of(GradientLate)
    ]
    assert told == ([(0, 0, microbatch_id(1).hex(), 32)] if kind == "synchronous" else []), "late only where all wait"


def test_a_step_with_a_mean_takes_only_the_next_step() -> None:
    async def test(worker: DeviceWorker) -> None:
        numel = worker.layout(0).numel
        with pytest.raises(LocalError, match="takes step 0 next"):
            await worker.step_with_gradient(0, 1, torch.zeros(numel), 1)
        await one_microbatch(worker, 0)
        await worker.catch_up(0, 1)
        share = await worker.close_share(0)
        with pytest.raises(LocalError, match="takes step 1 next"):
            await worker.step_with_gradient(0, 0, share.values, 32)
        for bad in (torch.full((numel,), float("nan")), torch.zeros(numel - 1), torch.zeros(numel).double()):
            with pytest.raises(ProtocolError):
                await worker.step_with_gradient(0, 1, bad, 32)
        before = await worker.export_state(0)
        await worker.step_with_gradient(0, 1, torch.zeros(numel), 0)
        after = await worker.export_state(0)
        assert (after.step, after.updates) == (2, before.updates)
        assert np.array_equal(before.weights, after.weights)

    assert len(with_stage_0(test).of(StepTaken)) == 2


def test_a_sum_that_is_not_finite_is_nobodys_share() -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        worker.trainer.stages[0].gradient_sum.flat[7] = float("inf")
        share = await worker.close_share(0)
        assert (share.tokens, bool(share.values.any())) == (0, False)

    assert len(with_stage_0(test).of(GradientRefused)) == 1


def test_a_share_is_closed_on_the_device_at_its_quota_and_what_comes_after_counts_for_the_next_step() -> None:
    async def test(worker: DeviceWorker) -> None:
        worker.set_step_instructions(0, StepInstructions(1 << 20, True, step=0, own_tokens=64, closes_share=True))
        for number in range(3):
            await one_microbatch(worker, number)
        (progress,) = worker.progress()
        assert (progress.step, progress.open_step, progress.tokens_in_share, progress.tokens_counted) == (0, 1, 32, 96)
        assert progress.staleness[:2] == (2, 1), "the third gradient goes into a step after one that is still to come"
        events = worker.step_events()
        assert await anext(events) == ShareClosed(0, 0, 64)
        share = await worker.close_share(0)
        assert (share.step, share.tokens) == (0, 64)
        await worker.step_with_gradient(0, 0, share.values, 64)
        assert await anext(events) == StageStepped(0, 1, 64)
        (progress,) = worker.progress()
        assert (progress.step, progress.open_step, progress.tokens_in_share, progress.tokens_counted) == (1, 1, 32, 96)
        share = await worker.close_share(0)
        await worker.step_with_gradient(0, 1, share.values, 4096)

    taken = with_stage_0(test).of(StepTaken)
    assert [(event.tokens, event.step_tokens, event.staleness) for event in taken] == [(64, 64, 0.0), (32, 4096, 1.0)]


def test_a_replayed_step_leaves_what_was_counted_for_the_step_after() -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        before = await worker.export_state(0)
        await worker.step_with_gradient(0, 0, torch.ones(worker.layout(0).numel), 4096)
        (progress,) = worker.progress()
        assert (progress.step, progress.open_step, progress.tokens_in_share) == (1, 1, 32)
        assert not np.array_equal((await worker.export_state(0)).weights, before.weights)
        share = await worker.close_share(0)
        assert (share.step, share.tokens, bool(share.values.any())) == (1, 32, True)

    with_stage_0(test)


@pytest.mark.parametrize("alone", [True, False])
def test_the_device_takes_no_step_after_the_end_whatever_is_counted(alone: bool) -> None:
    async def test(worker: DeviceWorker) -> None:
        until_1 = StepInstructions(32, True, 0, 32, alone=alone, closes_share=not alone, stops_at=1)
        worker.set_step_instructions(0, until_1)
        await one_microbatch(worker, 0)
        if not alone:
            share = await worker.close_share(0)
            await worker.step_with_gradient(0, 0, share.values, share.tokens)
        await read_steps(worker, 1)
        worker.set_step_instructions(0, replace(until_1, step=1))
        for number in range(1, 4):
            await one_microbatch(worker, number)
        progress = worker.progress_of(0)
        assert (progress.step, progress.open_step, progress.tokens_in_share) == (1, 1, 96)
        worker.set_step_instructions(0, replace(until_1, step=1, stops_at=0))
        await one_microbatch(worker, 4)
        await worker.export_state(0)  # a job after what that microbatch set off
        assert worker.progress_of(0).open_step == 2, "an amendment has the run go on"

    with_stage_0(test)


def test_a_stage_that_waits_for_its_replicas_counts_on_until_its_share_is_taken() -> None:
    async def test(worker: DeviceWorker) -> None:
        worker.set_step_instructions(0, StepInstructions(32, True, step=1, own_tokens=32, alone=True))
        await one_microbatch(worker, 0)
        await one_microbatch(worker, 1)
        share = await worker.close_share(0)
        assert share.tokens == 64
        await one_microbatch(worker, 2)
        assert worker.step_of(0) == 0
        await worker.step_with_gradient(0, 0, share.values, 64)
        steps = await read_steps(worker, 2)
        assert steps == [(0, 1, 64), (0, 2, 32)], "there is nobody else at the second step, and its tokens were there"

    with_stage_0(test)


# --- steps caught up with


def test_one_step_behind_what_was_counted_goes_into_the_step() -> None:
    async def test(worker: DeviceWorker) -> None:
        before = await worker.export_state(0)
        await one_microbatch(worker, 0)
        await worker.catch_up(0, 1)
        await worker.catch_up(0, 1)
        await worker.catch_up(0, 2)
        after = await worker.export_state(0)
        assert (after.step, after.updates, after.tokens_total) == (2, 1, 32)
        assert not np.array_equal(before.weights, after.weights)
        assert await read_steps(worker, 2) == [(0, 1, 32), (0, 2, 0)]

    events = with_stage_0(test)
    assert not events.of(StepsSkipped)
    assert [(e.step, e.tokens, e.gradient_norm is None) for e in events.of(StepTaken)] == [(1, 32, False), (2, 0, True)]


def test_further_behind_what_was_counted_is_dropped_and_said_and_the_rate_follows_the_stages_step() -> None:
    async def test(worker: DeviceWorker) -> None:
        before = await worker.export_state(0)
        await one_microbatch(worker, 0)
        await worker.catch_up(0, 4)
        after = await worker.export_state(0)
        assert np.array_equal(before.weights, after.weights)
        assert (after.step, after.updates) == (4, 0)
        assert worker.progress()[0].tokens_total == 0
        await one_microbatch(worker, 1)
        await worker.catch_up(0, 5)
        assert (await worker.export_state(0)).updates == 1

    events = with_stage_0(test, optimizer={"learning_rate": 1.0, "warmup_steps": 8, "clip": 0.0})
    (skipped,) = events.of(StepsSkipped)
    assert (skipped.stage, skipped.step, skipped.steps, skipped.tokens) == (0, 4, 4, 32)
    assert events.of(StepTaken)[-1].learning_rate == pytest.approx(5 / 8)


def test_one_behind_with_a_sum_that_is_not_finite_the_step_is_taken_without_it() -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        worker.trainer.stages[0].gradient_sum.flat[7] = float("nan")
        await worker.catch_up(0, 1)
        state = await worker.export_state(0)
        assert (state.step, state.updates) == (1, 0)
        assert np.isfinite(state.weights).all()

    assert len(with_stage_0(test).of(GradientRefused)) == 1


def test_a_stage_whose_share_is_given_does_not_catch_up_before_it() -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        share = await worker.close_share(0)
        await worker.catch_up(0, 3)
        assert worker.progress()[0].step == 0
        await worker.step_with_gradient(0, 0, share.values, 32)
        await worker.catch_up(0, 3)
        assert worker.progress()[0].step == 3

    with_stage_0(test)


# --- whole states


async def train(pipeline: Sequence[DeviceWorker], manifest: Manifest, steps: range) -> list[float]:
    batches = batches_for(manifest, steps.stop)
    return [await train_step(pipeline, batches[n], n) for n in steps]


@pytest.mark.parametrize("name", ["adamw", "nadam", "muon"])
def test_a_state_loaded_elsewhere_goes_on_bit_for_bit(name: str) -> None:
    manifest = small_manifest(optimizer={"name": name})

    async def whole() -> None:
        async with pipeline_of(manifest, ["0", "1", "0-1"]) as (first, last, fresh):
            await train([first, last], manifest, range(6))
            await train([fresh], manifest, range(2))  # it has learnt something else meanwhile
            for stage, worker in enumerate((first, last)):
                await fresh.load_state(await worker.export_state(stage))
            assert [p.step for p in fresh.progress()] == [6, 6]
            # one process holds both stages, so its forward and backward are the very same operations
            assert await train([first, last], manifest, range(6, 9)) == await train([fresh], manifest, range(6, 9))
            for stage, worker in enumerate((first, last)):
                mine, theirs = await fresh.export_state(stage), await worker.export_state(stage)
                assert (mine.step, mine.updates, mine.tokens_total) == (9, 9, 9 * 96)
                assert same_state(mine, theirs)

    asyncio.run(whole())


def test_what_a_stage_has_agreed_on_travels_with_its_state() -> None:
    async def test(worker: DeviceWorker) -> None:
        gradient = torch.ones(worker.layout(0).numel)
        state = replace(await worker.export_state(0), step=9, agreed_step=7, history_hash=5)
        await worker.load_state(state)
        (progress,) = worker.progress()
        assert (progress.step, progress.agreed_step, progress.history_hash, progress.history) == (9, 7, 5, {7: 5})
        given = await worker.export_state(0)
        assert (given.step, given.agreed_step, given.history_hash) == (9, 7, 5)
        await worker.load_state(replace(state, agreed_step=9))
        await worker.step_with_gradient(0, 9, gradient, 64)
        (progress,) = worker.progress()
        given = await worker.export_state(0)
        assert (given.step, given.agreed_step, given.history_hash) == (
            10,
            10,
            progress.history_hash,
        ) and given.history_hash not in (0, 5)

    with_stage_0(test)


def same_state(one: StageState, other: StageState) -> bool:
    return all(np.array_equal(array, other.arrays[name]) for name, array in one.arrays.items())


def test_updates_and_steps_are_two_numbers_and_both_travel() -> None:
    async def test(worker: DeviceWorker) -> None:
        await one_microbatch(worker, 0)
        await worker.catch_up(0, 1)
        await worker.catch_up(0, 7)
        state = await worker.export_state(0)
        assert (state.stage, state.step, state.updates) == (0, 7, 1)
        async with pipeline_of(small_manifest(optimizer={"name": "nadam"}), ["0"]) as (other,):
            never_step(other)
            await other.load_state(state)
            for one in (worker, other):
                await one_microbatch(one, 1)
                await one.catch_up(0, 8)
            assert same_state(await worker.export_state(0), await other.export_state(0))

    with_stage_0(test, optimizer={"name": "nadam"})


def test_a_loaded_state_drops_what_was_summed_and_spares_live_graphs() -> None:
    bench = FragmentBench("keep")
    state = bench.stage.export_state()
    bench.step_with(0)
    old = bench.weights()
    bench.forward(1)
    bench.forward(2)
    bench.backward(2)
    bench.stage.load_state(state)
    assert bench.progress()[0].tokens_in_share == 0
    account = bench.progress()[0].account
    assert account.waiting == 0 and account.computed > account.counted, "what was dropped is lost, and is told"
    assert all(not total.any() for total in bench.sums().values())
    bench.backward(1)
    assert same(bench.sums(), bench.by_hand(1, old))
    assert bench.progress()[0].staleness[0] == 3  # the weights of now are older; that is not negative


def test_a_state_is_a_copy_and_its_names_are_the_models() -> None:
    async def test(worker: DeviceWorker) -> None:
        state, layout = await worker.export_state(0), worker.layout(0)
        named = layout.views(state.weights)
        weights = await worker.copy_weights(0)
        assert named.keys() == weights.keys()
        assert all(np.array_equal(named[name], weights[name]) for name in named)
        assert layout.numel == state.weights.size and layout.numel % SLICE_BLOCK == 0
        assert np.array_equal(layout.flatten(named), state.weights)
        state.weights.fill(9.0)
        assert not np.array_equal((await worker.export_state(0)).weights, state.weights)

    with_stage_0(test)


@pytest.mark.parametrize("what", ["weights", "mean", "square", "average"])
def test_a_state_that_is_not_this_stages_is_refused_whole(what: str) -> None:
    async def test(worker: DeviceWorker) -> None:
        good = await worker.export_state(0)
        array = good.arrays[what]
        spoiled = array.copy()
        spoiled[5] = float("nan")
        bad = [array[:-1], array.astype(np.float64), spoiled] + ([array - 1] if what == "square" else [])
        for values in bad:
            changed = good.arrays | {what: values}
            with pytest.raises(ProtocolError):
                await worker.load_state(replace(good, weights=changed.pop("weights"), moments=changed))
        assert same_state(good, await worker.export_state(0))
        with pytest.raises(NotMyStage):
            await worker.load_state(replace(good, stage=1))

    with_stage_0(test)


@pytest.mark.parametrize("beta1", [0.0, 0.9, 0.99])
def test_nadams_product_is_recomputed_to_the_last_bit(beta1: float) -> None:
    weight, gradient = torch.zeros(1, requires_grad=True), torch.ones(1)
    reference = torch.optim.NAdam([weight], betas=(beta1, 0.95), decoupled_weight_decay=True)
    for update in range(1, 301):
        weight.grad = gradient
        reference.step()
        if update % 50 == 0:
            assert momentum_product(beta1, update) == float(reference.state[weight]["mu_product"])


def test_a_stage_that_is_not_held_is_refused() -> None:
    async def test(worker: DeviceWorker) -> None:
        for refused in (
            worker.close_share(1),
            worker.catch_up(1, 3),
            worker.outer_gradient(1, np.arange(2)),
        ):
            with pytest.raises(NotMyStage):
                await refused

    with_stage_0(test)
