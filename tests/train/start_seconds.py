"""Prints what the parts of a start take, each beside what they took before.

Usage: python -m tests.train.start_seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import preset
from bitsandbytes.nn import Params4bit

from agora.train.span_trainer import SpanTrainer
from agora.tuning.adapters.nf4_linear import quantise

CPU = torch.device("cpu")
MATRIX = (4096, 11_008)  # the largest of a layer of Llama 7B


def measure(what: str, values: int, work: Callable[[], object]) -> None:
    """Prints seconds, and processor nanoseconds for each value."""
    began, processor = time.perf_counter(), time.process_time()
    work()
    seconds, used = time.perf_counter() - began, time.process_time() - processor
    print(f"{what:60} {seconds:7.2f} s  {used / values * 1e9:6.1f} ns of a processor for each value", flush=True)


def main() -> None:
    """Measures the initial weights of a stage of `1b`, and one NF4 matrix."""
    manifest = preset("1b", schedule={"predict_weights": False})

    def build(draws: bool) -> SpanTrainer:
        return SpanTrainer(manifest, Span(1, 1), CPU, report=lambda event: None, in_flight=1, draws=draws)

    numel = build(False).stages[1].layout.numel
    measure(f"a stage of 1b, {numel:,} values, with initial weights", numel, lambda: build(True))
    measure("the same, whose state is fetched", numel, lambda: build(False))
    matrix = torch.randn(MATRIX, generator=torch.Generator().manual_seed(0)) * 0.02
    count = matrix.numel()

    def whole() -> object:
        return Params4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4").to("cpu")

    for name, work in (
        ("bitsandbytes", whole),
        ("in pieces, 1 thread", lambda: quantise(matrix, 1)),
        (f"in pieces, {torch.get_num_threads()} threads", lambda: quantise(matrix, torch.get_num_threads())),
    ):
        measure(f"NF4 of a matrix of {count:,} values, {name}", count, work)


if __name__ == "__main__":
    main()
