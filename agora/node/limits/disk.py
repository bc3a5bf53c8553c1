"""Keeps what the daemon stores within the disk space that its owner allows.

Before something is written, what can be spared is removed in this order, until the new bytes fit: collected weights of
exports, checkpoints of other runs but the newest of each stage, base models of other runs, older checkpoints of the
stage that is to be written. If they still do not fit, nothing is written, and the error says what to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError
from agora_protocol.manifest import Manifest

from agora.node.paths import Home
from agora.state.checkpoint import checkpoint_folders, end_checkpoint_folder, stage_folder

# The folders of a run that can be removed: an export, or a question to the control socket, makes them again.
EXPORTS: Final = ("collected", "weights")
MIN_FREE_BYTES: Final = 64 * 2**20  # disk space that must be free for a daemon to start
PROBE_BYTES: Final = 64 * 1024  # bytes that are written to find out whether the directory can be written
_ADVICE: Final = "free some space there, or choose another --dir."


def check_disk(directory: Path) -> str:
    """Writes and removes a small file in `directory`; returns a text about the free space of its disk.

    Raises DiskError when writing fails, or less than MIN_FREE_BYTES are free.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DiskError(f"Cannot write in {directory} ({error.strerror}); {_ADVICE}") from error
    finally:
        with contextlib.suppress(OSError):  # else it would hide the DiskError
            probe.unlink(missing_ok=True)
    if free < MIN_FREE_BYTES:
        needed = f"{_in_mib(free)} free and the daemon needs {_in_mib(MIN_FREE_BYTES)}"
        raise DiskError(f"{directory} has {needed}; {_ADVICE}")
    return f"{_in_mib(free)} of disk free"


class DiskGuard:
    """Keeps a data directory within `limit_bytes` (0: no limit), by removing folders in it when asked for room."""

    def __init__(self, home: Home, limit_bytes: int) -> None:
        self._home = home
        self._limit = limit_bytes

    def make_room(self, manifest: Manifest, stage: int | None, nbytes: int, end_step: int | None = None) -> None:
        """Removes folders until `nbytes` more fit into the limit; does nothing without a limit.

        The order: exports of all runs, this one included; of other runs, all checkpoints of a stage but its newest;
        base models of other runs; older checkpoints of `stage` (None: of no stage). manifest: of the present run, whose
        other checkpoints and base model stay. end_step: the run's last one; None: as the manifest says. Raises
        DiskError if the bytes do not fit after all of this. Blocks.
        """
        if not self._limit or self._has_room_for(nbytes):
            return
        base, end_step = getattr(manifest.model, "tensors_hash", ""), end_step or manifest.optimizer.total_steps
        for folder in self._removable_folders(manifest.run_id, base, stage, end_step):
            shutil.rmtree(folder, ignore_errors=True)
            if self._has_room_for(nbytes):
                return
        root = self._home.root
        used = stored_bytes(root)
        raise DiskError(
            f"{root} holds {_in_mib(used)} of {_in_mib(self._limit)} allowed, and {_in_mib(nbytes)} more are needed; "
            "raise --disk, or remove what you do not need there."
        )

    def _has_room_for(self, nbytes: int) -> bool:
        return stored_bytes(self._home.root) + nbytes <= self._limit

    def _removable_folders(self, run: str, base: str, stage: int | None, end_step: int) -> Iterator[Path]:
        # The order is that of make_room. The newest checkpoint of a stage, and the one of the run's end, are never
        # removed: a run may have no other copy.
        runs = sorted(self._home.runs.glob("*"))
        yield from (folder / name for folder in runs for name in EXPORTS if (folder / name).is_dir())
        for folder in runs:
            if folder.name != run:
                for of_stage in sorted((folder / "checkpoints").glob("*")):
                    yield from reversed(checkpoint_folders(of_stage)[1:])
        yield from (folder for folder in sorted((self._home.root / "base").glob("*")) if folder.name != base)
        if stage is not None:
            folder = stage_folder(self._home.checkpoints(run), stage)
            at_end = end_checkpoint_folder(folder, end_step)
            yield from (old for old in reversed(checkpoint_folders(folder)[1:]) if old != at_end)


def stored_bytes(root: Path) -> int:
    """Returns the sum of the sizes, in bytes, of all files below `root`; leaves out those that vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _in_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
