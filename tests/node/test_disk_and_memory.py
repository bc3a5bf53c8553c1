"""Claims about the checks before joining: measured value, limit, and what to do, in one sentence."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from agora_protocol.errors import DiskError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.core.machine_limits import OwnersMemory
from agora.node.limits.disk import check_disk
from agora.node.limits.memory import MemoryBudget, check_memory, limit_budget

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"No space left on device\); free some space there, or choose another --dir"):
        check_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_lets_nothing_be_removed_is_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DiskError, match="Read-only file system"):
        check_disk(tmp_path)


def test_a_nearly_full_disk_names_what_is_free_and_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * 2**20))
    with pytest.raises(DiskError, match="has 3 MiB free and the daemon needs 64 MiB"):
        check_disk(tmp_path)


def test_too_little_memory_names_the_need() -> None:
    manifest = preset("tiny")
    with pytest.raises(OutOfMemory, match=r"Stages 0-1 need \d+ MiB .* 102 MiB may be used"):
        check_memory(manifest, Span(0, 1), limit_budget(MemoryBudget(2**40), OwnersMemory(host=2**30 // 10)))
    with pytest.raises(OutOfMemory, match="and 50 MiB may be used; free some, or hold fewer stages"):
        check_memory(manifest, Span(0, 0), MemoryBudget(50 * 2**20))
