"""Draws this peer's microbatches, sends them through the swarm, and keeps each until it is completed.

After a failed attempt the origin makes another one, with the same id and data and twice the time. It gives a training
microbatch up only when it leaves or is cancelled, and a held-out one when the evaluation's time is over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from agora_protocol.errors import AgoraError, Busy, Unavailable
from agora_protocol.ids import MicrobatchId, PeerId, microbatch_id
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_HINTS
from agora_protocol.messages import CallProgress, Process
from agora_protocol.tensors import WireTensor

from agora.core.clock import loop_time
from agora.core.metrics import add_sums, named_means
from agora.core.moving_average import MovingAverage
from agora.core.span_work import DrawnMicrobatch
from agora.core.tasks import ChangeNotifier
from agora.observe import events
from agora.pipeline import flow_control
from agora.pipeline.flow_control import CompletionPace, SendDecision, SendInputs, SendWindow, StepAllotment
from agora.pipeline.hop import Hop
from agora.pipeline.process_call import HopAnswer, ProcessCall
from agora.pipeline.reference_cache import ReferenceCache

MIN_TIMEOUT_S = 20.0  # lower bound of an attempt's timeout, once an attempt was measured
TIMEOUT_FACTOR = 10.0  # an attempt may take this many times the usual, so that it survives a hung peer at every stage
MAX_TIMEOUT_S = MAX_DEADLINE_MS / 1000.0
RETRY_S, MAX_RETRY_S = 0.05, 2.0  # pause after a failed attempt: the first one, which doubles, and the longest
DRAW_RETRY_DELAY_S = 0.1  # seconds after which an origin asks its source again if the source had no microbatch
POLL_INTERVAL_S = 0.5  # seconds after which an origin looks again while it waits for what nobody tells it


class MicrobatchSource(Protocol):
    """Where an origin's microbatches come from.

    A drawn microbatch stays taken until mark_completed or release is called with its number.
    """

    def draw(self) -> DrawnMicrobatch | None:
        """Takes and returns the next training microbatch; None if none is free now, but perhaps later."""

    def mark_completed(self, number: int) -> None:
        """Records that the drawn microbatch `number` was trained on."""

    def release(self, number: int) -> None:
        """Gives the drawn microbatch `number` back untrained, so that its rows may be drawn again."""

    def heldout_microbatches(self, count: int) -> Iterable[WireTensor]:
        """Returns the token ids of at most `count` microbatches that are never trained on, the same at every call."""


@dataclass(frozen=True, slots=True)
class OriginConfig:
    """How the origin of the peer `me` opens microbatches."""

    me: PeerId
    stage_count: int
    ceiling: int  # most microbatches in flight that memory allows
    max_in_flight: int = 0  # the manifest's; 0: as measured
    first_timeout_s: float = 120.0  # of an attempt before any was measured
    objective: str = "lm"  # the kind of the manifest's objective


@dataclass(slots=True)
class Microbatch:
    """One microbatch of this origin. purpose, step, codec, references: see the message Process."""

    id: MicrobatchId
    tokens: WireTensor
    purpose: str
    started: float  # loop time
    step: int = 0
    codec: str = ""
    references: tuple[float, ...] = ()
    # Stage -> the peer that held it last: a hint for the next attempt.
    peer_by_stage: dict[int, PeerId] = field(default_factory=dict)

    def record_progress(self, call_progress: CallProgress) -> None:
        """Records in `peer_by_stage` where the microbatch is."""
        if call_progress.stage > 0:
            self.peer_by_stage[call_progress.stage] = call_progress.peer


class Origin:
    """Draws microbatches and sends them into this peer's own hop, each until one attempt succeeds. Needs stage 0.

    gather_inputs: called before each decision whether to open a microbatch. session: the key of the ids of this
    origin's microbatches, by default random. window: the present limit of microbatches in flight, and why. loss,
    microbatch_tokens, metrics: moving averages over completed training microbatches, of nats per token, of tokens that
    count, and of each metric by name.
    """

    def __init__(
        self,
        config: OriginConfig,
        hop: Hop,
        source: MicrobatchSource,
        report: events.Report,
        gather_inputs: Callable[[], SendInputs] = SendInputs,
        *,
        session: bytes | None = None,
        on_awaits_mean: Callable[[bool], None] = lambda awaits_mean: None,
        codec: Callable[[], str] = lambda: "",
    ) -> None:
        """on_awaits_mean: called after each decision with whether it waits for a mean or, synchronous, for a step.

        codec: returns how what is opened now is encoded; see the message Process.
        """
        self._config = config
        self._hop = hop
        self._source = source
        self._report = report
        self._gather_inputs = gather_inputs
        self._session = os.urandom(32) if session is None else session
        self._on_awaits_mean = on_awaits_mean
        self._codec = codec
        self._ids = itertools.count()
        self._references = ReferenceCache()
        self._open: set[asyncio.Task[None]] = set()
        self._changed = ChangeNotifier()
        self._draining = False
        self._leaving = False
        self._allotment = StepAllotment()
        self._pace = CompletionPace()
        # Grows by one with each completion, so it doubles at most once a round trip, as in TCP's slow start.
        self._window_ceiling = flow_control.MIN_PER_STAGE * config.stage_count
        self._attempt_s = MovingAverage(0.1)
        self.loss = MovingAverage(0.05)
        self.microbatch_tokens = MovingAverage(0.1)
        self.metrics: dict[str, MovingAverage] = {}
        self.completed = 0
        self.window = SendWindow(1, "not measured yet")

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def objective(self) -> str:
        return self._config.objective

    @property
    def mean_metrics(self) -> dict[str, float]:
        return {name: mean.value for name, mean in self.metrics.items() if mean.value is not None}

    async def run(self) -> None:
        """Opens training microbatches, several in flight, and sends each until it succeeds; ends after `leave`.

        When cancelled, cancels all open microbatches and gives them back to the source.
        """
        async with asyncio.TaskGroup() as group:
            while (drawn := await self._draw_next()) is not None:
                microbatch = self._new_microbatch(drawn.tokens, "train", max(self._allotment.step, 0))
                task = group.create_task(
                    self._train(microbatch, drawn.number), name=f"microbatch {microbatch.id.hex()}"
                )
                self._open.add(task)
                task.add_done_callback(self._forget_finished)

    async def leave(self, within_s: float) -> int:
        """Opens no more training microbatches, waits at most `within_s` seconds for the open ones, cancels the rest.

        Returns how many were cancelled, after these have ended. Makes `run` return.
        """
        self._leaving = True
        self._changed.notify()
        until = loop_time() + within_s
        while self._open and loop_time() < until:
            await self._changed.wait(until)
        dropped = [task for task in self._open if task.cancel()]
        if dropped:
            await asyncio.wait(dropped)
        return len(dropped)

    def drain(self) -> None:
        """Opens no training microbatch until `refill`; open ones go on, and evaluation is not affected."""
        self._draining = True

    def refill(self) -> None:
        """Opens training microbatches again after `drain`; the time between does not count in the measured pace."""
        self._draining = False
        self._pace = self._pace.after_interruption()
        self._changed.notify()

    def notify_step(self) -> None:
        """Makes `run` decide again whether to open a microbatch; call it after each step of a stage of this peer."""
        self._changed.notify()

    async def evaluate(self, count: int, within_s: float) -> events.EvaluationDone:
        """Sends at most `count` held-out microbatches through the swarm; reports and returns their EvaluationDone.

        Raises Unavailable when the answers are not back within `within_s` seconds (the rest is cancelled), or when
        there is no held-out text.
        """
        started = loop_time()
        loss_sum, token_count = 0.0, 0
        metrics: tuple[float, ...] = ()
        # Half of what training has in flight: an evaluation slows training down, but does not stop it.
        in_flight = asyncio.Semaphore(max(2, self.window.limit // 2))

        async def evaluate_one(tokens: WireTensor) -> None:
            nonlocal loss_sum, token_count, metrics
            async with in_flight:
                answer = await self._deliver(self._new_microbatch(tokens, "evaluate"))
                loss_sum += answer.message.loss_sum
                token_count += answer.message.tokens
                metrics = add_sums(metrics, answer.message.metrics)

        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                for tokens in self._source.heldout_microbatches(count):
                    group.create_task(evaluate_one(tokens), name="evaluation")
        except TimeoutError:
            raise Unavailable(0, [f"the evaluation did not end in {within_s:.0f} s"]) from None
        if not token_count:
            raise Unavailable(0, ["no held-out text; raise data.heldout in the manifest of the next run"])
        result = events.EvaluationDone(loss_sum / token_count, token_count, loop_time() - started, metrics)
        self._report(result)
        return result

    async def score(self, tokens: WireTensor) -> tuple[float, int]:
        """Evaluates one microbatch of given tokens, instead of the source's, without changing any weight.

        tokens: in the form of the run's microbatches. Returns the summed loss in nats, and how many tokens that is of.
        """
        message = (await self._deliver(self._new_microbatch(tokens, "evaluate"))).message
        return message.loss_sum, message.tokens

    def heldout_microbatches(self, count: int) -> Iterable[WireTensor]:
        return self._source.heldout_microbatches(count)

    async def _draw_next(self) -> DrawnMicrobatch | None:
        while True:
            inputs = self._gather_inputs()
            decision, self.window = self._decide(inputs)
            self._on_awaits_mean(decision.awaits_mean)
            if decision.action == "stop":
                return None
            drawn = self._source.draw() if decision.action == "open" else None
            if drawn is not None or decision.action != "open":
                self._allotment = decision.allotment  # an opening that found nothing to draw does not count
            if drawn is not None:
                return drawn
            # Nobody tells this origin of new replicas, of others' steps or of means: it must look again by itself.
            depends_on_others = (
                not inputs.has_enough_replicas
                or inputs.step is not None
                or inputs.max_open_before_mean is not None
                or bool(inputs.end)
            )
            if decision.action == "open":  # the source had nothing
                await self._changed.wait(loop_time() + DRAW_RETRY_DELAY_S)
            else:
                await self._changed.wait(loop_time() + POLL_INTERVAL_S if depends_on_others else None)

    def _decide(self, inputs: SendInputs) -> tuple[SendDecision, SendWindow]:
        ceiling = self._config.ceiling
        is_synchronous = inputs.step is not None
        window = SendWindow(ceiling, f"{ceiling} slots") if is_synchronous else self._measured_window(inputs)
        decision = flow_control.next_send(
            loop_time(),
            self._allotment,
            window,
            inputs,
            len(self._open),
            leaving=self._leaving,
            draining=self._draining,
        )
        if not is_synchronous:
            return decision, window
        if decision.action == "open" and not self._open:  # the window shows what was left when the allotment began
            left = decision.allotment.left + 1
            return decision, SendWindow(min(left, ceiling), f"{left} microbatches to the step")
        return decision, self.window

    def _measured_window(self, inputs: SendInputs) -> SendWindow:
        config = self._config
        if config.max_in_flight:
            limit = min(config.max_in_flight, config.ceiling)
            return SendWindow(limit, f"{limit}: schedule.max_in_flight, limited to {config.ceiling}")
        ceiling = min(self._window_ceiling, config.ceiling)
        period_s = self._pace.period_s.value
        return flow_control.measured_window(inputs.latency_s, period_s, config.stage_count, ceiling, inputs.staleness)

    def _new_microbatch(self, tokens: WireTensor, purpose: str, step: int = 0) -> Microbatch:
        name = microbatch_id(self._session, next(self._ids))
        return Microbatch(name, tokens, purpose, loop_time(), step, self._codec())

    async def _train(self, microbatch: Microbatch, number: int) -> None:
        try:
            message = (await self._deliver(microbatch)).message
        except BaseException:
            self._source.release(number)
            raise
        self._source.mark_completed(number)
        self.completed += 1
        self.microbatch_tokens = self.microbatch_tokens.with_sample(message.tokens)
        if message.tokens:
            self.loss = self.loss.with_sample(message.loss_sum / message.tokens)
        for name, value in named_means(self._config.objective, message.metrics, message.tokens).items():
            self.metrics[name] = self.metrics.get(name, MovingAverage(0.05)).with_sample(value)
        self._pace = self._pace.after_completion(loop_time())
        self._window_ceiling = min(self._window_ceiling + 1, 2 * self.window.limit)

    async def _references_of(self, tokens: WireTensor) -> tuple[float, ...]:
        known = self._references.look_up(tokens)
        if known is not None:
            return known
        answer = await self._deliver(self._new_microbatch(tokens, "reference"))
        return self._references.remember(tokens, answer.message.log_probabilities)

    async def _deliver(self, microbatch: Microbatch) -> HopAnswer:
        if self._config.objective == "dpo" and microbatch.purpose != "reference":
            microbatch.references = await self._references_of(microbatch.tokens)
        name = microbatch.id.hex()
        self._report(events.MicrobatchStarted(name, microbatch.purpose))
        attempt = 0
        answer = None
        try:
            while answer is None:
                answer = await self._attempt(microbatch, attempt)
                attempt += 1
        finally:
            if answer is None:
                why = "its time was over" if microbatch.purpose == "evaluate" else "this origin was told to end"
                self._report(events.MicrobatchDropped(name, why, microbatch.purpose))
        message = answer.message
        seconds = loop_time() - microbatch.started
        self._report(
            events.MicrobatchCompleted(
                name, message.loss_sum, message.tokens, seconds, microbatch.purpose, message.metrics
            )
        )
        return answer

    async def _attempt(self, microbatch: Microbatch, attempt: int) -> HopAnswer | None:
        started = loop_time()
        usual_s = self._attempt_s.value
        backoff_factor = 2.0 ** min(attempt, 16)
        first_s = self._config.first_timeout_s if usual_s is None else max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * usual_s)
        timeout_s = min(MAX_TIMEOUT_S, first_s * backoff_factor)
        pause_s = RETRY_S * backoff_factor
        deadline = started + timeout_s
        message = Process(
            microbatch.id,
            self._config.me,
            stage=0,
            purpose=microbatch.purpose,
            deadline_ms=max(1, int(1000.0 * timeout_s)),
            hint=tuple(sorted(microbatch.peer_by_stage.items())[:MAX_HINTS]),
            step=microbatch.step,
            codec=microbatch.codec,
            references=microbatch.references,
        )
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._hop.process(
                    ProcessCall(message, [microbatch.tokens], deadline, microbatch.record_progress)
                )
            self._attempt_s = self._attempt_s.with_sample(loop_time() - started)
            return answer
        except Busy as refusal:
            pause_s = max(pause_s, refusal.retry_after_ms / 1000.0)
        except (TimeoutError, AgoraError) as error:
            self._pace = self._pace.after_interruption()
            reason = str(error) or "the attempt's time was over"
            self._report(events.MicrobatchRerouted(microbatch.id.hex(), 0, self._config.me, reason))
        await asyncio.sleep(min(pause_s, MAX_RETRY_S))
        return None

    def _forget_finished(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._changed.notify()
