"""Claims about where things live, who holds a data directory, and how daemons are found."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agora_protocol.errors import LocalError

from agora.node import daemon_registry, paths
from agora.node.daemon_registry import DaemonEntry
from agora.node.process.main import lock_file


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: that of tmp_path may not, and would be skipped."""
    with tempfile.TemporaryDirectory(prefix="agora-test-", dir="/tmp") as folder:
        yield Path(folder)


def entry(tmp_path: Path, pid: int, name: str = "poems") -> DaemonEntry:
    home = paths.Home(tmp_path / f"home-{pid}")
    return DaemonEntry("a" * 64, name, "", "", pid, str(home.root), str(daemon_registry.socket_of(home)))


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
        "import os, signal, sys; from pathlib import Path; from agora.node.process.main import lock_file\n"
        "with lock_file(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "daemon.lock")], check=False, timeout=60)
    with lock_file(tmp_path / "daemon.lock"):
        pass


def test_running_daemons_are_found_and_dead_ones_swept(tmp_path: Path, runtime: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    alive, dead = entry(tmp_path, os.getpid()), entry(tmp_path, done.pid)
    daemon_registry.register(alive)
    daemon_registry.register(dead)
    Path(dead.socket).touch()
    (runtime / "foreign.json").write_text("[]")
    assert daemon_registry.find_running_daemons() == [alive]
    assert not Path(dead.socket).exists()
    daemon_registry.unregister(Path(alive.socket))
    assert daemon_registry.find_running_daemons() == []


def write_entry(directory: Path, name: str, pid: int, socket: Path) -> None:
    fields = {"run": "", "name": "", "founder": "", "peer": "", "pid": pid, "root": "/", "socket": str(socket)}
    (directory / f"{name}.json").write_text(json.dumps(fields))


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_daemon_that_has_ended_is_gone_before_its_parent_asks_how(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie until the block ends
        assert psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE
        daemon_registry.register(entry(tmp_path, ended.pid))
        assert not entry(tmp_path, ended.pid).is_alive and not daemon_registry.find_running_daemons()


@pytest.mark.parametrize("pid", ["dead", "alive"])
@pytest.mark.parametrize("place", ["outside", "another name", "above", "through a link"])
def test_an_entry_names_no_file_but_the_socket_beside_it(tmp_path: Path, runtime: Path, pid: str, place: str) -> None:
    """Neither is a file elsewhere removed for a dead daemon, nor a socket elsewhere asked for a living one."""
    (tmp_path / "elsewhere").mkdir()
    (runtime / "link").symlink_to(tmp_path / "elsewhere")
    victim = {
        "outside": tmp_path / "elsewhere" / "x.sock",
        "another name": runtime / "y.sock",
        "above": runtime / ".." / "elsewhere" / "x.sock",
        "through a link": runtime / "link" / "x.sock",
    }[place]
    victim.write_text("years of work")
    victim.with_suffix(".json").write_text("{}")
    write_entry(runtime, "x", os.getpid() if pid == "alive" else dead_pid(), victim)
    assert daemon_registry.find_running_daemons() == []
    assert victim.read_text() == "years of work" and victim.with_suffix(".json").exists()


@pytest.mark.parametrize("how", ["others may write", "a group may write", "a link"])
def test_a_directory_that_others_can_fill_is_neither_asked_nor_swept(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shared = short_path / "tmp"  # as /tmp: whoever comes first makes what lies in it
    shared.mkdir()
    shared.chmod(0o1777)
    directory = shared / "agora-0"
    real = short_path / "real" if how == "a link" else directory
    real.mkdir(mode=0o700)
    if how == "a link":
        directory.symlink_to(real)
    else:
        real.chmod(0o777 if how == "others may write" else 0o770)
    write_entry(real, "x", dead_pid(), directory / "x.sock")
    (real / "x.sock").touch()
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(directory))
    with pytest.raises(paths.UntrustedDirectory, match=rf"{paths.RUNTIME_VARIABLE}|chmod 700"):
        daemon_registry.find_running_daemons()
    assert (real / "x.sock").exists()
    with pytest.raises(OSError, match="chmod 700|link or a file|exists"):
        paths.make_private(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("parent_mode", [0o1777, 0o755])
def test_a_foreign_directory_is_asked_by_root_alone_and_only_where_root_made_it(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, parent_mode: int
) -> None:
    """0755: /run, where systemd has made it for a service. 1777: /tmp, where anybody can have made it."""
    parent = short_path / "parent"
    parent.mkdir()
    parent.chmod(parent_mode)
    directory = parent / "agora"
    directory.mkdir(mode=0o700)
    write_entry(directory, "x", os.getpid(), directory / "x.sock")
    os.chown(directory, 65534, 65534)
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(directory))
    if parent_mode == 0o755:
        assert [entry.pid for entry in daemon_registry.find_running_daemons()] == [os.getpid()]
    else:
        with pytest.raises(paths.UntrustedDirectory, match="another user"):
            daemon_registry.find_running_daemons()
    with pytest.raises(PermissionError, match="another user"):
        paths.make_private(directory)


def test_a_socket_path_never_grows_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, "/" + "deep/" * 30)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert len(str(daemon_registry.socket_of(paths.Home(Path("/x"))))) <= paths.MAX_SOCKET_PATH_BYTES
    assert paths.runtime_directory() == Path(f"/tmp/agora-{os.getuid()}")


def test_a_runtime_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises((PermissionError, FileExistsError)):
        paths.make_private(tmp_path / "link")


def test_a_directory_on_a_file_system_without_locks_is_refused_with_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", _lack_locks)
    match = "on a file system without locks .No locks available.*a directory on a disk of this machine with --dir"
    with pytest.raises(LocalError, match=match), lock_file(tmp_path / "daemon.lock"):
        raise AssertionError("nobody would notice a second daemon")


def _lack_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")
