"""(b) A local swarm: one `agora-node join` per stage, each its own process with its own libp2p host and DHT node.

Knows: the demo's way to start daemons, their control sockets and journals. Must not know: how daemons work, torch.
The completions in the origin's journal carry their times, so a window begins and ends exactly at a completion.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.cli import demo_peers
from agora.cli.demo_peers import Daemon
from benchmarks.children import BenchFailed, Nursery, tail
from benchmarks.task import MICROBATCHES_PER_STEP
from benchmarks.window import START_S, Window, stage_threads, tell

POLL_S = 0.1
STALL_S = 60.0
ANSWER_S = 20.0
WARM_STEPS = 1


class SwarmContender:
    """A swarm of `replicas` daemons for each stage. Comes to rest by draining those that originate microbatches."""

    note = "agora-node daemons, one per stage, over a real DHT and libp2p on loopback, bf16 boundaries, asynchronous"

    def __init__(
        self,
        manifest: Manifest,
        nursery: Nursery,
        folder: Path,
        name: str | None = None,
        replicas: int = 1,
        link: str | None = None,
    ) -> None:
        """link: RATE,RTT[,JITTER[,LOSS]] that every daemon shall be behind, see docs/links.md. The run is called as the
        contender: daemons of one machine that start from equal drafts are one run.
        """
        self.name = name or f"swarm{manifest.stage_count}"
        self.processes = replicas * manifest.stage_count
        self.threads = self.processes * stage_threads(self.processes)
        self.rounds: list[dict[str, Any]] = []
        """RoundDone events of the last window, its filling and draining included."""
        self._manifest, self._replicas = manifest.replaced(name=self.name), replicas
        self._flags = ("--link", link) if link else ()
        self._nursery, self._folder = nursery, folder / self.name
        self._daemons: list[Daemon] = []
        self._completed: list[tuple[float, int]] = []  # (unix time, tokens) of every microbatch that came home
        self._serving: set[int] = set()
        self._spans: dict[int, tuple[int, int]] = {}  # daemon: its first and last stage
        self._rerouted = 0

    def groups(self) -> list[int]:
        """See Contender."""
        return [daemon.process.pid for daemon in self._daemons]

    def start(self) -> None:
        """See Contender."""
        self.gather()
        self._rest()

    def gather(self) -> None:
        """Starts all daemons, and returns when they have trained their first steps and train on."""
        self._folder.mkdir()
        file = self._folder / "run.toml"
        file.write_text(self._manifest.to_toml(), encoding="utf-8")
        # The daemons look for the corpus beside their own directories; all contenders share one.
        (self._folder / "corpus").symlink_to(self._folder.parent / "corpus")
        self._nursery.adopt(self._dismiss, lambda: demo_peers.stop(self._daemons))
        self._start_one(str(file))
        invite = self._await_invite()
        self._wait_until("choose its stages", lambda: bool(self._spans), START_S)  # before, it answers nobody
        for _ in range(1, self.processes):
            self._start_one(invite)
        self._wait_until("serve all stages", self._complete, START_S)
        warm = WARM_STEPS * MICROBATCHES_PER_STEP
        self._wait_until("train its first steps", lambda: len(self._completed) >= warm, START_S)

    def measure(self, seconds: float) -> Window:
        """Lets the pipeline fill, then counts from one completion to another for so many seconds."""
        self._read()
        self._completed.clear()
        self.rounds.clear()
        self._rerouted = 0
        self._ask("resume")
        self._fill()
        first = self._completed[-1][0]
        self._wait_until("train", lambda: self._completed[-1][0] >= first + seconds, seconds + STALL_S)
        counted = [entry for entry in self._completed if entry[0] > first]
        if self._rerouted:
            tell(f"{self.name}: {self._rerouted} microbatches were rerouted")
        self._rest()
        self._read()
        trained = sum(tokens for _, tokens in self._completed)
        return Window(sum(tokens for _, tokens in counted), counted[-1][0] - first, trained)

    def _fill(self) -> None:
        """Returns when as much is in flight as will be."""
        self._wait_until("fill its pipeline", lambda: len(self._completed) > MICROBATCHES_PER_STEP, STALL_S)

    def _complete(self) -> bool:
        """Every daemon serves, and every stage has its replicas."""
        held = [stage for first, last in self._spans.values() for stage in range(first, last + 1)]
        stages = range(self._manifest.stage_count)
        return len(self._serving) == self.processes and all(held.count(stage) >= self._replicas for stage in stages)

    def stop(self) -> None:
        """Ends the daemons now."""
        daemons, self._daemons = self._daemons, []
        demo_peers.stop(daemons)

    def _dismiss(self) -> None:
        for daemon in self._daemons:
            if daemon.alive:
                daemon.process.terminate()

    def _start_one(self, run: str) -> None:
        threads = stage_threads(self.processes)
        self._daemons.append(demo_peers.start(len(self._daemons), self._folder, run, threads, self._flags))

    def _await_invite(self) -> str:
        found: list[str] = []

        def asked() -> bool:
            answer = self._daemons[0].ask("invite")
            found.extend([str(answer["invite"])] if answer else [])
            return bool(found)

        self._wait_until("give an invite", asked, START_S)
        return found[0]

    def _rest(self) -> None:
        """No further microbatches; those in flight come home."""
        self._ask("drain", STALL_S)

    def _ask(self, what: str, timeout_s: float = ANSWER_S) -> None:
        origins = [daemon for daemon in self._daemons if self._spans.get(daemon.index, (-1, -1))[0] == 0]
        for origin in origins:
            if origin.ask(what, timeout_s=timeout_s) is None:
                raise BenchFailed(f"{self.name}: an origin did not {what}; the end of its log:\n{self._log(origin)}")

    def _wait_until(self, what: str, done: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._read()
            if done():
                return
            for daemon in self._daemons:
                if not daemon.alive:
                    raise BenchFailed(
                        f"{self.name}: a daemon ended by itself; the end of its log:\n{self._log(daemon)}"
                    )
            if time.monotonic() > deadline:
                raise BenchFailed(f"{self.name} did not {what} within {seconds:.0f} s:\n{self._log(self._daemons[0])}")
            time.sleep(POLL_S)

    def _read(self) -> None:
        """Takes what is new in the journals; completions are in order of time."""
        for daemon in self._daemons:
            for fields in daemon.follower.news():
                self._take(daemon, fields)
        self._completed.sort()

    def _take(self, daemon: Daemon, fields: dict[str, Any]) -> None:
        kind = fields.get("event")
        if kind == "MicrobatchCompleted" and fields["purpose"] == "train":
            self._completed.append((float(fields["at_unix"]), int(fields["tokens"])))
        elif kind == "SpanChosen":
            self._spans[daemon.index] = int(fields["first_stage"]), int(fields["last_stage"])
        elif kind == "RoundDone":
            self.rounds.append(fields)
        elif kind == "StateChanged" and fields["state"] == "serving":
            self._serving.add(daemon.index)
        elif kind == "MicrobatchRerouted":
            self._rerouted += 1
        elif kind == "MicrobatchDropped":
            tell(f"{self.name} dropped a microbatch: {fields['reason']}")

    def _log(self, daemon: Daemon) -> str:
        return tail(daemon.root / "log.txt")
