"""Writing files so that a power cut leaves a whole one or none. Knows bytes and folders; not what the bytes mean.

A safetensors file is written straight from the arrays, without a second copy of them in memory, and hashed on the way:
the hash is of what was meant, so that whatever a disk makes of it is noticed. Files are read by the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

HEADER_BORDER: Final = 8  # a safetensors header ends on such a border, padded with spaces


@dataclass(frozen=True, slots=True)
class Written:
    """What a file should hold: its bytes, and their SHA-256 in hex."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Creates `path` with `pieces` in it, and waits until the disk has them. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            _write_all(handle, memoryview(piece))
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(size, digest.hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> Written:
    """Creates the safetensors file `path` of float32 tensors, and waits until the disk has it. Raises OSError."""
    return write_file(path, _safetensors(tensors, metadata))


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with; the tensors' bytes follow in the same order, without gaps.

    tensors: dtype as the format calls it, shape and bytes of each, by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_BORDER)
    return len(text).to_bytes(8, "little") + text


def hash_file(path: Path) -> Written:
    """What `path` holds now. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Written(file.tell(), digest)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in `folder`. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(folder: Path) -> None:
    """Removes `folder` as far as that is possible; what is left of it is somebody's next try."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_file(path: Path) -> None:
    """Removes `path` if it is there and that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _safetensors(
    tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield safetensors_header({name: ("F32", tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}, metadata)
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor, "<f4").reshape(-1).data.cast("B")
