"""Checks this machine before it joins a run: disk and memory. The host itself checks its ports.

Knows: what a run needs. Must not know: the network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from agora_protocol.errors import DiskError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

MIN_FREE_BYTES = 64 * 2**20
"""Disk space that must be free for a daemon to start."""
PROBE_BYTES = 64 * 1024
"""Bytes that are written to find out whether the directory can be written."""
_ADVICE = "free some space there, or choose another --dir."
BASE_BYTES = 256 * 2**20
"""Memory of a daemon without stages: torch, the event loop, p2pd."""


def check_disk(directory: Path) -> str:
    """Writes and removes a small file in `directory`; returns a note with the free space.

    Raises DiskError when that fails, or less than MIN_FREE_BYTES are free.
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


def check_memory(
    manifest: Manifest, span: Span, free_bytes: int, limit_gib: float, base_bytes: int = BASE_BYTES
) -> str:
    """Returns a note with the memory that daemon and span need at least. Raises OutOfMemory if less is free or allowed.

    free_bytes, limit_gib: see `allowed_bytes`. base_bytes: what the daemon takes without stages.
    """
    allowed, need = allowed_bytes(free_bytes, limit_gib), needed_memory(manifest, span, base_bytes)
    if need > allowed:
        raise OutOfMemory(
            f"Stages {span} need {_in_mib(need)} of memory and {_in_mib(allowed)} may be used; "
            "free some, or hold fewer stages with --stages."
        )
    return f"{_in_mib(need)} of {_in_mib(allowed)} memory needed"


def allowed_bytes(free_bytes: int, limit_gib: float) -> int:
    """Returns the lesser of `free_bytes` and the owner's limit in GiB (0: no limit), in bytes."""
    return min(free_bytes, int(limit_gib * 2**30)) if limit_gib else free_bytes


def needed_memory(manifest: Manifest, span: Span, base_bytes: int = BASE_BYTES) -> int:
    """Returns the least bytes of memory of a daemon that trains `span`: `base_bytes`, and the span's. Imports torch."""
    from agora.model import family_of

    return base_bytes + int(family_of(manifest.model).memory_bytes(manifest, span))


def _in_mib(size: int) -> str:
    """Returns a number of bytes as text in MiB."""
    return f"{size / 2**20:,.0f} MiB"
