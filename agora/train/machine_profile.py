"""Measures how fast this machine computes a run's own layers, and keeps the result in a file for the next start.

One layer of the run, with random weights, computes its forward and its backward at a few numbers of rows; a line
through the times gives the time of a microbatch of any size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.cost.activation_bytes import MicrobatchSize
from agora.cost.decoder_sizes import decoder_sizes
from agora.cost.manifest_cost import microbatch_flops
from agora.model import StageModule, family_of
from agora.train.device import product_dtype
from agora.train.weight_versions import StageWeights

VERSION: Final = 1
ROWS: Final = (1, 2, 4)  # numbers of rows that are timed, up to a microbatch's rows and as far as the time allows
REPEATS: Final = 5
BUDGET_S: Final = 1.0  # seconds that a measurement may take at a start
USUAL_FLOPS: Final = 2e10  # operations per second of a usual processor, for the decision whether to measure at all
MAX_FILE_BYTES: Final = 4096
MAX_FLOPS: Final = 1e17  # no accelerator reaches more; a profile file with more is ignored


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """How fast a machine computes a run's layers; immutable.

    flops: operations per second at the size of the run's microbatch. fixed_s, row_s: forward and backward of one layer
    for b rows take fixed_s + b * row_s seconds.
    """

    flops: float
    fixed_s: float
    row_s: float


def find_profile(
    folder: Path, manifest: Manifest, device: torch.device, budget_s: float = BUDGET_S
) -> MachineProfile | None:
    """Returns the profile that an earlier start has written to `folder`; without one, measures it and writes it there.

    Only a profile of the same run and hardware counts, see profile_key. Without one, returns None, and measures
    nothing, if measuring would take a usual machine longer than `budget_s` seconds: a start must not wait for the
    measurement, and the times of the first microbatches are more exact. Blocks while it measures. Does not raise if the
    folder cannot be written.
    """
    key = profile_key(manifest, device)
    path = folder / f"profile-{key[:16]}.json"
    known = read_profile(path, key)
    if known is not None or not is_quick_to_measure(manifest, budget_s):
        return known
    profile = measure_profile(manifest, device, budget_s)
    with contextlib.suppress(OSError):
        write_profile(path, key, profile)
    return profile


def is_quick_to_measure(manifest: Manifest, budget_s: float) -> bool:
    """Returns whether the least that `measure_profile` does takes a machine of USUAL_FLOPS at most `budget_s` seconds.

    The least is forward and backward of one row in one layer, twice.
    """
    layer = manifest.model.layers // 2
    row = MicrobatchSize(1, manifest.model.context, manifest.has_marks)
    return (
        2 * sum(microbatch_flops(decoder_sizes(manifest.model), range(layer, layer + 1), row)) <= USUAL_FLOPS * budget_s
    )


def profile_key(manifest: Manifest, device: torch.device) -> str:
    """Returns a hex digest of what a profile depends on: machine, threads, torch, model, microbatch, file format."""
    on_gpu = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.processor()} {os.cpu_count()}"
    parts = [hardware, platform.machine(), torch.__version__, torch.get_num_threads(), VERSION]
    parts += [manifest.model.model_dump_json(), manifest.schedule.microbatch, manifest.has_marks]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_profile(path: Path, key: str) -> MachineProfile | None:
    """Returns the profile in a file; None if the file is missing, malformed, implausible or of another key."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.pop("key", None) != key:
            return None
        profile = MachineProfile(**values)
        checked = MachineProfile(float(profile.flops), float(profile.fixed_s), float(profile.row_s))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    times = checked.fixed_s, checked.row_s
    is_sound = math.isfinite(sum(times)) and min(times) >= 0 and 0 < checked.flops <= MAX_FLOPS
    return checked if is_sound else None


def write_profile(path: Path, key: str, profile: MachineProfile) -> None:
    """Replaces the file atomically. Raises OSError."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"key": key, **asdict(profile)}), encoding="utf-8")
    temporary.replace(path)


def measure_profile(
    manifest: Manifest, device: torch.device, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> MachineProfile:
    """Measures and returns the profile of `device`, by the model's middle layer with random weights.

    Times forward and backward of 1, 2 and 4 rows, but of no more than a microbatch has, and fits a line through the
    times. Ends after about `budget_s` seconds of `clock`, but times at least one row. Blocks meanwhile. Raises
    TypeError for a model family without formulas.
    """
    layer = manifest.model.layers // 2
    dtype = product_dtype(device)
    weights = StageWeights(_make_filled_stage(manifest, range(layer, layer + 1)), device, dtype=dtype)
    stage = weights.current.module
    max_rows = manifest.schedule.microbatch
    deadline = clock() + budget_s
    times: list[tuple[int, float]] = []
    for rows in [rows for rows in ROWS if rows <= max_rows]:
        if times and clock() + 2 * (REPEATS + 1) * times[-1][1] > deadline:
            break
        times.append((rows, _measure_seconds(stage, manifest, device, rows, deadline, clock)))
    fixed_s, row_s = fit_line(times)
    batch = MicrobatchSize(max_rows, manifest.model.context, manifest.has_marks)
    work = sum(microbatch_flops(decoder_sizes(manifest.model), stage.layer_range, batch))
    return MachineProfile(work / (fixed_s + max_rows * row_s), fixed_s, row_s)


def fit_line(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns a and b, both at least 0, of a line seconds = a + b * rows that fits `times`.

    It is the line of least squared errors; if that begins below 0 or does not rise, or if there is one time only, the
    best line through zero (a is 0). times: pairs of (rows, seconds), at least one, of different, positive numbers of
    rows.
    """
    through_zero = sum(rows * seconds for rows, seconds in times) / sum(rows**2 for rows, _ in times)
    if len(times) < 2:
        return 0.0, through_zero
    slope, intercept = statistics.linear_regression([rows for rows, _ in times], [seconds for _, seconds in times])
    if intercept < 0:
        return 0.0, through_zero
    return (intercept, slope) if slope > 0 else (0.0, through_zero)


def _make_filled_stage(manifest: Manifest, layers: range) -> StageModule:
    with torch.device("meta"):
        stage = family_of(manifest.model).make_meta_stage(layers)
    stage.allocate()
    stage.fill_buffers(manifest.seed)
    stage.fill_at_random(torch.Generator().manual_seed(0))
    return stage


def _measure_seconds(
    stage: StageModule, manifest: Manifest, device: torch.device, rows: int, deadline: float, clock: Callable[[], float]
) -> float:
    tokens = torch.zeros(rows, manifest.model.context, dtype=torch.int64, device=device)
    entry = tokens
    if not stage.is_first:
        entry = torch.randn(rows, manifest.model.context, manifest.model.boundary_width, device=device)
        entry.requires_grad_()
    times: list[float] = []
    for turn in range(REPEATS + 1):  # the first one warms up
        started = clock()
        _forward_and_backward(stage, entry, tokens, device)
        if turn:
            times.append(clock() - started)
        if times and clock() > deadline:
            break
    return statistics.median(times)


def _forward_and_backward(stage: StageModule, entry: Tensor, tokens: Tensor, device: torch.device) -> None:
    dtype = product_dtype(device)
    with torch.autocast(device.type, dtype=dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32):
        output = stage(entry, tokens)
    inputs: list[Tensor] = [parameter for _, parameter in stage.trained_parameters()]
    inputs += [entry] if entry.requires_grad else []
    torch.autograd.grad([output], inputs, [torch.ones_like(output)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
