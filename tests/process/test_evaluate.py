"""Claims about `swarm evaluate` with real daemons: its figures are those of the exported model in transformers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agora.data.evaluation_tasks import load_task
from tests.process.harness import WAIT_S, Daemon, drained, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TEXT = "def main() -> None:\n    for number in range(10):\n        print(number, number * number)\n" * 3


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
