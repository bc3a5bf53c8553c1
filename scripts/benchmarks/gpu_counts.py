"""Counts what a job of the device costs whatever the machine: kernels, synchronisations, copies, bytes of the weights.

A CPU stands in for the GPU. Its products are in bf16, as those of a GPU, and its codec takes all rows at once.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agora.codec import BoundaryCodec, encode_tokens, gradient_dither_key
from agora.codec.transfer import CPU
from agora.core.span_work import ForwardKey, SpanWork
from agora.train.compiled_layers import RUNS_BEFORE, LayerCompiler
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork

COMPILE_S: Final = 60.0  # within which a layer must be compiled, without code generation
WARM_UP: Final = 2  # microbatches that are not counted: rotations are drawn, graphs are measured, versions made
MODEL: Final = {"width": 256, "subspace": 128, "heads": 4, "key_value_heads": 2, "feed_forward": 704, "context": 32}
STEP_TOKENS: Final = 2 * MODEL["context"]  # of a step of one microbatch
# Operations that start no kernel: they view or allocate, or read one value, which waits for all kernels.
NO_KERNEL: Final = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "lift_fresh",
)
# Operations after which the host waits: it reads a value, or how many there are.
READS: Final = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2")
# The operations that read and write whole weights or their gradients, apart from products.
WEIGHT_PASSES: Final = ("_to_copy", "_foreach_norm", "_foreach_add_", "add_", "copy_", "_foreach_copy_")


@dataclass(slots=True)
class JobCounts:
    """Of one job. weight_bytes: read and written by casts, norms and sums of tensors of a weight matrix's shape."""

    kernels: int = 0
    products: int = 0  # of matrices; they are kernels, too
    syncs: int = 0  # values that the host reads, each of which waits for all kernels before it
    copies: int = 0  # between host and device, either way
    weight_bytes: int = 0


@dataclass(slots=True)
class JobCounter:
    """Counts the jobs of one device worker, of which `start_job` must be the `fault`."""

    matrix_shapes: frozenset[tuple[int, ...]] = frozenset()
    jobs: list[JobCounts] = field(default_factory=list)
    _modes: list[Any] = field(default_factory=list)

    def start_job(self, point: str) -> None:
        # The modes are those of the device's thread, and end with it.
        if not self._modes:
            self._modes = [_CopyMode(self), _KernelMode(self)]
            for mode in self._modes:
                mode.__enter__()
        self.jobs.append(JobCounts())

    @property
    def job(self) -> JobCounts:
        return self.jobs[-1]


class _KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counter: JobCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name, job = function.overloadpacket.__name__, self._counter.job
        job.syncs += name in READS
        if name != "_local_scalar_dense" and name not in NO_KERNEL and not _is_view(function):
            job.kernels += 1
            job.products += name in ("mm", "bmm", "addmm", "baddbmm")
            if name in WEIGHT_PASSES:
                written = args[0] if name.endswith("_") and name != "_to_copy" else result
                tensors = [leaf for leaf in tree_leaves((args, written)) if isinstance(leaf, Tensor)]
                shapes = self._counter.matrix_shapes
                job.weight_bytes += sum(t.numel() * t.itemsize for t in tensors if tuple(t.shape) in shapes)
        return result


class _CopyMode(TorchFunctionMode):
    def __init__(self, counter: JobCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        job = self._counter.job
        # On a CPU these do nothing, so that no operation shows them.
        if function is Tensor.cpu or (function is Tensor.to and any(map(_is_device, (*args[1:], *kwargs.values())))):
            job.copies += args[0].dim() > 0  # torch's norms take scalars to the device on which they are
        elif function is torch.tensor and "device" in kwargs:
            job.copies += 1
        elif function is Tensor.tolist:
            job.syncs += 1  # one, as for a single value
        return function(*args, **kwargs)


def _is_view(function: Any) -> bool:
    # A result that shares an argument's memory, which the operation has not written.
    aliased = [value.alias_info for value in function._schema.returns if value.alias_info is not None]
    return any(not info.is_write for info in aliased)


def _is_device(value: object) -> bool:
    return isinstance(value, (torch.device, str))


@contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Within it, device workers that are made compute on the CPU as they would on a GPU with bf16."""

    def all_rows(rows: Tensor) -> list[slice]:
        return [slice(0, rows.shape[0])]

    with (
        mock.patch("agora.train.span_trainer.product_dtype", return_value=torch.bfloat16),
        mock.patch("agora.codec.transfer.is_apart", return_value=True),
        mock.patch("agora.train.gradients.converts_before_adding", return_value=False),
        mock.patch("agora.codec.quantisation._row_chunks", all_rows),
    ):
        yield


@dataclass(frozen=True, slots=True)
class HopCounts:
    """Of one microbatch at the middle stage of three: its forward job and its backward job."""

    forward: JobCounts
    backward: JobCounts
    parameters: int  # of the stage's matrices
    kept_bytes: int  # by the worker between two jobs, without boundaries, graphs and fixed tensors
    trained: int  # values

    @property
    def jobs(self) -> tuple[JobCounts, JobCounts]:
        return self.forward, self.backward

    def total(self, read: Callable[[JobCounts], int]) -> int:
        """Returns the sum of what `read` takes from each job."""
        return sum(map(read, self.jobs))


def count_manifest(layers: int, codec: str = "int6/int3", activations: str = "keep", **sections: object) -> Manifest:
    """Returns a run of three stages of `layers` layers each, whose steps never end."""
    values: dict[str, Any] = {
        "model": {**MODEL, "layers": 3 * layers},
        "stages": {"count": 3},
        "boundary": {"codec": codec},
        "schedule": {"microbatch": 2, "activations": activations},
        "optimizer": {"name": "muon", "target_tokens": 1 << 40},
    }
    values.update(sections)
    return Manifest.from_values(values, "counts")


async def count_hop(manifest: Manifest) -> HopCounts:
    """Counts the jobs of the third microbatch at the middle stage."""
    held_before = held_bytes()
    async with _counted_worker(manifest, 1) as (worker, counter):
        for number in range(WARM_UP + 1):
            del counter.jobs[:]
            microbatch = _microbatch(number)
            await worker.forward(SpanWork(microbatch, 1, _boundary(manifest), _tokens(manifest), "train"))
            key = gradient_dither_key(microbatch, 2)
            gradient = _codec(manifest).encode(_values(manifest) * 1e-3, "backward", key)
            await worker.backward(ForwardKey(microbatch, 1), gradient)
        forward, backward = counter.jobs
        slots = worker.layout(1).slots
        matrices = sum(math.prod(slot.shape) for slot in slots if len(slot.shape) > 1)
        trained = sum(math.prod(slot.shape) for slot in slots)
        fixed = sum(buffer.nbytes for buffer in worker.trainer.stages[1].weights.current.module.buffers())
        return HopCounts(forward, backward, matrices, held_bytes() - held_before - fixed, trained)


async def count_last(manifest: Manifest) -> JobCounts:
    """Counts the job of the third microbatch at the last stage."""
    async with _counted_worker(manifest, 2) as (worker, counter):
        for number in range(WARM_UP + 1):
            del counter.jobs[:]
            await worker.run_last_stages(
                SpanWork(_microbatch(number), 2, _boundary(manifest), _tokens(manifest), "train")
            )
        return counter.job


def counts(manifest: Manifest) -> tuple[HopCounts, JobCounts]:
    """Counts a microbatch at the middle stage and at the last one, the CPU in the place of a GPU."""

    async def both() -> tuple[HopCounts, JobCounts]:
        return await count_hop(manifest), await count_last(manifest)

    with cpu_as_gpu():
        return asyncio.run(both())


def count_frames(manifest: Manifest) -> int:
    """Returns how many frames torch.compile makes of the middle stage's layers, in training and in evaluations.

    Their weights change meanwhile, and with kept graphs there are two versions of them.
    """
    frames: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames.append(torch.is_grad_enabled())
        return graph.forward

    compiler = LayerCompiler(_ignore, backend=backend)
    trainer = SpanTrainer(manifest, Span(1, 1), CPU, report=_ignore, in_flight=4, compiler=compiler)
    ids = torch.zeros(manifest.tokens_shape(), dtype=torch.int32)
    for number in range(RUNS_BEFORE + 2):
        for purpose in ("train", "evaluate"):
            batch, entry = TokenBatch.from_wire(ids, has_marks=manifest.has_marks), _values(manifest)
            output, _ = trainer.forward(DecodedWork(_microbatch(number), 1, entry, batch, purpose))
            if purpose == "train" and number % 2:
                for kept in (number - 1, number):
                    trainer.backward(ForwardKey(_microbatch(kept), 1), torch.ones_like(output))
                    trainer.take_due_steps()
            compiler.wait(COMPILE_S)
    compiler.close()
    return len(frames)


def held_bytes() -> int:
    """Returns the bytes of all tensors that Python holds, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if type(tensor) in (Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@asynccontextmanager
async def _counted_worker(manifest: Manifest, stage: int) -> AsyncIterator[tuple[DeviceWorker, JobCounter]]:
    counter = JobCounter()
    device = DeviceOptions("cpu", fault=counter.start_job)
    worker = await DeviceWorker.create(manifest, Span(stage, stage), report=_ignore, device=device, in_flight=4)
    try:
        slots = worker.layout(stage).slots
        counter.matrix_shapes = frozenset(tuple(slot.shape) for slot in slots if len(slot.shape) > 1)
        yield worker, counter
    finally:
        await worker.close()


def _ignore(event: object) -> None:
    pass


def _microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(number.to_bytes(16, "big"))


def _codec(manifest: Manifest) -> BoundaryCodec:
    return BoundaryCodec(manifest.boundary.codec, manifest.seed)


def _values(manifest: Manifest) -> Tensor:
    return torch.randn(manifest.boundary_shape(), generator=torch.Generator().manual_seed(1))


def _boundary(manifest: Manifest) -> WireTensor:
    return _codec(manifest).encode(_values(manifest), "forward")


def _tokens(manifest: Manifest) -> WireTensor:
    shape = manifest.tokens_shape()
    return encode_tokens(torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int32))


def figures() -> Mapping[str, float]:
    """Returns the ratios that any machine can give, by their names in the benchmark's contract."""
    one, last = counts(count_manifest(1))
    two, _ = counts(count_manifest(2))
    jobs = (*one.jobs, last)
    return {
        "syncs_per_job": max(job.syncs for job in jobs),
        "copies_per_hop": one.total(lambda job: job.copies),
        "kernels_per_layer_eager": two.total(lambda job: job.kernels) - one.total(lambda job: job.kernels),
        "bytes_moved_per_parameter": one.total(lambda job: job.weight_bytes) / one.parameters,
        # What is padding or belongs to vectors is a thousandth here, and less in larger layers.
        "bytes_kept_per_parameter": round(one.kept_bytes / one.trained, 1),
        "compiled_frames": count_frames(count_manifest(2, optimizer={"target_tokens": STEP_TOKENS})),
    }
