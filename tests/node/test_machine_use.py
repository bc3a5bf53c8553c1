"""Claims about when a daemon makes way for whoever uses its machine, and what each observer sees or cannot tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from agora.node.limits import machine_use
from agora.node.limits.machine_use import (
    GpuProcess,
    LoadReading,
    MachineUse,
    Observation,
    command_observer,
    foreign_gpu_use,
    gpu_observer,
    judge_use,
    others_load,
    parse_gpu_processes,
    parse_sessions,
    person_in,
    person_observer,
    processors_observer,
    read_load,
)
from agora.node.limits.pausing import BY_OWNER, Hours, Pausing

NOBODY = (Observation("gpu"), Observation("person", why_unknown="loginctl is not installed"))
SOMEBODY = (Observation("gpu", "blender on the GPU (pid 7)"), Observation("person", "alice is at it"))
IDLE_S = 600.0
UNUSED, IN_USE = MachineUse(), MachineUse("alice is at it", "alice is at it", 1000.0, makes_way=True)
WAS_USED = MachineUse("", "alice is at it", 1000.0, makes_way=True)


@pytest.mark.parametrize(
    ("former", "observations", "now", "makes_way"),
    [
        (UNUSED, NOBODY, 5.0, False),  # it begins at once where nobody was seen
        (UNUSED, (), 5.0, False),
        (UNUSED, SOMEBODY, 1000.0, True),
        (UNUSED, SOMEBODY[1:], 1000.0, True),
        (IN_USE, NOBODY, 1001.0, True),
        (WAS_USED, NOBODY, 1599.9, True),
        (WAS_USED, NOBODY, 1600.0, False),
        (WAS_USED, SOMEBODY, 1599.0, True),
        # Who cannot tell any more sees nobody: the daemon is not kept away for good.
        (IN_USE, (Observation("person", why_unknown="loginctl cannot be asked"),), 1600.0, False),
    ],
)
def test_it_makes_way_while_somebody_uses_the_machine_and_some_minutes_longer(
    former: MachineUse, observations: Sequence[Observation], now: float, makes_way: bool
) -> None:
    judged = judge_use(former, observations, now, IDLE_S)
    assert judged.makes_way is makes_way
    assert bool(judged.pause_reason(now, IDLE_S)) is makes_way


def test_each_new_use_begins_the_minutes_anew() -> None:
    use = judge_use(WAS_USED, SOMEBODY, 1500.0, IDLE_S)
    assert judge_use(use, NOBODY, 2099.0, IDLE_S).makes_way
    assert not judge_use(use, NOBODY, 2100.0, IDLE_S).makes_way


def test_the_reason_says_who_and_when_it_goes_on_and_tells_others_no_name() -> None:
    in_use = judge_use(UNUSED, SOMEBODY, 1000.0, IDLE_S)
    full = in_use.pause_reason(1000.0, IDLE_S, in_full=True)
    assert full == "paused while its machine is in use (blender on the GPU (pid 7); alice is at it)"
    later = judge_use(in_use, NOBODY, 1180.0, IDLE_S)
    text = later.pause_reason(1180.0, IDLE_S, in_full=True)
    assert "until 3 min ago" in text and "alice" in text and text.endswith("it goes on in 7 min")
    assert all("alice" not in use.pause_reason(1180.0, IDLE_S) for use in (in_use, later))


def test_the_owners_pause_and_the_hours_are_named_before_the_use(tmp_path: Path) -> None:
    now = [1000.0]
    pause = Pausing(tmp_path / "paused", Hours(), time.time, IDLE_S, lambda: now[0])
    assert not pause.reason
    pause.note_use(IN_USE)
    assert pause.reason == "paused while its machine is in use" and "alice" in pause.full_reason
    assert "idle_minutes" in pause.remedy
    pause.pause()
    assert pause.reason == BY_OWNER
    assert pause.resume() == "paused while its machine is in use", "resume does not push the user aside"
    pause.note_use(UNUSED)
    assert not pause.reason


# --- observers


def done(text: str = "", code: int = 0, error: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, text, error)


PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1999     G       3      1      -      -      -      -    Xorg
    0       {pid}     C       -      -      -      -      -      -    blender
"""


def test_the_list_of_gpu_processes_is_read_with_its_dashes() -> None:
    assert list(parse_gpu_processes(PMON.format(pid=4242))) == [
        GpuProcess(1999, "G", 3, "Xorg"),
        GpuProcess(4242, "C", 0, "blender"),
    ]
    assert not list(parse_gpu_processes("# gpu pid type sm\n    0          -     -      -      -      -     -\n"))


@pytest.mark.parametrize(
    ("process", "is_use"),
    [
        (GpuProcess(7, "C", 0, "python"), True),  # it holds memory between its kernels
        (GpuProcess(7, "G", 4, "Xorg"), False),
        (GpuProcess(7, "C+G", 4, "firefox"), False),
        (GpuProcess(7, "G", 60, "game"), True),
        (GpuProcess(1, "C", 90, "agora-node"), False),  # own
        (GpuProcess(99, "C", 90, "outside"), False),  # a number from outside the container
    ],
)
def test_a_foreign_process_that_computes_or_draws_much_uses_the_gpu(process: GpuProcess, is_use: bool) -> None:
    assert bool(foreign_gpu_use([process], own={1}, is_known=lambda pid: pid < 50)) is is_use


def test_the_gpu_observer_names_the_program_and_looks_at_the_daemons_card_alone() -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return done(PMON.format(pid=os.getppid()))

    assert gpu_observer(lambda: "GPU-1", run)().use == f"blender on the GPU (pid {os.getppid()})"
    assert asked[0][-2:] == ("-i", "GPU-1")
    assert not gpu_observer(lambda: "GPU-1", lambda _: done(PMON.format(pid=os.getpid())))().use


def missing_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    raise FileNotFoundError(command[0])


def hanging_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    raise subprocess.TimeoutExpired(command, 5.0)


@pytest.mark.parametrize(
    ("observer", "why"),
    [
        (gpu_observer(lambda: "", missing_program), "computes on no NVIDIA GPU"),
        (gpu_observer(lambda: "GPU-1", missing_program), "nvidia-smi is not installed"),
        (gpu_observer(lambda: "GPU-1", hanging_program), "nvidia-smi cannot be asked"),
        (gpu_observer(lambda: "GPU-1", lambda _: done(code=9, error="No devices were found")), "No devices"),
        (gpu_observer(lambda: "GPU-1", lambda _: done(PMON.format(pid=99999999))), "no process of this container"),
        (person_observer(time.time, missing_program), "loginctl is not installed"),
        (person_observer(time.time, lambda _: done(code=1, error="Host is down")), "loginctl says: Host is down"),
        (command_observer("x", lambda _: done(code=127, error="sh: x: not found")), "x: not found"),
        (command_observer("x", hanging_program), "cannot be run"),
        (processors_observer(time.time, counts=lambda: False), "computes on a GPU"),
    ],
)
def test_an_observer_that_cannot_tell_says_why(
    observer: Callable[[], Observation], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    seen = observer()
    assert not seen.use and why in seen.why_unknown


def session(**properties: str) -> dict[str, str]:
    return {"Name": "alice", "Seat": "seat0", "Class": "user", "State": "active", "Type": "wayland"} | properties


@pytest.mark.parametrize(
    ("one", "x_idle_s", "is_here"),
    [
        (session(IdleHint="no"), None, True),
        (session(IdleHint="yes"), None, False),
        (session(IdleHint="no", LockedHint="yes"), None, False),
        (session(IdleHint="no", State="online"), None, False),  # not the one on the screen
        (session(IdleHint="no", Class="greeter"), None, False),
        (session(IdleHint="no", Seat=""), None, False),  # over the network
        (session(Type="x11", IdleHint="no"), 500.0, False),  # a desktop that never sets the hint
        (session(Type="x11", IdleHint="yes"), 3.0, True),
        (session(Type="tty", IdleHint="no", IdleSinceHint=str(9_950 * 10**6)), None, True),
        (session(Type="tty", IdleHint="no", IdleSinceHint=str(9_000 * 10**6)), None, False),
        (session(Type="tty", IdleSinceHint=""), None, False),
    ],
)
def test_a_person_is_whoever_has_used_screen_or_keyboard_lately(
    one: dict[str, str], x_idle_s: float | None, is_here: bool
) -> None:
    assert person_in([session(Seat=""), one], x_idle_s, unix=10_000.0) == ("alice is at it" if is_here else "")


def test_sessions_are_read_from_what_loginctl_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    shown = "Name=root\nSeat=\nState=active\n\nName=bo\nSeat=seat0\nClass=user\nState=active\nType=x11\nIdleHint=no\n"
    assert [one["Name"] for one in parse_sessions(shown)] == ["root", "bo"]

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return done("  2 1000 bo seat0\n  c1 0 root\n") if command[1] == "list-sessions" else done(shown)

    assert person_observer(time.time, run)().use == "bo is at it"


def test_the_load_of_others_is_averaged_and_ignores_what_the_daemons_compute() -> None:
    assert others_load(LoadReading(0, 100, 50), LoadReading(60, 220, 170), cores=2) == 0.0
    assert others_load(LoadReading(0, 100, 50), LoadReading(60, 160, 50), cores=2) == 0.5
    assert others_load(LoadReading(0, 100, 50), LoadReading(60, 160, 20), cores=2) == 0.5  # one of its processes ended
    readings = iter([LoadReading(at, busy, 0.0) for at, busy in [(0, 0), (5, 10), (20, 12), (80, 14), (140, 134)]])
    observer = processors_observer(lambda: 0.0, lambda _: next(readings), cores=2)
    uses = [observer().use for _ in range(5)]
    assert not uses[0] and not uses[1], "the first seconds are too short a time"
    assert "take 30% of its processors" in uses[2]
    assert not uses[3] and "take 100%" in uses[4]


def test_a_real_busy_program_counts_and_one_of_the_daemons_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        own = [{os.getpid()}]
        monkeypatch.setattr(machine_use, "own_processes", lambda: own[0])
        began, process = time.monotonic(), psutil.Process(busy.pid)
        before = {pids: read_load_with(own, pids) for pids in (frozenset({os.getpid()}), frozenset({busy.pid}))}
        while (used := process.cpu_times().user) < 0.6 and time.monotonic() - began < 60:
            time.sleep(0.1)
        after = {pids: read_load_with(own, pids) for pids in before}
        foreign, known = (others_load(before[pids], after[pids], 1) for pids in before)
        assert used >= 0.6 and foreign > 0.0
        seconds = [after[pids].own_s - before[pids].own_s for pids in before]
        assert seconds[0] < 0.3 < 0.5 < seconds[1] and known <= foreign
    finally:
        busy.send_signal(signal.SIGKILL)
        busy.wait()


def read_load_with(own: list[set[int]], pids: frozenset[int]) -> LoadReading:
    own[0] = set(pids)
    return read_load(time.monotonic())


def test_the_owners_command_says_by_its_exit_code_whether_the_machine_is_in_use(tmp_path: Path) -> None:
    file = tmp_path / "in-use"
    observer = command_observer(f"cat {file} 2>/dev/null")
    assert observer() == Observation("command")
    file.write_text("a film is shown\nmore\n")
    assert observer().use == "a film is shown"
    assert command_observer("true")().use == "the command `true` says so"
