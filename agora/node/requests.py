"""Answers the requests of other peers, and counts the bytes of tensors that this peer sends.

Knows: every request, and who may make it. Must not know: how anything of it is done, or how bytes travel.

| request | who may ask | answered by |
|---|---|---|
| GetStatus, GetManifest, Ping | everybody, observers too | this module, always |
| Process | members of the run | the work ledger for a repeat, else the span |
| GossipSteps, GossipEpochs, Contribute, Recall | members of the run | the span |
| GetState, GetChunk | peers of the run | the span |
| GetBase, GetPiece | members of the run | the local peer's files of the base model, also while no span is held |
| DialBack, Introduce, Meet | members of the run | the local peer's reachability keeper, also while no span is held |

While no span is held, what only the span can answer is refused Busy.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol import messages
from agora_protocol.errors import Busy, NotAdmitted, ProtocolError, Unsupported, WrongRun
from agora_protocol.limits import MAX_STATUS_BYTES
from agora_protocol.manifest import SignedManifest
from agora_protocol.message_base import Message
from agora_protocol.messages import (
    Contribute,
    DialBack,
    GetBase,
    GetChunk,
    GetPiece,
    GetState,
    GossipEpochs,
    GossipSteps,
    Introduce,
    Meet,
    Process,
    Recall,
)
from agora_protocol.tensors import WireTensor

from agora.calls import Reply
from agora.net.incoming import Handler, IncomingCall
from agora.pipeline.ledger import WorkLedger
from agora.swarm.conduct import Offence, ReportOffence

JOINING_RETRY_MS = 1000

WORK_REQUESTS: Final = (Process, GossipSteps, GossipEpochs, Contribute, Recall)
"""Requests that the span answers to members of the run."""
STATE_REQUESTS: Final = (GetState, GetChunk)
"""Requests that the span answers to peers of the run."""
BASE_REQUESTS: Final = (GetBase, GetPiece)
"""Requests that the local peer answers to members of the run, whichever stages it holds."""
REACH_REQUESTS: Final = (DialBack, Introduce, Meet)
"""Requests by which members of the run find out how they can be reached, and meet; the local peer answers them."""
LOCAL_REQUESTS: Final = BASE_REQUESTS + REACH_REQUESTS
"""Requests that the local peer answers, whichever stages it holds."""


@dataclass
class SentTensors:
    """Counts the bytes of tensors that this peer has sent: boundaries and their gradients, averaging, state.

    state_bytes: of snapshots, and of the base model.
    """

    boundary_bytes: int = 0
    averaging_bytes: int = 0
    state_bytes: int = 0

    def add(self, request: Message, tensors: Sequence[WireTensor]) -> None:
        """Counts tensors sent with `request`, or with the answer to it; not the tokens that go beside a boundary."""
        sizes = [tensor.nbytes for tensor in tensors]
        match request:
            case Process():
                self.boundary_bytes += sum(sizes[:1])
            case Contribute() | Recall():
                self.averaging_bytes += sum(sizes)
            case GetState() | GetChunk() | GetBase() | GetPiece():
                self.state_bytes += sum(sizes)


class RequestHandler:
    """Answers other peers' requests, after checking that they may ask: some itself, most by the span that is held."""

    def __init__(
        self,
        signed: SignedManifest,
        status: Callable[[], dict[str, Any]],
        report_offence: ReportOffence,
        ledger: WorkLedger,
    ) -> None:
        """status: returns what `swarm status --json` prints. ledger: answers repeats while no span is held."""
        self._manifest = signed.manifest
        self._manifest_bytes = signed.to_bytes()
        self._run = signed.run_id
        self._status = status
        self._report_offence = report_offence
        self._ledger = ledger
        self._answerers: dict[type[Message], Callable[[IncomingCall], Awaitable[Reply]]] = {}

    @contextmanager
    def answering(self, kinds: Sequence[type[Message]], answer: Handler) -> Iterator[None]:
        """Answers requests of these kinds by `answer` until the block ends. Before and after, they are refused Busy."""
        self._answerers |= dict.fromkeys(kinds, answer)
        try:
            yield
        finally:
            for kind in kinds:
                del self._answerers[kind]

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers one request (the network's handler). An AgoraError that it raises becomes a typed refusal.

        Raises as `_check_caller` and `_pass_on` do, and Unsupported for a request of another kind.
        """
        self._check_caller(call)
        match call.message:
            case messages.GetStatus():
                return Reply(messages.StatusAnswer(fitting(self._status())))
            case messages.GetManifest():
                return Reply(messages.ManifestAnswer(self._manifest_bytes))
            case messages.Ping():
                return Reply(messages.Pong())
            case request if isinstance(request, WORK_REQUESTS + STATE_REQUESTS + LOCAL_REQUESTS):
                return await self._pass_on(call, request)
            case other:
                raise Unsupported(f"{type(other).__name__} is not served here; ask another peer")

    async def _pass_on(self, call: IncomingCall, request: Message) -> Reply:
        """Answers by whoever answers such requests now; else by what a former span answered to the same microbatch.

        Raises Busy when there is neither. A malformed request (not Process, Contribute) is an offence of the caller.
        """
        answerer = self._answerers.get(type(request))
        if answerer is None:
            repeat = self._ledger.answer_repeat(request, call.progress) if isinstance(request, Process) else None
            if repeat is None:
                raise Busy("this peer is still joining; ask another", JOINING_RETRY_MS)
            return repeat
        try:
            return await answerer(call)
        except ProtocolError as error:
            # What is wrong with a microbatch may be another peer's fault; a bad contribution counts once for a round.
            if not isinstance(request, Process | Contribute):
                self._report_offence(call.peer, Offence.BAD_REQUEST, f"{error.code}: {error}")
            raise

    def _check_caller(self, call: IncomingCall) -> None:
        """Raises an error when the caller may not make its request.

        | caller                       | may not ask for                        | error       |
        |------------------------------|----------------------------------------|-------------|
        | of another run               | anything but Ping                      | WrongRun    |
        | without a run: an observer   | WORK_, STATE_, BASE_, REACH_REQUESTS   | NotAdmitted |
        | that the manifest bars       | WORK_, BASE_ and REACH_REQUESTS        | NotAdmitted |
        """
        request = call.message
        if call.run and call.run.hex() != self._run and not isinstance(request, messages.Ping):
            raise WrongRun(f"this peer takes part in run {self._run}; use an invite of that run")
        if not call.run and isinstance(request, WORK_REQUESTS + STATE_REQUESTS + LOCAL_REQUESTS):
            raise NotAdmitted("an observer may ask but not train; say the run in HELLO")
        if isinstance(request, WORK_REQUESTS + LOCAL_REQUESTS) and not self._manifest.admits(call.peer):
            raise NotAdmitted(f"the run's manifest does not list {call.peer}; ask its founder")


def fitting(status: dict[str, Any]) -> bytes:
    """Returns the status as JSON of at most MAX_STATUS_BYTES: as many of its peers as fit, and `peers_left_out`."""
    data, peers = json.dumps(status).encode(), status["peers"]
    kept = len(peers)
    while len(data) > MAX_STATUS_BYTES and kept:
        kept //= 2
        data = json.dumps(status | {"peers": peers[:kept], "peers_left_out": len(peers) - kept}).encode()
    return data
