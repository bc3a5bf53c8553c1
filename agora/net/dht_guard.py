"""Lets calls of the DHT through, in and out, only between admitted peers, and keeps records of others out.

Knows: hivemind's protocol object, its messages and handlers. Must not know: records' fields, who is admitted (a
DhtGuard says it). A refused caller gets an error, and learns neither records nor neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from agora_protocol.errors import NotAdmitted
from agora_protocol.ids import PeerId
from agora_protocol.packing import pack
from agora_protocol.records import Record

from agora.net.hive import P2PHandlerError, dht_pb2

GREET_S: Final = 2.0
"""Seconds that exchanging HELLOs may take before a call of the DHT."""
SAY_HELLO: Final = "say HELLO first"
"""The error text for a caller without HELLO, for example one that was connected before this node's restart."""


class DhtGuard(Protocol):
    """Protocol: decides between which peers the DHT's calls may pass, and whose records may be kept."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns whether `peer` may be dialled."""

    def is_greeted(self, peer: PeerId) -> bool:
        """Returns whether HELLO was exchanged with `peer`, and it is a member of the run."""

    async def greet(self, peer: PeerId, *, anew: bool = False) -> bool:
        """Exchanges HELLOs with `peer` if there is no connection; returns whether it is a member of the run.

        anew: first breaks off a connection that the peer does not know of any more.
        """

    def may_store(self, caller: PeerId, publisher: PeerId) -> bool:
        """Returns whether `caller` may store a record of `publisher` here."""

    def admits_record(self, record: Record) -> bool:
        """Returns whether a record, already verified, is of a member of the run, whichever node it was read from."""


class OpenGuard:
    """A DhtGuard that lets everybody do everything, for tests of the directory alone."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    def is_greeted(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    async def greet(self, peer: PeerId, *, anew: bool = False) -> bool:
        """Returns True."""
        return True

    def may_store(self, caller: PeerId, publisher: PeerId) -> bool:
        """Returns True."""
        return True

    def admits_record(self, record: Record) -> bool:
        """Returns True."""
        return True


class GuardedDhtProtocol:
    """Guards hivemind's DHTProtocol: its `rpc_...` methods answer other nodes, if the guard lets them through.

    protocol: of a node that was created in client mode, so that it answers nobody before `open`.
    """

    def __init__(self, protocol: Any, guard: DhtGuard) -> None:
        self._protocol = protocol
        self._guard = guard

    async def open(self) -> None:
        """From now on, answers the nodes that the guard lets through, and has this node call only such nodes."""
        protocol = self._protocol
        make_stub = protocol.get_stub
        protocol.get_stub = lambda peer: _GuardedStub(self._greet, make_stub(peer), PeerId(str(peer)))
        protocol.client_mode = False
        protocol.node_info = dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
        await protocol.add_p2p_handlers(protocol.p2p, self)

    async def rpc_ping(self, request: Any, context: Any) -> Any:
        """Answers a ping. Raises NotAdmitted, whose text the caller gets."""
        self._require_greeted(context)
        return await self._protocol.rpc_ping(request, context)

    async def rpc_find(self, request: Any, context: Any) -> Any:
        """Answers a search. Raises NotAdmitted, whose text the caller gets."""
        self._require_greeted(context)
        return await self._protocol.rpc_find(request, context)

    async def rpc_store(self, request: Any, context: Any) -> Any:
        """Stores the values that the caller may store; answers for each whether it was. Raises NotAdmitted."""
        caller = self._require_greeted(context)
        may_store = [self._may_store(caller, subkey) for subkey in request.subkeys]
        allowed = dht_pb2.StoreRequest(peer=request.peer)
        for field in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
            kept = [value for value, fits in zip(getattr(request, field), may_store, strict=True) if fits]
            getattr(allowed, field).extend(kept)
        response = await self._protocol.rpc_store(allowed, context)
        stored = iter(list(response.store_ok))
        del response.store_ok[:]
        response.store_ok.extend(next(stored) if is_allowed else False for is_allowed in may_store)
        return response

    def _require_greeted(self, context: Any) -> PeerId:
        """Returns the caller. Raises NotAdmitted unless HELLO was exchanged with it."""
        caller = PeerId(str(context.remote_id))
        if not self._guard.is_greeted(caller):
            raise NotAdmitted(SAY_HELLO)
        return caller

    def _may_store(self, caller: PeerId, packed_subkey: bytes) -> bool:
        """Returns whether the caller may store a value under this subkey, which should name the publisher.

        The guard is asked about the caller as publisher, or about "" for any other subkey.
        """
        own = packed_subkey == pack(str(caller))
        return self._guard.may_store(caller, caller) if own else self._guard.may_store(caller, PeerId(""))

    async def _greet(self, peer: PeerId, anew: bool) -> None:
        """Exchanges HELLOs with a node before it is called. Raises NotAdmitted when it is no member of the run."""
        try:
            async with asyncio.timeout(GREET_S):
                is_member = await self._guard.greet(peer, anew=anew)
        except TimeoutError:
            is_member = False
        if not is_member:
            raise NotAdmitted(f"{peer} is not known as a member of the run")


class _GuardedStub:
    """Wraps hivemind's stub for one other node: each call first waits until HELLO was exchanged with that node.

    A node that answers SAY_HELLO does not know this peer's connection any more: then HELLO is exchanged again, once.
    """

    def __init__(self, greet: Callable[[PeerId, bool], Awaitable[None]], stub: Any, peer: PeerId) -> None:
        self._greet = greet
        self._stub = stub
        self._peer = peer

    async def rpc_ping(self, request: Any, timeout: float | None = None) -> Any:
        """Pings the node. Raises NotAdmitted, or hivemind's errors."""
        return await self._call(self._stub.rpc_ping, request, timeout)

    async def rpc_store(self, request: Any, timeout: float | None = None) -> Any:
        """Asks the node to store values. Raises NotAdmitted, or hivemind's errors."""
        return await self._call(self._stub.rpc_store, request, timeout)

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        """Asks the node for values. Raises NotAdmitted, or hivemind's errors."""
        return await self._call(self._stub.rpc_find, request, timeout)

    async def _call(self, call: Callable[..., Awaitable[Any]], request: Any, timeout: float | None) -> Any:
        """Makes a call of the stub after HELLO, and once more after a new HELLO if the node answers SAY_HELLO."""
        await self._greet(self._peer, False)
        try:
            return await call(request, timeout=timeout)
        except P2PHandlerError as error:
            if SAY_HELLO not in str(error):
                raise
            await self._greet(self._peer, True)
            return await call(request, timeout=timeout)
