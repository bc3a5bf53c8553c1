"""A fleet of real daemons on emulated accelerators: its speed once its pipeline is full, its waits, its weights."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agora_protocol.manifest import Manifest

from agora.cli.local_swarm import Launch, LocalDaemon, LocalSwarm, SwarmFailed
from agora.pipeline.device_time import DeviceTime
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.scaling_settings import MICROBATCHES_PER_STEP, WARM_STEPS, Fleet
from benchmarks.task import corpus_cache

POLL_INTERVAL_S: Final = 0.05
START_S: Final = 240.0
STALL_S: Final = 120.0
POINTS: Final = 12  # held-out losses of a run
ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Averaged weights, a file of each stage, after so many tokens and seconds of training."""

    tokens: int
    seconds: float
    files: list[str]


@dataclass(slots=True)
class Observation:
    """What a fleet did. rate: tokens per second from when its pipeline was full.

    waits: of each machine meanwhile. set_s: what its jobs should have taken meanwhile, all machines together. steps: of
    stage 0 meanwhile. staleness: the mean age in steps of the gradients in all steps.
    """

    rate: float
    waits: list[DeviceTime]
    set_s: float
    steps: int
    staleness: float
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def overrun(self) -> float:
        """Seconds of all devices by those set: 1 if the processor was always quick enough for the emulation."""
        return sum(waits.busy for waits in self.waits) / self.set_s if self.set_s else 1.0


@dataclass(slots=True)
class Progress:
    """What the journals of a fleet say so far: when microbatches came back, and how old the gradients of steps were."""

    tokens: int = 0
    completed_at: list[tuple[float, int]] = field(default_factory=list)  # unix time, tokens
    counted: dict[str, int] = field(default_factory=dict)  # microbatches counted, times stages, by daemon
    steps: dict[str, int] = field(default_factory=dict)  # steps taken, summed over its stages, by daemon
    first_steps: int = 0  # of stage 0
    started_at: float | None = None
    aged: float = 0.0
    aged_tokens: int = 0

    def add(self, daemon: str, event: dict[str, Any]) -> None:
        """Takes one event of a daemon's journal."""
        match event["event"]:
            case "MicrobatchStarted" if event["purpose"] == "train" and self.started_at is None:
                self.started_at = event["at_unix"]
            case "MicrobatchCompleted" if event["purpose"] == "train":
                self.tokens += event["tokens"]
                self.completed_at.append((event["at_unix"], event["tokens"]))
            case "MicrobatchCounted":
                self.counted[daemon] = self.counted.get(daemon, 0) + len(event["stages"])
            case "StepTaken" if event["gradient_norm"] is not None:
                self.steps[daemon] = self.steps.get(daemon, 0) + 1
                self.first_steps = max(self.first_steps, event["step"] if event["stage"] == 0 else 0)
                self.aged += event["staleness"] * event["tokens"]
                self.aged_tokens += event["tokens"]

    @property
    def seconds(self) -> float:
        return max(at for at, _ in self.completed_at) - (self.started_at or 0.0) if self.completed_at else 0.0


def rate_between(completed_at: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Returns the tokens per second of what came back between two times, in [first, last): NaN of fewer than two."""
    inside = sorted((at, tokens) for at, tokens in completed_at if begin <= at <= end)
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return float("nan")
    return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])


class FleetRun:
    """One fleet that trains for a number of steps; `run` does everything, once, and may be called in any thread."""

    def __init__(
        self,
        fleet: Fleet,
        manifest: Manifest,
        steps: int,
        folder: Path,
        stop: threading.Event,
        *,
        launch: Launch | None = None,
        takes_snapshots: bool = True,
        step_tokens: int = 0,
    ) -> None:
        """steps: of all tokens of the fleet. folder: of the benchmark. stop: ends the run early, with BenchFailed.

        launch: of daemons, see LocalSwarm. takes_snapshots: whether the weights are copied while it trains.
        step_tokens: by which `steps` are counted, by default those of the manifest's steps.
        """
        self._takes_snapshots = takes_snapshots
        self._fleet, self._manifest, self._stop = fleet, manifest, stop
        self._target = step_tokens or manifest.optimizer.target_tokens
        self._tokens = steps * self._target
        self._folder = folder / manifest.name
        self._folder.mkdir()
        flags = ["--allow-files", *(["--link", fleet.link] if fleet.link else [])]
        self._swarm = LocalSwarm(
            self._folder, manifest.to_toml(), corpus=corpus_cache(folder), flags=flags, launch=launch
        )
        self._progress = Progress()

    def run(self) -> Observation:
        """Trains, and stops the daemons. Raises BenchFailed when a daemon ends, or nothing happens for STALL_S."""
        with ChildProcesses(self._folder) as nursery:
            nursery.adopt(self._swarm.terminate, self._swarm.stop)
            try:
                self._start()
                return self._observe()
            except SwarmFailed as failed:
                raise BenchFailed(f"{self._fleet.name}: {failed}") from failed

    def clear(self) -> None:
        """Removes the files of the fleet, weights of snapshots included."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _daemons(self) -> list[LocalDaemon]:
        return list(self._swarm.daemons.values())

    def _start(self) -> None:
        for number, span in enumerate(self._fleet.spans):
            environment = {
                "AGORA_EMULATED_MS": str(self._fleet.forward_ms(number)),
                "AGORA_MOST_STAGES": str(len(span)),
            }
            self._swarm.start(f"peer-{number}", flags=["--stages", str(span)], environment=environment)
        end = time.monotonic() + START_S
        while not all(self._is_serving(daemon) for daemon in self._daemons):
            self._pause()
            if time.monotonic() > end:
                raise BenchFailed(f"{self._fleet.name}: not all daemons serve after {START_S:.0f} s")

    def _is_serving(self, daemon: LocalDaemon) -> bool:
        report = daemon.try_ask("report")
        return report is not None and report["state"] == "serving" and "waits" in report

    def _pause(self) -> None:
        self._swarm.check_alive()
        self._read()
        if self._stop.is_set():
            raise BenchFailed(f"{self._fleet.name}: stopped, since another fleet failed")
        time.sleep(POLL_INTERVAL_S)

    def _read(self) -> None:
        for daemon in self._daemons:
            for event in daemon.new_events():
                self._progress.add(daemon.name, event)

    def _observe(self) -> Observation:
        progress, snapshots = self._progress, list[Snapshot]()
        next_at = every = self._tokens / POINTS
        began: tuple[float, list[DeviceTime], Progress] | None = None
        moved, moved_at = -1, time.monotonic()
        warm_at = progress.tokens + WARM_STEPS * self._target
        while progress.tokens < max(self._tokens, warm_at + self._target):
            self._pause()
            if began is None and progress.tokens >= warm_at:
                began = (time.time(), self._waits(), self._copied())
            if progress.tokens >= next_at:
                snapshots += self._take_snapshot()
                next_at = progress.tokens + every
            if progress.tokens != moved:
                moved, moved_at = progress.tokens, time.monotonic()
            elif time.monotonic() - moved_at > STALL_S:
                raise BenchFailed(f"{self._fleet.name}: no microbatch came back for {STALL_S:.0f} s")
        assert began is not None
        ended, after = time.time(), self._waits()
        snapshots += self._take_snapshot()
        since, before, earlier = began
        return Observation(
            rate_between(progress.completed_at, since, ended),
            [new.since(old) for new, old in zip(after, before, strict=True)],
            self._set_s(earlier),
            progress.first_steps - earlier.first_steps,
            progress.aged / progress.aged_tokens if progress.aged_tokens else 0.0,
            snapshots,
        )

    def _copied(self) -> Progress:
        progress = self._progress
        return Progress(counted=dict(progress.counted), steps=dict(progress.steps), first_steps=progress.first_steps)

    def _set_s(self, earlier: Progress) -> float:
        seconds = 0.0
        for number, daemon in enumerate(self._daemons):
            name, forward_s = daemon.name, self._fleet.forward_ms(number) / 1000.0
            passes = self._progress.counted.get(name, 0) - earlier.counted.get(name, 0)
            steps = self._progress.steps.get(name, 0) - earlier.steps.get(name, 0)
            seconds += forward_s * (3.0 * passes + steps / 4.0)
        return seconds

    def _waits(self) -> list[DeviceTime]:
        with ThreadPoolExecutor(len(self._daemons)) as pool:
            return list(pool.map(lambda daemon: DeviceTime(**daemon.ask("report", ANSWER_S)["waits"]), self._daemons))

    def _take_snapshot(self) -> list[Snapshot]:
        if not self._takes_snapshots:
            return []
        # The slow machine may be steps behind; the others hold every stage.
        folder, tokens, seconds = self._folder / "weights", self._progress.tokens, self._progress.seconds
        folder.mkdir(exist_ok=True)
        files: dict[int, str] = {}
        for daemon, span in zip(self._daemons, self._fleet.spans, strict=True):
            if all(stage in files for stage in span.stages):
                continue
            answer = daemon.try_ask("weights", ANSWER_S, average=True)
            for stage, file in (answer or {"files": {}})["files"].items():
                copy = folder / f"{tokens}-{stage}.safetensors"
                files[int(stage)] = str(shutil.copyfile(file, copy))
        return [Snapshot(tokens, seconds, list(files.values()))] if len(files) == self._fleet.stages else []


def share(waits: Sequence[DeviceTime], cause: str) -> float:
    """Returns which part of the time of all machines together was spent on `cause`, a field of DeviceTime."""
    seconds = sum(each.seconds for each in waits)
    return sum(float(getattr(each, cause)) for each in waits) / seconds if seconds else 0.0


def queued_s(observation: Observation) -> float:
    """Returns for how many seconds a microbatch waits in queues of devices, all its jobs together."""
    microbatches = observation.steps * MICROBATCHES_PER_STEP
    return sum(waits.queued for waits in observation.waits) / microbatches if microbatches else 0.0
