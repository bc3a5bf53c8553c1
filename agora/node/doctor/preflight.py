"""Checks this machine before it joins a run: disk and memory. The host itself checks its ports."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from agora_protocol.errors import DiskError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.node.limits.memory_budget import MemoryOffer

MIN_FREE_BYTES = 64 * 2**20  # disk space that must be free for a daemon to start
PROBE_BYTES = 64 * 1024  # bytes that are written to find out whether the directory can be written
_ADVICE = "free some space there, or choose another --dir."
_MEMORY_ADVICE = "free some, or hold fewer stages with --stages."
BASE_BYTES = 256 * 2**20  # memory of a daemon without stages: torch, the event loop, p2pd


def check_disk(directory: Path) -> str:
    """Writes and removes a small file in `directory`; returns a text about the free space of its disk.

    Raises DiskError when writing fails, or less than MIN_FREE_BYTES are free.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DiskError(f"Cannot write in {directory} ({error.strerror}); {_ADVICE}") from error
    finally:
        with contextlib.suppress(OSError):  # else it would hide the DiskError
            probe.unlink(missing_ok=True)
    if free < MIN_FREE_BYTES:
        needed = f"{_in_mib(free)} free and the daemon needs {_in_mib(MIN_FREE_BYTES)}"
        raise DiskError(f"{directory} has {needed}; {_ADVICE}")
    return f"{_in_mib(free)} of disk free"


def check_memory(manifest: Manifest, span: Span, offer: MemoryOffer, base_bytes: int = BASE_BYTES) -> str:
    """Returns a text about the memory that daemon and span need at least. Raises OutOfMemory if less is offered.

    On a GPU the optimizer's state may lie in host memory. base_bytes: host memory of the daemon without stages.
    """
    if offer.gpu is not None:
        return _check_gpu_memory(manifest, span, offer, base_bytes)
    need = needed_memory(manifest, span, base_bytes)
    if need > offer.host:
        raise OutOfMemory(
            f"Stages {span} need {_in_mib(need)} of memory and {_in_mib(offer.host)} may be used; {_MEMORY_ADVICE}"
        )
    return f"{_in_mib(need)} of {_in_mib(offer.host)} memory needed"


def _check_gpu_memory(manifest: Manifest, span: Span, offer: MemoryOffer, base_bytes: int) -> str:
    from agora.model import family_of

    machine = offer.for_stages(base_bytes)
    family = family_of(manifest.model)
    for place, state_in_host in (("", False), (", the optimizer's state in host memory", True)):
        need = family.min_memory(manifest, span, state_in_host=state_in_host)
        if need.fits(machine):
            return f"{_in_mib(need.device)} of {_in_mib(machine.memory)} GPU memory needed{place}"
    raise OutOfMemory(
        f"Stages {span} need {_in_mib(need.device)} of GPU memory and {_in_mib(need.host)} of host memory at least, "
        f"and {_in_mib(machine.memory)} and {_in_mib(machine.host_memory)} may be used; {_MEMORY_ADVICE}"
    )


def needed_memory(manifest: Manifest, span: Span, base_bytes: int = BASE_BYTES) -> int:
    """Returns the least bytes of memory of a daemon that trains `span` without a GPU: `base_bytes`, and the span's."""
    from agora.model import family_of

    return base_bytes + int(family_of(manifest.model).min_memory(manifest, span).device)


def _in_mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
