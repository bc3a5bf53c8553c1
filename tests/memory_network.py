"""A network in memory: calls between peers of one process, with delay, loss, broken connections, killed and hung peers.

Every peer joins with a handler and gets back its PeerCaller. Works in virtual time and in real time. Each fault
is counted in `faults.fired`, and each call that ended without an answer or a refusal is kept in `unanswered`.

The tests run the daemon's own objects on it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from agora_protocol.messages import CallProgress, Message
from agora_protocol.tensors import WireTensor

from agora.core.calls import ConnectionBroken, DeadlinePassed, OnProgress, Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import TokenBucket
from agora.net.shaping.link import DelayLine, LinkSpec


@dataclass(frozen=True)
class MemoryCall:
    """A request as the called peer's handler sees it. peer: the caller. deadline: in seconds on the loop's clock.

    progress: a function that sends the caller a CallProgress, the progress message of a microbatch.
    """

    peer: PeerId
    message: Message
    tensors: list[WireTensor]
    deadline: float
    progress: OnProgress


Handler = Callable[[MemoryCall], Awaitable[Reply]]


@dataclass
class NetworkFaults:
    """Faults drawn at random for each call, and how often each has happened."""

    lost_answer: float = 0.0  # probability that the handler's answer is lost
    break_call: float = 0.0  # probability that the connection breaks within 0.3 s, unless the answer comes first
    latency_s: tuple[float, float] = (0.001, 0.003)  # range of the delay of messages from peers without an uplink
    fired: Counter[str] = field(default_factory=Counter)  # how often each kind happened: lost, break, kill, hang


class Uplink:
    """Models a peer's uplink: computes when messages arrive, given the link's rate, latency, jitter and loss."""

    def __init__(self, spec: LinkSpec, rng: random.Random) -> None:
        """Creates an idle link."""
        self.spec = spec
        self.rng = rng
        self.bucket = TokenBucket(spec.rate)
        self.lines: dict[PeerId, DelayLine] = {}

    def arrival(self, to: PeerId, size: int, now: float) -> float:
        """Reserves the link for `size` bytes to a peer, sent at `now`; returns when the last of them arrives."""
        line = self.lines.setdefault(to, DelayLine(self.spec, self.rng))
        return line.arrival(size, self.bucket.take(size, now))


class MemoryPeer:
    """One peer of the network, and the agora.core.calls.PeerCaller with which it calls others.

    frozen: whether the peer has been killed or hangs. died: done once the peer was killed. calls_in: number of requests
    that have reached its handler.
    """

    def __init__(self, network: MemoryNetwork, peer: PeerId, handler: Handler, link: LinkSpec | None) -> None:
        """Creates a living peer; link: None if only the network's latency delays its messages."""
        self.network = network
        self.peer = peer
        self.handler = handler
        self.uplink = Uplink(link, network.rng) if link else None
        self.frozen = False
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls_in = 0

    async def block_if_frozen(self) -> None:
        """Returns immediately, or never if the peer is frozen; the peer's own work awaits this, to freeze as well."""
        if self.frozen:
            await asyncio.Event().wait()

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """Calls a peer and returns its reply, as a PeerCaller does; does not end while this peer is frozen."""
        await self.block_if_frozen()
        try:
            reply = await self.network.carry(self, peer, request, tensors, deadline, on_progress)
        except AgoraError:
            await self.block_if_frozen()
            raise
        await self.block_if_frozen()
        return reply


class MemoryNetwork:
    """All peers, and the faults injected between them.

    `kill` breaks a peer's connections and freezes it; `hang` only freezes it: a frozen peer never goes on. Three sets
    that a test may change at any time: calls from and to `dead` peers break, and calls between two peers of a pair in
    `broken`; requests to `silent` peers are never answered. calls: number of calls, by (caller, callee). unanswered:
    the requests of calls that ended without an answer or a refusal.
    """

    def __init__(self, faults: NetworkFaults | None = None, rng: random.Random | None = None) -> None:
        """Creates a network without peers."""
        self.faults = faults or NetworkFaults()
        self.rng = rng or random.Random(0)
        self.peers: dict[PeerId, MemoryPeer] = {}
        self.calls: Counter[tuple[PeerId, PeerId]] = Counter()
        self.unanswered: list[Message] = []
        self.dead: set[PeerId] = set()
        self.silent: set[PeerId] = set()
        self.broken: set[frozenset[PeerId]] = set()
        self.tasks: set[asyncio.Task[Reply]] = set()

    def join(self, peer: PeerId, handler: Handler, link: LinkSpec | None = None) -> MemoryPeer:
        """Adds a peer whose requests `handler` answers; it takes the place of an earlier peer of the same id.

        Calls made before to the earlier peer still go to the earlier handler.
        """
        joined = self.peers[peer] = MemoryPeer(self, peer, handler, link)
        return joined

    def kill(self, peer: PeerId) -> None:
        """Kills a peer: open and later calls to it fail with ConnectionBroken; its own calls never return."""
        self.faults.fired["kill"] += 1
        self.peers[peer].frozen = True
        if not self.peers[peer].died.done():
            self.peers[peer].died.set_result(None)

    def hang(self, peer: PeerId) -> None:
        """Freezes a peer for good; its connections stay open, so that calls to it fail only at their deadline."""
        self.faults.fired["hang"] += 1
        self.peers[peer].frozen = True

    def is_cut_between(self, one: PeerId, other: PeerId) -> bool:
        """Returns whether calls between two peers fail: one of the two is in `dead`, or the pair is in `broken`."""
        return bool({one, other} & self.dead) or frozenset((one, other)) in self.broken

    async def carry(
        self,
        caller: MemoryPeer,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor],
        deadline: float,
        on_progress: OnProgress | None,
    ) -> Reply:
        """Delivers a request to `peer` and returns that peer's reply; called by MemoryPeer.call.

        on_progress: called with each progress message of the handler; None: these are dropped. Raises the handler's
        error, ConnectionBroken for a fault or a peer that is dead or unknown, DeadlinePassed at the deadline. A request
        that ends with ConnectionBroken or DeadlinePassed, or is cancelled, is added to `unanswered`. Every request is
        counted in `calls`.
        """
        target = self.peers.get(peer)
        self.calls[caller.peer, peer] += 1
        try:
            await self._travel(caller, peer, sum(tensor.nbytes for tensor in tensors))
            if target is None or target.died.done() or self.is_cut_between(caller.peer, peer):
                raise ConnectionBroken("the peer is gone")
            handling = self._deliver(caller, target, request, tensors, deadline, on_progress)
            return await self._reply(caller, target, handling, deadline)
        except (ConnectionBroken, DeadlinePassed, asyncio.CancelledError):
            self.unanswered.append(request)
            raise

    def _deliver(
        self,
        caller: MemoryPeer,
        target: MemoryPeer,
        request: Message,
        tensors: Sequence[WireTensor],
        deadline: float,
        on_progress: OnProgress | None,
    ) -> asyncio.Task[Reply]:
        # The task raises DeadlinePassed if the handler raises TimeoutError, and never ends at a silent or frozen
        # target.
        def progress(call_progress: CallProgress) -> None:
            if not on_progress or caller.frozen or target.frozen:
                return
            if target.uplink is None:
                on_progress(call_progress)
            else:
                arrival = target.uplink.arrival(caller.peer, 0, loop_time())
                asyncio.get_running_loop().call_at(arrival, on_progress, call_progress)

        left_s = getattr(request, "deadline_ms", 1e9) / 1000.0
        call = MemoryCall(caller.peer, request, list(tensors), min(deadline, loop_time() + left_s), progress)

        async def handle() -> Reply:
            # Counts the request, runs the handler, returns its reply; never ends if the target is frozen or silent.
            await target.block_if_frozen()
            target.calls_in += 1
            if target.peer in self.silent:
                await asyncio.Event().wait()
            try:
                return await target.handler(call)
            except TimeoutError:
                raise DeadlinePassed("the peer was not ready in time") from None

        task = asyncio.get_running_loop().create_task(handle())
        self.tasks.add(task)
        task.add_done_callback(self._on_task_ended)
        return task

    def _on_task_ended(self, task: asyncio.Task[Reply]) -> None:
        # Forgets an ended task; retrieves its error, so that asyncio does not log it.
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _reply(
        self, caller: MemoryPeer, target: MemoryPeer, handling: asyncio.Task[Reply], deadline: float
    ) -> Reply:
        will_break = self.rng.random() < self.faults.break_call
        until = min(deadline, loop_time() + self.rng.uniform(0.0, 0.3)) if will_break else deadline
        try:
            either: tuple[asyncio.Future[Any], ...] = (handling, target.died)
            await asyncio.wait(either, timeout=until - loop_time(), return_when="FIRST_COMPLETED")
            if target.frozen and not target.died.done():
                await asyncio.wait([target.died], timeout=until - loop_time())
        except asyncio.CancelledError:
            self._cancel(caller, target, handling)
            raise
        if target.died.done():
            raise ConnectionBroken("the peer died")
        if not handling.done() or target.frozen:
            if will_break and loop_time() < deadline:
                self.faults.fired["break"] += 1
                raise ConnectionBroken("the connection broke")
            self._cancel(caller, target, handling)
            raise DeadlinePassed("no answer in time")
        if handling.exception() is None and self.rng.random() < self.faults.lost_answer:
            self.faults.fired["lost"] += 1
            raise ConnectionBroken("the answer was lost")
        reply = handling.result()
        await self._travel(target, caller.peer, sum(tensor.nbytes for tensor in reply.tensors))
        if self.is_cut_between(caller.peer, target.peer):
            raise ConnectionBroken("the stream broke")
        return reply

    async def _travel(self, sender: MemoryPeer, to: PeerId, size: int) -> None:
        if sender.uplink is None:
            await asyncio.sleep(self.rng.uniform(*self.faults.latency_s))
        else:
            now = loop_time()
            await asyncio.sleep(sender.uplink.arrival(to, size, now) - now)

    def _cancel(self, caller: MemoryPeer, target: MemoryPeer, handling: asyncio.Task[Reply]) -> None:
        if not caller.frozen and not target.frozen:
            handling.cancel()
