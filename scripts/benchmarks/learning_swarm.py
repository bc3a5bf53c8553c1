"""One swarm of real daemons that trains on a given number of tokens; its journals, and its weights on the way.

The daemons start as in `swarm demo`: the first trains while the next ones join, at most one per core at a time.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agora_protocol.manifest import Manifest

from agora.cli.demo_totals import DemoTotals
from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.learning_accounts import Accounts, accounts_of
from benchmarks.learning_settings import POINTS, SwarmSetting
from benchmarks.machine import Watch, usable_cores
from benchmarks.task import corpus_cache

POLL_INTERVAL_S: Final = 0.1
STALL_S: Final = 180.0
DRAIN_S: Final = 100.0
ANSWER_S: Final = 30.0
QUIET_S: Final = 2.0
# At the end, the swarm may still take its last steps: until no step came for QUIET_S, for SETTLE_S at most.
SETTLE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The averaged weights of a swarm: after how many tokens and seconds; of each model, a file for each stage.

    There is one model on the way; at the end as many as the stage with the most replicas has.
    """

    tokens: int
    seconds: float
    models: list[list[str]]


@dataclass(slots=True)
class TrainedSwarm:
    """What a run left: accounts, snapshots by time, how many daemons it had, the cores that others used meanwhile."""

    accounts: Accounts
    snapshots: list[Snapshot]
    daemons: int
    others: float


class LearningSwarm:
    """A swarm that trains on a number of tokens, watched from outside; `train` does everything, once."""

    def __init__(
        self, setting: SwarmSetting, manifest: Manifest, tokens: int, folder: Path, groups: Iterable[int] = ()
    ) -> None:
        """tokens: to train on. folder: of the benchmark. groups: process groups that are the benchmark's own, too."""
        self._setting, self._manifest, self._tokens = setting, manifest, tokens
        self._folder = folder / manifest.name
        self._folder.mkdir()
        flags = ["--allow-files", *(["--link", setting.link] if setting.link else [])]
        threads, corpus = max(1, usable_cores() // setting.peers), corpus_cache(folder)
        self._swarm = LocalSwarm(self._folder, manifest.to_toml(), threads=threads, corpus=corpus, flags=flags)
        self._totals = DemoTotals(manifest.optimizer.target_tokens)
        self._journals: dict[str, list[dict[str, Any]]] = {}
        self._steps_seen = 0
        self._not_started = setting.peers  # daemons that are still to be started, replacements included
        self._random = random.Random(manifest.seed)
        self._watch = Watch(groups)

    def train(self) -> TrainedSwarm:
        """Starts the daemons, lets them train, drains and stops them. Raises BenchFailed or SwarmFailed."""
        with ChildProcesses(self._folder) as nursery:
            nursery.adopt(self._swarm.terminate, self._swarm.stop)
            self._start_one()
            snapshots = list(self._until_trained())
            self._drain()
            tokens, seconds = self._totals.tokens_and_seconds()
            models = self._save_weights("end", of_all=True)
            if not models:
                raise BenchFailed(f"{self._setting.name}: a stage has no daemon at the end that gives its weights")
            snapshots.append(Snapshot(tokens, seconds, models))
            others = self._watch.elsewhere()
        self._read()
        accounts = accounts_of(list(self._journals.values()), self._manifest.stage_count, self._totals.target_tokens)
        return TrainedSwarm(accounts, [each for each in snapshots if each.models], len(self._journals), others)

    def _until_trained(self) -> Iterator[Snapshot]:
        next_at = every = self._tokens / POINTS
        kill_every_s, began = self._setting.kill_every_s, time.monotonic()
        next_kill = began + (kill_every_s or 0.0)
        progress, moved_at = -1, began
        while self._tokens_opened() < self._tokens:
            self._read()
            self._swarm.check_alive()
            if self._not_started and len(self._living(serving=False)) < usable_cores():
                self._start_one()
            tokens, now = self._totals.tokens, time.monotonic()
            if tokens >= next_at:
                seconds = time.time() - (self._totals.first_started_unix or 0.0)
                yield Snapshot(tokens, seconds, self._save_weights(str(tokens), of_all=False))
                next_at = tokens + every
            if kill_every_s and now >= next_kill and self._kill_one():
                next_kill += kill_every_s
            if tokens != progress:
                progress, moved_at = tokens, now
            elif now - moved_at > STALL_S:
                raise BenchFailed(f"{self._setting.name}: no microbatch was completed for {STALL_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)

    def _tokens_opened(self) -> int:
        in_flight = sum(len(self._totals.peer(index).unfinished) for index, _ in self._living(serving=True))
        return self._totals.tokens + in_flight * self._manifest.tokens_per_microbatch

    def _living(self, *, serving: bool) -> list[tuple[int, LocalDaemon]]:
        return [
            (index, daemon)
            for index, daemon in enumerate(self._swarm.daemons.values())
            if not daemon.end_is_intended and self._totals.peer(index).is_serving == serving
        ]

    def _start_one(self) -> None:
        answers = (daemon.try_ask("invite") for _, daemon in self._living(serving=True))
        self._swarm.invite = next((str(answer["invite"]) for answer in answers if answer), self._swarm.invite)
        daemon = self._swarm.start(f"peer-{len(self._swarm.daemons)}")
        self._watch.add([daemon.process.pid])
        self._not_started -= 1

    def _kill_one(self) -> bool:
        stages = {index: self._totals.peer(index).stages for index, _ in self._living(serving=True)}
        replicas = Counter(stage for held in stages.values() for stage in held)
        spare = [index for index, held in stages.items() if held and all(replicas[stage] > 1 for stage in held)]
        if not spare:
            return False
        index = self._random.choice(spare)
        list(self._swarm.daemons.values())[index].kill_group()
        self._totals.peer(index).is_killed = True
        self._not_started += 1
        return True

    def _drain(self) -> None:
        # Kills daemons that do not serve yet: once they served, they would open microbatches beyond the tokens to train
        # on.
        for index, daemon in self._living(serving=False):
            daemon.kill_group()
            self._totals.peer(index).is_killed = True
        serving = [daemon for _, daemon in self._living(serving=True)]
        with ThreadPoolExecutor(len(serving)) as pool:
            list(pool.map(lambda daemon: daemon.try_ask("drain", DRAIN_S), serving))
        end, quiet_since, steps = time.monotonic() + SETTLE_S, time.monotonic(), -1
        while time.monotonic() < min(end, quiet_since + QUIET_S):
            self._read()
            if self._steps_seen != steps:
                steps, quiet_since = self._steps_seen, time.monotonic()
            time.sleep(POLL_INTERVAL_S)

    def _save_weights(self, name: str, *, of_all: bool) -> list[list[str]]:
        folder = self._folder / "weights"
        folder.mkdir(exist_ok=True)
        files: dict[int, list[str]] = {stage: [] for stage in range(self._manifest.stage_count)}
        for index, daemon in self._living(serving=True):
            if not of_all and all(files[stage] for stage in self._totals.peer(index).stages):
                continue
            answer: Mapping[str, Any] = daemon.try_ask("weights", ANSWER_S, average=True) or {"files": {}}
            for stage, file in answer["files"].items():
                copy = folder / f"{name}-{daemon.name}-{stage}.safetensors"
                files[int(stage)].append(str(shutil.copyfile(file, copy)))
        if not all(files.values()):
            return []
        count = max(map(len, files.values())) if of_all else 1
        return [[replicas[number % len(replicas)] for replicas in files.values()] for number in range(count)]

    def _read(self) -> None:
        for index, daemon in enumerate(self._swarm.daemons.values()):
            for event in daemon.new_events():
                self._journals.setdefault(daemon.name, []).append(event)
                self._totals.add(index, event)
                self._steps_seen += event["event"] == "StepTaken"
