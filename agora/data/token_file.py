"""The file format of the token cache: ids on disk, written once, mapped into memory, checked for damage.

Knows: bytes, files, folders. Must not know: text, tokenizers.

A file is the ids as little-endian unsigned integers from byte 0, then a footer: JSON (dtype, counts, a CRC-32 per block
of BLOCK_BYTES), its length and CRC-32 as two u32, and MAGIC. Its name is the SHA-256 of dtype and ids, so equal corpora
share a file.
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
class Corpus:
    """All token ids of a corpus. tokens: [n] unsigned, mapped read-only; digest: 64 hex characters that name them."""

    tokens: Ids
    documents: int
    digest: str


class TokenWriter:
    """Writes the content of one token file. Made by `write_token_file`, which also gives the file its name."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype
        self.count = self.documents = 0
        self.digest = ""
        """SHA-256 of the dtype and the ids, in hex, once the file is finished."""

    def add(self, ids: NDArray[Any]) -> None:
        """Appends ids [n]; they must fit the file's dtype."""
        self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self.count += len(ids)

    def finish(self) -> None:
        """Reads the ids back, and writes the footer: dtype, counts, digest and the CRC-32 of each block."""
        content, crcs = hashlib.sha256(self._dtype.str.encode()), []
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            content.update(block)
            crcs.append(zlib.crc32(block))
        self.digest = content.hexdigest()
        counts = {"count": self.count, "documents": self.documents}
        footer = json.dumps({"dtype": self._dtype.str, **counts, "digest": self.digest, "crc32": crcs}).encode()
        self._file.write(footer + TAIL.pack(len(footer), zlib.crc32(footer), MAGIC))


def path_of(folder: Path, digest: str) -> Path:
    """Returns the path of the token file with this digest."""
    return folder / f"{digest}.tokens"


@contextlib.contextmanager
def write_token_file(folder: Path, dtype: np.dtype[Any]) -> Iterator[TokenWriter]:
    """Yields a writer. When the block ends without an error, its file appears whole under its digest, else not at all.

    Raises DiskError when the folder cannot be written or the disk is full.
    """
    with disk_errors(folder), unfinished_file(folder) as unfinished:
        writer = TokenWriter(unfinished.file, dtype)
        yield writer
        writer.finish()
        unfinished.path = path_of(folder, writer.digest)


@dataclass(slots=True)
class UnfinishedFile:
    """A file that has no name yet. Its writer sets `path` when the content is complete."""

    file: BinaryIO
    path: Path | None = None


@contextlib.contextmanager
def unfinished_file(folder: Path) -> Iterator[UnfinishedFile]:
    """Yields a temporary file in `folder`. At the end of the block it becomes `path` atomically, after fsync.

    Without a path, or after an error, it is deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=BUILDING, dir=folder)
    try:
        with os.fdopen(handle, "w+b") as file:
            unfinished = UnfinishedFile(file)
            yield unfinished
            file.flush()
            os.fsync(file.fileno())
        if unfinished.path is not None:
            os.replace(temporary, unfinished.path)
            _sync_folder(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    """Waits until the disk has the names of the files in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Translates an OSError while a file is written in `folder` into a DiskError that says what to do."""
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
    """Deletes temporary files that were last written more than a day ago: the processes that built them were killed."""
    for path in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def open_token_file(folder: Path, digest: str) -> Corpus | None:
    """Maps the file with this digest into memory. Returns None when it is missing, truncated or damaged.

    Checks at most CHECKED_BLOCKS blocks (1 GiB); those of a larger file are evenly spread.
    """
    try:
        with path_of(folder, digest).open("rb") as file:
            footer = _read_footer(file)
            if footer is None or footer["digest"] != digest:
                return None
            dtype, count = np.dtype(footer["dtype"]), int(footer["count"])
            ids: Ids = np.memmap(file, dtype, mode="r", shape=(count,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Corpus(ids, int(footer["documents"]), digest) if _is_intact(ids, footer["crc32"]) else None


def _read_footer(file: BinaryIO) -> dict[str, Any] | None:
    """Returns the fields of the footer, or None when it is damaged or does not fit the file's size."""
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


def _is_intact(ids: Ids, crcs: list[int]) -> bool:
    """Returns whether the checked blocks of the mapped ids have the CRC-32 that the footer says."""
    data = ids.data.cast("B")
    blocks = -(-len(data) // BLOCK_BYTES)
    if len(crcs) != blocks:
        return False
    checked = np.unique(np.linspace(0, blocks - 1, min(blocks, CHECKED_BLOCKS)).astype(int))
    return all(zlib.crc32(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) == crcs[i] for i in checked)
