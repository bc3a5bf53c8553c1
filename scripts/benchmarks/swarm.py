"""(b) A local swarm: one `agora-node join` per stage, each its own process with its own libp2p host and DHT node.

The completions in the origin's journal carry their times, so a window begins and ends exactly at a completion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.cli.demo_totals import StageSteps
from agora.cli.local_swarm import LocalDaemon, LocalSwarm, SwarmFailed
from agora.observe import events
from agora.observe.journal import from_json
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.report import Cell
from benchmarks.task import MICROBATCHES_PER_STEP, corpus_cache
from benchmarks.window import START_S, Window, print_progress, stage_threads

STALL_S = 60.0
ANSWER_S = 20.0
WARM_STEPS = 1


class SwarmContender:
    """A swarm of `replicas` daemons for each stage. Comes to rest by draining those that originate microbatches."""

    note = "agora-node daemons, one per stage, over a real DHT and libp2p on loopback, bf16 boundaries, asynchronous"

    def __init__(
        self,
        manifest: Manifest,
        nursery: ChildProcesses,
        folder: Path,
        name: str | None = None,
        replicas: int = 1,
        link: str | None = None,
    ) -> None:
        """link: RATE,RTT[,JITTER[,LOSS]] of every daemon, see docs/use/links.md; None leaves the network as it is.

        The run has the contender's name: daemons of one machine that start from equal drafts are one run.
        """
        self.name = name or f"swarm{manifest.stage_count}"
        self.processes = replicas * manifest.stage_count
        self.threads = self.processes * stage_threads(self.processes)
        self.rounds: list[dict[str, Any]] = []  # RoundDone events of the last window, its filling and draining included
        # Unix time and tokens of every microbatch that has come home in the last window, in order of time.
        self.completed: list[tuple[float, int]] = []
        # The optimizer steps that each stage has taken since the start.
        self.steps = [StageSteps() for _ in range(manifest.stage_count)]
        self.tokens_computed = 0  # tokens of the microbatches that have come home since the start
        self._replicas, self._stages = replicas, manifest.stage_count
        self._flags = ["--allow-files", *(["--link", link] if link else [])]
        self._manifest, self._nursery, self._folder = manifest.with_values(name=self.name), nursery, folder
        self._swarm: LocalSwarm | None = None
        self._serving: set[str] = set()
        self._spans: dict[str, tuple[int, int]] = {}
        self._rerouted = 0

    @property
    def swarm(self) -> LocalSwarm:
        if self._swarm is None:
            raise BenchFailed(f"{self.name} has not been started")
        return self._swarm

    def groups(self) -> list[int]:
        """Returns the process groups to freeze while others are measured."""
        return [daemon.process.pid for daemon in self._swarm.daemons.values()] if self._swarm is not None else []

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        place = self._folder / self.name
        place.mkdir()
        self._swarm = swarm = LocalSwarm(
            place,
            self._manifest.to_toml(),
            threads=stage_threads(self.processes),
            corpus=corpus_cache(self._folder),
            flags=self._flags,
        )
        self._nursery.adopt(swarm.terminate, swarm.stop)
        swarm.start("peer-0")
        self.until(lambda: bool(self._spans), "to choose its stages", START_S)  # it answers no peer before
        for number in range(1, self.processes):
            swarm.start(f"peer-{number}")
        self.until(self._is_complete, "to serve all stages", START_S)
        warm = WARM_STEPS * MICROBATCHES_PER_STEP
        self.until(lambda: len(self.completed) >= warm, "to train its first steps", START_S)
        self._rest()

    def measure(self, seconds: float) -> Window:
        """Lets the pipeline fill, then counts from one completion to another for so many seconds."""
        self._read()
        self.completed.clear()
        self.rounds.clear()
        self._rerouted = 0
        self._ask_origins("refill")
        self.fill()
        first = self.completed[-1][0]
        self.until(lambda: self.completed[-1][0] >= first + seconds, "to train", seconds + STALL_S)
        counted = [entry for entry in self.completed if entry[0] > first]
        if self._rerouted:
            print_progress(f"{self.name}: {self._rerouted} microbatches were rerouted")
        self._rest()
        self._read()
        trained = sum(tokens for _, tokens in self.completed)
        return Window(sum(tokens for _, tokens in counted), counted[-1][0] - first, trained)

    def fill(self) -> None:
        """Returns when as much is in flight as will be."""
        self.until(lambda: len(self.completed) > MICROBATCHES_PER_STEP, "to fill its pipeline", STALL_S)

    def account_cells(self) -> dict[str, Cell]:
        """Returns what became of all tokens since the start, as cells of the contender's line of a table.

        steps: optimizer steps taken by each stage. counted_%: the share of the tokens computed that went into a step,
        of the stage with the least. step_fill: tokens that a step holds / its target, the mean over all steps.
        """
        taken, target = sum(stage.steps for stage in self.steps), self._manifest.optimizer.target_tokens
        counted, computed = [stage.counted_tokens for stage in self.steps], self.tokens_computed
        return {
            "steps": "/".join(str(stage.steps) for stage in self.steps),
            "counted_%": round(100 * min(counted) / computed, 1) if computed else None,
            "step_fill": round(sum(counted) / (taken * target), 3) if taken else None,
        }

    def stop(self) -> None:
        """Ends the daemons now."""
        if self._swarm is not None:
            self._swarm.stop()

    def origins(self) -> list[LocalDaemon]:
        """Returns the daemons that hold stage 0."""
        return [daemon for name, daemon in self.swarm.daemons.items() if self._spans.get(name, (-1, -1))[0] == 0]

    def until(self, condition: Any, description: str, seconds: float) -> None:
        """Reads the journals until `condition` is true. Raises BenchFailed, as "... waited for {description}"."""

        def look() -> bool:
            self._read()
            return bool(condition())

        try:
            self.swarm.until(look, f"{self.name} {description}", seconds)
        except SwarmFailed as failed:
            raise BenchFailed(f"{self.name}: {failed}") from failed

    def _is_complete(self) -> bool:
        held = [stage for first, last in self._spans.values() for stage in range(first, last + 1)]
        return len(self._serving) == self.processes and all(
            held.count(stage) >= self._replicas for stage in range(self._stages)
        )

    def _rest(self) -> None:
        self._ask_origins("drain", STALL_S)

    def _ask_origins(self, question: str, timeout_s: float = ANSWER_S) -> None:
        for origin in self.origins():
            if origin.try_ask(question, timeout_s) is None:
                raise BenchFailed(f"{self.name}: an origin did not {question}; the end of its log:\n{origin.log()}")

    def _read(self) -> None:
        for daemon in self.swarm.daemons.values():
            for fields in daemon.new_events():
                self._take(daemon.name, fields)
        self.completed.sort()

    def _take(self, name: str, fields: dict[str, Any]) -> None:
        match fields:
            case {"event": "MicrobatchCompleted", "purpose": "train"}:
                self.completed.append((float(fields["at_unix"]), int(fields["tokens"])))
                self.tokens_computed += int(fields["tokens"])
            case {"event": "StepTaken"} if isinstance(taken := from_json(fields), events.StepTaken):
                self.steps[taken.stage].add(taken)
            case {"event": "SpanChosen"}:
                self._spans[name] = int(fields["first_stage"]), int(fields["last_stage"])
            case {"event": "RoundDone"}:
                self.rounds.append(fields)
            case {"event": "StateChanged", "state": "serving"}:
                self._serving.add(name)
            case {"event": "MicrobatchRerouted"}:
                self._rerouted += 1
            case {"event": "MicrobatchDropped"}:
                print_progress(f"{self.name} dropped a microbatch: {fields['reason']}")
