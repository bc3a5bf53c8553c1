"""`./scripts/bench gpu`: what this machine's GPU could do, and what the jobs of a daemon reach of it.

Each part runs in a process of its own within a limit of time; what the earlier ones found is kept if one fails. Without
a GPU the same parts run on the CPU, in small sizes: then only the counts, which no machine changes, mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.codec_names import Shape
from agora_protocol.errors import InputError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.cli.demo_command import DemoOptions
from agora.codec import BoundaryCodec, encode_tokens, gradient_dither_key
from agora.core.span_work import ForwardKey, SpanWork
from agora.cost.activation_bytes import MicrobatchSize
from agora.cost.decoder_sizes import decoder_sizes
from agora.cost.manifest_cost import microbatch_flops
from agora.model import family_of
from agora.train.device import DeviceOptions, choose_device, has_native_bf16
from agora.train.device_worker import DeviceWorker
from benchmarks.averaging import whole_round
from benchmarks.averaging_groups import OurGroup
from benchmarks.children import SCRIPTS, ChildProcesses, start_node
from benchmarks.gpu_counts import figures
from benchmarks.machine import describe
from benchmarks.optimizer import train_microbatch
from benchmarks.report import Cell, Ratio, Report
from benchmarks.scaling_settings import MICROBATCHES_PER_STEP, Fleet
from benchmarks.scaling_swarm import FleetRun, share
from benchmarks.task import prepare_corpus

# Seconds within which a part must end.
LIMITS_S: Final[Mapping[str, float]] = {
    "machine": 60,
    "counts": 120,
    "stage": 180,
    "codec": 60,
    "averaging": 120,
    "emulated": 240,
}
QUICK_REPEATS: Final = 3
EMULATED_MS: Final = 40.0
# Boundaries of 4,096 x 1,792 as in the preset 8b, and few weights.
EMULATED: Final[Mapping[str, Any]] = {
    "model": {"width": 1792, "subspace": 1792, "layers": 2, "heads": 14, "key_value_heads": 1, "feed_forward": 8}
    | {"context": 2048},
    "boundary": {"codec": "int6/int3"},
    "schedule": {"microbatch": 2, "activations": "keep"},
    "optimizer": {"name": "adamw", "target_tokens": 1 << 20},
}
AVERAGED: Final = 50_000_000  # values of a round
WARM_UP: Final = 3  # runs that are not timed
# Of the stage's layers, shaped as the presets are: the widths that are measured, with the preset that has each.
GPU_WIDTHS: Final[Mapping[int, str]] = {768: "150m", 2048: "1b", 4096: "8b"}
CPU_WIDTHS: Final[Mapping[int, str]] = {64: "tiny sizes"}
CODECS: Final = ("bf16", "int6/int3", "int5h/int2h")
IN_FLIGHT: Final = 8
TARGETS: Final[Mapping[str, tuple[str, str]]] = {
    "syncs_per_job": ("<= 1", "values that the host waits for, in the job with the most"),
    "copies_per_hop": ("<= 4", "between host and device, forward and backward of a middle stage"),
    "kernels_per_layer_eager": ("<= 120", "of forward and backward, graph kept"),
    "bytes_moved_per_parameter": ("<= 14", "of matrices, in a microbatch: casts, norms, sums"),
    "bytes_kept_per_parameter": ("<= 20", "by the worker between two jobs, with Muon"),
    "stage_vs_plain_compiled": (">= 0.95", "tokens/s of a middle stage's worker by those of its layers, compiled"),
    "mfu_1b": (">= 0.25", "of the layers alone, by the measured peak of products"),
    "mfu_8b": (">= 0.35", "of the layers alone, by the measured peak of products"),
    "emulated_busy": (">= 0.97", "of the time of two daemons with boundaries as 8b's, 40 ms forward, 80 backward"),
    "loop_ns_per_value": ("<= 5", "of a round, processor time of a replica's event loop"),
    "longest_callback_ms": ("<= 5", "of the event loop in a round, processor time"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured."""

    what: str
    value: float
    unit: str


@dataclass(slots=True)
class Found:
    """What a part found."""

    figures: list[Figure]
    ratios: dict[str, float]


def run(quick: bool, folder: Path) -> Report:
    """Runs every part."""
    return run_parts(quick, tuple(PARTS))


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs the parts of `--part NAME,NAME`. Raises InputError for another option or part."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--part", required=True)
    try:
        parts = parser.parse_args(list(options)).part.split(",")
    except (argparse.ArgumentError, SystemExit):
        raise InputError(f"gpu takes --part, a list of {', '.join(PARTS)}, and no other option.") from None
    if unknown := [part for part in parts if part not in PARTS]:
        raise InputError(f"gpu has no part {unknown[0]!r}; its parts are {', '.join(PARTS)}")
    return run_parts(quick, parts)


def run_parts(quick: bool, parts: Sequence[str]) -> Report:
    """Runs each part in a child process; one that fails or takes too long becomes a row that says so."""
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, Ratio] = {}
    for part in parts:
        try:
            found = run_part(part, quick)
        except (subprocess.SubprocessError, ValueError) as error:
            rows.append({"part": part, "what": f"failed: {error}"[:300], "value": None, "unit": ""})
        else:
            rows += [{"part": part, **row} for row in found["figures"]]
            ratios |= {name: Ratio(value, *TARGETS[name]) for name, value in found["ratios"].items()}
        print(f"{part}: {len(rows)} rows so far", file=sys.stderr, flush=True)
    return Report("gpu", "What a GPU reaches", describe(), rows, ratios, NOTES)


def run_part(part: str, quick: bool) -> dict[str, Any]:
    """Returns the figures and ratios of one part, run in a process of its own.

    Raises ValueError with the end of its error output, TimeoutExpired after its limit.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    command = [sys.executable, "-m", "benchmarks.gpu", part, *(["quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMITS_S[part], check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the parts


def measure_machine(device: torch.device, repeats: int) -> Found:
    """Products in each precision, copies, launches and synchronisations."""
    size = 8192 if device.type == "cuda" else 512
    found = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("float32", torch.float32)):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = _median_s(partial(torch.matmul, left, right), device, repeats)
        found.append(Figure(f"{name} product of {size} x {size}", 2e-12 * size**3 / seconds, "TFLOP/s"))
    values = torch.zeros(1 << (28 if device.type == "cuda" else 22), device=device)
    seconds = _median_s(lambda: values.add_(1.0), device, repeats)
    found.append(Figure("reading and writing memory", 2e-9 * values.nbytes / seconds, "GB/s"))
    if device.type == "cuda":
        found += _measure_transfers(device, repeats)
    one = torch.zeros(1, device=device)
    count = 1000
    seconds = _median_s(lambda: [one.add_(1.0) for _ in range(count)], device, repeats)
    found.append(Figure("a small kernel, of many in a row", 1e6 * seconds / count, "us"))
    found.append(Figure("reading one value", 1e6 * _median_s(lambda: float(one), device, 20 * repeats), "us"))
    return Found(found, {})


def _measure_transfers(device: torch.device, repeats: int) -> list[Figure]:
    found = []
    on_device = torch.zeros(1 << 24, device=device)
    for name, host in (("pageable", torch.zeros(1 << 24)), ("pinned", torch.zeros(1 << 24, pin_memory=True))):
        up = _median_s(partial(on_device.copy_, host), device, repeats)
        down = _median_s(partial(host.copy_, on_device), device, repeats)
        found.append(Figure(f"to the device, {name}", 1e-9 * host.nbytes / up, "GB/s"))
        found.append(Figure(f"to the host, {name}", 1e-9 * host.nbytes / down, "GB/s"))
    return found


def measure_counts(device: torch.device, repeats: int) -> Found:
    """Kernels, synchronisations, copies and bytes, counted on the CPU."""
    counted = dict(figures())
    return Found([Figure(name, float(value), "") for name, value in counted.items()], counted)


def measure_stages(device: torch.device, repeats: int) -> Found:
    """A middle stage of one layer: its layers alone, eager and compiled, and its worker with wire tensors."""
    found, ratios = [], {}
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 512
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if has_native_bf16(device) else torch.float32)
    peak = 2.0 * size**3 / _median_s(lambda: left @ left, device, repeats)
    for width, preset in (GPU_WIDTHS if on_gpu else CPU_WIDTHS).items():
        manifest = stage_manifest(width)
        stage = family_of(manifest.model).build_stage(manifest.layers_of(1), manifest.seed).to(device)
        batch = MicrobatchSize(manifest.schedule.microbatch, manifest.model.context, manifest.has_marks)
        flops = sum(microbatch_flops(decoder_sizes(manifest.model), manifest.layers_of(1), batch))
        alone = {"eager": _median_s(partial(train_microbatch, stage, manifest, device), device, repeats)}
        if on_gpu:
            stage.compile(dynamic=False)
            alone["compiled"] = _median_s(partial(train_microbatch, stage, manifest, device), device, repeats)
        for way, seconds in alone.items():
            found.append(Figure(f"{preset}: layer alone, {way}", manifest.tokens_per_microbatch / seconds, "tokens/s"))
            found.append(Figure(f"{preset}: MFU of it", 100 * flops / seconds / peak, "%"))
            if f"mfu_{preset}" in TARGETS:
                ratios[f"mfu_{preset}"] = flops / seconds / peak
        for in_flight in (1, IN_FLIGHT):
            seconds = asyncio.run(_time_worker(manifest, device, in_flight, repeats))
            speed = manifest.tokens_per_microbatch / seconds
            found.append(Figure(f"{preset}: worker, {in_flight} in flight", speed, "tokens/s"))
        if on_gpu:
            ratios["stage_vs_plain_compiled"] = alone["compiled"] / seconds  # of the widest, which is the last
    return Found(found, ratios)


def measure_codecs(device: torch.device, repeats: int) -> Found:
    """Encoding and decoding of a boundary on the device, in every codec."""
    manifest = stage_manifest(4096 if device.type == "cuda" else 64)
    values = torch.randn(manifest.boundary_shape(), device=device)
    found = []
    for name in CODECS:
        codec = BoundaryCodec(name, manifest.seed)
        wire = codec.encode(values, "forward")
        seconds = _median_s(partial(codec.encode, values, "forward"), device, repeats)
        found.append(Figure(f"{name}: encode", 1e-9 * values.nbytes / seconds, "GB/s"))
        seconds = _median_s(partial(_decode, codec, wire, manifest.boundary_shape(), device), device, repeats)
        found.append(Figure(f"{name}: decode", 1e-9 * values.nbytes / seconds, "GB/s"))
    return Found(found, {})


def _decode(codec: BoundaryCodec, wire: WireTensor, shape: Shape, device: torch.device) -> Tensor:
    return codec.decode(wire, shape, "forward", device=device)


def measure_averaging(device: torch.device, repeats: int) -> Found:
    """What a round of two replicas costs their event loops, as int8 over streams; each is a process."""
    numel = AVERAGED if repeats > QUICK_REPEATS else AVERAGED // 50
    found = {}
    for times_callbacks in (True, False):
        with tempfile.TemporaryDirectory() as folder, ChildProcesses(Path(folder)) as nursery:
            group = OurGroup(2, nursery, numel=numel)
            group.times_callbacks = times_callbacks
            group.start()
            rounds = [whole_round(group) for _ in range(3)]
        if times_callbacks:
            found["longest_callback_ms"] = statistics.median(done.longest_ms for done in rounds)
    found["loop_ns_per_value"] = statistics.median(done.loop_ns for done in rounds)
    seconds = statistics.median(done.seconds for done in rounds)
    return Found([Figure(f"a round of {numel / 1e6:.0f} M values", seconds, "s")], found)


def measure_emulated(device: torch.device, repeats: int) -> Found:
    """Two daemons, a stage each, with boundaries as 8b's, on emulated accelerators: what these wait for."""
    steps = 2 if repeats > QUICK_REPEATS else 1
    manifest = DemoOptions(stages=2, steps=100).manifest().with_values(**EMULATED)
    with tempfile.TemporaryDirectory() as folder:
        prepare_corpus(Path(folder), manifest)
        launch = partial(start_node, "benchmarks.emulated_node")
        fleet = EmulatedFleet(2)
        run = FleetRun(
            fleet,
            manifest,
            steps,
            Path(folder),
            threading.Event(),
            launch=launch,
            takes_snapshots=False,
            step_tokens=MICROBATCHES_PER_STEP * manifest.tokens_per_microbatch,
        )
        seen = run.run()
    found = [Figure("microbatches", seen.rate / manifest.tokens_per_microbatch, "1/s")]
    found.append(Figure("seconds of jobs by those that were set", seen.overrun, ""))
    for cause in ("busy", "microbatches", "mean", "peer", "wire"):
        for number, waits in enumerate(seen.waits):
            found.append(Figure(f"daemon {number}: {cause}", 100 * getattr(waits, cause) / waits.seconds, "%"))
    return Found(found, {"emulated_busy": share(seen.waits, "busy")})


class EmulatedFleet(Fleet):
    """Two machines, whose accelerators take EMULATED_MS for a forward."""

    def forward_ms(self, machine: int) -> float:
        return EMULATED_MS


PARTS: Final[Mapping[str, Callable[[torch.device, int], Found]]] = {
    "machine": measure_machine,
    "counts": measure_counts,
    "stage": measure_stages,
    "codec": measure_codecs,
    "averaging": measure_averaging,
    "emulated": measure_emulated,
}


def stage_manifest(width: int) -> Manifest:
    """Returns a run whose stage 1 is one layer of this width, with microbatches of 2,048 tokens; of 64 below 128."""
    context = 2048 if width >= 128 else 32
    heads = max(2, width // 128)
    model = {"width": width, "subspace": 7 * width // 16, "layers": 3, "heads": heads, "key_value_heads": heads}
    values = {
        "model": model | {"feed_forward": 11 * width // 4, "context": context},
        "stages": {"count": 3},
        "boundary": {"codec": "int6/int3"},
        "schedule": {"microbatch": 1 if width >= 128 else 2, "activations": "keep"},
        "optimizer": {"target_tokens": 1 << 40},
    }
    return Manifest.from_values(values, "benchmark")


async def _time_worker(manifest: Manifest, device: torch.device, in_flight: int, repeats: int) -> float:
    # Seconds of a microbatch, forward and backward, from wire tensors to wire tensors.
    options = DeviceOptions(str(device))
    worker = await DeviceWorker.create(
        manifest, Span(1, 1), report=lambda event: None, device=options, in_flight=2 * IN_FLIGHT
    )
    codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
    values: Tensor = torch.randn(manifest.boundary_shape(), generator=torch.Generator().manual_seed(1))
    boundary = codec.encode(values, "forward")
    tokens = encode_tokens(torch.zeros(manifest.tokens_shape(), dtype=torch.int32))

    async def pass_microbatch(number: int) -> None:
        microbatch = MicrobatchId(number.to_bytes(16, "big"))
        gradient = codec.encode(values * 1e-3, "backward", gradient_dither_key(microbatch, 2))
        await worker.forward(SpanWork(microbatch, 1, boundary, tokens, "train"))
        await worker.backward(ForwardKey(microbatch, 1), gradient)

    async def pass_some(first: int, count: int) -> None:
        waiting = iter(range(first, first + count))

        async def passing() -> None:
            for number in waiting:
                await pass_microbatch(number)

        await asyncio.gather(*(passing() for _ in range(in_flight)))

    try:
        await pass_some(0, WARM_UP * in_flight)
        count = repeats * in_flight
        begin = time.perf_counter()
        await pass_some(1000, count)
        return (time.perf_counter() - begin) / count
    finally:
        await worker.close()


def _median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for turn in range(WARM_UP + repeats):
        begin = _now(device)
        work()
        ended = _now(device)
        if turn >= WARM_UP:
            seconds.append(ended - begin)
    return statistics.median(seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


NOTES: Final = [
    "The counts are made on a CPU that stands for a GPU with bf16, at a middle stage of one layer of width 256 with "
    "int6/int3 and kept graphs, and at the last stage; `pytest tests/train/test_gpu_counts.py` fails when one grows.",
    "`stage`: one layer in the sizes of each preset, microbatches of 2,048 tokens. Alone: forward and backward without "
    "codec, gradient sum and copies. Worker: as in a daemon, from wire tensors to wire tensors. On a CPU the sizes are "
    "tiny, and the speeds say nothing.",
    "`averaging`: `loop_ns_per_value` on the loop of a daemon, uvloop; `longest_callback_ms` on asyncio's, whose "
    "callbacks can be timed. Medians of three rounds.",
    "`emulated`: real daemons over loopback, whose accelerators take 40 ms for a forward, 80 ms for a backward, and "
    "nothing of the processor: `benchmarks/emulated_node.py` has what is left out. A daemon is busy, or waits for "
    "microbatches, a mean gradient, the next peer or the wire.",
    "Not built yet: memory beside the plan, steps, a whole swarm, tuning beside peft, out of memory.",
]


if __name__ == "__main__":
    measured = PARTS[sys.argv[1]](choose_device("auto"), QUICK_REPEATS if "quick" in sys.argv[2:] else 20)
    rows = [{"what": f.what, "value": f.value, "unit": f.unit} for f in measured.figures]
    print(json.dumps({"figures": rows, "ratios": measured.ratios}))
