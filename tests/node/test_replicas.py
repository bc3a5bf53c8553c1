"""Steps and rounds go on whatever the other replica says, or leaves unsaid: a real stage, and a peer that lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from agora_protocol.errors import ProtocolError, Refused, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute, GossipedSteps, GossipSteps, Message
from agora_protocol.tensors import WireTensor

from agora.averaging.terms import Part
from agora.node.replicas import Replicas
from agora.observe.events import PartFailed, RoundDone, StepTaken
from agora.swarm.conduct import ReportOffence
from agora.swarm.offences import OffenceLog
from agora.train.compute import Compute
from tests.train.support import Events, batches_for, microbatch_id, pipeline_of, small_manifest, tokens_of, wire

ME, OTHER = (Identity(bytes([n]) * 32).peer for n in (1, 2))


class Liar:
    """The stage's only other replica, by far the better connected, so that it owns every part.

    `mean`: the elements of its answers. `tokens`: what it says it has counted at step 0.
    """

    mean, tokens = 0.0, 0

    async def call(self, peer: PeerId, request: Message, tensors: Sequence[WireTensor], **_: Any) -> SimpleNamespace:
        """Answers with a part of equal numbers."""
        if isinstance(request, GossipSteps):
            return SimpleNamespace(message=GossipedSteps(((OTHER, 0, self.tokens, 0),)), tensors=[])
        assert isinstance(request, Contribute)
        answer = Averaged(members=2, present=2, weight=64.0, distance=0.0)
        return SimpleNamespace(message=answer, tensors=[wire(np.full(tensors[0].shape, self.mean, np.float32))])


@asynccontextmanager
async def beside(
    liar: Liar, report_offence: ReportOffence = lambda *_: None, **sections: Any
) -> AsyncIterator[tuple[Compute, Replicas, Events]]:
    """Stage 0 alone, and this peer's replicas, whose view has the liar and nobody else."""
    events, manifest = Events(), small_manifest(**sections)
    signed = SignedManifest.sign(manifest, Identity(bytes([9]) * 32))
    seen = [SimpleNamespace(peer=ME, bandwidth=1.0), SimpleNamespace(peer=OTHER, bandwidth=1e12)]
    membership: Any = SimpleNamespace(view=SimpleNamespace(replicas=lambda stage: seen))
    keeper: Any = SimpleNamespace(fetched=())
    async with pipeline_of(manifest, ["0"], report=events) as (compute,):
        replicas = Replicas(signed, ME, compute, membership, cast(Any, liar), keeper, events, report_offence)
        yield compute, replicas, events
        await replicas.owner.close()


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def weights_after(compute: Compute, number: int, learning: bool = True) -> np.ndarray:
    """After a step, for which this peer counts all tokens unless it is not `learning`."""
    if learning:
        ids = tokens_of(batches_for(small_manifest(), number + 1)[number][0])
        out = await compute.forward(microbatch_id(number), 0, None, ids, True)
        await compute.backward(microbatch_id(number), out)
    while compute.step_of(0) == number:
        await asyncio.sleep(0.01)
    return (await compute.export_state(0)).weights


def test_a_gradient_too_large_to_step_along_costs_one_step_and_one_that_is_absurd_only_the_averaging() -> None:
    async def whole() -> None:
        liar, averaging = Liar(), {"exact_steps": 100, "every": 1000, "wire": "float32"}
        async with beside(liar, averaging=averaging, optimizer={"target_tokens": 32}) as (compute, replicas, events):
            running = asyncio.create_task(replicas.run())
            before = (await compute.export_state(0)).weights
            liar.mean, liar.tokens = 3e38, 32
            over = await weights_after(compute, 0, learning=False)
            assert np.array_equal(over, before) and not events.of(PartFailed), "there was nothing to judge it by"
            liar.mean, liar.tokens = 1e-4, 0
            honest = await weights_after(compute, 1)
            assert np.isfinite(honest).all() and not np.array_equal(honest, before)
            liar.mean = 1e3
            alone = await weights_after(compute, 2)
            assert np.isfinite(alone).all() and not np.array_equal(alone, honest), "it goes on along its own gradient"
            assert {"the mean gradient is" in failed.reason for failed in events.of(PartFailed)} == {True}
            await stop(running)
        rounds = events.of(RoundDone)
        assert [done.failed_parts == done.parts for done in rounds] == [False, False, True]
        assert [taken.step for taken in events.of(StepTaken)] == [1, 2, 3]

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_step_that_was_to_be_taken_together_is_taken_alone_when_the_last_other_replica_leaves() -> None:
    async def whole() -> None:
        sections = {"schedule": {"kind": "synchronous"}, "optimizer": {"target_tokens": 32}}
        async with beside(Liar(), **sections) as (compute, replicas, _):
            ids = tokens_of(batches_for(small_manifest(), 1)[0][0])
            out = await compute.forward(microbatch_id(0), 0, None, ids, True)
            await compute.backward(microbatch_id(0), out)
            assert compute.step_of(0) == 0, "it waits for the other"
            replicas._membership.view.replicas(0).pop()
            running = asyncio.create_task(replicas.run())
            while compute.step_of(0) == 0:
                await asyncio.sleep(0.01)
            await stop(running)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_round_is_begun_once_and_with_no_more_tokens_than_owners_take() -> None:
    async def whole() -> None:
        averaging = {"exact_steps": 0, "every": 2, "wire": "float32"}
        async with beside(Liar(), averaging=averaging, optimizer={"target_tokens": 32}) as (_, replicas, events):
            (it,) = replicas._stages.values()
            seen = replicas._membership.view.replicas(0)
            other = seen.pop()
            for step in range(1, 400):
                replicas.stepped(0, step, 32)
            assert it.tokens == 64 * 32 * 2 and it.round is None, "alone"
            seen.append(other)
            await replicas._round(0, it, 1)
            assert it.tokens == 0 and [done.round for done in events.of(RoundDone)] == [1]
            replicas.stepped(0, 2, 32)
            assert it.round is None, "others had begun it, and this one came to it"
            replicas.stepped(0, 4, 32)
            assert it.round is not None
            await asyncio.sleep(0)
            await stop(it.round)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_what_no_member_may_bring_is_one_offence_for_a_round() -> None:
    async def whole() -> None:
        recorded: list[Any] = []
        averaging = {"exact_steps": 0, "every": 2, "wire": "float32"}

        offences = OffenceLog(recorded.append)
        async with beside(Liar(), offences.report_offence, averaging=averaging) as (_, replicas, _):
            size = replicas._size_of(Part(0, "weights", 0, 0))

            async def bring(round_: int, values: np.ndarray, weight: float = 1.0) -> None:
                message = Contribute(0, "weights", round_, 0, weight, False, 1000)
                await replicas.contribute(OTHER, message, [wire(values)], asyncio.get_running_loop().time() + 1)

            good, bad = np.zeros(size, np.float32), np.full(size, np.nan, np.float32)
            for round_, values, weight in ((0, bad, 1.0), (0, bad, 1.0), (0, good[:-1], 1.0), (1, good, 1e12)):
                with pytest.raises(ProtocolError):
                    await bring(round_, values, weight)
            with pytest.raises(Refused):
                await bring(9, good)
            codes = [(event.peer, event.offence, event.text.partition(":")[0]) for event in recorded]
            assert codes == [(OTHER, "bad-average", code) for code in ("bad-tensor", "bad-message")], (
                "a round that is far away is no fault"
            )

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize("least", [True, False])
def test_of_replicas_that_are_all_in_doubt_the_least_trusts_its_state_after_three_tries(
    least: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agora.node.replicas.AGAIN_S", 0.01)
    asked, trusted, sure_after = list[int](), list[int](), 5

    async def fetch(stage: int, sources: Sequence[PeerId], at_least: int) -> None:
        asked.append(at_least)
        if len(asked) < sure_after:
            raise Unavailable(stage, ["not sure"])

    async def whole() -> None:
        async with beside(Liar()) as (_, replicas, _):
            replicas._keeper = cast(Any, SimpleNamespace(fetch=fetch, trust=trusted.append))
            before, after = Identity(bytes(32)).peer, OTHER
            other = max(before, after) if least else min(before, after)
            replicas._me = min(before, after) if least else max(before, after)
            monkeypatch.setattr(replicas._gossip, "heard", lambda stage: {other: 0})
            await replicas._mend(0, 7)

    asyncio.run(asyncio.wait_for(whole(), 30))
    assert asked == [7] * (3 if least else sure_after), "the others ask until one is sure"
    assert trusted == ([0] if least else []), "who has fetched is trusted by the keeper, that has what it fetched"
