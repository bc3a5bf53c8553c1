"""The two ways to tune a model that the benchmark times: one process with peft, and a swarm of two daemons."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from agora_protocol.manifest import Manifest

from benchmarks.children import Child, ChildProcesses
from benchmarks.freezer import Freezer
from benchmarks.machine import usable_cores
from benchmarks.report import Cell
from benchmarks.swarm import STALL_S, SwarmContender
from benchmarks.task import spec
from benchmarks.tuning_settings import Effort, FrozenAs, speed_manifest
from benchmarks.turns import Readings, row, start, take_turns
from benchmarks.window import START_S, TIMEOUT_S, Window

WARM_S: Final = 2.0
# Completions after which the pipeline is full: twice what the default staleness lets be in flight here.
FILLED_AFTER: Final = 8
# What the names of contenders and ratios begin with, by how the frozen weights are kept.
PREFIXES: Final[Mapping[FrozenAs, str]] = {"float32": "", "nf4": "nf4_"}


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured: the readings by the contender's name, the table's rows, one note for each contender."""

    readings: Mapping[str, Readings] = field(default_factory=dict)
    rows: Sequence[dict[str, Cell]] = ()
    notes: Sequence[str] = ()


def measure_speeds(base: Path, effort: Effort, folder: Path) -> Speeds:
    """Times peft and the swarm on the model in the folder `base`, in turns. The corpus must have been prepared."""
    with ChildProcesses(folder) as nursery, Freezer() as freezer:
        contenders: list[PeftLoop | TuningSwarm] = []
        for frozen_as, prefix in PREFIXES.items():
            manifest = speed_manifest(base, frozen_as)
            contenders.append(PeftLoop(f"{prefix}peft", manifest, base, nursery, folder))
            contenders.append(TuningSwarm(f"{prefix}swarm", manifest, base, nursery, folder))
        start(contenders, freezer)
        readings = take_turns(contenders, effort.rounds, effort.window_s, freezer)
    rows = [row(contender, readings[contender.name]) | contender.cells() for contender in contenders]
    return Speeds(readings, rows, [f"`{contender.name}`: {contender.note}." for contender in contenders[:2]])


class PeftLoop:
    """One process with all threads; in every round the better of two ways that its threads wait, see SingleLoop."""

    note = (
        "transformers and peft in one process, LoRA in all linear layers but the head, no gradient checkpointing, "
        "fused AdamW; nf4 by transformers' BitsAndBytesConfig with double quantisation; the better of OpenMP's default "
        "and passive waiting, chosen in every round"
    )
    waits: Mapping[str, Mapping[str, str]] = {"default": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}

    def __init__(self, name: str, manifest: Manifest, base: Path, nursery: ChildProcesses, folder: Path) -> None:
        self.name, self._nursery = name, nursery
        self.processes, self.threads = 1, usable_cores()
        self._spec = spec(manifest, folder, self.threads, base=str(base))
        self._children: list[Child] = []

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        self._children = [
            self._nursery.start(f"{self.name}-{wait}", "tuning-peft", self._spec, self.threads, environment)
            for wait, environment in self.waits.items()
        ]
        for child in self._children:
            child.hear(START_S)
        for child in self._children:
            child.ask({"seconds": WARM_S}, TIMEOUT_S)

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        return [child.pid for child in self._children]

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; returns what was trained in that window."""
        answers = [child.ask({"seconds": seconds / 2}, TIMEOUT_S) for child in self._children]
        trained = sum(int(answer["tokens"]) for answer in answers)
        return max((Window(a["tokens"], a["seconds"], trained) for a in answers), key=lambda window: window.rate)

    def cells(self) -> dict[str, Cell]:
        """Returns nothing beyond what every contender's line of the table has."""
        return {}


class TuningSwarm(SwarmContender):
    """A daemon for each stage of a run that begins with a base model; reports what its processor time was spent on."""

    note = (
        "agora-node daemons, one per stage, trained = lora, over a real DHT and libp2p on loopback, bf16 boundaries, "
        "asynchronous, with as many microbatches in flight as the daemons choose"
    )

    def __init__(self, name: str, manifest: Manifest, base: Path, nursery: ChildProcesses, folder: Path) -> None:
        super().__init__(manifest, nursery, folder, name.replace("_", "-"))
        self.name = name
        self._flags += ["--base-model", str(base)]
        self._began_at, self._before = 0.0, dict[int, ProcessorTime]()
        self._spent: list[Spent] = []

    def fill(self) -> None:
        self.until(lambda: len(self.completed) > FILLED_AFTER, "to fill its pipeline", STALL_S)
        self._began_at, self._before = time.time(), self._processor_times()

    def measure(self, seconds: float) -> Window:
        # Also notes what the processor time since the pipeline was full was spent on.
        window = super().measure(seconds)
        counted = [(at, tokens) for at, tokens in self.completed if at > self._began_at]
        tokens, taken = sum(tokens for _, tokens in counted), counted[-1][0] - self._began_at
        used = {stage: now.since(self._before[stage]) for stage, now in self._processor_times().items()}
        device = [used[stage].busiest for stage in sorted(used)]
        self._spent.append(Spent(tokens, taken, device, sum(time.total for time in used.values()) - sum(device)))
        return window

    def cells(self) -> dict[str, Cell]:
        """Returns what became of the tokens, and the profile, as cells of the contender's line of a table.

        device_s_per_1000: processor seconds of each stage's compute thread for 1000 tokens; device_busy: those for a
        second that passed; rest_s_per_1000: of all other threads and of the network processes.
        """
        thousands = sum(spent.tokens for spent in self._spent) / 1000
        seconds = sum(spent.seconds for spent in self._spent)
        device = [sum(stage) for stage in zip(*(spent.device_s for spent in self._spent), strict=True)]
        return {
            **self.account_cells(),
            "device_s_per_1000": "/".join(f"{stage / thousands:.3f}" for stage in device),
            "device_busy": "/".join(f"{stage / seconds:.2f}" for stage in device),
            "rest_s_per_1000": round(sum(spent.rest_s for spent in self._spent) / thousands, 3),
        }

    def _processor_times(self) -> dict[int, ProcessorTime]:
        return {self._spans[name][0]: processor_time(daemon.process.pid) for name, daemon in self.swarm.daemons.items()}


@dataclass(frozen=True, slots=True)
class Spent:
    """One window's tokens, seconds, processor seconds of each stage's compute thread and of everything else."""

    tokens: int
    seconds: float
    device_s: Sequence[float]
    rest_s: float


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor seconds of a process: of each of its threads, and of all its children together."""

    threads: Mapping[int, float]
    children: float

    @property
    def busiest(self) -> float:
        return max(self.threads.values(), default=0.0)

    @property
    def total(self) -> float:
        return sum(self.threads.values()) + self.children

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """Returns what was used after `before`."""
        threads = {thread: seconds - before.threads.get(thread, 0.0) for thread, seconds in self.threads.items()}
        return ProcessorTime(threads, self.children - before.children)


def processor_time(pid: int) -> ProcessorTime:
    """Returns the processor time of a process so far."""
    process, children = psutil.Process(pid), 0.0
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = child.cpu_times()
            children += used.user + used.system
    return ProcessorTime({thread.id: thread.user_time + thread.system_time for thread in process.threads()}, children)
