"""Stages' weights, each in a file of its own, become the shards of one model: checked first, written after that.

Knows safetensors files, tensors' names and shapes, float32 and bf16. Must not know families, peers, or who asks. One
tensor at a time is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
from agora_protocol.errors import LocalError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from agora.state.files import FileDigest, safetensors_header, write_file
from agora.state.folder import FILE_MODE, write_text

Dtype = Literal["float32", "bf16"]
Progress = Callable[[int], None]
"""Told the number of bytes done, as float32 in the result."""

SOURCE_BYTES: Final = 4
ITEM_BYTES: Final[Mapping[Dtype, int]] = {"float32": 4, "bf16": 2}
FILE_DTYPES: Final[Mapping[Dtype, str]] = {"float32": "F32", "bf16": "BF16"}
INDEX: Final = "model.safetensors.index.json"


class ExportError(LocalError):
    """A stage's weights are not what the manifest says; the text names the file and the tensor."""

    code: ClassVar[str] = "export"


@dataclass(frozen=True, slots=True)
class StageFile:
    """A safetensors file that should hold the weights of `stage` at `step`, float32, by their names in the run."""

    stage: int
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the model: `name` in the file of its stage, `exported` in the result, where it has this shape.

    stored, unfold: where the result differs from what the file holds, the shape there, and what makes the one of the
    other, float32.
    """

    stage: int
    name: str
    exported: str
    shape: tuple[int, ...]
    stored: tuple[int, ...] | None = None
    unfold: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None

    @property
    def numel(self) -> int:
        """Elements in the result."""
        return math.prod(self.shape)


class Merge:
    """The files of all stages, held open until the end of the `with`, and the `parts` wanted of them, in their order.

    Opening raises ExportError for a file that cannot be read or is of another run, stage or step.
    """

    def __init__(self, run: str, files: Sequence[StageFile], parts: Sequence[Part]) -> None:
        self._run = run
        self._files = files
        self._parts = parts
        self._open: dict[int, Any] = {}
        self._paths = {file.stage: file.path for file in files}
        self._stack = contextlib.ExitStack()

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(part.numel for part in self._parts)

    def __enter__(self) -> Merge:
        with self._stack:
            for file in self._files:
                self._open[file.stage] = self._stack.enter_context(_opened(file, self._run))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, progress: Progress) -> None:
        """Reads every tensor. Raises ExportError for one that is missing, too much, misshapen, not float32 or not
        finite.
        """
        for stage, path in self._paths.items():
            wanted = {part.name for part in self._parts if part.stage == stage}
            if strange := sorted(wanted ^ set(self._open[stage].keys())):
                what = "is missing" if strange[0] in wanted else "is no tensor of this stage"
                raise ExportError(f"{path}: {strange[0]} {what}.")
        for part in self._parts:
            self._check(part)
            progress(SOURCE_BYTES * part.numel)

    def write(self, folder: Path, dtype: Dtype, shard_bytes: int, progress: Progress) -> dict[str, FileDigest]:
        """Writes the shards and their index into `folder`; what was written, by file name. Raises OSError."""
        shards = cut_shards(self._parts, ITEM_BYTES[dtype], shard_bytes)
        written: dict[str, FileDigest] = {}
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            written[name] = write_file(folder / name, self._pieces(shard, dtype, progress))
            (folder / name).chmod(FILE_MODE)
            where |= {part.exported: name for part in shard}
        index = {"metadata": {"total_size": ITEM_BYTES[dtype] * self.numel}, "weight_map": where}
        written[INDEX] = write_text(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
        return written

    def _check(self, part: Part) -> None:
        lazy = self._open[part.stage].get_slice(part.name)
        found = lazy.get_dtype(), tuple(lazy.get_shape())
        where = f"{self._paths[part.stage]}: {part.name}"
        wanted = part.shape if part.stored is None else part.stored
        if found != ("F32", wanted):
            raise ExportError(f"{where} is {found[0]} {found[1]}; the manifest says F32 {wanted}.")
        if not np.isfinite(self._values(part)).all():
            raise ExportError(f"{where} has values that are not finite.")

    def _values(self, part: Part) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._open[part.stage].get_tensor(part.name)
        return values

    def _pieces(self, shard: Sequence[Part], dtype: Dtype, progress: Progress) -> Iterator[bytes | memoryview]:
        specs = {p.exported: (FILE_DTYPES[dtype], p.shape, ITEM_BYTES[dtype] * p.numel) for p in shard}
        yield safetensors_header(specs, {"format": "pt"})
        for part in shard:
            found = self._values(part) if part.unfold is None else part.unfold(self._values(part))
            values = np.ascontiguousarray(found, "<f4").reshape(-1)
            yield (to_bf16(values) if dtype == "bf16" else values).data.cast("B")
            progress(SOURCE_BYTES * part.numel)


def cut_shards(parts: Sequence[Part], item_bytes: int, shard_bytes: int) -> list[list[Part]]:
    """`parts` in their order, as few as fit into `shard_bytes` each; a larger tensor has a shard of its own."""
    shards: list[list[Part]] = []
    left = 0
    for part in parts:
        size = item_bytes * part.numel
        if not shards or size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(part)
        left -= size
    return shards


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite `values` in bfloat16, rounded to nearest, ties to even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2")


@contextlib.contextmanager
def _opened(file: StageFile, run: str) -> Iterator[Any]:
    try:
        opened = safe_open(file.path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{file.path} cannot be read as safetensors ({error}).") from error
    with opened as tensors:
        about = tensors.metadata() or {}
        expected = {"run": run, "stage": str(file.stage), "step": str(file.step)}
        for key, value in expected.items():
            if about.get(key) != value:
                raise ExportError(f"{file.path} is of {key} {about.get(key, 'none')[:64]}, not {value}.")
        yield tensors
