"""Finds tensors in safetensors files, and reads and hashes their bytes, one piece at a time in memory.

Every function blocks. Knows: safetensors headers, pieces, tensor lists. Must not know: peers, what the values mean.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from agora_protocol.errors import LocalError
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.tensor_list import ListedTensor, TensorList, can_be_listed, count_pieces, size_in_bytes

MAX_FILE_HEADER_BYTES: Final = 64 * 2**20
LENGTH_BYTES: Final = 8
"""A safetensors file begins with the length of its header, little endian."""
DOWNLOAD_AGAIN: Final = "download the model again, in the revision that the run's founder used"


class BaseModelError(LocalError):
    """Raised when files of the base model are not on this machine, or are not those that the manifest names."""

    code: ClassVar[str] = "base-model"


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Where a tensor's bytes lie: in the file `path` from byte `start` on. dtype: as safetensors calls it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def is_like(self, listed: ListedTensor) -> bool:
        """Returns whether name, dtype and shape are those of the listed tensor; its values are not read."""
        return (self.name, self.dtype, self.shape) == (listed.name, listed.dtype, listed.shape)

    def read_piece(self, listed: ListedTensor, piece: int) -> bytes | None:
        """Reads a piece and returns its bytes, or None if they do not have the list's hash. Raises OSError."""
        data = read_at(self.path, self.start + piece * STATE_CHUNK_BYTES, listed.piece_bytes(piece))
        return data if listed.is_piece(piece, data) else None


def read_tensor_places(path: Path) -> dict[str, TensorBytes]:
    """Reads the header of a safetensors file; returns by name where each tensor lies that a tensor list can have.

    Tensors of other names, dtypes or shapes are left out (see can_be_listed).

    Raises BaseModelError when the file cannot be read, or its header is malformed or names bytes beyond its end.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(size - LENGTH_BYTES, MAX_FILE_HEADER_BYTES):
                raise ValueError("its header is longer than the file, or than any header")
            header = json.loads(file.read(length))
        start = LENGTH_BYTES + length
        entries = {name: _read_entry(path, start, size, name, header[name]) for name in header}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelError(f"{path} cannot be read as safetensors ({str(error)[:200]}); {DOWNLOAD_AGAIN}.") from error
    return {name: place for name, place in entries.items() if place is not None}


def _read_entry(path: Path, data_start: int, file_size: int, name: str, entry: Any) -> TensorBytes | None:
    """Returns the place of one tensor by its entry in the header; None if no tensor list can have it.

    data_start: where the bytes after the header begin. Raises ValueError for offsets that cannot be its own, and
    KeyError or TypeError for an entry of another form.
    """
    if name == "__metadata__" or not can_be_listed(name, entry["dtype"], entry["shape"]):
        return None
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= file_size - data_start or end - begin != size_in_bytes(entry["dtype"], entry["shape"]):
        raise ValueError(f"the bytes of {name} do not fit its shape or the file")
    return TensorBytes(path, name, entry["dtype"], tuple(entry["shape"]), data_start + begin)


def list_tensors(files: Sequence[Path]) -> TensorList:
    """Returns the tensor list of these weights files, sorted by name; reads all their bytes, for the hashes.

    Tensors that cannot be listed are left out.

    Raises BaseModelError for files that cannot be read or that have a tensor twice, ProtocolError for more tensors than
    a list may have. Blocks for as long as reading the whole model takes.
    """
    places = [place for path in files for place in read_tensor_places(path).values()]
    listed: dict[str, ListedTensor] = {}
    for place in places:
        if place.name in listed:
            raise BaseModelError(f"{place.path} has {place.name}, and so has another weights file; {DOWNLOAD_AGAIN}.")
        listed[place.name] = _list_tensor(place)
    return TensorList.of(listed.values())


def _list_tensor(place: TensorBytes) -> ListedTensor:
    """Reads the tensor and returns its list entry, with its pieces' hashes. Raises BaseModelError if unreadable."""
    nbytes = size_in_bytes(place.dtype, place.shape)
    hashes = bytearray()
    try:
        for piece in range(count_pieces(nbytes)):
            begin = piece * STATE_CHUNK_BYTES
            data = read_at(place.path, place.start + begin, min(STATE_CHUNK_BYTES, nbytes - begin))
            hashes += hashlib.sha256(data).digest()
    except OSError as error:
        raise BaseModelError(f"Cannot read {place.path} ({error.strerror or error}); {DOWNLOAD_AGAIN}.") from error
    return ListedTensor(place.name, place.dtype, place.shape, bytes(hashes))


def is_intact(place: TensorBytes, listed: ListedTensor) -> bool:
    """Returns whether all bytes of the tensor match the list's hashes; False also when they cannot be read.

    A file that this process has checked, and that has not changed since, is not read again.
    """
    try:
        state = place.path.stat()
        return _check_pieces(place, listed, state.st_size, state.st_mtime_ns, state.st_ino)
    except OSError:
        return False


@functools.lru_cache(maxsize=8192)
def _check_pieces(place: TensorBytes, listed: ListedTensor, size: int, changed_ns: int, inode: int) -> bool:
    """Returns whether every piece has its hash. The last three arguments make a changed file be read again."""
    return all(place.read_piece(listed, piece) is not None for piece in range(listed.piece_count))


def read_at(path: Path, start: int, size: int) -> bytes:
    """Returns `size` bytes of the file from offset `start` on, fewer if the file ends before. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
