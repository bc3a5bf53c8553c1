"""Parts of `./scripts/bench gpu` with daemons on this machine's device: a swarm and a tuning run beside plain loops.

Each contender starts when the one before has ended, since they share the device and its memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.presets import PRESETS

from benchmarks.children import ChildProcesses
from benchmarks.gpu_figures import QUICK_REPEATS, Figure, Found
from benchmarks.learning_plain import PlainLoop
from benchmarks.machine import usable_cores
from benchmarks.swarm import SwarmContender
from benchmarks.task import corpus_cache, manifest_for, prepare_corpus
from benchmarks.tuning_settings import FrozenAs, speed_manifest
from benchmarks.tuning_speeds import PeftLoop, TuningSwarm
from benchmarks.window import START_S, Window

MIB: Final = 2**20
GPU_PRESETS: Final = ("small", "150m")
GPU_DAEMONS: Final = (1, 2, 4)
MICROBATCH_TOKENS: Final = 2048
TINY: Final[Mapping[str, int]] = {"width": 64, "subspace": 64, "layers": 4, "heads": 2, "key_value_heads": 2} | {
    "feed_forward": 176,
    "context": 32,
}
# Of the model that is tuned: Qwen3-0.6B's width, with 16 of its layers; on a CPU, a tiny one.
GPU_TUNED: Final[Mapping[str, int]] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
CPU_TUNED: Final[Mapping[str, int]] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def measure_swarm(device: torch.device, repeats: int) -> Found:
    """Tokens per second of the plain loop, eager and compiled, and of swarms of daemons that share the device."""
    found, ratios = [], {}
    on_gpu, window_s = device.type == "cuda", _window_s(repeats)
    for name in GPU_PRESETS if on_gpu else ("tiny sizes",):
        sizes = {key: value for key, value in PRESETS[name]["model"].items() if key != "vocabulary"} if on_gpu else TINY
        schedule = {"microbatch": MICROBATCH_TOKENS // sizes["context"] if on_gpu else 2}
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            sections = {"model": dict(sizes), "schedule": schedule, "data": _data(folder, on_gpu)}
            prepare_corpus(folder, manifest_for(1, sections))
            plain = {}
            for way in ("eager", "compiled") if on_gpu else ("eager",):
                loop = PlainLoop(manifest_for(1, sections), corpus_cache(folder), schedule["microbatch"])
                if way == "compiled":
                    loop.compile()
                plain[way] = _plain_rate(loop, window_s)
                found.append(Figure(f"{name}: plain loop, {way}", plain[way], "tokens/s"))
                del loop
            for daemons in GPU_DAEMONS if on_gpu else (1,):
                with ChildProcesses(folder) as nursery:
                    swarm = SwarmContender(manifest_for(daemons, sections), nursery, folder)
                    swarm.start()
                    rate = swarm.measure(window_s).rate
                found.append(Figure(f"{name}: daemons, {daemons}", rate, "tokens/s"))
                if name == "small" and daemons == 1:
                    ratios["small_daemon_vs_plain"] = rate / max(plain.values())
    return Found(found, ratios)


def _data(folder: Path, on_gpu: bool) -> dict[str, Any]:
    # Where speeds say nothing, this file in place of the standard library, which takes seconds to be read.
    return {} if on_gpu else {"corpus": [str(shutil.copy(__file__, folder / "text.txt"))], "heldout": 0.1}


def _window_s(repeats: int) -> float:
    return 10.0 if repeats > QUICK_REPEATS else 2.0


def _plain_rate(loop: PlainLoop, seconds: float) -> float:
    loop.take_step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        loop.take_step()
        steps += 1
    return steps * loop.step_tokens / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one way to tune a model reached. used_bytes: of the GPU, or resident on the CPU."""

    window: Window
    used_bytes: int


def measure_tuning(device: torch.device, repeats: int) -> Found:
    """LoRA and QLoRA by one process with peft and by daemons: tokens per second, and memory."""
    on_gpu, window_s = device.type == "cuda", _window_s(repeats)
    found, ratios = [], {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        base = _make_base(folder, GPU_TUNED if on_gpu else CPU_TUNED)
        data = _data(folder, on_gpu)
        prepare_corpus(folder, speed_manifest(base, "nf4").with_values(data=data))
        kinds: tuple[FrozenAs, ...] = ("bf16", "nf4") if on_gpu else ("nf4",)
        for frozen_as in kinds:
            runs = {count: speed_manifest(base, frozen_as, count).with_values(data=data) for count in (1, 2)}
            tuned = {"peft": _tune_with_peft(base, runs[1], folder, window_s)}
            for daemons in (1, 2) if on_gpu else (1,):
                name = f"{frozen_as}-{daemons}"
                tuned[f"daemons, {daemons}"] = _tune_with_daemons(base, runs[daemons], name, folder, window_s)
            for what, reached in tuned.items():
                found.append(Figure(f"{frozen_as}: {what}", reached.window.rate, "tokens/s"))
                found.append(Figure(f"{frozen_as}: memory of {what}", reached.used_bytes / MIB, "MiB"))
            if frozen_as == "nf4" and on_gpu:
                peft, daemon = tuned["peft"], tuned["daemons, 1"]
                ratios["nf4_vs_peft"] = daemon.window.rate / peft.window.rate
                ratios["nf4_memory_vs_peft"] = daemon.used_bytes / peft.used_bytes
    return Found(found, ratios)


def _make_base(folder: Path, sizes: Mapping[str, int]) -> Path:
    base = folder / "base"
    with ChildProcesses(folder) as nursery:
        spec = {"cache": str(corpus_cache(folder)), "threads": usable_cores()}
        order = {"to": str(base), "sizes": sizes, "steps": 0, "outliers": False}
        nursery.start("base", "tuning-base", spec).ask(order, START_S)
    return base


class OnePeftLoop(PeftLoop):
    """A single process: how its threads wait matters to none that computes on a GPU."""

    waits: Mapping[str, Mapping[str, str]] = {"default": {}}


def _tune_with_peft(base: Path, manifest: Manifest, folder: Path, window_s: float) -> Tuned:
    before = _used_on_gpu()
    with ChildProcesses(folder) as nursery:
        return _measured(OnePeftLoop("peft", manifest, base, nursery, folder), window_s, before)


def _tune_with_daemons(base: Path, manifest: Manifest, name: str, folder: Path, window_s: float) -> Tuned:
    before = _used_on_gpu()
    with ChildProcesses(folder) as nursery:
        return _measured(TuningSwarm(name, manifest, base, nursery, folder), window_s, before)


def _measured(contender: PeftLoop | TuningSwarm, window_s: float, used_before: int | None) -> Tuned:
    contender.start()
    window = contender.measure(window_s)
    used = _used_on_gpu()
    if used is None or used_before is None:
        return Tuned(window, sum(psutil.Process(pid).memory_info().rss for pid in contender.groups()))
    return Tuned(window, used - used_before)  # with the context that CUDA makes in each process


def _used_on_gpu() -> int | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free
