"""Whether somebody else uses this machine: a person at it, or programs on its GPU or its processors.

Each observer looks at one kind of use. One that cannot tell on this machine says why, and the others decide alone.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import psutil
from agora_protocol.errors import AgoraError

from agora.core.terminal_text import one_line
from agora.node import daemon_registry

LOOK_INTERVAL_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 5.0  # seconds that each program which is asked may take
INPUT_S: Final = 120.0  # a person is at the machine until so many seconds after the last key or movement
LOAD_WINDOW_S: Final = 60.0  # seconds over which the load of others is averaged: a short peak is no use
MIN_LOAD_SPAN_S: Final = 15.0  # seconds that the first average covers at least
MIN_OTHERS_LOAD: Final = 0.25  # the share of all processors' time from which others use the machine
# The part of a GPU's time from which a program that draws uses the machine: a desktop draws a little all the time; what
# takes more is a game or a film.
MIN_DRAWING_PERCENT: Final = 20
MAX_USE_CHARACTERS: Final = 160

Observer = Callable[[], "Observation"]
RunCommand = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]  # raises OSError, SubprocessError


@dataclass(frozen=True, slots=True)
class Observation:
    """What one observer sees. use: who or what uses the machine, "" for nobody. why_unknown: it cannot tell; or ""."""

    observer: str
    use: str = ""
    why_unknown: str = ""


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Whether the daemon makes way for whoever uses the machine. present_use: at the last look, "" for nobody.

    cause: the latest use that made it make way, seen last at `seen_at`, in seconds of any clock that only grows.
    """

    present_use: str = ""
    cause: str = ""
    seen_at: float = 0.0
    makes_way: bool = False

    def pause_reason(self, now: float, idle_s: float, *, in_full: bool = False) -> str:
        """Returns the end of "this peer is ..."; "" if the daemon works.

        in_full: the text also says what uses the machine. That names persons and programs, so it is for the owner only.
        """
        if not self.makes_way:
            return ""
        what = f" ({self.cause})" if in_full else ""
        if self.present_use:
            return f"paused while its machine is in use{what}"
        ago, left = now - self.seen_at, max(0.0, self.seen_at + idle_s - now)
        return f"paused, since its machine was in use until {_duration(ago)} ago{what}; it goes on in {_duration(left)}"


def judge_use(former: MachineUse, observations: Sequence[Observation], now: float, idle_s: float) -> MachineUse:
    """Returns the use after a look at `now`: it makes way while anybody uses the machine, and idle_s seconds longer.

    An observer that cannot tell counts as one that sees nobody.
    """
    uses = [one.use for one in observations if one.use]
    if uses:
        return MachineUse(use := "; ".join(uses), use, now, makes_way=True)
    return MachineUse("", former.cause, former.seen_at, former.makes_way and now - former.seen_at < idle_s)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# --- programs that are asked


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program for at most COMMAND_TIMEOUT_S, in English. Raises OSError or SubprocessError."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )


class _CannotTell(Exception):
    pass


def _ask(run: RunCommand, *command: str) -> str:
    try:
        done = run(command)
    except FileNotFoundError:
        raise _CannotTell(f"{command[0]} is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _CannotTell(f"{command[0]} cannot be asked ({one_line(str(error), 80)})") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise _CannotTell(f"{command[0]} says: {one_line(said, 80)}")
    return done.stdout


def _observe(observer: str, look: Callable[[], str]) -> Observation:
    try:
        return Observation(observer, one_line(look(), MAX_USE_CHARACTERS))
    except (_CannotTell, AgoraError, OSError, psutil.Error) as error:
        return Observation(observer, why_unknown=one_line(str(error), MAX_USE_CHARACTERS))


# --- programs on the GPU


class GpuProcess(NamedTuple):
    """A line of `nvidia-smi pmon`. kind: C computes, G draws, C+G does both. percent: of the GPU's time; 0 unknown."""

    pid: int
    kind: str
    percent: int
    name: str


def parse_gpu_processes(text: str) -> Iterator[GpuProcess]:
    """Yields the processes that `nvidia-smi pmon -c 1 -s u` lists; skips other lines."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 5 and not line.lstrip().startswith("#") and fields[1].isdecimal():
            percent = int(fields[3]) if fields[3].isdecimal() else 0
            yield GpuProcess(int(fields[1]), fields[2], percent, fields[-1])


def foreign_gpu_use(processes: Sequence[GpuProcess], own: Collection[int], is_known: Callable[[int], bool]) -> str:
    """Returns the first process, in words, that is not of `own` and computes, or takes MIN_DRAWING_PERCENT of the GPU.

    Returns "" if there is none.
    is_known: whether this machine's kernel shows a process of that number here. In a container the driver names
    processes by numbers from outside it, this daemon's own too: those say nothing.
    """
    for process in processes:
        computes = process.kind == "C" or process.percent >= MIN_DRAWING_PERCENT
        if computes and process.pid not in own and is_known(process.pid):
            return f"{process.name} on the GPU (pid {process.pid})"
    return ""


def gpu_observer(gpu: Callable[[], str], run: RunCommand = run_command) -> Observer:
    """Sees other programs on the daemon's GPU. gpu: its NVML id, such as GPU-1234...; "" if the daemon has none."""

    def look() -> str:
        if not (card := gpu()):
            raise _CannotTell("this daemon computes on no NVIDIA GPU")
        listed = list(parse_gpu_processes(_ask(run, "nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", card)))
        if listed and not any(psutil.pid_exists(process.pid) for process in listed):
            raise _CannotTell("nvidia-smi names no process of this container")
        return foreign_gpu_use(listed, own_processes(), psutil.pid_exists)

    return lambda: _observe("gpu", look)


def gpu_power_w(card: str, run: RunCommand = run_command) -> float | None:
    """Returns the watts that a GPU draws now, by its NVML id; None if nvidia-smi does not say."""
    try:
        return float(_ask(run, "nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-i", card))
    except (_CannotTell, ValueError):
        return None


# --- a person at the machine


def parse_sessions(text: str) -> list[dict[str, str]]:
    """Returns the properties of each session that `loginctl show-session` prints, in blocks of KEY=value lines."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]


def person_in(sessions: Sequence[Mapping[str, str]], x_idle_s: float | None, unix: float) -> str:
    """Returns who is at the machine's screen and keyboard, in words; "" for nobody.

    A session over the network is nobody at the machine: what it computes is seen by its load. x_idle_s: seconds since
    the last input to the X server; None if that cannot be asked. A graphical session says itself whether it is idle, a
    terminal when it was used last (systemd-logind, IdleHint and IdleSinceHint).
    """
    for session in sessions:
        if not session.get("Seat") or session.get("Class", "user") != "user" or session.get("State") != "active":
            continue
        kind = session.get("Type", "")
        if kind == "x11" and x_idle_s is not None:
            is_here = x_idle_s < INPUT_S
        elif kind in ("x11", "wayland", "mir"):
            is_here = session.get("IdleHint") == "no" and session.get("LockedHint") != "yes"
        else:
            since = session.get("IdleSinceHint", "")
            is_here = since.isdecimal() and unix - int(since) / 1e6 < INPUT_S
        if is_here:
            return f"{session.get('Name') or 'a person'} is at it"
    return "somebody is at its screen" if not sessions and x_idle_s is not None and x_idle_s < INPUT_S else ""


def person_observer(unix: Callable[[], float], run: RunCommand = run_command) -> Observer:
    """Sees a person at the machine: by systemd-logind, and by the X server where DISPLAY names one."""

    def look() -> str:
        x_idle_s, without_x = _x_idle_s(run)
        try:
            listed = _ask(run, "loginctl", "list-sessions", "--no-legend", "--no-pager").splitlines()
            names = [line.split()[0] for line in listed if line.split()]
            wanted = "--property=Name,Seat,Class,State,Type,IdleHint,IdleSinceHint,LockedHint"
            sessions = parse_sessions(_ask(run, "loginctl", "show-session", wanted, "--", *names)) if names else []
        except _CannotTell as error:
            if x_idle_s is None:
                raise _CannotTell(f"{error}; {without_x}") from None
            sessions = []
        return person_in(sessions, x_idle_s, unix())

    return lambda: _observe("person", look)


def _x_idle_s(run: RunCommand) -> tuple[float | None, str]:
    if not os.environ.get("DISPLAY"):
        return None, "DISPLAY names no X server"
    try:
        return int(_ask(run, "xprintidle")) / 1000.0, ""
    except (_CannotTell, ValueError) as error:
        return None, str(error)


# --- programs on the processors


class LoadReading(NamedTuple):
    """Seconds of processor time until `at`, seconds of a clock: of all programs, of this user's daemons."""

    at: float
    busy_s: float
    own_s: float


def others_load(older: LoadReading, newer: LoadReading, cores: int) -> float:
    """Returns the share of all processors' time between two readings that went to programs other than daemons."""
    seconds = max(newer.at - older.at, 1e-9) * cores
    # A daemon's process that has ended since takes its time with it.
    return min(1.0, max(0.0, (newer.busy_s - older.busy_s - max(0.0, newer.own_s - older.own_s)) / seconds))


def own_processes() -> set[int]:
    """Returns the numbers of all processes of this user's daemons, their children and supervisors included."""
    roots = {os.getpid(), os.getppid()} if os.environ.get(daemon_registry.SUPERVISOR_VARIABLE) else {os.getpid()}
    roots |= {
        number for entry in daemon_registry.find_running_daemons() for number in (entry.pid, entry.supervisor) if number
    }
    found = set[int]()
    for root in roots:
        try:
            process = psutil.Process(root)
            found |= {root, *(child.pid for child in process.children(recursive=True))}
        except psutil.Error:  # it has ended
            continue
    return found


def read_load(now: float) -> LoadReading:
    """Returns the processor time of all programs of the machine, and of this user's daemons, up to now."""
    times, own_s = psutil.cpu_times()._asdict(), 0.0
    # `user` holds the guests' time already; `steal` went to other machines.
    busy_s = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    for pid in own_processes():
        try:
            used = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        own_s += used.user + used.system
    return LoadReading(now, busy_s, own_s)


def processors_observer(
    clock: Callable[[], float],
    read: Callable[[float], LoadReading] = read_load,
    cores: int | None = None,
    counts: Callable[[], bool] = lambda: True,
) -> Observer:
    """Sees other programs that compute: MIN_OTHERS_LOAD or more of the processors' time over LOAD_WINDOW_S.

    counts: whether the load of the processors matters here; not to a daemon that computes on a GPU.
    """
    readings = deque[LoadReading]()
    count = cores or psutil.cpu_count() or 1

    def look() -> str:
        if not counts():
            raise _CannotTell("this daemon computes on a GPU, so that the processors' load is no sign")
        readings.append(newest := read(clock()))
        while len(readings) > 2 and newest.at - readings[1].at >= LOAD_WINDOW_S:
            readings.popleft()
        if newest.at - readings[0].at < MIN_LOAD_SPAN_S:
            return ""
        load = others_load(readings[0], newest, count)
        return f"other programs take {load:.0%} of its processors" if load >= MIN_OTHERS_LOAD else ""

    return lambda: _observe("processors", look)


# --- the owner's own rule


def command_observer(command: str, run: RunCommand = run_command) -> Observer:
    """Asks a shell command of the owner: exit code 0 means that the machine is in use, by what its first line says."""

    def look() -> str:
        try:
            done = run(["/bin/sh", "-c", command])
        except (OSError, subprocess.SubprocessError) as error:
            raise _CannotTell(f"the command cannot be run ({one_line(str(error), 80)})") from None
        if done.returncode in (126, 127):  # of the shell: not executable, not found
            raise _CannotTell(f"the command cannot be run ({one_line(done.stderr, 80)})")
        said = done.stdout.strip().splitlines()
        return "" if done.returncode else said[0] if said else f"the command `{command}` says so"

    return lambda: _observe("command", look)
