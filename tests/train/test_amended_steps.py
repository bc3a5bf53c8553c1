"""Claims about the steps of a stage whose run is amended: rate, tokens and history change at the amendment's step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.amendments import Amendment, SealedAmendment, open_amendment, seal_amendment
from agora_protocol.identity import Identity
from agora_protocol.ids import Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.packing import pack_canonical

from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import NOTICE_STEPS
from agora.observe.events import AmendmentInForce, StepTaken
from agora.state.layout import OUTER_PARAMETERS
from agora.train.history_hash import INITIAL_HASH, extend_history
from agora.train.optimizer import learning_rate
from agora.train.span_trainer import SpanTrainer
from tests.train.support import MICROBATCHES, Events, batches_for, pipeline_of, small_manifest, train_step
from tests.train.test_sync_mode_changes import SLICES, change_to_local, take_local_step
from tests.train.test_weight_versions import CPU, Bench

FOUNDER = Identity(bytes([1]) * 32)
FROM_STEP = 3
RATE = {"optimizer.learning_rate": 0.001, "optimizer.total_steps": 30}


def amendment(core: Manifest, values: dict[str, Any], from_step: int = FROM_STEP) -> SealedAmendment:
    run = SignedManifest.sign(core, FOUNDER).run_id
    made = Amendment(FOUNDER.peer, 1, bytes.fromhex(run), 0, from_step, 5, pack_canonical(values), b"")
    return open_amendment(seal_amendment(made, run, FOUNDER), run)


async def trained(
    manifest: Manifest, live: LiveManifest, sizes: Sequence[int], **options: Any
) -> tuple[Events, list[dict[str, np.ndarray]], list[int]]:
    """After a step for each of `sizes`, which are its microbatches: events, weights and history hash of each stage."""
    events = Events()
    batches = batches_for(manifest, len(sizes), max(sizes))
    async with pipeline_of(manifest, ["0", "1"], report=events, live=live, **options) as pipeline:
        for number, size in enumerate(sizes):
            await train_step(pipeline, batches[number][:size], number)
        weights = [await worker.copy_weights(k) for k, worker in enumerate(pipeline)]
        return events, weights, [worker.progress()[0].history_hash for worker in pipeline]


@pytest.mark.parametrize("name", ["adamw", "nadam", "muon"])
def test_the_rate_is_the_amended_one_from_its_step_on(name: str) -> None:
    manifest = small_manifest(optimizer={"name": name})
    live = LiveManifest(manifest, [amendment(manifest, RATE)])
    events, _, _ = asyncio.run(trained(manifest, live, [MICROBATCHES] * 6))
    for stage in (0, 1):
        taken = [event for event in events.of(StepTaken) if event.stage == stage]
        expected = [learning_rate(step, live.at(step).optimizer) for step in range(6)]
        assert [event.learning_rate for event in taken] == expected and expected[FROM_STEP] < 0.5 * expected[2]
        in_force = [event for event in events.of(AmendmentInForce) if event.stage == stage]
        assert [(event.step, event.number) for event in in_force] == [(FROM_STEP, 1)]


def test_weights_are_the_same_bits_whenever_the_amendment_came_before_its_step() -> None:
    manifest = small_manifest()
    made = amendment(manifest, RATE)
    early, late = LiveManifest(manifest, [made]), LiveManifest(manifest)

    async def main() -> list[Any]:
        first = await trained(manifest, early, [MICROBATCHES] * 5)
        events = Events()

        def amend_at_the_last_moment(event: Any) -> None:
            events(event)
            if isinstance(event, StepTaken) and event.step == FROM_STEP:
                late.amend([made])

        batches = batches_for(manifest, 5)
        async with pipeline_of(manifest, ["0", "1"], report=amend_at_the_last_moment, live=late) as pipeline:
            for number, step in enumerate(batches):
                await train_step(pipeline, step, number)
            weights = [await worker.copy_weights(k) for k, worker in enumerate(pipeline)]
            return [first, weights, [worker.progress()[0].history_hash for worker in pipeline]]

    (_, expected, hashes), weights, found = asyncio.run(main())
    for mine, theirs in zip(weights, expected, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert found == hashes


def test_a_step_has_the_amended_tokens_from_its_step_on() -> None:
    manifest = small_manifest()
    live = LiveManifest(manifest, [amendment(manifest, {"optimizer.target_tokens": 2 * MICROBATCHES * 32})])
    sizes = [MICROBATCHES] * FROM_STEP + [2 * MICROBATCHES] * 2
    events, _, _ = asyncio.run(trained(manifest, live, sizes))
    taken = [event for event in events.of(StepTaken) if event.stage == 0]
    assert [event.tokens for event in taken] == [32 * size for size in sizes]


def test_the_history_tells_apart_who_took_the_same_steps_by_other_amendments() -> None:
    manifest = small_manifest()
    same = amendment(manifest, {"optimizer.learning_rate": manifest.optimizer.learning_rate})
    lives = [LiveManifest(manifest), LiveManifest(manifest, [same])]
    before = [asyncio.run(trained(manifest, live, [MICROBATCHES] * FROM_STEP)) for live in lives]
    after = [asyncio.run(trained(manifest, live, [MICROBATCHES] * (FROM_STEP + 1))) for live in lives]
    assert before[0][2] == before[1][2]
    assert after[0][2][0] != after[1][2][0] and after[0][2][1] != after[1][2][1]
    for mine, theirs in zip(after[0][1], after[1][1], strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs), "the values were not changed"


def test_a_history_is_extended_by_the_amendment_in_force() -> None:
    history = {0: INITIAL_HASH}
    plain, amended, other = (extend_history(history, 1, 7, amended=amended) for amended in (b"", b"a" * 32, b"b" * 32))
    assert len({plain[1], amended[1], other[1]}) == 3
    assert plain == extend_history(history, 1, 7)
    assert extend_history({0: 0}, 1, 7, amended=b"a" * 32)[1] == 0, "an unknown one stays unknown"


def test_a_fragments_mean_moves_the_outer_parameters_by_the_rate_in_force_at_its_step() -> None:
    moved = list[float]()
    for from_step in (NOTICE_STEPS + 1, 100):
        bench = Bench("keep", averaging={"fraction": 0.25, "outer_rate": 1.0, "outer_momentum": 0.0})
        manifest = bench.manifest
        live = LiveManifest(manifest, [amendment(manifest, {"averaging.outer_rate": 0.25}, from_step)])
        stage = SpanTrainer(manifest, Span(0, 0), CPU, report=Events(), in_flight=8, live=live).stages[0]
        change_to_local(stage)
        for _ in range(2):
            take_local_step(stage, seed=1)
        blocks = np.array([0])
        found = stage.outer_gradient(blocks)
        assert found is not None
        before = stage.moments[OUTER_PARAMETERS][:SLICE_BLOCK].clone()
        stage.outer_step(stage.step, blocks, found[1], (torch.ones(SLICE_BLOCK), (True,)), SLICES)
        moved.append(float((before - stage.moments[OUTER_PARAMETERS][:SLICE_BLOCK]).max()))
    assert moved == pytest.approx([0.25, 1.0])
