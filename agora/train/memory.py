"""How much memory the device has left, and malloc's settings."""

from __future__ import annotations

import contextlib
import ctypes
from typing import ClassVar

import psutil
import torch

from agora.core.machine_limits import OwnersMemory, least_memory

KEEP_BYTES = 1 << 30  # malloc keeps up to this much freed memory, and takes tensors up to this size from it
UNLIMITED = 1 << 62
LIBC = ctypes.CDLL(None)


_owners = OwnersMemory()


def limit_memory(owners: OwnersMemory) -> None:
    """Sets what the owner of the machine allows this process, for `available_bytes`; does not stop allocations."""
    global _owners
    _owners = owners


def available_bytes(device: torch.device, *, within_limit: bool = True) -> int:
    """Returns how many bytes this process can still allocate on the device.

    That is what the GPU, or the least limit of the host (core.machine_limits), leaves, plus freed memory that torch or
    malloc caches.
    within_limit: at most what the owner's limit leaves, see limit_memory; False ignores that limit.
    """
    limit = (within_limit and (_owners.gpu if device.type == "cuda" else _owners.host)) or UNLIMITED
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - used
        return min(int(torch.cuda.mem_get_info(device)[0]) + cached, max(0, limit - used))
    left = max(0, limit - resident_bytes()) if limit < UNLIMITED else UNLIMITED
    return min(int(least_memory().amount), left) + freed_bytes()


def resident_bytes() -> int:
    """Returns the resident bytes of this process and its children (p2pd); memory that they share counts for each."""
    own = psutil.Process()
    total = int(own.memory_info().rss)
    for child in own.children():
        with contextlib.suppress(psutil.Error):
            total += int(child.memory_info().rss)
    return total


def keep_freed_memory() -> bool:
    """Makes malloc keep up to KEEP_BYTES of freed memory, and later threads share one heap, in this process.

    Returns whether all settings were made; False without glibc. Without them, each new graph causes page faults: 3 of
    84 ms of a microbatch (1.5 M parameters, AMD EPYC, 2026-11-21).
    """
    mallopt = getattr(LIBC, "mallopt", None)
    if mallopt is None or not hasattr(LIBC, "gnu_get_libc_version"):
        return False
    settings = {"M_TRIM_THRESHOLD": (-1, KEEP_BYTES), "M_MMAP_THRESHOLD": (-3, KEEP_BYTES), "M_ARENA_MAX": (-8, 1)}
    return all(mallopt(number, value) == 1 for number, value in settings.values())


def give_back_freed_memory() -> None:
    """Gives the freed memory that malloc and torch's CUDA cache keep back to the system; without glibc only CUDA's."""
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # does nothing before CUDA is used


def freed_bytes() -> int:
    """Returns how many bytes this process has freed and malloc keeps; 0 if the C library has no mallinfo2."""
    mallinfo2 = getattr(LIBC, "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


# The C library's struct mallinfo2, see mallinfo(3).
class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("last", ctypes.c_size_t)]
