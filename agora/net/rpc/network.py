"""Makes and answers all calls of this peer: opens connections to other peers when they are needed, and keeps them.

One long-lived stream for each pair of peers carries all calls both ways; either may have opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final

from agora_protocol.errors import AgoraError, NotAdmitted, PeerFailed, ProtocolError, Refused
from agora_protocol.frames import FrameLimits, FrameType, encode_frame
from agora_protocol.ids import PeerId
from agora_protocol.limits import PROTOCOL_NAME
from agora_protocol.messages import GetAddresses, Message, PeerAddresses, Request
from agora_protocol.refusals import refusal_of_error
from agora_protocol.tensors import WireTensor

from agora.core.calls import ConnectionBroken, DeadlinePassed, OnProgress, Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester, largest_requester
from agora.net.p2pd.frame_stream import FrameStream
from agora.net.p2pd.host import Host
from agora.net.rpc.budgets import AnswerBudget, NetLimits, PayloadBudget
from agora.net.rpc.connection import Connection, ConnectionServices, Handler
from agora.net.rpc.dialling import MAX_PEERS, AddressBook, Dialler, DialStrategy
from agora.net.rpc.gate import Gate

GOODBYES_TIMEOUT_S: Final = 0.5  # seconds that `Network.close` waits for peers to have read their GOODBYE
# A PeerFailed within so many seconds of this peer's deadline counts as that: the callee's passes at the same moment.
SAME_MOMENT_S: Final = 0.1
DEADLINE_SLACK_MS: Final = 10  # a deadline that is too late by at most this much is not worth a new message
HANDSHAKE_LIFETIME_S: Final = 600.0  # seconds after its last connection for which a peer still counts as handshaken
TICK_INTERVAL_S: Final = 0.5  # seconds between two looks at all connections, at most
ADDRESSES_TIMEOUT_S: Final = 1.5  # seconds in which a neighbour must answer where another peer can be dialled
MAX_CLOCKS: Final = 16  # peers that are asked for the time together


class Network:
    """Calls peers, dials them if needed, has their calls answered, and drops silent and refused peers.

    It does all this from `start` to `close`.
    """

    def __init__(
        self,
        host: Host,
        gate: Gate,
        handler: Handler,
        limits: NetLimits | None = None,
        *,
        report_protocol_error: Callable[[PeerId, ProtocolError], None] = lambda _peer, _error: None,
        suspended_s: Callable[[PeerId], float] = lambda _peer: 0.0,
        report_failure: Callable[[PeerId, Exception], None] = lambda _peer, _error: None,
        count_sent: Callable[[Message, Sequence[WireTensor]], None] = lambda _request, _tensors: None,
        tell_time: Callable[[], float] = lambda: 0.0,
        on_handshake: Callable[[PeerId], None] | None = None,
        dial_strategy: DialStrategy | None = None,
    ) -> None:
        """gate: decides which peers this peer calls and answers. handler: answers other peers' requests.

        report_protocol_error: called when a peer broke the protocol. suspended_s: returns for how many more seconds a
        peer must be neither called nor answered. report_failure: called with what `handler` raised that is not an
        AgoraError, and when its answer cannot be encoded. count_sent: called with each request of this peer and its
        tensors, and with each request that this peer answers and the answer's tensors. tell_time: returns the
        swarm's unix time, which goes into every Pong; 0 while that time is not known. on_handshake: called when HELLO
        was exchanged with a member. dial_strategy: None dials all addresses, and punches no holes.
        """
        self.limits = limits or NetLimits()
        self.budget = PayloadBudget(self.limits.max_held_bytes)
        self.answers = AnswerBudget(self.limits.max_answer_bytes)
        self.gate = gate
        self._suspended_s = suspended_s
        self._on_handshake = on_handshake
        self._host = host
        self._frame_limits = FrameLimits(max_payload_bytes=self.limits.max_payload_bytes)
        self._services = ConnectionServices(
            gate=gate,
            handle=handler,
            limits=self.limits,
            budget=self.budget,
            answers=self.answers,
            suspended_s=suspended_s,
            report_protocol_error=report_protocol_error,
            report_failure=report_failure,
            count_sent=count_sent,
            tell_time=tell_time,
            spawn=self.spawn,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
        )
        ways = dial_strategy or DialStrategy()
        self.address_book = AddressBook(ways.may_dial)
        self._dialler = Dialler(
            host=host,
            frame_limits=self._frame_limits,
            dial_s=self.limits.dial_s,
            book=self.address_book,
            punch_hole=ways.punch_hole,
            connection_to=self.connection_to,
            add=partial(self._add_connection, is_initiator=True),
        )
        self._connections: dict[PeerId, list[Connection]] = {}
        # When HELLO was exchanged last, or a connection ended.
        self._handshaken: OrderedDict[PeerId, float] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._past_bytes = [0, 0]
        self._is_closing = False

    async def start(self) -> None:
        """Begins to accept streams. Raises ConnectionBroken when the host is gone."""
        await self._host.serve(PROTOCOL_NAME, self._frame_limits, self._accept)

    async def close(self) -> None:
        """Cancels work and dials, sends GOODBYE to all peers, and aborts streams after GOODBYES_TIMEOUT_S."""
        if self._is_closing:
            return
        self._is_closing = True
        tasks = [*self._tasks, *self._dialler.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = self._all_connections()
        for connection in connections:
            connection.close(PeerFailed("this peer has left"), "this peer is leaving")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYES_TIMEOUT_S):
                for connection in connections:
                    await connection.stream.ended.wait()
        for connection in connections:
            connection.stream.abort()

    async def connect(self, peer: PeerId) -> None:
        """Connects to `peer` unless it is connected. Raises NotAdmitted, ConnectionBroken or an error of the HELLOs."""
        self._raise_if_refused(peer)
        if self.connection_to(peer) is None:
            await self._dialler.dial(peer)

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """The bytes that all streams together have read, and have written, since the start; ended ones included."""
        bytes_in, bytes_out = self._past_bytes
        for connection in self._all_connections():
            bytes_in += connection.stream.bytes_in
            bytes_out += connection.stream.bytes_out
        return bytes_in, bytes_out

    @property
    def given_and_waiting_bytes(self) -> tuple[int, int]:
        """The bytes that all streams were given to send since the start, and those of them that are not sent yet."""
        streams = [connection.stream for connection in self._all_connections()]
        written = self._past_bytes[1] + sum(stream.bytes_out for stream in streams)
        waiting = sum(stream.backlog for stream in streams)
        return written + waiting - sum(stream.unsent for stream in streams), waiting

    @property
    def paths(self) -> dict[PeerId, str]:
        return {peer: connections[-1].path for peer, connections in self._connections.items()}

    @property
    def software(self) -> dict[PeerId, str]:
        """By connected peer, the name and version of its program, as its HELLO says them."""
        return {peer: connections[-1].software for peer, connections in self._connections.items()}

    @property
    def address_prefixes(self) -> dict[PeerId, str]:
        """By peer, the network of the address at which it is connected, "" if unknown."""
        return {peer: connections[-1].stream.address_prefix for peer, connections in self._connections.items()}

    def round_trip_s(self, peer: PeerId) -> float | None:
        """Returns the average round trip to `peer` in seconds, on its fastest connection; None when unmeasured."""
        measured = [connection.round_trip.value for connection in self._connections.get(peer, ())]
        return min((seconds for seconds in measured if seconds is not None), default=None)

    async def ask_clocks(self, timeout_s: float, max_peers: int = MAX_CLOCKS) -> list[float]:
        """Pings up to `max_peers` connected peers, chosen at random; returns what members' Pongs imply, in any order.

        Each value is the unix time at which, by that peer's clock, this machine's `boot_time` was 0. A peer that does
        not answer gives what an earlier Pong implied; one that never sent the time gives none. timeout_s: for all.
        """
        peers = random.sample(sorted(self._connections), min(max_peers, len(self._connections)))
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
        request: Request,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """Sends `peer` a request and returns its reply; dials `peer` first when there is no connection.

        deadline: loop time; a request with a later `deadline_ms` gets this one. on_progress: called with each
        CallProgress. The tensors must not change until this returns. Raises the peer's refusal as its error,
        NotAdmitted for a peer that must not be called, ConnectionBroken as soon as the stream breaks or cannot be
        opened, DeadlinePassed, also for a PeerFailed within SAME_MOMENT_S of the deadline.
        """
        try:
            async with asyncio.timeout_at(deadline):
                self._raise_if_refused(peer)
                connection = self.connection_to(peer) or await self._dialler.dial(peer)
                left_ms = max(1, int((deadline - loop_time()) * 1000))
                if left_ms + DEADLINE_SLACK_MS < request.deadline_ms:  # the peer need not work for longer than that
                    request = dataclasses.replace(request, deadline_ms=left_ms)
                return await connection.call(request, tensors, on_progress)
        except TimeoutError:
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline") from None
        except PeerFailed as error:
            # The callee's deadline passes at the same moment as this peer's. Which error comes first must not matter.
            if loop_time() < deadline - SAME_MOMENT_S:
                raise
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline ({error})") from None

    def connection_to(self, peer: PeerId) -> Connection | None:
        """Returns the connection to `peer` that new calls use, None without a usable one; never dials.

        When both sides have opened one at the same time, both use the one that the lower peer id opened.
        """
        usable = [connection for connection in self._connections.get(peer, ()) if connection.is_usable]
        is_lower = self._host.peer < peer
        return min(usable, key=lambda connection: connection.is_initiator is not is_lower, default=None)

    def has_handshaken(self, peer: PeerId) -> bool:
        """Returns whether `peer` has sent HELLO as a member, and is connected or was up to HANDSHAKE_LIFETIME_S ago."""
        at = self._handshaken.get(peer)
        return at is not None and (self.connection_to(peer) is not None or loop_time() - at <= HANDSHAKE_LIFETIME_S)

    async def connect_announced(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Learns the addresses that `peer` announces; connects to it unless it is connected. Errors: see `connect`."""
        self._raise_if_refused(peer)
        self.address_book.learn_announced(peer, addresses)
        if self.connection_to(peer) is None:
            await self._dialler.dial(peer)

    def _accept(self, stream: FrameStream, peer: PeerId, path: str) -> None:
        try:
            self._raise_if_refused(peer, by_id=False)  # its HELLO, which comes next, decides whether it is admitted
            if self._is_closing or not self._make_room(Requester(stream.address_prefix, peer)):
                raise Refused("this peer takes no more connections now; try another")
        except Refused as error:
            stream.enqueue(encode_frame(FrameType.GOODBYE, 0, refusal_of_error(error)))
            stream.close()
            return
        for older in list(self._connections.get(peer, ())):
            if not older.is_initiator:  # an honest peer opens a second stream only when it has given the first one up
                older.abort("the peer opened a new stream")
        self.spawn(self._await_hello(self._add_connection(stream, peer, path, is_initiator=False)))

    def _make_room(self, newcomer: Requester) -> bool:
        # Silent connections, of readers or without a HELLO yet, are closed first. If there are none, the requester with
        # the most connections loses one, unless it is in the newcomer's network.
        connections = self._all_connections()
        silent = [known for known in connections if known.is_reader and not known.is_initiator]
        if len(silent) < self.limits.max_silent and len(connections) < self.limits.max_connections:
            return True
        if silent:
            self._choose_to_break(silent, newcomer).abort("others need the room")
            return True
        largest = largest_requester(Counter(known.requester for known in connections), newcomer)
        chosen = [
            known
            for known in connections
            if known.requester == largest and largest.address_prefix != newcomer.address_prefix
        ]
        for known in chosen[:1]:
            known.abort("others need the room")
        return bool(chosen)

    @staticmethod
    def _choose_to_break(silent: Sequence[Connection], newcomer: Requester) -> Connection:
        largest = largest_requester(Counter(known.requester for known in silent), newcomer)
        return next((known for known in silent if known.requester == largest), silent[0])

    async def _await_hello(self, connection: Connection) -> None:
        with contextlib.suppress(AgoraError):
            await connection.start()

    def _raise_if_refused(self, peer: PeerId, *, by_id: bool = True) -> None:
        if by_id and (refusal := self.gate.find_refusal(peer)):
            raise refusal
        if (seconds := self._suspended_s(peer)) > 0:
            raise NotAdmitted(f"{peer} broke the rules too often; it is suspended for {seconds:.0f} s more")

    def _add_connection(self, stream: FrameStream, peer: PeerId, path: str, *, is_initiator: bool) -> Connection:
        connection = Connection(self._services, stream, peer, is_initiator=is_initiator, path=path)
        self._connections.setdefault(peer, []).append(connection)
        return connection

    # --- what connections tell the network

    def _on_ready(self, connection: Connection, addresses: Sequence[str]) -> None:
        if connection.is_reader:
            return
        self.address_book.learn_announced(connection.peer, addresses)
        self._record_handshake(connection.peer)
        self._dialler.on_peer_connected(connection.peer)
        self.spawn(connection.ping())
        if self._on_handshake is not None:
            self._on_handshake(connection.peer)

    def _on_gone(self, connection: Connection) -> None:
        self._past_bytes[0] += connection.stream.bytes_in
        self._past_bytes[1] += connection.stream.bytes_out
        if connection.peer in self._handshaken:
            self._record_handshake(connection.peer)
        self._connections[connection.peer].remove(connection)
        if not self._connections[connection.peer]:
            del self._connections[connection.peer]

    def _record_handshake(self, peer: PeerId) -> None:
        self._handshaken[peer] = loop_time()
        self._handshaken.move_to_end(peer)
        if len(self._handshaken) > MAX_PEERS:
            self._handshaken.popitem(last=False)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task, which is cancelled when the network closes, and returns the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start_calls(self, peer: PeerId, requests: Iterable[Request], within_s: float) -> None:
        """Starts to make calls one after the other, each within `within_s` seconds; the first failure ends them.

        It is meant for news that the peer also gets in another way.
        """
        self.spawn(self._make_calls(peer, requests, within_s))

    async def _make_calls(self, peer: PeerId, requests: Iterable[Request], within_s: float) -> None:
        with contextlib.suppress(AgoraError):
            for request in requests:
                await self.call(peer, request, deadline=loop_time() + within_s)

    def _all_connections(self) -> list[Connection]:
        return [connection for connections in self._connections.values() for connection in connections]

    def _end_if_refused(self, connection: Connection) -> None:
        if (role := connection.role) is None:
            return
        if refusal := self.gate.find_new_refusal(connection.peer, connection.proof, connection.software, role):
            connection.close(refusal, str(refusal))
        elif self._suspended_s(connection.peer) > 0:
            connection.abort("the peer is suspended")

    async def connect_member(self, peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None) -> bool:
        """Connects to `peer` unless it is connected; returns whether it is a usable member now.

        False if it cannot be reached, or is refused or suspended, connected or not. reconnect: first aborts all
        connections to `peer`, for a caller which knows that `peer` has none of them any more. named_by: a connected
        peer that is asked where `peer` can be dialled, if that fails at the known addresses.
        """
        for connection in list(self._connections.get(peer, ())) if reconnect else ():
            connection.abort("the peer does not know of the connection")
        with contextlib.suppress(AgoraError):
            self._raise_if_refused(peer)
            return (self.connection_to(peer) or await self._dial_or_ask(peer, named_by)).is_usable
        return False

    async def _dial_or_ask(self, peer: PeerId, named_by: PeerId | None) -> Connection:
        try:
            return await self._dialler.dial(peer)
        except ConnectionBroken:
            known = self.address_book.addresses(peer)
            if named_by is None or self.connection_to(named_by) is None:
                raise
            reply = await self.call(named_by, GetAddresses(peer), deadline=loop_time() + ADDRESSES_TIMEOUT_S)
            if isinstance(reply.message, PeerAddresses):
                self.address_book.learn_announced(peer, reply.message.addresses)
            if self.address_book.addresses(peer) == known:
                raise
        return await self._dialler.dial(peer)

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the known multiaddrs of a member that has sent HELLO, to pass on to other members; () for others."""
        return self.address_book.addresses(peer) if self.gate.is_admitted_member(peer) else ()

    def members(self) -> list[PeerId]:
        """Returns the members to which there is a usable connection."""
        return [peer for peer in self._connections if self.connection_to(peer) is not None]

    def end_refused(self) -> None:
        """Ends now, not at the next tick, the connections to peers that are not admitted any more or are suspended."""
        for connection in self._all_connections():
            self._end_if_refused(connection)

    async def check_connections(self) -> None:
        """Until cancelled, pings silent connections, ends dead ones and those to peers that are no longer admitted."""
        while True:
            await asyncio.sleep(min(TICK_INTERVAL_S, self.limits.ping_after_s / 4))
            for connection in self._all_connections():
                self._end_if_refused(connection)
                connection.tick(loop_time())
