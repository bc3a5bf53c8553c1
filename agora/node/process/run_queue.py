"""A queue of runs: when one is over, or does not take this machine, the process becomes the daemon of the next one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from agora_protocol.errors import AgoraError, InputError, LocalError, OutOfMemory
from agora_protocol.invite import SCHEME

from agora.core.optional_packages import PackageMissing
from agora.core.terminal_text import one_line
from agora.node import paths, runs
from agora.node.settings import DONE_VARIABLE, Settings, without_settings

# The exit code of a device's daemon whose run is over, or refuses it, while others are queued: read by its supervisor.
EXIT_FOR_NEXT_RUN: Final = 5
MAX_WHY_CHARACTERS: Final = 200
# The codes of errors that this machine cannot help in this run, and that another run may be without.
CODES_OF_RUNS: Final = ("unreachable", "run-full", "base-model", "data-missing", "files-not-allowed")

LeftRuns = tuple[tuple[str, str], ...]  # of each run that was left: its name, and why the next one was joined


def another_run_may_succeed(error: AgoraError) -> bool:
    """Returns whether another run may be joined after this error: True if it comes from the run, False if from this
    machine.
    """
    if isinstance(error, LocalError):
        return isinstance(error, OutOfMemory | PackageMissing) or error.code in CODES_OF_RUNS
    return True


def check_queue(queued: Sequence[str], home: paths.Home) -> tuple[str, ...]:
    """Returns the name of each queued run, or its id where no name is known.

    Raises InputError or ManifestError for one that names no run, so that a mistake shows now and not in a week.
    """
    if runs.STDIN in queued:
        raise InputError("Standard input can hold the first run alone; put the other invites into files.")
    found = [runs.resolve(text, home) for text in queued]
    return tuple(reference.name or reference.run[:12] for reference in found)


def runs_left_before(environment: Mapping[str, str] = os.environ) -> LeftRuns:
    """Returns the runs that this process has left before, as `join_next` has noted them."""
    try:
        return tuple((str(name), str(why)) for name, why in json.loads(environment.get(DONE_VARIABLE, "[]")))
    except (ValueError, TypeError):
        return ()


def join_next(home: paths.Home, chosen: Settings, done: LeftRuns) -> NoReturn:
    """Replaces this process, with its number, by the daemon of the first of `chosen.queue`. Raises OSError.

    Not a loop: torch keeps memory and threads of the former run.
    """
    following, *later = chosen.queue
    settings = chosen.model_copy(update={"queue": tuple(later)})
    environment = {
        **without_settings(os.environ),
        **settings.to_environment(),
        DONE_VARIABLE: json.dumps([[name, one_line(why, MAX_WHY_CHARACTERS)] for name, why in done]),
    }
    if following.startswith(SCHEME):  # it may hold a ticket, and arguments are seen in `ps`
        reading, writing = os.pipe()
        os.write(writing, following.encode())
        os.close(writing)
        os.dup2(reading, 0)
        following = runs.STDIN
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "agora.cli.main_node", "join", "--dir", str(home.root), "--", following]
    os.execve(sys.executable, command, environment)
