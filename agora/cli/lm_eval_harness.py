"""Runs tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) through a live swarm.

The harness makes the questions and the metrics; a daemon answers with losses, so only tasks that need no more are run:
multiple choice and perplexity of texts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from agora.cli.console import EXIT_USAGE, Failure

PREFIX: Final = "lm-eval:"
SCORED_TYPES: Final = ("multiple_choice", "loglikelihood_rolling")
MAX_CHOICES: Final = 32  # continuations of one context that are asked for together
MAX_ITEMS: Final = 512  # questions or texts that the daemon is asked for together

# Takes items as a task's file has them, all questions or all texts; returns the losses of each, in nats.
ScoreItems = Callable[[Sequence[dict[str, Any]]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """values: by metric, as the harness names it, such as "acc" or "acc_stderr". items: of the task."""

    task: str
    values: dict[str, float]
    items: int


def evaluate(named: str, items: int, score: ScoreItems) -> list[HarnessResult]:
    """Returns the results of a task of the harness, of a group's or tag's each.

    named: "NAME", or "FOLDER/NAME" of a task that a file in this folder describes. items: the most of each task, 0 for
    all. Raises Failure without the package, and for a task that is not known or needs more than losses.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise Failure("the package of lm-evaluation-harness is missing; run: pip install 'agora-swarm[lm-eval]'")
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    class SwarmModel(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            # Whether the continuation is the likeliest one of all is not known; `_check` leaves out who asks for that.
            return [(-loss, False) for loss in choice_losses([request.args for request in requests], score)]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [-loss for loss in text_losses([request.args[0] for request in requests], score)]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            raise Failure(f"{named}: {_NO_TEXT}")

    folder, _, name = named.rpartition("/")
    if folder and not Path(folder).is_dir():
        raise Failure(f"{PREFIX}{named}: there is no folder {folder}", EXIT_USAGE)
    # The list of its own tasks takes many seconds to read.
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    try:
        known = manager.load([name])["tasks"]
    except (KeyError, ValueError) as error:
        raise Failure(f"{PREFIX}{named}: the harness has no such task ({str(error)[:200]})", EXIT_USAGE) from None
    for each, task in known.items():
        _check(each, task)
    found = simple_evaluate(
        SwarmModel(), tasks=[name], limit=items or None, task_manager=manager, log_samples=False, bootstrap_iters=0
    )
    counts = found["n-samples"]
    return [
        HarnessResult(f"{PREFIX}{each}", _values(values), int(counts[each]["effective"]))
        for each, values in found["results"].items()
        if each in counts  # a group has none of its own
    ]


_NO_TEXT: Final = "it has the model write text, which is not done through the live pipeline; export the model"


def _check(name: str, task: Any) -> None:
    output_type = task.get_config("output_type")
    if output_type == "generate_until":
        raise Failure(f"{PREFIX}{name}: {_NO_TEXT}, and run lm_eval on that", EXIT_USAGE)
    metrics = {each["metric"] for each in task.get_config("metric_list") or () if isinstance(each["metric"], str)}
    if output_type not in SCORED_TYPES or "exact_match" in metrics:
        raise Failure(
            f"{PREFIX}{name} asks which token is the likeliest of all, which the live pipeline does not tell; export "
            "the model, and run lm_eval on that",
            EXIT_USAGE,
        )


def _values(metrics: dict[str, Any]) -> dict[str, float]:
    # The harness names a metric "acc,none": its filter comes after the comma.
    return {
        key.removesuffix(",none"): float(value)
        for key, value in metrics.items()
        if "," in key and isinstance(value, int | float)
    }


def choice_losses(pairs: Sequence[tuple[str, str]], score: ScoreItems) -> list[float]:
    """Returns the loss of each continuation after its context, in nats; (context, continuation) in `pairs`.

    Neighbours of one context are asked for together: what the context alone costs is then measured once.
    """
    questions: list[list[tuple[str, str]]] = []
    for _, group in groupby(pairs, key=lambda pair: pair[0]):
        same = list(group)
        questions += [same[at : at + MAX_CHOICES] for at in range(0, len(same), MAX_CHOICES)]
    items = [
        {"context": same[0][0], "choices": choices, "answer": 0}
        for same in questions
        if (choices := [continuation for _, continuation in same if continuation])
    ]
    losses = iter([loss for answer in _scored(items, score) for loss in answer])
    return [next(losses) if continuation else 0.0 for _, continuation in pairs]


def text_losses(texts: Sequence[str], score: ScoreItems) -> list[float]:
    """Returns the loss of each text, in nats, over all of its tokens."""
    losses = iter(_scored([{"text": text} for text in texts if text], score))
    return [next(losses)[0] if text else 0.0 for text in texts]


def _scored(items: Sequence[dict[str, Any]], score: ScoreItems) -> list[list[float]]:
    return [losses for at in range(0, len(items), MAX_ITEMS) for losses in score(items[at : at + MAX_ITEMS])]
