"""Finds tensors in safetensors files, and reads and hashes their bytes, one piece at a time in memory.

Every function blocks.
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
LENGTH_BYTES: Final = 8  # A safetensors file begins with the length of its header, little endian
DOWNLOAD_AGAIN: Final = "download the model again, in the revision that the run's founder used"


class BaseModelError(LocalError):
    """Raised when the base model's files cannot be found, fetched or read, or are not those that the manifest names."""

    code: ClassVar[str] = "base-model"


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where the bytes of the tensor `name` lie: in the file `path` from byte `start` on. dtype: as in safetensors."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def is_like(self, listed: ListedTensor) -> bool:
        """Returns whether name, dtype and shape are those of the listed tensor; does not read the values."""
        return (self.name, self.dtype, self.shape) == (listed.name, listed.dtype, listed.shape)

    def read_piece(self, listed: ListedTensor, piece: int) -> bytes | None:
        """Reads one piece and returns its bytes; None if their hash is not the piece's in `listed`. Raises OSError."""
        data = read_at(self.path, self.start + piece * STATE_CHUNK_BYTES, listed.piece_bytes(piece))
        return data if listed.is_piece(piece, data) else None


def read_tensor_locations(path: Path) -> dict[str, TensorLocation]:
    """Reads the header of a safetensors file; returns name -> location of each tensor that a tensor list can have.

    Tensors of other names, dtypes or shapes are left out (see can_be_listed). Raises BaseModelError when the file
    cannot be read, or when its header is malformed or names bytes beyond the end of the file.
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
    return {name: location for name, location in entries.items() if location is not None}


def _read_entry(path: Path, data_start: int, file_size: int, name: str, entry: Any) -> TensorLocation | None:
    if name == "__metadata__" or not can_be_listed(name, entry["dtype"], entry["shape"]):
        return None
    begin, end = entry["data_offsets"]
    if not (type(begin) is int and type(end) is int):
        raise TypeError(f"the offsets of {name} are not integers")
    if not 0 <= begin <= end <= file_size - data_start or end - begin != size_in_bytes(entry["dtype"], entry["shape"]):
        raise ValueError(f"the bytes of {name} do not fit its shape or the file")
    return TensorLocation(path, name, entry["dtype"], tuple(entry["shape"]), data_start + begin)


def list_tensors(files: Sequence[Path]) -> TensorList:
    """Makes the tensor list of these weights files, sorted by name; reads and hashes all their bytes.

    Tensors that cannot be listed are left out. Blocks for as long as reading the whole model takes. Raises
    BaseModelError for a file that cannot be read and for a tensor that two files have, ProtocolError if no valid list
    can be made: no tensor, too many, or too large.
    """
    locations = [location for path in files for location in read_tensor_locations(path).values()]
    listed: dict[str, ListedTensor] = {}
    for location in locations:
        if location.name in listed:
            raise BaseModelError(
                f"{location.path} has {location.name}, and so has another weights file; {DOWNLOAD_AGAIN}."
            )
        listed[location.name] = _list_tensor(location)
    return TensorList.of(listed.values())


def _list_tensor(location: TensorLocation) -> ListedTensor:
    nbytes = size_in_bytes(location.dtype, location.shape)
    hashes = bytearray()
    try:
        for piece in range(count_pieces(nbytes)):
            begin = piece * STATE_CHUNK_BYTES
            data = read_at(location.path, location.start + begin, min(STATE_CHUNK_BYTES, nbytes - begin))
            hashes += hashlib.sha256(data).digest()
    except OSError as error:
        raise BaseModelError(f"Cannot read {location.path} ({error.strerror or error}); {DOWNLOAD_AGAIN}.") from error
    return ListedTensor(location.name, location.dtype, location.shape, bytes(hashes))


def is_intact(location: TensorLocation, listed: ListedTensor) -> bool:
    """Returns whether all bytes of the tensor have the hashes in `listed`; False also when the file cannot be read.

    A tensor that this process has checked, in a file that has not changed since, is not read again.
    """
    try:
        status = location.path.stat()
        return _check_pieces(location, listed, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        return False


@functools.lru_cache(maxsize=8192)
def _check_pieces(location: TensorLocation, listed: ListedTensor, size: int, changed_ns: int, inode: int) -> bool:
    # The result is cached; size, changed_ns and inode are part of the key only, so that a changed file is read again.
    return all(location.read_piece(listed, piece) is not None for piece in range(listed.piece_count))


def read_at(path: Path, start: int, size: int) -> bytes:
    """Reads `size` bytes of the file from offset `start` on; returns fewer if the file ends before. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
