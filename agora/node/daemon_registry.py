"""The registry of the daemons that run on this machine: one file for each, by which commands find their sockets."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from agora.node.paths import (
    Home,
    UntrustedDirectory,
    distrust_reason,
    is_made_by_root,
    replace_text,
    runtime_directory,
)

SUPERVISOR_VARIABLE = "AGORA_SUPERVISOR_PID"  # of a daemon that another process runs for one device of several


@dataclass(frozen=True, slots=True)
class DaemonEntry:
    """A daemon of this machine, as the registry file next to its control socket describes it.

    run: the run's id, "" for an unsigned draft.
    name, founder: the run's.
    peer: the daemon's peer id.
    root: the daemon's data directory.
    socket: the path of its control socket.
    supervisor: the pid of the process that runs it for one device of several, 0 for none.
    """

    run: str
    name: str
    founder: str
    peer: str
    pid: int
    root: str
    socket: str
    supervisor: int = 0

    @property
    def is_alive(self) -> bool:
        return is_alive(self.pid)


def is_alive(pid: int) -> bool:
    """Returns whether a process of this user, or one that this user may signal, has the number and has not ended."""
    import psutil  # here: most commands look for no daemon, and need not wait for this import

    try:
        os.kill(pid, 0)
        # A parent may be slow to ask how it ended, and a container's first process may never do so.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except (OSError, psutil.Error):  # another user's process may have the number now
        return False


def homes_of_devices(entry: DaemonEntry) -> list[Home]:
    """Returns the data directories of the daemons of all devices of the machine, that of `entry` among them."""
    root = Path(entry.root)
    main = Home(root.parent.parent if root.parent.name == "devices" else root)
    return [main, *(Home(place) for place in sorted(main.devices.iterdir()) if place.is_dir())]


def socket_of(home: Home) -> Path:
    return runtime_directory() / f"{home.socket_stem}.sock"


def register(entry: DaemonEntry) -> None:
    """Writes the registry file by which commands find a running daemon; replaces an earlier one of its data directory.

    Raises OSError.
    """
    replace_text(Path(entry.socket).with_suffix(".json"), json.dumps(asdict(entry)))


def unregister(socket: Path) -> None:
    """Removes a daemon's socket and the registry file next to it, if they exist."""
    socket.unlink(missing_ok=True)
    socket.with_suffix(".json").unlink(missing_ok=True)


def find_running_daemons() -> list[DaemonEntry]:
    """Returns this user's running daemons from their registry files; removes the files of daemons that were killed.

    Skips files that are unreadable or malformed, or that name a socket other than the one beside them. Raises
    UntrustedDirectory if other users can put files there.
    """
    directory = runtime_directory()
    try:
        # `sudo agora-node pause` asks a service, whose directory systemd made: /run/agora of the service's own user.
        reason = distrust_reason(directory, is_services=os.getuid() == 0 and is_made_by_root(directory))
    except OSError:
        return []
    if reason:
        raise UntrustedDirectory(f"{reason}; no daemon is asked, and no file is removed there.")
    running: list[DaemonEntry] = []
    for path in sorted(directory.glob("*.json")):
        try:
            entry = DaemonEntry(**json.loads(path.read_text()))
            socket = Path(entry.socket)
            is_beside = socket.name == path.with_suffix(".sock").name and socket.parent.samefile(directory)
        except (OSError, ValueError, TypeError, RecursionError):
            continue
        if not is_beside:
            continue
        if entry.is_alive:
            running.append(entry)
        else:
            unregister(path.with_suffix(".sock"))
    return running
