"""The DHT in which peers publish signed records and read those of other peers.

Every node that stores or returns a record validates it first, by the same rules. In swarms that are too large to ask
every node, hivemind's own search would ask 20 nodes for each key at each read, and every node that holds the key would
answer with all of its records. There the directory looks up a key's nodes once every NODES_LIFETIME_S, by an adjacent
id that stores nothing, so that the search moves no records. At each read it asks NODES_ASKED of these nodes, chosen at
random.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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
from agora.net.dht.stored_records import BoundedStorage, SignedRecords, peer_hash
from agora.net.p2pd.addresses import addresses_by_peer
from agora.net.p2pd.hivemind_shim import DHTID, DHTNode, DictionaryDHTValue, PeerID, set_dht_time
from agora.net.p2pd.host import Host

NODES_PER_KEY: Final = 5  # number of nodes at which a record is stored, those nearest to its key
NODES_ASKED: Final = 2  # number of these nodes that are asked at a read
NODES_LIFETIME_S: Final = 300.0  # seconds after which a key's nodes are looked up again
KEYS_AT_ONCE: Final = 16  # keys whose nodes are looked up in one search
MAX_KEYS: Final = 4096  # maximum number of keys whose nodes are remembered


# The nodes nearest to one key, peer by node id, and since when they count as looked up. nodes: may include this node.
# found_at: loop time of the look-up, less up to NODES_LIFETIME_S / 2 at random.
@dataclass(slots=True)
class _Holders:
    nodes: dict[Any, Any]
    found_at: float


class ClosestNodes:
    """Finds the nodes that hold a key, remembers them for NODES_LIFETIME_S, and reads and writes values there."""

    def __init__(self, node: Any, rng: random.Random | None = None) -> None:
        """node: hivemind's DHTNode. rng: chooses holders; None for a new, unseeded one."""
        self._node = node
        self._rng = rng or random.Random()
        self._holders: OrderedDict[Any, _Holders] = OrderedDict()

    async def read(self, keys: Collection[Any], on_value: Callable[[Any, Any], None]) -> None:
        """Asks NODES_ASKED random nodes of each key, and this one itself; calls on_value(key, value) for every answer.

        Looks up unknown holders first. The value is None from a remote node that has nothing under the key. The holders
        of keys for which no asked node answered are looked up again and asked once more.
        """
        for key in keys:
            if (stored := self._node.protocol.storage.get(key)) is not None:
                on_value(key, stored)
        left = set(keys)
        for _ in range(2):
            answered: set[Any] = set()
            await self._look_up(left)
            by_node = self._assign_keys(left, NODES_ASKED)
            await asyncio.gather(*(self._ask(*node, asked, on_value, answered) for node, asked in by_node.items()))
            left -= answered
            for key in left:
                self._holders.pop(key, None)
            if not left:
                return

    async def _ask(
        self, node: Any, peer: Any, keys: list[Any], on_value: Callable[[Any, Any], None], answered: set[Any]
    ) -> None:
        found = await self._node._call_find_with_blacklist(peer, keys)
        if found is None:
            self._forget(node, keys)
            return
        for key, (value, _) in found.items():
            on_value(key, value)
        answered |= set(keys)

    async def write(self, keys: Collection[Any], subkey: str, packed: bytes, expires_unix: float) -> bool:
        """Stores one value under each key at all its holders, this node included where it is one.

        Looks up unknown holders first. Returns whether every key now has the value on some node. A holder that refuses
        the value, because it keeps records of smaller hashes, does not count. Nodes that do not answer are forgotten as
        holders.
        """
        await self._look_up(keys)
        stored: set[Any] = set()
        by_node = self._assign_keys(keys, NODES_PER_KEY)

        async def store(node: Any, peer: Any, held: list[Any]) -> None:
            count = len(held)
            done = await self._node.protocol.call_store(
                peer, held, [packed] * count, [expires_unix] * count, [subkey] * count
            )
            if done is None:
                self._forget(node, held)
            stored.update(key for key, is_stored in zip(held, done or (), strict=False) if is_stored)

        for key in keys:
            is_holder = key in self._holders and self._node.node_id in self._holders[key].nodes
            if is_holder and self._node.protocol.storage.store_subkey(key, subkey, packed, expires_unix):
                stored.add(key)
        await asyncio.gather(*(store(*node, held) for node, held in by_node.items()))
        return stored == set(keys)

    async def _look_up(self, keys: Iterable[Any]) -> None:
        oldest = loop_time() - NODES_LIFETIME_S
        unknown = []
        for key in keys:
            known = self._holders.get(key)
            if known is None or known.found_at < oldest or len(known.nodes) <= NODES_PER_KEY // 2:
                unknown.append(key)
        # A few keys at a time, so that some are found even if the time runs out before the rest.
        for first in range(0, len(unknown), KEYS_AT_ONCE):
            beside = {DHTID(int(key) ^ 1): key for key in unknown[first : first + KEYS_AT_ONCE]}
            nearest = await self._node.find_nearest_nodes(list(beside), k_nearest=NODES_PER_KEY)
            for neighbour, key in beside.items():
                # Spread over time, so that keys found together are not all looked up together again.
                found_at = loop_time() - self._rng.uniform(0, NODES_LIFETIME_S / 2)
                self._holders[key] = _Holders(dict(nearest[neighbour]), found_at)
                self._holders.move_to_end(key)
        while len(self._holders) > MAX_KEYS:
            self._holders.popitem(last=False)

    def _assign_keys(self, keys: Iterable[Any], nodes_per_key: int) -> dict[tuple[Any, Any], list[Any]]:
        by_node: dict[tuple[Any, Any], list[Any]] = defaultdict(list)
        for key in keys:
            known = self._holders.get(key)
            others = [node for node in known.nodes.items() if node[0] != self._node.node_id] if known else []
            for node in self._rng.sample(others, min(nodes_per_key, len(others))):
                by_node[node].append(key)
        return by_node

    def _forget(self, node: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            if key in self._holders:
                self._holders[key].nodes.pop(node, None)


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

        With more than SMALL_SWARM neighbours, a shard that no node answered for is left out; with fewer, its list is
        empty. Each list has at most MAX_KEY_RECORDS: verified peers first, then by ascending
        hash of the peer id.
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
