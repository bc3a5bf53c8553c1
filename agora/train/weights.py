"""The trainable weights of one stage: one flat tensor per version, one flat gradient sum.

Knows: a module's parameters and where they lie in memory. Must not know: microbatches, optimizers, graphs, peers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from agora_protocol.limits import SLICE_BLOCK
from torch import Tensor, nn

ALIGNMENT = 16
"""Elements: every tensor starts on a 64-byte border, as the matrix kernels like it. The gaps are and remain zero."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one named tensor lies in the flat weights: elements, not bytes."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The tensor inside `flat`, as a view of its shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


def _next_border(offset: int, border: int = ALIGNMENT) -> int:
    return -(-offset // border) * border


def lay_out(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[list[Slot], int, int]:
    """Where tensors of these names and shapes lie; the end of the matrices, which come first; and the end of it all."""
    slots: list[Slot] = []
    end = decayed = 0
    for name, shape in sorted(shapes, key=lambda item: len(item[1]) < 2):  # stable: matrices first
        slots.append(Slot(name, end, shape))
        end = _next_border(end + slots[-1].numel)
        if len(shape) >= 2:
            decayed = end
    return slots, decayed, _next_border(end, SLICE_BLOCK)


class Bank:
    """One version of a stage's weights: `flat`, and a module whose trainable parameters are views of it.

    The parameters share the version counter of `flat`, so that autograd raises, rather than computes nonsense, should
    anything ever change weights that a graph still needs.
    """

    def __init__(self, flat: Tensor, slots: Sequence[Slot], template: nn.Module) -> None:
        """template: a module of the same structure; its frozen parameters and its buffers are shared, not copied."""
        self.flat = flat
        named = dict(template.named_parameters())
        self.parameters = [nn.Parameter(slot.of(flat)) for slot in slots]
        memo: dict[int, object] = {id(tensor): tensor for tensor in [*named.values(), *template.buffers()]}
        memo |= {id(named[slot.name]): parameter for slot, parameter in zip(slots, self.parameters, strict=True)}
        self.module: nn.Module = copy.deepcopy(template, memo)


class StageWeights:
    """The weights of one stage in one version, or in two while graphs on the former one are alive; float32.

    `current` is what forwards use and steps change. `gradient` is the sum for the next step, whatever the version it
    was computed on. The first `decayed` elements of both are the matrices, the rest is what weight decay spares. Both
    are `numel` elements, a multiple of SLICE_BLOCK.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        module = module.to(device)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.slots, self.decayed, self.numel = lay_out((name, tuple(p.shape)) for name, p in trainable.items())
        flat = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for slot in self.slots:
            slot.of(flat).copy_(trainable[slot.name].detach())
        self.gradient = torch.zeros_like(flat)
        self.gradients = [slot.of(self.gradient) for slot in self.slots]
        self.current = Bank(flat, self.slots, module)
        self.former: Bank | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self.current.flat.nbytes

    def clear_gaps(self, flat: Tensor) -> None:
        """Sets to zero what belongs to no tensor in `flat` [numel]: values from others may have something there."""
        for slot, following in pairwise([*self.slots, Slot("", self.numel, ())]):
            flat[slot.offset + slot.numel : following.offset].zero_()

    def turn_over(self) -> None:
        """Makes a copy of the current weights the current version, so that graphs on the old one stay valid.

        The caller has made sure that no graph needs the former version any more: its memory takes the copy.
        """
        fresh = self.former or Bank(torch.empty_like(self.current.flat), self.slots, self.current.module)
        fresh.flat.copy_(self.current.flat)
        self.current, self.former = fresh, self.current

    def tensors(self) -> dict[str, Tensor]:
        """The current weights by name, as copies on the CPU."""
        return {slot.name: slot.of(self.current.flat).detach().cpu().clone() for slot in self.slots}
