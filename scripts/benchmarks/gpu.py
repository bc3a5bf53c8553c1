"""`./scripts/bench gpu`: what this machine's GPU could do, and what the jobs of a daemon reach of it.

Each part runs in a process of its own within a limit of time, and says what it found when it ends; that is kept if a
later one fails or is interrupted. Without a GPU the same parts run on the CPU, in small sizes: then only the counts,
which no machine changes, mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage
from benchmarks.averaging import whole_round
from benchmarks.averaging_groups import OurGroup
from benchmarks.children import SCRIPTS, ChildProcesses, start_node
from benchmarks.gpu_counts import figures
from benchmarks.gpu_figures import QUICK_REPEATS, WARM_UP, Figure, Found, median_s, now, stage_manifest
from benchmarks.gpu_memory import GPU_WIDTHS, measure_head, measure_memory, measure_out_of_memory
from benchmarks.gpu_swarm import measure_swarm, measure_tuning
from benchmarks.machine import describe
from benchmarks.optimizer import train_microbatch
from benchmarks.report import Cell, Ratio, Report, show
from benchmarks.scaling_settings import MICROBATCHES_PER_STEP, Fleet
from benchmarks.scaling_swarm import FleetRun, share
from benchmarks.task import prepare_corpus

# Seconds within which a part must end.
LIMITS_S: Final[Mapping[str, float]] = {
    "machine": 60,
    "counts": 120,
    "stage": 180,
    "memory": 90,
    "head": 60,
    "step": 90,
    "codec": 60,
    "averaging": 120,
    "emulated": 240,
    "swarm": 300,
    "tuning": 300,
    "oom": 60,
}
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
# Of the measured steps: width and layers of the stage. On a GPU 50, 200 and 600 M parameters.
GPU_STEPS: Final = ((2048, 1), (4096, 1), (4096, 3))
CPU_STEPS: Final = ((64, 1),)
# Of the stage's layers, shaped as the presets are: the widths that are measured, with the preset that has each.
CPU_WIDTHS: Final[Mapping[int, str]] = {64: "tiny sizes"}
CODECS: Final = ("bf16", "int6/int3", "int5h/int2h")
IN_FLIGHT: Final = 8
TARGETS: Final[Mapping[str, tuple[str, str]]] = {
    "syncs_per_job": ("<= 1", "values that the host waits for within a job, in the job with the most"),
    "copies_per_hop": ("<= 4", "between host and device, forward and backward of a middle stage"),
    "kernels_per_layer_eager": ("<= 120", "of forward and backward, graph kept"),
    "bytes_moved_per_parameter": ("<= 14", "of matrices, in a microbatch: casts, norms, sums"),
    "bytes_kept_per_parameter": ("<= 20", "by the worker between two jobs, with Muon"),
    "compiled_frames": ("<= 2", "of all layers and versions of weights: one with gradients, one without"),
    "stage_vs_plain_compiled": (">= 0.95", "tokens/s of a middle stage's worker by those of its layers, compiled"),
    "mfu_1b": (">= 0.25", "of the layers alone, by the measured peak of products"),
    "mfu_8b": (">= 0.35", "of the layers alone, by the measured peak of products"),
    "emulated_busy": (">= 0.97", "of the time of two daemons with boundaries as 8b's, 40 ms forward, 80 backward"),
    "loop_ns_per_value": ("<= 5", "of a round, processor time of a replica's event loop"),
    "peak_vs_plan": ("<= 1.15", "most memory of a middle stage by what the plan says, the worst of all ways"),
    "small_daemon_vs_plain": (">= 0.8", "tokens/s of one daemon with all stages of `small` by the better plain loop"),
    "nf4_vs_peft": (">= 1.0", "tokens/s of one daemon by peft's, frozen weights in NF4"),
    "nf4_memory_vs_peft": ("<= 0.9", "what the GPU has in use with it, by that with peft"),
    "longest_callback_ms": ("<= 5", "of the event loop in a round, processor time"),
}


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
    """Runs each part in a child process; one that fails or takes too long becomes a row that says so.

    An interrupt ends the running part, and those after it are left out.
    """
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, Ratio] = {}
    for part in parts:
        try:
            found = run_part(part, quick)
        except (subprocess.SubprocessError, ValueError) as error:
            new = [_row_without_value(part, f"failed: {error}"[:300])]
        except KeyboardInterrupt:
            rows.append(_row_without_value(part, "interrupted"))
            break
        else:
            new = [{"part": part, **row} for row in found["figures"]]
            ratios |= {name: Ratio(value, *TARGETS[name]) for name, value in found["ratios"].items()}
        rows += new
        for row in new:
            print(f"{part}: {row['what']} {show(row['value'])} {row['unit']}".rstrip(), file=sys.stderr, flush=True)
    return Report("gpu", "What a GPU reaches", describe(), rows, ratios, NOTES)


def _row_without_value(part: str, what: str) -> dict[str, Cell]:
    return {"part": part, "what": what, "value": None, "unit": ""}


def run_part(part: str, quick: bool) -> dict[str, Any]:
    """Returns the figures and ratios of one part, run in a process of its own.

    Raises ValueError with the end of its error output, TimeoutExpired after its limit.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    if not torch.cuda.is_available():
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of tiny sizes would spin most of the time
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
        seconds = median_s(partial(torch.matmul, left, right), device, repeats)
        found.append(Figure(f"{name} product of {size} x {size}", 2e-12 * size**3 / seconds, "TFLOP/s"))
    values = torch.zeros(1 << (28 if device.type == "cuda" else 22), device=device)
    seconds = median_s(lambda: values.add_(1.0), device, repeats)
    found.append(Figure("reading and writing memory", 2e-9 * values.nbytes / seconds, "GB/s"))
    if device.type == "cuda":
        found += _measure_transfers(device, repeats)
    one = torch.zeros(1, device=device)
    count = 1000
    seconds = median_s(lambda: [one.add_(1.0) for _ in range(count)], device, repeats)
    found.append(Figure("a small kernel, of many in a row", 1e6 * seconds / count, "us"))
    found.append(Figure("reading one value", 1e6 * median_s(lambda: float(one), device, 20 * repeats), "us"))
    return Found(found, {})


def _measure_transfers(device: torch.device, repeats: int) -> list[Figure]:
    found = []
    on_device = torch.zeros(1 << 24, device=device)
    for name, host in (("pageable", torch.zeros(1 << 24)), ("pinned", torch.zeros(1 << 24, pin_memory=True))):
        up = median_s(partial(on_device.copy_, host), device, repeats)
        down = median_s(partial(host.copy_, on_device), device, repeats)
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
    peak = 2.0 * size**3 / median_s(lambda: left @ left, device, repeats)
    for width, preset in (GPU_WIDTHS if on_gpu else CPU_WIDTHS).items():
        manifest = stage_manifest(width)
        stage = family_of(manifest.model).build_stage(manifest.layers_of(1), manifest.seed).to(device)
        batch = MicrobatchSize(manifest.schedule.microbatch, manifest.model.context, manifest.has_marks)
        flops = sum(microbatch_flops(decoder_sizes(manifest.model), manifest.layers_of(1), batch))
        alone = {"eager": median_s(partial(train_microbatch, stage, manifest, device), device, repeats)}
        if on_gpu:
            stage.compile(dynamic=False)
            alone["compiled"] = median_s(partial(train_microbatch, stage, manifest, device), device, repeats)
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
        seconds = median_s(partial(codec.encode, values, "forward"), device, repeats)
        found.append(Figure(f"{name}: encode", 1e-9 * values.nbytes / seconds, "GB/s"))
        seconds = median_s(partial(_decode, codec, wire, manifest.boundary_shape(), device), device, repeats)
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


def measure_steps(device: torch.device, repeats: int) -> Found:
    """What the device thread spends on a stage between microbatches: steps, shares, the state that newcomers fetch."""
    found = []
    for width, layers in GPU_STEPS if device.type == "cuda" else CPU_STEPS:
        for optimizer in ("adamw", "muon"):
            for in_host in (False, True) if device.type == "cuda" and optimizer == "muon" else (False,):
                manifest = stage_manifest(width, layers, optimizer={"name": optimizer})
                trainer = SpanTrainer(
                    manifest, Span(1, 1), device, report=lambda event: None, in_flight=1, state_in_host=in_host
                )
                stage = trainer.stages[1]
                millions = sum(math.prod(slot.shape) for slot in stage.layout.slots) / 1e6
                size = f"{millions:.3g} M, {optimizer}{', state in host memory' if in_host else ''}"
                for what, seconds in _time_steps(stage, device, 1 + repeats // 4).items():
                    found.append(Figure(f"{size}: {what}", 1e3 * seconds, "ms"))
                del trainer, stage
    return Found(found)


def _time_steps(stage: Stage, device: torch.device, repeats: int) -> dict[str, float]:
    # Seconds, the least of `repeats`: the first of each also allocates what it keeps.
    seconds: dict[str, list[float]] = defaultdict(list)
    mean = torch.full((stage.layout.numel,), 1e-4)
    state = stage.export_state()

    def timed(what: str, work: Callable[[], object]) -> None:
        begin = now(device)
        work()
        seconds[what].append(now(device) - begin)

    for _ in range(1 + repeats):
        stage.gradient_sum.flat.fill_(1e-4)
        stage.record_microbatch("", 1, 1.0, stage.step)
        timed("close a share", stage.close_share)
        timed("step along a mean", lambda: stage.step_with_gradient(stage.step, mean, 1))
        flat = stage.weights.current.flat.clone()
        gradient = torch.full_like(flat, 1e-4)
        timed("predict a step", partial(stage.optimizer.preview, flat, gradient, stage.step))
        del flat, gradient
        timed("export the state", stage.export_state)
        timed("load a state", partial(stage.load_state, state))
    return {what: min(taken[1:]) for what, taken in seconds.items()}


PARTS: Final[Mapping[str, Callable[[torch.device, int], Found]]] = {
    "machine": measure_machine,
    "counts": measure_counts,
    "stage": measure_stages,
    "memory": measure_memory,
    "head": measure_head,
    "step": measure_steps,
    "codec": measure_codecs,
    "averaging": measure_averaging,
    "emulated": measure_emulated,
    "swarm": measure_swarm,
    "tuning": measure_tuning,
    "oom": measure_out_of_memory,
}


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
    "`memory`: a middle stage of two layers with 6 microbatches in flight, beside what `swarm plan` counts for it. "
    "`head`: the last stage, of one layer. `step`: the least of several turns, on the device thread.",
    "`swarm`: the plain loop has no codec, no peers and no staleness; each daemon has its stages, and all share the "
    "device. `tuning`: a Llama-like model of random weights and bytes as tokens, LoRA in all linear layers. Memory is "
    "that of all processes of a contender: what the GPU has in use, or what is resident on a CPU.",
    "`oom`: 6 forwards, their 6 backwards and a step, again and again, once with memory for all graphs, once without; "
    "the CPU's is emulated.",
]


if __name__ == "__main__":
    chosen = choose_device("auto")
    if chosen.type == "cpu":
        torch.set_num_threads(1)  # of tiny tensors, more of them mostly wait for each other
    measured = PARTS[sys.argv[1]](chosen, QUICK_REPEATS if "quick" in sys.argv[2:] else 20)
    rows = [{"what": f.what, "value": f.value, "unit": f.unit} for f in measured.figures]
    print(json.dumps({"figures": rows, "ratios": measured.ratios}))
