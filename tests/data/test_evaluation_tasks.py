"""Claims about evaluation tasks: a text's tokens are predicted once each, files are checked, built-in tasks sound."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.errors import DataError, DiskError
from agora_protocol.tensors import BEGINS, SUPERVISED
from hypothesis import given
from hypothesis import strategies as st

from agora.data.evaluation_tasks import (
    BUILT_IN,
    IGNORED,
    MAX_CHOICES,
    EvaluationTask,
    Question,
    choice_rows,
    cut_to,
    load_task,
    microbatch,
    text_rows,
)
from agora.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


@given(st.lists(st.binary(min_size=0, max_size=60).map(lambda b: b.hex()), max_size=5), st.integers(1, 12))
def test_every_token_but_a_texts_first_is_predicted_once_from_what_stands_before_it(
    texts: list[str], context: int
) -> None:
    rows = list(text_rows(texts, BYTES, context))
    pairs = [(int(a), int(b)) for row in rows for a, b in zip(row[:-1], row[1:], strict=True) if b != IGNORED]
    encoded = [text.encode() for text in texts]
    assert pairs == [pair for text in encoded for pair in zip(text[:-1], text[1:], strict=True)]
    assert all(row.shape == (context + 1,) and row[0] != IGNORED for row in rows)


def test_a_choice_follows_its_context_and_a_long_context_loses_its_beginning() -> None:
    question = Question("abc", ("de", "f"), 0)
    rows, lengths = choice_rows(question, BYTES, 6)
    assert [bytes(row[row >= 0].astype(np.uint8)) for row in rows] == [b"abcde", b"abcf"] and lengths == [3, 3]
    rows, lengths = choice_rows(question, BYTES, 3)
    assert [bytes(row[row >= 0].astype(np.uint8)) for row in rows] == [b"bcde", b"abcf"] and lengths == [2, 3]
    rows, lengths = choice_rows(Question("", ("de",), 0), BYTES, 6)
    assert rows[0].tolist() == [0, *b"de", -1, -1, -1, -1] and lengths == [1], "after the separator"
    rows, lengths = choice_rows(Question("abc", ("defghi",), 0), BYTES, 3)
    assert bytes(rows[0].astype(np.uint8)) == b"fghi" and lengths == [1], "a choice that is too long keeps its end"


def test_a_microbatch_counts_only_what_belongs_to_its_rows() -> None:
    rows, lengths = choice_rows(Question("ab", ("cd", "e"), 0), BYTES, 5)
    plain = microbatch(rows, 3, before=None, has_marks=False)
    assert plain.shape == (3, 6) and (plain[2, 1:] == IGNORED).all() and plain[2, 0] == 0
    ids, marks = microbatch(rows, 3, before=lengths, has_marks=True)
    counted = [bytes(row[mark == SUPERVISED].astype(np.uint8)) for row, mark in zip(ids, marks, strict=True)]
    assert counted == [b"cd", b"e", b""] and (marks[:, 0] == BEGINS).all() and ids.min() >= 0
    assert cut_to(rows[0], lengths[0]).tolist() == [*b"ab", -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["nonsense"], "line 1, is not JSON"),
        (["[1]"], "line 1: write either"),
        (['{"text": 3}'], "line 1: write either"),
        (['{"text": ""}'], "line 1: write either"),
        (['{"text": "a"}', "", '{"context": "a", "choices": [], "answer": 0}'], "line 3: give 1 to"),
        (['{"context": "a", "choices": ["b", ""], "answer": 0}'], "line 1: give 1 to"),
        (['{"context": "a", "choices": ["b"], "answer": 1}'], "line 1: give 1 to"),
        (['{"context": "a", "choices": ["b"], "answer": -1}'], "line 1: give 1 to"),
        (['{"context": "a", "choices": ["b", "c"], "answer": true}'], "line 1: write either"),
        (['{"context": "a", "choices": "bc", "answer": 0}'], "line 1: write either"),
        ([json.dumps({"context": "", "choices": ["x"] * (MAX_CHOICES + 1), "answer": 0})], "line 1: give 1 to"),
        (['{"text": "a"}', '{"context": "a", "choices": ["b"], "answer": 0}'], "two files"),
        ([""], "no item"),
        (["[" * 100_000], "line 1, is not JSON"),
    ],
)
def test_a_malformed_file_is_one_sentence_with_its_line(tmp_path: Path, lines: list[str], says: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=says):
        load_task(str(file))


def test_files_are_texts_or_questions_and_what_is_no_file_names_the_built_in_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8-sig")
    assert load_task(str(tmp_path / "a.txt")) == EvaluationTask("a", ("one\ntwo",))
    (tmp_path / "q.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 1}\n')
    assert load_task(str(tmp_path / "q.jsonl")) == EvaluationTask("q", (), (Question("a", ("b", "c"), 1),))
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        load_task(str(tmp_path / "latin.txt"))
    with pytest.raises(DiskError, match="sums, agreement, repeats"):
        load_task(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_is_the_same_every_time_and_always_has_one_right_answer(name: str) -> None:
    task = load_task(name)
    assert task == load_task(name) and task.name == name and len(task.questions) == 50
    answers = Counter(question.answer for question in task.questions)
    for question in task.questions:
        assert len(set(question.choices)) == len(question.choices) > question.answer
    assert max(answers.values()) < 0.7 * len(task.questions), "no place is right nearly always"
    assert len(task.first(3).questions) == 3


def test_the_right_answers_of_the_built_in_tasks_are_right() -> None:
    for question in load_task("sums").questions:
        left, right = (int(word) for word in question.context.rpartition("\n")[2].rstrip(" =").split(" + "))
        assert int(question.choices[question.answer]) == left + right
    for question in load_task("repeats").questions:
        assert question.context.split("\n")[0].endswith(question.choices[question.answer])
    for question in load_task("agreement").questions:
        is_many = question.choices[question.answer] in (" are", " were", " have", " do")
        assert is_many == (question.context.split()[1] in ("children",) or question.context.split()[1].endswith("s"))
