"""The optimizer step over one stage's flat weights: learning rate, clipping, AdamW, NAdam or Muon, moving average.

To add an elementwise optimizer, add a function to UPDATES, and its name to the manifest's section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.nadam import nadam

from agora.state.layout import AVERAGE, Layout, MomentSpec, TensorSlot
from agora.train.adamw8bit import EightBitPart
from agora.train.muon import MuonMatrices
from agora.train.optimizer_offload import OptimizerOffload

MOMENTUM_DECAY = 4e-3  # NAdam's momentum decay; torch's own default
MEAN, SQUARE = "mean", "square"  # the names of the gradient's moments; AVERAGE names the moving average of the weights
# The averaging of the weights begins at this step: before, the loss falls so fast that older weights make it worse.
AVERAGE_FROM: Final = 100


def learning_rate(step: int, optimizer: OptimizerSection) -> float:
    """Returns the learning rate of optimizer step number `step` (0 is the first).

    It rises linearly over `warmup_steps` (step 0: peak / warmup_steps), falls along half a cosine until `total_steps`,
    and stays at peak * minimum_ratio. Source: Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5, one period.
    """
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    decay_steps = max(optimizer.total_steps - optimizer.warmup_steps, 1)
    progress = min((step - optimizer.warmup_steps) / decay_steps, 1.0)
    floor = optimizer.minimum_ratio
    return peak * (floor + (1.0 - floor) * half_cosine(progress))


def half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def average_decay(step: int, optimizer: OptimizerSection) -> float:
    """Returns the d of average = d * average + (1 - d) * weights at optimizer step number `step` (0 is the first)."""
    # 0 before AVERAGE_FROM. From then on, until the limit is reached, the average covers the last ninth of the steps.
    steps = max(step + 1 - AVERAGE_FROM, 0)
    return min(optimizer.average_decay, steps / (steps + 9))


@dataclass(frozen=True, slots=True)
class StepResult:
    learning_rate: float
    gradient_norm: float  # of this stage's mean gradient before clipping


class StageOptimizer:
    """The optimizer of one stage, with its moments; the weights are given at each step, and may be another tensor.

    | optimizer.name | hidden matrices | all other tensors |
    |----------------|-----------------|-------------------|
    | adamw          | AdamW           | AdamW             |
    | nadam          | NAdam           | NAdam             |
    | muon           | Muon            | AdamW             |
    | adamw8bit      | AdamW           | AdamW             |

    layout: the places of tensors and moments. updates: how many steps are in the moments; steps that were only counted
    are not. With adamw8bit the moments of all matrices are held in 8 bits. The manifest's `clip` is meant for the
    gradient norm of the whole model, which no peer knows; a stage clips at clip / sqrt(stages), or not at all if `clip`
    is 0. Weight decay applies to matrices only.
    """

    def __init__(
        self,
        section: OptimizerSection,
        stage_count: int,
        layout: Layout,
        weights: Tensor,
        offload: OptimizerOffload | None = None,
    ) -> None:
        """layout: of the weights; the moments are added to it here. weights: the initial ones [numel].

        offload: None: moments are on the weights' device. Raises TuningMissing for adamw8bit without bitsandbytes.
        """
        self.layout = with_moments(section, layout)
        self._offload = offload = offload or OptimizerOffload(weights.device)
        ranges = eight_bit_ranges(section, layout)
        self._eight_bit = [EightBitPart(section, part, section.weight_decay, offload) for part in ranges]
        self._specs = float32_moments(section, self.layout)
        self._held = {spec.name: offload.zeros(spec.numel) for spec in self._specs}
        if AVERAGE in self._held:
            self._held[AVERAGE].copy_(weights)
        self.updates = 0
        self.is_changing = False  # True after a step that raised when it had begun to change something
        self.section = section
        self._clip = section.clip / math.sqrt(stage_count)
        self._muon = MuonMatrices(section, layout, self._held[MEAN], offload) if section.name == "muon" else None
        self._parts = []
        for whole, decay in elementwise_ranges(section, layout):
            for elements in offload.pieces([whole]):
                mean, square = (self._held[m.name][m.array_range(elements)] for m in self._specs[:2])
                self._parts.append(_WeightPart.create(section, elements, decay, offload, mean, square))

    @property
    def moments(self) -> dict[str, Tensor]:
        # By name, float32 and flat. Those in 8 bits are decoded into new tensors; the others are the held ones, which
        # change with the next step.
        if not self._eight_bit:
            return self._held
        values_by_name = {}
        for whole, held in zip(self.layout.moments, self._specs, strict=True):
            if held.numel == whole.numel:
                values_by_name[whole.name] = self._held[whole.name]
                continue
            values = values_by_name[whole.name] = self._held[whole.name].new_zeros(whole.numel)
            for elements in held.ranges:
                values[elements] = self._held[whole.name][held.array_range(elements)]
            for part in self._eight_bit:
                values[part.elements] = (part.mean if whole.name == MEAN else part.square).decode()
        return values_by_name

    @property
    def average(self) -> Tensor | None:
        return self._held.get(AVERAGE)

    def step(self, weights: Tensor, gradient: Tensor, step: int, tokens: int = 1) -> StepResult | None:
        """Takes step `step` (counted from 0) along gradient / tokens, clipped. Returns its learning rate and norm.

        Changes `weights` [numel] and the moments in place, and overwrites `gradient`: a sum over `tokens`, or with the
        default of 1 a mean. The norm is that of gradient / tokens before clipping; when it is not finite, nothing
        changes and None is returned. If memory does not suffice, either nothing changes, or `is_changing` stays True.
        """
        self.is_changing = False
        norm = float(torch.linalg.vector_norm(gradient)) / tokens
        if not math.isfinite(norm):
            return None
        self.is_changing = True
        gradient.mul_(self._clip_factor(norm) / tokens)
        return StepResult(self.update(weights, gradient, step), norm)

    @torch.no_grad()
    def preview(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        """Changes `weights` [numel] in place as step `step` along the mean `gradient` would; no moment changes.

        Overwrites `gradient`. Does nothing if its norm is not finite. Not for adamw8bit.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return
        gradient.mul_(self._clip_factor(norm))
        rate = learning_rate(step, self.section)
        for part in self._parts:
            UPDATES[self.section.name](part.copy(), weights[part.elements], gradient[part.elements], rate)
        if self._muon:
            self._muon.step(weights, gradient, rate, keeps_mean=True)
        torch.autograd.graph.increment_version(weights)

    def _clip_factor(self, norm: float) -> float:
        return min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0

    @torch.no_grad()
    def update(self, weights: Tensor, gradient: Tensor, step: int) -> float:
        """Takes step `step` along `gradient`, a mean that is already clipped and finite. Returns its learning rate.

        Changes `weights` and the moments in place, and may overwrite `gradient`.
        """
        # No control flow depends on a value, so that weights and gradient may be on the meta device.
        rate = learning_rate(step, self.section)
        self.is_changing = True
        for part in self._parts:
            UPDATES[self.section.name](part, weights[part.elements], gradient[part.elements], rate)
        for eight_bit in self._eight_bit:
            places = eight_bit.elements
            eight_bit.step(weights[places], gradient[places], rate, self.updates + 1)
        if self._muon:
            self._muon.step(weights, gradient, rate)
        if AVERAGE in self._held:
            for elements in self._offload.pieces([slice(0, len(weights))]):
                with self._offload.on_device(self._held[AVERAGE][elements]) as (average,):
                    average.lerp_(weights[elements], 1.0 - average_decay(step, self.section))
        self.updates += 1
        # The fused kernels change memory without telling autograd; a graph that still needs these weights must raise.
        torch.autograd.graph.increment_version(weights)
        self.is_changing = False
        return rate

    @torch.no_grad()
    def load(self, updates: int, moments: Mapping[str, Tensor]) -> None:
        """Replaces all moments by copies of `moments`, by name, float32 [their numel] each, and the count of updates.

        Further steps are then as if the `updates` steps had been taken here. Moments in 8 bits are rounded.
        """
        self.updates = updates
        self.is_changing = False
        for spec in self._specs:
            for elements in spec.ranges:
                values = moments[spec.name][self._array_range(spec.name, elements)]
                self._held[spec.name][spec.array_range(elements)] = values
        for eight_bit in self._eight_bit:
            eight_bit.mean.encode(moments[MEAN][eight_bit.elements])
            eight_bit.square.encode(moments[SQUARE][eight_bit.elements])
        for part in self._parts:
            part.step.fill_(updates)
            part.momentum.fill_(momentum_product(self.section.beta1, updates))

    def _array_range(self, name: str, elements: slice) -> slice:
        return next(moment for moment in self.layout.moments if moment.name == name).array_range(elements)


def with_moments(section: OptimizerSection, layout: Layout) -> Layout:
    """Returns the layout with the optimizer's arrays as moments, in place of any others.

    The moments are the mean; the square, without Muon's matrices; and the weights' average, if the section keeps one.
    """
    everything = [slice(0, layout.numel)]
    square = MomentSpec(SQUARE, layout.ranges(lambda slot: not is_updated_by_muon(section, slot)), is_square=True)
    average = (MomentSpec(AVERAGE, everything),) if section.average_decay else ()
    return replace(layout, moments=(MomentSpec(MEAN, everything), square, *average))


def is_updated_by_muon(section: OptimizerSection, slot: TensorSlot) -> bool:
    return section.name == "muon" and slot.is_hidden_matrix


def eight_bit_ranges(section: OptimizerSection, layout: Layout) -> list[slice]:
    return layout.ranges(lambda slot: len(slot.shape) > 1) if section.name == "adamw8bit" else []


def float32_moments(section: OptimizerSection, layout: Layout) -> list[MomentSpec]:
    """Returns the moments that are held in float32."""
    if section.name != "adamw8bit":
        return list(layout.moments)
    vectors = layout.ranges(lambda slot: len(slot.shape) <= 1)
    return [replace(moment, ranges=vectors) if moment.name in (MEAN, SQUARE) else moment for moment in layout.moments]


def elementwise_ranges(section: OptimizerSection, layout: Layout) -> list[tuple[slice, float]]:
    """Returns the ranges that AdamW or NAdam updates in float32, each with its weight decay: 0 for vectors.

    Left out are Muon's hidden matrices, and with adamw8bit all matrices.
    """
    vectors = layout.ranges(lambda slot: len(slot.shape) <= 1)
    if section.name == "adamw8bit":
        return [(part, 0.0) for part in vectors]
    matrices = layout.ranges(lambda slot: len(slot.shape) > 1 and not is_updated_by_muon(section, slot))
    return [*((part, section.weight_decay) for part in matrices), *((part, 0.0) for part in vectors)]


def momentum_product(beta1: float, updates: int) -> float:
    """Returns the product of NAdam's momenta of the first `updates` steps, rounded to float32 after each, as in torch.

    The momentum of step t (1 is the first) is beta1 * (1 - 0.5 * 0.96^(t * MOMENTUM_DECAY)).
    """
    product = np.float32(1.0)
    for update in range(1, updates + 1):
        product *= np.float32(beta1 * (1.0 - 0.5 * 0.96 ** (update * MOMENTUM_DECAY)))
        if product == 0.0:
            break
    return float(product)


@dataclass(slots=True)
class _WeightPart:
    # The optimizer's state for one part of the flat weights, with the arguments that torch's functions take.
    # torch's optimizers are used as functions: their classes import torch._dynamo, which nothing here needs and which
    # doubles a daemon's start time.

    elements: slice
    offload: OptimizerOffload
    mean: Tensor  # as `square`, a view of the moment
    square: Tensor
    step: Tensor  # counts updates
    momentum: Tensor  # NAdam's running product
    options: dict[str, Any]

    @classmethod
    def create(
        cls,
        section: OptimizerSection,
        part: slice,
        decay: float,
        offload: OptimizerOffload,
        mean: Tensor,
        square: Tensor,
    ) -> _WeightPart:
        options = {"beta1": section.beta1, "beta2": section.beta2, "eps": section.epsilon, "weight_decay": decay}
        # The fused kernel needs its step count on the device; nadam's scalars stay on the CPU, as in torch's class.
        step = torch.zeros((), device="cpu" if section.name == "nadam" else offload.device)
        return cls(part, offload, mean, square, step, torch.ones(()), {**options, "maximize": False})

    def copy(self) -> _WeightPart:
        state = {name: getattr(self, name).clone() for name in ("mean", "square", "step", "momentum")}
        return replace(self, **state)


def _update_adamw(part: _WeightPart, weights: Tensor, gradient: Tensor, rate: float) -> None:
    options: dict[str, Any] = {"fused": True, "amsgrad": False, "lr": rate, **part.options}
    with part.offload.on_device(part.mean, part.square) as (mean, square):
        adamw([weights], [gradient], [mean], [square], [], [part.step], **options)


def _update_nadam(part: _WeightPart, weights: Tensor, gradient: Tensor, rate: float) -> None:
    options: dict[str, Any] = {"foreach": True, "decoupled_weight_decay": True, "momentum_decay": MOMENTUM_DECAY}
    options |= {"lr": rate, **part.options}
    with part.offload.on_device(part.mean, part.square) as (mean, square):
        nadam([weights], [gradient], [mean], [square], [part.momentum], [part.step], **options)


# By the manifest's `optimizer.name`, the function that updates one part of the weights in float32. Muon's matrices and
# the matrices of adamw8bit are updated elsewhere.
UPDATES = {"adamw": _update_adamw, "nadam": _update_nadam, "muon": _update_adamw, "adamw8bit": _update_adamw}
