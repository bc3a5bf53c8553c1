"""Finds the nodes of the DHT that hold a key, remembers them, and reads and writes values there.

In swarms that are too large to ask every node, hivemind's own search would ask 20 nodes for each key at each read, and
every node that holds the key would answer with all of its records. Here a key's nodes are looked up once every
NODES_LIFETIME_S, by an adjacent id that stores nothing, so that the search moves no records. Each read asks NODES_ASKED
of these nodes, chosen at random.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from agora.core.clock import loop_time
from agora.net.p2pd.hivemind_shim import DHTID

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
