"""Numbers the starts of a daemon, so that a later one has the greater number even when the clock was set back.

Knows: one small file. Must not know: what the number is for (claims: the newest incarnation of a peer counts).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError

from agora.node.paths import replace_text

MOVES_NS: Final = 1_000_000_000
"""How much greater than the last number the next one is at least: each move of a daemon adds 1 to its number."""
MAX_INCARNATION: Final = 2**62
"""A greater number in the file is not believed, and the clock counts."""


def next_incarnation(file: Path, now_ns: int) -> int:
    """Returns the number of this start, and keeps it in `file`: the unix time in nanoseconds, or more if the last was.

    A file that is not there, or holds no number, says nothing. Raises DiskError when it cannot be written.
    """
    try:
        last = int(file.read_text(encoding="ascii").strip() or 0)
    except (OSError, ValueError):
        last = 0
    number = max(now_ns, last + MOVES_NS if 0 < last < MAX_INCARNATION else 0)
    try:
        replace_text(file, f"{number}\n")
    except OSError as error:
        raise DiskError(f"Cannot write {file} ({error.strerror}); free some space, or choose another --dir.") from error
    return number
