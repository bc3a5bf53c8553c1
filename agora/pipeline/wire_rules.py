"""The rules of a run for the tensors and numbers in Process requests and in the answers to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.errors import ProtocolError
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor

from agora.core.metrics import are_plausible
from agora.core.span_work import SpanWork

# The lowest log-probability of a token under the reference that an answer may contain, in nats.
MIN_LOG_PROBABILITY: Final = -1000.0


class TensorForm(NamedTuple):
    """The dtype and the shape that a wire tensor must have."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WireRules:
    """What the run allows in Process requests and in answers to them, and the functions that check it.

    The router checks the tensors of answers itself.
    """

    boundary: TensorForm
    gradient: TensorForm
    tokens_shape: tuple[int, ...]  # [b, s + 1]; with marks [2, b, s + 1]: ids, then marks
    # The run's kind of objective, "lm", "sft" or "dpo": it decides which references and metrics are allowed.
    objective: str = "lm"

    @property
    def row_count(self) -> int:
        return self.tokens_shape[-2]

    @property
    def target_count(self) -> int:
        return self.row_count * (self.tokens_shape[-1] - 1)

    def are_valid_references(self, values: Sequence[float], *, expected: bool) -> bool:
        """Returns whether `values` can be the rows' log-probabilities under the reference model, in nats.

        There must be one value for each row, none NaN or below MIN_LOG_PROBABILITY * the number of tokens in a row;
        there is no upper bound. If not `expected`, `values` must be empty.
        """
        least = MIN_LOG_PROBABILITY * self.tokens_shape[-1]
        return len(values) == (self.row_count if expected else 0) and all(least <= value for value in values)

    def find_answer_problem(self, message: Processed, purpose: str) -> str | None:
        """Returns, in words, what is wrong with the numbers in an answer to a request of `purpose`; None if nothing is.

        Checks the loss, the token count, the log-probabilities (required for purpose "reference", forbidden for others)
        and the metrics. The answer's tensors are not checked here.
        """
        if not math.isfinite(message.loss_sum) or message.tokens > self.target_count:
            return f"sent the loss {message.loss_sum} over {message.tokens} tokens"
        if not self.are_valid_references(message.log_probabilities, expected=purpose == "reference"):
            return f"sent {len(message.log_probabilities)} log-probabilities, of which some may be out of bounds"
        kind = "lm" if purpose == "reference" else self.objective
        if not are_plausible(kind, message.metrics, message.tokens, self.row_count):
            return f"sent the metrics {message.metrics}"
        return None

    def check_request(self, message: Process, tensors: Sequence[WireTensor]) -> SpanWork:
        """Checks a Process request with `tensors`, [boundary, tokens], and returns its work.

        At stage 0 the boundary may be missing; one that is there is ignored. Raises ProtocolError
        if a tensor does not have the form that the manifest implies, if a run that is not dpo gets purpose "reference",
        or if the message's references are not those that its purpose needs (dpo: one for each row; others: none).
        """
        if message.purpose == "reference" and self.objective != "dpo":
            raise ProtocolError("bad-message", "this run has no reference model")
        needs_references = self.objective == "dpo" and message.purpose != "reference"
        if not self.are_valid_references(message.references, expected=needs_references):
            raise ProtocolError("bad-message", f"{len(message.references)} references came, not those of this run")
        if len(tensors) != 2 and not (message.stage == 0 and len(tensors) == 1):
            raise ProtocolError("bad-message", f"process needs a boundary and tokens; {len(tensors)} tensors came")
        boundary = None if message.stage == 0 else tensors[0]
        tokens = tensors[-1]
        if boundary is not None and (boundary.dtype, boundary.shape) != self.boundary:
            raise ProtocolError("bad-tensor", f"the boundary is {boundary.dtype} {boundary.shape}, not of this run")
        if tokens.dtype not in TOKEN_DTYPES or tokens.shape != self.tokens_shape:
            raise ProtocolError("bad-tensor", f"the tokens are {tokens.dtype} {tokens.shape}, not of this run")
        return SpanWork(message.microbatch, message.stage, boundary, tokens, message.purpose, tuple(message.references))
