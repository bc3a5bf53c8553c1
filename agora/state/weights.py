"""A stage's weights as one safetensors file. Knows tensors by name and files; not peers, steps, or who asks.

Written beside its place and moved there, so that a reader finds a whole file or none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from agora_protocol.errors import DiskError
from safetensors.numpy import save


def write_weights(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes `tensors` (by full parameter name, float32) to `path`. Raises DiskError; `path` is then as it was."""
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary.open("wb") as file:
            file.write(save(dict(tensors), metadata=dict(metadata)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error
