"""Steps and rounds go on whatever the other replica says, or leaves unsaid: a real stage, and a peer that lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from agora_protocol.errors import AgoraError, ProtocolError, Refused, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import (
    Averaged,
    Contribute,
    GossipedSteps,
    GossipSteps,
    Message,
    Recall,
    Recalled,
)
from agora_protocol.tensors import WireTensor

from agora.core.clock import loop_time
from agora.core.span_work import ForwardKey, SpanWork
from agora.observe.events import PartFailed, RoundDone, StepTaken
from agora.replica.all_reduce import RepeatedContribution
from agora.replica.gossip import SwarmQueries
from agora.replica.shard_codec import RoundConfig, Shard, ShardCodec
from agora.replica.span_replicas import SpanReplicas
from agora.swarm.peer_score import PeerScore, ReportViolation
from agora.train.device_worker import DeviceWorker
from tests.train.support import Events, batches_for, microbatch_id, pipeline_of, small_manifest, tokens_of, wire

MINE, THEIRS = (Identity(bytes([n]) * 32) for n in (1, 2))
ME, OTHER = MINE.peer, THEIRS.peer


class Liar:
    """The stage's only other replica, by far the better connected, so that it reduces every part.

    `mean`: the elements of its answers. `tokens`: what it says it has counted at step `step`.
    """

    mean, tokens, step = 0.0, 0, 0

    def __init__(self, run: RunId) -> None:
        self._codec = ShardCodec(RoundConfig(OTHER, run, "mean", 20.0, 1e9))

    async def call(self, peer: PeerId, request: Message, tensors: Sequence[WireTensor], **_: Any) -> SimpleNamespace:
        """Answers with a part of equal numbers."""
        if isinstance(request, GossipSteps):
            return SimpleNamespace(
                message=GossipedSteps(((OTHER, self.step, self.step, self.tokens, self.tokens, 0, 0, 0, 0, 0),)),
                tensors=[],
            )
        if isinstance(request, Recall):
            return SimpleNamespace(message=Recalled(0, 0, 0.0, "float32"), tensors=[])
        assert isinstance(request, Contribute)
        answer = Averaged(in_mean=2, contributors=2, weight=64.0, counted=True, wire="float32")
        false, shard = [wire(np.full(tensors[0].shape, self.mean, np.float32))], Shard.of_message(request)
        mean = self._codec.decode_mean(shard, false, tensors[0].shape[0], replace(answer, reducer=OTHER))
        signature = THEIRS.sign(self._codec.signed_bytes(shard, mean))
        return SimpleNamespace(message=replace(mean.message, signature=signature), tensors=false)


async def nobody_gives(stage: int, sources: Sequence[PeerId], at_least: int) -> object:
    raise Unavailable(stage, ["nobody gives any"])


@asynccontextmanager
async def beside(
    report_violation: ReportViolation = lambda *_: None, **sections: Any
) -> AsyncIterator[tuple[DeviceWorker, SpanReplicas, Events, dict[PeerId, float], Liar]]:
    """Stage 0 alone, its group, its events, the view, which has the liar and nobody else, and the liar."""
    events, manifest = Events(), small_manifest(**sections)
    signed = SignedManifest.sign(manifest, Identity(bytes([9]) * 32))
    listed, liar = {ME: 1.0, OTHER: 1e12}, Liar(signed.run_id)
    async with pipeline_of(manifest, ["0"], report=events) as (worker,):
        yield (
            worker,
            SpanReplicas(
                signed,
                MINE,
                worker=worker,
                peer_caller=cast(Any, liar),
                swarm=SwarmQueries(
                    replicas_in_view=lambda stage: listed,
                    bandwidths=lambda stage: listed,
                    has_connections=lambda: True,
                    uplink_bytes_per_s=lambda: None,
                    steps_of_run=lambda: [[0]],
                ),
                fetch_state=nobody_gives,
                report=events,
                report_violation=report_violation,
            ),
            events,
            listed,
            liar,
        )


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def weights_after(worker: DeviceWorker, number: int, learning: bool = True) -> np.ndarray:
    """After a step, for which this peer counts all tokens unless it is not `learning`."""
    if learning:
        ids = tokens_of(batches_for(small_manifest(), number + 1)[number][0])
        out = await worker.forward(SpanWork(microbatch_id(number), 0, None, ids, "train"))
        await worker.backward(ForwardKey(microbatch_id(number), 0), out)
    while worker.step_of(0) == number:
        await asyncio.sleep(0.01)
    return (await worker.export_state(0)).weights


def test_a_gradient_too_large_to_step_along_costs_one_step_and_one_that_is_absurd_only_the_averaging() -> None:
    async def whole() -> None:
        averaging = {"exact_steps": 100, "gradient_wire": "float32"}
        async with beside(averaging=averaging, optimizer={"target_tokens": 32}) as (worker, group, events, _, liar):
            running = asyncio.create_task(group.run())
            before = (await worker.export_state(0)).weights
            liar.mean, liar.tokens = 3e38, 32
            over = await weights_after(worker, 0, learning=False)
            assert np.array_equal(over, before) and not events.of(PartFailed), "there was nothing to judge it by"
            liar.mean, liar.tokens = 1e-4, 0
            honest = await weights_after(worker, 1)
            assert np.isfinite(honest).all()
            assert not np.array_equal(honest, before)
            liar.mean, liar.step = 1e3, 2
            alone = await weights_after(worker, 2)
            assert np.isfinite(alone).all(), "its gradient waits for the next step"
            assert {"the mean has" in failed.reason for failed in events.of(PartFailed)} == {True}
            await stop(running)
        rounds = events.of(RoundDone)
        assert [done.failed_parts == done.parts for done in rounds] == [False, False, True]
        assert [taken.step for taken in events.of(StepTaken)] == [1, 2, 3]

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_step_that_was_to_be_taken_together_is_taken_alone_when_the_last_other_replica_leaves() -> None:
    async def whole() -> None:
        sections = {"schedule": {"kind": "synchronous"}, "optimizer": {"target_tokens": 32}}
        async with beside(**sections) as (worker, group, _, listed, _):
            ids = tokens_of(batches_for(small_manifest(), 1)[0][0])
            out = await worker.forward(SpanWork(microbatch_id(0), 0, None, ids, "train"))
            await worker.backward(ForwardKey(microbatch_id(0), 0), out)
            assert worker.step_of(0) == 0, "it waits for the other"
            del listed[OTHER]
            running = asyncio.create_task(group.run())
            while worker.step_of(0) == 0:
                await asyncio.sleep(0.01)
            await stop(running)

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize(("exact_steps", "first"), [(0, 1), (5, 3), (6, 4)])
def test_fragments_are_averaged_of_inner_steps_only_and_gradients_of_all_reduce_steps(
    exact_steps: int, first: int
) -> None:
    """Round n is of step 2 n; a slice of a step that the replicas have taken together would bring nothing."""

    async def whole() -> None:
        async with beside(averaging={"exact_steps": exact_steps, "every": 2}) as (_, group, *_):
            for kind, number, slices in (("fragment", first - 1, 20), ("gradient", exact_steps, 0)):
                refused = group.stages[0].round_contexts.context_of(Shard(0, kind, number, 0, slices)).refusal
                assert isinstance(refused, ProtocolError) and f"averages no {kind} {number} here" in str(refused)
            assert group.stages[0].round_contexts.context_of(Shard(0, "fragment", first, 0, 20)).numel > 0

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_the_same_shard_twice_is_refused_and_no_violation() -> None:
    """A restarted peer sends its shards again, and so does a second machine that has a copy of its key."""

    async def whole() -> None:
        recorded: list[Any] = []
        averaging = {"exact_steps": 0, "every": 2, "fraction": 0.5, "slice_wire": "float32"}
        violations = PeerScore(recorded.append, loop_time)
        async with beside(violations.report_violation, averaging=averaging) as (_, group, *_):
            size = group.stages[0].round_contexts.context_of(Shard(0, "fragment", 1, 0, 2)).numel
            refused = 0
            for round_ in (1, 3, 5, 7):
                message = Contribute(0, "slice", round_, 0, 2, 1.0, False, "float32", 1000)
                for _ in range(2):
                    try:
                        deadline = asyncio.get_running_loop().time() + 0.2
                        await group.answer(OTHER, message, [wire(np.zeros(size, np.float32))], deadline)
                    except RepeatedContribution:
                        refused += 1
                    except (AgoraError, TimeoutError):
                        continue
            assert refused > 0 and not recorded and violations.suspended_s(OTHER) == 0.0

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_what_no_member_may_bring_is_one_violation_for_a_round() -> None:
    async def whole() -> None:
        recorded: list[Any] = []
        averaging = {"exact_steps": 0, "every": 2, "fraction": 0.5, "slice_wire": "float32"}

        violations = PeerScore(recorded.append, loop_time)
        async with beside(violations.report_violation, averaging=averaging) as (_, group, *_):
            size = group.stages[0].round_contexts.context_of(Shard(0, "fragment", 1, 0, 2)).numel

            async def bring(round_: int, values: np.ndarray, weight: float = 1.0) -> None:
                message = Contribute(0, "slice", round_, 0, 2, weight, False, "float32", 1000)
                await group.answer(OTHER, message, [wire(values)], asyncio.get_running_loop().time() + 1)

            good, bad = np.zeros(size, np.float32), np.full(size, np.nan, np.float32)
            for round_, values, weight in ((1, bad, 1.0), (1, bad, 1.0), (1, good[:-1], 1.0), (3, good, 1e12)):
                with pytest.raises(ProtocolError):
                    await bring(round_, values, weight)
            with pytest.raises(Refused):
                await bring(9, good)
            codes = [(event.peer, event.offence, event.text.partition(":")[0]) for event in recorded]
            assert codes == [(OTHER, "bad-average", code) for code in ("bad-tensor", "bad-message")], (
                "a round that is far away is not a fault"
            )

    asyncio.run(asyncio.wait_for(whole(), 30))
