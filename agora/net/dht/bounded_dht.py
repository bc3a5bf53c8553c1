"""Bounds what the DHT's messages can cost: requests before they are parsed, replies before hivemind sees them.

BoundedP2P stands between hivemind's DHTNode and p2pd. The table has its bounds; docs/understand/limits.md has those of
all parts.

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
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack
from agora_protocol.errors import Busy, NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_RECORD_BYTES
from agora_protocol.packing import pack
from agora_protocol.records import Record
from google.protobuf.message import DecodeError

from agora.core.clock import loop_time
from agora.core.fair_shares import RateLimiter
from agora.net.dht.stored_records import SignedRecords
from agora.net.p2pd.hivemind_shim import DHTID, DHTRecord, P2PContext, P2PHandlerError, PeerID, dht_pb2

HELLO_TIMEOUT_S: Final = 2.0  # seconds that exchanging HELLOs may take before a call of the DHT
MAX_REQUEST_BYTES: Final = 262_144
MAX_ANSWER_BYTES: Final = 4_000_000  # p2pd carries no message of more than 4 MiB
MAX_NODES: Final = 20  # nodes that a reply may name for each key: hivemind's bucket size
MAX_PEER_ID_BYTES: Final = 64  # bytes of a peer id in a reply; an Ed25519 key's has 38
MAX_NAMED: Final = 4096  # maximum number of nodes for which the peer that named them last is remembered
SHARDS_PER_STAGE: Final = 3  # A peer publishes a record under at most this many keys for each stage
MIN_KEYS: Final = 64  # keys that a find may have in a run of fewer stages
TOKENS_PER_S: Final = 200.0
# A peer may spend TOKENS_PER_S + TOKENS_PER_STAGE * stages tokens a second: a small run is read whole, key by key.
TOKENS_PER_STAGE: Final = 8.0
BURST_S: Final = 10.0  # A bucket holds the tokens of this many seconds
RECORD_PRICE: Final = 4.0  # tokens for each record to store; a key, and a kilobyte, cost 1
LOOKUP_PRICE: Final = 1 / 8  # tokens for each key that this node computes to find the shard of a new key
# This many new signatures in one peer's replies are verified: per second, and in one burst after a pause.
SIGNATURES_PER_S, SIGNATURES_BURST = 250.0, 4096.0
VERIFIED_AT_ONCE: Final = 16  # number of signatures after which other tasks on the event loop have their turn
RPC_TIMEOUT_S: Final = 2.0  # seconds in which a node must answer a call once HELLO was exchanged
RETRY_MS: Final = 2000  # milliseconds after which a node that was refused as Busy may ask again
_DICTIONARY: Final = 0x50  # the msgpack extension type in which hivemind packs a dictionary of records
_PACKED_NONE: Final = pack(None)
# The error text for a caller without HELLO, for example one that was connected before this node's restart.
SAY_HELLO: Final = "say HELLO first"


# Exchanges HELLOs with a peer if there is no connection; returns whether the peer is a connected member of the run now.
# reconnect=True: first aborts a connection that the peer does not know any more. named_by: the node that named the
# peer; it is asked for other addresses if the peer cannot be dialled at the known ones.
Greet = Callable[..., Awaitable[bool]]


def _allow(_peer: PeerId) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtRules:
    """Between which peers the DHT's calls pass, in and out, and whose records are kept; by default between all.

    may_call: whether a peer may be dialled and called. is_admitted_member: whether a peer has exchanged HELLO and is a
    member, so that its calls are answered. is_verified: whether a caller may enter the routing table. is_from_member:
    whether the author of a verified record is a member, whichever node sent it. greet: None where no HELLO is needed.
    report_protocol_error: called with a peer and the ProtocolError of what it sent.
    """

    may_call: Callable[[PeerId], bool] = _allow
    is_admitted_member: Callable[[PeerId], bool] = _allow
    is_verified: Callable[[PeerId], bool] = _allow
    is_from_member: Callable[[Record], bool] = lambda _record: True
    greet: Greet | None = None
    report_protocol_error: Callable[[PeerId, ProtocolError], None] | None = None

    async def greet_member(self, peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None) -> None:
        """Exchanges HELLOs with a peer before the DHT calls that peer; see Greet.

        Raises NotAdmitted when the peer, connected or not, is not a member of the run, or not greeted within
        HELLO_TIMEOUT_S.
        """
        if self.greet is None:
            return
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                is_member = await self.greet(peer, reconnect=reconnect, named_by=named_by)
        except TimeoutError:
            is_member = False
        if not is_member:
            raise NotAdmitted(f"{peer} is not known as a member of the run")


class ReplyEntry(NamedTuple):
    """One record in a reply: its subkey (the peer's id), its packed bytes, its expiry in unix seconds. Not verified."""

    subkey: object
    packed: bytes
    expires_unix: float


def node_id_of(peer: Any) -> Any:
    """Returns the DHT node id of a peer (hivemind's PeerID): the SHA-1 of the peer's id, so no peer can choose it."""
    return DHTID.generate(peer.to_bytes())


class BoundedP2P:
    """Stands between hivemind's DHTNode and p2pd, in place of hivemind's P2P; bounds requests, calls and replies.

    Counts in `validator.refused` what was refused, by reason.
    """

    def __init__(
        self,
        p2p: Any,
        validator: SignedRecords,
        stages: int,
        rules: DhtRules,
        *,
        stored_bytes: Callable[[Any], int] = lambda _key: 0,
    ) -> None:
        """stored_bytes: returns the bytes of the values that this node stores under a key."""
        self._p2p = p2p
        self._rules = rules
        self._validator = validator
        self.max_keys = max(MIN_KEYS, stages)
        rate = TOKENS_PER_S + TOKENS_PER_STAGE * stages
        self._work = RateLimiter(rate, rate * BURST_S)
        self._signatures = RateLimiter(SIGNATURES_PER_S, SIGNATURES_BURST)
        self._named_by: OrderedDict[PeerId, PeerId] = OrderedDict()  # by node, the peer that named it last
        self._stored_bytes = stored_bytes

    @property
    def peer_id(self) -> Any:
        return self._p2p.peer_id

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        """Has p2pd refuse other nodes' calls of `name` from now on."""
        await self._p2p.remove_protobuf_handler(name)

    # --- what others ask

    async def add_protobuf_handler(
        self, name: str, handler: Callable[[Any, Any], Awaitable[Any]], input_protobuf_type: Any, **_: Any
    ) -> None:
        """Has p2pd pass members' calls of `name` within the bounds to `handler` from now on, and refuse other calls.

        `handler` receives a store with the caller's own valid records only, and no node id that is not the caller's.
        """
        kind = name.rpartition(".")[2]

        async def answer(raw: bytes, remote: Any) -> bytes:
            # p2pd sends the caller the text of any error raised here.
            peer = PeerId(str(remote))
            if not self._rules.is_admitted_member(peer):
                raise NotAdmitted(SAY_HELLO)
            try:
                request = self._parse_and_charge(kind, raw, peer, input_protobuf_type)
            except ProtocolError as error:
                self._count_and_report(peer, error)
                raise
            self._clear_foreign_node_id(request, remote, peer)
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
        if len(raw) > MAX_REQUEST_BYTES:
            raise ProtocolError("too-large", f"A DHT request of {len(raw)} bytes; {MAX_REQUEST_BYTES} are the most.")
        self._charge(peer, 1.0 + len(raw) / 1024)  # before it is parsed: parsing is what costs
        request = _parse(message_type, raw)
        if kind == "rpc_find":
            self._check_find(request, peer)
        elif kind == "rpc_store":
            self._check_store(request, peer)
        return request

    def _check_find(self, request: Any, peer: PeerId) -> None:
        if len(request.keys) > self.max_keys or any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise ProtocolError("too-large", f"A find of {len(request.keys)} keys; {self.max_keys} are the most.")
        self._charge(peer, float(len(request.keys)))
        nbytes = sum(self._stored_bytes(DHTID.from_bytes(key)) for key in request.keys)
        if nbytes > MAX_ANSWER_BYTES:
            raise Busy(f"the answer would have {nbytes} bytes; ask for fewer keys at once", RETRY_MS)
        self._charge(peer, nbytes / 16_384)

    def _check_store(self, request: Any, peer: PeerId) -> None:
        count = len(request.keys)
        max_records = self.max_keys * SHARDS_PER_STAGE
        lists = request.subkeys, request.values, request.expiration_time, request.in_cache
        if count > max_records or any(len(values) != count for values in lists):
            raise ProtocolError("too-large", f"A store of {count} records, or one whose lists are not as long.")
        if any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise ProtocolError("bad-record", "A key of a store is not a hash.")
        self._charge(peer, RECORD_PRICE * count)

    def _charge(self, peer: PeerId, price: float) -> None:
        if not self._work.take(peer, loop_time(), price):
            self._validator.refused["busy"] += 1
            raise Busy("you ask this node of the DHT for more than your share of its capacity", RETRY_MS)

    def _clear_foreign_node_id(self, request: Any, remote: Any, peer: PeerId) -> None:
        if request.peer.node_id and (
            request.peer.node_id != node_id_of(remote).to_bytes() or not self._rules.is_verified(peer)
        ):
            request.ClearField("peer")

    async def _keep_own_records(self, request: Any, peer: PeerId) -> list[bool]:
        own_subkey = pack(str(peer))
        verdicts = list[bool]()
        entries = list(
            zip(request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache, strict=True)
        )
        for number, (key, subkey, value, expires_unix, in_cache) in enumerate(entries):
            is_valid = self._can_pay_lookups(peer, key, value) and self._validator.validate(
                DHTRecord(key, subkey or _PACKED_NONE, value, expires_unix)
            )
            is_own = subkey == own_subkey and not in_cache  # a peer stores nothing for others
            if is_valid and not is_own:
                self._validator.refused["wrong-key"] += 1
            verdicts.append(is_valid and is_own)
            if number % VERIFIED_AT_ONCE == VERIFIED_AT_ONCE - 1:
                await asyncio.sleep(0)
        kept = [entry for entry, is_kept in zip(entries, verdicts, strict=True) if is_kept]
        for name in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
            request.ClearField(name)
        for key, subkey, value, expires_unix, in_cache in kept:
            request.keys.append(key)
            request.subkeys.append(subkey)
            request.values.append(value)
            request.expiration_time.append(expires_unix)
            request.in_cache.append(in_cache)
        return verdicts

    def _can_pay_lookups(self, peer: PeerId, key: bytes, value: bytes) -> bool:
        price = LOOKUP_PRICE * self._validator.count_lookups(key, value)
        if price and not self._work.take(peer, loop_time(), price):
            self._validator.refused["busy"] += 1
            return False
        return True

    # --- what others reply

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any:
        """Calls another node after HELLO; returns its reply, without a foreign node id or a find's invalid contents.

        Raises NotAdmitted for a node that is not a member of the run. Raises ProtocolError, after it is counted and
        reported, for a malformed reply, and for a find's reply that exceeds a bound. Raises TimeoutError when no reply
        comes in RPC_TIMEOUT_S, or hivemind's errors when the call fails.
        """
        raw = await self._call_greeted(peer_id, name, input.SerializeToString())
        try:
            response = _parse(output_protobuf_type, raw)
            if name.endswith("rpc_find"):
                await self._screen(response, input.keys, PeerId(str(peer_id)))
        except ProtocolError as error:
            self._count_and_report(PeerId(str(peer_id)), error)
            raise
        if response.peer.node_id and response.peer.node_id != node_id_of(peer_id).to_bytes():
            response.ClearField("peer")
        return response

    def _count_and_report(self, peer: PeerId, error: ProtocolError) -> None:
        self._validator.refused[error.code] += 1
        if self._rules.report_protocol_error is not None:
            self._rules.report_protocol_error(peer, error)

    async def _call_greeted(self, peer_id: Any, name: str, request: bytes) -> bytes:
        peer = PeerId(str(peer_id))
        await self._rules.greet_member(peer, named_by=self._named_by.get(peer))
        try:
            return await self._call_once(peer_id, name, request)
        except P2PHandlerError as error:
            if SAY_HELLO not in str(error):
                raise
            # The node was restarted, and does not know this connection any more.
            await self._rules.greet_member(peer, reconnect=True)
            return await self._call_once(peer_id, name, request)

    async def _call_once(self, peer_id: Any, name: str, request: bytes) -> bytes:
        async with asyncio.timeout(RPC_TIMEOUT_S):
            return bytes(await self._p2p._client.call_unary_handler(peer_id, name, request))

    async def _screen(self, response: Any, keys: Any, peer: PeerId) -> None:
        if len(response.results) != len(keys):
            raise ProtocolError("bad-message", f"{len(response.results)} results for {len(keys)} keys.")
        for key, result in zip(keys, response.results, strict=True):
            _screen_nodes(result, node_id_of(self.peer_id).to_bytes())
            self._record_named(result, peer)
            if result.type == dht_pb2.FOUND_DICTIONARY:
                await self._screen_records(key, result, peer)
            elif result.type != dht_pb2.NOT_FOUND:
                result.type = dht_pb2.NOT_FOUND  # every record has a subkey

    def _record_named(self, result: Any, by: PeerId) -> None:
        for raw in result.nearest_peer_ids:
            named = PeerId(str(PeerID(bytes(raw))))
            self._named_by[named] = by
            self._named_by.move_to_end(named)
        while len(self._named_by) > MAX_NAMED:
            self._named_by.popitem(last=False)

    async def _screen_records(self, key: bytes, result: Any, peer: PeerId) -> None:
        entries = read_dictionary(result.value)
        kept = list[ReplyEntry]()
        for number, entry in enumerate(entries):
            record = DHTRecord(key, pack(entry.subkey), entry.packed, entry.expires_unix)
            # A record whose signature is known to be valid costs nothing.
            price = 1.0 + LOOKUP_PRICE * self._validator.count_lookups(key, entry.packed)
            is_affordable = self._validator.is_known(record) or self._signatures.take(peer, loop_time(), price)
            if is_affordable and self._validator.validate(record):
                kept.append(entry)
            if number % VERIFIED_AT_ONCE == VERIFIED_AT_ONCE - 1:
                await asyncio.sleep(0)
        if not kept:
            result.type, result.value = dht_pb2.NOT_FOUND, b""
        elif len(kept) < len(entries):
            result.value = pack_dictionary(kept)


def _parse(message_type: Any, raw: bytes) -> Any:
    try:
        return message_type.FromString(raw)
    except DecodeError as error:
        raise ProtocolError("bad-record", f"The bytes of a DHT {message_type.__name__} are malformed.") from error


def _screen_nodes(result: Any, own_id: bytes) -> None:
    count = len(result.nearest_node_ids)
    if count > MAX_NODES or len(result.nearest_peer_ids) != count:
        raise ProtocolError("too-large", f"{count} nodes for one key; {MAX_NODES} are the most.")
    pairs = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True)
    short = [(node, bytes(peer)) for node, peer in pairs if node != own_id and len(peer) <= MAX_PEER_ID_BYTES]
    genuine = [(node, peer) for node, peer in short if node == DHTID.generate(peer).to_bytes()]
    if len(genuine) < count:
        del result.nearest_node_ids[:], result.nearest_peer_ids[:]
        for node, peer in genuine:
            result.nearest_node_ids.append(node)
            result.nearest_peer_ids.append(peer)


def read_dictionary(value: bytes) -> list[ReplyEntry]:
    """Returns the records under one key in a find's result, as hivemind packs them; none is verified or unpacked.

    Raises ProtocolError for malformed bytes, an oversized record, or more than MAX_KEY_RECORDS.
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
