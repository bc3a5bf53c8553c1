"""The DHT in which peers publish signed records and read those of other peers.

Every node that stores or returns a record validates it first, by the same rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_KEY_RECORDS
from agora_protocol.packing import pack
from agora_protocol.records import Record, record_key, seal_record

from agora.core.calls import ConnectionBroken
from agora.core.clock import loop_time
from agora.net.dht.bounded_dht import HELLO_TIMEOUT_S, RPC_TIMEOUT_S, BoundedP2P, DhtRules, node_id_of
from agora.net.dht.closest_nodes import NODES_PER_KEY, ClosestNodes
from agora.net.dht.stored_records import BoundedStorage, SignedRecords, peer_hash
from agora.net.p2pd.addresses import addresses_by_peer
from agora.net.p2pd.hivemind_shim import DHTID, DHTNode, DictionaryDHTValue, PeerID, set_dht_time
from agora.net.p2pd.host import Host

READ_TIMEOUT_S: Final = 3.0  # seconds after which a read of the directory returns what it has
PUBLISH_TIMEOUT_S: Final = 10.0  # seconds after which storing a record is given up
SMALL_SWARM: Final = 20  # neighbours up to which every node knows every other: hivemind's buckets hold 20
# Seconds that a read waits for the next answer, once half of the nodes have answered.
NEXT_ANSWER_TIMEOUT_S: Final = 0.3

_Entries = dict[str, tuple[bytes, float]]  # by peer: the record as msgpack, and its expiry in unix seconds


class Directory:
    """This peer's node of the run's DHT: publishes signed records, reads those of others, and stores some of them.

    bounds: the BoundedP2P that limits the node's messages. refused: by error code, how many
    records and messages of others this node refused.
    """

    def __init__(
        self,
        host: Host,
        run: RunId,
        *,
        stages: int,
        rules: DhtRules | None = None,
        unix: Callable[[], float] | None = None,
    ) -> None:
        """stages: how many the run has. rules: None answers and calls all peers, and keeps their records.

        unix: the time by which records are published and judged, for all nodes of this process; None: the wall clock.
        """
        if unix is not None:
            set_dht_time(unix)
        self._rules = rules or DhtRules()
        self._run = run
        self._host = host
        self._unix = unix or time.time
        self._validator = SignedRecords(run, stages, self._unix)
        self.refused = self._validator.refused  # how many records this node refused, by the code of their error
        self._storage = BoundedStorage(run)
        self.bounds = BoundedP2P(host.p2p, self._validator, stages, self._rules, stored_bytes=self._storage.bytes_under)
        self._node: Any = None  # hivemind's DHTNode, from `start` on
        self._holders = ClosestNodes(None)
        self._last_expiry: dict[Any, float] = {}  # by hashed key, in unix seconds
        self._open_requests: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Starts the node, which then knows no other; see `bootstrap`."""
        self._node = node = await DHTNode.create(
            p2p=self.bounds,
            node_id=node_id_of(self._host.p2p.peer_id),
            # Nothing is cached: a cached stage hides newcomers. No search waits for another to reuse its results.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            num_replicas=NODES_PER_KEY,
            wait_timeout=HELLO_TIMEOUT_S + RPC_TIMEOUT_S,  # then a node is skipped, and not asked for a while
            blacklist_time=2.0,
            num_workers=8,
            record_validator=self._validator,
        )
        node.protocol.storage = self._storage
        node.protocol.cache = BoundedStorage(self._run, maxsize=1)
        self._holders = ClosestNodes(node)

    @property
    def neighbours(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def bootstrap(self, addresses: Sequence[str], timeout_s: float = 10.0) -> None:
        """Joins the DHT through those peers at `addresses` that the rules allow and that answer; without any, returns.

        Connects to the peers, pings them, and then looks up the nodes nearest to this one. timeout_s: for connecting,
        and again for the look-up. Raises InputError for a malformed address.
        """
        by_peer = {peer: known for peer, known in addresses_by_peer(addresses).items() if self._rules.may_call(peer)}
        try:
            await self._host.connect([address for known in by_peer.values() for address in known], timeout_s)
        except ConnectionBroken:
            return
        ping = self._node.protocol.call_ping
        strangers = by_peer.keys() - {self._host.peer}
        if any(await asyncio.gather(*(ping(PeerID.from_base58(peer)) for peer in strangers))):
            await _within(self._node.find_nearest_nodes([self._node.node_id]), timeout_s)

    async def publish(
        self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[DirectoryShard]
    ) -> bool:
        """Signs `record` and stores it in `shards`.

        Returns whether within PUBLISH_TIMEOUT_S some node stored it for every shard. The record expires after
        `lifetime_s`, or just after this peer's last record in any of `shards` that this node has published or read, if
        that is later: the DHT keeps the one that expires last, even if it was published while this machine's clock was
        ahead. Raises ProtocolError for a record that is too large or of another peer.
        """
        now_unix = self._unix()
        keys = [self._key(type(record), shard) for shard in shards]
        ids = [DHTID.generate(key) for key in keys]
        latest = max(self._last_expiry.get(key_id, 0.0) for key_id in ids)
        expires_unix = max(now_unix + lifetime_s, latest + 0.001)
        sealed = seal_record(record, self._run, identity, expires_unix)
        self._last_expiry = {key: at for key, at in self._last_expiry.items() if at > now_unix}
        self._last_expiry |= dict.fromkeys(ids, expires_unix)
        if not self._is_small:
            return bool(
                await _within(self._holders.write(ids, record.peer, pack(sealed), expires_unix), PUBLISH_TIMEOUT_S)
            )
        storing = self._node.store_many(
            keys, [sealed] * len(keys), [expires_unix] * len(keys), subkeys=[str(record.peer)] * len(keys)
        )
        stored = await _within(storing, PUBLISH_TIMEOUT_S)
        return stored is not None and all(stored.values())

    async def read_many(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> dict[DirectoryShard, list[Record]]:
        """Returns by shard the valid records of members that came within READ_TIMEOUT_S, at most one of each peer.

        With more than SMALL_SWARM neighbours, a shard that no node answered for is left out; with at most so many, its
        list is empty. Each list has at most MAX_KEY_RECORDS: verified peers first, then by ascending hash of the peer
        id.
        """
        keys = {shard: DHTID.generate(self._key(kind, shard)) for shard in shards}
        ask = self._ask_everyone if self._is_small else self._ask_holders
        found = await ask(list(keys.values()))
        return {shard: self._verify_all(key, found[key]) for shard, key in keys.items() if key in found}

    @property
    def _is_small(self) -> bool:
        return self.neighbours <= SMALL_SWARM

    def _key(self, kind: type[Record], shard: DirectoryShard) -> str:
        return record_key(self._run, kind, shard.stage, shard.bits)

    async def _ask_everyone(self, keys: list[Any]) -> dict[Any, _Entries]:
        deadline = loop_time() + READ_TIMEOUT_S
        found: dict[Any, _Entries] = {key: {} for key in keys}
        for key in keys:
            _merge(found[key], self._node.protocol.storage.get(key))
        seen_nodes = {self._node.node_id}
        to_ask = dict(self._node.protocol.routing_table.uid_to_peer_id)
        asked = 0
        running: set[asyncio.Task[Any]] = set()
        while to_ask or running:
            for peer in to_ask.values():
                running.add(task := asyncio.create_task(self._node._call_find_with_blacklist(peer, keys)))
                self._open_requests.add(task)
                task.add_done_callback(self._open_requests.discard)
            asked += len(to_ask)
            seen_nodes |= to_ask.keys()
            timeout_s = (
                deadline - loop_time()
                if len(running) > asked / 2
                else min(NEXT_ANSWER_TIMEOUT_S, deadline - loop_time())
            )
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            to_ask = {}
            for task in done:
                for key, (entry, nearest) in (task.result() or {}).items():
                    _merge(found[key], entry)
                    to_ask |= {node: peer for node, peer in nearest.items() if node not in seen_nodes}
        return found

    async def _ask_holders(self, keys: list[Any]) -> dict[Any, _Entries]:
        found: dict[Any, _Entries] = {}
        await _within(
            self._holders.read(keys, lambda key, value: _merge(found.setdefault(key, {}), value)), READ_TIMEOUT_S
        )
        return found

    def _verify_all(self, key: Any, entries: _Entries) -> list[Record]:
        now_unix = self._unix()
        records = []
        for peer, (packed, expires_unix) in entries.items():
            if now_unix < expires_unix:
                with contextlib.suppress(ProtocolError):  # judged before, but the clock may have been corrected since
                    record = self._validator.verify(key.to_bytes(), pack(peer), packed, expires_unix)
                    if self._rules.is_from_member(record):
                        records.append(record)
                    if peer == self._host.peer:
                        self._last_expiry[key] = max(self._last_expiry.get(key, 0.0), expires_unix)

        # Members first: an attacker that invents many peers can choose ids with the smallest hashes.
        def rank(record: Record) -> tuple[bool, int]:
            return not self._rules.is_verified(record.peer), peer_hash(self._run, record.peer)

        return sorted(records, key=rank)[:MAX_KEY_RECORDS]

    def forget_refused(self) -> None:
        """Removes from this node's storage and routing table the peers that the rules no longer allow to call."""
        protocol = self._node.protocol
        protocol.storage.keep_only(self._rules.may_call)
        for peer, node in list(protocol.routing_table.peer_id_to_uid.items()):
            if not self._rules.may_call(PeerId(str(peer))):
                del protocol.routing_table[node]

    async def close(self) -> None:
        """Stops this node and cancels its open requests to other nodes; does not close the host.

        If p2pd has ended, hivemind's node is not shut down. Does nothing before `start`.
        """
        if self._node is None:
            return
        self._node.is_alive = False
        for task in self._open_requests:
            task.cancel()
        if not self._host.died.is_set():
            await _within(self._node.shutdown(), RPC_TIMEOUT_S)


def _merge(entries: _Entries, found: Any) -> None:
    if found is not None and isinstance(found.value, DictionaryDHTValue):
        for peer, (packed, expires_unix) in found.value.items():
            if peer not in entries or entries[peer][1] < expires_unix:
                entries[peer] = packed, expires_unix


async def _within(work: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        return None
