"""Checkpoints of a stage on this machine's disk: whole or absent, and checked against the hashes in their names.

    FOLDER/stage-S/step-N-HASH/weights.safetensors   the weights by parameter name, float32
                              /moments.safetensors   MOMENT.NAME of the optimizer (mean.NAME, square.NAME), float32
                              /checkpoint.json       run, stage, step, ..., size and SHA-256 of the other two
    FOLDER/stage-S/.step-...                         half written or half removed; the next write removes it

HASH is the first 16 hex digits of the SHA-256 of checkpoint.json, which holds the hashes of the other files: no byte
can change unnoticed. One process writes to a FOLDER, one checkpoint of a stage at a time. Every function blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from agora_protocol.errors import DiskError, LocalError
from agora_protocol.manifest_sections import ALL_STEPS
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from agora.core.step_schedule import ALL_REDUCE, ONLY_ALL_REDUCE, SyncSchedule
from agora.state.files import FileDigest, fresh_path, put_in_place, write_file, write_tensors
from agora.state.layout import Layout, StageState

WEIGHTS: Final = "weights.safetensors"
MOMENTS: Final = "moments.safetensors"
INDEX: Final = "checkpoint.json"
NAME_DIGITS: Final = 16
MAX_INDEX_BYTES: Final = 65_536
_NAME: Final = re.compile(rf"step-(0|[1-9][0-9]{{0,17}})-([0-9a-f]{{{NAME_DIGITS}}})")


class CheckpointError(LocalError):
    """Raised when a checkpoint on this disk is damaged or of another run or stage; names the file and the fault."""

    code: ClassVar[str] = "checkpoint"


# The content of checkpoint.json. Unknown keys in the file are ignored: earlier versions wrote more keys. files: file
# name -> size and SHA-256. slices to later_slices: as in SyncSchedule. The others are as in StageState.
class _CheckpointIndex(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    format: int = Field(ge=1, le=1)
    run: str
    stage: int = Field(ge=0)
    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    tokens_total: int = Field(ge=0)
    agreed: int = Field(ge=0)
    lineage: int = Field(ge=0, lt=2**256)
    slices: int = Field(default=ALL_REDUCE, ge=0)
    change_at: int = Field(default=ALL_STEPS, ge=0)
    later_slices: int = Field(default=ALL_REDUCE, ge=0)
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was just written, or whose every byte was checked; the fields are those of its StageState."""

    path: Path
    stage: int
    step: int
    updates: int
    tokens_total: int
    agreed_step: int
    history_hash: int
    sync_schedule: SyncSchedule = ONLY_ALL_REDUCE


def write_checkpoint(folder: Path, run: str, state: StageState, *, keep: int, end_step: int = 0) -> Checkpoint:
    """Writes `state` as a checkpoint below `folder`, and removes the stage's oldest checkpoints.

    Of the stage's checkpoints up to this step, the `keep` newest stay, always including this one. Checkpoints of later
    steps stay too, and so does the first one from `end_step` on, the run's last step. An intact checkpoint of the same
    content is not written again. Temporary folders of killed writers are removed. run: the run's id, which is
    written into the index; the path does not depend on it. Raises DiskError when the checkpoint cannot be written; all
    earlier ones are then still there, and nothing of this one.
    """
    parent = stage_folder(folder, state.stage)
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_leftovers(parent)
        path = _write_files(parent, run, state)
    except OSError as error:
        _remove_leftovers(parent)
        raise DiskError(
            f"Cannot write a checkpoint below {parent} ({error.strerror}); the older ones are intact. Free some space."
        ) from error
    kept = end_checkpoint_folder(parent, end_step)
    earlier = [p for step, p in _list_checkpoints(parent) if step <= state.step and p not in (path, kept)]
    for old in earlier[max(keep, 1) - 1 :]:
        trash = fresh_path(old)
        with contextlib.suppress(OSError):  # the next write tries again
            os.rename(old, trash)  # rename before removing, so that no reader ever finds half of one
            shutil.rmtree(trash, ignore_errors=True)
    return Checkpoint(
        path,
        state.stage,
        state.step,
        updates=state.updates,
        tokens_total=state.tokens_total,
        agreed_step=state.agreed_step,
        history_hash=state.history_hash,
        sync_schedule=state.sync_schedule,
    )


def end_checkpoint_folder(parent: Path, end_step: int) -> Path | None:
    """Returns the folder of the first checkpoint from `end_step` on in `parent`, a stage's folder.

    None if there is none, and for an `end_step` of 0.
    """
    return next((path for step, path in reversed(_list_checkpoints(parent)) if step >= end_step > 0), None)


def end_checkpoint(folder: Path, run: str, stage: int, end_step: int) -> Checkpoint | None:
    """Returns the intact checkpoint of `stage` at the run's end, the first one from `end_step` on, or None."""
    for step, path in reversed(_list_checkpoints(stage_folder(folder, stage))):
        with contextlib.suppress(CheckpointError):
            if step >= end_step:
                return verify_checkpoint(path, run, stage)
    return None


def newest_checkpoint(
    folder: Path, run: str, stage: int, on_damaged: Callable[[CheckpointError], None] = lambda _: None
) -> Checkpoint | None:
    """Returns the intact checkpoint with the highest step of `stage` below `folder`, or None; checks every byte of it.

    on_damaged: called with the error of each checkpoint that is skipped on the way, as damaged or of another run.
    """
    for _, path in _list_checkpoints(stage_folder(folder, stage)):
        try:
            return verify_checkpoint(path, run, stage)
        except CheckpointError as error:
            on_damaged(error)
    return None


def verify_checkpoint(path: Path, run: str, stage: int) -> Checkpoint:
    """Checks every byte of the checkpoint in the folder `path`; raises CheckpointError if one is wrong.

    Also raised for a checkpoint of another run or stage.
    """
    index = _read_index(path)
    if (index.run, index.stage) != (run, stage):
        raise CheckpointError(f"{path} is of stage {index.stage} of run {index.run}, not of stage {stage} of {run}.")
    for name, expected in index.files.items():
        file = path / name
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                actual = FileDigest(stream.tell(), digest)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
        if actual != expected:
            raise CheckpointError(
                f"{file} is damaged: expected SHA-256 {expected.sha256} of {expected.size} bytes, "
                f"found {actual.sha256} of {actual.size}."
            )
    return Checkpoint(
        path,
        index.stage,
        index.step,
        updates=index.updates,
        tokens_total=index.tokens_total,
        agreed_step=index.agreed,
        history_hash=index.lineage,
        sync_schedule=SyncSchedule(index.slices, index.change_at, index.later_slices),
    )


def read_checkpoint(checkpoint: Checkpoint, all_reduce_layout: Layout) -> StageState:
    """Reads the checkpoint's weights and moments, and returns the stage's state; does not check hashes.

    all_reduce_layout: in all-reduce steps. Raises CheckpointError when the files cannot be read or do not fit
    the stage.
    """
    layout = all_reduce_layout.at_step(checkpoint.step, checkpoint.sync_schedule)
    path = checkpoint.path
    try:
        with _stored_tensors(path / WEIGHTS) as stored:
            weights = layout.flatten(stored)
        with _stored_tensors(path / MOMENTS) as stored:
            known = {f"{moment.name}." for moment in layout.moments}
            for name in stored:
                if name[: name.find(".") + 1] not in known:
                    raise CheckpointError(f"{path / MOMENTS} holds {name}, which is not a moment of this run.")
            moments = {
                moment.name: layout.of_moment(moment).flatten(stored.below(f"{moment.name}."))
                for moment in layout.moments
            }
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit stage {checkpoint.stage}: {error}.") from error
    return StageState(
        stage=checkpoint.stage,
        step=checkpoint.step,
        updates=checkpoint.updates,
        tokens_total=checkpoint.tokens_total,
        layout=layout,
        weights=weights,
        moments=moments,
        agreed_step=checkpoint.agreed_step,
        history_hash=checkpoint.history_hash,
        sync_schedule=checkpoint.sync_schedule,
    )


def stage_folder(folder: Path, stage: int) -> Path:
    return folder / f"stage-{stage}"


# --- writing


def _write_files(parent: Path, run: str, state: StageState) -> Path:
    fresh = fresh_path(parent / f"step-{state.step}")
    os.mkdir(fresh, 0o700)
    metadata = {"run": run, "stage": str(state.stage), "step": str(state.step)}
    moments = {
        f"{moment.name}.{name}": tensor
        for moment in state.layout.moments
        for name, tensor in state.layout.of_moment(moment).views(state.moments[moment.name]).items()
    }
    index = _CheckpointIndex(
        format=1,
        run=run,
        stage=state.stage,
        step=state.step,
        updates=state.updates,
        tokens_total=state.tokens_total,
        agreed=state.agreed_step,
        lineage=state.history_hash,
        slices=state.sync_schedule.fragments,
        change_at=state.sync_schedule.change_at,
        later_slices=state.sync_schedule.later_fragments,
        files={
            WEIGHTS: write_tensors(fresh / WEIGHTS, state.layout.views(state.weights), metadata),
            MOMENTS: write_tensors(fresh / MOMENTS, moments, metadata),
        },
    )
    written = write_file(fresh / INDEX, [index.model_dump_json(indent=2).encode() + b"\n"])
    path = parent / f"step-{state.step}-{written.sha256[:NAME_DIGITS]}"
    if path.exists():
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(path, run, state.stage)  # the same content: it may be the only one, so it stays
            shutil.rmtree(fresh, ignore_errors=True)
            return path
    put_in_place(fresh, path)
    return path


def _remove_leftovers(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for leftover in parent.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def checkpoint_folders(parent: Path) -> list[Path]:
    """Returns the checkpoints in a stage's folder, the highest step first, by their names: they may be damaged."""
    return [path for _, path in _list_checkpoints(parent)]


# --- reading


def _list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in parent.iterdir()]
    except OSError:
        return []
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def _read_index(path: Path) -> _CheckpointIndex:
    file = path / INDEX
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named as a checkpoint is.")
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    if (digest := hashlib.sha256(text).hexdigest()[:NAME_DIGITS]) != match[2]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 should begin with {match[2]}, and is {digest}...")
    try:
        index = _CheckpointIndex.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(
            f"{file} is not a checkpoint's index ({error.error_count()} fields are wrong)."
        ) from error
    if index.step != int(match[1]) or set(index.files) != {WEIGHTS, MOMENTS}:
        raise CheckpointError(f"{file} does not describe a checkpoint of that name.")
    return index


class _StoredTensors(Mapping[str, NDArray[np.float32]]):
    # Tensors of an open file, each read when it is asked for: they never lie in memory together.

    def __init__(self, reader: Any, names: Mapping[str, str]) -> None:
        """names: those in the file, by the ones that they have here."""
        self._reader = reader
        self._names = names

    def below(self, prefix: str) -> _StoredTensors:
        """Returns those whose names begin with `prefix`, without it."""
        names = {name.removeprefix(prefix): stored for name, stored in self._names.items() if name.startswith(prefix)}
        return _StoredTensors(self._reader, names)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        tensor: NDArray[np.float32] = self._reader.get_tensor(self._names[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextlib.contextmanager
def _stored_tensors(file: Path) -> Iterator[_StoredTensors]:
    try:
        with safe_open(file, framework="numpy") as reader:
            yield _StoredTensors(reader, {name: name for name in reader.keys()})  # noqa: SIM118 - it is not a mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}).") from error
