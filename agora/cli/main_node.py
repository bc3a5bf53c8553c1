"""`agora-node`: what a contributor runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from agora.cli import console
from agora.core.user_paths import expand_home
from agora.node import daemon_registry, paths, run_files
from agora.node.control import control_client

app = console.new_app(
    "Contribute this machine to a training run.\n\nExample: agora-node join agora://...", "agora-node"
)

ANSWER_TIMEOUT_S = 12.0  # for a daemon's answer
END_AFTER_CLOSE_TIMEOUT_S = 3.0  # for a daemon's end once it has closed its control socket
LEAVE_TIMEOUT_S = 20.0  # for a daemon's end, which takes 10 s; more where the machine has no time for it
MOVE_TIMEOUT_S = 3600.0  # it fetches the state of the new stages, which takes as long as the link needs
RUN_OR_NONE = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Which run's daemon, where several run; a manifest, invite or name."),
]


DEVICE = Annotated[
    str | None,
    typer.Option(
        help="Where to compute: auto, cpu, cuda, cuda:1, mps; all, or cuda:0,cuda:1: a peer for each card. "
        "Default auto."
    ),
]
STAGES = Annotated[str | None, typer.Option(metavar="auto|A-B", help="The stages to hold. Default auto.")]
LISTEN = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDR", help="Where to listen, /ip4/0.0.0.0/tcp/31330, 0.0.0.0:31330 or [::]:31330; may be repeated."
    ),
]
THREADS = Annotated[int | None, typer.Option(metavar="N", help="Compute threads; default as many as its limits allow.")]
CORPUS_CACHE = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where tokenised texts are kept; default in the data directory.")
]
LOG_LEVEL = Annotated[str | None, typer.Option(help="debug, info, warning or error. Default info.")]
ALLOW_FILES = Annotated[
    bool, typer.Option("--allow-files", help="Let a run of somebody else read the files that its manifest names.")
]
DATA = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE|DIR", help="Where this machine has files that the manifest names. May be repeated."),
]
BASE_MODEL = Annotated[
    Path | None,
    typer.Option(
        "--base-model",
        metavar="DIR|ORG/NAME",
        help="The model's folder or Hub id, for runs that begin with a base model.",
    ),
]
ADAPTER = Annotated[
    Path | None,
    typer.Option(metavar="DIR|ORG/NAME", help="The adapter's folder or Hub id, for runs that go on from an adapter."),
]


UPLOAD_LIMIT = Annotated[
    str | None, typer.Option(metavar="RATE", help="The most that it sends, all traffic together: 1MB/s, 8Mbit/s.")
]
DOWNLOAD_LIMIT = Annotated[
    str | None, typer.Option(metavar="RATE", help="The most that it receives, all traffic together.")
]
MEMORY = Annotated[
    float | None, typer.Option("--memory", metavar="GIB", help="The memory that it may use, in GiB; of a GPU likewise.")
]
DISK = Annotated[
    float | None, typer.Option("--disk", metavar="GIB", help="The disk that checkpoints and caches may fill, in GiB.")
]
HOURS = Annotated[
    str | None,
    typer.Option(metavar="FROM-TO", help="The hours at which it works, such as 22-07; otherwise it is paused."),
]


WHEN_IDLE = Annotated[
    bool,
    typer.Option(
        "--when-idle", help="Pause while a person or another program uses this machine, and for 10 minutes after it."
    ),
]


NOTIFY = Annotated[bool, typer.Option("--notify", help="Show on this machine's desktop how a run ends.")]
RUNS = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="A manifest file, an invite, a file with an invite (- for stdin), or a joined run's name. Several are "
        "joined one after another: the next when one has taken its steps, or does not take this machine.",
    ),
]


COMPILE = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="auto|never",
        help="Whether layers are compiled; auto (default): on GPUs, while it trains.",
    ),
]


AT_END = Annotated[
    str | None,
    typer.Option(
        "--at-end",
        metavar="serve|leave|go-on",
        help="When the run has taken its total_steps: serve the result (default), leave, or train on.",
    ),
]


EXPORT_AT_END = Annotated[
    str | None,
    typer.Option(
        "--export-at-end",
        metavar="auto|always|never",
        help="Whether the result is then written here; auto (default): by the founder, or else one peer of stage 0.",
    ),
]


METRICS = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics at http://HOST:PORT/metrics, as 127.0.0.1:9464."),
]


PAGE = Annotated[
    bool, typer.Option("--page", help="Show the run in a browser, at http://127.0.0.1:8800; see docs/use/page.md.")
]


@app.command()
def join(
    run: RUNS,
    device: DEVICE = None,
    stages: STAGES = None,
    directory: console.DIRECTORY = None,
    listen: LISTEN = None,
    link: console.LINK = None,
    threads: THREADS = None,
    corpus_cache: CORPUS_CACHE = None,
    allow_files: ALLOW_FILES = False,
    base_model: BASE_MODEL = None,
    adapter: ADAPTER = None,
    data: DATA = None,
    upload_limit: UPLOAD_LIMIT = None,
    download_limit: DOWNLOAD_LIMIT = None,
    memory_gib: MEMORY = None,
    disk_gib: DISK = None,
    hours: HOURS = None,
    when_idle: WHEN_IDLE = False,
    notify: NOTIFY = False,
    compile_layers: COMPILE = None,
    at_end: AT_END = None,
    export_at_end: EXPORT_AT_END = None,
    metrics: METRICS = None,
    page: PAGE = False,
    log_level: LOG_LEVEL = None,
) -> None:
    """Join a run and train until stopped.

    The daemon checks this machine, finds the other peers, claims the stages that the swarm needs most and computes
    microbatches for them. The first to join a manifest signs it with its own key if it is unsigned, and prints the
    invite for the others. Stop it with Ctrl-C, SIGTERM or `agora-node leave`: it finishes what it can, hands back the
    rest, and ends within 10 seconds.

    \b
    Examples:
      agora-node join run.toml
      agora-node join agora://... --dir /data/agora --listen 0.0.0.0:31330
      agora-node join agora://... --device all
      agora-node join poems proofs --when-idle
      agora-node join - < invite.txt      (a ticket stays out of `ps` and of the shell's history)
    """
    from agora.node.process.main import run_daemon
    from agora.tuning.base.hub import absolute_name

    # By setting; None for a flag that was not given, so that the environment, the file or the default decides.
    flags: dict[str, Any] = {
        "device": device,
        "stages": stages,
        "listen": tuple(listen) if listen else None,
        "link": link,
        "threads": threads,
        "corpus_cache": str(corpus_cache.absolute()) if corpus_cache else None,
        "allow_files": allow_files or None,
        "base_model": absolute_name(base_model) if base_model else None,
        "adapter": absolute_name(adapter) if adapter else None,
        "data": tuple(str(expand_home(place).absolute()) for place in data) if data else None,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
        "memory_gib": memory_gib,
        "disk_gib": disk_gib,
        "hours": hours,
        "when_idle": when_idle or None,
        "notify": notify or None,
        "queue": tuple(run[1:]) or None,
        "compile": compile_layers,
        "at_end": at_end,
        "export_at_end": export_at_end,
        "metrics": metrics,
        "page": page or None,
        "log_level": log_level,
    }
    raise typer.Exit(run_daemon(run[0], paths.home_at(directory), flags))


@app.command()
def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Also look at this run: a manifest, invite or name.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where it would compute: auto, cpu, cuda, cuda:1.")] = None,
    directory: console.DIRECTORY = None,
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ADDR", help="Where it would listen; may be repeated.")
    ] = None,
    as_json: console.JSON = False,
) -> None:
    """Check whether this machine can join a run, and what to do if not.

    Every check has a measured value, a limit, and a remedy where it does not pass. With RUN, the run's peers are called
    and its manifest is read if this machine has it. No setting and nothing of the run is changed. Exit code 0: all
    pass; 3: something warns; 1: something fails.

    \b
    Examples:
      agora-node doctor
      agora-node doctor agora://... --listen 0.0.0.0:31330
    """
    from agora.cli import doctor_command

    flags = {"device": device, "listen": tuple(listen) if listen else None}
    given = {key: value for key, value in flags.items() if value is not None}
    raise typer.Exit(doctor_command.examine(run, paths.home_at(directory), given, as_json=as_json))


@app.command()
def leave(run: RUN_OR_NONE = None, directory: console.DIRECTORY = None, as_json: console.JSON = False) -> None:
    """Make the daemon on this machine leave its run, as SIGTERM would.

    It tells the other peers first, finishes what it holds and exits. What is not finished in time goes to
    other replicas, but for its own microbatches, which are dropped. It can join again later. The command waits until
    the daemon has exited.

    \b
    Example:
      agora-node leave
    """
    entries = _find_daemons(run, directory)
    if supervisor := entries[0].supervisor:
        with suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)
        answer: Mapping[str, Any] = {
            "text": f"leaving: the {len(entries)} daemons of this run, one for each device, end within 10 s."
        }
    else:
        answer = _ask_to_leave(entries[0])
    if not as_json:
        _print_answer(answer, as_json)
    pid = supervisor or entries[0].pid
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while daemon_registry.is_alive(pid):
        if time.monotonic() > deadline:
            text = (
                f"the daemon (pid {pid}) is still leaving after {LEAVE_TIMEOUT_S:.0f} s: this machine is very busy, or"
            )
            raise console.Failure(f"{text} its disk hangs; wait, or end it at once with `kill {pid}`")
        time.sleep(0.1)
    _print_answer({**answer, "text": "it has left."}, as_json)


@app.command()
def pause(run: RUN_OR_NONE = None, directory: console.DIRECTORY = None, as_json: console.JSON = False) -> None:
    """Pause the daemon until `agora-node resume`, restarts included.

    Within 10 s it finishes or hands back what it holds, writes its checkpoints, withdraws its claim and closes all
    connections. Its control socket, metrics and page stay; `swarm status` shows PAUSED.

    \b
    Example:
      agora-node pause
    """
    _print_answer(_ask_all("pause", run, directory), as_json)


@app.command()
def resume(run: RUN_OR_NONE = None, directory: console.DIRECTORY = None, as_json: console.JSON = False) -> None:
    """Let a paused daemon work again.

    It joins as it did at its start: it claims stages, fetches what its checkpoints lack, and serves.

    \b
    Example:
      agora-node resume
    """
    _print_answer(_ask_all("resume", run, directory), as_json)


@app.command()
def move(
    stages: Annotated[str, typer.Option(metavar="A-B", help="The stages to hold from now on; one stage is A.")],
    run: RUN_OR_NONE = None,
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Let the running daemon hold other stages, without leaving the run.

    It finishes or hands back what it holds, drops its own microbatches that do not come back in time, fetches the
    state of the new stages from their replicas and serves them. Its connections stay, and a
    microbatch that it has finished is still answered. The command ends when it serves.

    \b
    Examples:
      agora-node move --stages 2-3
      agora-node move --stages 0 --dir /data/agora
    """
    entries = _find_daemons(run, directory)
    if directory is not None:  # of one device of several
        root = str(paths.home_at(directory).root.resolve())
        entries = [entry for entry in entries if str(Path(entry.root).resolve()) == root] or entries
    if len(entries) > 1:
        listed = "; ".join(f"--dir {entry.root}" for entry in entries)
        raise console.Failure(f"a daemon runs for each device of this machine; choose one: {listed}")
    _print_answer(_ask(entries[0], "move", MOVE_TIMEOUT_S, stages=stages), as_json)


@app.command()
def ban(
    peer: Annotated[
        str, typer.Argument(metavar="PEER", help="The peer's id, 12D3KooW..., as `swarm status` lists it.")
    ],
    run: RUN_OR_NONE = None,
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Have nothing to do with a peer on this machine, in any run.

    The running daemon ends its connection at once and forgets it; a paused one notes the ban for when it resumes.
    Without a daemon, leave RUN out: the ban is then only noted for the next start. It stays in banned.txt in the data
    directory; remove the line and start again to lift it. Others go on with the peer: a founder bans it for all with
    `swarm ban`.

    \b
    Example:
      agora-node ban 12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB
    """

    if run is None and not _entries_in(directory):
        home = paths.home_at(directory)
        run_files.add_banned(home, peer)
        text = f"{peer} is banned here; no daemon runs, so it holds from the next start on."
        _print_answer({"text": text, "peer": peer}, as_json)
        return
    for other in (entries := _find_daemons(run, directory))[1:]:
        _ask(other, "ban", peer=peer)
    _print_answer(_ask(entries[0], "ban", peer=peer), as_json)


def _entries_in(directory: Path | None) -> list[daemon_registry.DaemonEntry]:
    entries = daemon_registry.find_running_daemons()
    if directory is None:
        return entries
    root = str(paths.home_at(directory).root.resolve())
    return [entry for entry in entries if str(Path(entry.root).resolve()) == root]


def _ask(
    entry: daemon_registry.DaemonEntry, question: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any
) -> Mapping[str, Any]:
    try:
        return control_client.ask(Path(entry.socket), question, timeout_s=timeout_s, **arguments)
    except control_client.DaemonRefused as error:
        raise console.Failure(str(error)) from None
    except control_client.DaemonUnreachable as error:
        text = f"the daemon with pid {entry.pid} does not answer ({error}); stop it with `kill {entry.pid}`"
        raise console.Failure(text) from None


def _ask_to_leave(entry: daemon_registry.DaemonEntry) -> Mapping[str, Any]:
    deadline = time.monotonic() + END_AFTER_CLOSE_TIMEOUT_S
    try:
        return control_client.ask(Path(entry.socket), "leave", timeout_s=ANSWER_TIMEOUT_S)
    except control_client.DaemonUnreachable as error:
        while daemon_registry.is_alive(entry.pid):
            if time.monotonic() > deadline:
                text = f"the daemon with pid {entry.pid} does not answer ({error}); stop it with `kill {entry.pid}`"
                raise console.Failure(text) from None
            time.sleep(0.1)
        return {"text": "leaving already."}
    except control_client.DaemonRefused as error:
        raise console.Failure(str(error)) from None


def _ask_all(question: Literal["pause", "resume"], run: str | None, directory: Path | None) -> Mapping[str, Any]:
    entries = _find_daemons(run, directory)
    if entries[0].supervisor:
        # One that is being started again obeys as well, and answers nothing yet.
        for home in daemon_registry.homes_of_devices(entries[0]):
            if question == "pause":
                home.paused.touch(mode=0o600)
            else:
                home.paused.unlink(missing_ok=True)
    answers = [_ask(entry, question) for entry in entries]
    return answers[0]


def _print_answer(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json({"schema": 1, **answer})
    else:
        console.print_to_stderr(str(answer.get("text", "done")))


def _find_daemons(run: str | None, directory: Path | None) -> list[daemon_registry.DaemonEntry]:
    # One daemon, or those of all devices of one run.
    entries = _entries_in(directory)
    if run is not None:
        from agora.node import runs

        entries = runs.entries_of_run(run, paths.home_at(directory), entries)
    if not entries:
        raise console.Failure("no such daemon runs on this machine for this user; start one with `agora-node join RUN`")
    supervisors = {entry.supervisor for entry in entries}
    if supervisor := entries[0].supervisor if len(supervisors) == 1 else 0:
        return [entry for entry in daemon_registry.find_running_daemons() if entry.supervisor == supervisor]
    if len(entries) > 1:
        listed = "; ".join(f"{entry.name} in {entry.root} (pid {entry.pid})" for entry in entries)
        raise console.Failure(f"several daemons run here; choose one with RUN or --dir: {listed}")
    return entries


def main() -> None:
    """Runs the command `agora-node` with the process's arguments, and ends the process with its exit code."""
    console.run(app)


if __name__ == "__main__":
    main()
