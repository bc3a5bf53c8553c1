"""Prints and ends all commands alike: exit codes, one sentence for an error, progress, only JSON on standard output."""

from __future__ import annotations

import atexit
import errno
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from packaging.version import Version

import agora
from agora.core.terminal_text import printable

if TYPE_CHECKING:
    from rich.progress import Progress

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 3
EXIT_STALLED = 4  # or unreachable
# The variables from which torch reads its allocator's settings. Before 2.9 it knows only the last two.
NAMED_SINCE = Version("2.9")
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
PROGRESS_LINE_INTERVAL_S = 2.0  # seconds between two lines of a ProgressDisplay that has no terminal

RUN = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A manifest file, an invite, a file with an invite (- for stdin), or a joined run's name."
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Exactly one JSON object on standard output, all else on stderr.")]
DIRECTORY = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The data directory; default $AGORA_HOME or ~/.local/share/agora."),
]
AVERAGE = Annotated[
    bool, typer.Option("--average/--no-average", help="The moving average of the weights, or those of the last step.")
]
CHECKPOINTS = Annotated[
    list[Path] | None,
    typer.Option("--dir", metavar="DIR", help="A data directory with checkpoints of the run; may be repeated."),
]
LINK = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,RTT[,JITTER[,LOSS]]",
        help="Emulate a link such as 200Mbit,50ms for each daemon started; see docs/use/links.md. Default none.",
    ),
]


class Failure(Exception):
    """Raised to end a command with exit code `code`; the text is one sentence: what is wrong, and what to do."""

    def __init__(self, text: str, code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.code = code


def new_app(summary: str, name: str | None = None) -> typer.Typer:
    """summary: the help text, also printed without arguments. name: that of a program with several commands, which then
    has --version.
    """
    app = typer.Typer(
        name=name,
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    if name is not None:
        app.callback()(_take_options)
    return app


def _print_version(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        print(f"{context.command.name} {agora.__version__}")
        raise typer.Exit


def _take_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version  # its callback has printed it
    prefer_expandable_segments(os.environ, importlib.metadata.version("torch"))


def prefer_expandable_segments(environment: MutableMapping[str, str], torch_version: str) -> None:
    """Sets torch's CUDA allocator to segments that grow, unless the user has set it; must come before torch's import.

    Graphs of many sizes leave gaps between fixed segments: a card then runs out of memory with gigabytes free. Without
    a GPU the setting does nothing.
    """
    if not any(name in environment for name in ALLOCATOR_SETTINGS):
        name = ALLOCATOR_SETTINGS[Version(torch_version) < NAMED_SINCE]
        environment[name] = "expandable_segments:True"


def print_to_stderr(text: str) -> None:
    """Prints `text` and a newline on standard error, with "?" for unprintable characters except newlines and tabs."""
    print(printable(text), file=sys.stderr, flush=True)


def print_to_stdout(text: str, end: str = "\n") -> None:
    """Prints `text` and `end` on standard output, with "?" for unprintable characters except newlines and tabs."""
    print(printable(text), end=end, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Prints `value` as a JSON object on one line of standard output. Raises ValueError for NaN and infinity."""
    print(json.dumps(value, allow_nan=False), flush=True)


def open_closed_streams() -> None:
    """Opens standard input, output and error on the null device, as far as the process was started without them.

    A file or socket that is opened later would get the number of a closed one: what children print would go into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def begin_again_in_utf8() -> None:
    """Replaces the process by the same command in Python's UTF-8 mode, if its locale has another encoding than UTF-8.

    Manifests, tickets and peers name files and data directories in UTF-8: in an ASCII locale these could neither be
    opened nor hashed, and in a Latin one they would be other files than those of the other machines. Standard streams
    keep the locale's encoding, in which what it lacks is printed as backslash escapes.
    """
    is_tried = os.environ.get("PYTHONUTF8") == "1" or sys.flags.ignore_environment
    if is_tried or sys.getfilesystemencoding().lower() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding or 'ascii'}:backslashreplace")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(app: typer.Typer) -> None:
    """Runs the command, prints an exception as one sentence, and ends the process; 130 after Ctrl-C. See `explain` for
    the codes.
    """
    open_closed_streams()
    begin_again_in_utf8()
    try:
        app()
        code = EXIT_DONE
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print_to_stderr(ended.code)
        code = ended.code if isinstance(ended.code, int) else EXIT_FAILED if ended.code else EXIT_DONE
    except KeyboardInterrupt:
        print_to_stderr("error: stopped")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    except Exception as error:
        text, code = explain(error)
        print_to_stderr(f"error: {text}")
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Ends the process with exit code `code` after what is registered with atexit, whatever its threads are doing."""
    # The interpreter takes daemon threads away when it ends: one in the middle of C++ code, such as a device's job that
    # was not waited for, then aborts the process. A service manager would take that for a crash.
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def explain(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code of an error. An unexpected one's traceback goes to a new file that the sentence
    names.
    """
    from agora_protocol.errors import AgoraError, InputError

    if isinstance(error, Failure):
        return str(error), error.code
    if isinstance(error, InputError):
        return str(error), EXIT_USAGE
    if isinstance(error, AgoraError):
        return str(error), int(getattr(error, "exit_code", EXIT_FAILED))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = error.filename or "what the command writes or prints"
        return f"no space is left for {what} ({error.strerror}); free some, or write it to another disk", EXIT_FAILED
    try:
        handle, details = tempfile.mkstemp(prefix="agora-error-", suffix=".txt", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        details = "no file (none could be written)"
    return f"{type(error).__name__}: {error}; the details are in {details}, please report them", EXIT_FAILED


class ProgressDisplay:
    """Shows on standard error how far work has come: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str, total: float | None = None) -> None:
        """what: names the work. total: its amount, in bytes for `advance`, any unit for `show`; None if unknown."""
        self._what = what
        self._total = total
        self._done = 0.0
        self._began = self._last_line = time.monotonic()
        self._last_text = what
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        if not sys.stderr.isatty():
            print_to_stderr(self._what)
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.add_task(printable(self._what), total=self._total)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, nbytes: int) -> None:
        """Adds `nbytes` to the bytes done so far, and shows the sum in MB, with the total if it is known."""
        self._done += nbytes
        total = f" of {self._total / 1e6:,.0f}" if self._total else ""
        self.show(self._done, f"{self._what}  {self._done / 1e6:,.0f}{total} MB")

    def show(self, done: float, text: str) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=printable(text))
        elif now - self._last_line >= PROGRESS_LINE_INTERVAL_S and text != self._last_text:
            print_to_stderr(f"{text}  {now - self._began:.0f} s")
            self._last_line, self._last_text = now, text

    def note(self, text: str) -> None:
        """Prints `text` immediately, as a line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(text), highlight=False, markup=False)
        else:
            print_to_stderr(text)
