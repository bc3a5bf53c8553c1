"""What the tests of train/ share: a small run, its batches, and a pipeline of DeviceWorker facades driven by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import OptimizerSection
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.span_work import ForwardKey, SpanWork
from agora.core.step_instructions import StageStepped, StepInstructions
from agora.observe.events import Event
from agora.state.layout import VALUE_BYTES, Layout
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker
from agora.train.optimizer import float32_moments

torch.set_num_threads(1)

MODEL = {"width": 32, "layers": 4, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "context": 16}
MICROBATCHES = 3


def small_manifest(**overrides: Any) -> Manifest:
    """A run whose step takes three microbatches of 2 x 16 tokens; float32 boundaries."""
    sections: dict[str, Any] = {
        "model": MODEL,
        "stages": {"count": 2},
        "boundary": {"codec": "float32"},
        "schedule": {"microbatch": 2, "activations": "recompute"},
        "optimizer": {"target_tokens": MICROBATCHES * 32, "warmup_steps": 2, "total_steps": 10, "clip": 0.5},
    }
    for name, values in overrides.items():
        sections[name] = {**sections.get(name, {}), **values} if isinstance(values, dict) else values
    return Manifest.from_values(sections, "test")


def batches_for(
    manifest: Manifest, steps: int, microbatches: int = MICROBATCHES, seed: int = 0
) -> list[list[np.ndarray]]:
    """Of each step its microbatches, int32 [b, s + 1], with some structure to learn."""
    random = np.random.default_rng(seed)
    shape = (manifest.schedule.microbatch, manifest.model.context + 1)
    start = random.integers(0, 16, (steps, microbatches, shape[0], 1))
    noise = random.integers(0, 3, (steps, microbatches, *shape))
    ids = ((start + np.arange(shape[1]) * 3 + noise) % manifest.model.vocabulary).astype(np.int32)
    return [list(step) for step in ids]


def microbatch_id(number: int) -> MicrobatchId:
    return MicrobatchId(b"testing!" + number.to_bytes(8, "big"))


def tokens_of(batch: np.ndarray) -> WireTensor:
    return encode_tokens(batch)


def wire(values: np.ndarray) -> WireTensor:
    """float32 values as they would come from a peer."""
    return WireTensor("float32", values.shape, memoryview(bytearray(values.astype("<f4").tobytes())))


def values_of(tensor: WireTensor) -> np.ndarray:
    return np.frombuffer(bytes(tensor.data), "<f4").reshape(tensor.shape)


@asynccontextmanager
async def pipeline_of(manifest: Manifest, spans: Sequence[str], **options: Any) -> AsyncIterator[list[DeviceWorker]]:
    """One DeviceWorker per span, closed at the end; their events are in the `events` of the first one."""
    async with AsyncExitStack() as stack:
        workers = []
        for span in spans:
            options.setdefault("report", lambda event: None)
            worker = await DeviceWorker.create(
                manifest, Span.parse(span), **{"device": DeviceOptions("cpu"), **options}
            )
            stack.push_async_callback(worker.close)
            workers.append(worker)
        yield workers


def never_step(worker: DeviceWorker) -> None:
    """From now on no stage of `worker` takes a step by itself."""
    for stage in worker.span.stages:
        worker.set_step_instructions(stage, StepInstructions(target_tokens=1 << 40))


async def read_steps(worker: DeviceWorker, count: int) -> list[tuple[int, int, int]]:
    """The next `count` steps among the events: stage, steps taken, own tokens."""
    read: list[StageStepped] = []
    async for event in worker.step_events():
        if isinstance(event, StageStepped):
            read.append(event)
        if len(read) == count:
            break
    return [(event.stage, event.step, event.own_tokens) for event in read]


class Events(list[Event]):
    """A report that remembers."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


async def train_step(pipeline: Sequence[DeviceWorker], microbatches: Sequence[np.ndarray], number: int) -> float:
    """One step of the synchronous schedule, all its microbatches in flight; the mean loss per token."""
    *inner, last = pipeline
    ids = [microbatch_id(number * 1000 + i) for i in range(len(microbatches))]
    tokens = [tokens_of(batch) for batch in microbatches]
    boundaries: list[WireTensor | None] = [None] * len(ids)
    for worker in inner:
        for i, microbatch in enumerate(ids):
            boundaries[i] = await worker.forward(
                SpanWork(microbatch, worker.span.first, boundaries[i], tokens[i], "train")
            )
    entering = zip(ids, boundaries, tokens, strict=True)
    done = [
        await last.run_last_stages(SpanWork(m, last.span.first, boundary, batch, "train"))
        for m, boundary, batch in entering
    ]
    gradients = [finished.gradient for finished in done]
    for worker in reversed(inner):
        for i, microbatch in enumerate(ids):
            gradients[i] = (await worker.backward(ForwardKey(microbatch, worker.span.first), gradients[i])).gradient
    assert gradients == [None] * len(ids)
    return sum(finished.loss_sum for finished in done) / sum(finished.tokens for finished in done)


def moment_bytes(section: OptimizerSection, layout: Layout) -> int:
    """How many bytes the layout's moments take in memory, without the scales of those in 8 bits."""
    in_float32 = sum(moment.numel for moment in float32_moments(section, layout))
    everything = sum(moment.numel for moment in layout.moments)
    return VALUE_BYTES * in_float32 + everything - in_float32
