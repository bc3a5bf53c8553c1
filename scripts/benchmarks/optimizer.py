"""`./scripts/bench optimizer`: what an optimizer step costs beside the forwards and backwards of its tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import link_subspace
from torch import Tensor

from agora.model import StageModule, family_of
from agora.train.device import choose_device, has_native_bf16
from agora.train.memory import keep_freed_memory
from agora.train.muon import MuonMatrices
from agora.train.optimizer import StageOptimizer
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.weight_versions import StageWeights
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report

WIDTHS: Final = (64, 128, 512, 1024)
GPU_WIDTHS: Final = (512, 1024, 2048, 4096)
LAYERS: Final = 2
TARGET: Final = "<= 3"


@dataclass(frozen=True, slots=True)
class StageSize:
    """A stage of LAYERS layers of this width, its context, and the tokens of its steps and of its microbatches."""

    width: int
    context: int
    step_tokens: int
    microbatch_tokens: int = 2048

    def manifest(self, optimizer: str) -> Manifest:
        """Returns a run whose stage 1 has this size, shaped as the presets are."""
        heads = max(self.width // 64, 4)
        model = {
            "width": self.width,
            "subspace": link_subspace(self.width),
            "layers": 3 * LAYERS,
            "heads": heads,
            "key_value_heads": heads // 2,
            "feed_forward": 11 * self.width // 4,
            "context": self.context,
        }
        values = {
            "model": model,
            "stages": {"count": 3},
            "schedule": {"microbatch": self.microbatch_tokens // self.context},
            "optimizer": {"name": optimizer, "target_tokens": self.step_tokens},
        }
        return Manifest.from_values(values, "benchmark")


def stage_size(width: int) -> StageSize:
    """Returns the stage of this width with the context and the tokens of a step of the preset next to it."""
    if width <= 128:
        return StageSize(width, 128, 16_384)
    if width <= 1024:
        return StageSize(width, 256, 65_536)
    return StageSize(width, 2048, 1_048_576) if width <= 2048 else StageSize(width, 2048, 2_097_152)


def run(quick: bool, folder: Path) -> Report:
    """Measures every width, on a GPU if torch sees one, else on one thread; fewer turns when `quick`."""
    keep_freed_memory()
    device = choose_device("auto")
    widths = WIDTHS if device.type == "cpu" else GPU_WIDTHS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure_stage(stage_size(width), device, 3 if quick else 7) for width in widths]
    finally:
        torch.set_num_threads(threads)
    ratios = {
        f"muon_share_{row['width']}": Ratio(float(row["muon_share_%"] or 0), TARGET, "% of the stage's own computation")
        for row in rows
        if int(row["width"] or 0) >= 512
    }
    title = "Optimizers: the time of a step beside that of its tokens"
    return Report("optimizer", title, describe(), rows, ratios, NOTES)


def measure_stage(size: StageSize, device: torch.device, repeats: int) -> dict[str, Cell]:
    """Returns the row of one stage: seconds of a step's tokens and of each optimizer, and Muon's share.

    Every turn measures all of them, so that the machine's pace hits them alike; the figures are medians.
    """
    manifest = size.manifest("muon")
    stage = family_of(manifest.model).build_stage(manifest.layers_of(1), manifest.seed)
    weights = StageWeights(stage, device, stage.hidden_matrices())
    layout, flat = weights.layout, weights.current.flat
    adamw, muon = (StageOptimizer(size.manifest(name).optimizer, 3, layout, flat) for name in ("adamw", "muon"))
    hidden = MuonMatrices(manifest.optimizer, layout, torch.zeros_like(flat), OptimizerOffload(device))
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1)).to(device)
    work: dict[str, Callable[[], object]] = {
        "microbatch": lambda: train_microbatch(stage, manifest, device),
        "adamw": lambda: adamw.step(flat, gradient.clone(), 0),
        "muon": lambda: muon.step(flat, gradient.clone(), 0),
        "orthogonalising": lambda: list(hidden.directions(gradient)),
    }
    seconds = {name: statistics.median(times) for name, times in _time_work(work, device, repeats).items()}
    compute_s = seconds["microbatch"] * size.step_tokens / size.microbatch_tokens
    return {
        "width": size.width,
        "parameters": sum(parameter.numel() for parameter in stage.parameters()),
        "tokens": size.step_tokens,
        "compute_s": compute_s,
        "adamw_ms": 1e3 * seconds["adamw"],
        "muon_ms": 1e3 * seconds["muon"],
        "orthogonalising_ms": 1e3 * seconds["orthogonalising"],
        "adamw_share_%": 100 * seconds["adamw"] / compute_s,
        "muon_share_%": 100 * seconds["muon"] / compute_s,
    }


def train_microbatch(stage: StageModule, manifest: Manifest, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the gradients of one microbatch through the stage: one forward, one backward, the graph kept between."""
    shape = manifest.boundary_shape()
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    tokens = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_native_bf16(device)):
        output = stage(hidden, tokens)
    return torch.autograd.grad(output.float().square().sum(), [hidden, *stage.parameters()])


def _time_work(work: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, list[float]]:
    def now() -> float:
        if device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, function in work.items():
            begin = now()
            function()
            if turn:
                seconds[name].append(now() - begin)
    return seconds


NOTES: Final = [
    f"A stage of {LAYERS} layers in the middle of a model shaped as the presets are (feed-forward 11/4 of the width, "
    "subspace 7/16), with the context and the tokens of a step of the preset next to it. On a CPU: float32, one core, "
    "medians of processor time, so that other programs count little. On a GPU: products in bf16, as in the daemon, "
    "medians of the time until it was done.",
    "`compute_s`: forwards and backwards of a step's tokens in microbatches of 2,048, graphs kept, when one replica "
    "computes all of them. Each of n replicas computes an n-th and takes the whole step: the shares are n times those.",
    "`muon_ms`: the whole step, with norm, clipping, and AdamW where Muon does not apply. `orthogonalising_ms`: of it, "
    "the Newton-Schulz iterations.",
]
