"""Draws microbatches and keeps each until it is completed: where everything that the swarm trains on begins.

Knows: what was opened and what came back. Must not know: routing, the contents of tensors, or of other origins more
than how many there are. A microbatch once started is never dropped while this origin lives: a failed attempt is
followed by another of the same id and the same data, with twice the time. Only leaving drops microbatches.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from agora_protocol.errors import AgoraError, Busy, Unavailable
from agora_protocol.ids import MicrobatchId, PeerId, microbatch_id
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_HINTS
from agora_protocol.messages import Advance, Process
from agora_protocol.tensors import WireTensor

from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.observe import events
from agora.observe.events import Report
from agora.pipeline.barrier import ChangeNotifier
from agora.pipeline.interfaces import BatchSource, HopAnswer, HopEntrance
from agora.pipeline.opening import (
    PER_STAGE,
    Credit,
    Opening,
    OriginState,
    Pace,
    Share,
    StepQuota,
    StepState,
    measured_credit,
    next_opening,
)

MIN_PATIENCE_S = 20.0
PATIENCE_TRIPS = 10.0
"""An attempt may take this many times what attempts usually take: room for a hung peer at every stage."""
MAX_PATIENCE_S = MAX_DEADLINE_MS / 1000.0
RETRY_S, MAX_RETRY_S = 0.05, 2.0
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class OriginConfig:
    """How this origin opens microbatches.

    ceiling: most microbatches in flight that memory allows. max_in_flight: the manifest's, 0 to measure it.
    first_patience_s: time of the first attempt, before any was measured.
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
class OriginStage:
    """Functions by which an origin looks at its own stage 0.

    step_of: steps it has taken. missing_tokens: tokens that its replicas still lack for the next step. ready: whether
    enough replicas serve the run.
    """

    step_of: Callable[[], int]
    missing_tokens: Callable[[], int]
    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss: the mean per token, in nats, over `tokens`."""

    loss: float
    tokens: int


@dataclass(slots=True)
class Microbatch:
    """One microbatch of this origin: its data, and the peer last seen to hold it at each stage."""

    id: MicrobatchId
    tokens: WireTensor
    purpose: str
    started: float
    step: int = 0
    path: dict[int, PeerId] = field(default_factory=dict)

    def record_progress(self, news: Advance) -> None:
        """Records the newest peer seen at a stage, as the hint of the next attempt."""
        if news.stage > 0:
            self.path[news.stage] = news.peer


class Origin:
    """Opens microbatches into this peer's own hop, for as long as the peer holds stage 0. `run` until it leaves."""

    def __init__(
        self,
        config: OriginConfig,
        entrance: HopEntrance,
        batches: BatchSource,
        report: Report,
        *,
        share: Callable[[], Share] = Share,
        stage: OriginStage | None = None,
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
        self._changed = ChangeNotifier()
        self._paused = False
        self._leaving = False
        self._quota = StepQuota()
        self._pace = Pace()
        self._credit_ceiling = PER_STAGE * config.stage_count  # doubles at most in a trip, as TCP starts
        self._trip_s = MovingAverage(0.1)
        self._loss = MovingAverage(0.05)
        self.completed = 0
        self.credit = Credit(1, "not measured yet")

    @property
    def open_microbatches(self) -> int:
        """Training microbatches in flight."""
        return len(self._open)

    @property
    def loss(self) -> float | None:
        """Moving average of the training loss per token, in nats; None before the first microbatch came back."""
        return self._loss.value

    async def run(self) -> None:
        """Trains until `leave` has ended, or until cancelled, which drops what is open."""
        async with asyncio.TaskGroup() as group:
            while await self._wait_for_opening():
                microbatch = self._draw()
                task = group.create_task(self._train(microbatch), name=f"microbatch {microbatch.id.hex()}")
                self._open.add(task)
                task.add_done_callback(self._forget_finished)

    async def leave(self, within_s: float) -> int:
        """Opens nothing more and waits at most `within_s` for what is open; returns how many it dropped then."""
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

    def stepped(self) -> None:
        """Checks again whether to open a microbatch; call it after each step of this peer's stage 0."""
        self._changed.notify()

    async def evaluate(self, count: int, within_s: float) -> Evaluation:
        """Sends at most `count` held-out microbatches through the swarm and returns their mean loss per token.

        Raises Unavailable when they are not back in `within_s`, or when no text is held out.
        """
        started, loss_sum, token_count = loop_time(), 0.0, 0
        seats = asyncio.Semaphore(max(2, self.credit.limit // 2))

        async def evaluate_one(tokens: WireTensor) -> None:
            """Adds one microbatch to the sums."""
            nonlocal loss_sum, token_count
            async with seats:
                answer = await self._deliver(self._new_microbatch(tokens, "evaluate"))
                loss_sum += answer.message.loss_sum
                token_count += answer.message.tokens

        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                for tokens in self._batches.heldout(count):
                    group.create_task(evaluate_one(tokens), name="evaluation")
        except TimeoutError:
            raise Unavailable(0, [f"the evaluation did not end in {within_s:.0f} s"]) from None
        if not token_count:
            raise Unavailable(0, ["no held-out text; raise data.heldout in the manifest of the next run"])
        result = Evaluation(loss_sum / token_count, token_count)
        self._report(events.EvaluationDone(result.loss, result.tokens, loop_time() - started))
        return result

    # --- opening

    async def _wait_for_opening(self) -> bool:
        """Waits until the next microbatch may be opened; returns False when this origin is leaving."""
        while True:
            opening = self._decide()
            if opening.action != "wait":
                return opening.action == "open"
            may_wait_long = self._is_ready() and not self._config.synchronous
            await self._changed.wait(None if may_wait_long else loop_time() + LOOK_AGAIN_S)

    def _decide(self) -> Opening:
        """Decides whether to open a microbatch now, and records the quota that is left."""
        config = self._config
        step = self._step_state() if config.synchronous else None
        credit = Credit(config.ceiling, f"{config.ceiling} seats") if config.synchronous else self._measured_credit()
        state = OriginState(credit, len(self._open), self._leaving, self._paused, self._is_ready(), step)
        opening = next_opening(loop_time(), state, self._quota)
        if not config.synchronous:
            self.credit = credit
        elif opening.action == "open" and not self._open:
            left = opening.quota.left + 1
            self.credit = Credit(min(left, config.ceiling), f"{left} microbatches to the step")
        self._quota = opening.quota
        return opening

    def _is_ready(self) -> bool:
        """Whether enough replicas serve the run."""
        return self._stage is None or self._stage.ready()

    def _step_state(self) -> StepState:
        """Returns the synchronous step that stage 0 is at; without a stage every step is taken at once."""
        config, stage = self._config, self._stage
        whole = math.ceil(config.target_tokens / config.tokens_per_microbatch)
        if stage is None:
            return StepState(self._quota.step + 1, whole, 0, self._share())
        lacking = math.ceil(stage.missing_tokens() / config.tokens_per_microbatch)
        return StepState(stage.step_of(), whole, lacking, self._share())

    def _measured_credit(self) -> Credit:
        """Returns the manifest's limit, or the measured credit."""
        config = self._config
        if config.max_in_flight:
            limit = min(config.max_in_flight, config.ceiling)
            return Credit(limit, f"{limit}: schedule.max_in_flight, bounded by {config.ceiling}")
        ceiling = min(self._credit_ceiling, config.ceiling)
        return measured_credit(self._path_s(), self._pace.period_s, config.stage_count, ceiling)

    def _draw(self) -> Microbatch:
        """Draws the next training microbatch."""
        tokens = self._batches.draw(self._drawn)
        self._drawn += 1
        return self._new_microbatch(tokens, "train", max(self._quota.step, 0))

    def _new_microbatch(self, tokens: WireTensor, purpose: str, step: int = 0) -> Microbatch:
        """Gives the tokens an id that is unique in the run."""
        microbatch = microbatch_id(self._session, self._ids)
        self._ids += 1
        return Microbatch(microbatch, tokens, purpose, loop_time(), step)

    # --- delivering

    async def _train(self, microbatch: Microbatch) -> None:
        """Delivers one training microbatch, and learns the loss and the pace from it."""
        message = (await self._deliver(microbatch)).message
        self.completed += 1
        if message.tokens:
            self._loss = self._loss.updated(message.loss_sum / message.tokens)
        self._pace = self._pace.completed(loop_time())
        self._credit_ceiling = min(self._credit_ceiling + 1, 2 * self.credit.limit)

    async def _deliver(self, microbatch: Microbatch) -> HopAnswer:
        """Makes attempts until one succeeds, and returns its answer."""
        name = microbatch.id.hex()
        self._report(events.MicrobatchStarted(name, microbatch.purpose))
        attempt, answer = 0, None
        try:
            while answer is None:
                answer = await self._attempt(microbatch, attempt)
                attempt += 1
        finally:
            if answer is None:
                self._report(events.MicrobatchDropped(name, "this peer is leaving", microbatch.purpose))
        message = answer.message
        seconds = loop_time() - microbatch.started
        self._report(events.MicrobatchCompleted(name, message.loss_sum, message.tokens, seconds, microbatch.purpose))
        return answer

    async def _attempt(self, microbatch: Microbatch, attempt: int) -> HopAnswer | None:
        """Sends the microbatch through the whole pipeline once; returns None when that failed."""
        started, patience = loop_time(), self._patience_s(attempt)
        deadline, wait = started + patience, RETRY_S * 2.0 ** min(attempt, 16)
        hint = tuple(sorted(microbatch.path.items())[:MAX_HINTS])
        deadline_ms = max(1, int(1000.0 * patience))
        message = Process(microbatch.id, self._config.me, 0, microbatch.purpose, deadline_ms, hint, microbatch.step)
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._entrance.process(
                    message, [microbatch.tokens], deadline, microbatch.record_progress
                )
            self._trip_s = self._trip_s.updated(loop_time() - started)
            return answer
        except Busy as refusal:
            wait = max(wait, refusal.retry_after_ms / 1000.0)
        except (TimeoutError, AgoraError) as error:
            self._record_failure(microbatch, error)
        await asyncio.sleep(min(wait, MAX_RETRY_S))
        return None

    def _record_failure(self, microbatch: Microbatch, error: Exception) -> None:
        """Reports a failed attempt."""
        self._pace = self._pace.interrupted()
        reason = str(error) or "the attempt's time was over"
        self._report(events.MicrobatchRerouted(microbatch.id.hex(), 0, self._config.me, reason))

    def _patience_s(self, attempt: int) -> float:
        """Returns how long an attempt may take: PATIENCE_TRIPS times the usual trip, doubled with each attempt."""
        trip_s = self._trip_s.value
        first = self._config.first_patience_s if trip_s is None else max(MIN_PATIENCE_S, PATIENCE_TRIPS * trip_s)
        return min(MAX_PATIENCE_S, first * 2.0 ** min(attempt, 16))

    def _forget_finished(self, task: asyncio.Task[None]) -> None:
        """Removes a microbatch that is over from those in flight, and wakes whoever waits for that."""
        self._open.discard(task)
        self._changed.notify()
