"""Evaluates a task through the live pipeline, beside training and at a bounded part of its tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.clock import loop_time
from agora.data.evaluation_tasks import EvaluationTask, Question, Rows, choice_rows, cut_to, microbatch, text_rows
from agora.data.tokenizer import Tokenizer

IDLE_AFTER_S: Final = 10.0  # seconds without a training microbatch, after which nothing is left to be gentle with
LOOK_INTERVAL_S: Final = 0.05
MAX_OPEN: Final = 4  # microbatches, or questions, of an evaluation at the same time
MAX_LOSS: Final = 700.0  # whose exponential a float can hold

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
        loss = sum(loss for loss, _ in answers) / max(1, tokens)
        return {"loss": loss, "perplexity": math.exp(min(loss, MAX_LOSS))}, tokens

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
        while not self._may_send():  # noqa: ASYNC110 - the origin tells nobody of its microbatches
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._sent += 1
        tokens = microbatch(rows, self._row_count, before=before, has_marks=self._has_marks)
        return await self._score(encode_tokens(tokens))

    def _may_send(self) -> bool:
        if (completed := self._completed()) != self._last:
            self._last, self._changed_at = completed, loop_time()
        return may_send(self._sent, completed - self._first, self._share, loop_time() - self._changed_at)
