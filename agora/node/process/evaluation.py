"""Evaluates a task through the live pipeline, beside training and at a bounded part of its tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from agora_protocol.errors import AgoraError, LocalError, Unavailable
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.clock import loop_time
from agora.core.tasks import run_in_thread, wait_for_any
from agora.data.evaluation_tasks import (
    HELDOUT,
    SCHEDULED,
    EvaluationTask,
    Question,
    Rows,
    choice_rows,
    cut_to,
    load_task,
    microbatch,
    text_rows,
)
from agora.data.tokenizer import Tokenizer
from agora.node.span.training_data import open_run_tokenizer
from agora.observe.events import TaskFailed
from agora.swarm.evaluations import due_tasks

if TYPE_CHECKING:
    from agora.node.peer.local_peer import LocalPeer
    from agora.node.span.loaded_span import LoadedSpan
    from agora.pipeline.origin import Origin

IDLE_AFTER_S: Final = 10.0  # seconds without a training microbatch, after which nothing is left to be gentle with
LOOK_INTERVAL_S: Final = 0.05
MAX_OPEN: Final = 4  # microbatches, or questions, of an evaluation at the same time
MAX_LOSS: Final = 700.0  # whose exponential a float can hold
MAX_HELDOUT: Final = 4096  # microbatches of it
SCHEDULE_INTERVAL_S: Final = 2.0  # seconds between two looks whether it is this peer's turn

T = TypeVar("T")

# Sends one held-out microbatch through the swarm; returns its summed loss in nats, and how many tokens that is of.
Score = Callable[[WireTensor], Awaitable[tuple[float, int]]]


def may_send(sent: int, trained: int, share: float, idle_s: float) -> bool:
    """Returns whether a further microbatch may be sent for evaluation.

    sent: microbatches of the evaluation so far. trained: training microbatches that this origin has completed since the
    evaluation began. share: `sent` is at most 1 + share * trained, unless no training microbatch was completed for
    IDLE_AFTER_S. idle_s: seconds since the last one was completed.
    """
    return sent < 1 + share * trained or idle_s >= IDLE_AFTER_S


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What was measured of a task. values: by metric, see events.TaskEvaluated. tokens: those that counted."""

    task: str
    values: dict[str, float]
    items: int
    tokens: int
    seconds: float


class _Answer(NamedTuple):
    is_right: bool
    is_right_by_length: bool  # by the loss per byte of a choice
    tokens: int


class TaskEvaluator:
    """Evaluates tasks through one origin; use `evaluate` for one task at a time."""

    def __init__(
        self, manifest: Manifest, tokenizer: Tokenizer, score: Score, completed: Callable[[], int], share: float
    ) -> None:
        """completed: returns how many training microbatches the origin has completed. share: see may_send."""
        self._tokenizer = tokenizer
        self._context = manifest.model.context
        self._row_count = manifest.schedule.microbatch
        self._has_marks = manifest.has_marks
        self._score = score
        self._completed = completed
        self._share = share
        self._free_calls = asyncio.Semaphore(MAX_OPEN)
        self._sent = 0
        self._first = self._last = completed()
        self._changed_at = loop_time()

    async def evaluate(self, task: EvaluationTask) -> TaskResult:
        """Returns the task's result. Raises what `score` raises."""
        began = loop_time()
        if task.texts:
            values, tokens = await self._loss_of(task)
        else:
            values, tokens = await self._accuracy_of(task)
        items = len(task.texts) + len(task.questions)
        return TaskResult(task.name, values, items, tokens, loop_time() - began)

    async def evaluate_heldout(self, microbatches: Iterable[WireTensor]) -> TaskResult:
        """Returns loss per token and perplexity of held-out microbatches. Raises what `score` raises, and Unavailable
        where nothing is held out.
        """
        began = loop_time()
        answers = await self._gather(self._score_when_allowed(tokens) for tokens in microbatches)
        tokens = sum(count for _, count in answers)
        if not tokens:
            raise Unavailable(0, ["no held-out text; raise data.heldout in the manifest of the next run"])
        values = _loss_values(sum(loss for loss, _ in answers) / tokens)
        return TaskResult(HELDOUT, values, len(answers), tokens, loop_time() - began)

    async def losses_of(self, task: EvaluationTask) -> list[list[float]]:
        """Returns for each question the losses of its choices, for each text its own, in nats: what another program
        makes metrics of.

        The first token of a text is predicted from the separator of documents, those of later windows from the token
        before. Raises what `score` raises.
        """
        if task.texts:
            return await self._gather(self._text_loss(text) for text in task.texts)
        return [losses for losses, _ in await self._gather(self._choice_losses(each) for each in task.questions)]

    async def _text_loss(self, text: str) -> list[float]:
        rows = list(text_rows([text], self._tokenizer, self._context, after_separator=True))
        batches = [rows[at : at + self._row_count] for at in range(0, len(rows), self._row_count)]
        return [sum([(await self._send(batch))[0] for batch in batches])]

    async def _loss_of(self, task: EvaluationTask) -> tuple[dict[str, float], int]:
        rows = list(text_rows(task.texts, self._tokenizer, self._context))
        batches = [rows[at : at + self._row_count] for at in range(0, len(rows), self._row_count)]
        answers = await self._gather(self._send(batch) for batch in batches)
        tokens = sum(count for _, count in answers)
        return _loss_values(sum(loss for loss, _ in answers) / max(1, tokens)), tokens

    async def _accuracy_of(self, task: EvaluationTask) -> tuple[dict[str, float], int]:
        answers = await self._gather(self._answer(question) for question in task.questions)
        count = max(1, len(answers))
        values = {
            "accuracy": sum(answer.is_right for answer in answers) / count,
            "accuracy_by_length": sum(answer.is_right_by_length for answer in answers) / count,
        }
        return values, sum(answer.tokens for answer in answers)

    async def _answer(self, question: Question) -> _Answer:
        losses, tokens = await self._choice_losses(question)
        sizes = [len(choice.encode()) for choice in question.choices]
        by_length = [loss / size for loss, size in zip(losses, sizes, strict=True)]
        return _Answer(
            losses.index(min(losses)) == question.answer, by_length.index(min(by_length)) == question.answer, tokens
        )

    async def _choice_losses(self, question: Question) -> tuple[list[float], int]:
        rows, lengths = choice_rows(question, self._tokenizer, self._context)
        if self._has_marks:
            scored = [await self._send([row], [length]) for row, length in zip(rows, lengths, strict=True)]
            losses, tokens = [loss for loss, _ in scored], sum(count for _, count in scored)
        else:
            # Without marks the tokens of the context count as well: what they cost alone is subtracted.
            scored = [await self._send([row]) for row in rows]
            heads = {head.tobytes(): head for head in map(cut_to, rows, lengths)}
            alone = {key: await self._send([head]) if head[1] >= 0 else (0.0, 0) for key, head in heads.items()}
            of_rows = [alone[cut_to(row, length).tobytes()] for row, length in zip(rows, lengths, strict=True)]
            losses = [loss - head for (loss, _), (head, _) in zip(scored, of_rows, strict=True)]
            tokens = sum(count for _, count in (*scored, *alone.values()))
        return losses, tokens

    async def _gather(self, works: Iterable[Coroutine[None, None, T]]) -> list[T]:
        async def limited(work: Coroutine[None, None, T]) -> T:
            async with self._free_calls:
                return await work

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(limited(work), name="evaluation") for work in works]
        return [task.result() for task in tasks]

    async def _send(self, rows: Sequence[Rows], before: Sequence[int] | None = None) -> tuple[float, int]:
        tokens = microbatch(rows, self._row_count, before=before, has_marks=self._has_marks)
        return await self._score_when_allowed(encode_tokens(tokens))

    async def _score_when_allowed(self, tokens: WireTensor) -> tuple[float, int]:
        while not self._may_send():  # noqa: ASYNC110 - the origin tells nobody of its microbatches
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._sent += 1
        return await self._score(tokens)

    def _may_send(self) -> bool:
        if (completed := self._completed()) != self._last:
            self._last, self._changed_at = completed, loop_time()
        return may_send(self._sent, completed - self._first, self._share, loop_time() - self._changed_at)


def _loss_values(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, MAX_LOSS))}


# --- one task of a live run


async def evaluate_task(
    local_peer: LocalPeer, origin: Origin, step: int, task: str, items: int, share: float, *, files: bool
) -> TaskResult:
    """Evaluates a task through `origin`, then has the result reported, signed and published.

    task: HELDOUT, the name of a built-in task, or with `files` the path of one. items: most questions or texts, of
    HELDOUT most microbatches; 0 for all. Raises LocalError in a dpo run and for an unknown task; DataError or DiskError
    for a file; Unavailable.
    """
    evaluator = await open_evaluator(local_peer, origin, share)
    if task == HELDOUT:
        count = items or MAX_HELDOUT
        result = await evaluator.evaluate_heldout(await run_in_thread(lambda: [*origin.heldout_microbatches(count)]))
    elif files or task in SCHEDULED:
        loaded = await run_in_thread(lambda: load_task(task))
        result = await evaluator.evaluate(loaded.first(items) if items else loaded)
    else:
        raise LocalError(f"This version of agora has no task {task}; it has {', '.join(SCHEDULED)}.")
    local_peer.evaluations.sign(**asdict(result), step=step)
    return result


async def open_evaluator(local_peer: LocalPeer, origin: Origin, share: float) -> TaskEvaluator:
    """Returns an evaluator that scores through `origin`, at most `share` microbatches for each one that it trains on.

    Opens the run's tokenizer. Raises LocalError in a dpo run, and for a share that is not above 0 and at most 1.
    """
    if origin.objective == "dpo":
        raise LocalError("A run of preferences has no loss of single texts; export its model and evaluate that.")
    if not 0.0 < share <= 1.0:
        raise LocalError("Share must be above 0 and at most 1.")
    context, manifest = local_peer.context, local_peer.manifest
    tokenizer = await run_in_thread(lambda: open_run_tokenizer(context, manifest))
    return TaskEvaluator(manifest, tokenizer, origin.score, lambda: origin.completed, share)


# --- the schedule of the manifest


class ScheduledEvaluation:
    """Evaluates the tasks of the manifest's section `evaluation`, each time that it is this peer's turn."""

    def __init__(self, local_peer: LocalPeer, held_span: Callable[[], LoadedSpan | None]) -> None:
        """held_span: returns the held span, None while none is."""
        self._local_peer = local_peer
        self._held_span = held_span
        self._tried: dict[str, int] = {}  # by task: the round in which it was evaluated here, or could not be

    async def run(self) -> None:
        """Until cancelled. What fails is reported, and not tried again in the same round."""
        while True:
            loaded = self._held_span()
            if loaded is None or loaded.origin is None or (task := self._next_task(loaded)) is None:
                await asyncio.sleep(SCHEDULE_INTERVAL_S)
                continue
            # A move gives the origin up; what it still has open would never come back.
            work = asyncio.create_task(self._evaluate(loaded, loaded.origin, task), name="evaluation")
            try:
                await wait_for_any(work, self._wait_until_given_up(loaded))
                if work.done():
                    work.result()
            finally:
                work.cancel()
                await asyncio.wait([work])

    def _next_task(self, loaded: LoadedSpan) -> str | None:
        local_peer, step = self._local_peer, loaded.own_steps.get(0, 0)
        section = local_peer.live.at(step).evaluation
        known = [each.evaluation for each in local_peer.evaluations.book.known()]
        origins, run = local_peer.replicas_in_view(0), local_peer.signed.run_id
        due = due_tasks(section, step, local_peer.context.me, origins, known, run)
        left = [task for task in due if self._tried.get(task) != step // section.every]
        # Where a round is shorter than its evaluations, each task has its turn all the same.
        return min(left, key=lambda task: self._tried.get(task, -1), default=None)

    async def _evaluate(self, loaded: LoadedSpan, origin: Origin, task: str) -> None:
        local_peer, step = self._local_peer, loaded.own_steps.get(0, 0)
        section = local_peer.live.at(step).evaluation
        self._tried[task] = step // section.every
        try:
            await evaluate_task(local_peer, origin, step, task, section.items, section.share, files=False)
        except* AgoraError as failed:
            error = failed.exceptions[0]
            local_peer.context.report_event(TaskFailed(f"evaluation of {task}", f"{type(error).__name__}: {error}"))

    async def _wait_until_given_up(self, loaded: LoadedSpan) -> None:
        while self._held_span() is loaded:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(SCHEDULE_INTERVAL_S)
