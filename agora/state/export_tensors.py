"""Joins the weight files of all stages into one model, and writes tensors as safetensors files, block by block.

At most one tensor of the stages is in memory at a time; of tensors that come from elsewhere, at most what their reader
holds.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
from agora_protocol.errors import LocalError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from agora.core.hub_files import WEIGHTS_INDEX_FILE
from agora.state.files import PUBLIC, FileDigest, safetensors_header, write_file

Dtype = Literal["float32", "bf16"]
# Called with the number of bytes just checked or written; every value counts as float32, whatever is written.
ReportBytes = Callable[[int], None]
ReadTrained = Callable[[str], NDArray[np.float32]]  # returns a trained tensor, float32, by its name in the run

SOURCE_BYTES: Final = 4  # of a value in a stage's file
ITEM_BYTES: Final[Mapping[Dtype, int]] = {"float32": 4, "bf16": 2}
FILE_DTYPES: Final[Mapping[Dtype, str]] = {"float32": "F32", "bf16": "BF16"}
PIECE_VALUES: Final = 1 << 20  # how many values are converted and written at a time


class ExportError(LocalError):
    """Raised when a stage's file is unreadable or does not fit the manifest; names the file and the tensor."""

    code: ClassVar[str] = "export"


@dataclass(frozen=True, slots=True)
class StageFile:
    """Names a safetensors file that should hold the weights of `stage` at `step`, float32, by their names in the run.

    prefix: what stands before each of these names in the file; tensors without the prefix are ignored. is_compared:
    False for weights that one other peer gave, and that could be compared with nobody else's.
    """

    stage: int
    step: int
    path: Path
    prefix: str = ""
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """How one tensor of an exported model is made: from the tensor `source` in a stage's file, by `convert`.

    source: the name of the trained tensor in the run.
    name, shape: those of the exported tensor.
    source_shape: the trained tensor's shape; None if it equals `shape`.
    convert: converts the trained tensor's values; None if they stay as they are.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    source_shape: tuple[int, ...] | None = None
    convert: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorBlocks:
    """A tensor that is to be written, whose values are read block by block.

    name, shape: those in the new file. read_blocks: yields the values in row-major order, float32, in blocks of any
    shape. origin: where the values come from, for error texts.
    """

    name: str
    shape: tuple[int, ...]
    read_blocks: Callable[[], Iterator[NDArray[np.float32]]]
    origin: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpenStageFile:
    """An open file of a stage. Its tensors are read by their names in the run; the file has `prefix` before them.

    reader: what safetensors.safe_open returns for the file at `path`.
    """

    path: Path
    prefix: str
    reader: Any

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype, as safetensors calls it, and the shape of a tensor. name: its name in the run."""
        header = self.reader.get_slice(self.prefix + name)
        return header.get_dtype(), tuple(header.get_shape())

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Reads the whole tensor from the file and returns it. name: its name in the run, without the prefix."""
        return self.reader.get_tensor(self.prefix + name)  # type: ignore[no-any-return]

    def place_of(self, name: str) -> str:
        """Returns "FILE: NAME IN THE FILE" for error texts. name: the tensor's name in the run."""
        return f"{self.path}: {self.prefix}{name}"


@dataclass(frozen=True, slots=True)
class OpenStages:
    """The weights of all stages in open files (see open_stages). Checks the weights and converts them for export.

    sources: exported tensor -> the open file of its stage.
    """

    sources: Mapping[ExportedTensor, OpenStageFile]

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.sources)

    def read_weights(self) -> dict[str, NDArray[np.float32]]:
        """Reads all stages' weights; returns name in the run -> tensor as it was trained. Call `check` before."""
        return {tensor.source: file.tensor(tensor.source) for tensor, file in self.sources.items()}

    def read_tensor(self, source: str) -> NDArray[np.float32]:
        """Reads one tensor as it was trained. source: its name in the run; KeyError if unknown. Call `check` before."""
        for tensor, file in self.sources.items():
            if tensor.source == source:
                return file.tensor(source)
        raise KeyError(source)

    def check(self, report: ReportBytes = lambda nbytes: None) -> None:
        """Reads and checks every tensor. Raises ExportError for a wrong dtype or shape, for NaN and for infinity.

        report: called after each tensor with the bytes that the exported tensor takes as float32.
        """
        for tensor, file in self.sources.items():
            dtype, shape = file.header(tensor.source)
            expected = tensor.shape if tensor.source_shape is None else tensor.source_shape
            place = file.place_of(tensor.source)
            if (dtype, shape) != ("F32", expected):
                raise ExportError(f"{place} is {dtype} {shape}; the manifest says F32 {expected}.")
            if not np.isfinite(file.tensor(tensor.source)).all():
                raise ExportError(f"{place} has values that are not finite.")
            report(SOURCE_BYTES * tensor.numel)

    def converted_tensors(self) -> list[TensorBlocks]:
        """Returns the exported tensors, with the names, shapes and values that Hugging Face expects; reads nothing yet.

        Each tensor is read and converted when its blocks are read, for which the files must still be open.
        """
        return [
            TensorBlocks(t.name, t.shape, partial(_convert_blocks, t, file), file.place_of(t.source))
            for t, file in self.sources.items()
        ]


def _convert_blocks(tensor: ExportedTensor, file: OpenStageFile) -> Iterator[NDArray[np.float32]]:
    values = file.tensor(tensor.source)
    yield values if tensor.convert is None else tensor.convert(values)


@contextlib.contextmanager
def open_stages(
    run: str, files: Sequence[StageFile], tensors: Mapping[int, Sequence[ExportedTensor]]
) -> Iterator[OpenStages]:
    """Context manager: opens the files of all stages and yields their weights; closes the files when the block ends.

    run: the run's id. tensors: stage -> the tensors to export from it. Values are not read here. Raises ExportError for
    a file that cannot be read, is of another run, stage or step, or whose tensors with the file's prefix are not
    exactly those to export.
    """
    sources: dict[ExportedTensor, OpenStageFile] = {}
    with contextlib.ExitStack() as stack:
        for file in files:
            try:
                reader = stack.enter_context(safe_open(file.path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ExportError(f"{file.path} cannot be read as safetensors ({error}).") from error
            metadata = reader.metadata() or {}
            for key, value in {"run": run, "stage": str(file.stage), "step": str(file.step)}.items():
                if metadata.get(key) != value:
                    raise ExportError(f"{file.path} is of {key} {metadata.get(key, 'none')[:64]}, not {value}.")
            expected = {file.prefix + tensor.source for tensor in tensors[file.stage]}
            actual = {name for name in reader.keys() if name.startswith(file.prefix)}  # noqa: SIM118 - it is not a mapping
            if unmatched := sorted(expected ^ actual):
                problem = "is missing" if unmatched[0] in expected else "is not a tensor of this stage"
                raise ExportError(f"{file.path}: {unmatched[0]} {problem}.")
            sources |= dict.fromkeys(tensors[file.stage], OpenStageFile(file.path, file.prefix, reader))
        yield OpenStages(sources)


def check_finite(tensors: Sequence[TensorBlocks], report: ReportBytes) -> None:
    """Reads every block of `tensors`. Raises ExportError for NaN and infinity.

    report: called after each tensor with the bytes that it takes as float32.
    """
    for tensor in tensors:
        if not all(np.isfinite(block).all() for block in tensor.read_blocks()):
            raise ExportError(f"{tensor.origin} has values that are not finite.")
        report(SOURCE_BYTES * tensor.numel)


def write_shards(
    folder: Path, tensors: Sequence[TensorBlocks], dtype: Dtype, shard_bytes: int, report: ReportBytes
) -> dict[str, FileDigest]:
    """Writes the tensors as `dtype` into new safetensors files in `folder`, shard by shard (see cut_shards).

    Also writes their index, model.safetensors.index.json. Returns file name -> size and hash, the index included.
    report: called after each tensor with the bytes that it takes as float32. Raises OSError.
    """
    shards = cut_shards(tensors, ITEM_BYTES[dtype], shard_bytes)
    written: dict[str, FileDigest] = {}
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written[name] = write_weights_file(folder / name, shard, dtype, report)
        file_of |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": ITEM_BYTES[dtype] * sum(t.numel for t in tensors)}, "weight_map": file_of}
    written[WEIGHTS_INDEX_FILE] = write_file(
        folder / WEIGHTS_INDEX_FILE, [json.dumps(index, indent=2).encode() + b"\n"], PUBLIC
    )
    return written


def write_weights_file(path: Path, tensors: Sequence[TensorBlocks], dtype: Dtype, report: ReportBytes) -> FileDigest:
    """Writes the tensors as `dtype` into the new safetensors file `path`, and returns the file's size and hash.

    report: called after each tensor with the bytes that it takes as float32. Raises OSError.
    """
    return write_file(path, _file_pieces(tensors, dtype, report), PUBLIC)


def _file_pieces(tensors: Sequence[TensorBlocks], dtype: Dtype, report: ReportBytes) -> Iterator[bytes | memoryview]:
    specs = {t.name: (FILE_DTYPES[dtype], t.shape, ITEM_BYTES[dtype] * t.numel) for t in tensors}
    yield safetensors_header(specs, {"format": "pt"})
    for tensor in tensors:
        for block in tensor.read_blocks():
            values = np.ascontiguousarray(block, "<f4").reshape(-1)
            for start in range(0, len(values), PIECE_VALUES):
                piece = values[start : start + PIECE_VALUES]
                yield (to_bf16(piece) if dtype == "bf16" else piece).data.cast("B")
        report(SOURCE_BYTES * tensor.numel)


def cut_shards(tensors: Sequence[TensorBlocks], item_bytes: int, shard_bytes: int) -> list[list[TensorBlocks]]:
    """Groups the tensors, in their order, into shards of at most `shard_bytes`; a larger tensor is a shard alone.

    item_bytes: bytes of one value.
    """
    shards: list[list[TensorBlocks]] = []
    bytes_left = 0
    for tensor in tensors:
        size = item_bytes * tensor.numel
        if not shards or size > bytes_left:
            shards.append([])
            bytes_left = shard_bytes
        shards[-1].append(tensor)
        bytes_left -= size
    return shards


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns finite float32 values as bfloat16 bits (uint16), rounded to nearest, ties to even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2")
