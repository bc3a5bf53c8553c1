"""`./scripts/bench codecs`: bytes, error and speed of every boundary codec on real boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from agora_protocol.codec_names import DIRECTION_CODEC_NAMES, Direction, parse_codec
from agora_protocol.ids import MicrobatchId
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.codec import BoundaryCodec, gradient_dither_key
from agora.train.memory import keep_freed_memory
from benchmarks.codec_samples import Crossing, Samples, boundary_samples
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report

SUBSPACE: Final = 64
DRAWS: Final = 64
SPEED_SHAPE: Final = (8, 1024, 128)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    steps: int
    keep: int
    repeats: int


def run(quick: bool, folder: Path) -> Report:
    """Measures all codecs on one thread."""
    size = Size(60, 4, 5) if quick else Size(300, 8, 15)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        return _report(size, folder)
    finally:
        torch.set_num_threads(threads)


def _report(size: Size, folder: Path) -> Report:
    manifest = _manifest(size.steps)
    samples = boundary_samples(manifest, size.steps, size.keep, folder)
    rows = [_row(leg, samples, size) for leg in DIRECTION_CODEC_NAMES]
    speed = next(row["encode_GB/s"] for row in rows if row["codec"] == "int8")
    ratios = {"int8_encode": Ratio(float(speed or 0), ">= 1", "GB/s of float32 input, int8 forward, one core")}
    return Report("codecs", "Codecs: what a boundary costs, and what it loses", describe(), rows, ratios, _notes(size))


def _manifest(steps: int) -> Manifest:
    values = {
        "model": {"subspace": SUBSPACE},
        "stages": {"count": 4},
        "optimizer": {"total_steps": steps, "target_tokens": 1024},
    }
    return Manifest.from_values(values, "benchmark")


def _row(name: str, samples: Samples, size: Size) -> dict[str, Cell]:
    codec = BoundaryCodec(name, 7)
    forward, backward = torch.cat(samples.forward), torch.cat(samples.backward)
    speed = torch.randn(SPEED_SHAPE, generator=torch.Generator().manual_seed(1))
    key = _key(0)
    sent, returned = codec.encode(speed, "forward"), codec.encode(speed, "backward", key)
    timed: list[Callable[[], object]] = [
        lambda: codec.encode(speed, "forward"),
        lambda: codec.encode(speed, "backward", key),
        lambda: codec.decode(sent, SPEED_SHAPE, "forward"),
        lambda: codec.decode(returned, SPEED_SHAPE, "backward", key),
    ]
    encode, encode_back, decode, decode_back = (_gigabytes_per_s(speed, f, size.repeats) for f in timed)
    return {
        "codec": name,
        "bytes_per_value": parse_codec(name).bytes_per_token(SUBSPACE, "forward") / SUBSPACE,
        "error_forward": _relative(_cross(codec, forward, "forward", None), forward),
        "error_gradient": _relative(_cross(codec, backward, "backward", key), backward),
        f"error_of_{DRAWS}": _error_of_mean(lambda n: _cross(codec, backward, "backward", _key(n)), backward),
        "encode_GB/s": encode,
        "encode_gradient": encode_back,
        "decode_GB/s": decode,
        "decode_gradient": decode_back,
    }


def crossing(codec: BoundaryCodec) -> Crossing:
    """Returns the crossing of a codec: its encoding and decoding, with dither and columns as in a daemon."""
    entries: dict[tuple[MicrobatchId, int], Tensor] = {}

    def cross(tensor: Tensor, direction: Direction, microbatch: MicrobatchId, stage: int) -> Tensor:
        if direction == "backward":
            return _cross(
                codec, tensor, direction, gradient_dither_key(microbatch, stage), entries.pop((microbatch, stage))
            )
        entries[microbatch, stage] = arrived = _cross(codec, tensor, direction, None)
        return arrived

    return cross


def _cross(
    codec: BoundaryCodec, tensor: Tensor, direction: Direction, key: str | None, entry: Tensor | None = None
) -> Tensor:
    b, s, k = tensor.shape
    return codec.decode(codec.encode(tensor, direction, key, entry), (b, s, k), direction, key)


def _key(number: int) -> str:
    return gradient_dither_key(number.to_bytes(16, "big"), 1)


def _relative(found: Tensor, true: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - true) / torch.linalg.vector_norm(true))


def _error_of_mean(draw: Callable[[int], Tensor], true: Tensor) -> float:
    total = torch.zeros_like(true)
    for number in range(DRAWS):
        total += draw(number)
    return _relative(total / DRAWS, true)


def _gigabytes_per_s(values: Tensor, work: Callable[[], object], repeats: int) -> float:
    # Returns gigabytes of float32 per second of processor time, so that other programs do not count.
    taken = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return values.numel() * 4 / 1e9 / max(_median(taken[1:]), 1e-9)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _notes(size: Size) -> list[str]:
    return [
        f"Real boundaries: a model of width 128, subspace {SUBSPACE}, 4 stages of one layer, after {size.steps} "
        "steps of 8 x 128 bytes of the standard library's source. Errors: root of squared error over squared values.",
        f"`error_of_{DRAWS}`: of the mean of {DRAWS} draws of one gradient; an eighth of one draw's if unbiased.",
        "Speeds: of float32 values, 8 x 1024 x 128, on one core, median, processor time. float32 is not copied at all.",
    ]
