"""`swarm launch`: starts daemons of a run through ssh, Slurm, Kubernetes or SkyPilot, and ends them politely.

The jobs are written in agora/cli/launch_jobs; this module finds the invite, runs a job's commands and waits for joins.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import AgoraError
from agora_protocol.ids import RunId
from agora_protocol.invite import SCHEME, Invite
from agora_protocol.limits import MAX_ADDRESSES

from agora.cli import console, launch_jobs, status_command
from agora.cli.console import EXIT_DONE, EXIT_STALLED, EXIT_USAGE, Failure
from agora.cli.launch_jobs.job import TOOLS, Command, Job, LaunchRequest, Tool, hide
from agora.node import daemon_registry, paths, runs
from agora.node.control import control_client

MAX_COUNT: Final = 1000
POLL_INTERVAL_S: Final = 3.0
_GPUS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(?::[1-9][0-9]?)?")
_HOST: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@:%-]{0,254}")


def tool_of(name: str) -> Tool:
    """Returns the tool of that name. Raises Failure with the usage code."""
    for tool in TOOLS:
        if tool == name:
            return tool
    raise Failure(f"--on {name}: no such tool; say one of {', '.join(TOOLS)}", EXIT_USAGE)


def check_request(request: LaunchRequest) -> None:
    """Raises Failure, with the usage code, for flags that do not go together or cannot be put into a job."""
    if not 1 <= request.count <= MAX_COUNT:
        raise Failure(f"--count {request.count}: give 1 to {MAX_COUNT} machines", EXIT_USAGE)
    if request.gpus and not _GPUS.fullmatch(request.gpus):
        raise Failure(
            f"--gpus {request.gpus!r} is no kind of GPU; write H100, or H100:4 for four in each machine", EXIT_USAGE
        )
    if request.tool == "ssh":
        if not request.hosts:
            raise Failure("ssh needs the machines; give each as --host USER@HOST", EXIT_USAGE)
        if bad := next((host for host in request.hosts if not _HOST.fullmatch(host)), None):
            raise Failure(f"--host {bad!r} is no host; write HOST or USER@HOST", EXIT_USAGE)
    elif request.hosts:
        raise Failure("--host is for --on ssh; the other tools find machines themselves, give --count", EXIT_USAGE)


def job_of(request: LaunchRequest, name: str, invite: str, folder: Path) -> Job:
    """Returns the job of a run called `name`, whose files will lie in `folder`. Pure."""
    return launch_jobs.JOBS[request.tool](request, label_of(name), invite, folder)


def label_of(name: str) -> str:
    """Returns agora-NAME as all tools accept it: lower case letters, digits and hyphens, at most 40 characters."""
    return f"agora-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'run'}"[:40].rstrip("-")


# --- what the command does


def launch(
    run: str,
    request: LaunchRequest,
    directory: Path | None,
    *,
    is_dry: bool,
    is_down: bool,
    wait_s: float,
    as_json: bool,
) -> int:
    """Starts the daemons and waits at most `wait_s` seconds until the run's status shows their peers.

    is_dry: prints files and commands, and does nothing. is_down: ends what an earlier launch has started. Returns the
    exit code: EXIT_STALLED if peers are missing in the end. Raises Failure.
    """
    check_request(request)
    home = paths.home_at(directory)
    name, invite = find_invite(run, home, is_needed=not is_down)
    folder = home.root / "launched" / f"{label_of(name)}-{request.tool}"
    job = job_of(request, name, invite, folder)
    commands = job.down if is_down else job.up
    if is_dry:
        _print_job(job, commands, invite, as_json)
        return EXIT_DONE
    before = {} if is_down else _peers_of(run, home)
    if not is_down:
        _write_files(folder, job.files)
    _run_all(commands, independent=request.tool == "ssh")
    joined: list[str] = []
    wanted = peers_of_job(request)
    if not is_down:
        console.print_to_stderr(f"submitted; see {job.logs}")
        joined = follow_joins(lambda: _peers_of(run, home), before, wanted, wait_s)
    if as_json:
        files = [str(folder / file) for file in job.files]
        console.print_json({"schema": 1, "on": request.tool, "files": files, "joined": joined})
    elif is_down:
        console.print_to_stderr("its daemons have been told to leave")
    if is_down or len(joined) >= wanted or not wait_s:
        return EXIT_DONE
    console.print_to_stderr(f"{len(joined)} of {wanted} peers have joined after {wait_s:.0f} s; see {job.logs}")
    return EXIT_STALLED


def peers_of_job(request: LaunchRequest) -> int:
    """Returns how many peers the job makes: one for each card of each machine, as `--gpus KIND:N` tells them.

    One for each machine where that says no number: of a machine's cards nothing else is known before it runs.
    """
    cards = int(request.gpus.partition(":")[2] or 1)
    return (len(request.hosts) or request.count) * cards


def find_invite(run: str, home: paths.Home, *, is_needed: bool) -> tuple[str, str]:
    """Returns the run's name and an invite: the one given, else that of a daemon that runs here. "" if not needed.

    Raises Failure if there is none, and what runs.resolve raises.
    """
    if run == runs.STDIN or run.startswith(SCHEME) or (Path(run).is_file() and not run.endswith(".toml")):
        reference = runs.resolve(run, home)
        invite = Invite(RunId(reference.run), reference.addresses[:MAX_ADDRESSES], reference.name, reference.ticket)
        return reference.name or reference.run[:12], str(invite)
    entries = runs.entries_of_run(run, home, daemon_registry.find_running_daemons())
    for entry in entries:
        try:
            return entry.name, str(control_client.ask(Path(entry.socket), "invite")["invite"])
        except (control_client.DaemonUnreachable, control_client.DaemonRefused):
            continue
    if not is_needed:
        return runs.resolve(run, home).name, ""
    raise Failure(
        f"no daemon of {run} answers on this machine; give an invite (agora://...), or start the run here first"
    )


def follow_joins(
    peers_of: Callable[[], Mapping[str, str]],
    before: Mapping[str, str],
    wanted: int,
    wait_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Prints each peer that was not there before, until `wanted` are; returns their ids.

    peers_of: the names of the run's present peers by id, {} if nobody answers.
    """
    deadline = now() + wait_s
    joined: list[str] = []
    while len(joined) < wanted and now() < deadline:
        for peer, name in peers_of().items():
            if peer not in before and peer not in joined:
                joined.append(peer)
                console.print_to_stderr(f"joined: {name} ({len(joined)} of {wanted})")
        if len(joined) < wanted:
            sleep(POLL_INTERVAL_S)
    return joined


def _peers_of(run: str, home: paths.Home) -> Mapping[str, str]:
    try:
        status = status_command.fetch(run, home)
    except AgoraError:
        return {}
    return {peer["peer"]: peer["name"] for peer in status["peers"] if peer["state"] != "leaving"}


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise Failure(f"cannot write in {folder} ({error.strerror}); choose another directory with --dir") from None


def _run_all(commands: Sequence[Command], *, independent: bool) -> None:
    # independent: of hosts of which one may be down: the others are started all the same, and told to leave.
    failures = []
    for command in commands:
        try:
            _run(command)
        except Failure as failure:
            if not independent:
                raise
            failures.append(str(failure))
    if failures:
        raise Failure("; ".join(failures))


def _run(command: Command) -> None:
    shown = shlex.join(command.arguments)
    try:
        done = subprocess.run(
            command.arguments,
            input=command.input.encode(),
            env={**os.environ, **command.environment},
            stdout=sys.stderr,  # standard output is for --json
            check=False,
        )
    except FileNotFoundError:
        raise Failure(
            f"{command.arguments[0]} is not installed here; install it, or see --dry-run for the job"
        ) from None
    if done.returncode:
        raise Failure(f"`{shown}` ended with exit code {done.returncode}; its reason stands above")


def _print_job(job: Job, commands: Sequence[Command], invite: str, as_json: bool) -> None:
    files = {name: hide(invite, text) for name, text in job.files.items()}
    if as_json:
        shown: dict[str, Any] = {"files": files, "commands": [list(command.arguments) for command in commands]}
        console.print_json({"schema": 1, "dry_run": True} | shown)
        return
    for name, text in files.items():
        console.print_to_stdout(f"# --- {name}\n{text}")
    for command in commands:
        console.print_to_stdout(f"$ {shlex.join(command.arguments)}")
