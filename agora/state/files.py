"""Writes files so that a power cut leaves a whole one or none. Knows bytes and folders; not what the bytes mean.

A safetensors file is written straight from the arrays, without a second copy of them in memory, and hashed on the way:
the hash is that of the bytes that were to be written, so that damage by the disk is noticed later.
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
from agora_protocol.errors import DiskError
from numpy.typing import NDArray

HEADER_ALIGNMENT: Final = 8  # bytes; a safetensors header is padded with spaces to a multiple of it


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size of a file in bytes and the SHA-256 of its content, in hex."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileDigest:
    """Creates `path` with `pieces` in it and waits until the disk has them. Raises OSError, also when it exists."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileDigest(size, digest.hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> FileDigest:
    """Creates the safetensors file `path` of float32 tensors and waits until the disk has it. Raises OSError."""

    def pieces() -> Iterator[bytes | memoryview]:
        """Yields the header and then each tensor's bytes."""
        yield safetensors_header({name: ("F32", t.shape, t.nbytes) for name, t in tensors.items()}, metadata)
        for tensor in tensors.values():
            yield np.ascontiguousarray(tensor, "<f4").reshape(-1).data.cast("B")

    return write_file(path, pieces())


def replace_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> FileDigest:
    """Writes the safetensors file `path`, in place of an older one. A reader finds a whole file, old or new, or none.

    Raises DiskError; `path` is then as it was.
    """
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        written = write_tensors(temporary, tensors, metadata)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error
    return written


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a safetensors file; the tensors' bytes follow in the same order, without gaps.

    tensors: for each name its dtype as the format spells it, its shape and its size in bytes.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def hash_file(path: Path) -> FileDigest:
    """Returns the digest of what `path` holds now. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), digest)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in `folder`. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(folder: Path) -> None:
    """Removes `folder` and what is in it, as far as that is possible; raises nothing."""
    shutil.rmtree(folder, ignore_errors=True)
