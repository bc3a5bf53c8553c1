"""The objectives: the loss of a microbatch, summed over it, and the microbatch's weight in its step.

A step divides the summed gradients by the summed weights. Shapes: b rows, s positions, d width, v token ids.

Head and loss are computed chunk by chunk, of supervised tokens alone, so that logits exist for one chunk at a time:

| objective            | gradient of a token's loss known | gradients of a chunk are computed                          |
|----------------------|----------------------------------|------------------------------------------------------------|
| lm, sft              | in the forward                   | in the forward: no product of the head is computed twice   |
| dpo, several chunks  | once all rows have their sums    | in the backward, which computes the chunk's logits again   |

torch's F.linear_cross_entropy is not used: it takes a weight, not a head that is frozen in NF4, has LoRA or caps its
logits; it tells neither what was predicted right nor each token's loss; and torch has it from 2.13 on.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from agora_protocol.errors import ProtocolError
from agora_protocol.manifest_sections import ObjectiveSection
from agora_protocol.tensors import BEGINS, SUPERVISED
from torch import Tensor, nn

from agora.codec.transfer import CPU
from agora.codec.uncompressed import IGNORED
from agora.cost.activation_bytes import head_chunk_tokens
from agora.train.activation_checkpointing import checkpoint_chunks


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one microbatch, in the form that stages and losses take; all [b, s]."""

    inputs: Tensor  # ids; a negative one, which is an ignored target in runs without marks, is read as 0
    targets: Tensor  # the id that follows each input, IGNORED if not supervised
    supervised_tokens: int  # number of targets that are not IGNORED, which the host knows before the device
    segments: Tensor | None = None  # the number of each input's sequence in its row, ascending; None: one sequence each

    @classmethod
    def from_wire(
        cls, tokens: Tensor, *, has_marks: bool, device: torch.device = CPU, on_device: Tensor | None = None
    ) -> TokenBatch:
        """Splits ids [b, s + 1], or with marks [2, b, s + 1] (see "Marks" in SPEC.md), into inputs and targets.

        tokens: on the CPU; the batch is on `device`. on_device: the same ids, if they are there already. Without marks,
        all targets are supervised except negative ids, and each row is one segment. With marks, a negative id or an
        unknown mark raises ProtocolError.
        """
        on_host = tokens.numpy()
        if not has_marks:
            ids = tokens.to(device) if on_device is None else on_device
            return cls(ids[:, :-1], ids[:, 1:], int((on_host[:, 1:] >= 0).sum()))
        if on_host.min() < 0 or on_host[1].max() > (SUPERVISED | BEGINS):
            raise ProtocolError("bad-tensor", "A token or a mark is not one that this run can have.")
        ids, marks = tokens.to(device) if on_device is None else on_device
        supervised = (marks & SUPERVISED).bool()
        targets = torch.where(supervised, ids, IGNORED)
        segments = (marks[:, :-1] & BEGINS).bool().cumsum(dim=1)
        return cls(ids[:, :-1], targets[:, 1:], int((on_host[1, :, 1:] & SUPERVISED != 0).sum()), segments)


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the last layer of a model."""

    logits: Callable[[Tensor], Tensor]  # the logits [n, v], of any float dtype, of hidden states [n, d]
    modules: nn.Module  # whose parameters `logits` uses
    vocabulary: int
    # By which a backward pass will multiply the gradient of the loss. Where gradients are computed in the forward, they
    # are multiplied there, so that fp16 holds them.
    scale: float = 1.0

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.modules.parameters() if parameter.requires_grad]


class MicrobatchLoss(NamedTuple):
    loss_sum: Tensor  # mean loss * Objective.loss_weight, a float32 scalar with its graph
    metrics: tuple[Tensor, ...] = ()  # sums over the microbatch, float32 scalars; each objective has its own


class Objective(abc.ABC):
    """What a run trains for."""

    def loss_weight(self, batch: TokenBatch) -> int:
        """Returns the weight of a microbatch in its step."""
        return batch.supervised_tokens

    @abc.abstractmethod
    def loss(self, head: Head, hidden: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        """hidden: what the model's last layer returned, [b, s, d]. Gradients reach it and the head's parameters, once.

        references: each row's summed log-probability of its supervised tokens under the reference model. An objective
        that needs them (dpo) raises ProtocolError unless there is one for each row; the others ignore them.
        """


class LanguageModeling(Objective):
    """Objective lm: the cross entropy of every supervised target."""

    def loss(self, head: Head, hidden: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        return MicrobatchLoss(_summed_losses(head, hidden, batch)[0])


class SupervisedFineTuning(Objective):
    """Objective sft: as lm, with a metric: how many of the targets are predicted right."""

    def loss(self, head: Head, hidden: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        loss, right = _summed_losses(head, hidden, batch, counts_right=True)
        return MicrobatchLoss(loss, (right.float(),))


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

    def loss(self, head: Head, hidden: Tensor, batch: TokenBatch, references: Sequence[float]) -> MicrobatchLoss:
        rows = batch.inputs.shape[0]
        if len(references) != rows:
            raise ProtocolError("bad-message", f"{len(references)} references came for {rows} rows.")
        log_ratios = row_log_probabilities(head, hidden, batch) - torch.tensor(references, device=hidden.device)
        chosen, rejected = log_ratios[0::2], log_ratios[1::2]
        losses = self._pair_losses(chosen, rejected, (batch.targets >= 0).sum(dim=1).clamp(min=1))
        beta = self._section.beta
        accurate = (chosen.detach() > rejected.detach()).sum()
        # Rewards of the chosen and of the rejected answers, how many chosen ones have the larger one; then the pairs.
        sums = beta * chosen.detach().sum(), beta * rejected.detach().sum(), accurate.float()
        metrics = (*sums, torch.full_like(sums[0], len(chosen)))
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

    logits: [..., v], any float dtype. targets: [...], any integer dtype, IGNORED for tokens that do not count.
    """
    with torch.autocast(logits.device.type, enabled=False):
        flat = logits.flatten(0, -2).float()
        return F.cross_entropy(flat, targets.flatten().long(), ignore_index=IGNORED, reduction="sum")


def row_log_probabilities(head: Head, hidden: Tensor, batch: TokenBatch) -> Tensor:
    """Returns the sum of the supervised targets' log-probabilities of each row, float32 [b], at most 0.

    hidden: [b, s, d].
    """
    supervised = _SupervisedTokens.of(head, hidden, batch)
    chunks = [(partial(_log_probabilities, head, ids), chunk) for chunk, ids in supervised.chunks()]
    (compute, whole), *others = chunks
    # One chunk alone keeps its graph, which is what its backward would compute again.
    found = checkpoint_chunks(head.modules, chunks) if others else compute(whole)
    rows = torch.zeros(len(batch.targets), device=hidden.device)
    return rows.index_add(0, supervised.places // batch.targets.shape[1], found)


def _log_probabilities(head: Head, targets: Tensor, hidden: Tensor) -> Tensor:
    logits = head.logits(hidden)
    with torch.autocast(logits.device.type, enabled=False):
        return -F.cross_entropy(logits.float(), targets, reduction="none")


@dataclass(frozen=True, slots=True)
class _SupervisedTokens:
    # The supervised tokens of a microbatch, n of b * s, to be taken a chunk at a time.

    hidden: Tensor  # [n, d]
    targets: Tensor  # int64 [n]
    places: Tensor  # int64 [n], in the flattened microbatch
    chunk_tokens: int

    @classmethod
    def of(cls, head: Head, hidden: Tensor, batch: TokenBatch) -> _SupervisedTokens:
        flat, ids = hidden.flatten(0, 1), batch.targets.flatten().long()
        if batch.supervised_tokens == len(ids):
            places = torch.arange(len(ids), device=ids.device)
        else:
            # The host knows how many there are; `nonzero` would have it wait until the device has counted them.
            places = (ids < 0).int().argsort(stable=True)[: batch.supervised_tokens]
            flat, ids = flat[places], ids[places]
        return cls(flat, ids, places, head_chunk_tokens(head.vocabulary))

    def chunks(self) -> Sequence[tuple[Tensor, Tensor]]:
        """At least one, which is empty if no token is supervised."""
        parts = (torch.split(tensor, self.chunk_tokens) for tensor in (self.hidden, self.targets))
        return list(zip(*parts, strict=True))


def _summed_losses(
    head: Head, hidden: Tensor, batch: TokenBatch, *, counts_right: bool = False
) -> tuple[Tensor, Tensor]:
    # The sum of the cross entropies, and, if it is to be counted, how many targets have the largest logit.
    supervised = _SupervisedTokens.of(head, hidden, batch)
    right = torch.zeros((), dtype=torch.int64, device=hidden.device)
    loss: Tensor = _SummedLosses.apply(  # type: ignore[no-untyped-call]
        head, supervised, right if counts_right else None, supervised.hidden, *head.trained
    )
    return loss, right


class _SummedLosses(torch.autograd.Function):
    # The sum of all chunks' losses. The gradients are computed in the forward, and serve one backward.

    @staticmethod
    def forward(
        context: Any, head: Head, supervised: _SupervisedTokens, right: Tensor | None, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        needs_hidden, needs_trained = context.needs_input_grad[3], any(context.needs_input_grad[4:])
        needs_gradients = needs_hidden or needs_trained
        loss_sum = torch.zeros((), device=hidden.device)
        of_hidden: list[Tensor] = []
        of_trained: list[Tensor] = []
        for chunk, ids in supervised.chunks():
            entry = chunk.detach().requires_grad_(needs_hidden)
            with torch.set_grad_enabled(needs_gradients):
                logits = head.logits(entry)
                loss = stage_loss(logits, ids)
            if right is not None:
                right += (logits.detach().argmax(dim=-1) == ids).sum()
            del logits  # the loss does not need them, and their gradient is as large as they are
            loss_sum += loss.detach()
            if not needs_gradients:
                continue
            inputs = [*([entry] if needs_hidden else []), *(trained if needs_trained else ())]
            scale = None if head.scale == 1.0 else [torch.full_like(loss, head.scale)]
            computed = list(torch.autograd.grad([loss], inputs, scale))
            if needs_hidden:
                of_hidden.append(computed.pop(0))
            if of_trained:
                for total in of_trained:
                    total += computed.pop(0)
            elif len(ids) < len(supervised.targets):
                # Several chunks are summed in float32, and rounded once.
                of_trained = [gradient.float() for gradient in computed]
            else:
                of_trained = computed
            del loss, computed  # or they would be in memory together with those of the next chunk
        rounded = (total.to(tensor.dtype) for total, tensor in zip(of_trained, trained, strict=bool(of_trained)))
        context.gradients = [torch.cat(of_hidden) if needs_hidden else None, *rounded]
        context.scale = head.scale
        return loss_sum

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] if context.scale == 1.0 else gradients[0] / context.scale
        computed, context.gradients = context.gradients, None
        return None, None, None, *(tensor if tensor is None else tensor.mul_(scale) for tensor in computed)


def objective_of(section: ObjectiveSection) -> Objective:
    match section.kind:
        case "lm":
            return LanguageModeling()
        case "sft":
            return SupervisedFineTuning()
        case "dpo":
            return DirectPreference(section)
