"""Two and three stages with quantised boundaries between them: they learn as with exact ones, each time alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor

from agora.codec import BoundaryCodec
from agora.core.span_work import ForwardKey, SpanWork
from tests.train.support import batches_for, microbatch_id, pipeline_of, small_manifest, tokens_of, train_step

STEPS = 40


def losses(codec: str, spans: tuple[str, ...] = ("0-0", "1-1"), steps: int = STEPS) -> list[float]:
    manifest = small_manifest(
        boundary={"codec": codec},
        stages={"count": len(spans)},
        optimizer={"total_steps": steps, "learning_rate": 1e-2},
    )

    async def whole() -> list[float]:
        async with pipeline_of(manifest, spans) as pipeline:
            batches = batches_for(manifest, steps)
            return [await train_step(pipeline, batch, number) for number, batch in enumerate(batches)]

    return asyncio.run(whole())


@pytest.fixture(scope="module")
def exact() -> list[float]:
    found = losses("float32")
    assert found[-1] < 0.6 * found[0], "there is something to learn"
    return found


@pytest.mark.parametrize(
    ("codec", "near"),
    [("int8", 0.01), ("int6/int8h", 0.03), ("int8/int4", 0.06), ("int4h", 0.15), ("top24:int8", 0.15)],
)
def test_quantised_boundaries_train_nearly_as_exact_ones(exact: list[float], codec: str, near: float) -> None:
    found = losses(codec)
    ours, theirs = np.mean(found[-5:]), np.mean(exact[-5:])
    assert abs(ours - theirs) < near * theirs


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_gradient_comes_back_for_the_columns_that_crossed_and_learns(activations: str) -> None:
    manifest = small_manifest(
        stages={"count": 3}, boundary={"codec": "top20:float32"}, schedule={"activations": activations}
    )
    codec, shape = BoundaryCodec("top20:float32"), manifest.boundary_shape()
    tokens = tokens_of(batches_for(manifest, 1)[0][0])

    async def whole() -> None:
        async with pipeline_of(manifest, ("0-0", "1-1", "2-2")) as (first, middle, last):
            name = microbatch_id(1)
            entering = [await first.forward(SpanWork(name, 0, None, tokens, "train"))]
            entering.append(await middle.forward(SpanWork(name, 1, entering[0], tokens, "train")))
            done = await last.run_last_stages(SpanWork(name, 2, entering[1], tokens, "train"))
            assert done.gradient is not None
            back = await middle.backward(ForwardKey(name, middle.span.first), done.gradient)
            assert back.gradient is not None
            for boundary, gradient in zip(entering, (back.gradient, done.gradient), strict=True):
                columns = [
                    codec.decode(wire, shape, leg).flatten(0, 1).any(dim=0)
                    for wire, leg in ((boundary, "forward"), (gradient, "backward"))
                ]
                assert int(columns[0].sum()) == 20 and bool((columns[0] == columns[1]).all())
            await first.backward(ForwardKey(name, 0), back.gradient)

    asyncio.run(whole())


def test_a_run_with_dithered_gradients_can_be_repeated() -> None:
    spans = ("0-0", "1-1", "2-2")
    assert losses("int6/int4", spans, steps=3) == losses("int6/int4", spans, steps=3)


def test_what_crosses_has_the_legs_own_size_and_another_is_refused() -> None:
    manifest = small_manifest(boundary={"codec": "int6/int8"})
    tokens = tokens_of(batches_for(manifest, 1)[0][0])

    async def whole() -> None:
        async with pipeline_of(manifest, ("0-0", "1-1")) as (first, last):
            name = microbatch_id(1)
            boundary = await first.forward(SpanWork(name, 0, None, tokens, "train"))
            assert (boundary.dtype, boundary.shape) == ("uint8", (2 * 16 * (2 + 32 * 6 // 8),))
            done = await last.run_last_stages(SpanWork(name, 1, boundary, tokens, "train"))
            assert done.gradient is not None and done.gradient.shape == (2 * 16 * (2 + 32),)
            for wrong in (boundary, WireTensor("uint8", (4,), memoryview(b"1234"))):
                with pytest.raises(ProtocolError, match="int8 makes uint8") as refusal:
                    await first.backward(ForwardKey(name, 0), wrong)
                assert refusal.value.code == "bad-tensor"
            await first.backward(ForwardKey(name, 0), done.gradient)
            with pytest.raises(ProtocolError, match="int6 makes uint8"):
                await last.run_last_stages(SpanWork(microbatch_id(2), 1, done.gradient, tokens, "train"))

    asyncio.run(whole())


def test_a_microbatch_by_another_codec_has_the_bits_of_a_run_that_was_founded_with_it() -> None:
    founded = small_manifest(boundary={"codec": "float32"}, stages={"count": 3})
    with_other = small_manifest(boundary={"codec": "int6/int4"}, stages={"count": 3})

    async def gradients(manifest: Manifest, codec: str) -> list[bytes]:
        spans = ("0-0", "1-1", "2-2")
        name, tokens = microbatch_id(1), tokens_of(batches_for(manifest, 1)[0][0])
        async with pipeline_of(manifest, spans) as (first, middle, last):
            # One by the founding codec is in progress at the same time.
            others = microbatch_id(2)
            await first.forward(SpanWork(others, 0, None, tokens, "train"))
            entering = await first.forward(SpanWork(name, 0, None, tokens, "train", codec=codec))
            leaving = await middle.forward(SpanWork(name, 1, entering, tokens, "train", codec=codec))
            done = await last.run_last_stages(SpanWork(name, 2, leaving, tokens, "train", codec=codec))
            assert done.gradient is not None
            back = await middle.backward(ForwardKey(name, 1, codec=codec), done.gradient)
            assert back.gradient is not None
            await first.backward(ForwardKey(name, 0, codec=codec), back.gradient)
            return [bytes(wire.data) for wire in (entering, leaving, done.gradient, back.gradient)]

    assert asyncio.run(gradients(founded, "int6/int4")) == asyncio.run(gradients(with_other, ""))
