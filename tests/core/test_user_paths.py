"""Paths as users write them: a home directory that there is not is said, not a traceback."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.manifest_sections import DataSection

from agora.core.user_paths import expand_home
from agora.data.local_files import LocalFiles
from agora.node import paths, runs
from agora.node.settings import Settings


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id is in no list of users."""

    def is_in_no_list(_: object) -> object:
        raise KeyError("uid not found")

    for name in ("HOME", paths.HOME_VARIABLE, "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", is_in_no_list)
    monkeypatch.setattr(pwd, "getpwnam", is_in_no_list)


def test_a_home_directory_is_only_needed_where_it_is_meant(homeless: None, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no home directory; set HOME or AGORA_HOME, or give --dir DIR"):
        paths.home_at()
    assert paths.home_at(tmp_path).root == tmp_path
    assert expand_home(tmp_path) == tmp_path
    with pytest.raises(LocalError, match="~/run.toml begins with a home directory .* write the whole path"):
        runs.resolve("~/run.toml", paths.Home(tmp_path))


def test_the_home_directory_of_a_user_who_is_not_here_is_named(tmp_path: Path) -> None:
    """Also where a manifest of somebody else names it."""
    with pytest.raises(LocalError, match="~nobody-of-this-name/base begins with a home directory"):
        _ = Settings(base_model="~nobody-of-this-name/base").named_base_model
    data = DataSection.model_validate({"corpus": ("~nobody-of-this-name/poems.txt",)})
    with pytest.raises(LocalError, match="~nobody-of-this-name/poems.txt begins with a home directory"):
        LocalFiles((), tmp_path, None).localise(data)


def test_where_home_is_moved_to_there_is_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (paths.HOME_VARIABLE, "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "moved"))
    assert paths.home_at().root == tmp_path / "moved" / ".local" / "share" / "agora"


def test_a_relative_data_directory_is_the_same_one_for_commands_in_other_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name, named in ((paths.HOME_VARIABLE, tmp_path / "data"), ("XDG_DATA_HOME", tmp_path / "data" / "agora")):
        monkeypatch.setenv(name, "data")
        home = paths.home_at()
        assert home.root == named
        stem = home.socket_stem
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert (home.socket_stem, paths.home_at(named).socket_stem) == (stem, stem)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(name)
