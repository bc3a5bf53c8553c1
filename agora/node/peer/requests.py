"""Answers the requests of other peers, and counts the bytes of tensors that this peer sends.

| request | answered by |
|---|---|
| Ping | the connection, before a request comes here |
| GetStatus, GetManifest | this module, always |
| ShareRevocations | the local peer's admission, always |
| ShareAmendments, GetAmendments | the local peer's amendments, always |
| Process | the work ledger for a repeat, else the span |
| GossipSteps, GossipEpochs, Contribute, Recall, GetState, GetChunk, GetSketches | the span |
| GetBase, GetPiece | the local peer's files of the base model, also while no span is held |
| DialBack, Introduce, Meet, GetAddresses | the local peer's reachability keeper, also while no span is held |

A request whose object does not answer at the moment is refused as Busy: of the span while none is held, of the local
peer before it has started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol import messages
from agora_protocol.errors import Busy, ProtocolError, Unsupported
from agora_protocol.limits import MAX_STATUS_BYTES
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import (
    Contribute,
    DialBack,
    GetAddresses,
    GetAmendments,
    GetBase,
    GetChunk,
    GetPiece,
    GetSketches,
    GetState,
    GossipEpochs,
    GossipSteps,
    Introduce,
    Meet,
    Message,
    Process,
    Recall,
    ShareAmendments,
    ShareRevocations,
)
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester
from agora.net.rpc.connection import Handler, IncomingCall
from agora.pipeline.process_call import ProcessCall
from agora.pipeline.work_ledger import WorkLedger
from agora.swarm.peer_score import ReportViolation, Violation

NOT_ANSWERED_RETRY_MS = 1000  # milliseconds after which a requester may ask again for what nothing answers now
# Seconds for which a status is kept and sent to further requesters: making one costs more than sending it.
STATUS_INTERVAL_S: Final = 0.25

# Requests that the span answers about its work.
WORK_REQUESTS: Final = (Process, GossipSteps, GossipEpochs, Contribute, Recall)
STATE_REQUESTS: Final = (GetState, GetChunk, GetSketches)  # requests that the span answers about its state
BASE_REQUESTS: Final = (GetBase, GetPiece)  # requests for tensors of the base model
ADMISSION_REQUESTS: Final = (ShareRevocations,)  # requests that the local peer's admission answers
AMENDMENT_REQUESTS: Final = (ShareAmendments, GetAmendments)  # requests that the local peer's amendments answer
# Requests by which members of the run find out how they can be reached, and connect; the local peer answers them.
REACH_REQUESTS: Final = (DialBack, Introduce, Meet, GetAddresses)
# Requests that the local peer answers, whichever stages it holds.
LOCAL_REQUESTS: Final = BASE_REQUESTS + REACH_REQUESTS + ADMISSION_REQUESTS + AMENDMENT_REQUESTS


@dataclass
class SentTensors:
    """Counts the bytes of tensors that this peer has sent: boundaries and their gradients, averaging, state.

    state_bytes: of stages' states, and of the base model.
    """

    boundary_bytes: int = 0
    averaging_bytes: int = 0
    state_bytes: int = 0

    def add(self, request: Message, tensors: Sequence[WireTensor]) -> None:
        """Counts the bytes of tensors that were sent with `request` or with the answer to it, by the request's type.

        Of a Process, only the first tensor is counted; the others are tokens. Requests of types that carry none of the
        counted tensors are ignored.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        match request:
            case Process():
                self.boundary_bytes += sum(sizes[:1])
            case Contribute() | Recall():
                self.averaging_bytes += sum(sizes)
            case GetState() | GetChunk() | GetSketches() | GetBase() | GetPiece():
                self.state_bytes += sum(sizes)


class RequestHandler:
    """Answers requests of peers that the gate has admitted: some itself, the others by the handlers of `answering`."""

    def __init__(
        self,
        signed: SignedManifest,
        status: Callable[[], dict[str, Any]],
        report_violation: ReportViolation,
        ledger: WorkLedger,
    ) -> None:
        """status: returns what `swarm status --json` prints. ledger: answers repeats while no span is held."""
        self._manifest_bytes = signed.to_bytes()
        self._status = status
        self._report_violation = report_violation
        self._ledger = ledger
        self._status_bytes = b""
        self._status_at = -math.inf
        self._answerers: dict[type[Message], Callable[[IncomingCall], Awaitable[Reply]]] = {}

    @contextmanager
    def answering(self, kinds: Sequence[type[Message]], answer: Handler) -> Iterator[None]:
        """Context manager: within it, `answer` answers the requests of these message types; afterwards nothing does."""
        self._answerers |= dict.fromkeys(kinds, answer)
        try:
            yield
        finally:
            for kind in kinds:
                del self._answerers[kind]

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers one request; the network's handler, which turns a raised AgoraError into a typed refusal.

        Answers GetStatus and GetManifest itself, the others by what `answering` has set. Raises Busy if nothing
        answers the request now, Unsupported for a type that no peer answers, and every AgoraError of the object that
        answers.
        """
        match call.message:
            case messages.GetStatus():
                return Reply(messages.StatusAnswer(self._recent_status()))
            case messages.GetManifest():
                return Reply(messages.ManifestAnswer(self._manifest_bytes))
            case request if answerer := self._answerers.get(type(request)):
                try:
                    return await answerer(call)
                except ProtocolError as error:
                    # What is wrong with a microbatch may be another peer's fault; a bad contribution counts once for a
                    # round.
                    if not isinstance(request, Process | Contribute):
                        self._report_violation(call.peer, Violation.BAD_REQUEST, f"{error.code}: {error}")
                    raise
            case Process() as request if repeat := self._ledger.answer_repeat(process_call_of(call, request)):
                return repeat
            case request if isinstance(request, WORK_REQUESTS + STATE_REQUESTS + LOCAL_REQUESTS):
                raise Busy("this peer cannot answer that at the moment; ask another", NOT_ANSWERED_RETRY_MS)
            case other:
                raise Unsupported(
                    f"{type(other).__name__} is not a request that a peer answers; compare the versions of both"
                )

    def _recent_status(self) -> bytes:
        if loop_time() - self._status_at >= STATUS_INTERVAL_S:
            self._status_bytes = encode_status(self._status())
            self._status_at = loop_time()
        return self._status_bytes


def process_call_of(call: IncomingCall, request: Process) -> ProcessCall:
    """Returns a peer's Process `request`, the message of `call`, as hop and work ledger take it."""
    return ProcessCall(request, call.tensors, call.deadline, call.progress, Requester(call.address_prefix, call.peer))


def encode_status(status: dict[str, Any]) -> bytes:
    """Returns the status as JSON, at most MAX_STATUS_BYTES long: as long as it is longer, halves the list `peers`.

    The first peers stay, and the field `peers_left_out` says how many are missing. Even without any peer, the rest of
    the status may be longer than that.
    """
    data = json.dumps(status).encode()
    peers = status["peers"]
    kept = len(peers)
    while len(data) > MAX_STATUS_BYTES and kept:
        kept //= 2
        data = json.dumps(status | {"peers": peers[:kept], "peers_left_out": len(peers) - kept}).encode()
    return data
