"""Protocols of what the pipeline needs of device and data; the answer of a hop; the tensors that the manifest allows.

Knows: the form of calls and tensors. Must not know: who implements them (train.compute, or arithmetic in tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agora_protocol.errors import ProtocolError
from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor

from agora.calls import Reply
from agora.metrics import are_plausible
from agora.stepping import SpanResult


class SpanCompute(Protocol):
    """Protocol: the device that computes this peer's span of stages; implemented by train.Compute.

    first: the stage that the microbatch enters. boundary: None at stage 0. purpose, references: as in the message
    Process. Every failure is an AgoraError, and a cancelled job leaves nothing behind. `finish` (with purpose "train")
    and `backward` count the microbatch: when they return, its gradient is in the stages' sums; when they raise, it is
    not.
    """

    @property
    def span(self) -> Span: ...

    async def forward(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, purpose: str
    ) -> WireTensor:
        """Runs stages `first` to the span's last and returns the boundary that leaves the span.

        With purpose "train" it keeps what `backward` needs, until `backward` or `forget`.
        """

    async def finish(
        self,
        microbatch: MicrobatchId,
        first: int,
        boundary: WireTensor | None,
        tokens: WireTensor,
        purpose: str,
        references: Sequence[float] = (),
    ) -> SpanResult:
        """Runs stages `first` to the model's last and the loss, as one job; returns loss, times and metrics.

        With purpose "train" it runs the backward too; then the result has the gradient of the boundary.
        """

    async def backward(self, microbatch: MicrobatchId, first: int, gradient: WireTensor) -> SpanResult:
        """Runs the backward of an earlier `forward`, and returns the gradient of the boundary that entered.

        Raises ProtocolError for a gradient that cannot be used; then `backward` may be called again with another one.
        """

    def forget(self, microbatch: MicrobatchId, first: int) -> None:
        """Drops what `forward` kept of the microbatch that entered at `first`; does nothing if nothing is kept."""


class NewMicrobatch(Protocol):
    """Protocol: a drawn microbatch. tokens: its token ids. number: the number by which its source knows it."""

    @property
    def tokens(self) -> WireTensor: ...
    @property
    def number(self) -> int: ...


class MicrobatchSource(Protocol):
    """Protocol: where an origin's microbatches come from; implemented by the run's data."""

    def draw(self) -> NewMicrobatch | None:
        """Returns the next training microbatch; None if there is none before more is heard from other origins."""

    def mark_completed(self, number: int) -> None:
        """Records that the drawn microbatch `number` was trained on."""

    def release(self, number: int) -> None:
        """Records that the drawn microbatch `number` was dropped untrained, so that its rows may be drawn again."""

    def heldout(self, count: int) -> Iterable[WireTensor]:
        """Returns the token ids of at most `count` microbatches that are never trained on, the same at every call."""


@dataclass(slots=True)
class HopAnswer(Reply):
    """A hop's answer to a Process request. peer: the peer that answered, None for this peer itself."""

    message: Processed
    peer: PeerId | None = None

    @property
    def gradient(self) -> WireTensor | None:
        """Gradient of the boundary that entered the hop; None at stage 0 and when evaluating."""
        return self.tensors[0] if self.tensors else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)


MIN_LOG_PROBABILITY: Final = -1000.0
"""The lowest log-probability of a token under the reference that an answer may contain, in nats."""


@dataclass(frozen=True, slots=True)
class WireShapes:
    """The tensors that this run allows: dtype and shape of boundaries and gradients, shape of tokens. Immutable.

    objective: its kind, by which answers are checked: "lm", "sft" or "dpo".
    """

    boundary: tuple[str, tuple[int, ...]]
    gradient: tuple[str, tuple[int, ...]]
    tokens_shape: tuple[int, ...]
    objective: str = "lm"

    @property
    def rows(self) -> int:
        """The number of rows of a microbatch."""
        return self.tokens_shape[-2]

    @property
    def targets(self) -> int:
        """The number of targets of a microbatch, whether supervised or not."""
        return self.rows * (self.tokens_shape[-1] - 1)

    def are_references(self, values: Sequence[float], expected: bool) -> bool:
        """Returns whether `values` can be the log-probabilities of all rows; if not `expected`, whether it is empty."""
        least = MIN_LOG_PROBABILITY * self.tokens_shape[-1]
        return len(values) == (self.rows if expected else 0) and all(least <= value for value in values)

    def find_problem(self, message: Processed, purpose: str) -> str | None:
        """Returns what is wrong, in words, with an answer's numbers for a request of `purpose`; None if nothing is."""
        if not math.isfinite(message.loss_sum) or message.tokens > self.targets:
            return f"sent the loss {message.loss_sum} over {message.tokens} tokens"
        if not self.are_references(message.log_probabilities, purpose == "reference"):
            return f"sent {len(message.log_probabilities)} log-probabilities, of which some may be out of bounds"
        kind = "lm" if purpose == "reference" else self.objective
        if not are_plausible(kind, message.metrics, message.tokens, self.rows):
            return f"sent the metrics {message.metrics}"
        return None

    def boundary_and_tokens(
        self, message: Process, tensors: Sequence[WireTensor]
    ) -> tuple[WireTensor | None, WireTensor]:
        """Returns the boundary (None at stage 0) and the tokens of a Process request.

        Raises ProtocolError if these, or the request's references, are not of the form that the manifest implies.
        """
        if message.purpose == "reference" and self.objective != "dpo":
            raise ProtocolError("bad-message", "this run compares with no reference")
        if not self.are_references(message.references, self.objective == "dpo" and message.purpose != "reference"):
            raise ProtocolError("bad-message", f"{len(message.references)} references came, not those of this run")
        if len(tensors) != 2 and not (message.stage == 0 and len(tensors) == 1):
            raise ProtocolError("bad-message", f"process needs a boundary and tokens; {len(tensors)} tensors came")
        boundary, tokens = (None if message.stage == 0 else tensors[0]), tensors[-1]
        if boundary is not None and (boundary.dtype, boundary.shape) != self.boundary:
            raise ProtocolError("bad-tensor", f"the boundary is {boundary.dtype} {boundary.shape}, not of this run")
        if tokens.dtype not in TOKEN_DTYPES or tokens.shape != self.tokens_shape:
            raise ProtocolError("bad-tensor", f"the tokens are {tokens.dtype} {tokens.shape}, not of this run")
        return boundary, tokens
