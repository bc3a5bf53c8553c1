"""Locks a data directory for one daemon; the kernel frees the lock when the daemon dies.

Knows: flock. Must not know: what the directory is for.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from agora_protocol.errors import DiskError, LocalError


class DirectoryLock:
    """A lock file, held from construction to `release`. Raises LocalError with the process id of another holder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskError(f"cannot open {path}: {error.strerror}; choose another directory with --dir") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            raise LocalError(
                f"{path.parent} is in use by the daemon with pid {holder}; "
                f"stop it with `agora-node leave --dir {path.parent}`, or give this one its own --dir"
            ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Frees the lock. The file stays: a lock file that is removed can be locked twice."""
        os.close(self._handle)
