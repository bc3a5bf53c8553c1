"""The versions of a stage's weights, and the forwards that wait for their backward on one of them.

A graph that is kept for a backward needs its weights unchanged: change them only within VersionedWeights.writable.

Where products are in 16 bits, the weights are converted once a step, not in every forward and again in every repeat:
the optimizer changes float32 weights, and layers compute with a copy, as in MixedPrecisionPolicy of torch's FSDP2.
A gradient of the copy is what autocast makes before it converts it to float32: all values are the same to the last bit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from agora_protocol.errors import Busy, LocalError
from agora_protocol.ids import MicrobatchId
from torch import Tensor, nn

from agora.core.span_work import ForwardKey
from agora.model import StageModule
from agora.model.family import names_of, set_parameter
from agora.state.layout import Layout, TensorSlot, lay_out
from agora.train.objectives import TokenBatch

# Stashed forwards and queued jobs are refused beyond this many times the usual number of microbatches in flight.
MAX_TIMES_IN_FLIGHT = 4
NO_COPIES: Final[Mapping[str, torch.dtype]] = MappingProxyType({})


def tensor_in(flat: Tensor, slot: TensorSlot) -> Tensor:
    return flat[slot.elements].view(slot.shape)


class WeightVersion:
    """One version of a stage's weights: a `module`, and its trainable `parameters` in the order of the layout's slots.

    The parameters are views of `weights`, float32 [numel], or of copies of it in other memory. A view shares the
    version counter of what it shows: autograd raises if weights that a graph still needs were changed.
    """

    def __init__(
        self,
        weights: Tensor | None,
        layout: Layout,
        template: StageModule,
        copied: Mapping[str, torch.dtype] = NO_COPIES,
    ) -> None:
        """weights: None if all parameters are copies. copied: by name, the dtype of the parameters that are copies.

        template: a module of the same structure; its frozen parameters and its buffers are shared, not copied.
        """
        self.weights = weights
        self._layout = layout
        named = dict(template.named_parameters())
        self._copies = [
            (
                elements,
                torch.zeros(elements.stop - elements.start, dtype=dtype, device=named[layout.slots[0].name].device),
            )
            for dtype in dict.fromkeys(copied.values())
            for elements in layout.ranges(partial(_is_copied_as, copied, dtype))
        ]
        self.parameters = [nn.Parameter(self._view(slot)) for slot in layout.slots]
        memo: dict[int, object] = {id(tensor): tensor for tensor in [*named.values(), *template.buffers()]}
        memo |= {id(named[slot.name]): parameter for slot, parameter in zip(layout.slots, self.parameters, strict=True)}
        self.module: StageModule = copy.deepcopy(template, memo)
        if weights is not None:
            self.read(weights)

    def _view(self, slot: TensorSlot) -> Tensor:
        for elements, values in self._copies:
            if elements.start <= slot.offset < elements.stop:
                return tensor_in(values, replace(slot, offset=slot.offset - elements.start))
        assert self.weights is not None
        return tensor_in(self.weights, slot)

    @property
    def flat(self) -> Tensor:
        """`weights`; without them a new tensor with the values of the copies, float32 [numel], too."""
        if self.weights is not None:
            return self.weights
        flat = torch.zeros(self._layout.numel, device=self.parameters[0].device)
        for elements, values in self._copies:
            flat[elements] = values
        return flat

    @property
    def own_bytes(self) -> int:
        # Of what no other version shares.
        if self._copies or self.weights is None:
            return sum(values.nbytes for _, values in self._copies)
        return self.weights.nbytes

    def read(self, weights: Tensor) -> None:
        """Renews the copies from float32 weights [numel]; allocates nothing."""
        for elements, values in self._copies:
            values.copy_(weights[elements])

    def take_over(self, other: WeightVersion) -> None:
        """Makes the weights those of another version of the same kind; allocates nothing."""
        if self.weights is not None and other.weights is not None and self.weights is not other.weights:
            self.weights.copy_(other.weights)
        for (_, values), (_, others) in zip(self._copies, other._copies, strict=True):
            values.copy_(others)


def _is_copied_as(copied: Mapping[str, torch.dtype], dtype: torch.dtype, slot: TensorSlot) -> bool:
    return copied.get(slot.name) == dtype


def copied_parameters(module: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Returns, by name, the trained parameters that a version of a stage's weights copies, and in which dtype.

    dtype: of products. Without autocast, float32, nothing is copied. Else matrices are, in that dtype, and vectors in
    float32, because graphs keep both while steps change the weights. Embeddings are not: no graph keeps one, and in
    float32 the gradients of a token that comes often add up.
    """
    if dtype == torch.float32:
        return NO_COPIES
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    return {
        name: dtype if parameter.dim() > 1 else torch.float32
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in embeddings
    }


class VersionedWeights:
    """Trainable weights of one stage, in one or two versions, with tensors as in `layout`.

    Versions that are copies in another dtype share one float32 tensor; otherwise each has its own.
    """

    def __init__(
        self,
        layout: Layout,
        current: WeightVersion,
        stashed: StashedForwards,
        copied: Mapping[str, torch.dtype] = NO_COPIES,
    ) -> None:
        """stashed: the forwards whose graphs may need these weights. copied: of each version, see WeightVersion."""
        self.layout = layout
        self.current = current
        self._stashed = stashed
        self._copied = copied
        self.previous: WeightVersion | None = None  # until weights changed that a graph needs

    @contextmanager
    def writable(self) -> Iterator[Tensor]:
        """Context manager: yields the flat float32 weights [numel], to be changed in place: no live graph needs them.

        If a stashed graph needs the current version, another one becomes current, in the memory of the previous one.
        What needs memory comes first. Where all weights are copies, the tensor is a new one without values.
        """
        if self._stashed.with_graph_on(self.current):
            # At most two versions are alive: these backwards will run the forward again.
            for forward in self._stashed.with_graph_on(self.previous):
                forward.drop_graph()
            self.begin_version()
        weights = self.current.weights
        if weights is None:
            weights = torch.zeros(self.layout.numel, device=self.current.parameters[0].device)
        try:
            yield weights
        finally:  # also after an error: it may have come when something had changed
            self.current.read(weights)

    def begin_version(self) -> None:
        """Makes a copy of the current version current. Overwrites `previous`: no graph may need it."""
        fresh = self.previous or self._new_version()
        fresh.take_over(self.current)
        self.current, self.previous = fresh, self.current

    def _new_version(self) -> WeightVersion:
        weights = self.current.flat if self._copied else torch.empty_like(self.current.flat)
        return WeightVersion(weights, self.layout, self.current.module, self._copied)

    def free_memory(self) -> None:
        """Gives up the memory of the previous version, unless a graph needs it."""
        if not self._stashed.with_graph_on(self.previous):
            self.previous = None

    def twin(self) -> VersionedWeights:
        """Returns other weights of the same values, of which only copies are held if versions are copies."""
        copied = {slot.name: self._copied.get(slot.name, torch.float32) for slot in self.layout.slots if self._copied}
        weights = None if copied else self.current.flat.clone()
        version = WeightVersion(weights, self.layout, self.current.module, copied)
        version.read(self.current.flat)
        return VersionedWeights(self.layout, version, self._stashed, copied)


class StageWeights(VersionedWeights):
    """The trainable weights that a stage has learnt."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        hidden_matrices: Collection[str] = (),
        stashed: StashedForwards | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Makes the trainable parameters of `module`, which moves to `device`, the first version.

        Those on the meta device are zeros until `fill`. stashed: the forwards whose graphs may need these weights, if
        there are any. dtype: of products.
        """
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        layout = lay_out(((name, tuple(p.shape)) for name, p in trainable.items()), hidden_matrices)
        flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for slot in layout.slots:
            values = tensor_in(flat, slot)
            if not trainable[slot.name].is_meta:
                values.copy_(trainable[slot.name].detach())
            # The module's own are given up here, one by one, and nothing is copied that will be replaced.
            set_parameter(module, names_of(module, trainable[slot.name]), nn.Parameter(values))
        self._unfilled = module if any(parameter.is_meta for parameter in trainable.values()) else None
        del trainable
        module = module.to(device)
        copied = copied_parameters(module, dtype)
        version = WeightVersion(flat, layout, module, copied)
        super().__init__(layout, version, StashedForwards(0) if stashed is None else stashed, copied)

    @torch.no_grad()
    def fill(self, fill: Callable[[StageModule], None]) -> bool:
        """Has `fill` set the trained parameters of a module, in place, unless they were: they are the first version.

        Returns whether it was called. If it raises, they may be set in part.
        """
        if self._unfilled is None:
            return False
        with self.writable():
            fill(self._unfilled)
        self._unfilled = None
        return True

    def copy_tensors(self, version: WeightVersion | None = None) -> dict[str, Tensor]:
        """Returns copies of the trainable tensors by full name, on the CPU. version: by default `current`."""
        flat = (version or self.current).flat
        return {slot.name: tensor_in(flat, slot).detach().cpu().clone() for slot in self.layout.slots}


@dataclass(frozen=True, slots=True)
class DecodedWork:
    """A SpanWork as tensors on the device."""

    microbatch: MicrobatchId
    entry_stage: int
    entry: Tensor  # the boundary that enters there, float32 [b, s, k], or at stage 0 the token ids [b, s]
    batch: TokenBatch
    purpose: str = "train"
    references: tuple[float, ...] = ()
    content_digest: bytes = b""
    codec: str = ""

    @property
    def key(self) -> ForwardKey:
        return ForwardKey(self.microbatch, self.entry_stage, self.content_digest, self.codec)

    @property
    def is_training(self) -> bool:
        return self.purpose == "train"


@dataclass(slots=True)
class StashedForward:
    """What the backward of one microbatch needs: its work, and, if kept, the graph from the entry to `output`."""

    work: DecodedWork
    tokens: int  # the weight of the microbatch in its step
    steps: tuple[int, ...]  # of each stage from the entry stage on, its step at the forward
    output: Tensor | None = None  # None if the backward has to run the forward again
    versions: tuple[WeightVersion, ...] = ()  # the graph's weights
    # Of each layer but the last, where these are kept in place of the graph; they are of `versions`, too.
    layer_outputs: tuple[Tensor, ...] = ()
    graph_bytes: int = 0  # that the graph or the outputs take, as measured; 0 without
    device_s: float = 0.0  # that the forward took

    def drop_graph(self) -> None:
        self.output, self.versions, self.layer_outputs, self.graph_bytes = None, (), (), 0

    @property
    def has_graph(self) -> bool:
        # Or what a replay makes one of.
        return self.output is not None or bool(self.layer_outputs)

    def record_device_time(self, seconds: float) -> None:
        # Known only when the forward is over, and stashed.
        self.device_s = seconds


class StashedForwards:
    """The forwards of a span that wait for their backward.

    `forget` may be called from any thread, the other methods on the device thread only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._forwards: dict[ForwardKey, StashedForward] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._forwards)

    def require_room(self, key: ForwardKey) -> None:
        """Raises Busy if one more forward would exceed the limit; never for one that replaces an earlier one."""
        if len(self._forwards) >= self._limit and key not in self._forwards:
            raise Busy(f"{self._limit} microbatches wait for their backward here; ask another peer")

    def add(self, forward: StashedForward) -> None:
        """Replaces an earlier forward of the same key. Ignores the limit."""
        with self._lock:
            self._forwards[forward.work.key] = forward

    def find(self, key: ForwardKey) -> StashedForward:
        """Raises LocalError if no such forward is kept."""
        forward = self._forwards.get(key)
        if forward is None:
            raise LocalError(f"No forward of microbatch {key.microbatch.hex()} is kept here; it has to be sent again.")
        return forward

    def forget(self, key: ForwardKey, *, only: StashedForward | None = None) -> None:
        """Removes a forward, if it is kept. only: if given, nothing but this very forward."""
        with self._lock:
            if only is None or self._forwards.get(key) is only:
                self._forwards.pop(key, None)

    def tokens_in(self, stage: int) -> int:
        # Of the forwards that have passed the stage.
        return sum(forward.tokens for forward in list(self._forwards.values()) if forward.work.entry_stage <= stage)

    def count_graphs(self) -> int:
        return sum(forward.has_graph for forward in list(self._forwards.values()))

    @property
    def graph_bytes(self) -> int:
        return sum(forward.graph_bytes for forward in list(self._forwards.values()))

    def drop_graphs(self, count: int | None = None) -> None:
        """Drops the graphs of the newest forwards, whose backwards come last. count: how many; None: all."""
        kept = [forward for forward in list(self._forwards.values()) if forward.has_graph]
        for forward in kept[len(kept) - (len(kept) if count is None else count) :]:
            forward.drop_graph()

    def drop_graph_bytes(self, wanted: float) -> None:
        """Drops graphs of at least `wanted` bytes, as far as there are any, the newest first."""
        for forward in reversed(list(self._forwards.values())):
            if wanted <= 0:
                return
            wanted -= forward.graph_bytes
            forward.drop_graph()

    def with_graph_on(self, version: WeightVersion | None) -> list[StashedForward]:
        return [forward for forward in list(self._forwards.values()) if version in forward.versions]
