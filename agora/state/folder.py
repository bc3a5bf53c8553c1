"""A result folder: complete in its place or not there at all; never put over what it did not write itself.

Knows folders, and the list of files that says a folder is an export (export.json). Must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DiskError, InputError

from agora.state.files import FileDigest, remove_folder, sync_folder, write_file

LIST: Final = "export.json"
MAX_LIST_BYTES: Final = 2**20
FILE_MODE: Final = 0o644


def place_for(out: Path, *, replace: bool) -> Path:
    """`out` as an absolute path, if a folder may be put there. Raises InputError when something else is there."""
    place = out.expanduser().resolve()
    if place == Path.cwd():
        raise InputError(f"{place} is where this command runs; name a folder in it.")
    if not place.exists():
        return place
    if not place.is_dir():
        raise InputError(f"{place} is a file; name a folder.")
    there = sorted(path.name for path in place.iterdir())
    listed = _listed(place)
    if there and listed is None:
        raise InputError(f"{place} is not empty and no earlier export; name a new folder.")
    if listed is not None and (strange := [name for name in there if name not in listed]):
        raise InputError(f"{place} is an earlier export with {strange[0]} added to it; name a new folder.")
    if there and not replace:
        raise InputError(f"{place} is an earlier export; give --force to replace it, or name a new folder.")
    return place


@contextlib.contextmanager
def fresh_folder(place: Path, need_bytes: int) -> Iterator[Path]:
    """A folder beside `place` to write `need_bytes` into, moved there when all went well and removed when not.

    Raises DiskError, at once when the disk has too little room.
    """
    fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(place.parent).free) < need_bytes:
            raise DiskError(f"{place} needs {need_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} are free; free some space.")
        fresh.mkdir()
        yield fresh
        sync_folder(fresh)
        _move(fresh, place)
    except OSError as error:
        raise DiskError(
            f"Cannot write {place} ({error.strerror or error}); free some space, or name another folder."
        ) from error
    finally:
        remove_folder(fresh)


def write_list(folder: Path, about: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """Writes export.json: `about`, and the size and SHA-256 of every file. Raises OSError."""
    hashes = {name: {"size": file.size, "sha256": file.sha256} for name, file in sorted(files.items())}
    write_text(folder / LIST, json.dumps({**about, "files": hashes}, indent=2).encode() + b"\n")


def write_text(path: Path, content: bytes) -> FileDigest:
    """Creates a file that others may read, too. Raises OSError."""
    written = write_file(path, [content])
    path.chmod(FILE_MODE)
    return written


def _listed(folder: Path) -> set[str] | None:
    """The names that an export has, None when the folder is none."""
    try:
        with (folder / LIST).open("rb") as file:
            names = json.loads(file.read(MAX_LIST_BYTES))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {LIST, *names} if isinstance(names, dict) else None


def _move(fresh: Path, place: Path) -> None:
    """Puts `fresh` at `place`; what was there is aside until that has worked."""
    aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}.old")
    if place.exists():
        os.rename(place, aside)
    try:
        os.rename(fresh, place)
    except OSError:
        if aside.exists():
            os.rename(aside, place)
        raise
    sync_folder(place.parent)
    remove_folder(aside)
