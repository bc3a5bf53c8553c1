"""Writes a folder of results: complete in its place or not at all, and never over files of anybody else.

Knows: folders, and export.json, by which a folder is known as an export. Must not know: what is in the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DiskError, InputError

from agora.state.files import FileDigest, remove_folder, sync_folder, write_file

LIST: Final = "export.json"
MAX_LIST_BYTES: Final = 2**20
FILE_MODE: Final = 0o644


def check_export_place(out: Path, *, replace: bool) -> Path:
    """Returns `out` as an absolute path if an export may be written there.

    Raises InputError for the current folder, a file, and a folder that holds anything but an earlier export; and for an
    earlier export unless `replace`.
    """
    place = out.expanduser().resolve()
    if place == Path.cwd():
        raise InputError(f"{place} is where this command runs; name a folder in it.")
    if not place.exists():
        return place
    if not place.is_dir():
        raise InputError(f"{place} is a file; name a folder.")
    names = sorted(path.name for path in place.iterdir())
    exported = _exported_names(place)
    if names and exported is None:
        raise InputError(f"{place} is not empty and no earlier export; name a new folder.")
    if exported is not None and (strange := [name for name in names if name not in exported]):
        raise InputError(f"{place} is an earlier export with {strange[0]} added to it; name a new folder.")
    if names and not replace:
        raise InputError(f"{place} is an earlier export; give --force to replace it, or name a new folder.")
    return place


@contextlib.contextmanager
def fresh_folder(place: Path, need_bytes: int) -> Iterator[Path]:
    """Yields a folder beside `place`; moves it to `place` at the end of the `with`, or removes it after an exception.

    Raises DiskError, at once if the disk has less than `need_bytes` free.
    """
    fresh = fresh_path(place)
    try:
        make_folder(fresh, need_bytes)
        yield fresh
        put_in_place(fresh, place)
    except OSError as error:
        raise DiskError(
            f"Cannot write {place} ({error.strerror or error}); free some space, or name another folder."
        ) from error
    finally:
        remove_folder(fresh)


def fresh_path(place: Path) -> Path:
    """Returns a new path in the same folder as `place`, to be renamed to it later. Its name begins with .NAME."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.new")


def make_folder(folder: Path, need_bytes: int) -> None:
    """Creates `folder` with its parents. Raises OSError; DiskError if the disk has less than `need_bytes` free."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < need_bytes:
        raise DiskError(
            f"The files need {need_bytes / 1e9:.1f} GB in {folder.parent}, and {free / 1e9:.1f} GB are free; "
            "free some space."
        )
    folder.mkdir()


def put_in_place(fresh: Path, place: Path) -> None:
    """Renames `fresh` to `place`. An earlier folder there is removed afterwards, or put back if renaming fails."""
    sync_folder(fresh)
    replaced = place.with_name(f".{place.name}.{secrets.token_hex(4)}.old")
    if place.exists():
        os.rename(place, replaced)
    try:
        os.rename(fresh, place)
    except OSError:
        if replaced.exists():
            os.rename(replaced, place)
        raise
    sync_folder(place.parent)
    remove_folder(replaced)


def write_file_list(folder: Path, about: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """Writes export.json: `about`, then the size and SHA-256 of every file. Raises OSError."""
    hashes = {name: asdict(file) for name, file in sorted(files.items())}
    write_public_file(folder / LIST, json.dumps({**about, "files": hashes}, indent=2).encode() + b"\n")


def write_public_file(path: Path, content: bytes) -> FileDigest:
    """Creates a file that every user of the machine may read. Raises OSError."""
    written = write_file(path, [content])
    path.chmod(FILE_MODE)
    return written


def _exported_names(folder: Path) -> set[str] | None:
    """Returns the names of the files that an export wrote, export.json included; None if the folder is no export."""
    try:
        with (folder / LIST).open("rb") as file:
            names = json.loads(file.read(MAX_LIST_BYTES))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {LIST, *names} if isinstance(names, dict) else None
