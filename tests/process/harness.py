"""Real daemons for tests: a LocalSwarm whose daemons are forked, with faults to inject and every log in a failure.

A test waits for what it needs with `Swarm.until`; nothing here sleeps for a fixed time and hopes. The limits are far
above what a quiet machine needs: they end a test that would wait forever, and say nothing about how fast daemons are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest
from safetensors.numpy import load_file

from agora.cli.local_swarm import LocalDaemon as Daemon
from agora.cli.local_swarm import LocalSwarm, SwarmFailed
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import open_tokenizer
from tests.process.forked import Forked

if TYPE_CHECKING:
    from tests.oracle import Batches

T = TypeVar("T")
WAIT_S = 180.0
"""Seconds that a test waits for a condition, and a daemon's answer, before it fails."""
LEAVE_S = 120.0
"""Seconds after which a daemon that was told to leave is killed."""
ENOUGH = 30
"""Microbatches after which a swarm is seen to go on."""
MICROBATCHES_PER_STEP = 8
"""Of `oracle_manifest`."""


class Swarm(LocalSwarm):
    """The daemons of one test."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        # The corpus is kept by content: all tests of a session tokenise a text once.
        super().__init__(directory, manifest.to_toml(), corpus=directory.parent / "corpus", launch=Forked)

    def start(  # type: ignore[override]
        self,
        name: str,
        stages: str = "auto",
        *,
        faults: str = "",
        slowdown: float = 1.0,
        run: str = "",
        flags: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> Daemon:
        """Starts a daemon for these stages, whose device is so many times slower.

        faults: as AGORA_FAULTS has them; `fired` tells which have acted. settings: AGORA_* variables.
        """
        injected = {"AGORA_FAULTS": faults, "AGORA_FAULTS_LOG": str(self.directory / name / "faults.log")}
        environment = {"AGORA_SLOWDOWN": str(slowdown), **(injected if faults else {}), **(settings or {})}
        return super().start(name, run=run, flags=["--stages", stages, *flags], environment=environment)

    def until(self, condition: Callable[[], T | None], description: str, within_s: float = WAIT_S) -> T:
        """See LocalSwarm; a failure shows the end of every daemon's log."""
        try:
            return super().until(condition, description, within_s)
        except SwarmFailed as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def stop(self, within_s: float = LEAVE_S) -> dict[str, int | None]:
        """See LocalSwarm."""
        return super().stop(within_s)

    def has_failed(self, daemon: Daemon) -> bool:
        """See LocalSwarm; a daemon that left in order, or that a fault has killed, has not failed."""
        if not super().has_failed(daemon):
            return False
        # Only of a daemon that has ended: one that is alive may be killed by its fault right after it was asked.
        return daemon.process.poll() != 0 and "kill" not in [entry[2] for entry in fired(daemon)]

    def serving(self, *names: str) -> None:
        """Waits until these daemons (all by default) serve."""
        chosen = [self.daemons[name] for name in names] or list(self.daemons.values())
        self.until(lambda: all(d.is_serving for d in chosen), f"{[d.name for d in chosen]} to serve")

    def completed(self, daemon: Daemon) -> int:
        """Returns how many training microbatches this origin has brought home."""
        return len(daemon.events("MicrobatchCompleted", purpose="train"))

    def logs(self) -> str:
        """Returns the end of every daemon's log."""
        return "\n".join(f"--- {d.name} (exit {d.process.poll()})\n{d.log()}" for d in self.daemons.values())


def tiny(stages: int, **sections: object) -> Manifest:
    """A model so small that the tests measure the protocol and not the arithmetic."""
    small = {"width": 32, "layers": max(2, stages), "heads": 2, "key_value_heads": 1, "feed_forward": 64, "context": 32}
    base = Manifest(name="tiny").model_dump()
    base["model"] |= small | {"subspace": 32}
    base["stages"] = {"count": stages}
    base["schedule"] |= {"microbatch": 2, "max_in_flight": 6}
    base["optimizer"] |= {"target_tokens": 512, "warmup_steps": 4}
    for section, values in sections.items():
        base[section] |= values
    return Manifest.model_validate(base)


def oracle_manifest(
    stages: int, *, kind: str, activations: str, codec: str = "float32", subspace: int = 64
) -> Manifest:
    """A decoder of four layers on the standard library's text; a step of it takes some tenths of a second."""
    base = Manifest(name="oracle").model_dump()
    base["model"] |= {"width": 64, "layers": 4, "heads": 4, "key_value_heads": 2, "feed_forward": 160}
    base["model"] |= {"context": 64, "subspace": subspace}
    base["stages"] = {"count": stages}
    base["boundary"]["codec"] = codec
    base["schedule"] |= {"kind": kind, "microbatch": 4, "activations": activations}
    base["optimizer"] |= {"target_tokens": MICROBATCHES_PER_STEP * 4 * 64, "warmup_steps": 4, "total_steps": 200}
    return Manifest.model_validate(base)


@contextlib.contextmanager
def swarm(directory: Path, manifest: Manifest) -> Iterator[Swarm]:
    """A swarm whose processes are gone afterwards, however the test ends."""
    made = Swarm(directory, manifest)
    try:
        yield made
    finally:
        made.kill_all()


def drained(made: Swarm, *origins: Daemon) -> None:
    """Makes the origins open no more microbatches, and waits until every one that was started has come home."""

    def has_drained(origin: Daemon) -> bool:
        """Whether nothing of the origin is in flight; False while it moves, too: it opens new ones after a move."""
        answer = origin.try_ask("drain", WAIT_S)
        return answer == {"in_flight": 0} and (seen := counts(origin))["started"] == seen["completed"]

    def counts(origin: Daemon) -> dict[str, int]:
        microbatches: dict[str, int] = origin.ask("report")["microbatches"]
        return microbatches

    for origin in origins:
        made.until(partial(has_drained, origin), f"every microbatch of {origin.name} to come home")
        assert counts(origin)["dropped"] == 0


def settled(made: Swarm, *daemons: Daemon) -> None:
    """Waits until each stage of these daemons has taken its last step; of no stage is there another daemon.

    The origins must be drained: then a step is still to come only where tokens enough for one were counted.
    """
    target = made.manifest.optimizer.target_tokens

    def is_settled(daemon: Daemon) -> bool:
        counted: Counter[int] = Counter()
        for event in daemon.events("MicrobatchCounted"):
            counted.update(dict.fromkeys(event["stages"], int(event["tokens"])))
        for event in daemon.events("StepTaken"):
            counted[event["stage"]] -= int(event["tokens"])
        return max(counted.values(), default=0) < target

    made.until(lambda: all(map(is_settled, daemons)), "the last step of every stage")


def nothing_lost(made: Swarm, *origins: Daemon) -> None:
    """Asserts, after a clean stop, that no origin gave up on a microbatch that it had started."""
    for origin in origins:
        dropped = origin.events("MicrobatchDropped")
        assert not dropped, dropped


def swarm_command(elsewhere: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a `swarm` command as on a machine without daemons. elsewhere: a folder of its own."""
    command = [sys.executable, "-m", "agora.cli.main_swarm", *arguments, "--json"]
    environment = os.environ | {"AGORA_RUNTIME_DIR": str(elsewhere)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def fired(daemon: Daemon) -> list[list[str]]:
    """Returns the faults that have acted, as logged before they did: [pid, point, action, count, time]."""
    log = daemon.root / "faults.log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def last_step(daemon: Daemon) -> int:
    """Returns the furthest step that any of its stages has taken."""
    return max((event["step"] for event in daemon.events("StepTaken")), default=0)


def steps_of(daemon: Daemon, stage: int) -> list[dict[str, Any]]:
    """The optimizer steps of a stage, in order."""
    return sorted(daemon.events("StepTaken", stage=stage), key=lambda e: int(e["step"]))


def weights_of(daemon: Daemon, stage: int) -> dict[str, np.ndarray]:
    """The stage's tensors as the daemon, which holds it, has them now."""
    files = daemon.ask("weights")["files"]
    return dict(load_file(files[str(stage)]))


def checkpoint_at(daemon: Daemon, stage: int, step: int) -> dict[str, np.ndarray]:
    """The weights of a stage's checkpoint."""
    found, *_ = daemon.root.glob(f"runs/*/checkpoints/stage-{stage}/step-{step}-*/weights.safetensors")
    return dict(load_file(found))


def newest_common(daemons: Sequence[Daemon]) -> int:
    """Returns the newest step of which all have written a checkpoint; 0 without one."""
    written = [{int(event["step"]) for event in daemon.events("CheckpointWritten")} for daemon in daemons]
    return max(set.intersection(*written), default=0)


def p2pd_of(daemon: Daemon) -> psutil.Process:
    """The daemon's network process."""
    (found,) = [c for c in psutil.Process(daemon.process.pid).children(recursive=True) if "p2pd" in c.name()]
    return found


def counted_twice(daemons: Sequence[Daemon]) -> set[tuple[str, int]]:
    """Returns the (microbatch, stage) pairs whose gradient more than one hop added, killed daemons included."""
    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for daemon in daemons:
        for event in daemon.events("MicrobatchCounted"):
            for stage in event["stages"]:
                (twice if (event["microbatch"], stage) in seen else seen).add((event["microbatch"], stage))
    return twice


def sampler_of(manifest: Manifest, cache: Path) -> Sampler:
    """Returns the data as origins of the run see them."""
    tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary)
    corpus = open_corpus(manifest.data.corpus, tokenizer, cache)
    return Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)


def microbatches_of_a_step(manifest: Manifest) -> int:
    """How many microbatches all origins together open for one step."""
    return manifest.optimizer.target_tokens // manifest.tokens_per_microbatch


def drawn_by(manifest: Manifest, sampler: Sampler, origin: str, shares: Sequence[int]) -> Batches:
    """What that origin drew when it opened so many microbatches for each step."""
    b, numbers = manifest.schedule.microbatch, itertools.count()

    def microbatch(number: int) -> np.ndarray:
        return sampler.batch([sample_id(PeerId(origin), number * b + row) for row in range(b)])

    return [[microbatch(next(numbers)) for _ in range(share)] for share in shares]
