"""`swarm evaluate`: measures texts and questions through the live pipeline of a run."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agora.cli import console, lm_eval_harness
from agora.cli.console import EXIT_USAGE, Failure
from agora.core.user_paths import expand_home
from agora.node import daemon_registry, paths, runs
from agora.node.control import control_client

ANSWER_TIMEOUT_S: Final = 86_400.0


def evaluate(run: str, tasks: Sequence[str], items: int, share: float, directory: Path | None, *, as_json: bool) -> int:
    """Prints each task's result as it comes. Raises Failure if no daemon here can evaluate, or a task is wrong."""
    if not 0.0 < share <= 1.0:
        raise Failure(f"--share {share}: give a part above 0 and at most 1, such as 0.02", EXIT_USAGE)
    home = paths.home_at(directory)
    entries = runs.entries_of_run(run, home, daemon_registry.find_running_daemons())
    if not entries:
        raise Failure(f"no daemon of {run} runs on this machine; start one with `agora-node join RUN --stages 0`")
    results = []
    for task in tasks:
        answers = _results_of(entries, task, items, share)
        results += answers
        for answer in answers if not as_json else ():
            values = "  ".join(f"{name} {value:.4f}" for name, value in answer["values"].items())
            tokens = f"{answer['tokens']} tokens, " if answer["tokens"] is not None else ""
            about = f"{answer['items']} items, {tokens}step {answer['step']}"
            console.print_to_stdout(f"{answer['task']:<16} {values}  ({about})")
    if as_json:
        console.print_json({"schema": 1, "run_id": entries[0].run, "results": results})
    return console.EXIT_DONE


def _results_of(
    entries: Sequence[daemon_registry.DaemonEntry], task: str, items: int, share: float
) -> list[dict[str, Any]]:
    if task.startswith(lm_eval_harness.PREFIX):
        return _of_harness(entries, task.removeprefix(lm_eval_harness.PREFIX), items, share)
    return [_ask(entries, "evaluate_task", task=_named(task), items=items, share=share)]


def _of_harness(
    entries: Sequence[daemon_registry.DaemonEntry], named: str, items: int, share: float
) -> list[dict[str, Any]]:
    began, steps = time.monotonic(), list[int]()

    def score(scored: Sequence[dict[str, Any]]) -> list[list[float]]:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("\n".join(map(json.dumps, scored)))
            file.flush()
            answer = _ask(entries, "score_task", task=file.name, share=share)
        steps.append(answer["step"])
        losses: list[list[float]] = answer["losses"]
        return losses

    found = lm_eval_harness.evaluate(named, items, score)
    seconds, step = time.monotonic() - began, min(steps, default=0)
    for result in found:
        about = {"task": result.task, "values": dict(result.values), "items": result.items}
        _ask(entries, "report_task", **about, seconds=seconds, step=step)
    return [
        {
            "step": step,
            "task": result.task,
            "values": result.values,
            "items": result.items,
            "tokens": None,
            "seconds": seconds,
        }
        for result in found
    ]


def _named(task: str) -> str:
    path = expand_home(task)
    return str(path.absolute()) if path.exists() else task  # the daemon has another working directory


def _ask(entries: Sequence[daemon_registry.DaemonEntry], question: str, **fields: Any) -> dict[str, Any]:
    refusals = []
    for entry in entries:
        try:
            return control_client.ask(Path(entry.socket), question, timeout_s=ANSWER_TIMEOUT_S, **fields)
        except control_client.DaemonRefused as error:
            refusals.append(str(error))
        except control_client.DaemonUnreachable as error:
            refusals.append(f"the daemon with pid {entry.pid} does not answer ({error})")
    raise Failure("; ".join(dict.fromkeys(refusals)))
