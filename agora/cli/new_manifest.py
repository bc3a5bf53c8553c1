"""`swarm new`: writes a commented manifest.

Knows: presets and files. Must not know: anything of a running swarm.
"""

from __future__ import annotations

import re
from pathlib import Path

from agora.cli.console import USAGE, Failure, print_line


def write(path: Path, preset_name: str, name: str | None) -> None:
    """Writes the preset as a commented manifest. Raises Failure when `path` exists or cannot be written."""
    from agora_protocol import manifest
    from agora_protocol.errors import ManifestError

    try:
        text = manifest.preset(preset_name).replaced(name=name or _name_from(path)).to_toml()
    except ManifestError as error:
        raise Failure(str(error), USAGE) from None
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Failure(f"{path} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None
    print_line(f"wrote {path}: edit it, then start the run with `agora-node join {path}`")


def _name_from(path: Path) -> str:
    """Returns the file's name without the characters that a run's name must not have."""
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.stem)[:64] or "run"
