"""A stage's weights as one safetensors file. Knows tensors by name and files; not peers, steps, or who asks.

Written beside its place and moved there, so that a reader finds a whole file or none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from agora_protocol.errors import DiskError
from numpy.typing import NDArray

from agora.state.files import Written, remove_file, sync_folder, write_tensors


def write_weights(path: Path, tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> Written:
    """Writes `tensors` (by full parameter name, float32) to `path`. Raises DiskError; `path` is then as it was."""
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_file(temporary)
        written = write_tensors(temporary, tensors, metadata)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        remove_file(temporary)
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error
    return written
