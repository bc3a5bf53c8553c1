"""Measures how fast this machine computes a run's own layers, and keeps the result in a file for the next start.

One layer of the run, with random weights, computes its forward and its backward at a few numbers of rows; a line
through the times gives the time of a microbatch of any size. On a CPU with bf16 the layer decides whether it is used.
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
from functools import partial
from pathlib import Path
from typing import Any, Final

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
COMPARED: Final = 5  # passes in each precision of a comparison
# By how much bf16 must be faster than float32 to be used: less is what a busy machine's times differ by.
MIN_BF16_GAIN: Final = 1.2
PRODUCT_TOKENS, MAX_PRODUCT_SIDE = 128, 4096  # of the product that is timed in the place of a large layer
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
    folder: Path,
    manifest: Manifest,
    device: torch.device,
    budget_s: float = BUDGET_S,
    dtype: torch.dtype | None = None,
) -> MachineProfile | None:
    """Returns the profile that an earlier start has written to `folder`; without one, measures it and writes it there.

    Only a profile of the same run and hardware counts, see profile_key. Without one, returns None, and measures
    nothing, if measuring would take a usual machine longer than `budget_s` seconds: a start must not wait for the
    measurement, and the times of the first microbatches are more exact. Blocks while it measures. Does not raise if the
    folder cannot be written. dtype: of products; None: that of the device.
    """
    key = profile_key(manifest, device, dtype)
    path = folder / f"profile-{key[:16]}.json"
    known = read_profile(path, key)
    if known is not None or not is_quick_to_measure(manifest, budget_s):
        return known
    profile = measure_profile(manifest, device, budget_s, dtype=dtype)
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


def find_product_dtype(
    folder: Path, manifest: Manifest, device: torch.device, measure: Callable[[Manifest], float] | None = None
) -> torch.dtype:
    """Returns the dtype in which a run's layers multiply on `device`: on a CPU bf16 where that is faster.

    On a CPU that has bf16 this is measured at the first start, in about a second, and written to `folder` beside the
    profile; a later start of the same run, on the same hardware, reads it. Blocks while it measures. measure: returns
    how many times as fast as in float32 the layers are in bf16; None: measure_bf16_gain.
    """
    if device.type != "cpu" or not cpu_has_bf16():
        return product_dtype(device)
    key = profile_key(manifest, device)
    path = folder / f"precision-{key[:16]}.json"
    gain = _read_gain(path, key)
    if gain is None:
        gain = (measure or measure_bf16_gain)(manifest)
        with contextlib.suppress(OSError):
            _replace_file(path, {"key": key, "bf16_gain": gain})
    return torch.bfloat16 if gain >= MIN_BF16_GAIN else torch.float32


def cpu_has_bf16() -> bool:
    """Returns whether the CPU multiplies in bf16: by AVX512_BF16 or AMX. With neither, torch emulates it."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def measure_bf16_gain(manifest: Manifest, budget_s: float = BUDGET_S) -> float:
    """Returns how many times as fast as in float32 this CPU computes the model's middle layer in bf16.

    It times forward and backward of some rows; where that takes too long, as of large layers, the product
    of its largest matrix with its two gradients. Ends after about `budget_s` seconds, and blocks meanwhile.
    """
    passes = _layer_passes(manifest) if is_quick_to_measure(manifest, budget_s / 2) else _product_passes(manifest)
    return compare_passes(passes[torch.float32], passes[torch.bfloat16], budget_s)


def compare_passes(
    one: Callable[[], object],
    other: Callable[[], object],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns how many times as fast as `one` the `other` is.

    They take turns, so that what else the machine does slows both, and the fastest call of each counts. Ends after
    about `budget_s` seconds of `clock`, but calls each twice.
    """
    fastest = [math.inf, math.inf]
    deadline = clock() + budget_s
    for turn in range(COMPARED + 1):  # the first one warms up
        for index, compute in enumerate((one, other)):
            started = clock()
            compute()
            if turn:
                fastest[index] = min(fastest[index], clock() - started)
        if turn and clock() > deadline:
            break
    return fastest[0] / max(fastest[1], 1e-9)


def _layer_passes(manifest: Manifest) -> dict[torch.dtype, Callable[[], object]]:
    layer, device = manifest.model.layers // 2, torch.device("cpu")
    rows = min(manifest.schedule.microbatch, 2)
    passes: dict[torch.dtype, Callable[[], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = StageWeights(_make_filled_stage(manifest, range(layer, layer + 1)), device, dtype=dtype)
        stage = weights.current.module
        entry, tokens = _make_entry(stage, manifest, device, rows)
        passes[dtype] = partial(_forward_and_backward, stage, entry, tokens, device, dtype)
    return passes


def _product_passes(manifest: Manifest) -> dict[torch.dtype, Callable[[], object]]:
    sizes = decoder_sizes(manifest.model)
    widest = max(sizes.linears, key=lambda linear: linear.inputs * linear.outputs)
    width, wide = (min(side, MAX_PRODUCT_SIDE) for side in (widest.inputs, widest.outputs))
    entry, weight = torch.randn(PRODUCT_TOKENS, width), torch.randn(wide, width)

    def compute(weight: Tensor) -> None:
        # As under autocast: what is between products is float32.
        left = entry.to(weight.dtype)
        gradient = (left @ weight.T).float().to(weight.dtype)
        (gradient @ weight).float(), gradient.T @ left

    return {dtype: partial(compute, weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}


def _read_gain(path: Path, key: str) -> float | None:
    values = _read_file(path, key)
    gain = values.get("bf16_gain") if values is not None else None
    return gain if isinstance(gain, float) and math.isfinite(gain) and gain > 0 else None


def profile_key(manifest: Manifest, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """Returns a hex digest of what a profile depends on: machine, threads, torch, model, microbatch, file format.

    dtype: of products; None: that of the device.
    """
    on_gpu = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.processor()} {os.cpu_count()}"
    parts = [hardware, platform.machine(), torch.__version__, torch.get_num_threads(), VERSION]
    parts += [manifest.model.model_dump_json(), manifest.schedule.microbatch, manifest.has_marks]
    parts += [str(dtype or product_dtype(device))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_profile(path: Path, key: str) -> MachineProfile | None:
    """Returns the profile in a file; None if the file is missing, malformed, implausible or of another key."""
    values = _read_file(path, key)
    if values is None:
        return None
    try:
        profile = MachineProfile(**values)
        checked = MachineProfile(float(profile.flops), float(profile.fixed_s), float(profile.row_s))
    except (ValueError, TypeError, OverflowError):
        return None
    times = checked.fixed_s, checked.row_s
    is_sound = math.isfinite(sum(times)) and min(times) >= 0 and 0 < checked.flops <= MAX_FLOPS
    return checked if is_sound else None


def write_profile(path: Path, key: str, profile: MachineProfile) -> None:
    """Replaces the file atomically. Raises OSError."""
    _replace_file(path, {"key": key, **asdict(profile)})


def _read_file(path: Path, key: str) -> dict[str, Any] | None:
    # The values of a file that was written under `key`; None for any other, and for none.
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.pop("key", None) == key else None


def _replace_file(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    temporary.replace(path)


def measure_profile(
    manifest: Manifest,
    device: torch.device,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    dtype: torch.dtype | None = None,
) -> MachineProfile:
    """Measures and returns the profile of `device`, by the model's middle layer with random weights.

    Times forward and backward of 1, 2 and 4 rows, but of no more than a microbatch has, and fits a line through the
    times. Ends after about `budget_s` seconds of `clock`, but times at least one row. Blocks meanwhile. dtype: of
    products; None: that of the device. Raises TypeError for a model family without formulas.
    """
    layer = manifest.model.layers // 2
    dtype = dtype or product_dtype(device)
    weights = StageWeights(_make_filled_stage(manifest, range(layer, layer + 1)), device, dtype=dtype)
    stage = weights.current.module
    max_rows = manifest.schedule.microbatch
    deadline = clock() + budget_s
    times: list[tuple[int, float]] = []
    for rows in [rows for rows in ROWS if rows <= max_rows]:
        if times and clock() + 2 * (REPEATS + 1) * times[-1][1] > deadline:
            break
        times.append((rows, _measure_seconds(stage, manifest, device, dtype, rows, deadline, clock)))
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
    stage: StageModule,
    manifest: Manifest,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    deadline: float,
    clock: Callable[[], float],
) -> float:
    entry, tokens = _make_entry(stage, manifest, device, rows)
    times: list[float] = []
    for turn in range(REPEATS + 1):  # the first one warms up
        started = clock()
        _forward_and_backward(stage, entry, tokens, device, dtype)
        if turn:
            times.append(clock() - started)
        if times and clock() > deadline:
            break
    return statistics.median(times)


def _make_entry(stage: StageModule, manifest: Manifest, device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(rows, manifest.model.context, dtype=torch.int64, device=device)
    if stage.is_first:
        return tokens, tokens
    entry = torch.randn(rows, manifest.model.context, manifest.model.boundary_width, device=device)
    return entry.requires_grad_(), tokens


def _forward_and_backward(
    stage: StageModule, entry: Tensor, tokens: Tensor, device: torch.device, dtype: torch.dtype
) -> None:
    with torch.autocast(device.type, dtype=dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32):
        output = stage(entry, tokens)
    inputs: list[Tensor] = [parameter for _, parameter in stage.trained_parameters()]
    inputs += [entry] if entry.requires_grad else []
    torch.autograd.grad([output], inputs, [torch.ones_like(output)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
