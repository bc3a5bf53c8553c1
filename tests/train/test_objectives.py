"""What is learnt of a microbatch: its marks, the three losses beside their formulas, and what they count."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from agora_protocol.errors import ProtocolError
from agora_protocol.manifest_sections import ObjectiveSection
from agora_protocol.tensors import BEGINS, SUPERVISED
from torch import Tensor, nn

from agora.codec.uncompressed import IGNORED
from agora.core.metrics import MAX_REWARD, add_sums, are_plausible, named_means
from agora.train.objectives import Head, TokenBatch, objective_of, row_log_probabilities

ROWS, PLACES, IDS = 4, 6, 11
# A head whose hidden states are the logits themselves.
NO_HEAD = Head(lambda hidden: hidden, nn.ModuleList(), IDS)


def logits_of(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, PLACES, IDS, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def marked(supervised: list[list[int]], begins: list[list[int]] | None = None, seed: int = 1) -> Tensor:
    """Tokens [2, b, s + 1] with random ids; `supervised` and `begins` name the marked places of each row."""
    ids = torch.randint(0, IDS, (ROWS, PLACES + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    marks = torch.zeros_like(ids)
    for bit, places in ((SUPERVISED, supervised), (BEGINS, begins or [[0]] * ROWS)):
        for row, columns in enumerate(places):
            marks[row, columns] += bit
    return torch.stack([ids, marks])


def answers(*rows: list[int]) -> TokenBatch:
    return TokenBatch.from_wire(marked(list(rows)), has_marks=True)


def floats(sums: tuple[Tensor, ...]) -> tuple[float, ...]:
    return tuple(float(value) for value in sums)


def test_a_mark_says_which_targets_are_learnt_and_where_sequences_begin() -> None:
    tokens = marked([[1, 6], [], [3], [4, 5]], [[0, 3], [0], [0, 2, 4], [0]])
    batch = TokenBatch.from_wire(tokens, has_marks=True)
    assert batch.segments is not None
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 2], [1] * 6, [1, 1, 2, 2, 3, 3], [1] * 6]
    assert (batch.targets >= 0).nonzero().tolist() == [[0, 0], [0, 5], [2, 2], [3, 3], [3, 4]]
    assert torch.equal(batch.targets[0, [0, 5]], tokens[0, 0, [1, 6]])
    assert torch.equal(batch.inputs, tokens[0, :, :-1]) and batch.supervised_tokens == 5


def test_without_marks_every_target_is_learnt_but_the_negative_ones() -> None:
    batch = TokenBatch.from_wire(torch.tensor([[3, 4, IGNORED, 5]]), has_marks=False)
    assert batch.segments is None and batch.supervised_tokens == 2
    assert batch.inputs.tolist() == [[3, 4, IGNORED]] and batch.targets.tolist() == [[4, IGNORED, 5]]


@pytest.mark.parametrize(("half", "value"), [(0, -1), (1, 4), (1, -1)])
def test_a_token_or_a_mark_that_cannot_be_is_refused(half: int, value: int) -> None:
    tokens = marked([[1]] * ROWS)
    tokens[half, 2, 3] = value
    with pytest.raises(ProtocolError, match="mark"):
        TokenBatch.from_wire(tokens, has_marks=True)


def test_sft_sums_the_cross_entropy_of_the_answers_alone_and_counts_right_tokens() -> None:
    objective, logits, batch = objective_of(ObjectiveSection(kind="sft")), logits_of(), answers([1, 2], [5], [], [6])
    rows, columns = [0, 0, 1, 3], [0, 1, 4, 5]
    loss, sums = objective.loss(NO_HEAD, logits, batch, ())
    metrics = floats(sums)
    picked = logits[rows, columns]
    expected = F.cross_entropy(picked, batch.targets[rows, columns].long(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert objective.loss_weight(batch) == 4
    assert metrics == (float((picked.argmax(1) == batch.targets[rows, columns]).sum()),)
    assert named_means("sft", metrics, 4) == {"token_accuracy": metrics[0] / 4}
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().sum(dim=2).nonzero().tolist() == [[0, 0], [0, 1], [1, 4], [3, 5]]


def test_a_row_has_the_log_probability_of_its_answer() -> None:
    logits, batch = logits_of(), answers([1, 2], [5], [], [6])
    found = row_log_probabilities(NO_HEAD, logits, batch)
    log_softmax = logits.log_softmax(dim=2)
    first = log_softmax[0, 0, batch.targets[0, 0]] + log_softmax[0, 1, batch.targets[0, 1]]
    torch.testing.assert_close(found[0], first)
    assert found[2] == 0.0 and bool((found <= 0).all())


def pair_loss(section: ObjectiveSection, chosen: float, rejected: float, lengths: tuple[int, int]) -> float:
    """One pair's loss in plain arithmetic. chosen, rejected: log-probability less that of the reference."""
    if section.preference_loss == "ipo":
        return (chosen / lengths[0] - rejected / lengths[1] - 0.5 / section.beta) ** 2
    margin, e = section.beta * (chosen - rejected), section.label_smoothing
    return (1 - e) * math.log1p(math.exp(-margin)) + e * math.log1p(math.exp(margin))


@pytest.mark.parametrize(
    "section",
    [
        ObjectiveSection(kind="dpo"),
        ObjectiveSection(kind="dpo", beta=0.7, label_smoothing=0.2),
        ObjectiveSection(kind="dpo", preference_loss="ipo", beta=0.3),
    ],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_dpo_is_the_mean_over_pairs_of_the_formula(section: ObjectiveSection) -> None:
    objective, logits = objective_of(section), logits_of()
    batch = answers([1, 2], [3, 4, 5], [6], [2, 3])
    references = (-3.0, -9.0, -1.5, -7.0)
    loss, sums = objective.loss(NO_HEAD, logits, batch, references)
    metrics = floats(sums)
    gains = [
        float(p) - q for p, q in zip(row_log_probabilities(NO_HEAD, logits.detach(), batch), references, strict=True)
    ]
    pairs = [pair_loss(section, gains[0], gains[1], (2, 3)), pair_loss(section, gains[2], gains[3], (1, 2))]
    tokens = objective.loss_weight(batch)
    assert tokens == ROWS * PLACES
    assert float(loss.detach()) / tokens == pytest.approx(sum(pairs) / 2, rel=1e-5)
    beta = section.beta
    expected = [
        beta * (gains[0] + gains[2]),
        beta * (gains[1] + gains[3]),
        (gains[0] > gains[1]) + (gains[2] > gains[3]),
    ]
    assert metrics == pytest.approx([*expected, 2.0], rel=1e-5)
    means = named_means("dpo", add_sums(metrics, metrics), 2 * tokens)
    assert means["rewards/margins"] == pytest.approx(means["rewards/chosen"] - means["rewards/rejected"])
    assert means["rewards/accuracies"] == metrics[2] / 2


def test_the_weight_of_pairs_does_not_depend_on_the_length_of_their_answers() -> None:
    objective = objective_of(ObjectiveSection(kind="dpo"))
    assert objective.loss_weight(answers([1], [2], [3], [4])) == objective.loss_weight(answers(*[[1, 2, 3, 4, 5]] * 4))


@pytest.mark.parametrize("references", [(), (0.0,) * (ROWS - 1), (0.0,) * (ROWS + 1)])
def test_dpo_refuses_another_number_of_references_than_rows(references: tuple[float, ...]) -> None:
    with pytest.raises(ProtocolError, match="references"):
        objective_of(ObjectiveSection(kind="dpo")).loss(NO_HEAD, logits_of(), answers([1], [2], [3], [4]), references)


@pytest.mark.parametrize("kind", ["lm", "sft", "dpo"])
def test_what_an_objective_sums_up_is_plausible(kind: str) -> None:
    references = (-1.0,) * ROWS if kind == "dpo" else ()
    objective = objective_of(ObjectiveSection.model_validate({"kind": kind}))
    batch = answers([1], [2], [3], [4])
    metrics = floats(objective.loss(NO_HEAD, logits_of(), batch, references).metrics)
    assert are_plausible(kind, metrics, objective.loss_weight(batch), ROWS)


@pytest.mark.parametrize(
    ("kind", "sums"),
    [
        ("lm", (1.0,)),
        ("sft", ()),
        ("sft", (5.0,)),
        ("sft", (-1.0,)),
        ("sft", (1.0, 1.0)),
        ("dpo", (0.0, 0.0, 0.0)),
        ("dpo", (0.0, 0.0, 3.0, 2.0)),
        ("dpo", (0.0, 0.0, 0.0, 1e-300)),
        ("dpo", (2 * MAX_REWARD, 0.0, 0.0, 2.0)),
        ("dpo", (0.0, -2 * MAX_REWARD, 0.0, 2.0)),
        ("dpo", (float("nan"), 0.0, 0.0, 2.0)),
        ("dpo", (0.0, float("nan"), 0.0, 2.0)),
        ("other", ()),
    ],
)
def test_what_no_microbatch_can_sum_up_is_not_believed(kind: str, sums: tuple[float, ...]) -> None:
    assert not are_plausible(kind, sums, tokens=4, rows=ROWS)


def test_nothing_summed_has_no_metrics() -> None:
    assert named_means("sft", (), 0) == named_means("dpo", (0.0, 0.0, 0.0, 0.0), 0) == named_means("lm", (), 5) == {}
