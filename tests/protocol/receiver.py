"""The parts of a peer that take what others send: hop, reducer, gossip, state, admission, addresses, views.

What they ask others in turn is answered with damage, too. They live as long as the receiver does, in virtual
time, so that whatever should be forgotten is forgotten, and whatever is not shows as memory.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from agora_protocol import messages
from agora_protocol.codec_names import NUMBER_FORMAT_NAMES
from agora_protocol.errors import ProtocolError
from agora_protocol.frames import FrameType, encode_frame
from agora_protocol.ids import MicrobatchId, PeerId, RunId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import CallProgress, Contribute, Message, Process, Processed, Recall
from agora_protocol.refusals import error_of_refusal
from agora_protocol.tensor_list import bits_to_held
from agora_protocol.tensors import WireTensor

from agora.cli.status_command import check_status
from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester
from agora.core.live_manifest import LiveManifest
from agora.core.span_work import ForwardKey, SpanResult, SpanWork
from agora.core.step_schedule import ONLY_ALL_REDUCE
from agora.net.p2pd.addresses import host_and_port, is_private
from agora.net.rpc.dialling import AddressBook
from agora.net.rpc.gate import Gate
from agora.pipeline.barriers import StepBarrier
from agora.pipeline.hop import Hop
from agora.pipeline.process_call import ProcessCall
from agora.pipeline.router import Router
from agora.pipeline.work_ledger import WorkLedger
from agora.replica.all_reduce import AllReduce
from agora.replica.gossip import StepGossip, SwarmQueries
from agora.replica.number_formats import NumberFormat
from agora.replica.rounds import RoundContext
from agora.replica.shard_codec import RoundConfig, Shard, ShardCodec, WeightedValues
from agora.replica.stage_view import ReplicaCounts
from agora.state.comparison import SketchedState, judge_source
from agora.state.layout import StageState, chunk_hashes, pack_chunk
from agora.state.snapshot import SnapshotServer
from agora.state.state_fetch import check_chunk, check_offer, check_sketches
from agora.swarm.admission import AdmissionBook, AdmissionPolicy
from agora.swarm.amendments import AmendmentBook
from agora.swarm.peer_score import PeerScore
from agora.swarm.view import PeerView, View
from agora.train.gradients import GradientMagnitudeBound
from agora.tuning.epochs.assigner import EpochAssigner
from agora.tuning.epochs.gossip import EpochGossip
from tests.pipeline.world import WIRE_RULES, boundary_of, gradient_of, peer_id, tokens_of
from tests.state.world import CHANGE_RULE, layout_of, state
from tests.virtual_time import VirtualLoop

STAGE: Final = 1  # of three
NUMEL: Final = 1024  # of a shard
STATE_NUMEL: Final = 2048
ME, *OTHERS = [peer_id(name) for name in ("me", "a", "b", "c")]
MEMBERS: Final = (ME, *OTHERS[:2])
DEADLINE_S: Final = 60.0


def nothing(*_: object) -> None:
    """Takes any report."""


class InlineLoop(VirtualLoop):
    """Runs what belongs into threads at once: nothing wakes a loop in virtual time."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class PlainDevice:
    """Computes nothing, but looks at what comes from others as a device does."""

    def __init__(self) -> None:
        self.span = Span(STAGE, STAGE)
        self._bound = GradientMagnitudeBound()

    async def forward(self, work: SpanWork) -> WireTensor:
        return boundary_of(work.microbatch, STAGE + 1)

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        raise NotImplementedError

    async def backward(self, key: ForwardKey, gradient: WireTensor) -> SpanResult:
        values = NumberFormat("float32").decode([WireTensor(gradient.dtype, (8,), gradient.data)], 8)
        if not self._bound.record_and_check(float(values.square().mean().sqrt())):
            raise ProtocolError("bad-tensor", "the gradient is too large")
        return SpanResult(gradient, 0.001)

    def drop_forward(self, key: ForwardKey) -> None:
        pass


class Receiver:
    """One peer. damage: returns a damaged answer to a request, as bytes' reader gave it, or raises ProtocolError."""

    def __init__(
        self, run: RunId, founder: PeerId, damage: Callable[[Message], tuple[Message, list[WireTensor]]]
    ) -> None:
        self._damage = damage
        self._runner = asyncio.Runner(loop_factory=InlineLoop)
        self._runner.run(self._build(run, founder))

    def close(self) -> None:
        self._runner.close()

    def take(self, peer: PeerId, message: Message, tensors: Sequence[WireTensor], rest_s: float) -> None:
        """Handles what `peer` sent, and lets `rest_s` virtual seconds pass. Raises AgoraError: the peer's refusal."""
        self._runner.run(self._take(peer, message, tensors, rest_s))

    async def _build(self, run: RunId, founder: PeerId) -> None:
        rng = random.Random(0)
        span = Span(STAGE, STAGE)
        peers = {peer: PeerView(peer, Span(STAGE + 1, STAGE + 1), 1, state="serving") for peer in OTHERS}
        router = Router(
            self,
            lambda: View(peers),
            me=ME,
            stage_count=3,
            wire_rules=WIRE_RULES,
            report=nothing,
            peer_score=PeerScore(nothing, loop_time),
        )
        self.hop = Hop(
            PlainDevice(),
            router,
            WorkLedger(ME, 16, nothing),
            report=nothing,
            barrier=StepBarrier(span, lambda stage: 10),
        )
        self.gossip = StepGossip(
            ME,
            STAGE,
            self,
            SwarmQueries(
                replicas_in_view=lambda stage: MEMBERS,
                bandwidths=lambda stage: {},
                has_connections=lambda: True,
                uplink_bytes_per_s=lambda: None,
                steps_of_run=lambda: [[10]],
            ),
            counts=lambda: ReplicaCounts(10, 10, 100, 1000),
            on_change=nothing,
            highest_plausible=lambda: 1e6,
            report_implausible=nothing,
            rng=rng,
        )
        config = RoundConfig(ME, run, "clip", 20.0, max_weight=1e9, gradient_wire="normal3", fragment_wire="int8")
        codec = ShardCodec(config)
        self.all_reduce = AllReduce(
            codec,
            self,
            self._context_of,
            lambda fragments: fragments,
            lambda _: bytes(64),
            nothing,
            nothing,
        )
        self.epochs = EpochGossip(
            EpochAssigner(0, ME, 1, 100),
            self,
            lambda: OTHERS,
            report=nothing,
            report_violation=nothing,
            rng=rng,
        )
        self.state = state(STATE_NUMEL)

        async def export(stage: int) -> StageState:
            return self.state

        self.snapshots = SnapshotServer(export, lambda _: self.state.layout.nbytes, lambda _: 10)
        self.admission = AdmissionBook(run, AdmissionPolicy(founder, "ticket"))
        core = Manifest(name="tiny", seed=7, founder=founder)
        self.amendments, self.live = AmendmentBook(run, core), LiveManifest(core)
        now = lambda: 1_790_000_000.0 + loop_time()  # noqa: E731
        self._now = now
        self.gate = Gate(ME, run, "receiver", judge=lambda peer, proof: self.admission.judge(peer, proof, now()).role)
        self.addresses = AddressBook(lambda address: not is_private(address))

    def _context_of(self, shard: Shard) -> RoundContext:
        view = RoundContext(dict.fromkeys(MEMBERS, 0.0), frozenset(MEMBERS[1:]), frozenset(), 20.0, numel=NUMEL)
        if shard.stage != STAGE or shard.position or shard.fragments > 1:
            return replace(view, refusal=ProtocolError("bad-message", "no such shard"))
        return view

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: Callable[[CallProgress], None] | None = None,
    ) -> Reply:
        """As a Caller: every answer is damaged, some are refusals, some follow damaged news of progress."""
        if isinstance(request, Process) and on_progress is not None:
            try:
                news, _ = self._damage(CallProgress(request.stage, peer, "accepted", 0))
                if isinstance(news, CallProgress):
                    on_progress(news)
            except ProtocolError:
                pass
        answer, tensors = self._damage(request)
        if isinstance(answer, messages.Refusal):
            raise error_of_refusal(answer)
        return Reply(answer, tensors)

    async def _take(self, peer: PeerId, message: Message, tensors: Sequence[WireTensor], rest_s: float) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._handle(peer, message, tensors)
        except TimeoutError:
            pass  # as the connection does: the deadline of the call passed
        await asyncio.sleep(rest_s)

    async def _handle(self, peer: PeerId, message: Message, tensors: Sequence[WireTensor]) -> None:  # noqa: C901, PLR0912
        deadline = loop_time() + DEADLINE_S
        reply = Reply(message, list(tensors))
        match message:
            case Process():
                call = ProcessCall(message, list(tensors), deadline, nothing, Requester("", peer))
                answer = await self.hop.process(call)
                encode_frame(FrameType.ANSWER, 1, answer.message, answer.tensors)
            case Processed():
                WIRE_RULES.check_answer(reply, "train", peer)
            case messages.GossipSteps():
                told = self.gossip.answer(peer, message)
                encode_frame(FrameType.ANSWER, 1, told)
                self.gossip.tick()
            case messages.GossipedSteps():
                self.gossip.answer(peer, messages.GossipSteps(STAGE, message.replicas))
            case Contribute():
                given = await self.all_reduce.answer_contribution(peer, message, tensors, deadline)
                encode_frame(FrameType.ANSWER, 1, given.message, given.tensors)
            case messages.Averaged():
                mean = self.all_reduce.codec.decode_mean(Shard(STAGE, "gradient", 7, 0), tensors, NUMEL, message)
                own = WeightedValues(torch.ones(NUMEL), 64.0)
                self.all_reduce.codec.check_magnitude(Shard(STAGE, "gradient", 7, 0), own, mean.values, len(MEMBERS))
            case messages.Recalled():
                # A round of this peer's own, all of whose answers are damaged, and then its failed shards.
                number = int(loop_time())
                result = await self.all_reduce.run(STAGE, "gradient", number, torch.ones(NUMEL), 100.0)
                assert result.mean.isfinite().all()
                await self.all_reduce.kept_means.recall_failed_shards(Shard(STAGE, "gradient", number, 0), result)
                assert result.mean.isfinite().all()
            case Recall():
                recalled = self.all_reduce.kept_means.answer_recall(message)
                encode_frame(FrameType.ANSWER, 1, recalled.message, recalled.tensors)
            case messages.GossipEpochs() | messages.GossipedEpochs():
                answered = self.epochs.answer(peer, messages.GossipEpochs(message.state))
                encode_frame(FrameType.ANSWER, 1, answered)
                self.epochs.tick()
            case messages.GetState():
                index = await self.snapshots.get_state(message, peer)
                encode_frame(FrameType.ANSWER, 1, index.message, index.tensors)
            case messages.GetChunk():
                await self.snapshots.get_chunk(message)
            case messages.GetSketches():
                await self.snapshots.get_sketches(message, peer)
            case messages.StateIndex():
                check_offer(reply, layout_of(STATE_NUMEL), CHANGE_RULE)
            case messages.Chunk():
                check_chunk(reply, chunk_hashes(self.state)[:32], self.state.layout, 0)
            case messages.Sketches():
                sums = check_sketches(reply, (1, 3, 8))
                own = SketchedState(sums, 10, 10, False)
                judge_source(own, [replace(own, sums=sums + 1.0)] * 2, self.state.layout, [0])
            case messages.BaseIndex():
                bits_to_held(bytes(tensors[0].data), 20)
            case messages.Hello():
                self.gate.admit(peer, message)
                self.addresses.learn_announced(peer, message.addresses)
            case messages.PeerAddresses():
                self.addresses.learn_announced(peer, message.addresses)
            case messages.ShareRevocations():
                for sealed in message.revocations:
                    self.admission.add_revocation(sealed, self._now())
            case messages.ShareAmendments() | messages.KnownAmendments():
                for sealed in message.amendments:
                    self.amendments.add(sealed, self._now())
                    self.amendments.choose()
                    self.live.amend(self.amendments.chain)
            case messages.StatusAnswer():
                try:
                    status = json.loads(message.status)
                except (ValueError, RecursionError):
                    return  # as status_client, which cannot be imported beside hivemind
                if isinstance(status, dict):
                    check_status(status)
            case messages.DialedBack() | messages.Meeting() | messages.Meet():
                is_private(message.seen)
                host_and_port(message.seen)
            case messages.Refusal():
                str(error_of_refusal(message))


def valid_messages(run: RunId) -> list[tuple[Message, list[WireTensor]]]:
    """One or more of each message that a Receiver handles in depth, such as an honest peer would send it."""
    made: list[tuple[Message, list[WireTensor]]] = []
    for number in range(2):
        microbatch = MicrobatchId(bytes([number]) * 16)
        process = Process(microbatch, OTHERS[0], STAGE, "train", 60_000, ((2, OTHERS[1]),), step=10)
        made.append((process, [boundary_of(microbatch, STAGE), tokens_of(7)]))
        made.append((replace(process, purpose="evaluate"), [boundary_of(microbatch, STAGE), tokens_of(7)]))
        made.append((Processed(10.0, 2, 3.0, 5.0), [gradient_of(microbatch, STAGE + 1)]))
    entries = tuple((peer, 10, 10, 100, 1000, 9, 77, 0, 2000, 5 * at) for at, peer in enumerate(OTHERS))
    made += [(messages.GossipSteps(STAGE, entries), []), (messages.GossipedSteps(entries), [])]
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for at, wire in enumerate(NUMBER_FORMAT_NAMES):
        what = ("gradient", "slice")[at % 2]
        number = 7 if what == "gradient" else 8
        tensors = NumberFormat(wire).encode(values)
        given = Contribute(STAGE, what, number, 0, at % 2, 100.0, bool(at % 3 == 0), wire, 5000)
        made.append((given, tensors))
        made.append((messages.Averaged(2, 3, 200.0, True, wire, 0), tensors))
        made.append((messages.Recalled(2, 3, 200.0, wire, 0), tensors))
        made.append((Recall(STAGE, what, number, 0, at % 2), []))
    held = state(STATE_NUMEL)
    hashes = chunk_hashes(held)
    chunk = pack_chunk(held, 0)
    index = messages.StateIndex(
        bytes(32), 10, 7, 0, 0, ONLY_ALL_REDUCE.fragments, ONLY_ALL_REDUCE.change_at, 0, held.layout.nbytes
    )
    made += [
        (messages.GetState(STAGE, 5), []),
        (messages.GetChunk(bytes(32), 0), []),
        (messages.GetSketches(bytes(32), bytes(16), 0, 1), []),
        (index, [WireTensor("uint8", (1, 32), memoryview(hashes))]),
        (messages.Chunk(), [WireTensor("uint8", (len(chunk),), memoryview(chunk))]),
        (messages.Sketches(), [WireTensor("float32", (1, 3, 8), memoryview(bytes(96)))]),
        (messages.BaseIndex(100), [WireTensor("uint8", (3,), memoryview(b"\xff\xff\x0f"))]),
    ]
    epochs = EpochAssigner(0, OTHERS[0], 2, 100)
    taken = [epochs.take_next({OTHERS[0]}) for _ in range(3)]
    epochs.mark_completed(taken[0] or 0)
    made += [(messages.GossipEpochs(epochs.next_state()), []), (messages.GossipedEpochs(epochs.next_state()), [])]
    status = b'{"schema": 1, "run_id": "ab", "name": "x", "step": 1, "loss": 2.5, "tokens_per_second": 1.0, "stages": [{"stage": 0, "replicas": 1, "step": 2, "tokens_per_second": 3.0}], "peers": [{"peer": "p", "name": "n", "span": [0, 1], "state": "training", "step": 2, "tokens_per_second": 2.0, "path": "direct", "seen_seconds": 1.0, "note": ""}], "health": {"state": "OK", "why": "", "do": null}}'  # noqa: E501
    made.append((messages.StatusAnswer(status), []))
    hello = Gate(OTHERS[0], run, "other").hello_to(ME)
    made.append((replace(hello, addresses=(f"/ip4/198.51.100.7/tcp/4001/p2p/{OTHERS[0]}",)), []))
    return made
