"""Claims about the owner's limits of memory and disk: what is taken back, in which order, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from agora_protocol.errors import DiskError, OutOfMemory
from agora_protocol.manifest import Manifest

from agora.core.machine_limits import OwnersMemory
from agora.node.limits.disk import DiskGuard, stored_bytes
from agora.node.limits.memory import (
    MAX_POLLS_OVER_LIMIT,
    MemoryGuard,
    MemoryState,
    Reaction,
    decide_reaction,
    limit_device,
)
from agora.node.paths import Home
from agora.observe import events
from agora.state.checkpoint import NAME_DIGITS, stage_folder
from agora.train.memory import available_bytes, freed_bytes, limit_memory, resident_bytes

GIB = 2**30


class Slots:
    """What a ledger would be told."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        self.shortage = ""
        self.given_up: list[str] = []

    def set_shortage(self, shortage: str) -> None:
        self.shortage = shortage

    def reduce_slots(self, reason: str) -> None:
        self.given_up.append(reason)


@pytest.mark.parametrize(
    ("share", "is_refusing", "reaction"),
    [
        (0.5, False, Reaction.NOTHING),
        (0.84, False, Reaction.NOTHING),
        (0.86, False, Reaction.SHRINK),
        (0.96, False, Reaction.REFUSE),
        (0.9, True, Reaction.REFUSE),
        (0.79, True, Reaction.NOTHING),
        (1.5, False, Reaction.REFUSE),
    ],
)
def test_the_reaction_to_memory_follows_the_table(share: float, is_refusing: bool, reaction: Reaction) -> None:
    assert decide_reaction(MemoryState(is_refusing), int(share * GIB), GIB, in_progress=3)[1] is reaction


def test_near_the_limit_slots_are_given_up_one_by_one_then_new_work_is_refused_then_taken_again() -> None:
    slots, seen = Slots(4), list[events.Event]()
    guard = MemoryGuard(GIB, cast(Any, slots), seen.append)
    guard.react_to(int(0.9 * GIB))
    assert len(slots.given_up) == 1
    assert slots.shortage == ""
    guard.react_to(int(0.97 * GIB))
    guard.react_to(int(0.97 * GIB))
    assert len(slots.given_up) == 3
    assert slots.shortage == "short of memory"
    (told,) = seen
    assert "993 MiB of the 1,024 MiB allowed" in told.describe()
    guard.react_to(int(0.7 * GIB))
    assert len(slots.given_up) == 3
    assert slots.shortage == ""


def test_above_the_limit_without_any_work_the_daemon_leaves_with_a_sentence() -> None:
    guard = MemoryGuard(GIB, cast(Any, Slots(0)), lambda _: None)
    for _ in range(MAX_POLLS_OVER_LIMIT - 1):
        guard.react_to(2 * GIB)
    with pytest.raises(OutOfMemory, match=r"2,048 MiB of the 1,024 MiB allowed .* raise --memory"):
        guard.react_to(2 * GIB)


def test_above_the_limit_with_work_in_progress_it_stays_until_that_is_done() -> None:
    guard = MemoryGuard(GIB, Slots(2), lambda _: None)
    for _ in range(3 * MAX_POLLS_OVER_LIMIT):
        guard.react_to(2 * GIB)


def test_what_is_planned_for_a_device_keeps_to_the_limit() -> None:
    cpu, used = torch.device("cpu"), resident_bytes()
    assert 10 * 2**20 < used < 2**40
    free = available_bytes(cpu)
    try:
        limit_device("cpu", OwnersMemory(host=used + 50 * 2**20))
        assert available_bytes(cpu) < 50 * 2**20 + freed_bytes() + 20 * 2**20 < free
        assert available_bytes(cpu, within_limit=False) > available_bytes(cpu)
    finally:
        limit_memory(OwnersMemory())


def fill(folder: Path, size: int) -> Path:
    """A folder with one file of so many bytes."""
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(size))
    return folder


def checkpoint(run: Path, step: int) -> Path:
    """Where a checkpoint of stage 0 lies."""
    return stage_folder(run / "checkpoints", 0) / f"step-{step}-{'a' * NAME_DIGITS}"


def test_room_is_made_in_order_and_never_by_the_newest_checkpoint(tmp_path: Path) -> None:
    home, manifest = Home(tmp_path), Manifest()
    run, other = home.runs / manifest.run_id, home.runs / "other"
    export = fill(run / "collected", 100)
    foreign_old, foreign_new = (fill(checkpoint(other, step), 100) for step in (9, 10))
    base = fill(home.root / "base" / ("ab" * 32), 100)
    old, middle, new = (fill(checkpoint(run, step), 100) for step in (1, 20, 100))
    guard = DiskGuard(home, 1000)
    assert stored_bytes(tmp_path) == 700
    guard.make_room(manifest, 0, 300)
    assert export.exists()
    guard.make_room(manifest, 0, 350)
    assert not export.exists()
    assert foreign_old.exists()
    guard.make_room(manifest, 0, 500)
    assert not foreign_old.exists()
    assert foreign_new.exists()
    assert base.exists()
    guard.make_room(manifest, 0, 700)
    assert not base.exists()
    assert not old.exists()
    assert middle.exists()
    guard.make_room(manifest, 0, 800)
    assert not middle.exists()
    assert new.exists()
    assert foreign_new.exists()
    with pytest.raises(DiskError, match=r"raise --disk"):
        guard.make_room(manifest, 0, 900)
    assert new.exists()
    assert stored_bytes(tmp_path) == 200


def test_without_a_limit_nothing_is_removed(tmp_path: Path) -> None:
    export = fill(Home(tmp_path).runs / "any" / "collected", 100)
    DiskGuard(Home(tmp_path), 0).make_room(Manifest(), 0, 2**60)
    assert export.exists()
