"""Claims about where things live, who holds a data directory, and how daemons are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agora_protocol.errors import LocalError

from agora.node import paths
from agora.node.process.startup import lock_file


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")
    return tmp_path / "run"


def entry(tmp_path: Path, pid: int, name: str = "poems") -> paths.DaemonEntry:
    home = paths.Home(tmp_path / f"home-{pid}")
    return paths.DaemonEntry("a" * 64, name, "", "", pid, str(home.root), str(paths.socket_of(home)))


def test_a_second_daemon_on_a_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "daemon.lock"
    with lock_file(path):
        with (
            pytest.raises(LocalError, match=rf"in use by the daemon with pid {os.getpid()}; stop it with"),
            lock_file(path),
        ):
            raise AssertionError("two hold the lock")
    with lock_file(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_killed_holder_leaves_the_directory_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from agora.node.process.startup import lock_file\n"
        "with lock_file(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "daemon.lock")], check=False, timeout=60)
    with lock_file(tmp_path / "daemon.lock"):
        pass


def test_running_daemons_are_found_and_dead_ones_swept(tmp_path: Path, runtime: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    alive, dead = entry(tmp_path, os.getpid()), entry(tmp_path, done.pid)
    paths.register(alive)
    paths.register(dead)
    Path(dead.socket).touch()
    (runtime / "foreign.json").write_text("[]")
    assert paths.find_running_daemons() == [alive]
    assert not Path(dead.socket).exists()
    paths.unregister(Path(alive.socket))
    assert paths.find_running_daemons() == []


def test_a_socket_path_never_grows_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, "/" + "deep/" * 30)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert len(str(paths.socket_of(paths.Home(Path("/x"))))) <= paths.MAX_SOCKET_PATH_BYTES
    assert paths.runtime_directory() == Path(f"/tmp/agora-{os.getuid()}")


def test_a_runtime_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises((PermissionError, FileExistsError)):
        paths.make_private(tmp_path / "link")
