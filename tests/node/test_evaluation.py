"""Claims about evaluation beside training: at most its share of the tokens, and what it counts is what was asked."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor

from agora.codec.uncompressed import decode_tokens
from agora.data.evaluation_tasks import EvaluationTask, Question
from agora.data.tokenizer import ByteTokenizer
from agora.node.process.evaluation import IDLE_AFTER_S, TaskEvaluator, may_send
from tests.process.harness import tiny
from tests.virtual_time import run as run_virtual


def test_at_most_a_share_is_sent_unless_nothing_is_trained() -> None:
    assert may_send(0, 0, 0.02, 0.0) and not may_send(1, 0, 0.02, 0.0)
    assert not may_send(1, 49, 0.02, 0.0) or may_send(1, 50, 0.02, 0.0)
    assert may_send(1, 0, 0.02, IDLE_AFTER_S) and may_send(5, 5, 1.0, 0.0)


class Swarm:
    """A model that predicts each next byte with a probability of its own; it trains meanwhile, some a second."""

    def __init__(self, manifest: Manifest, *, per_second: float = 0.0) -> None:
        self.shape = manifest.tokens_shape()
        self.per_second = per_second
        self.sent = 0
        self.tokens = 0

    def completed(self) -> int:
        return int(asyncio.get_running_loop().time() * self.per_second)

    def loss(self, before: int, byte: int) -> float:
        return 0.01 * byte + 0.1 * (before % 7)

    async def score(self, wire: WireTensor) -> tuple[float, int]:
        tokens = decode_tokens(wire, 256, shape=self.shape).numpy()
        self.sent += 1
        await asyncio.sleep(0.1)
        losses = [self.loss(int(a), int(b)) for row in tokens for a, b in zip(row[:-1], row[1:], strict=True) if b >= 0]
        self.tokens += len(losses)
        return float(np.sum(losses)), len(losses)


def evaluated(
    task: EvaluationTask, *, share: float = 1.0, per_second: float = 0.0
) -> tuple[dict[str, float], Swarm, float]:
    """Returns a task's values, the swarm, and how long it took."""
    manifest = tiny(1)
    swarm = Swarm(manifest, per_second=per_second)

    async def main() -> tuple[dict[str, float], float]:
        evaluator = TaskEvaluator(manifest, ByteTokenizer(), swarm.score, swarm.completed, share)
        result = await evaluator.evaluate(task)
        assert (result.task, result.items) == (task.name, len(task.texts) + len(task.questions))
        assert result.tokens == swarm.tokens
        return result.values, result.seconds

    values, seconds = run_virtual(main())
    return values, swarm, seconds


def test_the_loss_of_texts_is_the_mean_over_all_their_tokens() -> None:
    texts = ("a first text, longer than a row of the model is, so that it takes several", "another", "x")
    values, swarm, _ = evaluated(EvaluationTask("t", texts))
    pairs = [pair for text in texts for pair in zip(text.encode()[:-1], text.encode()[1:], strict=True)]
    expected = sum(swarm.loss(a, b) for a, b in pairs) / len(pairs)
    assert values["loss"] == pytest.approx(expected) and values["perplexity"] == pytest.approx(math.exp(expected))


def test_an_answer_is_the_choice_of_least_loss_whatever_its_context_costs() -> None:
    questions = (
        Question("zzz costly zzz ", ("!", "~"), 0),
        Question("zzz costly zzz ", ("~", "!"), 0),
        Question("", ("!", "~"), 0),
        Question("Two that share no length: ", ("!!!!", "~"), 1),
    )
    values, swarm, _ = evaluated(EvaluationTask("q", questions=questions))
    assert values["accuracy"] == 0.75
    # By length, four cheap bytes win over one dear byte.
    assert swarm.loss(ord(" "), ord("!")) * 4 > swarm.loss(ord(" "), ord("~"))
    assert values["accuracy_by_length"] == 0.5


def test_an_evaluation_takes_its_share_of_a_busy_origin_and_hurries_when_nothing_is_trained() -> None:
    task = EvaluationTask("t", tuple(f"text number {number} of several" for number in range(40)))
    _, beside, slow = evaluated(task, share=0.02, per_second=10.0)
    assert beside.sent > 5 and slow >= (beside.sent - 1) / (0.02 * 10.0) * 0.9
    _, alone, fast = evaluated(task, share=0.02)
    assert alone.sent == beside.sent and fast < IDLE_AFTER_S + 5
