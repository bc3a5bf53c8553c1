"""What the parts of `./scripts/bench gpu` share: their figures, how a time is taken, the run that is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from agora_protocol.manifest import Manifest

QUICK_REPEATS: Final = 3
WARM_UP: Final = 3  # runs that are not timed


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured."""

    what: str
    value: float
    unit: str


@dataclass(slots=True)
class Found:
    """What a part found. ratios: by their names in the benchmark's contract."""

    figures: list[Figure]
    ratios: dict[str, float] = field(default_factory=dict)


def stage_manifest(width: int, layers: int = 1, **sections: Mapping[str, Any]) -> Manifest:
    """Returns a run whose stage 1 has so many layers of this width, with microbatches of 2,048 tokens; of 64 below 128.

    sections: values of the manifest's sections that are not as in the benchmark.
    """
    context = 2048 if width >= 128 else 32
    heads = max(2, width // 128)
    model = {"width": width, "subspace": 7 * width // 16, "layers": 3 * layers, "heads": heads}
    values: dict[str, dict[str, Any]] = {
        "model": model | {"key_value_heads": heads, "feed_forward": 11 * width // 4, "context": context},
        "stages": {"count": 3},
        "boundary": {"codec": "int6/int3"},
        "schedule": {"microbatch": 1 if width >= 128 else 2, "activations": "keep"},
        "optimizer": {"target_tokens": 1 << 40},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | dict(section)
    return Manifest.from_values(values, "benchmark")


def median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the median of the seconds that `work` takes on the device, after WARM_UP runs."""
    seconds = []
    for turn in range(WARM_UP + repeats):
        begin = now(device)
        work()
        ended = now(device)
        if turn >= WARM_UP:
            seconds.append(ended - begin)
    return statistics.median(seconds)


def now(device: torch.device) -> float:
    """Returns seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
