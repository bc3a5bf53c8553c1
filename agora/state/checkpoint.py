"""Checkpoints of a stage on this machine's disk: whole or not there at all, and known by the hash of what is in them.

Knows: folders, files, hashes, which checkpoints to keep. Must not know: peers, when to write, how training goes on.

    FOLDER/stage-S/step-N-HASH/weights.safetensors   the weights by parameter name, float32
                              /moments.safetensors   mean.NAME and square.NAME of the optimizer, float32
                              /checkpoint.json       run, stage, step, ..., size and SHA-256 of the other two
    FOLDER/stage-S/.new-...                          half written or half removed; swept away by the next write

HASH is the first 16 hex digits of the SHA-256 of checkpoint.json, which names the hashes of the rest: no byte of a
checkpoint can change unnoticed, and the same step written twice stands beside its former self until that is removed.
One process writes to a FOLDER, one checkpoint of a stage at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from agora_protocol.errors import DiskError, LocalError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from agora.state.files import Written, hash_file, remove_folder, sync_folder, write_file, write_tensors
from agora.state.layout import ELEMENT_BYTES, Layout, StageState, chunk_hashes, snapshot_hash

WEIGHTS: Final = "weights.safetensors"
MOMENTS: Final = "moments.safetensors"
INDEX: Final = "checkpoint.json"
MEAN, SQUARE = "mean.", "square."
NAME_DIGITS: Final = 16
MAX_INDEX_BYTES: Final = 65_536
_NAME: Final = re.compile(rf"step-(0|[1-9][0-9]{{0,17}})-([0-9a-f]{{{NAME_DIGITS}}})")


class CheckpointError(LocalError):
    """A checkpoint on this disk is damaged or not of this run; the text names the file and what was found in it."""

    code: ClassVar[str] = "checkpoint"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Index(BaseModel):
    """checkpoint.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    format: int = Field(ge=1, le=1)
    run: str
    stage: int = Field(ge=0)
    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    tokens_total: int = Field(ge=0)
    snapshot: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)
    files: dict[str, _File]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole. `snapshot` and `size` are those of the Cut record that may speak of it."""

    path: Path
    run: str
    stage: int
    step: int
    updates: int
    tokens_total: int
    snapshot: bytes
    size: int


def write_checkpoint(folder: Path, run: str, state: StageState, layout: Layout, *, keep: int) -> Checkpoint:
    """Writes `state` below `folder` and removes all but the `keep` newest up to its step.

    Blocks: not for an event loop. Raises DiskError; what was there before is then still there, and nothing else.
    """
    place = stage_folder(folder, state.stage)
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(place)
        path, index = _write(place, run, state, layout)
    except OSError as error:
        _sweep(place)
        raise DiskError(
            f"Cannot write a checkpoint below {place} ({error.strerror}); the older ones are intact. Free some space."
        ) from error
    for old in [p for step, p in _found(place) if step <= state.step and p != path][max(keep, 1) - 1 :]:
        _remove(old)
    return _checkpoint(path, index)


def newest_checkpoint(
    folder: Path, run: str, stage: int, damaged: Callable[[CheckpointError], None] = lambda _: None
) -> Checkpoint | None:
    """The newest checkpoint of `stage` of which every byte is as written; None when there is none.

    `damaged` hears of each newer one that is passed over, and why. Reads all of it: not for an event loop.
    """
    for _, path in _found(stage_folder(folder, stage)):
        try:
            return verify_checkpoint(path, run, stage)
        except CheckpointError as error:
            damaged(error)
    return None


def verify_checkpoint(path: Path, run: str, stage: int) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte of it checked. Raises CheckpointError."""
    index = _read_index(path)
    if (index.run, index.stage) != (run, stage):
        raise CheckpointError(f"{path} is of stage {index.stage} of run {index.run}, not of stage {stage} of {run}.")
    for name, file in index.files.items():
        _check_file(path / name, Written(file.size, file.sha256))
    return _checkpoint(path, index)


def read_checkpoint(checkpoint: Checkpoint, layout: Layout) -> StageState:
    """What the checkpoint holds. Raises CheckpointError when its tensors are not those of `layout`."""
    moments = _read_tensors(checkpoint.path / MOMENTS)
    if strange := [name for name in moments if not name.startswith((MEAN, SQUARE))]:
        raise CheckpointError(f"{checkpoint.path / MOMENTS} holds {strange[0]}, which is no moment.")
    try:
        return StageState(
            checkpoint.stage,
            checkpoint.step,
            checkpoint.updates,
            checkpoint.tokens_total,
            layout.flat(read_weights(checkpoint)),
            layout.flat({n.removeprefix(MEAN): t for n, t in moments.items() if n.startswith(MEAN)}),
            layout.flat({n.removeprefix(SQUARE): t for n, t in moments.items() if n.startswith(SQUARE)}),
        )
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit stage {checkpoint.stage}: {error}.") from error


def read_weights(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """The checkpoint's weights by name. Raises CheckpointError."""
    return _read_tensors(checkpoint.path / WEIGHTS)


def stage_folder(folder: Path, stage: int) -> Path:
    """Where a stage's checkpoints are."""
    return folder / f"stage-{stage}"


# --- writing


def _write(place: Path, run: str, state: StageState, layout: Layout) -> tuple[Path, _Index]:
    fresh = place / f".new-{secrets.token_hex(8)}"
    os.mkdir(fresh, 0o700)
    about = {"run": run, "stage": str(state.stage), "step": str(state.step)}
    moments = {MEAN + name: tensor for name, tensor in layout.named(state.mean).items()}
    moments |= {SQUARE + name: tensor for name, tensor in layout.named(state.square).items()}
    files = {
        WEIGHTS: write_tensors(fresh / WEIGHTS, layout.named(state.weights), about),
        MOMENTS: write_tensors(fresh / MOMENTS, moments, about),
    }
    index = _Index(
        format=1,
        run=run,
        stage=state.stage,
        step=state.step,
        updates=state.updates,
        tokens_total=state.tokens_total,
        snapshot=snapshot_hash(chunk_hashes(state)).hex(),
        size=ELEMENT_BYTES * state.numel,
        files={name: _File(size=file.size, sha256=file.sha256) for name, file in files.items()},
    )
    text = json.dumps(index.model_dump(), indent=2).encode() + b"\n"
    path = place / f"step-{state.step}-{write_file(fresh / INDEX, [text]).sha256[:NAME_DIGITS]}"
    sync_folder(fresh)
    if path.exists():
        if _is_whole(path, run, state.stage):  # the same content: it may be the only one, so it stays
            remove_folder(fresh)
            return path, index
        os.rename(path, place / f".new-{secrets.token_hex(8)}")
    os.rename(fresh, path)
    sync_folder(place)
    return path, index


def _is_whole(path: Path, run: str, stage: int) -> bool:
    try:
        verify_checkpoint(path, run, stage)
    except CheckpointError:
        return False
    return True


def _sweep(place: Path) -> None:
    """Removes what a writer that was killed, or that ran out of space, has left."""
    with contextlib.suppress(OSError):
        for leftover in place.glob(".new-*"):
            remove_folder(leftover)


def _remove(path: Path) -> None:
    """Removes a checkpoint: out of sight first, so that nobody ever finds half of it. The next write tries again."""
    aside = path.with_name(f".new-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        remove_folder(aside)


# --- reading


def _found(place: Path) -> list[tuple[int, Path]]:
    """Steps and folders that look like checkpoints, newest first; whatever else lies there is not ours."""
    return sorted(_named_folders(place), reverse=True)


def _named_folders(place: Path) -> Iterator[tuple[int, Path]]:
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            if match := _NAME.fullmatch(path.name):
                yield int(match[1]), path


def _read_index(path: Path) -> _Index:
    file, match = path / INDEX, _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named as a checkpoint is.")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    if (found := hashlib.sha256(text).hexdigest()[:NAME_DIGITS]) != match[2]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 should begin with {match[2]}, and is {found}...")
    try:
        index = _Index.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{file} is no checkpoint's index ({error.error_count()} fields are wrong).") from error
    if index.step != int(match[1]) or set(index.files) != {WEIGHTS, MOMENTS}:
        raise CheckpointError(f"{file} does not describe a checkpoint of that name.")
    return index


def _check_file(file: Path, expected: Written) -> None:
    try:
        found = hash_file(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    if found != expected:
        raise CheckpointError(
            f"{file} is damaged: expected SHA-256 {expected.sha256} of {expected.size} bytes, "
            f"found {found.sha256} of {found.size}."
        )


def _read_tensors(file: Path) -> dict[str, NDArray[np.float32]]:
    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}).") from error


def _checkpoint(path: Path, index: _Index) -> Checkpoint:
    return Checkpoint(
        path,
        index.run,
        index.stage,
        index.step,
        index.updates,
        index.tokens_total,
        bytes.fromhex(index.snapshot),
        index.size,
    )
