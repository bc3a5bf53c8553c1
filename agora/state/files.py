"""Writes files and folders so that a power cut leaves a whole one or none, and an export replaces no files but its own.

A safetensors file is written straight from the arrays, without a second copy in memory, and hashed on the way: later
damage by the disk is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from agora_protocol.errors import DiskError, InputError
from numpy.typing import NDArray

from agora.core.user_paths import expand_home

HEADER_ALIGNMENT: Final = 8  # bytes; a safetensors header is padded with spaces to a multiple of it
EXPORT_INDEX: Final = "export.json"
MAX_LIST_BYTES: Final = 2**20
PUBLIC: Final = 0o644  # the mode of a file that every user of the machine may read


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size of a file in bytes and the SHA-256 of its content, in hex."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o600) -> FileDigest:
    """Creates the file `path` with the content `pieces`, flushes it to disk (fsync), and returns its size and hash.

    mode: the file's permissions, whatever the umask is. Raises FileExistsError if `path` exists; another OSError may
    leave a partly written file.
    """
    digest = hashlib.sha256()
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(handle, mode)  # whatever the umask is
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileDigest(size, digest.hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> FileDigest:
    """Creates the safetensors file `path` with float32 tensors, by name, and flushes it to disk; returns size and hash.

    metadata: the strings of the header's "__metadata__". Raises FileExistsError if `path` exists (replace_tensors
    replaces it); another OSError may leave a partly written file.
    """
    header = safetensors_header({name: ("F32", t.shape, t.nbytes) for name, t in tensors.items()}, metadata)
    contents = (np.ascontiguousarray(tensor, "<f4").reshape(-1).data.cast("B") for tensor in tensors.values())
    return write_file(path, itertools.chain[bytes | memoryview]([header], contents))


def replace_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> None:
    """Writes float32 tensors, by name, as the safetensors file `path`, in place of an earlier one; flushes it to disk.

    Readers see the old or the new file as a whole. Creates the folder if needed. metadata: see write_tensors. Raises
    DiskError; an earlier file is then unchanged.
    """
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        write_tensors(temporary, tensors, metadata)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a safetensors file: the length field and the JSON header, padded with spaces.

    The tensors' bytes must follow in the order of `tensors`: name -> dtype as the format spells it, shape, size in
    bytes. metadata: the strings of "__metadata__".
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def sync_folder(folder: Path) -> None:
    """Flushes the directory entries of `folder` to disk (fsync), so that new and renamed files last. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- folders of results


def resolve_export_folder(out: Path, *, replace: bool) -> Path:
    """Returns `out` as an absolute path, ~ expanded, if an export may be written there: it is missing or empty.

    With `replace`, `out` may also be an earlier export: a folder with export.json and only files that this lists.
    Raises InputError for any other folder, for the current folder and for a file. Creates and removes nothing.
    """
    folder = expand_home(out).resolve()
    if folder == Path.cwd():
        raise InputError(f"{folder} is where this command runs; name a folder in it.")
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder.")
    names = sorted(path.name for path in folder.iterdir())
    try:
        with (folder / EXPORT_INDEX).open("rb") as file:
            exported = {EXPORT_INDEX, *json.loads(file.read(MAX_LIST_BYTES))["files"].keys()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        exported = None
    if names and exported is None:
        raise InputError(f"{folder} is not empty and not an earlier export; name a new folder.")
    if exported is not None and (unknown := [name for name in names if name not in exported]):
        raise InputError(f"{folder} is an earlier export with {unknown[0]} added to it; name a new folder.")
    if names and not replace:
        raise InputError(f"{folder} is an earlier export; give --force to replace it, or name a new folder.")
    return folder


@contextlib.contextmanager
def fresh_folder(target: Path, need_bytes: int) -> Iterator[Path]:
    """Context manager: yields a new folder beside `target`, for the block to fill; on success renames it to `target`.

    A folder at `target` is replaced and removed. An exception in the block removes the new folder and leaves `target`
    as it was; an OSError becomes a DiskError. Raises DiskError before the block if the disk has less than `need_bytes`
    free.
    """
    fresh = fresh_path(target)
    try:
        make_folder(fresh, need_bytes)
        yield fresh
        put_in_place(fresh, target)
    except OSError as error:
        raise DiskError(
            f"Cannot write {target} ({error.strerror or error}); free some space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def fresh_path(target: Path) -> Path:
    """Returns a path .NAME.RANDOM.new beside `target`: for what is renamed to it later, or moved away from it."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")


def make_folder(folder: Path, need_bytes: int) -> None:
    """Creates `folder` and its parents. Raises DiskError if fewer than `need_bytes` are free; OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < need_bytes:
        raise DiskError(
            f"The files need {need_bytes / 1e9:.1f} GB in {folder.parent}, and {free / 1e9:.1f} GB are free; "
            "free some space."
        )
    folder.mkdir()


def put_in_place(fresh: Path, target: Path) -> None:
    """Renames the folder `fresh` to `target`; flushes the entries of `fresh` and of the parent to disk (fsync).

    The content of the files is not flushed here. An earlier folder at `target` is moved away and removed, or put back
    if the rename fails. Raises OSError.
    """
    sync_folder(fresh)  # before the rename: after a power cut a folder of this name has all its files
    replaced = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    if target.exists():
        os.rename(target, replaced)
    try:
        os.rename(fresh, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_file_list(folder: Path, about: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """Creates export.json: the entries of `about`, and "files": name -> size and SHA-256. Raises OSError."""
    hashes = {name: asdict(file) for name, file in sorted(files.items())}
    write_file(folder / EXPORT_INDEX, [json.dumps({**about, "files": hashes}, indent=2).encode() + b"\n"], PUBLIC)
