"""`swarm launch`: starts daemons of a run through ssh, Slurm, Kubernetes or SkyPilot, and ends them politely.

Each tool gets the job in its own language and is called as its users call it. An invite may be a secret: it travels in
a file, a Secret, a variable of the environment or on standard input, never as an argument.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from agora_protocol.errors import AgoraError
from agora_protocol.ids import RunId
from agora_protocol.invite import SCHEME, Invite

from agora import __version__
from agora.cli import console, status_command
from agora.cli.console import EXIT_DONE, EXIT_STALLED, EXIT_USAGE, Failure
from agora.node import daemon_registry, paths, runs
from agora.node.control import control_client

Tool = Literal["ssh", "slurm", "kubernetes", "skypilot"]
TOOLS: Final[tuple[Tool, ...]] = ("ssh", "slurm", "kubernetes", "skypilot")
MAX_COUNT: Final = 1000
LEAVE_TIMEOUT_S: Final = 30  # for a daemon to leave, which takes about 10 s, before a tool kills it
PORT: Final = 31330
POLL_INTERVAL_S: Final = 3.0
INVITE_VARIABLE: Final = "SWARM_INVITE"  # without the prefix of settings
PACKAGE: Final = f"agora-swarm=={__version__}"
_GPUS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(?::[1-9][0-9]?)?")
_HOST: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@:%-]{0,254}")
_INVITE_END: Final = "END_OF_INVITE"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The flags of `swarm launch`.

    gpus: a kind as the tool knows it, such as H100 or H100:4; "" for none. hosts: of ssh. package: what pip installs.
    program: agora-node where it is installed already, "" to install it. image: the container of Kubernetes.
    """

    tool: Tool
    count: int = 1
    gpus: str = ""
    hosts: tuple[str, ...] = ()
    package: str = PACKAGE
    program: str = ""
    image: str = "agora-node"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of this machine. input: for its standard input. environment: further variables."""

    arguments: tuple[str, ...]
    input: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """What a tool gets: files by name, to be written beside each other, and the commands that start and end it."""

    files: Mapping[str, str]
    up: tuple[Command, ...]
    down: tuple[Command, ...]
    logs: str  # how to see what the daemons say


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
    label = label_of(name)
    match request.tool:
        case "ssh":
            return _ssh_job(request, label, invite)
        case "slurm":
            return _slurm_job(request, label, invite, folder)
        case "kubernetes":
            return _kubernetes_job(request, label, invite, folder)
        case "skypilot":
            return _skypilot_job(request, label, invite, folder)


def label_of(name: str) -> str:
    """Returns agora-NAME as all tools accept it: lower case letters, digits and hyphens, at most 40 characters."""
    return f"agora-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'run'}"[:40].rstrip("-")


def _ssh_job(request: LaunchRequest, label: str, invite: str) -> Job:
    install, program = "", shlex.quote(request.program)
    if not request.program:
        program = '"$dir/venv/bin/agora-node"'
        install = f"""\
[ -x "$dir/venv/bin/agora-node" ] || {{
  python3 -m venv "$dir/venv" && "$dir/venv/bin/pip" install --quiet {shlex.quote(request.package)}
}}
"""
    # The home directory is the other machine's: only $HOME in it is expanded there.
    start = f"""\
set -eu
umask 077
dir="$HOME/.local/share/agora-launch/{label}"
mkdir -p "$dir"
cat > "$dir/invite" <<'{_INVITE_END}'
{invite}
{_INVITE_END}
{install}nohup setsid {program} join "$dir/invite" --dir "$dir/data" --device all >> "$dir/log.txt" 2>&1 < /dev/null &
echo "started; its log is $dir/log.txt"
"""
    stop = f"""\
set -eu
dir="$HOME/.local/share/agora-launch/{label}"
{program} leave --dir "$dir/data"
"""
    ssh = ("ssh", "-o", "BatchMode=yes")
    return Job(
        files={"start.sh": _hide(invite, start)},
        up=tuple(Command((*ssh, host, "sh", "-s"), start) for host in request.hosts),
        down=tuple(Command((*ssh, host, "sh", "-s"), stop) for host in request.hosts),
        logs=f"ssh {request.hosts[0]} tail -f .local/share/agora-launch/{label}/log.txt",
    )


def _slurm_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    kind, _, number = request.gpus.partition(":")
    gpus = f"#SBATCH --gres=gpu:{kind}:{number or 1}\n" if kind else ""
    place, program = shlex.quote(str(folder)), shlex.quote(request.program or "agora-node")
    text = f"""\
#!/bin/sh
# One daemon for each task of the array. {folder} must be on a file system that the nodes share.
#SBATCH --job-name={label}
#SBATCH --array=1-{request.count}
#SBATCH --ntasks=1
{gpus}#SBATCH --output="{folder}/%a.log"
#SBATCH --open-mode=append
#SBATCH --requeue
# It leaves its run in order when the time is over, or when the job is preempted.
#SBATCH --signal=B:TERM@{LEAVE_TIMEOUT_S}
exec {program} join {place}/invite --dir {place}/node-"$SLURM_ARRAY_TASK_ID" --device all
"""
    return Job(
        files={"job.sbatch": text, "invite": f"{invite}\n"},
        up=(Command(("sbatch", str(folder / "job.sbatch"))),),
        # --full: the batch script itself, which is the daemon, gets the signal.
        down=(Command(("scancel", "--signal=TERM", "--full", f"--name={label}")),),
        logs=f"tail -f {place}/*.log",
    )


def _kubernetes_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    kind, _, number = request.gpus.partition(":")
    limits = f"\n          resources:\n            limits:\n              nvidia.com/gpu: {number or 1}" if kind else ""
    chosen = f"\n      nodeSelector:\n        nvidia.com/gpu.product: {json.dumps(kind)}" if kind else ""
    text = f"""\
# One daemon for each pod, with a volume of its own: its key, checkpoints and caches survive a restart.
apiVersion: v1
kind: Secret
metadata:
  name: {label}
stringData:
  invite: {json.dumps(invite)}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {label}
spec:
  serviceName: {label}
  replicas: {request.count}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      app: {label}
  template:
    metadata:
      labels:
        app: {label}
    spec:
      terminationGracePeriodSeconds: {LEAVE_TIMEOUT_S}
      # The variables AGORA_..._PORT of services would be taken for settings.
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        fsGroup: 10001{chosen}
      containers:
        - name: agora-node
          image: {json.dumps(request.image)}
          args: ["join", "/run/agora-invite/invite", "--dir", "/data", "--device", "all"]
          env:
            - name: AGORA_RUNTIME_DIR
              value: /tmp/agora{limits}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: ["ALL"]
          volumeMounts:
            - name: data
              mountPath: /data
            - name: invite
              mountPath: /run/agora-invite
              readOnly: true
      volumes:
        - name: invite
          secret:
            secretName: {label}
            defaultMode: 0440
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: ["ReadWriteOnce"]
        resources:
          requests:
            storage: 50Gi
"""
    file = str(folder / "job.yaml")
    return Job(
        files={"job.yaml": text},
        up=(Command(("kubectl", "apply", "-f", file)),),
        down=(Command(("kubectl", "delete", "-f", file)),),  # the volumes stay
        logs=f"kubectl logs -f -l app={label}",
    )


def _skypilot_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    gpus = f"  accelerators: {request.gpus}\n" if request.gpus else ""
    text = f"""\
# Machines that SkyPilot finds and rents near each other; one daemon on each.
name: {label}
num_nodes: {request.count}
resources:
{gpus}  ports: {PORT}
secrets:
  {INVITE_VARIABLE}: null
setup: |
  pip install --quiet {shlex.quote(request.package)}
run: |
  umask 077
  printf '%s\\n' "${INVITE_VARIABLE}" > ~/agora-invite
  exec agora-node join ~/agora-invite --dir ~/agora-data --listen 0.0.0.0:{PORT} --device all
"""
    launch = ("sky", "launch", "--yes", "--detach-run", "--cluster", label, "--secret", INVITE_VARIABLE)
    return Job(
        files={"job.yaml": text},
        up=(Command((*launch, str(folder / "job.yaml")), environment={INVITE_VARIABLE: invite}),),
        # Cancelled first: the daemons leave their run; taking the machines away does not ask them.
        down=(Command(("sky", "cancel", "--yes", "--all", label)), Command(("sky", "down", "--yes", label))),
        logs=f"sky logs {label}",
    )


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
    """Starts the daemons and waits at most `wait_s` seconds until the run's status shows as many peers more.

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
    for command in commands:
        _run(command)
    joined: list[str] = []
    wanted = len(request.hosts) or request.count
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
    console.print_to_stderr(f"{len(joined)} of {wanted} have joined after {wait_s:.0f} s; see {job.logs}")
    return EXIT_STALLED


def find_invite(run: str, home: paths.Home, *, is_needed: bool) -> tuple[str, str]:
    """Returns the run's name and an invite: the one given, else that of a daemon that runs here. "" if not needed.

    Raises Failure if there is none, and what runs.resolve raises.
    """
    if run == runs.STDIN or run.startswith(SCHEME) or (Path(run).is_file() and not run.endswith(".toml")):
        reference = runs.resolve(run, home)
        invite = Invite(RunId(reference.run), reference.addresses[:16], reference.name, reference.ticket)
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


def _hide(invite: str, text: str) -> str:
    return text.replace(invite, "(the invite)") if invite else text


def _print_job(job: Job, commands: Sequence[Command], invite: str, as_json: bool) -> None:
    files = {name: _hide(invite, text) for name, text in job.files.items()}
    if as_json:
        shown: dict[str, Any] = {"files": files, "commands": [list(command.arguments) for command in commands]}
        console.print_json({"schema": 1, "dry_run": True} | shown)
        return
    for name, text in files.items():
        console.print_to_stdout(f"# --- {name}\n{text}")
    for command in commands:
        console.print_to_stdout(f"$ {shlex.join(command.arguments)}")
