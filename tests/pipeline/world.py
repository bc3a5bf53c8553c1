"""A swarm in memory: real hops, routers and origins over an in-memory network, with computes that only count.

Every fault that the world injects is counted, and every call that ended otherwise than by an answer or a refusal is
remembered, so that a test can say which second counting was excused.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from agora_protocol.errors import AgoraError, ProtocolError
from agora_protocol.ids import MicrobatchId, PeerId, Span, peer_id_of
from agora_protocol.messages import Process
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester
from agora.core.span_work import DrawnMicrobatch, ForwardKey, SpanResult, SpanWork
from agora.net.shaping.link import LinkSpec
from agora.observe.events import (
    Event,
    MicrobatchCompleted,
    MicrobatchCounted,
    MicrobatchDropped,
    MicrobatchStarted,
    OffenceRecorded,
)
from agora.pipeline.barriers import MeanBarrier, StepBarrier
from agora.pipeline.flow_control import SendInputs
from agora.pipeline.hop import Hop
from agora.pipeline.origin import Origin, OriginConfig
from agora.pipeline.process_call import ProcessCall, TensorForm, WireRules
from agora.pipeline.router import Router
from agora.pipeline.work_ledger import WorkLedger
from agora.swarm.peer_score import PeerScore
from agora.swarm.view import PeerView, View
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults

WIRE_RULES = WireRules(TensorForm("float32", (1, 2, 4)), TensorForm("float32", (1, 2, 4)), (1, 3))
TOKENS = 2


def peer_id(name: str) -> PeerId:
    return peer_id_of(hashlib.sha256(name.encode()).digest())


def boundary_of(microbatch: bytes, stage: int) -> WireTensor:
    """What enters `stage`: any other bytes there are a mistake of the pipeline."""
    return _tensor(b"boundary", microbatch, stage)


def gradient_of(microbatch: bytes, stage: int) -> WireTensor:
    """The gradient of what enters `stage`."""
    return _tensor(b"gradient", microbatch, stage)


def tokens_of(counter: int) -> WireTensor:
    return WireTensor("int32", (1, 3), memoryview(counter.to_bytes(12, "little")))


class Source:
    """Where the microbatches of these tests come from: number n has tokens_of(n)."""

    def __init__(self) -> None:
        self.drawn = 0
        self.done: list[int] = []
        self.given_back: list[int] = []
        self.dry = False

    def draw(self) -> DrawnMicrobatch | None:
        if self.dry:
            return None
        self.drawn += 1
        return DrawnMicrobatch(tokens_of(self.drawn - 1), self.drawn - 1)

    def mark_completed(self, number: int) -> None:
        self.done.append(number)

    def release(self, number: int) -> None:
        self.given_back.append(number)

    def heldout_microbatches(self, count: int) -> Iterable[WireTensor]:
        return heldout(count)


def loss_of(tokens: WireTensor) -> float:
    return float(int.from_bytes(tokens.data, "little") % 1000)


def _tensor(what: bytes, microbatch: bytes, stage: int) -> WireTensor:
    return WireTensor("float32", (1, 2, 4), memoryview(hashlib.sha256(what + microbatch + bytes([stage])).digest()))


class FakeDevice:
    """A serial device that needs `service_s` per microbatch and stage, a third of it forward."""

    def __init__(self, node: Node, span: Span, service_s: float) -> None:
        self.node, self.span, self.service_s = node, span, service_s
        self.device = asyncio.Lock()
        self.held: set[ForwardKey] = set()
        self.entries: Counter[tuple[int, MicrobatchId]] = Counter()  # counted, by the stage that each entered
        self.counted: Counter[tuple[int, MicrobatchId]] = Counter()
        self.busy_s = 0.0
        self.fail_next: list[AgoraError] = []
        self.answers_nonsense = False

    async def forward(self, work: SpanWork) -> WireTensor:
        microbatch, first = work.microbatch, work.entry_stage
        self._check(microbatch, first, work.boundary)
        await self._device(self._seconds(first) / 3.0)
        if work.is_training:
            self.held.add(work.key)
        return boundary_of(microbatch, self.span.last + 1)

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        microbatch, first, train = work.microbatch, work.entry_stage, work.is_training
        self._check(microbatch, first, work.boundary)
        count = (lambda: self._count(microbatch, first)) if train else None
        await self._device(self._seconds(first), count)
        of = b"something else" if self.answers_nonsense else microbatch
        gradient = gradient_of(of, first) if train and first else None
        return SpanResult(gradient, self._seconds(first), loss_of(work.tokens), TOKENS)

    async def backward(self, key: ForwardKey, gradient: WireTensor) -> SpanResult:
        microbatch, first = key.microbatch, key.entry_stage
        assert key in self.held, "backward without a forward"
        if bytes(gradient.data) != bytes(gradient_of(microbatch, self.span.last + 1).data):
            raise ProtocolError("bad-tensor", "the gradient is wrong")
        await self._device(self._seconds(first) * 2.0 / 3.0, lambda: self._count(microbatch, first))
        self.held.discard(key)
        return SpanResult(gradient_of(microbatch, first) if first else None, self._seconds(first))

    def drop_forward(self, key: ForwardKey) -> None:
        self.held.discard(key)

    def _seconds(self, first: int) -> float:
        return self.service_s * (self.span.last - first + 1)

    def _check(self, microbatch, first: int, boundary: WireTensor | None) -> None:
        assert first in self.span
        if first:
            assert boundary is not None
            assert bytes(boundary.data) == bytes(boundary_of(microbatch, first).data)

    async def _device(self, seconds: float, effect: Callable[[], None] | None = None) -> None:
        """One job. Cancelled in the queue it is dropped; once it runs nothing stops it, as on a real device thread.

        What has an effect is then waited for.
        """
        await self.node.caller.block_if_frozen()
        async with self.device:
            if self.fail_next:
                raise self.fail_next.pop()
            job = asyncio.get_running_loop().create_task(self._work(seconds, effect or (lambda: None)))
            self.node.world.network.tasks.add(job)
            job.add_done_callback(self.node.world.network.tasks.discard)
            try:
                await asyncio.shield(job)
            except asyncio.CancelledError:
                if effect is None:
                    raise
                await job
        await self.node.caller.block_if_frozen()

    async def _work(self, seconds: float, effect: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        await self.node.caller.block_if_frozen()
        self.busy_s += seconds
        effect()

    def _count(self, microbatch: MicrobatchId, first: int) -> None:
        for stage in range(first, self.span.last + 1):
            self.counted[stage, microbatch] += 1
        self.entries[first, microbatch] += 1
        stages = tuple(range(first, self.span.last + 1))
        self.node.events.append(MicrobatchCounted(microbatch.hex(), stages, TOKENS))


async def no_fault(point: str) -> None:
    """Nothing goes wrong."""


class Node:
    """One peer of the world."""

    def __init__(
        self,
        world: World,
        name: str,
        span: Span,
        service_s: float,
        slots: int,
        link: LinkSpec | None,
        barrier: StepBarrier | MeanBarrier | None,
    ) -> None:
        self.world, self.name, self.peer, self.span = world, name, peer_id(name), span
        self.caller = world.network.join(self.peer, self._answer, link)
        self.state = "serving"
        self.incarnation = 1
        self.events: list[Event] = []
        self.device = FakeDevice(self, span, service_s)
        self.ledger = WorkLedger(self.peer, slots, self.events.append)
        self.reached: Counter[str] = Counter()
        self.current_view = lambda: world.view
        self.peer_score = PeerScore(self.events.append, loop_time)
        self.router = Router(
            self.caller,
            lambda: self.current_view(),
            me=self.peer,
            stage_count=world.stage_count,
            wire_rules=WIRE_RULES,
            report=self.events.append,
            peer_score=self.peer_score,
            round_trip_s=self._measured_round_trip_s,
        )
        self.fault = no_fault
        self.hop = self.new_hop(barrier)

    def new_hop(self, barrier: StepBarrier | MeanBarrier | None = None) -> Hop:
        """The hop of this node's device; the ledger and the router outlive it."""
        self.ledger.start_accepting()
        return Hop(
            self.device,
            self.router,
            self.ledger,
            report=self.events.append,
            barrier=barrier,
            fault=self._fault,
        )

    def _measured_round_trip_s(self, peer: PeerId) -> float | None:
        """As a ping over the idle link would measure it; unknown where nothing has a link."""
        uplinks = self.caller.uplink, self.world.nodes[peer].caller.uplink
        return (uplinks[0].spec.rtt_s + uplinks[1].spec.rtt_s) / 2 if uplinks[0] and uplinks[1] else None

    @property
    def frozen(self) -> bool:
        return self.caller.frozen

    @property
    def calls_in(self) -> int:
        return self.caller.calls_in

    async def _answer(self, call: MemoryCall) -> Reply:
        return await self.hop.process(
            ProcessCall(call.message, call.tensors, call.deadline, call.progress, Requester("", call.peer))
        )

    async def _fault(self, point: str) -> None:
        self.reached[point] += 1
        await self.caller.block_if_frozen()
        await self.fault(point)
        await self.caller.block_if_frozen()

    def view(self) -> PeerView:
        return PeerView(self.peer, self.span, self.incarnation, state=self.state)


class World:
    """All peers, the network between them, and what went wrong on purpose."""

    def __init__(self, stage_count: int, *, seed: int = 0, faults: NetworkFaults | None = None) -> None:
        self.stage_count = stage_count
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(faults, self.rng)
        self.nodes: dict[PeerId, Node] = {}
        self.claimed: dict[PeerId, Node] = {}
        self.view = View()

    def add(
        self,
        name: str,
        span: str,
        service_s: float = 0.03,
        slots: int = 64,
        seen: bool = True,
        link: LinkSpec | None = None,
        barrier: StepBarrier | MeanBarrier | None = None,
    ) -> Node:
        node = Node(self, name, Span.parse(span), service_s, slots, link, barrier)
        self.nodes[node.peer] = node
        if seen:
            self.show(node)
        return node

    def show(self, node: Node) -> None:
        self.claimed[node.peer] = node
        self.look()

    def move(self, node: Node, span: str) -> None:
        """What `agora-node move` does when the node has left its hop: other stages, the same peer."""
        node.span = Span.parse(span)
        node.device = FakeDevice(node, node.span, node.device.service_s)
        node.hop = node.new_hop()
        self.show(node)

    def hide(self, node: Node) -> None:
        self.claimed.pop(node.peer, None)
        self.look()

    def look(self) -> None:
        self.view = View({peer: node.view() for peer, node in self.claimed.items()})
        for node in self.nodes.values():
            node.router.on_view_changed()

    @property
    def faults(self) -> NetworkFaults:
        return self.network.faults

    @property
    def unhappy(self) -> Counter[bytes]:
        """Calls that ended without an answer or a refusal, by microbatch."""
        return Counter(request.microbatch for request in self.network.unanswered if isinstance(request, Process))

    # --- what a test asks

    def origin(self, node: Node, **settings) -> Origin:
        values = {"ceiling": 16, "first_timeout_s": 30.0} | settings
        config = OriginConfig(me=node.peer, stage_count=self.stage_count, **values)
        session = hashlib.sha256(node.name.encode()).digest()[:8]
        look = lambda: SendInputs(latency_s=node.hop.latency_s())  # noqa: E731
        return Origin(config, node.hop, Source(), node.events.append, look, session=session)

    def counts(self, stage: int, microbatch: bytes) -> dict[PeerId, int]:
        counts = {peer: node.device.counted[stage, microbatch] for peer, node in self.nodes.items()}
        return {peer: count for peer, count in counts.items() if count}


def heldout(count: int) -> Iterable[WireTensor]:
    return [tokens_of(10_000 + i) for i in range(count)]


def started(events: Sequence[Event]) -> list[str]:
    return [e.microbatch for e in events if isinstance(e, MicrobatchStarted) and e.purpose == "train"]


def completed(events: Sequence[Event]) -> list[str]:
    return [e.microbatch for e in events if isinstance(e, MicrobatchCompleted) and e.purpose == "train"]


def dropped(events: Sequence[Event]) -> list[str]:
    return [e.microbatch for e in events if isinstance(e, MicrobatchDropped)]


async def train(origin: Origin, microbatches: int, timeout_s: float = 100_000.0) -> None:
    """Runs an origin until it has completed so many, then lets it leave."""
    running = asyncio.create_task(origin.run())
    until = asyncio.get_running_loop().time() + timeout_s
    while origin.completed < microbatches and not running.done():
        assert asyncio.get_running_loop().time() < until, origin.completed
        await asyncio.sleep(0.05)
    await origin.leave(timeout_s)
    await running


def violations_of(node: Node) -> list[tuple[str, str, str]]:
    """The violations that the node recorded: (peer, violation, text)."""
    return [(e.peer, e.offence, e.text) for e in node.events if isinstance(e, OffenceRecorded)]
