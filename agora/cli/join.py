"""What `agora-node` does: start the daemon in this process, or tell a running one something.

Knows: how to find the daemon that is meant. Must not know: how the daemon works.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agora.cli.console import Failure, say
from agora.node import control_client, paths

LEAVE_SECONDS = 12.0


def join(run: str, directory: Path | None, flags: Mapping[str, Any]) -> int:
    """Runs the daemon until it leaves; its exit code."""
    from agora.node import daemon

    return daemon.run(run, paths.home_at(directory), flags)


def tell(what: str, run: str | None, directory: Path | None) -> None:
    """Asks the daemon that is meant for leave, pause or resume, and says what it answered."""
    entry = the_daemon(run, directory)
    try:
        answer = control_client.ask(Path(entry.socket), what, timeout_s=LEAVE_SECONDS)
    except control_client.DaemonRefused as error:
        raise Failure(str(error)) from None
    except control_client.DaemonUnreachable as error:
        raise Failure(
            f"the daemon with pid {entry.pid} does not answer ({error}); stop it with `kill {entry.pid}`"
        ) from None
    say(str(answer.get("text", "done")))
    if what == "leave":
        _wait_until_gone(entry)


def _wait_until_gone(entry: paths.Entry) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while entry.alive:
        if time.monotonic() > deadline:
            raise Failure(f"the daemon with pid {entry.pid} is still there; stop it with `kill -9 {entry.pid}`")
        time.sleep(0.1)
    say("it has left.")


def the_daemon(run: str | None, directory: Path | None) -> paths.Entry:
    """The one daemon that RUN and --dir mean; Failure when there is none or more than one."""
    found = paths.daemons()
    if directory is not None:
        root = str(paths.home_at(directory).root.resolve())
        found = [entry for entry in found if str(Path(entry.root).resolve()) == root]
    if run is not None:
        from agora.node import runs

        found = runs.entries_of(run, paths.home_at(directory), found)
    if not found:
        raise Failure("no such daemon runs on this machine for this user; start one with `agora-node join RUN`")
    if len(found) > 1:
        listed = "; ".join(f"{entry.name} in {entry.root} (pid {entry.pid})" for entry in found)
        raise Failure(f"several daemons run here, say which with RUN or --dir: {listed}")
    return found[0]
