"""The DHT in which peers publish signed records and read those of other peers.

Knows: hivemind's DHTNode, its keys and its notion of time (unix seconds; a later expiry replaces an earlier one). Must
not know: what a record's fields mean. Every node that stores or returns a record validates it first, by the same rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from agora_protocol.addresses import peer_of_address
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, is_peer_id
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_RECORD_BYTES
from agora_protocol.packing import pack, unpack
from agora_protocol.records import NAMES, Record, open_record, read_expiry, record_key, seal_record

from agora.clock import loop_time
from agora.net.hive import DHTID, DHTLocalStorage, DHTNode, DHTRecord, DictionaryDHTValue, PeerID, RecordValidatorBase
from agora.net.host import Host
from agora.net.network_errors import ConnectionBroken

READ_S: Final = 3.0  # seconds that a read of the directory takes at most
PUBLISH_S: Final = 10.0  # seconds that storing a record takes at most
RPC_S: Final = 2.0  # a node that does not answer within so many seconds is passed over, and not asked for a while
MAX_PEERS_OF_STAGE: Final = 1024  # strangers can make ids at will, and hivemind sends a key's records in one message
MAX_VERIFIED: Final = 8192  # records whose signatures are remembered as verified, at most
SMALL_SWARM: Final = 20  # up to here every node knows every other: hivemind's buckets hold 20
NEXT_ANSWER_S: Final = 0.3  # once half of the nodes have answered, how long a read waits for the next answer
_PACKING_BYTES: Final = 16  # at least what msgpack adds around a record's bytes

_Entries = dict[str, tuple[bytes, float]]
"""By peer: the record as msgpack, and its expiry in unix seconds."""


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's validator of each record that a node is asked to store or gets from another.

    It accepts records of this run, signed by their peer, under their key, and counts the others by error code.
    """

    def __init__(self, run: RunId, stages: int) -> None:
        self.run = run
        self.refused: Counter[str] = Counter()  # by the code of the ProtocolError
        self._keys = {
            DHTID.generate(key).to_bytes(): key
            for name in NAMES
            for key in (record_key(run, name, stage) for stage in range(stages))
        }
        self._verified: OrderedDict[tuple[bytes, bytes, bytes, float], Record] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Called by hivemind: returns whether `open` accepts the record; adds its error code to `refused` if not."""
        try:
            self.open(record.key, record.subkey, record.value, record.expiration_time)
        except ProtocolError as error:
            self.refused[error.code] += 1
            return False
        return True

    def open(self, key_hash: bytes, packed_peer: bytes, packed: bytes, expires_unix: float) -> Record:
        """Decodes a DHT entry. Raises ProtocolError when its key, size, expiry or signature is not valid."""
        key = self._keys.get(key_hash)
        if key is None:
            raise ProtocolError("wrong-run", "The key is not that of any record of this run.")
        if len(packed) > MAX_RECORD_BYTES + _PACKING_BYTES:
            raise ProtocolError("too-large", f"A record of {len(packed)} bytes.")
        now_unix = time.time()
        known = self._verified.get((key_hash, packed_peer, packed, expires_unix))
        if known is not None and expires_unix > now_unix - CLOCK_TOLERANCE_S:
            return known
        data, peer = _unpacked(packed, bytes), _unpacked(packed_peer, str)
        if not is_peer_id(peer):
            raise ProtocolError("wrong-key", "The subkey is not a peer id.")
        if expires_unix != read_expiry(data):
            raise ProtocolError("bad-record", "The DHT's expiry is not the signed one.")
        # One that has just expired is accepted: an answer of many records must not be refused because of it.
        grace = min(now_unix, max(expires_unix - 1e-3, now_unix - CLOCK_TOLERANCE_S))
        record = open_record(data, run=self.run, key=key, subkey_peer=PeerId(peer), now_unix=grace)
        self._verified[key_hash, packed_peer, packed, expires_unix] = record
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)
        return record


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage, with at most MAX_PEERS_OF_STAGE peers a key; no record replaces a later-expiring one."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Stores one peer's record, or a dictionary of them by peer, and returns whether it did.

        subkey: the peer whose record `value` is; None for a dictionary. False for any other value, and for one that
        `store_subkey` or the DHT's storage does not take.
        """
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        if not isinstance(value, DictionaryDHTValue):
            return False
        return bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Stores one peer's record, unless its last one expires no earlier, or the key is full; returns whether."""
        present = self.get(key)
        known = present.value.get(subkey) if present is not None else None
        if known is not None and known.expiration_time >= expiration_time:
            return False
        if present is not None and known is None and len(present.value) >= MAX_PEERS_OF_STAGE:
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


class Directory:
    """This peer's node of the run's DHT: publishes signed records, reads other peers', and stores its part of them."""

    def __init__(self, host: Host, run: RunId, node: Any, validator: SignedRecords) -> None:
        self.refused = validator.refused  # how many records this node refused, by the code of their error
        self._run = run
        self._host = host
        self._node = node
        self._validator = validator
        self._last_expiry: dict[str, float] = {}
        self._asking: set[asyncio.Task[Any]] = set()

    @classmethod
    async def create(cls, host: Host, run: RunId, bootstrap: Sequence[str], *, stages: int) -> Directory:
        """Starts a node on `host` for a run of `stages` stages, and joins the DHT through the peers at `bootstrap`."""
        validator = SignedRecords(run, stages)
        node = await DHTNode.create(
            p2p=host.p2p,
            # Nothing is cached: a cached stage hides newcomers. No search reuses another one: it would wait for it.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            wait_timeout=RPC_S,
            blacklist_time=2.0,
            num_workers=8,
            record_validator=validator,
        )
        node.protocol.storage = _BoundedStorage()
        node.protocol.cache = _BoundedStorage(maxsize=1)
        directory = cls(host, run, node, validator)
        await directory.bootstrap(bootstrap)
        return directory

    @property
    def neighbours(self) -> int:
        """How many other nodes the routing table has; 0 means that this node is alone."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def bootstrap(self, addresses: Sequence[str], timeout_s: float = 10.0) -> None:
        """Joins the DHT through those peers at `addresses` that answer, if any. Raises InputError for a malformed one.

        timeout_s: for connecting, and again for looking up this peer's neighbours.
        """
        try:
            await self._host.connect(addresses, timeout_s)
        except ConnectionBroken:
            return
        ping = self._node.protocol.call_ping
        strangers = {peer_of_address(address) for address in addresses} - {self._host.peer}
        if any(await asyncio.gather(*(ping(PeerID.from_base58(peer)) for peer in strangers))):
            await _within(self._node.find_nearest_nodes([self._node.node_id]), timeout_s)

    async def publish(self, record: Record, identity: Identity, lifetime_s: float) -> bool:
        """Signs `record` and stores it under each stage of its span. Returns whether every stage has it somewhere.

        It replaces the peer's older records of its kind; one that should expire before these expires just after them,
        since the DHT keeps the later expiry. Raises ProtocolError for a record that is too large or of another peer.
        """
        fields: Any = record
        keys = [record_key(self._run, type(record), stage) for stage in fields.span.stages]
        latest = max(self._last_expiry.get(key, 0.0) for key in keys)
        expires_unix = max(time.time() + lifetime_s, latest + 0.001)
        sealed = seal_record(record, self._run, identity, expires_unix)
        self._last_expiry.update(dict.fromkeys(keys, expires_unix))
        storing = self._node.store_many(
            keys, [sealed] * len(keys), [expires_unix] * len(keys), subkeys=[str(fields.peer)] * len(keys)
        )
        stored = await _within(storing, PUBLISH_S)
        return stored is not None and all(stored.values())

    async def read_many(self, kind: type[Record], stages: Sequence[int]) -> dict[int, list[Record]]:
        """Returns by stage the valid records of one kind that came within READ_S, at most one of each peer."""
        keys = {stage: DHTID.generate(record_key(self._run, kind, stage)) for stage in stages}
        ask = self._ask_everyone if self.neighbours <= SMALL_SWARM else self._search
        found = await ask(list(keys.values()))
        return {stage: self._open_all(key, found.get(key, {})) for stage, key in keys.items()}

    async def _ask_everyone(self, keys: list[Any]) -> dict[Any, _Entries]:
        """Asks every known node, and the nodes that they name, for all keys at once, and merges the answers.

        Stops after READ_S, or when half have answered and no other answer comes for NEXT_ANSWER_S.
        """
        table, ends = self._node.protocol.routing_table.uid_to_peer_id, loop_time() + READ_S
        found: dict[Any, _Entries] = {key: {} for key in keys}
        for key in keys:
            _merge(found[key], self._node.protocol.storage.get(key))
        met, to_ask, asked = {self._node.node_id}, dict(table), 0
        running: set[asyncio.Task[Any]] = set()
        while to_ask or running:
            for peer in to_ask.values():
                running.add(task := asyncio.create_task(self._node._call_find_with_blacklist(peer, keys)))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            asked += len(to_ask)
            met |= to_ask.keys()
            patience = ends - loop_time() if len(running) > asked / 2 else min(NEXT_ANSWER_S, ends - loop_time())
            done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            to_ask = {}
            for task in done:
                for key, (entry, nearest) in (task.result() or {}).items():
                    _merge(found[key], entry)
                    to_ask |= {node: peer for node, peer in nearest.items() if node not in met}
        return found

    async def _search(self, keys: list[Any]) -> dict[Any, _Entries]:
        """Returns what Kademlia's search for each key finds within READ_S; for swarms too large to ask every node."""
        # A search may end early on a "sufficient" expiry, which any node can claim. No expiry is >= NaN.
        futures = await self._node.get_many_by_id(keys, sufficient_expiration_time=math.nan, return_futures=True)
        await asyncio.wait(futures.values(), timeout=READ_S)
        found: dict[Any, _Entries] = {}
        for key, future in futures.items():
            if not future.done():
                future.cancel()
            elif (result := future.result()) is not None and isinstance(result.value, dict):
                found[key] = {peer: (pack(entry.value), entry.expiration_time) for peer, entry in result.value.items()}
        return found

    def _open_all(self, key: Any, entries: _Entries) -> list[Record]:
        """Decodes the entries under one key, and leaves out those that have expired or are not valid any more."""
        now_unix = time.time()
        records = []
        for peer, (packed, expires_unix) in entries.items():
            if now_unix < expires_unix:
                with contextlib.suppress(ProtocolError):  # judged before, but the clock may have been set since
                    records.append(self._validator.open(key.to_bytes(), pack(peer), packed, expires_unix))
        return records

    async def close(self) -> None:
        """Stops this node and cancels its open questions to others; the host goes on."""
        self._node.is_alive = False
        for task in self._asking:
            task.cancel()
        if not self._host.died.is_set():
            await _within(self._node.shutdown(), RPC_S)


def _merge(entries: _Entries, found: Any) -> None:
    """Adds to `entries` what a node has under their key; of two records of a peer the later-expiring one stays."""
    if found is not None and isinstance(found.value, DictionaryDHTValue):
        for peer, (packed, expires_unix) in found.value.items():
            if peer not in entries or entries[peer][1] < expires_unix:
                entries[peer] = packed, expires_unix


def _unpacked(packed: bytes, kind: type) -> Any:
    """Decodes msgpack that must be a value of type `kind`. Raises ProtocolError for anything else."""
    value = unpack(packed, MAX_RECORD_BYTES + _PACKING_BYTES, "bad-record")
    if not isinstance(value, kind):
        raise ProtocolError("bad-record", f"A DHT entry is not {kind.__name__}.")
    return value


async def _within(work: Any, timeout_s: float) -> Any:
    """Awaits `work` and returns its result; cancels it after `timeout_s` and returns None."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        return None
