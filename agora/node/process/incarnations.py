"""Numbers the starts of a daemon, so that a later one has a higher number even when the clock was set back."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agora_protocol.errors import DiskError

from agora.node.paths import replace_text

# The next number is at least this much higher than the last: each new claim of a daemon adds 1 to its number.
MOVES_NS: Final = 1_000_000_000
MAX_INCARNATION: Final = 2**62  # A number from this one on in the file is ignored, and the clock alone counts


def next_incarnation(file: Path, now_ns: int) -> int:
    """Returns the number of this start and writes it to `file`: the greater of `now_ns` and the last one + MOVES_NS.

    now_ns: unix time in nanoseconds. A missing or malformed file counts as none. Raises DiskError if writing fails.
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
