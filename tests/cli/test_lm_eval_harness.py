"""Claims about tasks of lm-evaluation-harness: what it asks is answered by losses, and what needs more is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agora.cli.console import Failure
from agora.cli.lm_eval_harness import MAX_CHOICES, MAX_ITEMS, choice_losses, evaluate, text_losses

QUESTIONS = [
    {"question": "one and one", "options": ["two", "a dozen"], "right": 0},
    {"question": "two and two", "options": ["three", "twenty-four"], "right": 1},
    {"question": "no and no", "options": ["no", "yes, of course"], "right": 0},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}:"
doc_to_target: "{target}"
doc_to_choice: "{{{{options}}}}"
metric_list:
{metrics}
"""


class Model:
    """Answers with a loss for each byte, so that shorter ones are likelier; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.calls = 0

    def __call__(self, items: Any) -> list[list[float]]:
        self.calls += 1
        self.asked += items
        texts = [item["choices"] if "choices" in item else [item["text"]] for item in items]
        return [[float(len(text.encode())) for text in each] for each in texts]


def test_continuations_of_one_context_are_asked_for_together_and_answered_in_order() -> None:
    model = Model()
    pairs = [("a", "xx"), ("a", "y"), ("b", ""), ("b", "zzz"), ("a", "y")]
    assert choice_losses(pairs, model) == [2.0, 1.0, 0.0, 3.0, 1.0]
    assert [(item["context"], item["choices"]) for item in model.asked] == [
        ("a", ["xx", "y"]),
        ("b", ["zzz"]),
        ("a", ["y"]),
    ]


def test_what_is_asked_for_at_once_is_bounded() -> None:
    model = Model()
    assert len(choice_losses([("a", "x")] * (MAX_CHOICES + 1), model)) == MAX_CHOICES + 1
    assert [len(item["choices"]) for item in model.asked] == [MAX_CHOICES, 1]
    model = Model()
    assert text_losses(["", *["t"] * (MAX_ITEMS + 1)], model) == [0.0, *[1.0] * (MAX_ITEMS + 1)]
    assert model.calls == 2


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"pip install 'agora-swarm\[lm-eval\]'"):
        evaluate("arc_easy", 0, Model())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of tasks that need no download."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'agora-swarm[lm-eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    kinds = {
        "quiz": ("multiple_choice", "{{right}}", "acc", "acc_norm"),
        "exact": ("multiple_choice", "{{right}}", "exact_match"),
        "likeliest": ("loglikelihood", "{{question}}", "acc"),
        "written": ("generate_until", "{{question}}", "exact_match"),
        "texts": ("loglikelihood_rolling", "{{question}}", "byte_perplexity"),
    }
    for name, (output_type, target, *metrics) in kinds.items():
        lines = "\n".join(f"  - metric: {metric}" for metric in metrics)
        text = TASK.format(name=f"agora_{name}", data=data, output_type=output_type, target=target, metrics=lines)
        if output_type in ("loglikelihood_rolling", "loglikelihood", "generate_until"):
            text = "\n".join(line for line in text.splitlines() if "doc_to_choice" not in line)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    return tmp_path / "tasks"


def test_the_harness_makes_its_metrics_of_the_swarms_losses(folder: Path) -> None:
    model = Model()
    (found,) = evaluate(f"{folder}/agora_quiz", 0, model)
    assert (found.task, found.items) == ("lm-eval:agora_quiz", 3)
    # The shorter option is the likelier: right in the first and the third question.
    assert found.values["acc"] == pytest.approx(2 / 3)
    assert [item["choices"] for item in model.asked] == [
        [" two", " a dozen"],
        [" three", " twenty-four"],
        [" no", " yes, of course"],
    ]
    (some,) = evaluate(f"{folder}/agora_quiz", 1, Model())
    assert some.items == 1 and some.values["acc"] == 1.0


def test_the_perplexity_of_texts_is_that_of_their_losses(folder: Path) -> None:
    (found,) = evaluate(f"{folder}/agora_texts", 0, Model())
    # A nat for each byte.
    assert found.values["byte_perplexity"] == pytest.approx(2.718281828, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("agora_exact", "asks which token is the likeliest of all"),
        ("agora_likeliest", "asks which token is the likeliest of all"),
        ("agora_written", "has the model write text"),
        ("agora_missing", "the harness has no such task"),
    ],
)
def test_a_task_that_needs_more_than_losses_is_refused_before_anything_is_asked(
    folder: Path, name: str, says: str
) -> None:
    model = Model()
    with pytest.raises(Failure, match=says):
        evaluate(f"{folder}/{name}", 0, model)
    assert not model.calls


def test_a_folder_that_is_not_there_is_said_so(folder: Path) -> None:
    with pytest.raises(Failure, match="there is no folder"):
        evaluate("/nowhere/quiz", 0, Model())
    assert "lm_eval" in sys.modules
