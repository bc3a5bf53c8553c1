"""A checkpoint is whole or not there, whatever happens to the process, the disk, or a byte."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.errors import DiskError
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetState, StateIndex
from safetensors.numpy import load_file

from agora.core.step_schedule import SyncSchedule
from agora.state import checkpoint as module
from agora.state import files
from agora.state.checkpoint import (
    Checkpoint,
    CheckpointError,
    end_checkpoint,
    newest_checkpoint,
    read_checkpoint,
    stage_folder,
    verify_checkpoint,
    write_checkpoint,
)
from agora.state.files import replace_tensors
from agora.state.layout import OUTER_PARAMETERS, VELOCITY, Layout, MomentSpec, StageState, chunk_hashes
from agora.state.snapshot import SnapshotServer
from tests.state.test_layout import slots_of

RUN = "ab" * 32
NUMEL, SLOTS = slots_of([(7, 30), (30,), (20, 20), ()])
WHOLE = [slice(0, NUMEL)]
LAYOUT = Layout(NUMEL, SLOTS, (MomentSpec("mean", WHOLE), MomentSpec("square", WHOLE, is_square=True)))
FILES = ("checkpoint.json", "weights.safetensors", "moments.safetensors")


def trained(step: int, stage: int = 2, seed: int = 0) -> StageState:
    rng = np.random.default_rng(step + seed)

    def flat() -> np.ndarray:
        tensors = {s.name: rng.standard_normal(s.shape).astype(np.float32).reshape(s.shape) for s in SLOTS}
        return LAYOUT.flatten({name: np.asarray(tensor) for name, tensor in tensors.items()})

    moments = {"mean": flat(), "square": np.square(flat())}
    return StageState(
        stage, step, step // 2, 1000 * step, LAYOUT, flat(), moments, agreed_step=step - 1, history_hash=2**32 - step
    )


def write(folder: Path, step: int, *, keep: int = 3, seed: int = 0) -> Checkpoint:
    return write_checkpoint(folder, RUN, trained(step, seed=seed), keep=keep)


def newest(folder: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    damaged: list[CheckpointError] = []
    return newest_checkpoint(folder, RUN, 2, damaged.append), damaged


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in stage_folder(folder, 2).iterdir())


def assert_holds(checkpoint: Checkpoint, step: int, seed: int = 0) -> None:
    got, expected = read_checkpoint(checkpoint, LAYOUT), trained(step, seed=seed)
    assert (got.stage, got.step, got.updates, got.tokens_total) == (2, step, step // 2, 1000 * step)
    assert (got.agreed_step, got.history_hash) == (step - 1, 2**32 - step)
    for name in ("weights", "mean", "square"):
        np.testing.assert_array_equal(got.arrays[name], expected.arrays[name])


# --- what is written


def test_a_checkpoint_of_inner_steps_holds_the_outer_parameters_and_when_the_steps_are_local(tmp_path: Path) -> None:
    exact = trained(7)
    layout = LAYOUT.at_step(7, SyncSchedule(0, 5, 9))
    moments = {**exact.moments, OUTER_PARAMETERS: exact.weights, VELOCITY: 2 * exact.weights}
    local = replace(exact, layout=layout, moments=moments, sync_schedule=SyncSchedule(0, 5, 9))
    written = write_checkpoint(tmp_path, RUN, local, keep=3)
    found = newest_checkpoint(tmp_path, RUN, 2)
    assert found == written and found.sync_schedule == SyncSchedule(0, 5, 9)
    got = read_checkpoint(found, LAYOUT)
    assert got.sync_schedule == SyncSchedule(0, 5, 9) and got.layout == layout
    for name, values in local.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], values)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = write(tmp_path, 100)
    found, damaged = newest(tmp_path)
    assert found == written
    assert not damaged
    assert_holds(written, 100)


def test_the_files_are_safetensors_by_parameter_name(tmp_path: Path) -> None:
    written = write(tmp_path, 100)
    weights, moments = (load_file(written.path / name) for name in FILES[1:])
    expected = LAYOUT.views(trained(100).weights)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights[name], tensor)
    assert set(moments) == {f"{moment}.{name}" for moment in ("mean", "square") for name in expected}
    assert written.path.stat().st_mode & 0o077 == 0


def test_the_last_k_are_kept_and_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    place = stage_folder(tmp_path, 2)
    place.mkdir(parents=True)
    foreign = ["step-7", "step-07-0123456789abcdef", "step-x-0123456789abcdef", "notes.txt", "step-9-ABC"]
    for name in foreign:
        (place / name).mkdir()
    for step in (100, 200, 300, 400, 500):
        write(tmp_path, step, keep=3)
    kept = [name for name in names(tmp_path) if name not in foreign]
    assert [name.split("-")[1] for name in kept] == ["300", "400", "500"]
    assert all((place / name).is_dir() for name in foreign)
    assert newest(tmp_path)[0].step == 500
    assert not newest(tmp_path)[1]


@pytest.mark.parametrize("end_step", [200, 150])
def test_the_state_at_the_end_of_the_run_stays_however_long_it_goes_on(tmp_path: Path, end_step: int) -> None:
    for step in (100, 200, 300, 400, 500, 600):
        write_checkpoint(tmp_path, RUN, trained(step), keep=2, end_step=end_step)
    assert [name.split("-")[1] for name in names(tmp_path)] == ["200", "500", "600"]
    kept = end_checkpoint(tmp_path, RUN, 2, end_step)
    assert kept is not None and kept.step == 200
    assert newest(tmp_path)[0].step == 600
    assert end_checkpoint(tmp_path, RUN, 2, 601) is None
    (kept.path / "weights.safetensors").write_bytes(b"damaged")
    later = end_checkpoint(tmp_path, RUN, 2, end_step)
    assert later is not None and later.step == 500, "a damaged one is passed over"


def test_stages_do_not_touch_each_other(tmp_path: Path) -> None:
    write(tmp_path, 100)
    write_checkpoint(tmp_path, RUN, trained(500, stage=3), keep=1)
    assert newest(tmp_path)[0].step == 100
    assert newest_checkpoint(tmp_path, RUN, 4) is None
    assert newest_checkpoint(tmp_path / "none", RUN, 2) is None


def test_the_same_state_written_again_is_kept_once_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    first = write(tmp_path, 100, keep=1)
    assert write(tmp_path, 100, keep=1) == first
    assert names(tmp_path) == [first.path.name]
    flip(first.path / FILES[1], 200)
    assert newest(tmp_path)[0] is None
    assert write(tmp_path, 100, keep=1) == first
    assert newest(tmp_path) == (first, [])
    other = write(tmp_path, 100, keep=1, seed=5)  # the same step, trained otherwise
    assert names(tmp_path) == [other.path.name]
    assert_holds(other, 100, seed=5)


async def give(checkpoint: Checkpoint) -> StateIndex:
    async def export(_: int) -> StageState:
        return read_checkpoint(checkpoint, LAYOUT)

    given = await SnapshotServer(export, lambda _: 12 * NUMEL, lambda _: 0).get_state(GetState(2), PeerId("joiner"))
    assert isinstance(given.message, StateIndex)
    return given.message


def test_a_joining_peer_gives_the_state_of_its_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    written = write(tmp_path, 100)
    index = asyncio.run(give(written))
    name = hashlib.sha256(chunk_hashes(trained(100))).digest()
    assert (index.snapshot, index.size, index.step) == (name, 12 * NUMEL, 100)


# --- damage


def flip(file: Path, position: int) -> str:
    """Flips a bit of `file`; the SHA-256 of what it now holds."""
    data = bytearray(file.read_bytes())
    data[position % len(data)] ^= 1
    file.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_noticed_and_named_and_the_older_checkpoint_is_used(tmp_path: Path, name: str) -> None:
    write(tmp_path, 100)
    damaged_one = write(tmp_path, 200)
    file = damaged_one.path / name
    good = file.read_bytes()
    expected = hashlib.sha256(good).hexdigest()
    for position in {*range(0, len(good), 97), len(good) - 1}:
        found_hash = flip(file, position)
        found, [error] = newest(tmp_path)
        assert found is not None
        assert found.step == 100
        assert str(file) in str(error)
        assert expected[:16] in str(error)
        assert found_hash[:16] in str(error)
        file.write_bytes(good)
    assert newest(tmp_path)[0] == damaged_one


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_all_there_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path, 100)
    broken = write(tmp_path, 200).path / name
    DAMAGE[damage](broken)
    found, [error] = newest(tmp_path)
    assert found is not None
    assert found.step == 100
    assert str(broken) in str(error)


def renamed(written: Checkpoint, text: bytes, step: int = 200) -> Path:
    """The checkpoint with `text` as its index, under the name that fits it: not damaged, but not ours."""
    (written.path / FILES[0]).write_bytes(text)
    return written.path.rename(written.path.with_name(f"step-{step}-{hashlib.sha256(text).hexdigest()[:16]}"))


def test_an_index_that_says_nonsense_is_refused(tmp_path: Path) -> None:
    good = (write(tmp_path, 200).path / FILES[0]).read_bytes()
    for text, step in [
        (b"", 200),
        (b"[]", 200),
        (b"\xff", 200),
        (b"[" * 60_000, 200),
        (good.replace(b'"step": 200', b'"step": -1'), 200),
        (good.replace(b'"format": 1', b'"format": 2'), 200),
        (good.replace(b"weights.safetensors", b"../../../etc/passwd"), 200),
        (good.replace(b'"size"', b'"bytes"'), 200),
        (good, 300),
    ]:
        path = renamed(write(tmp_path, 200), text, step)
        with pytest.raises(CheckpointError, match="checkpoint.json"):
            verify_checkpoint(path, RUN, 2)
    with pytest.raises(CheckpointError, match="not named as a checkpoint is"):
        verify_checkpoint(tmp_path, RUN, 2)


def test_a_checkpoint_of_another_run_or_stage_or_model_is_refused(tmp_path: Path) -> None:
    written = write(tmp_path, 100)
    with pytest.raises(CheckpointError, match="of stage 2 of run abab"):
        verify_checkpoint(written.path, "cd" * 32, 2)
    with pytest.raises(CheckpointError, match="not of stage 1"):
        verify_checkpoint(written.path, RUN, 1)
    numel, slots = slots_of([(7, 30), (30,), (20, 21), ()])
    with pytest.raises(CheckpointError, match=r"does not fit stage 2: layer.2.weight is float32 \(20, 20\)"):
        read_checkpoint(written, replace(LAYOUT, numel=numel, slots=slots))
    with pytest.raises(CheckpointError, match="layer.3.weight is not a tensor of this stage"):
        read_checkpoint(written, replace(LAYOUT, slots=SLOTS[:-1]))
    with pytest.raises(CheckpointError, match=r"holds square.layer.0.weight, which is not a moment of this run"):
        read_checkpoint(written, replace(LAYOUT, moments=LAYOUT.moments[:1]))
    (written.path / FILES[2]).write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_checkpoint(written, LAYOUT)


# --- crashes and full disks


class Crash(BaseException):
    """The process is gone: nothing after this happens."""


class Disk:
    """`os`, failing at the n-th file operation and at every one after it. What was not synced can then be lost."""

    COUNTED = ("open", "write", "fsync", "close", "mkdir", "rename")

    def __init__(self, fail_at: int, failure: Callable[[], BaseException]) -> None:
        self.count = 0
        self.fired: Counter[str] = Counter()
        self._fail_at = fail_at
        self._failure = failure
        self._paths: dict[int, Path] = {}
        self._unsynced: dict[Path, int] = {}

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        return (lambda *arguments: self._do(name, real, *arguments)) if name in self.COUNTED else real

    def _do(self, name: str, real: Callable[..., object], *arguments: object) -> object:
        self.count += 1
        if self.count >= self._fail_at:
            self.fired[name] += 1
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif name == "close":
                real(*arguments)
            raise self._failure()
        result = real(*arguments)
        if name == "open":
            self._paths[result] = Path(str(arguments[0]))
        elif name == "write":
            self._unsynced[self._paths[arguments[0]]] = arguments[0]
        elif name == "fsync":
            self._unsynced.pop(self._paths[arguments[0]], None)
        elif name == "rename":
            old, new = (Path(str(path)) for path in arguments)
            self._unsynced = {
                new / p.relative_to(old) if p.is_relative_to(old) else p: h for p, h in self._unsynced.items()
            }
        return result

    def lose_power(self) -> None:
        """What the disk had not been made to keep is gone."""
        for path in self._unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 3)


def on(disk: Disk, work: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", disk)
        patch.setattr(module, "os", disk)
        work()


def operations(tmp_path: Path) -> int:
    """File operations of a write that also removes an old checkpoint."""
    disk = Disk(10**9, Crash)
    for step in (1, 2):
        write(tmp_path / "count", step, keep=2)
    on(disk, lambda: write(tmp_path / "count", 3, keep=2))
    return disk.count


def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    outcomes: Counter[int] = Counter()
    most = operations(tmp_path)
    assert most > 20
    for nth in range(1, most + 1):
        folder = tmp_path / str(nth)
        for step in (100, 200):
            write(folder, step, keep=2)
        disk = Disk(nth, Crash)
        with pytest.raises(Crash):
            on(disk, lambda folder=folder: write(folder, 300, keep=2))
        assert disk.fired
        disk.lose_power()
        found, damaged = newest(folder)
        assert found is not None and not damaged, "a torn checkpoint never has a checkpoint's name"
        assert_holds(found, found.step)
        outcomes[found.step] += 1
        write(folder, 400, keep=2)
        kept = names(folder)
        assert [name.split("-")[1] for name in kept] == [str(found.step), "400"], "leftovers are swept away"
    assert set(outcomes) == {200, 300}
    assert outcomes[300] >= 2


def test_a_full_disk_is_said_and_the_old_ones_are_intact(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for nth in range(1, operations(tmp_path) + 1):
        folder = tmp_path / str(nth)
        old = [write(folder, step, keep=2) for step in (100, 200)]
        disk = Disk(nth, lambda: OSError(errno.ENOSPC, "No space left on device"))
        try:
            on(disk, lambda folder=folder: write(folder, 300, keep=2))
            outcomes["written"] += 1  # only the removal of the oldest failed
            assert newest(folder)[0].step == 300
        except DiskError as error:
            outcomes["refused"] += 1
            assert "No space left" in str(error)
            assert "the older ones are intact" in str(error)
            assert all(verify_checkpoint(one.path, RUN, 2) == one for one in old)
        assert disk.fired
        assert not [name for name in names(folder) if name.startswith(".")]
        assert newest(folder)[0].step in (200, 300)
        assert not newest(folder)[1]
    assert outcomes["refused"] > 20
    assert outcomes["written"] >= 1


def test_a_crash_while_a_damaged_one_is_replaced_never_costs_another(tmp_path: Path) -> None:
    nth, outcomes = 0, Counter[int]()
    while not outcomes[-1]:
        nth += 1
        folder = tmp_path / str(nth)
        write(folder, 100)
        flip(write(folder, 200).path / FILES[2], 99)
        disk = Disk(nth, Crash)
        try:
            on(disk, lambda folder=folder: write(folder, 200))
            outcomes[-1] += not disk.fired
        except Crash:
            found, _ = newest(folder)
            assert found is not None
            assert_holds(found, found.step)
            outcomes[found.step] += 1
    assert outcomes[100] > 20
    assert outcomes[200] >= 1


def test_weights_alone_replace_the_former_file_or_leave_it(tmp_path: Path) -> None:
    path = tmp_path / "out" / "stage.safetensors"
    old, new = ({"w": np.full((3, 4), value, np.float32)} for value in (1.0, 2.0))
    replace_tensors(path, old, {"step": "1"})
    nth = 0
    while True:
        nth += 1
        disk = Disk(nth, lambda: OSError(errno.ENOSPC, "No space left on device"))
        try:
            on(disk, lambda: replace_tensors(path, new, {"step": "2"}))
            break
        except DiskError:
            assert float(load_file(path)["w"][0, 0]) in (1.0, 2.0)
            assert os.listdir(path.parent) == [path.name]
    assert nth > 5
    assert load_file(path)["w"].tolist() == new["w"].tolist()
