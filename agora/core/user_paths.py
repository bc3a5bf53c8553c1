"""Paths as users write them: a leading ~ is a home directory, which not every user has."""

from __future__ import annotations

from pathlib import Path

from agora_protocol.errors import LocalError


def expand_home(path: Path | str) -> Path:
    """Returns the path with the home directory for a leading ~ or ~USER. Raises LocalError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or a container's user that is in no list, without HOME
        raise LocalError(f"{path} begins with a home directory that is not known here; write the whole path.") from None


def home_directory() -> Path:
    """Raises LocalError if this process's user has none."""
    try:
        return Path.home()
    except RuntimeError:
        raise LocalError("This user has no home directory; set HOME or AGORA_HOME, or give --dir DIR.") from None
