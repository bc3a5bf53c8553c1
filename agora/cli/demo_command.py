"""`swarm demo`: trains a whole swarm on this machine, and watches it through journals and control sockets."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from agora_protocol.invite import Invite

from agora.cli import console
from agora.cli.console import Failure, ProgressDisplay, print_to_stderr
from agora.cli.demo_totals import DemoMeasurements, DemoTotals, TuningTotals, failure_of, result_of, summary_of
from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from agora.core.user_paths import expand_home

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

POLL_INTERVAL_S = 0.2
STALL_TIMEOUT_S = 180.0  # without any progress, after which a demo fails
JOIN_TIMEOUT_S = 60.0  # to wait, after the last step, for peers that are still joining
DRAIN_TIMEOUT_S = 90.0  # for each peer
EVALUATION_TIMEOUT_S = 300.0  # for each peer
EVALUATE_BATCHES = 32
STDLIB = "stdlib"
USUAL_PRESET = "tiny"
# Minimum number of warm-up steps: with fewer, Adam's first steps at the full rate make the loss rise at first.
MIN_WARMUP_STEPS = 8


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The flags of `swarm demo`, with their defaults."""

    peers: int = 4
    stages: int = 2
    steps: int = 40
    data: tuple[str, ...] = (STDLIB,)  # STDLIB and paths of texts, or the one data file of a base model
    preset: str | None = None  # None for USUAL_PRESET
    codec: str | None = None
    link: str | None = None  # a link to emulate
    kill_every: float | None = None  # seconds between two kills of a peer; None for none
    seed: int = 0
    directory: Path | None = None  # None for a temporary one
    base_model: Path | None = None
    adapter: Path | None = None  # folder of the LoRA adapter that the run goes on from
    objective: str | None = None

    def manifest(self) -> Manifest:
        """With a codec, boundaries have the model's whole width, not the preset's subspace. Raises Failure for wrong
        flags; for a base model also BaseModelError and DataError.
        """
        from agora_protocol.errors import ManifestError

        from agora.net.shaping.link import LinkError, LinkSpec

        if self.peers < self.stages:
            why = f"--peers {self.peers} cannot hold {self.stages} stages; give --peers {self.stages} or more"
            raise Failure(why, console.EXIT_USAGE)
        try:
            if self.link is not None:
                LinkSpec.parse(self.link)
            folder = self.base_model
            base = self._manifest_of_preset() if folder is None else self._manifest_of_base_model(folder)
            return self._adapt(base)
        except LinkError as error:
            raise Failure(f"--link: {error}", console.EXIT_USAGE) from None
        except ManifestError as error:
            raise Failure(str(error), console.EXIT_USAGE) from None

    def _manifest_of_preset(self) -> Manifest:
        from agora_protocol.manifest import preset

        for flag, value in (("objective", self.objective), ("adapter", self.adapter)):
            if value is not None:
                raise Failure(f"--{flag} is for a base model; give one with --base-model DIR", console.EXIT_USAGE)
        base = preset(self.preset or USUAL_PRESET)
        corpus = tuple(text if text == STDLIB else Path(text).name for text in self._texts())
        if len(set(corpus)) < len(corpus):
            raise Failure("two texts of --data have one name; rename one", console.EXIT_USAGE)
        layers = max(base.model.layers, self.stages)
        return base.with_values(model={"layers": layers}, stages={"count": self.stages}, data={"corpus": corpus})

    def _texts(self) -> list[str]:
        # STDLIB and absolute paths, those of a pattern that the shell has left as it is included.
        found = list[str]()
        for text in self.data:
            path = expand_home(text).absolute()
            paths = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
            if not paths and text != STDLIB:
                raise Failure(f"--data {text}: there is no such file or folder; correct the path", console.EXIT_USAGE)
            found += [STDLIB] if text == STDLIB else paths
        return found

    def _manifest_of_base_model(self, folder: Path) -> Manifest:
        from agora.cli.new_command import TuningChoice, manifest_of_base_model, name_files

        if self.preset is not None:
            raise Failure("--preset and --base-model exclude each other; give one of them", console.EXIT_USAGE)
        if len(self.data) > 1:
            raise Failure("--base-model learns from one file; give one with --data FILE", console.EXIT_USAGE)
        file = None if self.data == (STDLIB,) else Path(self.data[0])
        choice = TuningChoice((file,) if file is not None else (), self.objective, adapter=self.adapter)
        made = manifest_of_base_model(folder, "demo", choice)
        # The demo has its own number of steps, so that the manifest's, the last line, would be wrong.
        for line in made.summary_lines()[:-1] if made.data is not None else made.summary_lines():
            print_to_stderr(line)
        return name_files(made.manifest, folder, folder)[0]

    def _adapt(self, base: Manifest) -> Manifest:
        return base.with_values(
            name="demo",
            seed=self.seed,
            model=base.model.full_boundary() if self.codec else {},
            stages={"count": self.stages, "first_layers": ()},
            boundary={"codec": self.codec} if self.codec else {},
            optimizer={
                "warmup_steps": min(base.optimizer.warmup_steps, max(MIN_WARMUP_STEPS, self.steps // 4)),
                "total_steps": max(self.steps, 2 * MIN_WARMUP_STEPS),
            },
        )

    def flags(self) -> list[str]:
        """Returns the flags for every daemon of the demo: --allow-files, link, data, base model and adapter, if any.

        They say where the files are, so that the manifest, which others may see, does not.
        """
        data = [flag for text in self._texts() if text != STDLIB for flag in ("--data", text)]
        named = (("--base-model", self.base_model), ("--adapter", self.adapter))
        folders = [part for flag, at in named if at is not None for part in (flag, str(expand_home(at).absolute()))]
        return ["--allow-files", *(["--link", self.link] if self.link else []), *folders, *data]


def tuning_totals(manifest: Manifest) -> TuningTotals | None:
    """Returns empty TuningTotals if the run begins with a base model (this loads torch); None for other runs."""
    from agora_protocol.manifest_model import HfSection

    if not isinstance(manifest.model, HfSection):
        return None
    from agora.model import family_of

    return TuningTotals(
        objective=manifest.objective.kind,
        trainable_parameters=family_of(manifest.model).parameter_count(range(manifest.model.layers)),
        step_tokens=manifest.optimizer.target_tokens,
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run(options: DemoOptions, *, as_json: bool) -> int:
    """Trains, prints the result with a text that the model wrote, and ends all daemons in any case. Raises Failure when
    training stalls or the result is bad, SwarmFailed when a daemon dies.
    """
    from agora.cli.sample_command import begin_loading, lines_of_model, try_sample

    # Daemons of one machine that start from equal drafts are one run: two demos at a time would train together.
    manifest = options.manifest().with_values(name=f"demo-{os.urandom(3).hex()}")
    with _workspace(options.directory) as directory:
        swarm = LocalSwarm(
            directory, manifest.to_toml(), threads=max(1, cores() // options.peers), flags=options.flags()
        )
        demo = Demo(options, swarm, manifest.optimizer.target_tokens, tuning_totals(manifest))
        with _stop_on_signals(demo):
            try:
                measured = demo.train()
                begin_loading()  # while the daemons leave
            except KeyboardInterrupt:
                print_to_stderr("stopped; the daemons are gone")
                return console.EXIT_FAILED
            finally:
                demo.stop()
        result = result_of(
            demo.totals, measured, peers=options.peers, stages=options.stages, steps=options.steps, link=options.link
        )
        reason = failure_of(result)
        result["sample"] = [] if reason else try_sample(swarm.file, options.seed, base_model=options.base_model)
    if as_json:
        console.print_json(result)
    for line in [*summary_of(result), *lines_of_model(result["sample"], options.steps, options.directory)]:
        (print_to_stderr if as_json else print)(line)
    if reason:
        raise Failure(reason)
    return console.EXIT_DONE


@contextlib.contextmanager
def _workspace(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        try:
            made = tempfile.TemporaryDirectory(prefix="agora-demo-", ignore_cleanup_errors=True)
        except OSError as error:
            reason = error.strerror or error
            raise Failure(
                f"cannot make a temporary folder ({reason}); set TMPDIR, or name a folder with --dir"
            ) from None
        with made as temporary:
            yield Path(temporary)
        return
    directory = expand_home(chosen).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise Failure(f"cannot make {directory} ({error.strerror}); choose another --dir") from None
    if not is_empty:
        raise Failure(f"{directory} is not empty; name a new directory, or remove it first", console.EXIT_USAGE)
    yield directory


@contextlib.contextmanager
def _stop_on_signals(demo: Demo) -> Iterator[None]:
    signals_seen = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen > 1:
            demo.swarm.kill_all()
            os._exit(console.EXIT_FAILED)
        if not demo.is_stopping:
            raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


class Demo:
    """One demo: starts daemons, adds up their journals, kills and replaces some, drains, evaluates, stops all.

    Call `train` once, and `stop` in any case. totals: what the journals say so far.
    """

    def __init__(
        self, options: DemoOptions, swarm: LocalSwarm, target_tokens: int, tuning: TuningTotals | None = None
    ) -> None:
        """target_tokens: the tokens of one optimizer step. tuning: totals for a base model, None for other runs."""
        self.options, self.swarm = options, swarm
        self.totals = DemoTotals(target_tokens, tuning)
        self.is_stopping = False
        self._not_started = options.peers  # daemons that are still to be started, replacements included
        self._drained: set[int] = set()
        self._random = random.Random(options.seed)
        self._achieved = (0, 0, 0)  # the newest progress, see DemoTotals.progress
        self._achieved_at = time.monotonic()
        what = f"starting {options.peers} peers of {options.stages} stages in {swarm.directory}"
        self._display = ProgressDisplay(what, options.steps)

    def train(self) -> DemoMeasurements:
        """`total_seconds` ends with the last step, `trained` with the drain. Raises Failure when training stalls,
        SwarmFailed when a daemon has died.
        """
        began = time.monotonic()
        began_unix = time.time()
        with self._display:
            self._start_next_daemon()
            self._train_to_the_last_step()
            total_seconds = time.monotonic() - began
            self._drain()
            trained = self.totals.tokens_and_seconds()
            loss = self._evaluate()
            self._await_joining_peers()
        return DemoMeasurements(Invite.parse(self.swarm.invite).run, began_unix, total_seconds, trained, loss)

    def stop(self) -> None:
        """Ends every daemon, kills those that do not leave in time and prints their names; reads all new events."""
        self.is_stopping = True
        stubborn = [name for name, code in self.swarm.stop().items() if code is None]
        self._read_journals()
        if stubborn:
            print_to_stderr(f"{', '.join(stubborn)} did not leave in time and were killed")

    def _train_to_the_last_step(self) -> None:
        kill_every = self.options.kill_every
        next_kill = time.monotonic() + (kill_every or 0.0)
        while self.totals.step < self.options.steps:
            self._watch_once()
            self._raise_if_stalled()
            if kill_every and time.monotonic() >= next_kill and self._kill_a_peer():
                next_kill = time.monotonic() + kill_every
            time.sleep(POLL_INTERVAL_S)

    def _watch_once(self) -> None:
        self._read_journals()
        self.swarm.check_alive()
        if self._not_started and len(self._living(serving=False)) < cores():
            self._start_next_daemon()
        tokens, seconds = self.totals.tokens_and_seconds()
        rate = tokens / seconds if seconds else 0.0
        loss = f"{self.totals.recent_loss:.3f}" if self.totals.recent_loss is not None else "-"
        step, steps = min(self.totals.step, self.options.steps), self.options.steps
        peers = len(self._living(serving=True))
        self._display.show(step, f"step {step}/{steps}  loss {loss}  {rate:,.0f} tokens/s  {peers} peers")

    def _living(self, *, serving: bool) -> list[tuple[int, LocalDaemon]]:
        return [
            (index, daemon)
            for index, daemon in enumerate(self.swarm.daemons.values())
            if not daemon.end_is_intended and self.totals.peer(index).is_serving == serving
        ]

    def _start_next_daemon(self) -> None:
        # the peer of the last invite may be dead
        answers = (daemon.try_ask("invite") for _, daemon in self._living(serving=True))
        self.swarm.invite = next((str(answer["invite"]) for answer in answers if answer), self.swarm.invite)
        self.swarm.start(f"peer-{len(self.swarm.daemons)}")
        self._not_started -= 1

    def _read_journals(self) -> None:
        for index, daemon in enumerate(self.swarm.daemons.values()):
            for fields in daemon.new_events():
                self.totals.add(index, fields)

    def _raise_if_stalled(self) -> None:
        achieved = self.totals.progress(self.options.peers)
        if achieved != self._achieved:
            self._achieved = achieved
            self._achieved_at = time.monotonic()
        elif time.monotonic() - self._achieved_at > STALL_TIMEOUT_S:
            completed, step, joined = achieved
            words = next(d.last_words() for d in self.swarm.daemons.values() if not d.end_is_intended)
            still = f"still {completed} microbatches, step {step} and {joined} peers after {STALL_TIMEOUT_S:.0f} s"
            raise Failure(f"training stopped: {still}: {words}")

    def _kill_a_peer(self) -> bool:
        stages_of = {index: self.totals.peer(index).stages for index, _ in self._living(serving=True)}
        replicas = Counter(stage for stages in stages_of.values() for stage in stages)
        spare = [index for index, stages in stages_of.items() if stages and all(replicas[k] > 1 for k in stages)]
        if not spare:
            return False
        index = self._random.choice(spare)
        victim = list(self.swarm.daemons.values())[index]
        victim.kill_group()
        self.totals.peer(index).is_killed = True
        self._not_started += 1
        self._display.note(f"killed {victim.name} (SIGKILL), starting a fresh one")
        return True

    def _await_joining_peers(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while (self._not_started or self._living(serving=False)) and time.monotonic() < deadline:
            self._watch_once()
            self._drain()
            time.sleep(POLL_INTERVAL_S)
        self._drain()

    def _drain(self) -> None:
        for index, daemon in self._living(serving=True):
            if index not in self._drained and daemon.try_ask("drain", DRAIN_TIMEOUT_S) is not None:
                self._drained.add(index)
        self._read_journals()

    def _evaluate(self) -> float | None:
        for index, daemon in self._living(serving=True):
            serves_first = 0 in self.totals.peer(index).stages
            if serves_first and (answer := daemon.try_ask("evaluate", EVALUATION_TIMEOUT_S, batches=EVALUATE_BATCHES)):
                return float(answer["loss"])
        return None
