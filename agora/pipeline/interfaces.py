"""Protocols of what the pipeline needs of device and data, and the answer of a hop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.messages import Processed
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.span_work import SpanResult, SpanWork


class SpanCompute(Protocol):
    """Protocol: the device that computes this peer's span of stages; implemented by train.DeviceWorker.

    Every failure is an AgoraError, and a cancelled job leaves
    nothing behind. `run_last_stages` with purpose "train", and `backward`, count the microbatch: when one of these
    returns, the microbatch's gradient is in the stages' sums; when it raises, the gradient is not.
    """

    @property
    def span(self) -> Span:
        """The stages that this device computes."""

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs stages `entry_stage` to the span's last and returns the boundary that leaves the span.

        For training, what `backward` needs is kept until `backward` succeeds or `forget` is called.
        """

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs stages `entry_stage` to the model's last and the loss, as one job; returns loss, times and metrics.

        For training also runs the backward pass and adds the gradient to the stages' sums; the result then has the
        gradient of `boundary` (None at stage 0).
        """

    async def backward(self, microbatch: MicrobatchId, entry_stage: int, gradient: WireTensor) -> SpanResult:
        """Runs the backward pass of an earlier `forward` and adds the gradient to the stages' sums.

        gradient: that of the boundary that `forward` returned. The result has the gradient of the boundary that entered
        at `entry_stage`, None at stage 0. Raises ProtocolError for a gradient that cannot be used; then `backward` may
        be called again with another one.
        """

    def forget(self, microbatch: MicrobatchId, entry_stage: int) -> None:
        """Drops what `forward` kept of the microbatch that entered at `entry_stage`; does nothing if nothing was."""


class NewMicrobatch(Protocol):
    """Protocol: a microbatch of training data as MicrobatchSource.draw returns it."""

    @property
    def tokens(self) -> WireTensor:
        """The token ids of b rows, [b, s + 1]; [2, b, s + 1] with marks (supervised or not): ids, then marks."""

    @property
    def number(self) -> int:
        """The number by which the source knows the microbatch; for mark_completed and release."""


class MicrobatchSource(Protocol):
    """Protocol: where an origin's microbatches come from; implemented by the run's data.

    A drawn microbatch stays taken until mark_completed or release is called with its number.
    """

    def draw(self) -> NewMicrobatch | None:
        """Takes and returns the next training microbatch; None if none is free now, but perhaps later."""

    def mark_completed(self, number: int) -> None:
        """Records that the drawn microbatch `number` was trained on."""

    def release(self, number: int) -> None:
        """Gives the drawn microbatch `number` back untrained, so that its rows may be drawn again."""

    def heldout_microbatches(self, count: int) -> Iterable[WireTensor]:
        """Returns the token ids of at most `count` microbatches that are never trained on, the same at every call."""


@dataclass(slots=True)
class HopAnswer(Reply):
    """A hop's answer to a Process request. peer: the peer that answered, None for this peer itself.

    tensors: the gradient alone, or no tensor.
    """

    message: Processed
    peer: PeerId | None = None

    @property
    def gradient(self) -> WireTensor | None:
        return self.tensors[0] if self.tensors else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)
