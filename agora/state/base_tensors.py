"""The tensors of the run's base model that this machine has, in the owner's folder and in the store of fetched ones.

Lives as long as the daemon. Functions that block say so, and may run in threads. Knows: the tensor list, files. Must
not know: peers, which tensors a stage needs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError, ProtocolError
from agora_protocol.tensor_list import ListedTensor, TensorList

from agora.state.stored_tensors import BaseModelError, TensorBytes, list_tensors, read_tensor_places
from agora.state.tensor_store import TensorStore

MALFORMED: Final = "whoever wrote the manifest has to write a new one for this model"


class BaseTensors:
    """Keeps account of the tensors that this machine has of the base model whose tensor list has SHA-256 `list_hash`.

    owner_folder: the folder that the machine's owner named, or None. file_names: names of the weights files, from the
    manifest. tensor_list: None until it is known here.
    """

    def __init__(
        self, list_hash: str, owner_folder: Path | None, file_names: Sequence[str], store: TensorStore
    ) -> None:
        self.list_hash = list_hash
        self.owner_folder = owner_folder
        self.file_names = tuple(file_names)
        self.store = store
        self.tensor_list: TensorList | None = None
        self._adopting = threading.Lock()
        self._owned: dict[str, TensorBytes] | None = None
        self._held: dict[int, TensorBytes] = {}

    def places_in_folder(self) -> dict[str, TensorBytes]:
        """Returns by name where each listable tensor in the owner's folder lies. Reads the headers once. Blocks.

        Raises BaseModelError for a file that is not a safetensors file.
        """
        if self._owned is None:
            places = [read_tensor_places(path) for path in self._owner_files()]
            self._owned = {name: place for found in places for name, place in found.items()}
        return self._owned

    def _owner_files(self) -> list[Path]:
        """Returns the paths of those weights files of the manifest that exist in the owner's folder; [] without one."""
        if self.owner_folder is None:
            return []
        return [path for name in self.file_names if (path := self.owner_folder / name).is_file()]

    def open_list(self) -> TensorList | None:
        """Returns the tensor list from the disk, or made by hashing the owner's files if all are there, or None.

        A list that it makes is written to the disk, if there is room. Any list is adopted (see adopt_list). Blocks for
        as long as reading the whole model takes. Raises BaseModelError if the files are not those of the manifest.
        """
        try:
            tensors = self.tensor_list or self.store.read_list()
            if tensors is None and (files := self._owner_files()) and len(files) == len(self.file_names):
                tensors = list_tensors(files)
                if tensors.digest != self.list_hash:
                    raise BaseModelError(
                        f"The tensors in {self.owner_folder} have the list {tensors.digest[:16]}..., and the manifest "
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
        """Sets `tensor_list` and finds out which of its tensors are held; does nothing if it is already set. Blocks.

        The caller has checked that the list's digest is `list_hash`.
        """
        with self._adopting:
            if self.tensor_list is not None:
                return
            owned, held = self.places_in_folder(), {}
            for number, listed in enumerate(tensors.tensors):
                place = owned.get(listed.name)
                if place is None or not place.is_like(listed):
                    place = self.store.find(number, listed)
                if place is not None:
                    held[number] = place
            self._held, self.tensor_list = held, tensors

    def add(self, number: int, place: TensorBytes) -> None:
        """Records that the tensor of this number is complete on this machine, at `place`."""
        self._held[number] = place

    def drop(self, number: int) -> None:
        """Records that the tensor of this number is not held any more, so that it is not given to peers."""
        self._held.pop(number, None)

    @property
    def held(self) -> frozenset[int]:
        """The numbers of the tensors that can be given; empty while the list is not known."""
        return frozenset(self._held)

    def place_of(self, number: int) -> TensorBytes | None:
        """Returns where the tensor of this number lies on this machine, or None if it is not held."""
        return self._held.get(number)

    def find_listed(self, number: int) -> ListedTensor | None:
        """Returns the list's entry of this number; None if it lies outside the list, or while no list is known."""
        tensors = self.tensor_list.tensors if self.tensor_list is not None else ()
        return tensors[number] if 0 <= number < len(tensors) else None


def malformed_list_error(error: ProtocolError) -> BaseModelError:
    """Returns the error to raise for a tensor list that is malformed although it has the manifest's hash."""
    return BaseModelError(f"The manifest names a tensor list that is malformed ({error}); {MALFORMED}.")
