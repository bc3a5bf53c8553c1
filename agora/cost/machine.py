"""Describes what one machine contributes to a run, as a plan sees it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, or one accelerator of it; immutable.

    flops: floating-point operations per second that it reaches on the run's own layers, not those of its data sheet.
    memory: bytes of the device that stages may take.
    host_memory: bytes of host memory for optimizer state; 0 where the device is the CPU, or where none is offered.
    upload, download: bytes per second.
    latency_s: seconds from this machine to any other machine, one way.
    """

    name: str
    flops: float
    memory: float
    host_memory: float = 0.0
    upload: float = math.inf
    download: float = math.inf
    latency_s: float = 0.0
