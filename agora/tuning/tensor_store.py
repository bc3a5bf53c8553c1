"""The tensors of a base model that this machine has fetched, in a folder named by the SHA-256 of their tensor list.

    STORE/tensors.list               the tensor list; STORE's own name is its SHA-256
    STORE/tensors/00034.safetensors  tensor number 34 of the list, whole, alone in its file
    STORE/tensors/00034.part         the same while it is fetched; pieces that have not arrived yet are zeros
    STORE/NAME.safetensors           a link to a weights file of the folder that this machine's owner has named

Because the folder's name is the list's hash, any process can check its content, and every run that begins with this
model can use it. Every function blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError
from agora_protocol.limits import MAX_TENSOR_LIST_BYTES, STATE_CHUNK_BYTES
from agora_protocol.tensor_list import ListedTensor, TensorList

from agora.state.files import safetensors_header, sync_folder, write_file
from agora.state.stored_tensors import BaseModelError, TensorLocation, is_intact, read_at, read_tensor_locations

LIST: Final = "tensors.list"
SPARE_BYTES: Final = 64 * 2**20  # how much must stay free on the disk


class TensorStore:
    """Stores fetched tensors as files below `folder`, which is named by the SHA-256 of the tensor list.

    The folder need not exist. A tensor is stored by `begin`, then `write_piece` for each missing piece, then `finish`;
    after that `find` finds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_list(self) -> TensorList | None:
        """Reads and returns the tensor list in this folder; None without one, or if its hash is not the folder's name.

        Raises ProtocolError for a list that is malformed although its hash is right.
        """
        try:
            with (self.folder / LIST).open("rb") as file:
                data = file.read(MAX_TENSOR_LIST_BYTES + 1)
        except OSError:
            return None
        return TensorList.from_bytes(data) if hashlib.sha256(data).hexdigest() == self.folder.name else None

    def create(self) -> None:
        """Creates the folder and the subfolder for tensors, if they do not exist. Raises DiskError."""
        with self._disk_errors():
            self._tensors.mkdir(parents=True, exist_ok=True, mode=0o700)

    def keep_list(self, tensors: TensorList) -> None:
        """Writes the tensor list into the folder, which it creates if needed, in place of an earlier list.

        The caller has checked that the list's digest is the folder's name. Raises DiskError.
        """
        self.create()
        with self._disk_errors():
            fresh = (self.folder / LIST).with_suffix(".new")
            fresh.unlink(missing_ok=True)
            write_file(fresh, [tensors.to_bytes()])
            os.replace(fresh, self.folder / LIST)
            sync_folder(self.folder)

    # --- whole tensors

    def find(self, number: int, listed: ListedTensor) -> TensorLocation | None:
        """Returns where tensor `number` lies; None if its file is not complete here, unreadable, or not like `listed`.

        Does not check the values.
        """
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
        """Raises DiskError if fewer than `need_bytes` + SPARE_BYTES are free, or if the folder does not exist.

        what: what needs the bytes, in words; the error's text begins with these words.
        """
        with self._disk_errors():
            free = shutil.disk_usage(self.folder).free
        if need_bytes + SPARE_BYTES > free:
            raise DiskError(
                f"{what} needs {need_bytes / 1e9:.1f} GB in {self.folder}, and {free / 1e9:.1f} GB are free; free some "
                "space, choose another --dir, or name a folder that has the base model's files: --base-model DIR."
            )

    def write_piece(self, number: int, listed: ListedTensor, piece: int, data: bytes | memoryview) -> None:
        """Writes a piece into the tensor's .part file, which `begin` has created; the caller has checked the hash.

        Does not flush the file to disk. Raises DiskError.
        """
        with self._disk_errors(), self._part(number).open("r+b") as file:
            file.seek(len(_header_of(listed)) + piece * STATE_CHUNK_BYTES)
            file.write(data)

    def finish(self, number: int) -> None:
        """Flushes a tensor's .part file to disk and renames it to .safetensors.

        The caller has written every piece; hashes are not checked. Raises DiskError.
        """
        part = self._part(number)
        with self._disk_errors():
            with part.open("r+b") as file:
                os.fsync(file.fileno())
            os.replace(part, part.with_suffix(".safetensors"))
            sync_folder(self._tensors)

    # --- links to the owner's files

    def link_files(self, owner_folder: Path | None, names: Sequence[str]) -> None:
        """Replaces the links in this folder: one for each of `names` that is a file in the owner's folder.

        A reader of this folder then finds in it all that the machine has of the model. owner_folder: None only removes
        the former links. A name that is a file here already gets no link. Raises DiskError.
        """
        with self._disk_errors():
            for name in names:
                link = self.folder / name
                target = owner_folder / name if owner_folder is not None else None
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
                f"Cannot write in {self.folder} ({error.strerror or error}); free some space, choose another --dir, or "
                "name a folder that has the base model's files: --base-model DIR."
            ) from error


def _header_of(listed: ListedTensor) -> bytes:
    return safetensors_header({listed.name: (listed.dtype, listed.shape, listed.nbytes)}, {})
