"""The ways to train that the pipeline benchmark compares, but for the swarm, which has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.children import BenchFailed, Child, ChildProcesses
from benchmarks.machine import usable_cores
from benchmarks.task import manifest_for, spec
from benchmarks.window import START_S, TIMEOUT_S, Window, stage_threads

STAGES = 4
WARM_S = 3.0
MOE_ATTEMPTS = 8


class Contender(Protocol):
    """One way to train the model. No work is in flight when `start` and `measure` return, so that it can be frozen."""

    name: str
    processes: int
    threads: int
    note: str

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        ...

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        ...

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; whole steps, or a steady stretch between two completions."""
        ...


class SingleLoop:
    """(a) The plain loop in one process with all threads; in every round the better of two ways for threads to wait.

    OpenMP's threads spin at their barriers by default, which is fastest on a calm machine, and many times slower than
    sleeping as soon as anything else wants a core.
    """

    name = "single"
    note = (
        "plain PyTorch loop in one process, float32, fused AdamW; the better of OpenMP's default and passive waiting, "
        "chosen in every round"
    )
    waits: Mapping[str, Mapping[str, str]] = {"default": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}

    def __init__(self, nursery: ChildProcesses, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = 1, usable_cores()
        self._children: list[Child] = []

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        child_spec = spec(manifest_for(1), self._folder, self.threads)
        for wait, environment in self.waits.items():
            child = self._nursery.start(f"single-{wait}", "single", child_spec, self.threads, environment)
            child.hear(START_S)
            child.ask({"seconds": WARM_S}, TIMEOUT_S)
            self._children.append(child)

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        return [child.pid for child in self._children]

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; returns what was trained in that window."""
        answers = [child.ask({"seconds": seconds / 2}, TIMEOUT_S) for child in self._children]
        trained = sum(int(answer["tokens"]) for answer in answers)
        return max((Window(a["tokens"], a["seconds"], trained) for a in answers), key=lambda window: window.rate)


class Gloo1F1B:
    """(c) torch.distributed.pipelining."""

    name = "gloo_1f1b"
    note = "PipelineStage and Schedule1F1B over gloo on loopback, float32 boundaries, a flush per step as 1F1B has it"

    def __init__(self, nursery: ChildProcesses, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = STAGES, STAGES * stage_threads(STAGES)
        self._steps = Lockstep([])

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        threads = stage_threads(STAGES)
        manifest = manifest_for(STAGES)
        meeting = str(self._folder / "gloo-meeting")
        ranks = [
            self._nursery.start(
                f"gloo-{k}", "gloo", spec(manifest, self._folder, threads, rank=k, meeting=meeting), threads
            )
            for k in range(STAGES)
        ]
        self._steps = Lockstep(ranks)
        self._steps.warm_up()

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        return self._steps.groups()

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; returns what was trained in that window."""
        return self._steps.measure(seconds)


class HivemindMoe:
    """(d) hivemind's servers with remote modules, and a trainer that calls them in turn."""

    name = "hivemind_moe"
    note = (
        "hivemind.moe Servers and RemoteExpert calls; 16 microbatches in flight on threads, 16-bit boundaries through "
        "the trainer and the forward repeated in the backward (hivemind's design); backends made to step every 16 "
        "calls, not every call"
    )

    def __init__(self, nursery: ChildProcesses, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = STAGES + 1, STAGES * stage_threads(STAGES)
        self._children: list[Child] = []
        self._trainer: Child | None = None

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        manifest = manifest_for(STAGES)
        peers: list[str] = []
        for stage in range(STAGES):
            child_spec = spec(manifest, self._folder, stage_threads(STAGES), stage=stage, peers=peers)
            child, addresses = start_moe_stage(self._nursery, child_spec, stage_threads(STAGES))
            self._children.append(child)
            peers = peers or addresses
        child_spec = spec(manifest, self._folder, 1, peers=peers)
        self._trainer = self._nursery.start("moe-trainer", "moe-trainer", child_spec)
        self._children.append(self._trainer)
        self._trainer.hear(START_S)
        self._trainer.ask({"steps": 1}, TIMEOUT_S)

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        return [child.pid for child in self._children]

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; returns what was trained in that window."""
        assert self._trainer is not None
        answer = self._trainer.ask({"seconds": seconds}, TIMEOUT_S + seconds)
        return Window(answer["tokens"], answer["seconds"], answer["trained"])


def start_moe_stage(nursery: ChildProcesses, child_spec: Mapping[str, Any], threads: int) -> tuple[Child, list[str]]:
    """Starts a "moe-stage" child; returns it and its addresses. Raises BenchFailed when MOE_ATTEMPTS fail to start."""
    for _ in range(MOE_ATTEMPTS):
        child = nursery.start(f"moe-{child_spec['stage']}", "moe-stage", child_spec, threads)
        answer = child.hear(START_S)
        if answer["ready"]:
            return child, list(answer["addresses"])
        child.close()
    raise BenchFailed(f"hivemind's server of stage {child_spec['stage']} did not start, {MOE_ATTEMPTS} times")


class Lockstep:
    """Children that take whole optimizer steps together; knows how long a step takes, to fill a window with them."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._step_s = 1.0

    def groups(self) -> list[int]:
        """Returns the process groups of the children."""
        return [child.pid for child in self._children]

    def warm_up(self) -> None:
        """Waits until all children are ready, then takes two steps, the second one timed."""
        for child in self._children:
            child.hear(START_S)
        self.take(1)
        self.take(1)

    def measure(self, seconds: float) -> Window:
        """Takes the number of whole steps that fills `seconds` best."""
        return self.take(max(1, round(seconds / self._step_s)))

    def take(self, steps: int) -> Window:
        """Takes `steps` steps; the time is that of the slowest child."""
        for child in self._children:
            child.tell({"steps": steps})
        answers = [child.hear(TIMEOUT_S) for child in self._children]
        seconds = max(float(answer["seconds"]) for answer in answers)
        self._step_s = seconds / steps
        tokens = int(answers[0]["tokens"])
        return Window(tokens, seconds, tokens)
