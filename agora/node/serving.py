"""What this peer answers to others, and the meter on what it asks of them.

Knows: every request and who may make it. Must not know: how anything of it is done, or how bytes travel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agora_protocol.errors import Busy, NotAdmitted, ProtocolError, Unsupported, WrongRun
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_STATUS_BYTES
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import (
    Contribute,
    GetChunk,
    GetManifest,
    GetSlice,
    GetState,
    GetStatus,
    GossipSteps,
    ManifestAnswer,
    Message,
    Ping,
    Pong,
    Process,
    Recall,
    StatusAnswer,
)
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress
from agora.net.calls import IncomingCall, Network, Reply
from agora.node.keeping import Keeper
from agora.node.replicas import Replicas
from agora.observe import faults
from agora.pipeline.hop import Hop
from agora.swarm.conduct import Offence, ReportOffence

JOINING_RETRY_MS = 1000


@dataclass
class Meter:
    """Bytes of tensors that this peer sent to others: boundaries and gradients, averaging, state."""

    boundary_bytes: int = 0
    averaging_bytes: int = 0
    state_bytes: int = 0


class MeteredCaller:
    """The network as the router sees it, with every boundary that goes out counted."""

    def __init__(self, network: Network, meter: Meter) -> None:
        self._network = network
        self._meter = meter

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """See Network.call."""
        if isinstance(request, Process) and tensors:
            self._meter.boundary_bytes += tensors[0].nbytes
        elif isinstance(request, Contribute):
            self._meter.averaging_bytes += sum(tensor.nbytes for tensor in tensors)
        return await self._network.call(peer, request, tensors, deadline=deadline, on_progress=on_progress)


class Service:
    """Answers requests. `hop`, `keeper`, `replicas` are None until there is one; it is Busy to everybody till then."""

    def __init__(
        self, signed: SignedManifest, status: Callable[[], dict[str, Any]], meter: Meter, report_offence: ReportOffence
    ) -> None:
        self._signed = signed
        self._manifest_bytes = signed.to_bytes()
        self._run = bytes.fromhex(signed.run_id)
        self._status = status
        self._meter = meter
        self._report_offence = report_offence
        self.hop: Hop | None = None
        self.keeper: Keeper | None = None
        self.replicas: Replicas | None = None

    async def answer(self, call: IncomingCall) -> Reply:
        """The network's handler; every AgoraError becomes a typed refusal."""
        match call.message:
            case Process():
                return await self._process(call, call.message)
            case GetStatus():
                self._check_run(call, observers=True)
                return Reply(StatusAnswer(fitting(self._status())))
            case GetManifest():
                self._check_run(call, observers=True)
                return Reply(ManifestAnswer(self._manifest_bytes))
            case Ping():
                return Reply(Pong())
            case GossipSteps() | Contribute() | Recall():
                return await self._agree(call, call.message)
            case GetState() | GetChunk() | GetSlice():
                return await self._give(call, call.message)
            case other:
                raise Unsupported(f"{type(other).__name__} is not served here; ask another peer")

    async def _process(self, call: IncomingCall, message: Process) -> Reply:
        self._check_member(call)
        if self.hop is None:
            raise Busy("this peer is still joining; ask another", JOINING_RETRY_MS)
        answer = await self.hop.process(message, call.tensors, call.deadline, call.progress)
        self._meter.boundary_bytes += sum(tensor.nbytes for tensor in answer.tensors)
        return Reply(answer.message, list(answer.tensors))

    async def _agree(self, call: IncomingCall, message: GossipSteps | Contribute | Recall) -> Reply:
        self._check_member(call)
        if self.replicas is None:
            raise Busy("this peer is still joining; ask another", JOINING_RETRY_MS)
        if isinstance(message, GossipSteps):
            return Reply(self.replicas.gossip(call.peer, message), [])
        if isinstance(message, Recall):
            answer: tuple[Message, list[WireTensor]] = self.replicas.recall(message)
        else:
            answer = await self.replicas.contribute(call.peer, message, call.tensors, call.deadline)
        self._meter.averaging_bytes += sum(tensor.nbytes for tensor in answer[1])
        return Reply(*answer)

    async def _give(self, call: IncomingCall, message: GetState | GetChunk | GetSlice) -> Reply:
        self._check_run(call, observers=False)
        if self.keeper is None:
            raise Busy("this peer is still joining; ask another", JOINING_RETRY_MS)
        await faults.reach("state.giving")
        try:
            given = await self.keeper.give(message)
        except ProtocolError as error:
            self._report_offence(call.peer, Offence.BAD_REQUEST, f"{error.code}: {error}")
            raise
        self._meter.state_bytes += sum(tensor.nbytes for tensor in given.tensors)
        return Reply(given.message, given.tensors)

    def _check_member(self, call: IncomingCall) -> None:
        self._check_run(call, observers=False)
        if not self._signed.manifest.admits(call.peer):
            raise NotAdmitted(f"the run's manifest does not list {call.peer}; ask its founder")

    def _check_run(self, call: IncomingCall, *, observers: bool) -> None:
        if call.run:
            if call.run != self._run:
                raise WrongRun(f"this peer takes part in run {self._signed.run_id}; use an invite of that run")
        elif not observers:
            raise NotAdmitted("an observer may ask but not train; say the run in HELLO")


def fitting(status: dict[str, Any]) -> bytes:
    """The status as UTF-8 JSON below the protocol's limit: of very many peers the last ones are left out, and told."""
    data = json.dumps(status).encode()
    peers = list(status["peers"])
    while len(data) > MAX_STATUS_BYTES and peers:
        peers = peers[: len(peers) // 2]
        status = status | {"peers": peers, "peers_left_out": len(status["peers"]) - len(peers)}
        data = json.dumps(status).encode()
    return data
