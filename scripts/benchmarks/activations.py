"""`./scripts/bench activations`: memory and time of a microbatch by what is kept between its forward and its backward.

Each way runs in a process of its own, whose peak of resident memory the kernel reports.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest

from agora.core.span_work import ForwardKey
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from benchmarks.children import SCRIPTS, BenchFailed
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report

LAYERS: Final = (2, 8)
WIDTH, CONTEXT, SEQUENCES = 512, 256, 2
# What is measured: the manifest's `schedule.activations`, and whether a graph waits for its backward.
WAYS: Final[Mapping[str, tuple[str, bool]]] = {
    "graph kept": ("keep", True),
    "graph repeated": ("auto", False),
    "layers repeated": ("recompute", True),
}
CHILD_S: Final = 300.0


def run(quick: bool, folder: Path) -> Report:
    """Measures every way for spans of every number of layers; fewer microbatches when `quick`."""
    rows = [_measure_row(way, layers, 2 if quick else 5) for layers in LAYERS for way in WAYS]
    most = {row["way"]: row for row in rows if row["layers"] == max(LAYERS)}
    repeated, by_layer = most["graph repeated"], most["layers repeated"]
    ratios = {
        f"{name}_of_repeated_graph": Ratio(float(by_layer[key] or 0) / float(repeated[key] or 1), "", meaning)
        for name, key, meaning in (
            ("memory", "peak_mib", f"peak of {max(LAYERS)} layers repeated one by one, by that of the whole graph"),
            ("time", "microbatch_s", "processor time of the same"),
        )
    }
    title = "Activations: what a microbatch takes between its forward and its backward"
    return Report("activations", title, describe(), rows, ratios, NOTES)


def span_manifest(layers: int, activations: str) -> Manifest:
    """Returns a run whose stage 1 has `layers` layers, shaped as the presets are."""
    model = {
        "width": WIDTH,
        "subspace": WIDTH,
        "layers": 3 * layers,
        "heads": 8,
        "key_value_heads": 4,
        "feed_forward": 11 * WIDTH // 4,
        "context": CONTEXT,
    }
    schedule = {"microbatch": SEQUENCES, "activations": activations}
    values = {"model": model, "stages": {"count": 3}, "schedule": schedule, "optimizer": {"target_tokens": 1 << 30}}
    return Manifest.from_values(values, "benchmark")


def measure_way(way: str, layers: int, microbatches: int) -> dict[str, Cell]:
    """Returns the peak of resident memory above that of the loaded span, and the median processor time of a microbatch.

    The first microbatch, of which auto measures the graph, counts for the peak but not for the time.
    """
    activations, keeps = WAYS[way]
    manifest = span_manifest(layers, activations)
    trainer = SpanTrainer(manifest, Span(1, 1), torch.device("cpu"), report=lambda event: None, in_flight=1)
    for stage in trainer.stages.values():
        stage.gradient_sum.flat.fill_(0.0)  # otherwise its pages would be counted when the first gradient is added
    keep_freed_memory()  # only now: otherwise what building has freed would still be resident
    loaded = _resident_kib("VmRSS")
    seconds = []
    for number in range(microbatches + 1):
        begin = time.process_time()
        train_microbatch(trainer, manifest, number, keeps=keeps)
        seconds.append(time.process_time() - begin)
    peak = _resident_kib("VmHWM") - loaded
    return {"peak_mib": peak / 1024, "microbatch_s": statistics.median(seconds[1:])}


def train_microbatch(trainer: SpanTrainer, manifest: Manifest, number: int, *, keeps: bool) -> None:
    """Runs the forward of one microbatch of random values, then its backward."""
    shape = manifest.boundary_shape()
    random = torch.Generator().manual_seed(number)
    entry, gradient = (torch.randn(shape, generator=random) for _ in range(2))
    batch = TokenBatch.from_wire(torch.zeros(manifest.tokens_shape(), dtype=torch.int32), has_marks=False)
    microbatch = MicrobatchId(number.to_bytes(16, "big"))
    trainer.forward(DecodedWork(microbatch, 1, entry, batch, "train"))
    if not keeps:
        trainer.stashed.drop_graphs()  # as where memory has room for no other graph
    trainer.backward(ForwardKey(microbatch, 1), gradient)


def _resident_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _measure_row(way: str, layers: int, microbatches: int) -> dict[str, Cell]:
    command = [sys.executable, "-m", "benchmarks.activations", way, str(layers), str(microbatches)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CHILD_S, check=False)
    if done.returncode:
        raise BenchFailed(f"{way} of {layers} layers failed: {done.stderr[-600:]}")
    return {"layers": layers, "way": way, **json.loads(done.stdout)}


NOTES: Final = [
    f"The middle stage of a model of width {WIDTH}, float32, microbatches of {SEQUENCES} x {CONTEXT} tokens, one in "
    "flight, on one core; each row in a process of its own; medians of processor time.",
    "`peak_mib`: the most resident memory above that of the loaded span with its gradient sum; the microbatch's own "
    "gradients are part of it. Of kept graphs there is one for each microbatch in flight.",
    "`auto` keeps graphs for as many microbatches as fit into half of the available memory, of a GPU's into 85 %, and "
    "repeats whole graphs for the others while one fits, else layers, whose inputs it keeps while they fit.",
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure_way(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
