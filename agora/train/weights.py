"""The trainable weights of one stage: one flat tensor per version, one flat gradient sum.

Knows: a module's parameters and where they lie in memory. Must not know: microbatches, optimizers, graphs, peers.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from agora.state.layout import Layout, Slot, lay_out


class Bank:
    """One version of a stage's weights: `flat`, and a module whose trainable parameters are views of it.

    The parameters share the version counter of `flat`, so that autograd raises, rather than computes nonsense, should
    anything ever change weights that a graph still needs.
    """

    def __init__(self, flat: Tensor, layout: Layout, template: nn.Module) -> None:
        """template: a module of the same structure; its frozen parameters and its buffers are shared, not copied."""
        self.flat = flat
        named = dict(template.named_parameters())
        self.parameters = [nn.Parameter(_tensor_in(flat, slot)) for slot in layout.slots]
        memo: dict[int, object] = {id(tensor): tensor for tensor in [*named.values(), *template.buffers()]}
        memo |= {id(named[slot.name]): parameter for slot, parameter in zip(layout.slots, self.parameters, strict=True)}
        self.module: nn.Module = copy.deepcopy(template, memo)


class StageWeights:
    """The weights of one stage in one version, or in two while graphs on the former one are alive; float32.

    `current` is what forwards use and steps change. `gradient` is the sum for the next step, whatever the version it
    was computed on. Both are `numel` elements, a multiple of SLICE_BLOCK, with the tensors where `layout` says.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        module = module.to(device)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.layout = lay_out((name, tuple(p.shape)) for name, p in trainable.items())
        flat = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for slot in self.layout.slots:
            _tensor_in(flat, slot).copy_(trainable[slot.name].detach())
        self.gradient = torch.zeros_like(flat)
        self.gradients = [_tensor_in(self.gradient, slot) for slot in self.layout.slots]
        self.current = Bank(flat, self.layout, module)
        self.former: Bank | None = None

    @property
    def numel(self) -> int:
        """Elements of one version, padding included."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self.current.flat.nbytes

    def clear_gaps(self, flat: Tensor) -> None:
        """Sets to zero what belongs to no tensor in `flat` [numel]: values from others may have something there."""
        for slot, following in pairwise([*self.layout.slots, Slot("", self.numel, ())]):
            flat[slot.elements.stop : following.offset].zero_()

    def turn_over(self) -> None:
        """Makes a copy of the current weights the current version, so that graphs on the old one stay valid.

        The caller has made sure that no graph needs the former version any more: its memory takes the copy.
        """
        fresh = self.former or Bank(torch.empty_like(self.current.flat), self.layout, self.current.module)
        fresh.flat.copy_(self.current.flat)
        self.current, self.former = fresh, self.current

    def tensors(self) -> dict[str, Tensor]:
        """The current weights by name, as copies on the CPU."""
        return {slot.name: _tensor_in(self.current.flat, slot).detach().cpu().clone() for slot in self.layout.slots}


def _tensor_in(flat: Tensor, slot: Slot) -> Tensor:
    """Returns the tensor of `slot` inside `flat`, as a view."""
    return flat[slot.elements].view(slot.shape)
