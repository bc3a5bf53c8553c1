"""The versions of a stage's weights, and the forwards that wait for their backward on one of them.

A graph that is kept for a backward needs its weights unchanged: call make_writable before each change.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch
from agora_protocol.errors import Busy, LocalError
from agora_protocol.ids import MicrobatchId
from torch import Tensor, nn

from agora.model import StageModule
from agora.state.layout import Layout, TensorSlot, lay_out
from agora.train.objectives import TokenBatch

# Stashed forwards and queued jobs are refused beyond this many times the usual number of microbatches in flight.
LIMIT_FACTOR = 4


def tensor_in(flat: Tensor, slot: TensorSlot) -> Tensor:
    return flat[slot.elements].view(slot.shape)


class WeightVersion:
    """One version of a stage's weights: `flat` [numel], and a `module` whose trainable `parameters` are views of it.

    The views share flat's version counter: autograd raises if weights that a graph still needs were changed.
    """

    def __init__(self, flat: Tensor, layout: Layout, template: StageModule) -> None:
        """template: a module of the same structure; its frozen parameters and its buffers are shared, not copied."""
        self.flat = flat
        named = dict(template.named_parameters())
        self.parameters = [nn.Parameter(tensor_in(flat, slot)) for slot in layout.slots]
        memo: dict[int, object] = {id(tensor): tensor for tensor in [*named.values(), *template.buffers()]}
        memo |= {id(named[slot.name]): parameter for slot, parameter in zip(layout.slots, self.parameters, strict=True)}
        self.module: StageModule = copy.deepcopy(template, memo)


class VersionedWeights:
    """Trainable weights of one stage, in one or two versions, each float32 [numel] with tensors as in `layout`."""

    def __init__(self, layout: Layout, current: WeightVersion, stashed: StashedForwards) -> None:
        """stashed: the forwards whose graphs may need these weights."""
        self.layout = layout
        self.current = current
        self._stashed = stashed
        self.previous: WeightVersion | None = None  # until weights changed that a graph needs

    def make_writable(self) -> Tensor:
        """Returns the flat current weights [numel], which the caller may change in place: no live graph needs them.

        If a stashed graph does, a copy becomes current, in the memory of the previous version.
        """
        if self._stashed.with_graph_on(self.current):
            # At most two versions are alive: these backwards will run the forward again.
            for forward in self._stashed.with_graph_on(self.previous):
                forward.drop_graph()
            self.begin_version()
        return self.current.flat

    def begin_version(self) -> None:
        """Makes a copy of the current version current. Overwrites `previous`: no graph may need it."""
        fresh = self.previous or WeightVersion(torch.empty_like(self.current.flat), self.layout, self.current.module)
        fresh.flat.copy_(self.current.flat)
        self.current, self.previous = fresh, self.current

    def free_memory(self) -> None:
        """Gives up the memory of the previous version, unless a graph needs it."""
        if not self._stashed.with_graph_on(self.previous):
            self.previous = None

    def twin(self) -> VersionedWeights:
        version = WeightVersion(self.current.flat.clone(), self.layout, self.current.module)
        return VersionedWeights(self.layout, version, self._stashed)


class StageWeights(VersionedWeights):
    """The trainable weights that a stage has learnt."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        hidden_matrices: Collection[str] = (),
        stashed: StashedForwards | None = None,
    ) -> None:
        """Copies the trainable parameters of `module`, which moves to `device`, to the first version.

        stashed: the forwards whose graphs may need these weights, if there are any.
        """
        module = module.to(device)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        layout = lay_out(((name, tuple(p.shape)) for name, p in trainable.items()), hidden_matrices)
        flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for slot in layout.slots:
            tensor_in(flat, slot).copy_(trainable[slot.name].detach())
        super().__init__(
            layout, WeightVersion(flat, layout, module), StashedForwards(0) if stashed is None else stashed
        )

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
    device_s: float = 0.0  # that the forward took

    def drop_graph(self) -> None:
        self.output, self.versions = None, ()

    def record_device_time(self, seconds: float) -> None:
        # Known only when the forward is over, and stashed.
        self.device_s = seconds


class StashedForwards:
    """The forwards of a span that wait for their backward: by microbatch, the stage that they entered, and content.

    `forget` may be called from any thread, the other methods on the device thread only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By entry stage too: a microbatch may enter a span at two stages, if its caller gave up and asked another peer.
        # By content too: whoever knows a microbatch's id may send other tensors under it.
        self._forwards: dict[tuple[MicrobatchId, int, bytes], StashedForward] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._forwards)

    def require_room(self, microbatch: MicrobatchId, entry_stage: int, content_digest: bytes = b"") -> None:
        """Raises Busy if one more forward would exceed the limit; never for one that replaces an earlier one."""
        if len(self._forwards) >= self._limit and (microbatch, entry_stage, content_digest) not in self._forwards:
            raise Busy(f"{self._limit} microbatches wait for their backward here; ask another peer")

    def add(self, forward: StashedForward) -> None:
        """Replaces an earlier forward of the same microbatch and entry stage. Ignores the limit."""
        with self._lock:
            work = forward.work
            self._forwards[work.microbatch, work.entry_stage, work.content_digest] = forward

    def find(self, microbatch: MicrobatchId, entry_stage: int, content_digest: bytes = b"") -> StashedForward:
        """Raises LocalError if no such forward is kept."""
        forward = self._forwards.get((microbatch, entry_stage, content_digest))
        if forward is None:
            raise LocalError(f"no forward of microbatch {microbatch.hex()} is kept here; it has to be sent again")
        return forward

    def forget(
        self,
        microbatch: MicrobatchId,
        entry_stage: int,
        content_digest: bytes = b"",
        *,
        only: StashedForward | None = None,
    ) -> None:
        """Removes a forward, if it is kept. only: if given, nothing but this very forward."""
        key = microbatch, entry_stage, content_digest
        with self._lock:
            if only is None or self._forwards.get(key) is only:
                self._forwards.pop(key, None)

    def tokens_in(self, stage: int) -> int:
        # Of the forwards that have passed the stage.
        return sum(forward.tokens for forward in list(self._forwards.values()) if forward.work.entry_stage <= stage)

    def count_graphs(self) -> int:
        return sum(forward.output is not None for forward in list(self._forwards.values()))

    def drop_graphs(self) -> None:
        for forward in list(self._forwards.values()):
            forward.drop_graph()

    def with_graph_on(self, version: WeightVersion | None) -> list[StashedForward]:
        return [forward for forward in list(self._forwards.values()) if version in forward.versions]
