"""A Process call and its answer, as origin, hop and router hand them on, and the run's rules for both."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from agora_protocol.codec_names import DIRECTIONS, Shape, parse_codec
from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor

from agora.core.calls import OnProgress, Reply
from agora.core.fair_shares import Requester
from agora.core.live_manifest import LiveManifest
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
        """Identifies what is to be computed: 16 bytes of the SHA-256 over purpose, references, codec and tensors."""
        forms = [(tensor.dtype, tensor.shape) for tensor in self.tensors]
        head = (self.request.purpose, self.request.references, self.request.codec, forms)
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


class CodecForms(NamedTuple):
    """The forms of a boundary and of its gradient, as one codec encodes them."""

    boundary: TensorForm
    gradient: TensorForm

    @classmethod
    def of(cls, name: str, shape: Shape) -> CodecForms:
        """Returns the forms of boundaries [b, s, k] = `shape`. Raises ManifestError for an unknown codec."""
        codec = parse_codec(name)
        return cls(*(TensorForm(*codec.wire_format(shape, direction)) for direction in DIRECTIONS))


class AmendedCodecs:
    """The codecs that amendments of a run have named, with their forms.

    One that no longer counts stays known: microbatches by it may be on their way.
    """

    def __init__(self, live: LiveManifest) -> None:
        self._live_manifest = live
        self._forms: dict[str, CodecForms] = {}

    def forms_of(self, name: str) -> CodecForms | None:
        """Returns the forms of a codec, or None if this peer knows of no amendment that names it."""
        for manifest in self._live_manifest.of_all_steps:
            if manifest.boundary.codec not in self._forms:
                forms = CodecForms.of(manifest.boundary.codec, manifest.boundary_shape())
                self._forms[manifest.boundary.codec] = forms
        return self._forms.get(name)


@dataclass(frozen=True, slots=True)
class WireRules:
    """What the run allows in Process requests and in the answers to them."""

    boundary: TensorForm
    gradient: TensorForm
    tokens_shape: tuple[int, ...]  # [b, s + 1]; with marks [2, b, s + 1]: ids, then marks
    # The run's kind of objective, "lm", "sft" or "dpo": it decides which references and metrics are allowed.
    objective: str = "lm"
    # Returns the forms of a codec that an amendment names, None for one that is not known here.
    amended_forms: Callable[[str], CodecForms | None] = lambda _: None

    @classmethod
    def of_run(cls, live: LiveManifest) -> WireRules:
        """The rules of a run: forms of the tensors by its shapes and its codecs."""
        manifest = live.core
        forms = CodecForms.of(manifest.boundary.codec, manifest.boundary_shape())
        return cls(
            boundary=forms.boundary,
            gradient=forms.gradient,
            tokens_shape=manifest.tokens_shape(),
            objective=manifest.objective.kind,
            amended_forms=AmendedCodecs(live).forms_of,
        )

    def _forms_of(self, codec: str) -> CodecForms:
        if not codec:
            return CodecForms(self.boundary, self.gradient)
        if (forms := self.amended_forms(codec)) is None:
            # Its sender may know an amendment that has not come here yet.
            raise Refused(f"no amendment that is known here names the codec {codec[:32]!r}")
        return forms

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

        Raises Refused for a codec that no amendment known here names. Raises ProtocolError if a tensor does not have
        the form that its codec implies, if a run that is not dpo gets
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
        form = self._forms_of(message.codec).boundary
        boundary = None if message.stage == 0 else tensors[0]
        tokens = tensors[-1]
        if boundary is not None and (boundary.dtype, boundary.shape) != form:
            raise ProtocolError("bad-tensor", f"The boundary is {boundary.dtype} {boundary.shape}, not {form}.")
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
            codec=message.codec,
        )

    def check_answer(self, reply: Reply, purpose: str, peer: PeerId, codec: str = "") -> HopAnswer:
        """Returns the reply of `peer` to a request of `purpose` and `codec` as its answer.

        Raises ProtocolError for another message, a gradient that is missing or of another form, and numbers that
        cannot be: loss, token count, metrics, log-probabilities (required for "reference", forbidden for others).
        """
        message, tensors = reply.message, list(reply.tensors)
        if not isinstance(message, Processed):
            raise ProtocolError("bad-message", f"The peer answered process with {type(message).__name__}.")
        expected = 1 if purpose == "train" else 0
        if len(tensors) != expected:
            raise ProtocolError("bad-message", f"The peer sent {len(tensors)} tensors where {expected} belong.")
        if tensors and (tensors[0].dtype, tensors[0].shape) != self._forms_of(codec).gradient:
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
