"""What the pipeline needs from other rooms, as narrow protocols: a caller, a compute, a source of batches.

Knows only shapes of calls. Must not know who implements them: the daemon wires net.calls and train.compute in, tests
wire an in-memory network and arithmetic in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor

from agora.calls import OnProgress
from agora.observe.events import Event

Report = Callable[[Event], None]
Fault = Callable[[str], Awaitable[None]]


class LossSum(Protocol):
    """A sum of token losses, and over how many."""

    @property
    def loss_sum(self) -> float:
        """Sum of the token losses, nats."""

    @property
    def tokens(self) -> int:
        """Supervised tokens in the sum."""


class Finished(LossSum, Protocol):
    """What the last stage makes of a microbatch."""

    @property
    def gradient(self) -> WireTensor | None:
        """Of the boundary that came in; None at stage 0 and when evaluating."""

    @property
    def busy_s(self) -> float:
        """Device time that this microbatch took here."""


class Backward(Protocol):
    """What the backward of a span makes of a gradient."""

    @property
    def gradient(self) -> WireTensor | None:
        """Of the boundary that came in; None at stage 0."""

    @property
    def busy_s(self) -> float:
        """Device time that this microbatch took here."""


class Compute(Protocol):
    """This peer's span on its device (train.compute.Compute).

    Every failure is an AgoraError. A cancelled job leaves nothing behind. `finish` (train) and `backward` count the
    microbatch: after they returned, the gradient is in the sums; when they raise, it is not. The compute reports what
    it counted (MicrobatchCounted) at the moment it does: nobody else knows it.
    """

    @property
    def span(self) -> Span:
        """The stages held."""

    async def forward(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> WireTensor:
        """The boundary that leaves the span entered at stage `first`; keeps what the backward needs when `train`."""

    async def finish(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> Finished:
        """Forward, loss and, when `train`, backward of a span that holds the last stage, in one go."""

    async def backward(self, microbatch: MicrobatchId, gradient: WireTensor) -> Backward:
        """The backward of an earlier forward. After a ProtocolError the forward is still held, else it is gone."""

    def forget(self, microbatch: MicrobatchId) -> None:
        """Drops a forward that will have no backward; harmless when there is none."""


class Batches(Protocol):
    """Where an origin's data comes from (data.sampling, as wire tensors)."""

    def draw(self, counter: int) -> WireTensor:
        """Tokens of this origin's `counter`-th training microbatch [b, s + 1]: a pure function."""

    def heldout(self, count: int) -> Iterable[WireTensor]:
        """At most `count` microbatches that are never trained on, the same at every call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A hop's answer: Processed, the gradient of the boundary that came in, if there is one, and who gave it (None:
    we).
    """

    message: Processed
    tensors: list[WireTensor] = field(default_factory=list)
    peer: PeerId | None = None

    @property
    def gradient(self) -> WireTensor | None:
        """Of the boundary that came in; None at stage 0 and when evaluating."""
        return self.tensors[0] if self.tensors else None

    @property
    def nbytes(self) -> int:
        """Bytes that keeping this answer costs."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Entrance(Protocol):
    """The way into the pipeline at this peer (hop.Hop)."""

    async def process(
        self, message: Process, tensors: Sequence[WireTensor], deadline: float, progress: OnProgress
    ) -> Answer:
        """One hop, and everything after it."""


@dataclass(frozen=True, slots=True)
class WireShapes:
    """What the manifest implies for the tensors of a microbatch."""

    boundary_dtype: str
    boundary_shape: tuple[int, ...]
    gradient_dtype: str
    gradient_shape: tuple[int, ...]
    tokens_shape: tuple[int, ...]

    def fits_boundary(self, tensor: WireTensor) -> bool:
        """Whether `tensor` can be a boundary of this run."""
        return tensor.dtype == self.boundary_dtype and tensor.shape == self.boundary_shape

    def fits_gradient(self, tensor: WireTensor) -> bool:
        """Whether `tensor` can be a boundary's gradient of this run."""
        return tensor.dtype == self.gradient_dtype and tensor.shape == self.gradient_shape

    def fits_tokens(self, tensor: WireTensor) -> bool:
        """Whether `tensor` can be the tokens of a microbatch of this run."""
        return tensor.dtype in TOKEN_DTYPES and tensor.shape == self.tokens_shape
