"""Claims about `swarm evaluate` with real daemons: its figures are those of the exported model in transformers."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.evaluations import evaluator_rank
from transformers import AutoModelForCausalLM

from agora.data.evaluation_tasks import load_task
from agora.data.tokenizer import ByteTokenizer
from tests.process.harness import WAIT_S, Daemon, drained, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TEXT = "def main() -> None:\n    for number in range(10):\n        print(number, number * number)\n" * 3
QUIZ: list[dict[str, Any]] = [
    {"context": "for number in", "choices": [" range", " zzzzz", " the longest of all"], "answer": 0},
    {"context": "print(number", "choices": ["!", ", number"], "answer": 1},
    {"context": "def main() ->", "choices": [" None", " Q"], "answer": 0},
]
TASK = """\
task: agora_quiz
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def evaluated(daemon: Daemon, run: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as the owner of the daemon's machine does."""
    command = [sys.executable, "-m", "agora.cli.main_swarm", "evaluate", run, *arguments, "--dir", str(daemon.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=os.environ)


def log_probability(model: torch.nn.Module, ids: list[int], begin: int) -> float:
    """Returns that of ids[begin:], in nats."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])
    return float(chosen[begin - 1 :].sum())


def test_its_figures_are_those_of_the_exported_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    manifest = tiny(
        2,
        optimizer={"target_tokens": 512, "warmup_steps": 2, "average_decay": 0.0},
        boundary={"codec": "float32"},
    )
    with swarm(tmp_path, manifest) as made:
        origin, other = made.start("peer-0", "0"), made.start("peer-1", "1")
        made.until(lambda: len(other.events("StepTaken")) >= 20, "it to learn something")
        drained(made, origin)
        name = origin.ask("status")["run_id"]
        done = evaluated(origin, name, str(tmp_path / "text.txt"), "sums", "--items", "5", "--share", "1", "--json")
        assert done.returncode == 0, done.stderr
        text, sums = json.loads(done.stdout)["results"]
        told = [(event["task"], event["metric"]) for event in origin.events("TaskEvaluated")]
        assert told == [
            ("text", "loss"),
            ("text", "perplexity"),
            ("sums", "accuracy"),
            ("sums", "accuracy_by_length"),
        ]

        made.until(lambda: len(other.ask("status")["evaluations"]) == 2, "the other to know what the first has signed")
        for asked in (origin, other):
            signed = {each["task"]: each for each in asked.ask("status")["evaluations"]}
            assert {each["peer"] for each in signed.values()} == {origin.peer}
            assert signed["sums"]["values"] == sums["values"] and signed["text"]["step"] == text["step"]

        quiz = tmp_path / "quiz.jsonl"
        quiz.write_text("\n".join(map(json.dumps, QUIZ)))
        scored = origin.ask("score_task", task=str(quiz), share=1.0)["losses"]
        of_text = origin.ask("score_task", task=str(tmp_path / "text.txt"), share=1.0)["losses"]
        if importlib.util.find_spec("lm_eval") is not None:
            assert_the_harness_counts_alike(tmp_path, origin, name, quiz)

        out = tmp_path / "exported"
        export = [sys.executable, "-m", "agora.cli.main_swarm", "export", name, "--out", str(out), "--no-average"]
        exported = subprocess.run(export, capture_output=True, text=True, timeout=WAIT_S)
        assert exported.returncode == 0, exported.stderr
        refused = evaluated(other, name, "nothing")
        assert refused.returncode == 1 and "sums, agreement, repeats" in refused.stderr

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    context, ids = manifest.model.context, list(TEXT.encode())
    windows = [ids[at : at + context + 1] for at in range(0, len(ids) - 1, context)]
    loss = -sum(log_probability(model, window, 1) for window in windows) / (len(ids) - 1)
    assert text["tokens"] == len(ids) - 1 and text["values"]["loss"] == pytest.approx(loss, abs=1e-3)
    assert text["values"]["perplexity"] == pytest.approx(math.exp(loss), rel=2e-3)

    right = 0
    for question in load_task("sums").questions[:5]:
        scores = []
        for choice in question.choices:
            whole = [*question.context.encode(), *choice.encode()][-(context + 1) :]
            scores.append(log_probability(model, whole, len(whole) - len(choice.encode())))
        right += scores.index(max(scores)) == question.answer
    assert sums["values"]["accuracy"] == right / 5

    for item, losses in zip(QUIZ, scored, strict=True):
        for choice, found in zip(item["choices"], losses, strict=True):
            ids = [*item["context"].encode(), *choice.encode()]
            # To 1e-3 a token: what the context costs alone is subtracted.
            assert found == pytest.approx(
                -log_probability(model, ids, len(item["context"].encode())), abs=1e-3 * len(ids)
            )
    # The first token of a text counts as well, after the separator of documents.
    separated = [int(ByteTokenizer().separator[0]), *TEXT.encode()]
    windows = [separated[at : at + context + 1] for at in range(0, len(separated) - 1, context)]
    assert of_text == [[pytest.approx(-sum(log_probability(model, window, 1) for window in windows), rel=1e-3)]]


def test_one_origin_after_the_other_evaluates_on_the_schedule_at_its_share_and_one_takes_over(tmp_path: Path) -> None:
    every, share = 60, 0.25
    section = {"tasks": ["heldout", "sums"], "every": every, "items": 1, "share": share}
    with swarm(tmp_path, tiny(1, evaluation=section, optimizer={"target_tokens": 512, "warmup_steps": 2})) as made:
        first, second = made.start("peer-0", "0"), made.start("peer-1", "0")

        def turns(daemon: Daemon) -> int:
            return len(daemon.events("TaskEvaluated", task="sums", metric="accuracy"))

        made.until(lambda: turns(first) and turns(second), "each of the two to have had its turn")
        for daemon in (first, second):
            trained = len(daemon.events("MicrobatchStarted", purpose="train"))
            sent = len(daemon.events("MicrobatchStarted", purpose="evaluate"))
            evaluations = len(daemon.events("TaskEvaluated", metric="loss")) + turns(daemon) + 2
            assert 0 < sent <= evaluations + share * trained
        made.until(lambda: second.events("EvaluationTaken"), "one to know what the other has signed")
        status = second.ask("status")
        first.kill()

        def has_taken_over() -> bool:
            """Whether the other has evaluated in a round that was the killed one's."""
            own = [each for each in second.ask("status")["evaluations"] if each["peer"] == second.peer]
            rounds = {each["step"] // every for each in own if each["step"] > status["step"] + every}
            ranks = [[evaluator_rank(status["run_id"], n, each.peer) for each in (first, second)] for n in rounds]
            return any(of_killed < of_other for of_killed, of_other in ranks)

        made.until(has_taken_over, "the other to take over")
        assert not second.events("TaskFailed")


def assert_the_harness_counts_alike(folder: Path, daemon: Daemon, run: str, quiz: Path) -> None:
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "quiz.yaml").write_text(TASK.format(data=quiz))
    arguments = (f"lm-eval:{tasks}/agora_quiz", str(quiz), "--share", "1", "--json")
    done = evaluated(daemon, run, *arguments)
    assert done.returncode == 0, done.stderr
    harness, own = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    assert (harness["task"], harness["items"]) == ("lm-eval:agora_quiz", len(QUIZ))
    assert harness["values"]["acc"] == pytest.approx(own["values"]["accuracy"])
    assert harness["values"]["acc_norm"] == pytest.approx(own["values"]["accuracy_by_length"])
    (told,) = daemon.events("TaskEvaluated", task="lm-eval:agora_quiz", metric="acc")
    assert told["value"] == harness["values"]["acc"] and told["items"] == len(QUIZ)
