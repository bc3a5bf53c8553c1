"""A result folder is complete or not there, and nothing that somebody else put there is ever lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from agora_protocol.errors import DiskError, InputError

from agora.state.files import PUBLIC, fresh_folder, resolve_export_folder, write_file, write_file_list


def export(out: Path, text: bytes = b"new", *, replace: bool = False) -> Path:
    place = resolve_export_folder(out, replace=replace)
    with fresh_folder(place, 0) as folder:
        write_file_list(folder, {"schema": 1}, {"a.txt": write_file(folder / "a.txt", [text], PUBLIC)})
    return place


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole_and_readable(tmp_path: Path) -> None:
    place = export(tmp_path / "deep" / "er" / "out")
    assert names(place) == ["a.txt", "export.json"] and names(place.parent) == ["out"]
    assert (place / "a.txt").stat().st_mode & 0o777 == 0o644


def test_an_empty_folder_and_a_link_to_one_are_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert export(tmp_path / "link") == tmp_path / "real"
    assert names(tmp_path / "link") == ["a.txt", "export.json"] and names(tmp_path) == ["link", "real"]


def test_an_earlier_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    export(tmp_path / "out", b"old")
    with pytest.raises(InputError, match="--force"):
        export(tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"old"
    export(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new" and names(tmp_path) == ["out"]


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="not empty and not an earlier export"):
        export(tmp_path / "mine", replace=True)
    export(tmp_path / "out")
    (tmp_path / "out" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        export(tmp_path / "out", replace=True)
    with pytest.raises(InputError, match="is a file"):
        export(tmp_path / "out" / "thesis.txt")
    for text in ("", "[]", '{"files": 3}', "[" * 100_000):
        (tmp_path / "mine" / "export.json").write_text(text)
        with pytest.raises(InputError, match="not an earlier export"):
            export(tmp_path / "mine", replace=True)


def test_the_folder_one_is_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="where this command runs"):
        export(Path())


@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_trouble_half_way_leaves_what_was_there(tmp_path: Path, trouble: BaseException) -> None:
    place = export(tmp_path / "out", b"old")
    with pytest.raises((DiskError, KeyboardInterrupt)) as raised, fresh_folder(place, 0) as folder:
        write_file(folder / "a.txt", [b"half"])
        raise trouble
    assert isinstance(raised.value, KeyboardInterrupt) or "No space left on device" in str(raised.value)
    assert (place / "a.txt").read_bytes() == b"old" and names(tmp_path) == ["out"]


def test_a_place_that_cannot_be_taken_gets_its_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, rename, fired = export(tmp_path / "out", b"old"), os.rename, []

    def failing(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".new"):
            fired.append(source)
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(DiskError, match="resource busy"):
        export(tmp_path / "out", replace=True)
    assert len(fired) == 1 and (place / "a.txt").read_bytes() == b"old" and names(tmp_path) == ["out"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**10, 9 * 10**9, 10**9))
    with (
        pytest.raises(DiskError, match=r"need 5\.0 GB .*, and 1\.0 GB are free"),
        fresh_folder(tmp_path / "out", 5 * 10**9),
    ):
        pytest.fail("it began")
    assert names(tmp_path) == []
