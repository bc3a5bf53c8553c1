"""A Process call and its answer, as origin, hop and router hand them on, and the run's rules for both."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from agora_protocol.codec_names import parse_codec
from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor

from agora.core.calls import OnProgress, Reply
from agora.core.fair_shares import Requester
from agora.core.metrics import are_plausible
from agora.core.span_work import SpanWork

# The lowest log-probability of a token under the reference that an answer may contain, in nats.
MIN_LOG_PROBABILITY: Final = -1000.0


@dataclass(frozen=True)
class ProcessCall:
    """A Process request with what belongs to it, as origin, hop and router pass it on."""

    request: Process
    tensors: Sequence[WireTensor]  # [boundary, tokens]; the boundary may be missing at stage 0
    deadline: float  # loop time by which the answer is due
    on_progress: OnProgress  # takes each new CallProgress of the called peer and of those after it
    requester: Requester | None = None  # who sent it, with its address prefix; None for this peer's own origin

    @cached_property
    def content_digest(self) -> bytes:
        """Identifies what is to be computed: 16 bytes of the SHA-256 over purpose, references and tensors."""
        forms = [(tensor.dtype, tensor.shape) for tensor in self.tensors]
        head = (self.request.purpose, self.request.references, forms)
        digest = hashlib.sha256(repr(head).encode())
        for tensor in self.tensors:
            digest.update(tensor.data)
        return digest.digest()[:16]


@dataclass(slots=True)
class HopAnswer(Reply):
    """The answer to a Process request. tensors: the gradient of the boundary that entered, or none."""

    message: Processed
    peer: PeerId | None = None  # the peer that answered; None for this peer itself
    wire_s: float = 0.0  # seconds on the link to it and back, without waiting

    @property
    def gradient(self) -> WireTensor | None:
        return self.tensors[0] if self.tensors else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class TensorForm(NamedTuple):
    """The dtype and the shape that a wire tensor must have."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WireRules:
    """What the run allows in Process requests and in the answers to them."""

    boundary: TensorForm
    gradient: TensorForm
    tokens_shape: tuple[int, ...]  # [b, s + 1]; with marks [2, b, s + 1]: ids, then marks
    # The run's kind of objective, "lm", "sft" or "dpo": it decides which references and metrics are allowed.
    objective: str = "lm"

    @classmethod
    def of_run(cls, manifest: Manifest) -> WireRules:
        """The rules of the manifest's run: forms of the tensors by its shapes and its codec."""
        codec = parse_codec(manifest.boundary.codec)
        shape = manifest.boundary_shape()
        boundary_dtype, boundary_shape = codec.wire_format(shape, "forward")
        gradient_dtype, gradient_shape = codec.wire_format(shape, "backward")
        return cls(
            boundary=TensorForm(boundary_dtype, boundary_shape),
            gradient=TensorForm(gradient_dtype, gradient_shape),
            tokens_shape=manifest.tokens_shape(),
            objective=manifest.objective.kind,
        )

    @property
    def row_count(self) -> int:
        return self.tokens_shape[-2]

    @property
    def target_count(self) -> int:
        return self.row_count * (self.tokens_shape[-1] - 1)

    def are_valid_references(self, values: Sequence[float], *, expected: bool) -> bool:
        """Returns whether `values` can be the rows' log-probabilities under the reference model, in nats.

        There must be one value for each row, none NaN or below MIN_LOG_PROBABILITY * the number of tokens in a row. If
        not `expected`, `values` must be empty.
        """
        least = MIN_LOG_PROBABILITY * self.tokens_shape[-1]
        return len(values) == (self.row_count if expected else 0) and all(least <= value for value in values)

    def check_request(self, call: ProcessCall) -> SpanWork:
        """Returns the work that the request asks for; a boundary at stage 0 is ignored.

        Raises ProtocolError if a tensor does not have the form that the manifest implies, if a run that is not dpo gets
        purpose "reference", or if the references are not those that its purpose needs (dpo: one for each row).
        """
        message, tensors = call.request, call.tensors
        if message.purpose == "reference" and self.objective != "dpo":
            raise ProtocolError("bad-message", "This run has no reference model.")
        needs_references = self.objective == "dpo" and message.purpose != "reference"
        if not self.are_valid_references(message.references, expected=needs_references):
            raise ProtocolError("bad-message", f"{len(message.references)} references came, not those of this run.")
        if len(tensors) != 2 and not (message.stage == 0 and len(tensors) == 1):
            raise ProtocolError("bad-message", f"Process needs a boundary and tokens; {len(tensors)} tensors came.")
        boundary = None if message.stage == 0 else tensors[0]
        tokens = tensors[-1]
        if boundary is not None and (boundary.dtype, boundary.shape) != self.boundary:
            raise ProtocolError(
                "bad-tensor", f"The boundary is {boundary.dtype} {boundary.shape}, not {self.boundary}."
            )
        if tokens.dtype not in TOKEN_DTYPES or tokens.shape != self.tokens_shape:
            raise ProtocolError(
                "bad-tensor", f"The tokens are {tokens.dtype} {tokens.shape}; this run has {self.tokens_shape}."
            )
        return SpanWork(
            microbatch=message.microbatch,
            entry_stage=message.stage,
            boundary=boundary,
            tokens=tokens,
            purpose=message.purpose,
            references=tuple(message.references),
            content_digest=call.content_digest,
        )

    def check_answer(self, reply: Reply, purpose: str, peer: PeerId) -> HopAnswer:
        """Returns the reply of `peer` to a request of `purpose` as its answer.

        Raises ProtocolError for another message, a gradient that is missing or of another form, and numbers that
        cannot be: loss, token count, metrics, log-probabilities (required for "reference", forbidden for others).
        """
        message, tensors = reply.message, list(reply.tensors)
        if not isinstance(message, Processed):
            raise ProtocolError("bad-message", f"The peer answered process with {type(message).__name__}.")
        expected = 1 if purpose == "train" else 0
        if len(tensors) != expected:
            raise ProtocolError("bad-message", f"The peer sent {len(tensors)} tensors where {expected} belong.")
        if tensors and (tensors[0].dtype, tensors[0].shape) != self.gradient:
            raise ProtocolError("bad-tensor", f"The peer sent a gradient of {tensors[0].dtype} {tensors[0].shape}.")
        if not math.isfinite(message.loss_sum) or message.tokens > self.target_count:
            raise ProtocolError(
                "bad-message", f"The peer sent the loss {message.loss_sum} over {message.tokens} tokens."
            )
        if not self.are_valid_references(message.log_probabilities, expected=purpose == "reference"):
            count = len(message.log_probabilities)
            raise ProtocolError(
                "bad-message", f"The peer sent {count} log-probabilities, of which some may be out of bounds."
            )
        kind = "lm" if purpose == "reference" else self.objective
        if not are_plausible(kind, message.metrics, message.tokens, self.row_count):
            raise ProtocolError("bad-message", f"The peer sent the metrics {message.metrics}.")
        return HopAnswer(message, tensors, peer)
