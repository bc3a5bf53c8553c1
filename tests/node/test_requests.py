"""Claims about what this peer answers to others: who may ask, what is refused without a span, what a repeat gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from agora_protocol.errors import Busy, ProtocolError, Unsupported
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, microbatch_id
from agora_protocol.limits import MAX_STATUS_BYTES
from agora_protocol.manifest import SignedManifest, preset
from agora_protocol.messages import (
    BaseIndex,
    GetBase,
    GetManifest,
    GetPiece,
    GetState,
    GetStatus,
    GossipSteps,
    ManifestAnswer,
    Message,
    Pong,
    Process,
    Processed,
    StatusAnswer,
)
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.net.rpc.connection import IncomingCall
from agora.node.peer.requests import BASE_REQUESTS, RequestHandler, SentTensors, encode_status
from agora.pipeline.process_call import HopAnswer, ProcessCall
from agora.pipeline.work_ledger import RunningWork, WorkLedger
from agora.swarm.peer_score import Violation

ME, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
SIGNED = SignedManifest.sign(preset("tiny"), ME)
GRADIENT = WireTensor("float32", (2,), memoryview(b"12345678"))


class Peer:
    """A request handler with a ledger, and nothing else of a daemon."""

    def __init__(self, signed: SignedManifest = SIGNED) -> None:
        self.violations: list[tuple[PeerId, Violation]] = []
        self.ledger = WorkLedger(ME.peer, 4, lambda event: None)
        self.requests = RequestHandler(signed, lambda: {"peers": []}, self.report_violation, self.ledger)

    def report_violation(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "") -> None:
        self.violations.append((peer, violation))

    async def ask(self, message: Message, *, peer: PeerId = OTHER.peer) -> Message:
        call = IncomingCall(peer, message, [], loop_time() + 10.0)
        return (await self.requests.answer(call)).message

    async def finish(self, request: Process, answer: HopAnswer) -> None:
        """Does a microbatch's work, as the hop of a span does."""

        async def work(_: RunningWork) -> HopAnswer:
            return answer

        call = ProcessCall(request, [], loop_time() + 10.0, lambda news: None)
        await self.ledger.run(call, request.stage, work)


def process(number: int, stage: int = 1) -> Process:
    return Process(microbatch_id(b"session0", number), OTHER.peer, stage, "train", 60_000)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_status_and_manifest_are_answered_always_and_what_is_no_request_never() -> None:
    async def work() -> None:
        peer = Peer()
        assert await peer.ask(GetManifest()) == ManifestAnswer(SIGNED.to_bytes())
        assert await peer.ask(GetStatus()) == StatusAnswer(b'{"peers": []}')
        with pytest.raises(Unsupported):
            await peer.ask(Pong())

    run(work)


def test_without_a_span_the_work_of_a_former_one_is_repeated_and_everything_else_is_busy() -> None:
    async def work() -> None:
        peer, done = Peer(), process(1)
        answer = HopAnswer(Processed(3.0, 2, 1.0), [GRADIENT])
        await peer.finish(done, answer)
        assert await peer.ask(done) == answer.message
        for message in (process(2), process(1, stage=0), GetState(0)):
            with pytest.raises(Busy, match="cannot answer that at the moment"):
                await peer.ask(message)

    run(work)


def test_a_span_answers_its_kinds_of_requests_until_it_ends() -> None:
    async def answer(call: IncomingCall) -> Reply:
        return Reply(Pong(), [GRADIENT])

    async def work() -> None:
        peer = Peer()
        with peer.requests.answering((GetState,), answer):
            assert await peer.ask(GetState(0)) == Pong()
            with pytest.raises(Busy):
                await peer.ask(process(1))
        with pytest.raises(Busy):
            await peer.ask(GetState(0))

    run(work)


def test_tensors_of_the_base_model_are_given_without_a_span_and_a_malformed_request_for_one_is_a_violation() -> None:
    async def answer(call: IncomingCall) -> Reply:
        if isinstance(call.message, GetBase):
            return Reply(BaseIndex(5), [GRADIENT])
        raise ProtocolError("bad-message", "no such piece")

    async def work() -> None:
        peer = Peer()
        with peer.requests.answering(BASE_REQUESTS, answer):
            assert await peer.ask(GetBase()) == BaseIndex(5)
            with pytest.raises(ProtocolError):
                await peer.ask(GetPiece(7, 0))
        assert peer.violations == [(OTHER.peer, Violation.BAD_REQUEST)]

    run(work)


def test_a_malformed_request_for_state_is_a_violation_and_a_malformed_microbatch_may_be_anothers_fault() -> None:
    async def refuse(call: IncomingCall) -> Reply:
        raise ProtocolError("bad-message", "no such chunk")

    async def work() -> None:
        peer = Peer()
        with peer.requests.answering((GetState, Process), refuse):
            for message in (process(1), GetState(0)):
                with pytest.raises(ProtocolError):
                    await peer.ask(message)
        assert peer.violations == [(OTHER.peer, Violation.BAD_REQUEST)]

    run(work)


def test_of_a_microbatch_that_is_sent_the_boundary_is_counted_and_the_tokens_are_not() -> None:
    sent = SentTensors()
    sent.add(process(1), [GRADIENT, GRADIENT])
    sent.add(GetState(0), [GRADIENT])
    sent.add(GetPiece(0, 0), [GRADIENT])
    sent.add(GossipSteps(0, ()), [])
    assert sent == SentTensors(boundary_bytes=GRADIENT.nbytes, state_bytes=2 * GRADIENT.nbytes)


def test_a_status_of_very_many_peers_is_cut_to_what_a_message_holds() -> None:
    status = {"peers": [{"peer": f"{number:052d}"} for number in range(100_000)]}
    data = encode_status(status)
    shown = json.loads(data)
    assert len(data) <= MAX_STATUS_BYTES
    assert len(shown["peers"]) + shown["peers_left_out"] == 100_000 and shown["peers"]
