"""Draws microbatches and stays with each until it is completed: where everything that the swarm trains on begins.

Knows credit, schedules, patience and what was completed. Must not know routing, tensors' contents, or other origins
beyond how many there are. A microbatch once started is never dropped while this origin lives: a failed attempt is
followed by another of the same id and the same data, with twice the time. Only leaving drops, and counts what it drops.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from agora_protocol.errors import AgoraError, Busy, Unavailable
from agora_protocol.ids import MicrobatchId, PeerId, microbatch_id
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_HINTS
from agora_protocol.messages import Advance, Process
from agora_protocol.tensors import WireTensor

from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.pipeline.credit import PER_STAGE, Credit, Pace, in_flight, step_share
from agora.pipeline.interfaces import BatchSource, HopAnswer, HopEntrance
from agora.pipeline.signal import Signal

LEAST_PATIENCE_S = 20.0
PATIENCE_TRIPS = 10.0
"""An attempt may take this many times what attempts usually take: room for a hung peer at every stage."""
MOST_PATIENCE_S = MAX_DEADLINE_MS / 1000.0
RETRY_S, RETRY_MOST_S = 0.05, 2.0
LOOK_S = 0.5
GRACE_S = 3.0
"""Without a step for so long and nothing open, an origin of a synchronous run looks what the step lacks."""


@dataclass(frozen=True, slots=True)
class OriginConfig:
    """How this origin opens microbatches.

    `ceiling`: most microbatches in flight that memory allows (admission's seats). `max_in_flight`: the manifest's, 0
    for measured. `first_patience_s`: for the first attempt, before anything is measured.
    """

    me: PeerId
    stage_count: int
    synchronous: bool
    target_tokens: int
    tokens_per_microbatch: int
    ceiling: int
    max_in_flight: int = 0
    first_patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Share:
    """This origin is the `rank`-th of `origins` that share a synchronous step."""

    rank: int = 0
    origins: int = 1


@dataclass(frozen=True, slots=True)
class OwnStage:
    """Stage 0 here: steps it has taken, tokens its replicas still lack for the next, whether the run may go on."""

    step_of: Callable[[], int]
    missing_tokens: Callable[[], int]
    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss: `loss` is the mean per token over `tokens`."""

    loss: float
    tokens: int


@dataclass(slots=True)
class OriginStatistics:
    """What became of this origin's training microbatches, since its start."""

    started: int = 0
    completed: int = 0
    dropped: int = 0
    retried: int = 0
    tokens: int = 0
    loss: float | None = None


@dataclass(slots=True)
class _Parcel:
    """One microbatch of this origin: its data, and who has taken it in earlier attempts."""

    microbatch: MicrobatchId
    tokens: WireTensor
    purpose: str
    started: float
    step: int = 0
    path: dict[int, PeerId] = field(default_factory=dict)

    def heard(self, news: Advance) -> None:
        """Keeps the newest peer seen to hold each stage."""
        if news.stage > 0:
            self.path[news.stage] = news.peer


class Origin:
    """Opens microbatches into this peer's own hop. `run` until cancelled or left."""

    def __init__(
        self,
        config: OriginConfig,
        entrance: HopEntrance,
        batches: BatchSource,
        report: Report,
        *,
        share: Callable[[], Share] = Share,
        stage: OwnStage | None = None,
        path_s: Callable[[], float | None] = lambda: None,
        session: bytes | None = None,
    ) -> None:
        self._config = config
        self._entrance = entrance
        self._batches = batches
        self._report = report
        self._share = share
        self._stage = stage
        self._path_s = path_s
        self._session = os.urandom(8) if session is None else session
        self._ids = 0
        self._drawn = 0
        self._open: set[asyncio.Task[None]] = set()
        self._changed = Signal()
        self._paused = False
        self._leaving = False
        self._step_left = 0
        self._step = -1
        self._stuck_since: float | None = None
        self._pace = Pace()
        self._most = PER_STAGE * config.stage_count  # rises with completions: doubled in a trip, as TCP starts
        self._trip_s = 0.0
        self.statistics = OriginStatistics()
        self.credit = Credit(1, "not measured yet")

    @property
    def open_microbatches(self) -> int:
        """Training microbatches in flight."""
        return len(self._open)

    async def run(self) -> None:
        """Trains until `leave` has ended, or until cancelled, which drops what is open."""
        async with asyncio.TaskGroup() as group:
            while await self._may_open():
                parcel = self._draw()
                task = group.create_task(self._train(parcel), name=f"microbatch {parcel.microbatch.hex()}")
                self._open.add(task)
                task.add_done_callback(self._closed)

    async def leave(self, within_s: float) -> int:
        """Opens nothing more, waits at most `within_s` for what is open, then gives it up; how many were dropped."""
        self._leaving = True
        self._changed.notify()
        until = loop_time() + within_s
        while self._open and loop_time() < until:
            await self._changed.wait(until)
        dropped = [task for task in self._open if task.cancel()]
        if dropped:
            await asyncio.wait(dropped)
        return len(dropped)

    def pause(self) -> None:
        """Opens nothing more until `resume`; what is open is finished."""
        self._paused = True

    def resume(self) -> None:
        """Opens microbatches again."""
        self._paused = False
        self._pace = self._pace.interrupted()
        self._changed.notify()

    async def evaluate(self, count: int, within_s: float) -> Evaluation:
        """The mean loss per token over at most `count` held-out microbatches, each sent through the swarm.

        Raises Unavailable when they are not back in `within_s`, or when nothing is held out.
        """
        started, sums = loop_time(), [0.0, 0]
        seats = asyncio.Semaphore(max(2, self.credit.limit // 2))

        async def one(tokens: WireTensor) -> None:
            async with seats:
                answer = await self._deliver(self._parcel(tokens, "evaluate"))
                sums[0] += answer.message.loss_sum
                sums[1] += answer.message.tokens

        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                for tokens in self._batches.heldout(count):
                    group.create_task(one(tokens), name="evaluation")
        except TimeoutError:
            raise Unavailable(0, [f"the evaluation did not end in {within_s:.0f} s"]) from None
        if not sums[1]:
            raise Unavailable(0, ["no held-out text; raise data.heldout in the manifest of the next run"])
        result = Evaluation(sums[0] / sums[1], int(sums[1]))
        self._report(events.EvaluationDone(result.loss, result.tokens, loop_time() - started))
        return result

    # --- opening

    async def _may_open(self) -> bool:
        """Waits until the next microbatch may be opened; False when this origin is leaving."""
        while not self._leaving:
            ready = self._stage is None or self._stage.ready()
            if ready and not self._paused and self._has_room():
                return True
            patient = ready and not self._config.synchronous
            await self._changed.wait(None if patient else loop_time() + LOOK_S)
        return False

    def _has_room(self) -> bool:
        config = self._config
        if not config.synchronous:
            self.credit = self._measured_credit()
            return len(self._open) < self.credit.limit
        if not self._step_left and not self._open:
            self._step_left = self._next_share()
            self.credit = Credit(min(self._step_left, config.ceiling), f"{self._step_left} microbatches to the step")
        return self._step_left > 0 and len(self._open) < config.ceiling

    def _next_share(self) -> int:
        """Microbatches of a synchronous step that this origin opens now: its share once the stage is at a new step.

        Shares need not add up, when origins come and go: what a step still lacks after GRACE_S is opened by everyone
        who has nothing else to do, in parts.
        """
        config, share = self._config, self._share()
        step = self._step + 1 if self._stage is None else self._stage.step_of()
        if step != self._step:
            self._step, self._stuck_since = step, None
            return step_share(config.target_tokens, config.tokens_per_microbatch, share.rank, share.origins)
        if self._stuck_since is None:
            self._stuck_since = loop_time()
        if loop_time() - self._stuck_since < GRACE_S:
            return 0
        self._stuck_since = None
        lacking = -(-self._stage.missing_tokens() // config.tokens_per_microbatch) if self._stage else 0
        return -(-lacking // share.origins)

    def stepped(self) -> None:
        """The own stage 0 has taken a step."""
        self._changed.notify()

    def _measured_credit(self) -> Credit:
        config = self._config
        if config.max_in_flight:
            limit = min(config.max_in_flight, config.ceiling)
            return Credit(limit, f"{limit}: schedule.max_in_flight, bounded by {config.ceiling}")
        most = min(self._most, config.ceiling)
        return in_flight(self._path_s(), self._pace.period_s, config.stage_count, most)

    def _draw(self) -> _Parcel:
        tokens = self._batches.draw(self._drawn)
        self._drawn += 1
        self._step_left = max(0, self._step_left - 1)
        return self._parcel(tokens, "train", max(self._step, 0))

    def _parcel(self, tokens: WireTensor, purpose: str, step: int = 0) -> _Parcel:
        microbatch = microbatch_id(self._session, self._ids)
        self._ids += 1
        return _Parcel(microbatch, tokens, purpose, loop_time(), step)

    # --- carrying

    async def _train(self, parcel: _Parcel) -> None:
        """One training microbatch, until it is completed."""
        self.statistics.started += 1
        answer = None
        try:
            answer = await self._deliver(parcel)
        finally:
            if answer is None:
                self.statistics.dropped += 1
        message, statistics = answer.message, self.statistics
        statistics.completed += 1
        statistics.tokens += message.tokens
        if message.tokens:
            loss = message.loss_sum / message.tokens
            statistics.loss = loss if statistics.loss is None else statistics.loss + 0.05 * (loss - statistics.loss)
        self._pace = self._pace.completed(loop_time())
        self._most = min(self._most + 1, 2 * self.credit.limit)

    async def _deliver(self, parcel: _Parcel) -> HopAnswer:
        """The answer to a microbatch: attempts follow each other until one succeeds."""
        name = parcel.microbatch.hex()
        self._report(events.MicrobatchStarted(name, parcel.purpose))
        attempt, answer = 0, None
        try:
            while answer is None:
                answer = await self._attempt(parcel, attempt)
                attempt += 1
        finally:
            if answer is None:
                self._report(events.MicrobatchDropped(name, "this peer is leaving"))
        message = answer.message
        seconds = loop_time() - parcel.started
        self._report(events.MicrobatchCompleted(name, message.loss_sum, message.tokens, seconds, parcel.purpose))
        return answer

    async def _attempt(self, parcel: _Parcel, attempt: int) -> HopAnswer | None:
        """One attempt through the whole pipeline; None when it failed and the next may begin."""
        patience = self._patience(attempt)
        deadline, wait = loop_time() + patience, RETRY_S * 2.0 ** min(attempt, 16)
        hint = tuple(sorted(parcel.path.items())[:MAX_HINTS])
        message = Process(
            parcel.microbatch, self._config.me, 0, parcel.purpose, max(1, int(1000.0 * patience)), hint, parcel.step
        )
        started = loop_time()
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._entrance.process(message, [parcel.tokens], deadline, parcel.heard)
            self._trip_s += 0.1 * (loop_time() - started - self._trip_s) if self._trip_s else loop_time() - started
            return answer
        except Busy as refusal:
            wait = max(wait, refusal.retry_after_ms / 1000.0)
        except (TimeoutError, AgoraError) as error:
            self._failed(parcel, error)
        await asyncio.sleep(min(wait, RETRY_MOST_S))
        return None

    def _failed(self, parcel: _Parcel, error: Exception) -> None:
        self.statistics.retried += 1
        self._pace = self._pace.interrupted()
        reason = str(error) or "the attempt's time was over"
        self._report(events.MicrobatchRerouted(parcel.microbatch.hex(), 0, self._config.me, reason))

    def _patience(self, attempt: int) -> float:
        """How long an attempt may take: what trips usually take, many times; doubled with each attempt."""
        first = max(LEAST_PATIENCE_S, PATIENCE_TRIPS * self._trip_s) if self._trip_s else self._config.first_patience_s
        return min(MOST_PATIENCE_S, first * 2.0 ** min(attempt, 16))

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._changed.notify()
