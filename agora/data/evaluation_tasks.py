"""Evaluation tasks: texts, whose loss per token is measured, and questions with several answers, one of them right.

A file of one task, JSON lines; each line is one of:

    {"text": "..."}
    {"context": "...", "choices": ["...", "..."], "answer": 0}

A `.txt` file is one text. A few small tasks, made for this project, are built in; see BUILT_IN.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from agora_protocol.errors import DataError, DiskError
from agora_protocol.tensors import BEGINS, SUPERVISED
from numpy.typing import NDArray

from agora.core.user_paths import expand_home
from agora.data.tokenizer import Tokenizer

Rows = NDArray[np.int32]

MAX_FILE_BYTES: Final = 64 * 2**20
MAX_CHOICES: Final = 64
IGNORED: Final = -1  # a token id after the end of a text, whose loss does not count
BUILT_IN_ITEMS: Final = 50


@dataclass(frozen=True, slots=True)
class Question:
    """A question: which of `choices` continues `context`. answer: the index of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """Texts to measure the loss of, or questions to answer; one of the two is empty."""

    name: str
    texts: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()

    def first(self, items: int) -> EvaluationTask:
        return EvaluationTask(self.name, self.texts[:items], self.questions[:items])


def load_task(name: str) -> EvaluationTask:
    """Returns a built-in task, or the one in a file. Raises DataError, with the line, or DiskError."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = expand_home(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        known = ", ".join(BUILT_IN)
        raise DiskError(f"Cannot read the task {name} ({error.strerror}); name a file, or one of {known}.") from None
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; take a part of it.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8; convert it.") from None
    if path.suffix.lower() == ".txt":
        return EvaluationTask(path.stem, (text,))
    return _parse_lines(path, text)


def _parse_lines(path: Path, text: str) -> EvaluationTask:
    texts, questions = list[str](), list[Question]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path}, line {number}, is not JSON; write one JSON object on each line.") from None
        match item:
            case {"text": str(one)} if one:
                texts.append(one)
            case {"context": str(context), "choices": [*choices], "answer": int(answer)} if not isinstance(
                answer, bool
            ):
                if not all(isinstance(choice, str) and choice for choice in choices) or not (
                    0 <= answer < len(choices) <= MAX_CHOICES
                ):
                    raise DataError(
                        f"{path}, line {number}: give 1 to {MAX_CHOICES} choices, and the index of one as answer."
                    )
                questions.append(Question(context, tuple(choices), answer))
            case _:
                raise DataError(f'{path}, line {number}: write either "text", or "context", "choices" and "answer".')
    if bool(texts) == bool(questions):
        problem = (
            "has texts and questions; put them into two files" if texts else "has no item; write at least one line"
        )
        raise DataError(f"{path} {problem}.")
    return EvaluationTask(path.stem, tuple(texts), tuple(questions))


# --- rows of token ids


def text_rows(
    texts: Sequence[str], tokenizer: Tokenizer, context: int, *, after_separator: bool = False
) -> Iterator[Rows]:
    """Yields rows [context + 1] of the texts' tokens, of which every token but a text's first is predicted once.

    after_separator: a text's first token is predicted too, from the separator of documents.

    A row after a text's first begins with the last token of the row before. Where a text ends, IGNORED follows.
    """
    for tokens in tokenizer.encode(list(texts)):
        ids = np.concatenate([tokenizer.separator, tokens]) if after_separator else tokens
        for start in range(0, max(1, len(ids) - 1), context):
            row = np.full(context + 1, IGNORED, np.int32)
            part = ids[start : start + context + 1]
            row[: len(part)] = part
            if len(part) > 1:
                yield row


def choice_rows(question: Question, tokenizer: Tokenizer, context: int) -> tuple[list[Rows], list[int]]:
    """Returns a row [context + 1] of context and choice for each choice, and the length of the part before the choice.

    Context and choice are tokenised apart. A row that is too long loses its beginning; of an empty context the
    separator of documents stands before the choice.
    """
    head, *tails = tokenizer.encode([question.context, *question.choices])
    head = head if len(head) else tokenizer.separator
    rows, lengths = [], []
    for tail in tails:
        ids = np.concatenate([head, tail])[-(context + 1) :]
        row = np.full(context + 1, IGNORED, np.int32)
        row[: len(ids)] = ids
        rows.append(row)
        lengths.append(max(1, len(ids) - len(tail)))
    return rows, lengths


def microbatch(rows: Sequence[Rows], row_count: int, *, before: Sequence[int] | None, has_marks: bool) -> Rows:
    """Returns a microbatch's tokens: [b, s + 1], with marks [2, b, s + 1]. Rows that are missing do not count.

    before: of each row, how many tokens at its beginning do not count, beside the first, which has nothing before it;
    only with marks. row_count: b.
    """
    size = len(rows[0])
    ids = np.full((row_count, size), IGNORED, np.int32)
    ids[: len(rows)] = np.stack(rows)
    if not has_marks:
        # The first token is an input only; an ignored one would be read as id 0 there.
        ids[len(rows) :, 0] = 0
        return ids
    marks = np.where(ids >= 0, SUPERVISED, 0).astype(np.int32)
    for at, length in enumerate(before or ()):
        marks[at, :length] = 0
    marks[:, 0] = BEGINS
    return np.stack([np.maximum(ids, 0), marks])


def cut_to(row: Rows, length: int) -> Rows:
    """Returns a row cut to its first `length` tokens: its loss is what a context alone costs."""
    head = row.copy()
    head[length:] = IGNORED
    return head


# --- built in, made for this project: no model needs more than English and arithmetic to do well


def _sums() -> EvaluationTask:
    draw = random.Random(1)
    questions = []
    for _ in range(BUILT_IN_ITEMS):
        left, right = draw.randint(2, 49), draw.randint(2, 49)
        wrong = draw.sample([delta for delta in (-10, -2, -1, 1, 2, 10) if left + right + delta > 0], 3)
        choices = [f" {left + right + delta}" for delta in (0, *wrong)]
        draw.shuffle(choices)
        context = f"2 + 3 = 5\n10 + 7 = 17\n{left} + {right} ="
        questions.append(Question(context, tuple(choices), choices.index(f" {left + right}")))
    return EvaluationTask("sums", questions=tuple(questions))


def _agreement() -> EvaluationTask:
    draw = random.Random(2)
    nouns = ["farmer", "teacher", "engine", "river", "letter", "window", "child", "doctor", "planet", "garden"]
    beside = ["the old houses", "the tall tree", "his friends", "the new road", "many people", "the small boat"]
    verbs = [("is", "are"), ("was", "were"), ("has", "have"), ("does", "do")]
    plural = {"child": "children"}
    questions = []
    for _ in range(BUILT_IN_ITEMS):
        noun, place, (one, many) = draw.choice(nouns), draw.choice(beside), draw.choice(verbs)
        is_many = draw.random() < 0.5
        subject = plural.get(noun, f"{noun}s") if is_many else noun
        choices = [f" {one}", f" {many}"]
        questions.append(Question(f"The {subject} near {place}", tuple(choices), int(is_many)))
    return EvaluationTask("agreement", questions=tuple(questions))


def _repeats() -> EvaluationTask:
    draw = random.Random(3)
    words = ["lamp", "stone", "wolf", "corn", "mint", "sail", "brick", "cloud", "spoon", "frog", "nest", "glove"]
    questions = []
    for _ in range(BUILT_IN_ITEMS):
        chosen = draw.sample(words, 4)
        line = " ".join(chosen)
        choices = [f" {word}" for word in draw.sample(chosen, 4)]
        context = f"{line}\n{line}\n{' '.join(chosen[:3])}"
        questions.append(Question(context, tuple(choices), choices.index(f" {chosen[3]}")))
    return EvaluationTask("repeats", questions=tuple(questions))


BUILT_IN: Final[Mapping[str, Callable[[], EvaluationTask]]] = {
    "sums": _sums,
    "agreement": _agreement,
    "repeats": _repeats,
}

HELDOUT: Final = "heldout"  # the task that is the run's held-out text
# The tasks that the manifest's section `evaluation` may name. Never a file: an amendment must not choose what a member
# reads of its disk, and sends through the swarm.
SCHEDULED: Final = (HELDOUT, *BUILT_IN)
