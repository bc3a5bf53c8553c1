"""One microbatch on its way: drawn from the data, given to the device of a span, returned by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agora_protocol.ids import MicrobatchId
from agora_protocol.tensors import WireTensor


@dataclass(frozen=True, slots=True)
class DrawnMicrobatch:
    """A microbatch to train on, as an origin draws it."""

    # Ids of b rows, [b, s + 1]; with marks (is supervised, begins a sequence) [2, b, s + 1]: ids, then marks.
    tokens: WireTensor
    number: int  # identifies it among those of its source


class ForwardKey(NamedTuple):
    """Identifies a forward that waits for its backward.

    By entry stage too: a microbatch may enter a span at two stages, if its requester gave up and asked another peer. By
    content too: whoever knows a microbatch's id may send other tensors under it.
    """

    microbatch: MicrobatchId
    entry_stage: int
    content_digest: bytes = b""
    codec: str = ""  # of the boundaries that enter and leave; empty: the one that the run was founded with


@dataclass(frozen=True, slots=True)
class SpanWork:
    """A microbatch that enters a span at `entry_stage`.

    boundary: the hidden state that enters there, [b, s, k] as `codec` encodes it; None at stage 0.
    tokens: as of DrawnMicrobatch.
    purpose: "train", "evaluate" or "reference", as in the message Process.
    references: of each row, its log-probability under the reference model (dpo); otherwise empty.
    codec: of boundaries and gradients, as an amendment names it; empty: the one that the run was founded with.
    content_digest: tells two works on one microbatch apart that were sent with other tensors; see ProcessCall.
    """

    microbatch: MicrobatchId
    entry_stage: int
    boundary: WireTensor | None
    tokens: WireTensor
    purpose: str
    references: tuple[float, ...] = ()
    content_digest: bytes = b""
    codec: str = ""

    @property
    def key(self) -> ForwardKey:
        return ForwardKey(self.microbatch, self.entry_stage, self.content_digest, self.codec)

    @property
    def is_training(self) -> bool:
        return self.purpose == "train"


@dataclass(frozen=True, slots=True)
class SpanResult:
    """The result of one microbatch in this peer's span: gradient, device time, loss, metrics."""

    gradient: WireTensor | None  # with respect to the boundary that entered, encoded; None at stage 0 or if not trained
    busy_s: float  # seconds on the device, the forward pass included
    loss_sum: float = 0.0  # mean loss in nats * `tokens`; in the run's last stage only
    tokens: int = 0  # the loss weight: supervised tokens, of dpo all tokens of its rows
    metrics: tuple[float, ...] = ()  # sums, see agora.core.metrics; known only in the run's last stage
    log_probabilities: tuple[float, ...] = ()  # of each row's supervised tokens; for a reference request only
