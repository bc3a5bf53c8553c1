"""How every command prints and ends: exit codes, one sentence for an error, JSON alone on standard output.

Knows: streams and exit codes. Must not know: any command; imports the standard library and typer only.

Exit codes: 0 done, 1 failed, 2 bad arguments, 3 degraded, 4 stalled or unreachable.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Annotated, Any

import typer

DONE = 0
FAILED = 1
USAGE = 2
DEGRADED = 3
STALLED = 4

RUN = Annotated[str, typer.Argument(metavar="RUN", help="A manifest file, an invite, or the name of a joined run.")]
LINK = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,RTT[,JITTER[,LOSS]]",
        help="Put each daemon behind a link such as 200Mbit,50ms; see docs/links.md. Default the network as it is.",
    ),
]


class Failure(Exception):
    """Ends a command with exit code `code` and one sentence that says what is wrong and what to do."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


def new_app(summary: str) -> typer.Typer:
    """Returns a typer application without commands, which prints plain text and leaves errors to `run`."""
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def print_line(text: str) -> None:
    """Prints a line for people on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Prints the one JSON object of a command on standard output."""
    print(json.dumps(value, allow_nan=False), flush=True)


def run(app: typer.Typer) -> None:
    """Runs a command line and ends the process with its exit code; no error shows a traceback."""
    try:
        app()
        return
    except KeyboardInterrupt:
        text, code = "stopped", 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:
        text, code = explain(error)
    print_line(f"error: {text}")
    sys.exit(code)


def explain(error: Exception) -> tuple[str, int]:
    """Returns the sentence and the exit code for an error; the sentence names the file with an unforeseen traceback."""
    from agora_protocol.errors import AgoraError, InputError

    if isinstance(error, Failure):
        return str(error), error.code
    if isinstance(error, InputError):
        return str(error), USAGE
    if isinstance(error, AgoraError):
        return str(error), int(getattr(error, "exit_code", FAILED))
    return f"{type(error).__name__}: {error}; the details are in {_write_traceback(error)}, please report them", FAILED


def _write_traceback(error: Exception) -> str:
    """Writes an error's traceback to a temporary file and returns the file's path."""
    try:
        handle, path = tempfile.mkstemp(prefix="agora-error-", suffix=".txt", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return "no file (none could be written)"
    return path
