"""Trains a span in this process, and prints by how many bytes its resident memory grew at most.

Usage: python -m tests.cost.resident_memory WARM_UP RUN SPAN IN_FLIGHT KEEPS. WARM_UP and RUN are manifests that lie in
the folders of their base models; the smaller one, WARM_UP, is trained first, so that libraries are in memory. KEEPS:
1 if graphs wait for their backward.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from benchmarks.training_memory import train

from agora.train.memory import LIBC, give_back_freed_memory
from agora.train.span_trainer import SpanTrainer

M_MMAP_THRESHOLD, BIG_BYTES = -3, 1 << 18
RESET_PEAK = "5"
PROCESS = Path("/proc/self")


def resident_bytes(kind: str) -> int:
    """The resident memory of this process, VmRSS, or the most that it was, VmHWM."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def train_span(file: Path, span: Span, in_flight: int, *, keeps: bool) -> None:
    """Builds the span, and takes microbatches through it."""
    manifest = Manifest.from_toml(file.read_text())
    cpu = torch.device("cpu")
    trainer = SpanTrainer(manifest, span, cpu, report=lambda event: None, in_flight=in_flight, base_model=file.parent)
    train(trainer, manifest, in_flight, keeps=keeps)


def main(warm_up: str, run: str, span: str, in_flight: str, keeps: str) -> None:
    """Prints the bytes."""
    torch.set_num_threads(1)
    LIBC.mallopt(M_MMAP_THRESHOLD, BIG_BYTES)  # each tensor above has pages of its own, which free returns
    train_span(Path(warm_up), Span.parse(span), int(in_flight), keeps=keeps == "1")
    gc.collect()
    give_back_freed_memory()
    (PROCESS / "clear_refs").write_text(RESET_PEAK)
    before = resident_bytes("VmRSS")
    train_span(Path(run), Span.parse(span), int(in_flight), keeps=keeps == "1")
    print(resident_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
