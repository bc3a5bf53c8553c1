"""The optimizer step over one stage's flat weights: learning rate, clipping, AdamW, NAdam or Muon, moving average.

To add an elementwise optimizer, add a function to UPDATES, and its name to the manifest's section.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor
from torch.optim.adamw import adamw

from agora.state.layout import AVERAGE, Layout, MomentSpec, TensorSlot
from agora.train.adamw8bit import EightBitPart
from agora.train.muon import MuonMatrices
from agora.train.optimizer_offload import OptimizerOffload, StateAccess, bytes_on_device

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
        section_at: Callable[[int], OptimizerSection] | None = None,
    ) -> None:
        """layout: of the weights; the moments are added to it here. weights: the initial ones [numel].

        section_at: returns the section with the learning rates of a step; None: they are those of `section`.

        offload: None: moments are on the weights' device. Raises PackageMissing for adamw8bit without bitsandbytes.
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
        self._section_at = section_at or (lambda _: section)
        self._clip = section.clip / math.sqrt(stage_count)
        self._muon = MuonMatrices(section, layout, self._held[MEAN], offload) if section.name == "muon" else None
        self._parts = []
        for whole, decay in elementwise_ranges(section, layout):
            for elements in offload.pieces([whole]):
                mean, square = (self._held[m.name][m.array_range(elements)] for m in self._specs[:2])
                self._parts.append(_WeightPart(elements, decay, mean, square))
        self._average_pieces = list(offload.pieces([slice(0, layout.numel)])) if AVERAGE in self._held else []
        self._largest_part = max((len(part.mean) for part in self._parts), default=0)
        self._part_bytes = max((bytes_on_device(part.mean, part.square) for part in self._parts), default=0)

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
        changes and None is returned. If memory does not suffice, nothing changes. After an error when something had
        changed, which only a device that fails can cause, `is_changing` stays True.
        """
        self.is_changing = False
        norm = float(torch.linalg.vector_norm(gradient)) / tokens
        if not math.isfinite(norm):
            return None
        return StepResult(self.update(weights, gradient, step, self._clip_factor(norm) / tokens), norm)

    @torch.no_grad()
    def preview(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        """Changes `weights` [numel] in place as step `step` along the mean `gradient` would; no moment changes.

        Overwrites `gradient`. Does nothing if its norm is not finite. Not for adamw8bit. If memory does not suffice,
        `weights` may have changed by half.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return
        gradient.mul_(self._clip_factor(norm))
        rate = learning_rate(step, self._section_at(step))
        self._update_parts(weights, gradient, rate, self._offload.trial_access(self._part_bytes), self._scratch())
        if self._muon:
            self._muon.move(weights, self._muon.directions(gradient), rate)
        torch.autograd.graph.increment_version(weights)

    def _clip_factor(self, norm: float) -> float:
        return min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0

    @torch.no_grad()
    def update(self, weights: Tensor, gradient: Tensor, step: int, scale: float = 1.0) -> float:
        """Takes step `step` along scale * gradient, which is clipped and finite. Returns its learning rate.

        Changes `weights` and the moments in place, and overwrites `gradient`. If memory does not suffice, nothing
        changes.
        """
        # No control flow depends on a value, so that weights and gradient may be on the meta device.
        rate = learning_rate(step, self._section_at(step))
        # All that needs new memory comes before the first change.
        access = self._offload.access(self._bytes_on_device())
        scratch = self._scratch()
        directions = list(self._muon.directions(gradient, scale)) if self._muon else []
        change_eight_bit = [
            part.prepare(weights[part.elements], gradient[part.elements], scale, rate, self.updates + 1, access)
            for part in self._eight_bit
        ]
        self.is_changing = True
        for change in change_eight_bit:
            change()
        gradient.mul_(scale)
        self._update_parts(weights, gradient, rate, access, scratch)
        if self._muon:
            self._muon.move(weights, directions, rate)
            self._muon.update_mean(gradient, access)
        for elements in self._average_pieces:
            with access.on_device(self._held[AVERAGE][elements]) as (average,):
                average.lerp_(weights[elements], 1.0 - average_decay(step, self.section))
        self.updates += 1
        # The fused kernels change memory without telling autograd; a graph that still needs these weights must raise.
        torch.autograd.graph.increment_version(weights)
        self.is_changing = False
        return rate

    def _update_parts(
        self, weights: Tensor, gradient: Tensor, rate: float, access: StateAccess, scratch: _Scratch
    ) -> None:
        for part in self._parts:
            with access.on_device(part.mean, part.square) as (mean, square):
                values = _PartValues(weights[part.elements], gradient[part.elements], mean, square)
                UPDATES[self.section.name](values, rate, part.decay, self.updates, self.section, scratch)

    def _scratch(self) -> _Scratch:
        values = self._largest_part if self.section.name == "nadam" else 0
        device = self._offload.device
        return _Scratch(torch.empty((), device=device), torch.empty(values, device=device))

    def _bytes_on_device(self) -> int:
        eight_bit = max((part.bytes_on_device() for part in self._eight_bit), default=0)
        average = max((bytes_on_device(self._held[AVERAGE][piece]) for piece in self._average_pieces), default=0)
        return max(self._part_bytes, eight_bit, average, self._muon.bytes_on_device() if self._muon else 0)

    @torch.no_grad()
    def load(self, updates: int, moments: Mapping[str, Tensor]) -> None:
        """Replaces all moments by copies of `moments`, by name, float32 [their numel] each, and the count of updates.

        Further steps are then as if the `updates` steps had been taken here. Moments in 8 bits are rounded. If memory
        does not suffice, nothing changes.
        """
        encoded = [
            (moment, moment.encode(moments[name][part.elements]))
            for part in self._eight_bit
            for name, moment in ((MEAN, part.mean), (SQUARE, part.square))
        ]
        self.updates = updates
        self.is_changing = False
        for spec in self._specs:
            for elements in spec.ranges:
                values = moments[spec.name][self._array_range(spec.name, elements)]
                self._held[spec.name][spec.array_range(elements)] = values
        for moment, (codes, scales) in encoded:
            moment.replace(codes, scales)

    def _array_range(self, name: str, elements: slice) -> slice:
        return next(moment for moment in self.layout.moments if moment.name == name).array_range(elements)


def with_moments(section: OptimizerSection, layout: Layout) -> Layout:
    """Returns the layout with the optimizer's arrays as moments, in place of any others.

    The moments are the mean; the square, without Muon's matrices; and the weights' average, if the section keeps one.
    """
    everything = [slice(0, layout.numel)]
    ranges = layout.ranges(lambda slot: not is_updated_by_muon(section, slot))
    square = MomentSpec(SQUARE, ranges, is_square=True, root_bound=_root_bound(section))
    average = (MomentSpec(AVERAGE, everything),) if section.average_decay else ()
    return replace(layout, moments=(MomentSpec(MEAN, everything), square, *average))


def _root_bound(section: OptimizerSection) -> float:
    # Of gradients g, k steps ago, the mean is (1 - beta1) sum beta1^k g, and the square (1 - beta2) sum beta2^k g^2. By
    # the inequality of Cauchy and Schwarz the mean is at most this many times the square's root, whatever they were.
    decay = section.beta1**2 / section.beta2 if section.beta2 else math.inf
    # Moments in 8 bits are rounded, squares also to 0.
    if decay >= 1 or section.name == "adamw8bit":
        return math.inf
    return (1 - section.beta1) / math.sqrt((1 - section.beta2) * (1 - decay))


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


def nadam_momentum(beta1: float, step: int) -> float:
    """Returns NAdam's momentum at its step number `step`; 1 is the first."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, step * MOMENTUM_DECAY))


@functools.lru_cache(maxsize=4)  # every part of the weights asks for the same one
def momentum_product(beta1: float, updates: int) -> float:
    """Returns the product of NAdam's momenta of the first `updates` steps, rounded to float32 each time as in torch."""
    product = np.float32(1.0)
    for step in range(1, updates + 1):
        product *= np.float32(nadam_momentum(beta1, step))
        if product == 0.0:
            break
    return float(product)


@dataclass(frozen=True, slots=True)
class _WeightPart:
    # One part of the flat weights with the optimizer's state for it.

    elements: slice
    decay: float
    mean: Tensor  # as `square`, a view of the moment
    square: Tensor


class _PartValues(NamedTuple):
    # Of one part, on the device.
    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


class _Scratch(NamedTuple):
    # What the updates need besides, so that they allocate nothing.
    updates: Tensor  # their number, which torch's fused kernel reads on the device
    values: Tensor  # for the largest part, if the update needs it


# torch's optimizers are not used as classes: these import torch._dynamo, which nothing here needs and which doubles a
# daemon's start time.


def _update_adamw(
    part: _PartValues, rate: float, decay: float, updates: int, section: OptimizerSection, scratch: _Scratch
) -> None:
    adamw(
        [part.weights],
        [part.gradient],
        [part.mean],
        [part.square],
        [],
        [scratch.updates.fill_(updates)],  # it counts this update itself
        fused=True,
        amsgrad=False,
        beta1=section.beta1,
        beta2=section.beta2,
        lr=rate,
        weight_decay=decay,
        eps=section.epsilon,
        maximize=False,
    )


def _update_nadam(
    part: _PartValues, rate: float, decay: float, updates: int, section: OptimizerSection, scratch: _Scratch
) -> None:
    # As in torch.optim.NAdam with decoupled_weight_decay, which allocates between its changes.
    step, beta2 = updates + 1, section.beta2
    momentum, next_momentum = nadam_momentum(section.beta1, step), nadam_momentum(section.beta1, step + 1)
    product = momentum_product(section.beta1, step)
    part.weights.mul_(1.0 - rate * decay)
    part.mean.lerp_(part.gradient, 1.0 - section.beta1)
    part.square.mul_(beta2).addcmul_(part.gradient, part.gradient, value=1.0 - beta2)
    root = torch.sqrt(part.square, out=scratch.values[: len(part.square)])
    root.div_((1.0 - beta2**step) ** 0.5).add_(section.epsilon)
    part.weights.addcdiv_(part.gradient, root, value=-rate * (1.0 - momentum) / (1.0 - product))
    part.weights.addcdiv_(part.mean, root, value=-rate * next_momentum / (1.0 - product * next_momentum))


# By the manifest's `optimizer.name`, the function that updates one part of the weights in float32. Muon's matrices and
# the matrices of adamw8bit are updated elsewhere.
UPDATES = {"adamw": _update_adamw, "nadam": _update_nadam, "muon": _update_adamw, "adamw8bit": _update_adamw}
