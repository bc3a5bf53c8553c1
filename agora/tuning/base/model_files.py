"""Reads single tensors of a base model from safetensors files of this machine, after checking them.

The files are the model's own, or those of tensors that were fetched from peers (tuning.base.store), or some of each.
Also lists the weights files of a folder, for writing a manifest. The header of each file lists the file's tensors; only
the files with wanted tensors are hashed and read, so a peer needs only the shards of its own span. The index file,
which no hash in the manifest covers, is read only for writing a manifest.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import MAX_CONFIG_BYTES
from agora_protocol.tensor_list import ListedTensor
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agora.core.hub_files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
)
from agora.data.tokenizer import LFS_POINTER, LFS_WORDS
from agora.tuning.base.store import (
    DOWNLOAD_AGAIN,
    BaseModelError,
    TensorLocation,
    TensorStore,
    is_intact,
    list_tensors,
    names_in_index,
)
from agora.tuning.base.tensors import malformed_list_error

MAX_POINTER_BYTES: Final = 1024  # of a git-lfs pointer, as its specification says
READABLE: Final = ("F32", "BF16", "F16")  # the dtypes, as safetensors calls them, that become float32 without a loss


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """names: that it may have in the files; the first one that exists is used."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored: the file, its name there, its dtype as safetensors calls it, its shape.

    fetched: for a tensor that was fetched from peers, where its bytes lie, and its entry in the tensor list, whose
    hashes they must match; None if the file is one of the model's own.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    fetched: tuple[TensorLocation, ListedTensor] | None = None

    @property
    def is_readable(self) -> bool:
        return self.dtype in READABLE


def read_config(folder: Path) -> str:
    """Returns the text of the folder's config.json, not parsed. Raises BaseModelError if it cannot be read."""
    if not (require_folder(folder) / CONFIG_FILE).exists() and (folder / ADAPTER_CONFIG_FILE).is_file():
        raise BaseModelError(
            f"{folder} has an adapter ({ADAPTER_CONFIG_FILE}) and no model; name the folder of its base model, "
            "and this one with --adapter."
        )
    return read_text(folder / CONFIG_FILE, 4 * MAX_CONFIG_BYTES)


def weight_files(folder: Path) -> list[str]:
    """model.safetensors, or those in the index, sorted. Raises BaseModelError."""
    if (folder / WEIGHTS_FILE).is_file():
        refuse_pointer(folder / WEIGHTS_FILE)
        return [WEIGHTS_FILE]
    if not (folder / WEIGHTS_INDEX_FILE).is_file():
        raise BaseModelError(
            f"{folder} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}, and other kinds of weights are not read; "
            "load the model with transformers and write it with save_pretrained."
        )
    refuse_pointer(folder / WEIGHTS_INDEX_FILE)
    try:
        names = names_in_index(folder / WEIGHTS_INDEX_FILE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelError(
            f"{folder / WEIGHTS_INDEX_FILE} is not an index of weights files; {DOWNLOAD_AGAIN}."
        ) from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BaseModelError(f"{folder} has no {missing[0]}, which {WEIGHTS_INDEX_FILE} lists; {DOWNLOAD_AGAIN}.")
    for name in names:
        refuse_pointer(folder / name)
    return names


def refuse_pointer(path: Path) -> None:
    """Raises BaseModelError if the file is a git-lfs pointer instead of what it points at."""
    with suppress(OSError):
        # The size first: a file of weights is opened once, by whoever reads it.
        if path.stat().st_size <= MAX_POINTER_BYTES and path.read_bytes().startswith(LFS_POINTER):
            raise BaseModelError(f"{path} is {LFS_WORDS}.")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Returns the content of the folder's generation_config.json (how text is sampled and ended); {} without a file.

    No hash in the manifest covers it. Raises BaseModelError for a file that is not a JSON object or is longer than
    MAX_CONFIG_BYTES.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise BaseModelError(f"{path} is not a JSON object; {DOWNLOAD_AGAIN}.")
    return values


def read_text(path: Path, max_bytes: int) -> str:
    """Raises BaseModelError for a file that is longer, is a git-lfs pointer, is not UTF-8 or cannot be read."""
    refuse_pointer(path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise BaseModelError(f"{path} has more than {max_bytes} bytes; {DOWNLOAD_AGAIN}.")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BaseModelError(f"Cannot read {path} ({error}); name the folder of a Hugging Face model.") from error


def read_tensors(
    folder: Path | None, files: Sequence[tuple[str, str]], wanted: Mapping[str, WantedTensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (key in `wanted`, values) of each wanted tensor, float32 on the CPU, one tensor at a time in memory.

    They come in the order of the files' paths. folder: the model's folder, or a TensorStore's. files: name and SHA-256
    of each weights file, as the manifest lists them; checked before the first tensor is yielded. Raises BaseModelError
    for a folder of None, another hash, a missing tensor or one of a wrong shape or dtype, and an unreadable file.
    """
    located = locate_checked(folder, files, wanted)
    for path in sorted({stored.path for stored in located.values()}):
        with safe_open(path, framework="pt") as reader:
            for key, stored in located.items():
                if stored.path == path:
                    yield key, reader.get_tensor(stored.name).to(torch.float32)


def locate_checked(
    folder: Path | None, files: Sequence[tuple[str, str]], wanted: Mapping[str, WantedTensor]
) -> dict[str, StoredTensor]:
    """Returns key in `wanted` -> where the tensor is stored, after checking the hashes of the tensors' bytes.

    Hashes the whole weights files that have a wanted tensor, unless this process has hashed them before; blocks
    meanwhile. Arguments and errors are those of read_tensors.
    """
    folder = require_folder(folder)
    located = locate_tensors(folder, [name for name, _ in files], wanted)
    used = {stored.path for stored in located.values()}
    for name, digest in files:
        if folder / name in used:
            _check_hash(folder / name, digest)
    for stored in located.values():
        if stored.fetched is not None and not is_intact(*stored.fetched):
            raise BaseModelError(f"{stored.path} is damaged; start the daemon again: it fetches this tensor again.")
    return located


def locate_tensors(folder: Path, files: Sequence[str], wanted: Mapping[str, WantedTensor]) -> dict[str, StoredTensor]:
    """Returns key in `wanted` -> where the tensor is stored, in the order of `wanted`; hashes are not checked.

    Absent files are skipped. A tensor that no file has is looked for among those fetched from peers into the folder.
    Raises BaseModelError for a missing tensor, a wrong shape, a dtype that is not in READABLE, and an unreadable
    header.
    """
    present = [folder / name for name in files if (folder / name).is_file()]
    stored = read_fetched_tensors(folder) | {tensor.name: tensor for path in present for tensor in read_header(path)}
    absent = [name for name in files if not (folder / name).is_file()]
    located = {}
    for key, tensor in wanted.items():
        place = next((stored[name] for name in tensor.names if name in stored), None)
        if place is None:
            raise BaseModelError(_explain_missing(folder, tensor.names[0], absent))
        if place.shape != tensor.shape:
            raise BaseModelError(
                f"{place.path}: {place.name} has the shape {list(place.shape)}, and the manifest's config gives it "
                f"{list(tensor.shape)}; its config and weights do not match: its author has to write it again."
            )
        if not place.is_readable:
            raise BaseModelError(
                f"{place.path}: {place.name} is {place.dtype}, and only {', '.join(READABLE)} can be trained; the run "
                "needs a manifest of the unquantised model."
            )
        located[key] = place
    return located


def read_fetched_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns name -> place of the tensors that are complete in a TensorStore's folder; {} for any other folder."""
    store = TensorStore(folder)
    try:
        tensors = store.read_list()
    except ProtocolError as error:
        raise malformed_list_error(error) from error
    found = {}
    for number, listed in enumerate(tensors.tensors if tensors is not None else ()):
        if (location := store.find(number, listed)) is not None:
            fetched = location, listed
            found[listed.name] = StoredTensor(location.path, listed.name, listed.dtype, listed.shape, fetched)
    return found


def tensor_list_hash(files: Sequence[Path]) -> str:
    """Returns the manifest's tensors_hash: the SHA-256, in hex, of the tensor list of all files with tensors.

    Reads all their bytes. Returns "" if no valid list can be made (no tensor, too many, or too large): then peers
    cannot fetch from each other. Raises BaseModelError for a file that cannot be read, or a tensor that two files have.
    """
    try:
        return list_tensors(files).digest
    except ProtocolError:
        return ""


def read_header(path: Path) -> list[StoredTensor]:
    """Raises BaseModelError if it cannot be read."""
    refuse_pointer(path)
    try:
        with safe_open(path, framework="pt") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - it is not a mapping
            return [StoredTensor(path, n, str(s.get_dtype()), tuple(s.get_shape())) for n, s in slices.items()]
    except (SafetensorError, OSError) as error:
        raise BaseModelError(f"{path} cannot be read as safetensors ({str(error)[:200]}); {DOWNLOAD_AGAIN}.") from error


def file_hash(path: Path) -> str:
    """SHA-256 in hex; not read again while size, time and inode are unchanged. Raises BaseModelError."""
    try:
        status = path.stat()
        return _hash_content(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise BaseModelError(f"Cannot read {path} ({error.strerror or error}); {DOWNLOAD_AGAIN}.") from error


@functools.lru_cache(maxsize=1024)
def _hash_content(path: Path, size: int, changed_ns: int, inode: int) -> str:
    # size, changed_ns and inode are part of the cache's key only: a changed file is hashed again.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(path: Path, digest: str) -> None:
    if (found := file_hash(path)) != digest:
        raise BaseModelError(
            f"{path} has the SHA-256 {found[:16]}..., and the manifest says {digest[:16]}...; {DOWNLOAD_AGAIN}."
        )


def require_folder(folder: Path | None) -> Path:
    """Raises BaseModelError, whose text says what to do, if it is None or is not a folder."""
    if folder is None:
        raise BaseModelError("This run begins with a base model; name the folder that has its files: --base-model DIR.")
    if not folder.is_dir():
        raise BaseModelError(f"--base-model {folder} is not a folder; name the one that has the base model's files.")
    return folder


def _explain_missing(folder: Path, tensor: str, absent: Sequence[str]) -> str:
    if not absent:
        return (
            f"No weights file in {folder} has the tensor {tensor}, which the manifest's config needs; whoever wrote "
            "the manifest has to write one of a model's config and weights."
        )
    others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return (
        f"{folder} has no {absent[0]}{others}, and no other file has the tensor {tensor}; download the missing files "
        "into it, or hold other stages."
    )
