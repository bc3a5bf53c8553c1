"""The objectives: the loss of a microbatch, summed over it, and the microbatch's weight in its step.

A step divides the summed gradients by the summed weights. Shapes: b rows, s positions, v token ids.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from agora_protocol.errors import ProtocolError
from agora_protocol.manifest_sections import ObjectiveSection
from agora_protocol.tensors import BEGINS, SUPERVISED
from torch import Tensor

from agora.codec.uncompressed import IGNORED


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one microbatch, in the form that stages and losses take; all [b, s]."""

    inputs: Tensor  # ids; a negative one, which is an ignored target in runs without marks, is read as 0
    targets: Tensor  # the id that follows each input, IGNORED if not supervised
    segments: Tensor | None = None  # the number of each input's sequence in its row, ascending; None: one sequence each

    @classmethod
    def from_wire(cls, tokens: Tensor, *, has_marks: bool) -> TokenBatch:
        """Splits ids [b, s + 1], or with marks [2, b, s + 1] (see "Marks" in SPEC.md), into inputs and targets.

        Without marks, all targets are supervised except negative ids, and each row is one segment. With marks, a
        negative id or an unknown mark raises ProtocolError.
        """
        if not has_marks:
            return cls(tokens[:, :-1], tokens[:, 1:])
        ids, marks = tokens
        if int(tokens.min()) < 0 or int(marks.max()) > (SUPERVISED | BEGINS):
            raise ProtocolError("bad-tensor", "a token or a mark is not one that this run can have")
        supervised = (marks & SUPERVISED).bool()
        targets = torch.where(supervised, ids, IGNORED)
        segments = (marks[:, :-1] & BEGINS).bool().cumsum(dim=1)
        return cls(ids[:, :-1], targets[:, 1:], segments)

    @property
    def supervised_tokens(self) -> int:
        return int((self.targets >= 0).sum())


class MicrobatchLoss(NamedTuple):
    loss_sum: Tensor  # mean loss * Objective.loss_weight, a float32 scalar with its graph
    metrics: tuple[float, ...] = ()  # sums over the microbatch; each objective has its own


class Objective(abc.ABC):
    """What a run trains for."""

    def loss_weight(self, batch: TokenBatch) -> int:
        """Returns the weight of a microbatch in its step."""
        return batch.supervised_tokens

    @abc.abstractmethod
    def loss(self, logits: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        """logits: [b, s, v] of any float dtype.

        references: each row's summed log-probability of its supervised tokens under the reference model. An objective
        that needs them (dpo) raises ProtocolError unless there is one for each row; the others ignore them.
        """


class LanguageModeling(Objective):
    """Objective lm: the cross entropy of every supervised target."""

    def loss(self, logits: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        return MicrobatchLoss(stage_loss(logits, batch.targets))


class SupervisedFineTuning(Objective):
    """Objective sft: as lm, with a metric: how many of the targets are predicted right."""

    def loss(self, logits: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        right = (logits.detach().argmax(dim=-1) == batch.targets).sum()
        return MicrobatchLoss(stage_loss(logits, batch.targets), (float(right),))


class DirectPreference(Objective):
    """Objective dpo: the rows 2i and 2i + 1 are the chosen and the rejected answer to one prompt.

    With p the log-probability of an answer's supervised tokens under the model, q that under the reference, and r =
    beta * (p - q) an answer's reward, the loss of a pair is

    | preference_loss | loss                                                            | source                       |
    |-----------------|-----------------------------------------------------------------|------------------------------|
    | sigmoid         | -(1 - e) log sigmoid(r_c - r_r) - e log sigmoid(r_r - r_c)      | arXiv 2305.18290, eq. 7      |
    | ipo             | ((p_c - q_c) / n_c - (p_r - q_r) / n_r - 1 / (2 beta))^2        | arXiv 2310.12036, eq. 17     |

    with e = label_smoothing, n the number of an answer's supervised tokens, and the indices c for chosen, r for
    rejected. Every pair has the same weight: the 2 * s positions of its rows.
    """

    def __init__(self, section: ObjectiveSection) -> None:
        self._section = section

    def loss_weight(self, batch: TokenBatch) -> int:
        return batch.inputs.numel()  # however many tokens are supervised: a step is a mean over pairs, not tokens

    def loss(self, logits: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        rows = batch.inputs.shape[0]
        if len(references) != rows:
            raise ProtocolError("bad-message", f"{len(references)} references came for {rows} rows")
        log_ratios = row_log_probabilities(logits, batch.targets) - torch.tensor(references, device=logits.device)
        chosen, rejected = log_ratios[0::2], log_ratios[1::2]
        losses = self._pair_losses(chosen, rejected, (batch.targets >= 0).sum(dim=1).clamp(min=1))
        beta = self._section.beta
        accurate = (chosen.detach() > rejected.detach()).sum()
        # Rewards of the chosen and of the rejected answers, how many chosen ones have the larger one; then the pairs.
        sums = beta * chosen.detach().sum(), beta * rejected.detach().sum(), accurate
        metrics = (*(float(value) for value in sums), float(len(chosen)))
        return MicrobatchLoss(losses.sum() * (2 * batch.inputs.shape[1]), metrics)

    def _pair_losses(self, chosen: Tensor, rejected: Tensor, lengths: Tensor) -> Tensor:
        section = self._section
        if section.preference_loss == "ipo":
            return (chosen / lengths[0::2] - rejected / lengths[1::2] - 1 / (2 * section.beta)).square()
        margin = section.beta * (chosen - rejected)
        smoothing = section.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def stage_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum (not the mean) of the supervised tokens' cross entropies, a float32 scalar.

    logits: [b, s, v], any float dtype. targets: [b, s], any integer dtype, IGNORED for tokens that do not count.
    """
    with torch.autocast(logits.device.type, enabled=False):
        flat = logits.flatten(0, -2).float()
        return F.cross_entropy(flat, targets.flatten().long(), ignore_index=IGNORED, reduction="sum")


def row_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the supervised targets' log-probabilities of each row, float32 [b], at most 0.

    logits: [b, s, v]; targets: [b, s], IGNORED if not supervised.
    """
    with torch.autocast(logits.device.type, enabled=False):
        flat = logits.flatten(0, 1).float()
        losses = F.cross_entropy(flat, targets.flatten().long(), ignore_index=IGNORED, reduction="none")
        return -losses.view(targets.shape).sum(dim=1)


def objective_of(section: ObjectiveSection) -> Objective:
    match section.kind:
        case "lm":
            return LanguageModeling()
        case "sft":
            return SupervisedFineTuning()
        case "dpo":
            return DirectPreference(section)
