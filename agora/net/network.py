"""Makes and answers all calls of this peer: opens connections to other peers when they are needed, and keeps them.

Knows: which peers are connected. Must not know: how a peer is dialled (dialling.py), what a request means, or why a
peer is shut out. One long-lived stream for each pair of peers carries all calls both ways; either may have opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from agora_protocol.errors import AgoraError, NotAdmitted, PeerFailed, ProtocolError, Refused
from agora_protocol.frames import FrameLimits, FrameType, encode_frame
from agora_protocol.ids import PeerId
from agora_protocol.limits import PROTOCOL_NAME
from agora_protocol.message_base import Message
from agora_protocol.messages import GetAddresses, PeerAddresses
from agora_protocol.refusals import refusal_to_wire
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.clock import loop_time
from agora.net.address_book import MAX_PEERS
from agora.net.answer_share import AnswerShare
from agora.net.connection import Connection
from agora.net.dialling import Dialler
from agora.net.fair_share import Holder, largest_holder
from agora.net.gate import Gate
from agora.net.host import Host
from agora.net.incoming import Handler, NetLimits, PayloadBudget
from agora.net.network_errors import ConnectionBroken, DeadlinePassed
from agora.net.reaching import WaysToReach
from agora.net.streams import FrameStream

GOODBYES_S: Final = 0.5  # seconds that `Network.close` waits for peers to have read their GOODBYE
SAME_MOMENT_S: Final = 0.1  # a callee that fails in the last 0.1 s before this peer's deadline has reached its own
DEADLINE_SLACK_MS: Final = 10  # a deadline that is too late by at most this much is not worth a new message
MET_S: Final = 600.0  # seconds after its last connection for which a peer still counts as met
TICK_S: Final = 0.5  # seconds between two looks at all connections, at most
ASK_ADDRESSES_S: Final = 1.5  # seconds in which a neighbour must say where another peer can be dialled
MAX_CLOCKS: Final = 16  # peers that are asked for the time at once


class Network:
    """Calls other peers, dialling them when needed, and has a handler answer their calls, from `start` to `close`."""

    def __init__(
        self,
        host: Host,
        gate: Gate,
        handler: Handler,
        limits: NetLimits | None = None,
        *,
        report_violation: Callable[[PeerId, ProtocolError], None] = lambda _peer, _error: None,
        shut_out_s: Callable[[PeerId], float] = lambda _peer: 0.0,
        report_failure: Callable[[PeerId, Exception], None] = lambda _peer, _error: None,
        count_sent: Callable[[Message, Sequence[WireTensor]], None] = lambda _request, _tensors: None,
    ) -> None:
        """gate: says whom this peer calls and answers. handler: answers other peers' requests.

        report_violation: called with each frame that a peer should not have sent. shut_out_s: returns for how many more
        seconds a peer must be neither called nor answered. report_failure: called with what `handler` raised that is
        not an AgoraError. count_sent: called with each request that was sent or answered, and its tensors.
        `tell_time` may be set: it returns the swarm's unix time, which goes into every Pong; 0 while it is not known.
        """
        self.limits = limits or NetLimits()
        self._frame_limits = FrameLimits(max_payload_bytes=self.limits.max_payload_bytes)
        self.budget = PayloadBudget(self.limits.max_held_bytes)
        self.answers = AnswerShare(self.limits.max_answer_bytes)
        self.gate = gate
        self.handle = handler
        self.report_violation = report_violation
        self.shut_out_s = shut_out_s
        self.report_failure = report_failure
        self.count_sent = count_sent
        self.tell_time: Callable[[], float] = lambda: 0.0
        self.on_met: list[Callable[[PeerId], None]] = []  # each is called when HELLO was exchanged with a member
        self._met: OrderedDict[PeerId, float] = OrderedDict()  # when HELLO was exchanged last, or a connection ended
        self._host = host
        self._connections: dict[PeerId, list[Connection]] = {}
        self._dialler = Dialler(host, self._frame_limits, self.limits.dial_s, self.connection_to, self._add_opened)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._past_bytes = [0, 0]
        self._is_closing = False

    async def start(self) -> None:
        """Begins to accept streams and to check connections. Raises ConnectionBroken when the host is gone."""
        await self._host.serve(PROTOCOL_NAME, self._frame_limits, self._accept)
        self.spawn(self._tick())

    async def close(self) -> None:
        """Cancels work and dials, says GOODBYE to all peers, and gives them GOODBYES_S to end their streams."""
        if self._is_closing:
            return
        self._is_closing = True
        tasks = [*self._tasks, *self._dialler.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = self._all_connections()
        for connection in connections:
            connection.end(PeerFailed("this peer has left"), "this peer is leaving")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYES_S):
                for connection in connections:
                    await connection.stream.ended.wait()
        for connection in connections:
            connection.stream.abort()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remembers the multiaddrs with /p2p/PEER at which `peer` can be dialled; ignores unusable ones."""
        self._dialler.learn(peer, addresses)

    def reach_by(self, ways: WaysToReach) -> None:
        """Has peers reached in these ways from now on; before, at all their addresses, but through no holes."""
        self._dialler.reach_by(ways)

    def learn_announced(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remembers where a peer says that it, or its relays, can be dialled: only addresses that may be."""
        self._dialler.learn_announced(peer, addresses)

    async def connect(self, peer: PeerId) -> None:
        """Opens a connection to `peer` unless there is one. Raises as `call` does."""
        self._refuse_to_call(peer)
        if self.connection_to(peer) is None:
            await self._dialler.dial(peer)

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """The bytes that all streams together have read, and have written, since the start."""
        bytes_in, bytes_out = self._past_bytes
        for connection in self._all_connections():
            bytes_in += connection.stream.bytes_in
            bytes_out += connection.stream.bytes_out
        return bytes_in, bytes_out

    @property
    def given_and_waiting_bytes(self) -> tuple[int, int]:
        """The bytes that all streams together were given since the start, and those of them that are not sent yet."""
        streams = [connection.stream for connection in self._all_connections()]
        written = self._past_bytes[1] + sum(stream.bytes_out for stream in streams)
        waiting = sum(stream.backlog for stream in streams)
        return written + waiting - sum(stream.unsent for stream in streams), waiting

    @property
    def paths(self) -> dict[PeerId, str]:
        """By connected peer, the path of its newest connection: "direct", "punched" or "relayed"."""
        return {peer: connections[-1].path for peer, connections in self._connections.items()}

    def round_trip_s(self, peer: PeerId) -> float | None:
        """Returns the average round trip to `peer` in seconds, on its fastest connection; None when unmeasured."""
        measured = [connection.round_trip.value for connection in self._connections.get(peer, ())]
        return min((seconds for seconds in measured if seconds is not None), default=None)

    async def ask_clocks(self, timeout_s: float, most: int = MAX_CLOCKS) -> list[float]:
        """Pings up to `most` connected peers of the run at once; returns what their Pongs imply, in any order.

        Each value is the unix time at which, by that peer's clock, this machine's `boot_time` was 0; peers that do not
        know the time, or are late, give none. timeout_s: for all together.
        """
        peers = random.sample(sorted(self._connections), min(most, len(self._connections)))
        asked = [found for peer in peers if (found := self.connection_to(peer)) and not found.is_reader]
        pings = [asyncio.create_task(connection.ping()) for connection in asked]
        if pings:
            _, late = await asyncio.wait(pings, timeout=timeout_s)
            for ping in late:
                ping.cancel()
        return [connection.boot_unix for connection in asked if connection.boot_unix is not None]

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """Calls `peer`; see `agora.calls.Caller`. Dials it first when there is no connection.

        The tensors must not change until this returns. Raises what the peer refused with, NotAdmitted for a peer that
        is shut out, ConnectionBroken as soon as the stream breaks or cannot be opened, DeadlinePassed.
        """
        try:
            async with asyncio.timeout_at(deadline):
                self._refuse_to_call(peer)
                connection = self.connection_to(peer) or await self._dialler.dial(peer)
                fields: Any = request
                left_ms = max(1, int((deadline - loop_time()) * 1000))
                if left_ms + DEADLINE_SLACK_MS < fields.deadline_ms:  # the peer need not work for longer than that
                    request = dataclasses.replace(fields, deadline_ms=left_ms)
                return await connection.call(request, tensors, on_progress)
        except TimeoutError:
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline") from None
        except PeerFailed as error:
            # The callee's deadline passes with this peer's: which error comes first is chance, and must not matter.
            if loop_time() < deadline - SAME_MOMENT_S:
                raise
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline ({error})") from None

    def connection_to(self, peer: PeerId) -> Connection | None:
        """Returns the usable connection for new calls to `peer`, or None; never dials.

        Of two that both sides opened at the same time, both choose the one that the lower peer id opened.
        """
        usable = [connection for connection in self._connections.get(peer, ()) if connection.is_usable]
        is_lower = self._host.peer < peer
        return min(usable, key=lambda connection: connection.is_initiator is not is_lower, default=None)

    def has_met(self, peer: PeerId) -> bool:
        """Returns whether HELLO was exchanged with `peer`, a member, and they are connected or were within MET_S."""
        met_at = self._met.get(peer)
        return met_at is not None and (self.connection_to(peer) is not None or loop_time() - met_at <= MET_S)

    async def meet(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Exchanges HELLO with a peer at its claimed addresses, unless it is connected. Raises as `call` does."""
        self._refuse_to_call(peer)
        self.learn_announced(peer, addresses)
        if self.connection_to(peer) is None:
            await self._dialler.dial(peer)

    def _accept(self, stream: FrameStream, peer: PeerId, path: str) -> None:
        """Makes a connection of a stream that a peer has opened, and breaks off those that it opened before.

        Sends GOODBYE instead if the peer is shut out, this network is closing, or there are too many connections.
        """
        try:
            self._refuse_shut_out(peer)
            if self._is_closing or not self._make_room(Holder(stream.prefix, peer)):
                raise Refused("This peer takes no more connections now; try another.")
        except Refused as error:
            stream.enqueue(encode_frame(FrameType.GOODBYE, 0, refusal_to_wire(error)))
            stream.close()
            return
        for older in list(self._connections.get(peer, ())):
            if not older.is_initiator:  # an honest peer opens a second stream only when it has given the first one up
                older.break_off("the peer opened a new stream")
        self.spawn(self._await_hello(self._add_connection(stream, peer, is_initiator=False, path=path)))

    def _make_room(self, newcomer: Holder) -> bool:
        """Returns whether one more connection may be made; breaks off another one for it if need be.

        Peers that have not said which run they train have `max_silent` connections together, whoever they are.
        """
        connections = self._all_connections()
        silent = [known for known in connections if known.is_reader and not known.is_initiator]
        if len(silent) < self.limits.max_silent and len(connections) < self.limits.max_connections:
            return True
        if silent:
            self._choose_to_break(silent, newcomer).break_off("others need the room")
            return True
        others = [known for known in connections if known.stream.prefix != newcomer.prefix]
        largest = largest_holder(Counter(known.holder for known in connections), newcomer)
        chosen = [known for known in others if known.holder == largest]
        for known in chosen[:1]:
            known.break_off("others need the room")
        return bool(chosen)

    @staticmethod
    def _choose_to_break(silent: Sequence[Connection], newcomer: Holder) -> Connection:
        """Returns which of these connections makes room: the oldest one of whoever has the most, see largest_holder."""
        largest = largest_holder(Counter(known.holder for known in silent), newcomer)
        return next((known for known in silent if known.holder == largest), silent[0])

    async def _await_hello(self, connection: Connection) -> None:
        """Exchanges HELLO on a stream that a peer has opened. Ignores a failure, which has ended the connection."""
        with contextlib.suppress(AgoraError):
            await connection.start()

    def _refuse_to_call(self, peer: PeerId) -> None:
        """Raises NotAdmitted for a peer that must not be called: the gate is closed to it, or it is shut out."""
        if refusal := self.gate.refusal(peer):
            raise refusal
        self._refuse_shut_out(peer)

    def _refuse_shut_out(self, peer: PeerId) -> None:
        """Raises NotAdmitted while `peer` is shut out for its conduct."""
        seconds = self.shut_out_s(peer)
        if seconds > 0:
            raise NotAdmitted(f"{peer} broke the rules too often; it is shut out for {seconds:.0f} s more.")

    def _add_opened(self, stream: FrameStream, peer: PeerId, path: str) -> Connection:
        """Makes a connection of a stream that this peer has opened; see `_add_connection`."""
        return self._add_connection(stream, peer, is_initiator=True, path=path)

    def _add_connection(self, stream: FrameStream, peer: PeerId, *, is_initiator: bool, path: str) -> Connection:
        """Makes a connection of a stream, keeps it and returns it; its handshake has not begun."""
        connection = Connection(self, stream, peer, is_initiator=is_initiator, path=path)
        self._connections.setdefault(peer, []).append(connection)
        return connection

    # --- what connections need of the network

    def on_ready(self, connection: Connection, addresses: Sequence[str]) -> None:
        """Called after the HELLOs: learns the addresses, wakes a dial that waits for the peer, and sends a Ping.

        Tells the gate and `on_met` of the new member. Does nothing for a reader.
        """
        if connection.is_reader:
            return
        self.learn_announced(connection.peer, addresses)
        self._record_met(connection.peer)
        self._dialler.wake(connection.peer)
        self.spawn(connection.ping())
        for each in self.on_met:
            each(connection.peer)

    def on_gone(self, connection: Connection) -> None:
        """Called when a connection broke or ended: forgets it, and keeps its bytes in `carried_bytes`."""
        self._past_bytes[0] += connection.stream.bytes_in
        self._past_bytes[1] += connection.stream.bytes_out
        if connection.peer in self._met:
            self._record_met(connection.peer)
        self._connections[connection.peer].remove(connection)
        if not self._connections[connection.peer]:
            del self._connections[connection.peer]

    def _record_met(self, peer: PeerId) -> None:
        """Remembers that HELLO was exchanged with a peer, until now; forgets the longest unmet beyond MAX_PEERS."""
        self._met[peer] = loop_time()
        self._met.move_to_end(peer)
        if len(self._met) > MAX_PEERS:
            self._met.popitem(last=False)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task, which is cancelled when the network closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _all_connections(self) -> list[Connection]:
        """Returns the connections to all peers, usable or not."""
        return [connection for connections in self._connections.values() for connection in connections]

    def _end_if_refused(self, connection: Connection) -> None:
        """Ends a connection to a peer that is not admitted any more or is shut out; otherwise does nothing."""
        if (role := connection.role) is None:
            return
        if refusal := self.gate.still_refuses(connection.peer, connection.proof, role):
            connection.end(refusal, str(refusal))
        elif self.shut_out_s(connection.peer) > 0:
            connection.break_off("the peer is shut out")

    async def greet(self, peer: PeerId, *, anew: bool = False, named_by: PeerId | None = None) -> bool:
        """Exchanges HELLOs with `peer` unless there is a connection; returns whether it is a member now.

        anew: first breaks off connections that the peer does not know of any more. named_by: a neighbour that is asked
        where `peer` can be dialled, when no address is known or none answers.
        """
        for connection in list(self._connections.get(peer, ())) if anew else ():
            connection.break_off("the peer does not know of the connection")
        with contextlib.suppress(AgoraError):
            self._refuse_to_call(peer)
            return (self.connection_to(peer) or await self._dial_or_ask(peer, named_by)).is_usable
        return False

    async def _dial_or_ask(self, peer: PeerId, named_by: PeerId | None) -> Connection:
        """Dials `peer`; when that fails and `named_by` knows other addresses, dials those. Raises as `dial` does."""
        try:
            return await self._dialler.dial(peer)
        except ConnectionBroken:
            known = self._dialler.addresses(peer)
            if named_by is None or self.connection_to(named_by) is None:
                raise
            reply = await self.call(named_by, GetAddresses(peer), deadline=loop_time() + ASK_ADDRESSES_S)
            if isinstance(reply.message, PeerAddresses):
                self.learn_announced(peer, reply.message.addresses)
            if self._dialler.addresses(peer) == known:
                raise
        return await self._dialler.dial(peer)

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Returns where a member that has said HELLO can be dialled, to tell other members; empty if not known."""
        return self._dialler.addresses(peer) if self.gate.is_greeted(peer) else ()

    def members(self) -> list[PeerId]:
        """Returns the peers to which there is a usable connection."""
        return [peer for peer in self._connections if self.connection_to(peer) is not None]

    def end_refused(self) -> None:
        """Ends at once the connections to peers that are not admitted any more; `_tick` does it twice a second."""
        for connection in self._all_connections():
            self._end_if_refused(connection)

    async def _tick(self) -> None:
        """Twice a second, until cancelled: ends connections to peers that are refused now, and ticks all of them."""
        while True:
            await asyncio.sleep(min(TICK_S, self.limits.silence_s / 4))
            for connection in self._all_connections():
                self._end_if_refused(connection)
                connection.tick(loop_time())
