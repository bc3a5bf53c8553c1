"""The checks that a daemon makes of its machine before it joins: disk and memory. Ports are checked by the host itself.

Knows: what a run needs. Must not know: the network. Every failure is one sentence with the measured value, the limit
and what to do.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
from agora_protocol.errors import DiskError, MemoryError_
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

LEAST_FREE_BYTES = 64 * 2**20
PROBE_BYTES = 64 * 1024
BYTES_PER_PARAMETER = 16  # weight, gradient, two moments; float32
BASE_BYTES = 256 * 2**20  # torch, the event loop, p2pd


def check_disk(directory: Path) -> str:
    """Writes and removes a small file; a note with what is free. Raises DiskError."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DiskError(
            f"Cannot write in {directory} ({error.strerror}); free some space there, or choose another --dir."
        ) from error
    finally:
        probe.unlink(missing_ok=True)
    if free < LEAST_FREE_BYTES:
        raise DiskError(
            f"{directory} has {_mib(free)} free and the daemon needs {_mib(LEAST_FREE_BYTES)}; "
            "free some space there, or choose another --dir."
        )
    return f"{_mib(free)} of disk free"


def parameters_of(manifest: Manifest, span: Span) -> int:
    """How many parameters the span has."""
    model, last = manifest.model, manifest.stage_count - 1
    head = model.width // model.heads
    inner = model.width**2 + 2 * model.width * head * model.key_value_heads + 2 * model.width * model.feed_forward
    outputs = model.width + model.feed_forward  # for each number that a layer adds to the residual stream
    layers = sum(len(manifest.layers_of(stage)) for stage in span.stages)
    free = last in span  # the last layer adds all of the width
    added = (layers - free) * model.subspace + free * model.width
    ends = (0 in span) * model.subspace + free * model.width
    return layers * (inner + 2 * model.width) + added * outputs + ends * model.vocabulary


def need_bytes(manifest: Manifest, span: Span) -> int:
    """What holding the span takes at least: weights, gradients, moments, and a few microbatches."""
    tokens = manifest.tokens_per_microbatch
    return BASE_BYTES + BYTES_PER_PARAMETER * parameters_of(manifest, span) + 64 * tokens * manifest.model.width


def check_memory(manifest: Manifest, span: Span, limit_gib: float) -> str:
    """Whether the span fits into what is free (or what the owner allows); a note. Raises MemoryError_."""
    free = psutil.virtual_memory().available
    allowed = min(free, int(limit_gib * 2**30)) if limit_gib else free
    need = need_bytes(manifest, span)
    if need > allowed:
        raise MemoryError_(
            f"Stages {span} need {_mib(need)} of memory and {_mib(allowed)} may be used; "
            "free some, or hold fewer stages with --stages."
        )
    return f"{_mib(need)} of {_mib(allowed)} memory needed"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
