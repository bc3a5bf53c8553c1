"""An exact step of an asynchronous run goes on whatever the other replica says: a real stage, and a peer that lies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute, Message, Tallied, Tally
from agora_protocol.tensors import WireTensor

from agora.node.replicas import Replicas
from agora.observe.events import PartFailed, RoundDone, StepTaken
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
        if isinstance(request, Tally):
            return SimpleNamespace(message=Tallied(((OTHER, 0, self.tokens, 0),)), tensors=[])
        assert isinstance(request, Contribute) and request.what == "gradient"
        answer = Averaged(members=2, present=2, weight=64.0, distance=0.0)
        return SimpleNamespace(message=answer, tensors=[wire(np.full(tensors[0].shape, self.mean, np.float32))])


def replicas_beside(liar: Liar, signed: SignedManifest, compute: Compute, events: Events) -> Replicas:
    """This peer's replicas, whose view has the liar and nobody else."""
    seen = [SimpleNamespace(peer=ME, bandwidth=1.0), SimpleNamespace(peer=OTHER, bandwidth=1e12)]
    membership = SimpleNamespace(view=SimpleNamespace(replicas=lambda stage: seen))
    keeper = SimpleNamespace(fetched=())
    return Replicas(signed, ME, compute, cast(Any, membership), cast(Any, liar), cast(Any, keeper), events)


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
        events, liar = Events(), Liar()
        manifest = small_manifest(
            averaging={"exact_steps": 100, "every": 1000, "wire": "float32"}, optimizer={"target_tokens": 32}
        )
        signed = SignedManifest.sign(manifest, Identity(bytes([9]) * 32))
        async with pipeline_of(manifest, ["0"], report=events) as (compute,):
            replicas = replicas_beside(liar, signed, compute, events)
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
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        rounds = events.of(RoundDone)
        assert [done.failed_parts == done.parts for done in rounds] == [False, False, True]
        assert [taken.step for taken in events.of(StepTaken)] == [1, 2, 3]

    asyncio.run(asyncio.wait_for(whole(), 60))
