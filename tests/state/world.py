"""Replicas that give their state over the network in memory, with faults that count their firings."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from agora_protocol.errors import AgoraError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import GetChunk, GetSketches, GetState, Message
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncChangeRule, SyncSchedule
from agora.state.layout import OUTER_PARAMETERS, VELOCITY, Layout, MomentSpec, StageState, TensorSlot
from agora.state.snapshot import SnapshotServer
from agora.swarm.peer_score import Violation
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults

CHANGE_RULE = SyncChangeRule(may_change=True, every=1, most_fragments=20)
WINDOW = 3


def layout_of(numel: int, squared: slice | None = None) -> Layout:
    """One vector of `numel` elements, the mean of each, and the square of those in `squared`, by default of all."""
    whole = slice(0, numel)
    moments = MomentSpec("mean", [whole]), MomentSpec("square", [squared or whole], is_square=True, root_bound=1.2)
    return Layout(numel, [TensorSlot("all", 0, (numel,))], moments)


def state(
    numel: int,
    *,
    value: float = 1.0,
    step: int = 10,
    updates: int = 7,
    stage: int = 0,
    agreed_step: int = 0,
    history_hash: int = 0,
    sync_schedule: SyncSchedule = ONLY_ALL_REDUCE,
) -> StageState:
    """Weights near `value`, means near -value, squares value^2: what came from whom can be told."""
    ramp = np.linspace(0, 0.5, numel, dtype=np.float32)
    weights = ramp + value
    moments = {"mean": -weights, "square": np.square(weights)}
    if sync_schedule.is_inner(step):
        moments |= {OUTER_PARAMETERS: weights + 1, VELOCITY: weights + 2}
    layout = layout_of(numel).at_step(step, sync_schedule)
    return StageState(stage, step, updates, 1000, layout, weights, moments, agreed_step, history_hash, sync_schedule)


def chunks(count: float) -> int:
    """Elements of about `count` chunks, a whole number of slice blocks."""
    return int(count * (STATE_CHUNK_BYTES // 12)) // 1024 * 1024


@dataclass
class Link:
    """One wire: bytes go through one after another."""

    bytes_per_s: float
    free_at: float = 0.0

    async def carry(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now) + nbytes / self.bytes_per_s
        await asyncio.sleep(self.free_at - now)


@dataclass
class Replica:
    """A peer that gives `state`; its faults are plain fields."""

    world: World
    peer: PeerId
    state: StageState | None
    uplink: Link
    delay_s: float = 0.025
    die_after: int = 10**9  # chunks given
    hang_after: int = 10**9
    fault: Callable[[Reply, int], Reply | AgoraError] | None = None  # (answer, the how-manieth call of its kind)
    calls: Counter[str] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)
    open_chunks: set[int] = field(default_factory=set)
    open_at_death: set[int] = field(default_factory=set)
    working: set[asyncio.Task] = field(default_factory=set)

    def __post_init__(self) -> None:
        async def export(_: int) -> StageState | None:
            return self.state

        self.snapshots = SnapshotServer(
            export,
            lambda _: 0 if self.state is None else self.state.layout.nbytes,
            lambda _: 0 if self.state is None else self.state.step,
        )
        self.world.network.join(self.peer, self.handle)

    @property
    def dead(self) -> bool:
        return self.world.network.peers[self.peer].frozen

    def die(self) -> None:
        """SIGKILL: its connections break and its work ends."""
        self.open_at_death = set(self.open_chunks)
        self.world.network.kill(self.peer)
        for task in self.working:
            task.cancel()

    async def handle(self, call: MemoryCall) -> Reply:
        """Answers a request after the time that the delay and both wires take."""
        request, task = call.message, asyncio.current_task()
        assert task is not None
        chunk = request.chunk if isinstance(request, GetChunk) else -1
        self.working.add(task)
        self.open_chunks |= {chunk} - {-1}
        try:
            await asyncio.sleep(self.delay_s)
            if chunk >= 0 and self.calls["GetChunk"] >= self.hang_after:
                await asyncio.Event().wait()
            answer = await self.answer(request)
            nbytes = sum(tensor.nbytes for tensor in answer.tensors)
            await self.uplink.carry(nbytes)
            await self.world.downlink.carry(nbytes)
            await asyncio.sleep(self.delay_s)
        finally:
            self.open_chunks.discard(chunk)
            self.working.discard(task)
        if chunk >= 0:
            self.given[chunk] += 1
            if self.given.total() == self.die_after:  # once this answer is on its way
                asyncio.get_running_loop().call_later(1e-6, self.die)
        return answer

    async def answer(self, request: Message) -> Reply:
        self.calls[type(request).__name__] += 1
        if isinstance(request, GetChunk):
            answer = await self.snapshots.get_chunk(request)
        elif isinstance(request, GetSketches):
            answer = await self.snapshots.get_sketches(request, PeerId("joining"))
        else:
            assert isinstance(request, GetState)
            answer = await self.snapshots.get_state(request, PeerId("joining"))
        if self.fault is not None:
            changed = self.fault(answer, self.calls[type(request).__name__])
            if isinstance(changed, AgoraError):
                raise changed
            answer = changed
        return answer


class World:
    """A joining peer's calls to its replicas; its own wire is shared by all of them."""

    def __init__(self, downlink: float = 1e12) -> None:
        self.network = MemoryNetwork(NetworkFaults(latency_s=(0.0, 0.0)))
        self.downlink = Link(downlink)
        self.replicas: dict[PeerId, Replica] = {}
        self.violations: list[tuple[PeerId, str]] = []
        self.open = 0
        self.peak_open = 0
        self.joining = self.network.join(PeerId("joining"), self.refuse)

    async def refuse(self, call: MemoryCall) -> Reply:
        raise Refused("this peer is joining")

    def add(self, name: str, state: StageState | None, *, uplink: float = 50e6, **faults: object) -> Replica:
        peer = PeerId(name)
        replica = self.replicas[peer] = Replica(self, peer, state, Link(uplink), **faults)
        return replica

    def report_violation(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "") -> None:
        assert violation is Violation.FALSE_STATE
        self.violations.append((peer, text))

    def asked(self) -> int:
        """Calls for chunks that reached a living replica."""
        return sum(replica.calls["GetChunk"] for replica in self.replicas.values())

    async def call(self, peer, request, tensors=(), *, deadline, on_progress=None) -> Reply:
        self.open += 1
        self.peak_open = max(self.peak_open, self.open)
        try:
            return await self.joining.call(peer, request, tensors, deadline=deadline)
        finally:
            self.open -= 1


def flipped(answer: Reply) -> Reply:
    """The answer with one bit of its first tensor changed."""
    data = bytearray(answer.tensors[0].data)
    data[len(data) // 2] ^= 1
    return Reply(answer.message, [WireTensor(answer.tensors[0].dtype, answer.tensors[0].shape, memoryview(data))])


def fingerprint(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
