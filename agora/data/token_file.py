"""The cache's file format: token ids on disk, written once, mapped into memory, damage noticed.

A file is the ids as little-endian unsigned integers from byte 0, then a footer: JSON (dtype, counts, a CRC-32 per block
of BLOCK_BYTES), its length and CRC-32 as two u32, and MAGIC. Its name is the SHA-256 of dtype and ids, so equal corpora
share a file. Must not know text or tokenizers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from agora_protocol.errors import DiskError
from numpy.typing import NDArray

from agora.data.tokenizer import Ids

MAGIC = b"AGORATK1"
TAIL = struct.Struct("<II8s")
BLOCK_BYTES = 4 << 20
FOOTER_BYTES = 64 << 20
CHECKED_BLOCKS = 256
BUILDING = "building-"
ABANDONED_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A checked token file: `ids` [n] is mapped, not read; `digest` names its content (64 hex characters)."""

    ids: Ids
    documents: int
    digest: str


class TokenWriter:
    """Writes one token file under a temporary name; `finish` gives it its own. Use through `writing`."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype
        self._hash = hashlib.sha256(dtype.str.encode())
        self._block_bytes, self._block_crc = 0, 0
        self._crcs: list[int] = []
        self.count = 0
        self.documents = 0

    def add(self, ids: NDArray[Any]) -> None:
        """Appends ids [n]; they must fit the file's dtype."""
        data = np.ascontiguousarray(ids, self._dtype).data.cast("B")
        self.count += len(ids)
        self._hash.update(data)
        self._file.write(data)
        while data:
            part = data[: BLOCK_BYTES - self._block_bytes]
            self._block_crc = zlib.crc32(part, self._block_crc)
            self._block_bytes += len(part)
            data = data[len(part) :]
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._crcs.append(self._block_crc)
        self._block_bytes, self._block_crc = 0, 0

    def digest(self) -> str:
        """SHA-256 of the dtype and the ids added so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Writes the footer."""
        if self._block_bytes:
            self._end_block()
        facts = {"dtype": self._dtype.str, "count": self.count, "documents": self.documents, "digest": self.digest()}
        footer = json.dumps({**facts, "crc32": self._crcs}).encode()
        self._file.write(footer + TAIL.pack(len(footer), zlib.crc32(footer), MAGIC))


def path_of(folder: Path, digest: str) -> Path:
    """Where the token file of that digest lies."""
    return folder / f"{digest}.tokens"


@contextlib.contextmanager
def writing(folder: Path, dtype: np.dtype[Any]) -> Iterator[TokenWriter]:
    """A writer whose file appears under its digest, whole and on the disk, when the block ends well, else not at all.

    Raises DiskError when the folder cannot be written or the disk is full.
    """
    with disk_errors(folder), unfinished(folder) as new:
        writer = TokenWriter(new.file, dtype)
        yield writer
        writer.finish()
        new.path = path_of(folder, writer.digest())


@dataclass(slots=True)
class Unfinished:
    """A file without a name yet; who writes it sets `path` when it is whole."""

    file: BinaryIO
    path: Path | None = None


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Unfinished]:
    """A temporary file in `folder` that takes its `path` atomically, after fsync, when the block ends well."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=BUILDING, dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            new = Unfinished(file)
            yield new
            file.flush()
            os.fsync(file.fileno())
        if new.path is not None:
            os.replace(temporary, new.path)
            _sync_folder(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns what the disk refuses while a file is written in `folder` into one sentence with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"No space is left for the token cache in {folder}; free some, or use --dir on another disk."
            ) from error
        raise DiskError(
            f"Cannot write the token cache in {folder} ({error.strerror or error}); correct that, or use another --dir."
        ) from error


def remove_abandoned(folder: Path) -> None:
    """Deletes temporary files that nobody has written to for a day: their builders were killed."""
    for path in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def open_token_file(folder: Path, digest: str) -> TokenFile | None:
    """The file of that digest, mapped read-only; None when it is missing, truncated or damaged, so that it is rebuilt.

    Every block is checked up to CHECKED_BLOCKS of them (1 GiB); of a larger file that many, evenly spread.
    """
    try:
        with path_of(folder, digest).open("rb") as file:
            footer = _footer(file)
            if footer is None or footer["digest"] != digest:
                return None
            dtype, count = np.dtype(footer["dtype"]), int(footer["count"])
            ids: Ids = np.memmap(file, dtype, mode="r", shape=(count,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TokenFile(ids, int(footer["documents"]), digest) if _intact(ids, footer["crc32"]) else None


def _footer(file: BinaryIO) -> dict[str, Any] | None:
    size = os.fstat(file.fileno()).st_size
    if size < TAIL.size:
        return None
    file.seek(size - TAIL.size)
    length, crc, magic = TAIL.unpack(file.read(TAIL.size))
    if magic != MAGIC or length > min(FOOTER_BYTES, size - TAIL.size):
        return None
    file.seek(size - TAIL.size - length)
    data = file.read(length)
    if zlib.crc32(data) != crc:
        return None
    footer: dict[str, Any] = json.loads(data)
    ids_bytes = footer["count"] * np.dtype(footer["dtype"]).itemsize
    return footer if ids_bytes + length + TAIL.size == size else None


def _intact(ids: Ids, crcs: list[int]) -> bool:
    data = ids.data.cast("B")
    blocks = -(-len(data) // BLOCK_BYTES)
    if len(crcs) != blocks:
        return False
    checked = np.unique(np.linspace(0, blocks - 1, min(blocks, CHECKED_BLOCKS)).astype(int))
    return all(zlib.crc32(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) == crcs[i] for i in checked)
