"""The tensors of the run's base model that this machine has, in the owner's folder and in the store of fetched ones.

Lives as long as the daemon. The docstrings name the functions that block; these may run in threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError, ProtocolError
from agora_protocol.tensor_list import ListedTensor, TensorList

from agora.tuning.base.store import BaseModelError, TensorLocation, TensorStore, list_tensors, read_tensor_locations

MALFORMED: Final = "whoever wrote the manifest has to write a new one for this model"


class BaseTensors:
    """Records which tensors of the run's base model this machine has, and where each of them lies.

    list_hash: SHA-256 of the model's tensor list.
    owner_files: each file with tensors that the manifest names -> where the machine's owner says it lies; None if
        nobody said so. It need not exist.
    store: the tensors that were fetched from peers.
    tensor_list: None until adopt_list is called.
    """

    def __init__(self, list_hash: str, owner_files: Mapping[str, Path | None], store: TensorStore) -> None:
        self.list_hash = list_hash
        self.owner_files = owner_files
        self.store = store
        self.tensor_list: TensorList | None = None
        self._adopting = threading.Lock()
        self._owned: dict[str, TensorLocation] | None = None
        self._held: dict[int, TensorLocation] = {}

    def locations_in_folder(self) -> dict[str, TensorLocation]:
        """Returns name -> location of each tensor in the owner's weights files; {} without such files.

        Leaves out tensors that no tensor list can have, see read_tensor_locations. Reads the files' headers at the
        first call only, which blocks. Raises BaseModelError for a file that is not a readable safetensors file.
        """
        if self._owned is None:
            locations = [read_tensor_locations(path) for path in self._owner_files()]
            self._owned = {name: location for found in locations for name, location in found.items()}
        return self._owned

    def _owner_files(self) -> list[Path]:
        return [path for path in self.owner_files.values() if path is not None and path.is_file()]

    def open_list(self) -> TensorList | None:
        """Returns and adopts (see adopt_list) the tensor list: the known one, else the one on the disk, else a new one.

        A new one is made by hashing all of the owner's files, and written to the disk; a failure to write is ignored.
        Returns None if there is no list and some file is missing. Blocks for as long as reading the whole model takes.
        Raises BaseModelError if a file is unreadable, if the new list has not `list_hash`, and for a malformed list.
        """
        try:
            tensors = self.tensor_list or self.store.read_list()
            if tensors is None and (files := self._owner_files()) and len(files) == len(self.owner_files):
                tensors = list_tensors(files)
                if tensors.digest != self.list_hash:
                    raise BaseModelError(
                        f"The tensors in {files[0].parent} have the list {tensors.digest[:16]}..., and the manifest "
                        f"says {self.list_hash[:16]}...; download the model again, or {MALFORMED}."
                    )
                with contextlib.suppress(DiskError):
                    self.store.keep_list(tensors)
        except ProtocolError as error:
            raise malformed_list_error(error) from error
        if tensors is not None:
            self.adopt_list(tensors)
        return tensors

    def adopt_list(self, tensors: TensorList) -> None:
        """Sets `tensor_list` and finds which of its tensors this machine has; does nothing if a list is already set.

        Tensors are found by name, dtype and shape, in the owner's files first, then in the store; values are not
        checked. Blocks. The caller has checked that the list's digest is `list_hash`. Raises BaseModelError for a
        weights file of the owner that is not a readable safetensors file.
        """
        with self._adopting:
            if self.tensor_list is not None:
                return
            owned = self.locations_in_folder()
            held = {}
            for number, listed in enumerate(tensors.tensors):
                location = owned.get(listed.name)
                if location is None or not location.is_like(listed):
                    location = self.store.find(number, listed)
                if location is not None:
                    held[number] = location
            self._held = held
            self.tensor_list = tensors

    def add_location(self, number: int, location: TensorLocation) -> None:
        self._held[number] = location

    def drop(self, number: int) -> None:
        """Records that tensor `number` of the list is no longer held; its file stays. Unknown numbers are ignored."""
        self._held.pop(number, None)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    def location_of(self, number: int) -> TensorLocation | None:
        return self._held.get(number)

    def find_listed(self, number: int) -> ListedTensor | None:
        """Returns entry `number` of the tensor list; None if there is no such entry, or while no list is known."""
        tensors = self.tensor_list.tensors if self.tensor_list is not None else ()
        return tensors[number] if 0 <= number < len(tensors) else None


def malformed_list_error(error: ProtocolError) -> BaseModelError:
    return BaseModelError(f"The manifest names a tensor list that is malformed ({error}); {MALFORMED}.")
