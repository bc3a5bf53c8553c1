"""What the commands of `agora-node` do: ask a running daemon for something.

Knows: how to find the daemon that is meant. Must not know: how the daemon works.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agora.cli.console import Failure, print_line
from agora.node import control_client, paths

LEAVE_SECONDS = 12.0
MOVE_SECONDS = 3600.0
"""A move fetches the state of the new stages, which takes as long as the link needs."""


def leave(run: str | None, directory: Path | None) -> None:
    """Asks the daemon to leave and waits until its process has ended. Raises Failure."""
    entry = ask_and_print("leave", run, directory)
    deadline = time.monotonic() + LEAVE_SECONDS
    while entry.alive:
        if time.monotonic() > deadline:
            raise Failure(f"the daemon with pid {entry.pid} is still there; stop it with `kill -9 {entry.pid}`")
        time.sleep(0.1)
    print_line("it has left.")


def ask_and_print(
    question: str, run: str | None, directory: Path | None, timeout_s: float = LEAVE_SECONDS, **arguments: Any
) -> paths.Entry:
    """Asks the daemon that RUN and --dir mean, prints its answer's text, and returns which daemon it is.

    Raises Failure with what it refused, or with what to do when it does not answer.
    """
    entry = the_daemon(run, directory)
    try:
        answer = control_client.ask(Path(entry.socket), question, timeout_s=timeout_s, **arguments)
    except control_client.DaemonRefused as error:
        raise Failure(str(error)) from None
    except control_client.DaemonUnreachable as error:
        raise Failure(
            f"the daemon with pid {entry.pid} does not answer ({error}); stop it with `kill {entry.pid}`"
        ) from None
    print_line(str(answer.get("text", "done")))
    return entry


def the_daemon(run: str | None, directory: Path | None) -> paths.Entry:
    """Returns the one daemon that RUN and --dir mean. Raises Failure when there is none or more than one."""
    entries = paths.daemons()
    if directory is not None:
        root = str(paths.home_at(directory).root.resolve())
        entries = [entry for entry in entries if str(Path(entry.root).resolve()) == root]
    if run is not None:
        from agora.node import runs

        entries = runs.entries_of(run, paths.home_at(directory), entries)
    if not entries:
        raise Failure("no such daemon runs on this machine for this user; start one with `agora-node join RUN`")
    if len(entries) > 1:
        listed = "; ".join(f"{entry.name} in {entry.root} (pid {entry.pid})" for entry in entries)
        raise Failure(f"several daemons run here, say which with RUN or --dir: {listed}")
    return entries[0]
