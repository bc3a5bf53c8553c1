"""Tensors of a base model on this machine's disk: found in safetensors files, hashed, and kept when fetched from peers.

    STORE/tensors.list               the tensor list; STORE's own name is its SHA-256
    STORE/tensors/00034.safetensors  tensor number 34 of the list, whole, alone in its file
    STORE/tensors/00034.part         the same while it is fetched; pieces that have not arrived yet are zeros
    STORE/NAME.safetensors           a link to a weights file in the folder that this machine's owner has named
    STORE/adapter_model.safetensors  a copy of the adapter that this machine's owner has named

The folder's name is the list's hash, and the list has the hashes of the tensors' pieces: any process can check them,
and every run that begins with this model can use them. One piece at a time is in memory. Every function blocks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

from agora_protocol.errors import DiskError, LocalError
from agora_protocol.limits import MAX_TENSOR_LIST_BYTES, STATE_CHUNK_BYTES
from agora_protocol.manifest_model import WEIGHTS_FILE
from agora_protocol.tensor_list import ListedTensor, TensorList, can_be_listed, count_pieces, size_in_bytes

from agora.state.files import safetensors_header, sync_folder, write_file

LIST: Final = "tensors.list"
SPARE_BYTES: Final = 64 * 2**20  # how much must stay free on the disk
MAX_JSON_BYTES: Final = 64 * 2**20  # of a safetensors file's header, and of an index of weights files
# In such JSON. A hundred thousand tensors need fewer. The bytes have room for twenty million lists, some gigabytes.
MAX_JSON_VALUES: Final = 2**20
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
            if length > size - LENGTH_BYTES:
                raise ValueError("its header is longer than the file")
            header = read_json(file, length)
        start = LENGTH_BYTES + length
        entries = {name: _read_entry(path, start, size, name, header[name]) for name in header}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelError(f"{path} cannot be read as safetensors ({str(error)[:200]}); {DOWNLOAD_AGAIN}.") from error
    return {name: location for name, location in entries.items() if location is not None}


def read_json(file: BinaryIO, length: int) -> Any:
    """Returns the JSON value in the next `length` bytes. Raises ValueError if it is malformed, or beyond MAX_JSON_*."""
    if length > MAX_JSON_BYTES:
        raise ValueError(f"it has {length} bytes of JSON; at most {MAX_JSON_BYTES} are read")
    data = file.read(length)
    # Before each value but the first there is one of these; they may stand within texts, too.
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise ValueError(f"its JSON has more than {MAX_JSON_VALUES} values")
    return json.loads(data)


def names_in_index(index: Path) -> list[str]:
    """Returns the weights files that an index lists, sorted, all in its own folder.

    Raises ValueError, KeyError, TypeError, AttributeError, RecursionError or OSError for any other file.
    """
    with index.open("rb") as file:
        names = sorted(set(read_json(file, os.fstat(file.fileno()).st_size)["weight_map"].values()))
    if not names or not all(WEIGHTS_FILE.fullmatch(name) for name in names):
        raise ValueError("it lists no safetensors files, or other files")
    return names


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
    """Returns whether the tensor's bytes have the listed hashes; False if the file cannot be read.

    A tensor that was checked is not read again while its file is unchanged.
    """
    try:
        status = location.path.stat()
        return _check_pieces(location, listed, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        return False


@functools.lru_cache(maxsize=8192)
def _check_pieces(location: TensorLocation, listed: ListedTensor, size: int, changed_ns: int, inode: int) -> bool:
    # size, changed_ns and inode are part of the cache's key only: a changed file is read again.
    return all(location.read_piece(listed, piece) is not None for piece in range(listed.piece_count))


def read_at(path: Path, start: int, size: int) -> bytes:
    """Reads `size` bytes of the file from offset `start` on; returns fewer if the file ends before. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


class TensorStore:
    """Stores fetched tensors as files below `folder`, which is named by the SHA-256 of the tensor list.

    The folder need not exist. A tensor is stored by `begin`, then `write_piece` for each missing piece, then `finish`;
    after that `find` finds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_list(self) -> TensorList | None:
        """Returns the stored list; None if it is missing, unreadable, or its hash is not the folder's name.

        Raises ProtocolError for a malformed one.
        """
        try:
            with (self.folder / LIST).open("rb") as file:
                data = file.read(MAX_TENSOR_LIST_BYTES + 1)
        except OSError:
            return None
        return TensorList.from_bytes(data) if hashlib.sha256(data).hexdigest() == self.folder.name else None

    def create(self) -> None:
        with self._disk_errors():
            self._tensors.mkdir(parents=True, exist_ok=True, mode=0o700)

    def keep_list(self, tensors: TensorList) -> None:
        """Writes the tensor list, whose digest is the folder's name, in place of an earlier one. Raises DiskError."""
        self.create()
        with self._disk_errors():
            fresh = (self.folder / LIST).with_suffix(".new")
            fresh.unlink(missing_ok=True)
            write_file(fresh, [tensors.to_bytes()])
            os.replace(fresh, self.folder / LIST)
            sync_folder(self.folder)

    # --- whole tensors

    def find(self, number: int, listed: ListedTensor) -> TensorLocation | None:
        """Returns where tensor `number` lies; None if not complete here, or not like `listed`. Checks no values."""
        path = self._tensors / f"{number:05d}.safetensors"
        if not path.is_file():
            return None
        try:
            location = read_tensor_locations(path).get(listed.name)
        except BaseModelError:
            return None
        return location if location is not None and location.is_like(listed) else None

    def find_intact(self, number: int, listed: ListedTensor) -> TensorLocation | None:
        """Returns where tensor `number` lies; None where `find` returns None, and if a piece has a wrong hash."""
        location = self.find(number, listed)
        return location if location is not None and is_intact(location, listed) else None

    # --- tensors that are being fetched

    def begin(self, number: int, listed: ListedTensor) -> set[int]:
        """Creates the .part file of a tensor, full of zeros; returns the numbers of the pieces that it has already.

        A .part file of an earlier process is kept if its header and size are right: it is read, and the pieces in it
        that have their hash are returned; otherwise it is replaced, and the result is empty. Raises DiskError.
        """
        header = _header_of(listed)
        part = self._part(number)
        self.create()
        with self._disk_errors():
            if part.is_file() and part.stat().st_size == len(header) + listed.nbytes:
                location = TensorLocation(part, listed.name, listed.dtype, listed.shape, len(header))
                if read_at(part, 0, len(header)) == header:
                    return {n for n in range(listed.piece_count) if location.read_piece(listed, n) is not None}
            with part.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(header)
                file.truncate(len(header) + listed.nbytes)
        return set()

    def require_room(self, need_bytes: int, what: str) -> None:
        """Raises DiskError if fewer than `need_bytes` + SPARE_BYTES are free. what: what needs them, in words."""
        with self._disk_errors():
            free = shutil.disk_usage(self.folder).free
        if need_bytes + SPARE_BYTES > free:
            raise DiskError(
                f"{what} needs {need_bytes / 1e9:.1f} GB in {self.folder}, and {free / 1e9:.1f} GB are free; free some "
                "space, choose another --dir, or name a folder that has the base model's files: --base-model DIR."
            )

    def write_piece(self, number: int, listed: ListedTensor, piece: int, data: bytes | memoryview) -> None:
        """Writes a piece, whose hash was checked, into the tensor's .part file; does not flush it. Raises DiskError."""
        with self._disk_errors(), self._part(number).open("r+b") as file:
            file.seek(len(_header_of(listed)) + piece * STATE_CHUNK_BYTES)
            file.write(data)

    def finish(self, number: int) -> None:
        """Flushes a complete .part file to disk and renames it to .safetensors. Raises DiskError."""
        part = self._part(number)
        with self._disk_errors():
            with part.open("r+b") as file:
                os.fsync(file.fileno())
            os.replace(part, part.with_suffix(".safetensors"))
            sync_folder(self._tensors)

    # --- links to the owner's files

    def keep_file(self, file: Path) -> None:
        """Copies a file of the owner's into this folder under its own name; later starts find it. Raises DiskError."""
        self.create()
        with self._disk_errors():
            fresh = self.folder / f"{file.name}.new"
            shutil.copyfile(file, fresh)
            os.replace(fresh, self.folder / file.name)
            sync_folder(self.folder)

    def link_files(self, owner_files: Mapping[str, Path | None]) -> None:
        """Replaces the links in this folder: one for each name whose file, which the owner has named, exists.

        A reader of this folder then finds in it all that the machine has of the model. Of a file that nobody named the
        former link is removed. A name that is a file here already gets no link. Raises DiskError.
        """
        with self._disk_errors():
            for name, target in owner_files.items():
                link = self.folder / name
                if link.is_symlink():
                    link.unlink()
                if target is not None and target.is_file() and not link.exists():
                    link.symlink_to(target.absolute())

    @property
    def _tensors(self) -> Path:
        return self.folder / "tensors"

    def _part(self, number: int) -> Path:
        return self._tensors / f"{number:05d}.part"

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"Cannot read and write in {self.folder} ({error.strerror or error}); free some space, choose another "
                "--dir, or name a folder that has the base model's files: --base-model DIR."
            ) from error


def _header_of(listed: ListedTensor) -> bytes:
    return safetensors_header({listed.name: (listed.dtype, listed.shape, listed.nbytes)}, {})
