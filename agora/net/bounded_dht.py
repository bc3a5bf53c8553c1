"""Bounds what the DHT's messages can cost: requests before they are parsed, replies before hivemind sees them.

Knows: hivemind's DHT messages and how its node sends them. Must not know: what records mean, or who is a member (a
DhtGuard says it). It stands between hivemind's DHTNode and p2pd; docs/limits.md has the bounds as a table.

| of others | bound |
|---|---|
| calls, in and out | only between peers that have exchanged HELLO as members of the run |
| requests | MAX_REQUEST_BYTES each; a price in tokens for bytes, keys and records, from the caller's own bucket |
| keys in a find | `max_keys` |
| records in a store | those of the caller itself, at most `max_keys` times SHARDS_PER_STAGE |
| answers | refused before they are made when the stored values alone exceed MAX_ANSWER_BYTES |
| nodes in a reply | MAX_NODES for each key, each with the node id that its peer id implies |
| records in a reply | MAX_KEY_RECORDS for each key; unknown signatures are verified within a budget, a few at a time |
| node ids of a peer | one, the hash of its peer id |
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple

import msgpack
from agora_protocol.errors import Busy, NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_RECORD_BYTES
from agora_protocol.packing import pack
from google.protobuf.message import DecodeError

from agora.clock import loop_time
from agora.net.dht_guard import SAY_HELLO, DhtGuard, greet_member
from agora.net.fair_share import WorkBuckets
from agora.net.hive import DHTID, DHTRecord, P2PContext, P2PHandlerError, PeerID, dht_pb2
from agora.net.stored_records import SignedRecords

MAX_REQUEST_BYTES: Final = 262_144
MAX_ANSWER_BYTES: Final = 4_000_000
"""p2pd carries no message of more than 4 MiB."""
MAX_NODES: Final = 20
"""Nodes that a reply may name for each key: hivemind's bucket size."""
MAX_PEER_ID_BYTES: Final = 64
"""Bytes of a peer id in a reply; an Ed25519 key's has 38."""
MAX_NAMED: Final = 4096
"""Nodes of which it is remembered who named them last, at most."""
SHARDS_PER_STAGE: Final = 3
"""A peer publishes a record under at most this many keys for each stage."""
MIN_KEYS: Final = 64
"""Keys that a find may have in a run of fewer stages."""
TOKENS_PER_S: Final = 200.0
TOKENS_PER_STAGE: Final = 8.0
"""A peer may spend TOKENS_PER_S + TOKENS_PER_STAGE * stages tokens a second: a small run is read whole, key by key."""
BURST_S: Final = 10.0
"""A bucket holds the tokens of this many seconds."""
RECORD_PRICE: Final = 4.0
"""Tokens for each record to store; a key, and a kilobyte, cost 1."""
SIGNATURES_PER_S, SIGNATURES_BURST = 250.0, 4096.0
"""New signatures in one peer's replies that are verified: this many a second, and this many at once after a pause."""
VERIFIED_AT_ONCE: Final = 16
"""Signatures that are verified before other tasks on the event loop have their turn."""
RPC_S: Final = 2.0
"""Seconds in which a node must answer a call once HELLO was exchanged."""
RETRY_MS: Final = 2000
"""Milliseconds after which a node that was refused as Busy may ask again."""
_DICTIONARY: Final = 0x50
"""The msgpack extension type in which hivemind packs a dictionary of records."""
_PACKED_NONE: Final = pack(None)


class ReplyEntry(NamedTuple):
    """One record in a reply: its subkey, its packed bytes, its expiry in unix seconds."""

    subkey: object
    packed: bytes
    expires_unix: float


def node_id_of(peer: Any) -> Any:
    """Returns the DHT node id of a peer (hivemind's PeerID): the SHA-1 of its id, so that nobody can choose one."""
    return DHTID.generate(peer.to_bytes())


class BoundedP2P:
    """Takes the place of hivemind's P2P in its DHTNode: registers handlers and makes calls by p2pd, within bounds.

    Counts in `validator.refused` what was refused, by reason. These functions may be set: `is_member`, whether a caller
    may enter the routing table; `report_violation`, which is told of what no honest peer sends; `stored_bytes`, the
    bytes of the values that this node stores under a key.
    """

    def __init__(self, p2p: Any, validator: SignedRecords, stages: int, guard: DhtGuard) -> None:
        """guard: says which peers are answered and called."""
        self._p2p = p2p
        self._guard = guard
        self._validator = validator
        self.max_keys = max(MIN_KEYS, stages)
        rate = TOKENS_PER_S + TOKENS_PER_STAGE * stages
        self._work = WorkBuckets(rate, rate * BURST_S)
        self._signatures = WorkBuckets(SIGNATURES_PER_S, SIGNATURES_BURST)
        self._named_by: OrderedDict[PeerId, PeerId] = OrderedDict()  # by node, the last one that named it
        self.stored_bytes: Callable[[Any], int] = lambda _key: 0
        self.is_member: Callable[[PeerId], bool] = lambda _peer: True
        self.report_violation: Callable[[PeerId, ProtocolError], None] = lambda _peer, _error: None

    @property
    def peer_id(self) -> Any:
        """This peer's id, as hivemind's PeerID."""
        return self._p2p.peer_id

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        """Stops answering other nodes' calls of `name`."""
        await self._p2p.remove_protobuf_handler(name)

    # --- what others ask

    async def add_protobuf_handler(
        self, name: str, handler: Callable[[Any, Any], Awaitable[Any]], input_protobuf_type: Any, **_: Any
    ) -> None:
        """From now on, answers members' calls of `name` by `handler`; refuses others, and those beyond the bounds."""
        kind = name.rpartition(".")[2]

        async def answer(raw: bytes, remote: Any) -> bytes:
            """Returns the response to one request; the text of an error that it raises is sent to the caller.

            Raises NotAdmitted for a node that has not said HELLO. A malformed request is counted and reported.
            """
            peer = PeerId(str(remote))
            if not self._guard.is_greeted(peer):
                raise NotAdmitted(SAY_HELLO)
            try:
                request = self._parse_and_charge(kind, raw, peer, input_protobuf_type)
            except ProtocolError as error:
                self._validator.refused[error.code] += 1
                self.report_violation(peer, error)
                raise
            self._bind_node_id(request, remote, peer)
            verdicts = await self._keep_own_records(request, peer) if kind == "rpc_store" else []
            response = await handler(request, P2PContext(name, self.peer_id, remote))
            if verdicts:
                stored = iter(response.store_ok)
                response = dht_pb2.StoreResponse(
                    store_ok=[is_kept and next(stored, False) for is_kept in verdicts], peer=response.peer
                )
            return bytes(response.SerializeToString())

        await self._p2p._client.add_unary_handler(name, answer)

    def _parse_and_charge(self, kind: str, raw: bytes, peer: PeerId, message_type: Any) -> Any:
        """Parses a request and charges its caller's bucket for its bytes, keys and records; returns the request.

        Raises ProtocolError for one that no honest peer makes, Busy when the bucket is too low.
        """
        if len(raw) > MAX_REQUEST_BYTES:
            raise ProtocolError("too-large", f"A DHT request of {len(raw)} bytes; {MAX_REQUEST_BYTES} are the most.")
        self._charge(peer, 1.0 + len(raw) / 1024)
        try:
            request = message_type.FromString(raw)
        except DecodeError as error:
            raise ProtocolError("bad-record", "A DHT request is malformed.") from error
        if kind == "rpc_find":
            self._check_find(request, peer)
        elif kind == "rpc_store":
            self._check_store(request, peer)
        return request

    def _check_find(self, request: Any, peer: PeerId) -> None:
        """Charges for a find's keys. Raises ProtocolError for too many, Busy when the answer would be too large."""
        if len(request.keys) > self.max_keys or any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise ProtocolError("too-large", f"A find of {len(request.keys)} keys; {self.max_keys} are the most.")
        self._charge(peer, float(len(request.keys)))
        nbytes = sum(self.stored_bytes(DHTID.from_bytes(key)) for key in request.keys)
        if nbytes > MAX_ANSWER_BYTES:
            raise Busy(f"the answer would have {nbytes} bytes; ask for fewer keys at once", RETRY_MS)
        self._charge(peer, nbytes / 16_384)

    def _check_store(self, request: Any, peer: PeerId) -> None:
        """Charges for a store's records. Raises ProtocolError for too many of them, or lists of unequal length."""
        count, most = len(request.keys), self.max_keys * SHARDS_PER_STAGE
        lists = request.subkeys, request.values, request.expiration_time, request.in_cache
        if count > most or any(len(others) != count for others in lists):
            raise ProtocolError("too-large", f"A store of {count} records, or one whose lists are not as long.")
        if any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise ProtocolError("bad-record", "A key of a store is not a hash.")
        self._charge(peer, RECORD_PRICE * count)

    def _charge(self, peer: PeerId, price: float) -> None:
        """Takes `price` tokens out of the peer's bucket. Raises Busy, and counts it, when the bucket holds fewer."""
        if not self._work.take(peer, loop_time(), price):
            self._validator.refused["busy"] += 1
            raise Busy("you ask this node of the DHT for more than its part for each peer", RETRY_MS)

    def _bind_node_id(self, request: Any, remote: Any, peer: PeerId) -> None:
        """Clears the request's node id unless it is the sender's own and the sender may enter the routing table."""
        if request.peer.node_id and (request.peer.node_id != node_id_of(remote).to_bytes() or not self.is_member(peer)):
            request.ClearField("peer")

    async def _keep_own_records(self, request: Any, peer: PeerId) -> list[bool]:
        """Removes from a store all records but the caller's own valid ones; returns for each whether it stays.

        Valid records of others are counted as refused, with the code wrong-key.
        """
        subkey, verdicts = pack(str(peer)), list[bool]()
        entries = list(
            zip(request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache, strict=True)
        )
        for number, (key, tag, value, expires_unix, in_cache) in enumerate(entries):
            is_valid = self._validator.validate(DHTRecord(key, tag or _PACKED_NONE, value, expires_unix))
            is_own = tag == subkey and not in_cache
            if is_valid and not is_own:
                self._validator.refused["wrong-key"] += 1
            verdicts.append(is_valid and is_own)
            if number % VERIFIED_AT_ONCE == VERIFIED_AT_ONCE - 1:
                await asyncio.sleep(0)
        kept = [entry for entry, is_kept in zip(entries, verdicts, strict=True) if is_kept]
        for name in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
            request.ClearField(name)
        for key, tag, value, expires_unix, in_cache in kept:
            request.keys.append(key)
            request.subkeys.append(tag)
            request.values.append(value)
            request.expiration_time.append(expires_unix)
            request.in_cache.append(in_cache)
        return verdicts

    # --- what others reply

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any:
        """Calls another node after HELLO, and returns its reply without what exceeds the bounds or is not valid.

        Raises NotAdmitted for one that is not a member of the run, ProtocolError for a reply that no honest node sends,
        and reports it, TimeoutError when none comes in RPC_S, or hivemind's errors when the call fails.
        """
        raw = await self._call_greeted(peer_id, name, input.SerializeToString())
        response = output_protobuf_type.FromString(raw)
        if response.peer.node_id and response.peer.node_id != node_id_of(peer_id).to_bytes():
            response.ClearField("peer")
        if name.endswith("rpc_find"):
            try:
                await self._screen(response, input.keys, PeerId(str(peer_id)))
            except ProtocolError as error:
                self._validator.refused[error.code] += 1
                self.report_violation(PeerId(str(peer_id)), error)
                raise
        return response

    async def _call_greeted(self, peer_id: Any, name: str, request: bytes) -> bytes:
        """Exchanges HELLOs with a node, calls it, and returns its reply.

        One that answers SAY_HELLO does not know this peer's connection any more: HELLO is exchanged again, once.
        """
        peer = PeerId(str(peer_id))
        await greet_member(self._guard, peer, named_by=self._named_by.get(peer))
        try:
            return await self._call_once(peer_id, name, request)
        except P2PHandlerError as error:
            if SAY_HELLO not in str(error):
                raise
            await greet_member(self._guard, peer, anew=True)
            return await self._call_once(peer_id, name, request)

    async def _call_once(self, peer_id: Any, name: str, request: bytes) -> bytes:
        """Returns a node's reply to one request. Raises TimeoutError after RPC_S, or hivemind's errors."""
        async with asyncio.timeout(RPC_S):
            return bytes(await self._p2p._client.call_unary_handler(peer_id, name, request))

    async def _screen(self, response: Any, keys: Any, peer: PeerId) -> None:
        """Removes from a find's reply what is not valid.

        Raises ProtocolError if it exceeds a bound of the table above.
        """
        if len(response.results) != len(keys):
            raise ProtocolError("bad-message", f"{len(response.results)} results for {len(keys)} keys.")
        for key, result in zip(keys, response.results, strict=True):
            _screen_nodes(result, node_id_of(self.peer_id).to_bytes())
            self._note_named(result, peer)
            if result.type == dht_pb2.FOUND_DICTIONARY:
                await self._screen_records(key, result, peer)
            elif result.type != dht_pb2.NOT_FOUND:
                result.type = dht_pb2.NOT_FOUND  # every record has a subkey

    def _note_named(self, result: Any, by: PeerId) -> None:
        """Remembers that `by` has named the nodes of a result: it is asked where they can be dialled."""
        for raw in result.nearest_peer_ids:
            named = PeerId(str(PeerID(bytes(raw))))
            self._named_by[named] = by
            self._named_by.move_to_end(named)
        while len(self._named_by) > MAX_NAMED:
            self._named_by.popitem(last=False)

    async def _screen_records(self, key: bytes, result: Any, peer: PeerId) -> None:
        """Removes from a result the records that are not valid, and new ones whose signatures exceed the budget.

        A result without any left becomes NOT_FOUND.
        """
        entries, kept = read_dictionary(result.value), list[ReplyEntry]()
        for number, entry in enumerate(entries):
            record = DHTRecord(key, pack(entry.subkey), entry.packed, entry.expires_unix)
            is_affordable = self._validator.is_known(record) or self._signatures.take(peer, loop_time())
            if is_affordable and self._validator.validate(record):
                kept.append(entry)
            if number % VERIFIED_AT_ONCE == VERIFIED_AT_ONCE - 1:
                await asyncio.sleep(0)
        if not kept:
            result.type, result.value = dht_pb2.NOT_FOUND, b""
        elif len(kept) < len(entries):
            result.value = pack_dictionary(kept)


def _screen_nodes(result: Any, own_id: bytes) -> None:
    """Removes from a result this node (`own_id`), nodes whose id is not their peer id's hash, and overlong peer ids.

    hivemind's search takes for granted that nobody names this node. Raises ProtocolError for more than MAX_NODES.
    """
    count = len(result.nearest_node_ids)
    if count > MAX_NODES or len(result.nearest_peer_ids) != count:
        raise ProtocolError("too-large", f"{count} nodes for one key; {MAX_NODES} are the most.")
    pairs = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True)
    short = [(node, bytes(peer)) for node, peer in pairs if node != own_id and len(peer) <= MAX_PEER_ID_BYTES]
    true = [(node, peer) for node, peer in short if node == DHTID.generate(peer).to_bytes()]
    if len(true) < count:
        del result.nearest_node_ids[:], result.nearest_peer_ids[:]
        for node, peer in true:
            result.nearest_node_ids.append(node)
            result.nearest_peer_ids.append(peer)


def read_dictionary(value: bytes) -> list[ReplyEntry]:
    """Returns the records of one key as hivemind packs them. Raises ProtocolError for other bytes, or too many records.

    Nothing of their contents is read.
    """
    try:
        outer = msgpack.unpackb(value, ext_hook=msgpack.ExtType, max_array_len=0, max_map_len=0)
        if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
            raise ValueError
        _, _, items = msgpack.unpackb(
            outer.data, ext_hook=msgpack.ExtType, max_array_len=MAX_KEY_RECORDS, max_map_len=0, raw=False
        )
        return list(_entries(items))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError("bad-record", f"A find's result is not up to {MAX_KEY_RECORDS} records.") from error


def _entries(items: Any) -> Iterator[ReplyEntry]:
    """Yields the records of an unpacked dictionary. Raises ValueError if one has other fields, or is too large."""
    for subkey, packed, expires_unix in items:
        is_small = isinstance(packed, bytes) and len(packed) <= 2 * MAX_RECORD_BYTES
        if not (isinstance(subkey, str) and is_small and isinstance(expires_unix, float)):
            raise ValueError
        yield ReplyEntry(subkey, packed, expires_unix)


def pack_dictionary(entries: list[ReplyEntry]) -> bytes:
    """Returns the records of one key, at least one, packed as hivemind packs them."""
    latest = max(entry.expires_unix for entry in entries)
    data = msgpack.packb([None, latest, [list(entry) for entry in entries]], use_bin_type=True)
    return bytes(msgpack.packb(msgpack.ExtType(_DICTIONARY, data)))
