"""`swarm demo`: a whole swarm on this machine, watched from outside through journals and control sockets.

Knows: the order of events of a demo. Must not know: how daemons work, torch, the network.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from agora.cli import console, demo_peers, demo_plan
from agora.cli.console import Failure, say
from agora.cli.demo_books import Books
from agora.cli.demo_peers import Daemon
from agora.cli.demo_plan import Plan
from agora.cli.demo_result import Result, compose, verdict
from agora.cli.demo_ticker import Ticker

POLL_SECONDS = 0.2
START_SECONDS = 120.0
STALL_SECONDS = 180.0
JOIN_SECONDS = 60.0
DRAIN_SECONDS = 90.0
EVALUATE_SECONDS = 300.0
EVALUATE_BATCHES = 32


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP: leave cleanly."""


def run(plan: Plan, *, as_json: bool) -> int:
    """The demo from start to end; the exit code."""
    demo_plan.check(plan)
    manifest = demo_plan.manifest_of(plan)
    with _workspace(plan) as directory:
        (directory / "run.toml").write_text(manifest.to_toml(), encoding="utf-8")
        swarm = Swarm(plan, directory, manifest.optimizer.target_tokens)
        with _signals(swarm):
            try:
                result = swarm.train()
            except Stopped:
                say("stopped; the daemons are gone")
                return console.FAILED
            finally:
                swarm.stop()
        value = compose(plan, swarm.books, result)
    if as_json:
        console.print_json(value)
    reason = verdict(value)
    swarm.ticker.summary(value, quiet=as_json)
    if reason:
        raise Failure(reason)
    return console.DONE


@contextlib.contextmanager
def _workspace(plan: Plan) -> Iterator[Path]:
    """DIR, which stays, or a temporary directory that goes."""
    if plan.directory is not None:
        directory = plan.directory.expanduser().absolute()
        if directory.exists() and any(directory.iterdir()):
            raise Failure(f"{directory} is not empty; name a new directory, or remove it first", console.USAGE)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"cannot make {directory} ({error.strerror}); choose another --dir") from None
        yield directory
        return
    directory = Path(tempfile.mkdtemp(prefix="agora-demo-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _signals(swarm: Swarm) -> Iterator[None]:
    """The first signal stops cleanly, a second one at once; children never outlive the demo."""
    heard = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        if heard > 1:
            demo_peers.kill(swarm.daemons)
            os._exit(console.FAILED)
        if not swarm.stopping:
            raise Stopped

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Swarm:
    """The daemons of one demo and what their journals say."""

    def __init__(self, plan: Plan, directory: Path, target_tokens: int) -> None:
        self.plan = plan
        self.directory = directory
        self.books = Books(target_tokens)
        self.daemons: list[Daemon] = []
        self.ticker = Ticker(plan.steps)
        self._random = random.Random(plan.seed)
        self.stopping = False
        self._began = time.monotonic()
        self._began_unix = time.time()
        self._achieved: tuple[int, int, int] | None = None
        self._achieved_at = self._began
        self._killed = 0
        self._drained: set[int] = set()
        self._invite = ""
        self._flags = ("--link", plan.link) if plan.link else ()
        self._owed = plan.peers  # daemons still to be started, replacements included

    def train(self) -> Result:
        """Start, train to the target, evaluate; everything that went wrong is a Failure."""
        from agora_protocol.invite import Invite

        say(f"starting {self.plan.peers} peers of {self.plan.stages} stages in {self.directory}")
        self._start_one(str(self.directory / "run.toml"))
        self._invite = self._wait_for_invite()
        next_kill = time.monotonic() + (self.plan.kill_every or 0.0)
        while self.books.step < self.plan.steps:
            self._turn()
            self._expect_progress()
            if self.plan.kill_every and time.monotonic() >= next_kill and self._kill_someone():
                next_kill = time.monotonic() + self.plan.kill_every
            time.sleep(POLL_SECONDS)
        reached = time.monotonic()
        self._drain()
        trained = self.books.trained()
        loss = self._evaluate()
        self._wait_for_joiners()
        reports = {str(daemon.index): daemon.ask("report") or {} for daemon in self._living()}
        first_unix = self.books.first_completed_unix
        first_s = first_unix - self._began_unix if first_unix is not None else None
        run = Invite.parse(self._invite).run
        return Result(reached - self._began, first_s, trained, loss, self._killed, reports, run)

    def stop(self) -> None:
        """Ends every daemon and reads the rest of the journals."""
        self.stopping = True
        stubborn = demo_peers.stop(self.daemons)
        self._read_journals()
        self.ticker.close()
        if stubborn:
            say(f"peers {stubborn} did not leave within {demo_peers.STOP_SECONDS:.0f} s and were killed")

    def _living(self) -> list[Daemon]:
        return [daemon for daemon in self.daemons if not self.books.peer(daemon.index).killed]

    def _starting(self) -> list[Daemon]:
        return [daemon for daemon in self._living() if not self.books.peer(daemon.index).serving]

    def _start_one(self, run: str) -> None:
        index = len(self.daemons)
        self.daemons.append(demo_peers.start(index, self.directory, run, self.plan.threads, self._flags))
        self._owed -= 1

    def _wait_for_invite(self) -> str:
        daemon = self.daemons[0]
        while time.monotonic() - self._began < START_SECONDS:
            self._read_journals()
            if not daemon.alive:
                raise demo_peers.ended_unasked(daemon)
            if answer := daemon.ask("invite"):
                return str(answer["invite"])
            time.sleep(POLL_SECONDS / 4)
        raise Failure(f"the first peer was not up within {START_SECONDS:.0f} s: {daemon.last_words()}")

    def _fresh_invite(self) -> str:
        """The invite of whoever serves now: the peer that gave the last one may be dead, as in any real swarm."""
        for daemon in self._living():
            if self.books.peer(daemon.index).serving and (answer := daemon.ask("invite")):
                self._invite = str(answer["invite"])
                break
        return self._invite

    def _turn(self) -> None:
        """One look at everything: journals, deaths, daemons still to be started, the progress line."""
        self._read_journals()
        for daemon in self._living():
            if not daemon.alive:
                raise demo_peers.ended_unasked(daemon)
        if self._owed and len(self._starting()) < demo_plan.cores():
            self._start_one(self._fresh_invite())
        tokens, seconds = self.books.trained()
        rate = tokens / seconds if seconds else 0.0
        serving = sum(self.books.peer(daemon.index).serving for daemon in self._living())
        self.ticker.show(self.books.step, self.books.recent_loss, rate, serving, time.monotonic() - self._began)

    def _read_journals(self) -> None:
        for daemon in self.daemons:
            for fields in daemon.follower.news():
                self.books.take(daemon.index, fields)

    def _expect_progress(self) -> None:
        """Raises Failure when training has stopped; that journals grow says nothing, an idle daemon's does, too."""
        achieved = self.books.achieved(self.plan.peers)
        if achieved != self._achieved:
            self._achieved, self._achieved_at = achieved, time.monotonic()
        elif time.monotonic() - self._achieved_at > STALL_SECONDS:
            completed, step, joined = achieved
            raise Failure(
                f"training stopped: still {completed} microbatches, step {step} and {joined} peers after "
                f"{STALL_SECONDS:.0f} s: {self._living()[0].last_words()}"
            )

    def _kill_someone(self) -> bool:
        """SIGKILL to a random peer whose every stage another serving peer holds; False when there is none now."""
        serving = [daemon for daemon in self._living() if self.books.peer(daemon.index).serving]
        victims = [daemon for daemon in serving if self._spared_by_others(daemon, serving)]
        if not victims:
            return False
        victim = self._random.choice(victims)
        victim.signal(signal.SIGKILL)
        victim.process.wait()
        self.books.peer(victim.index).killed = True
        self._read_journals()
        demo_peers.kill([victim])
        self._killed += 1
        self._owed += 1
        self.ticker.note(f"killed peer {victim.index} (SIGKILL), starting a fresh one")
        return True

    def _spared_by_others(self, daemon: Daemon, serving: list[Daemon]) -> bool:
        span = self.books.peer(daemon.index).span
        if span is None:
            return False
        others = [self.books.peer(other.index).span for other in serving if other is not daemon]
        held = {stage for other in others if other is not None for stage in range(other[0], other[1] + 1)}
        return set(range(span[0], span[1] + 1)) <= held

    def _wait_for_joiners(self) -> None:
        """Lets the daemons that are being started arrive, so that every peer asked for was there; they find rest."""
        deadline = time.monotonic() + JOIN_SECONDS
        while (self._owed or self._starting()) and time.monotonic() < deadline:
            self._turn()
            self._drain()
            time.sleep(POLL_SECONDS)
        self._drain()

    def _drain(self) -> None:
        """No further microbatches; those in flight come home."""
        for daemon in self._living():
            if not self.books.peer(daemon.index).serving or daemon.index in self._drained:
                continue
            if daemon.ask("drain", timeout_s=DRAIN_SECONDS) is not None:
                self._drained.add(daemon.index)
        self._read_journals()

    def _evaluate(self) -> float | None:
        """The held-out loss through the swarm, asked of the origin that has trained longest."""
        origins = [daemon for daemon in self._living() if 0 in self.books.peer(daemon.index).steps]
        for daemon in sorted(origins, key=lambda daemon: -self.books.peer(daemon.index).steps[0]):
            answer = daemon.ask("evaluate", timeout_s=EVALUATE_SECONDS, batches=EVALUATE_BATCHES)
            if answer is not None:
                return float(answer["loss"])
        return None
