"""The private directory in which this process and p2pd keep their Unix sockets.

Knows: directories and locks. Must not know: what the sockets carry.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

SOCKET_PREFIX: Final = "agora-net-"
MAX_BASE_CHARACTERS: Final = 40  # a Unix socket's path has at most 107


class SocketDirectory:
    """A private directory for the Unix sockets to p2pd. Making one removes those that killed daemons left behind.

    A lock in it shows whether its daemon lives. A process id would not: containers share /tmp but not ids.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > MAX_BASE_CHARACTERS:
            base = Path("/tmp")
        _sweep(base)
        made = Path(tempfile.mkdtemp(prefix="." + SOCKET_PREFIX, dir=base))
        self._lock = os.open(made / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(base / made.name[1:])  # only now may a sweep see it

    def remove(self) -> None:
        """Removes the directory and gives up its lock. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(base: Path) -> None:
    """Removes the socket directories below `base` whose locks nobody holds."""
    for left in base.glob(SOCKET_PREFIX + "*"):
        with contextlib.suppress(OSError):  # not ours, in use, or just removed by another sweep
            lock = os.open(left / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
