"""Parts of `./scripts/bench gpu` about memory: peaks beside the plan's, the head, and a device that is too small.

On a CPU the allocations are counted, and an emulated memory of a set size fails as a GPU's does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from agora_protocol.errors import LocalError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.codec import BoundaryCodec, encode_tokens, gradient_dither_key
from agora.core.span_work import ForwardKey, SpanWork
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import ALL_ACTIVATIONS
from agora.train.device import DeviceOptions, has_native_bf16
from agora.train.device_worker import DeviceWorker
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from benchmarks.gpu_figures import Figure, Found, median_s, stage_manifest
from benchmarks.live_bytes import LiveBytes
from benchmarks.training_memory import SETTINGS, allocated_bytes, measured_peak, random_boundary, random_tokens

MIB: Final = 2**20
WAITING: Final = 6  # microbatches between forward and backward
GPU_WIDTHS: Final[Mapping[int, str]] = {768: "150m", 2048: "1b", 4096: "8b"}
CPU_WIDTHS: Final[Mapping[int, str]] = {128: "tiny sizes"}
GPU_VOCABULARIES: Final = (32_000, 128_256, 256_000)
CPU_VOCABULARIES: Final = (1024, 4096)
ROUNDS: Final = 6  # of WAITING forwards, their backwards, and a step
LACKING: Final = 0.6  # of the bytes of all kept graphs


def measure_memory(device: torch.device, repeats: int) -> Found:
    """The most memory that a middle stage takes in each way to keep graphs, beside what the plan says."""
    found, worst = [], 0.0
    for width, preset in (GPU_WIDTHS if device.type == "cuda" else CPU_WIDTHS).items():
        for way in ALL_ACTIVATIONS:
            context = {} if device.type == "cuda" else {"context": 64}
            schedule = {"activations": SETTINGS[way]}
            tokens = WAITING * (context.get("context", 2048))
            manifest = stage_manifest(width, 2, model=context, schedule=schedule, optimizer={"target_tokens": tokens})
            cost = run_cost(manifest, in_16_bits=has_native_bf16(device), in_flight=WAITING, activations=way)
            planned = cost.memory(Span(1, 1)).device
            peak = measured_peak(manifest, Span(1, 1), WAITING, way=way, device=device)
            found.append(Figure(f"{preset}: peak, {way}", peak / MIB, "MiB"))
            found.append(Figure(f"{preset}: by the plan's, {way}", peak / planned, ""))
            worst = max(worst, peak / planned)
    return Found(found, {"peak_vs_plan": worst})


def measure_head(device: torch.device, repeats: int) -> Found:
    """The last stage with heads of several vocabularies: the time of a microbatch, and what it takes beside weights."""
    on_gpu = device.type == "cuda"
    found = []
    for vocabulary in GPU_VOCABULARIES if on_gpu else CPU_VOCABULARIES:
        manifest = stage_manifest(2048 if on_gpu else 64, model={"vocabulary": vocabulary})
        trainer = SpanTrainer(manifest, Span(2, 2), device, report=lambda event: None, in_flight=1)
        train = partial(_train_last, trainer, manifest)
        seconds = median_s(train, device, repeats)
        _, _, peak = allocated_bytes(train, device)
        found.append(Figure(f"{vocabulary:,} ids: a microbatch", 1e3 * seconds, "ms"))
        found.append(Figure(f"{vocabulary:,} ids: peak beside weights", peak / MIB, "MiB"))
        del trainer, train
    return Found(found)


def _train_last(trainer: SpanTrainer, manifest: Manifest) -> None:
    batch = TokenBatch.from_wire(random_tokens(manifest), has_marks=False, device=trainer.device)
    entry = random_boundary(manifest, trainer.device)
    trainer.run_last_stages(DecodedWork(MicrobatchId(bytes(16)), trainer.span.first, entry, batch, "train"))


# --- a device that is too small


def measure_out_of_memory(device: torch.device, repeats: int) -> Found:
    """Trains a middle stage with memory for all kept graphs, then again with LACKING of their bytes less."""
    on_gpu = device.type == "cuda"
    rounds = ROUNDS if on_gpu else 2
    # The kernels that add in an order of their own would make two runs differ whatever memory does.
    torch.use_deterministic_algorithms(on_gpu, warn_only=True)
    manifest = stage_manifest(
        4096 if on_gpu else 64,
        # A graph that was dropped is made again with the weights of the step at hand; so is then each of them.
        schedule={"activations": "auto", "predict_weights": False},
        optimizer={"target_tokens": WAITING * (2048 if on_gpu else 64)},
    )
    whole = asyncio.run(_train_within(device, manifest, rounds))
    limit = whole.most_bytes - round(LACKING * whole.graph_bytes)
    small = asyncio.run(_train_within(device, manifest, rounds, limit))
    difference = torch.linalg.vector_norm(small.weights - whole.weights) / torch.linalg.vector_norm(whole.weights)
    return Found(
        [
            Figure("microbatches", rounds * WAITING, ""),
            Figure("memory by what all graphs need", limit / whole.most_bytes, ""),
            Figure("times that memory was freed", small.freed, ""),
            Figure("microbatches dropped", whole.dropped + small.dropped, ""),
            Figure("difference of the weights from those with enough memory, by their norm", float(difference), ""),
        ]
    )


@dataclass(slots=True)
class TrainedWithin:
    """What became of a middle stage. graph_bytes: of all kept graphs at most. freed: how often memory had to be."""

    weights: Tensor
    most_bytes: int
    graph_bytes: int = 0
    freed: int = 0
    dropped: int = 0


class SmallMemory(LiveBytes):  # type: ignore[no-untyped-call]
    """A memory of `limit` bytes: what does not fit into it raises torch.OutOfMemoryError, as on a GPU."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if before < self.now > self._limit:
            del result
            raise torch.OutOfMemoryError(f"no memory for {function}")
        return result


async def _train_within(
    device: torch.device, manifest: Manifest, rounds: int, limit: float = math.inf
) -> TrainedWithin:
    # limit: bytes that all tensors of the device may take.
    memory = SmallMemory(limit)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        torch.cuda.reset_peak_memory_stats(device)

    def start_job(point: str) -> None:
        # A mode is that of its thread, the device's, and ends with it.
        if device.type != "cuda" and not memory.is_entered:
            memory.is_entered = True
            memory.__enter__()  # type: ignore[no-untyped-call]

    options = DeviceOptions(str(device), fault=start_job, compile="never")
    worker = await DeviceWorker.create(manifest, Span(1, 1), report=_ignore, device=options, in_flight=WAITING)
    trainer, codec = worker.trainer, BoundaryCodec(manifest.boundary.codec, manifest.seed)
    found = TrainedWithin(torch.empty(0), 0)
    random = torch.Generator().manual_seed(1)
    with mock.patch.object(trainer, "free_memory", wraps=trainer.free_memory) as free_memory:
        for turn in range(rounds):
            waiting = [MicrobatchId(bytes([turn, number]) * 8) for number in range(WAITING)]
            for name in waiting:
                boundary = codec.encode(torch.randn(manifest.boundary_shape(), generator=random), "forward")
                tokens = encode_tokens(torch.zeros(manifest.tokens_shape(), dtype=torch.int32))
                with _counted_if_dropped(found):
                    await worker.forward(SpanWork(name, 1, boundary, tokens, "train"))
            found.graph_bytes = max(found.graph_bytes, trainer.stashed.graph_bytes)
            for name in waiting:
                values = 1e-3 * torch.randn(manifest.boundary_shape(), generator=random)
                gradient = codec.encode(values, "backward", gradient_dither_key(name, 2))
                with _counted_if_dropped(found):
                    await worker.backward(ForwardKey(name, 1), gradient)
        found.freed = free_memory.call_count
    copied = await worker.copy_weights(1)
    found.weights = torch.cat([torch.from_numpy(values).flatten() for values in copied.values()])
    found.most_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory.most
    await worker.close()
    return found


@contextmanager
def _counted_if_dropped(found: TrainedWithin) -> Iterator[None]:
    try:
        yield
    except LocalError:
        found.dropped += 1


def _ignore(event: object) -> None:
    pass
