"""The cache of tokenised text: token ids on disk, written once, mapped into memory, checked for damage.

`DIGEST.tokens` has the ids as little-endian unsigned integers. Its name is the SHA-256 of their dtype and the ids, so
equal ids share a file. `index/SIGNATURE.json` has the digest, the CRC-32 of each block of BLOCK_BYTES, and details that
the writer has added.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from agora_protocol.errors import DiskError
from numpy.typing import NDArray

from agora.data.tokenizer import Ids
from agora.state.files import sync_folder

BLOCK_BYTES = 4 << 20
CHECKED_BLOCKS = 256  # maximum number of blocks that are checked, 1 GiB; in a larger file they are evenly spread
BUILDING = "building-"  # prefix of unfinished files
ABANDONED_S = 24 * 3600  # age after which an unfinished file is deleted
LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.05


class CachedTokens:
    """One entry of the cache in `folder`: the token ids of one corpus, or the rows of one data file, as one flat array.

    signature: the cache key in hex, a hash of what the ids are made of. dtype: the dtype of the ids. details: JSON
    values that the writer stored with the ids; {} before `open` has found the ids. `lock` and `write` raise DiskError
    when the folder cannot be written or the disk is full.
    """

    def __init__(self, folder: Path, signature: str, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._dtype = dtype
        self._index = folder / "index" / f"{signature}.json"
        self.details: Mapping[str, Any] = {}

    def open_or_write(self, write: Callable[[], None]) -> Ids:
        """Returns the ids [n], memory-mapped; if they are missing or damaged, calls the argument `write` first.

        `write` must call CachedTokens.write. Of several processes, one writes, the others wait for LOCK_TIMEOUT_S.
        Sets `details`. Raises DiskError when the written ids read back damaged, and any exception of `write`.
        """
        if (ids := self.open()) is None:
            with self.lock():
                if (ids := self.open()) is None:
                    write()
                    ids = self.open()
        if ids is None:
            raise DiskError(
                f"The token cache in {self._folder} reads back damaged; check that disk, or use --dir on another."
            )
        return ids

    def open(self) -> Ids | None:
        """Returns the ids [n], memory-mapped, read-only, and sets `details`; None if they are missing or damaged.

        Checks the CRC-32 of CHECKED_BLOCKS evenly spread blocks of the file (all, if it has no more), and the index.
        """
        try:
            index = json.loads(self._index.read_bytes())
            ids: Ids = np.memmap(self._folder / f"{index['digest']}.tokens", self._dtype, mode="r")
            data = ids.data.cast("B")
            crcs = index["crc32"]
            blocks = -(-len(data) // BLOCK_BYTES)
            checked = np.unique(np.linspace(0, blocks - 1, min(blocks, CHECKED_BLOCKS)).astype(int))
            is_intact = len(crcs) == blocks and all(
                zlib.crc32(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) == crcs[i] for i in checked
            )
            details = index.get("details", {})
            is_intact = is_intact and index.get("details_crc32", _crc32_of({})) == _crc32_of(details)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not is_intact:
            return None
        self.details = details
        return ids

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager: waits, blocking, for the file lock of this signature, so that one process builds the ids.

        After LOCK_TIMEOUT_S, and on a file system without locks, the block is entered without it.
        """
        with _disk_errors(self._folder):
            self._index.parent.mkdir(parents=True, exist_ok=True)
            lock = self._index.with_suffix(".lock").open("wb")
        with lock:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(LOCK_POLL_S)
                except OSError:  # a file system without locks
                    break
            yield

    def write(self, pieces: Iterable[NDArray[Any]], details: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Writes the ids of all pieces to a .tokens file, then its index; neither file appears if `pieces` raises.

        First deletes unfinished files of any process that are older than ABANDONED_S. An existing index of this
        signature is replaced. details: called after the last piece; returns JSON values to store in the index. Does not
        take the lock, and does not set the attribute `details`.
        """
        for path in self._folder.glob(f"{BUILDING}*"):  # unfinished files of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()
        digest = hashlib.sha256(self._dtype.str.encode())
        crcs: list[int] = []
        with _disk_errors(self._folder), _open_unfinished_file(self._folder) as file:
            for ids in pieces:
                file.write(np.ascontiguousarray(ids, self._dtype).data)
            file.seek(0)
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                crcs.append(zlib.crc32(block))
            _publish(file, self._folder / f"{digest.hexdigest()}.tokens")
        with _disk_errors(self._folder), _open_unfinished_file(self._index.parent) as file:
            added = details()
            index = {"digest": digest.hexdigest(), "crc32": crcs, "details": added, "details_crc32": _crc32_of(added)}
            file.write(json.dumps(index).encode())
            _publish(file, self._index)


def _crc32_of(details: object) -> int:
    return zlib.crc32(json.dumps(details, sort_keys=True).encode())


@contextlib.contextmanager
def _open_unfinished_file(folder: Path) -> Iterator[IO[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=BUILDING, dir=folder, delete=False) as file:
        try:
            yield file
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)


def _publish(file: IO[bytes], path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        problem = f"Cannot write the token cache in {folder} ({reason}); correct that, or use another --dir."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"No space is left for the token cache in {folder}; free some, or use --dir on another disk."
        raise DiskError(problem) from error
