"""A few real DHT nodes that hold the records of many peers, and the bytes that one more peer moves among them.

`python -m tests.net.crowded_directory` prints the figures of docs/understand/architecture.md. The entries are signed as
peers would sign them, and lie at the nodes and under the keys where a DHT of these nodes would keep them.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agora_protocol.directory_shards import DirectoryShard, shard_hash
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.packing import pack
from agora_protocol.records import Claim, Progress, Record, record_key, seal_record
from hivemind.dht.routing import DHTID

from agora.core.calls import ConnectionBroken
from agora.net.dht import directory
from agora.net.dht.bounded_dht import DhtRules
from agora.net.dht.closest_nodes import NODES_PER_KEY
from agora.net.dht.directory import Directory
from agora.net.p2pd.host import Host
from agora.swarm.directory_reader import CALM_READ_INTERVAL_S, MAX_READ_INTERVAL_S, DirectoryReader
from agora.swarm.directory_shards import SMALL_RUN, Reading, add_readings, shards_to_publish
from agora.swarm.membership import PUBLISH_CLAIM_INTERVAL_S, PUBLISH_PROGRESS_INTERVAL_S
from tests.net.helpers import RUN, make_host, open_directory, run

RUN_ID = RunId(RUN)
NODES, STAGES, READS = 7, 4, 8
LIFETIME_S = 500.0


class Node:
    """A host, its identity and its directory."""

    def __init__(self, host: Host, identity: Identity, place: Directory) -> None:
        self.host, self.identity, self.directory = host, identity, place

    async def publish(self, span: str = "0-1", incarnation: int = 1, lifetime_s: float = 30.0) -> bool:
        record = claim(self.identity, span, incarnation)
        return await self.directory.publish(
            record, self.identity, lifetime_s, [DirectoryShard(n) for n in record.span.stages]
        )

    async def close(self) -> None:
        await self.directory.close()
        await self.host.close()


def claim(identity: Identity, span: str = "0-1", incarnation: int = 1) -> Claim:
    return Claim(identity.peer, Span.parse(span), incarnation, (), "serving", 1.0)


def introducing(host: Host, addresses: dict[PeerId, tuple[str, ...]]) -> DhtRules:
    """Connects the host with the node that is to be called: it knows the addresses of all nodes, by their peers."""

    async def greet(peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None) -> bool:
        """As a daemon does that asks whoever has named the node where it can be dialled."""
        with contextlib.suppress(ConnectionBroken):
            await host.reach(peer, addresses[peer], 2.0)
            return True
        return False

    return DhtRules(greet=greet)


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Node]]:
    """Directories that met through the first."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="agora-test-")))
        made: list[Node] = []
        known: dict[PeerId, tuple[str, ...]] = {}
        for number in range(count):
            host, identity = await make_host(folder, f"d{number}")
            stack.push_async_callback(host.close)
            known[host.peer] = await host.addresses()
            bootstrap = known[made[0].host.peer] if made else ()
            place = await open_directory(host, RUN_ID, bootstrap, stages=STAGES, rules=introducing(host, known))
            made.append(Node(host, identity, place))
            stack.push_async_callback(made[-1].close)
        yield made


def records_of(peer: PeerId, stage: int) -> list[Record]:
    """A claim with two addresses and a progress with an account, as a daemon publishes them."""
    addresses = tuple(f"/ip4/203.0.113.7/{kind}/p2p/{peer}" for kind in ("tcp/31000", "udp/31000/quic-v1"))
    account = (337_920, 6_144, 329_728, 1, 16_384, 15, 245_760, 0.1875)
    told = (4800.5, 2.5, 1, 330, (account,), (), "counts 6,144 of 16,384 tokens of step 41")
    span, incarnation = Span(stage, stage), 1_789_999_000_000_000_000
    return [
        Claim(peer, span, incarnation, addresses, "serving", 12.5, 25e6),
        Progress(peer, span, incarnation, (40,), *told),
    ]


def known_to_have(peers: float) -> Any:
    """What a peer knows that has read how many peers each stage has."""
    return add_readings({}, {DirectoryShard(stage): Reading(round(peers), 1.0, 0.0) for stage in range(STAGES)})


def fill(made: list[Node], entries: int) -> list[Identity]:
    """Puts the records of so many peers, each of one stage, where they belong; returns the peers."""
    known, expires = known_to_have(entries / STAGES), time.time() + LIFETIME_S
    peers = [Identity.generate() for _ in range(entries)]
    for number, identity in enumerate(peers):
        span = Span(number % STAGES, number % STAGES)
        for record in records_of(identity.peer, span.first):
            packed = pack(seal_record(record, RUN_ID, identity, expires))
            for shard in shards_to_publish(known, span, shard_hash(RUN_ID, identity.peer)):
                key = DHTID.generate(record_key(RUN_ID, type(record), shard.stage, shard.bits))
                for holder in sorted(made, key=lambda node: node.directory._node.node_id ^ key)[:NODES_PER_KEY]:
                    holder.directory._node.protocol.storage.store_subkey(key, identity.peer, packed, expires)
    return peers


class CountedBytes:
    """Counts the bytes of the DHT's messages that any node is asked and answers."""

    def __init__(self, made: list[Node]) -> None:
        self.total = 0
        for node in made:
            protocol = node.directory._node.protocol
            protocol.get_stub = self._counting(protocol.get_stub)

    def _counting(self, get_stub: Any) -> Any:
        """Returns get_stub, whose stubs count what they send and get."""

        def counted(peer: Any) -> Any:
            return _CountingStub(get_stub(peer), self)

        return counted


class _CountingStub:
    """Calls a node, and counts the bytes of request and response."""

    def __init__(self, stub: Any, counted: CountedBytes) -> None:
        self._stub, self._counted = stub, counted

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, timeout: float | None = None) -> Any:
            response = await getattr(self._stub, name)(request, timeout=timeout)
            self._counted.total += request.ByteSize() + response.ByteSize()
            return response

        return call


@dataclass(frozen=True)
class Traffic:
    """What one peer of a run of `entries` moves and keeps, bytes; found: distinct peers that its reads have found."""

    entries: int
    read: float
    read_per_minute: float
    published_per_minute: float
    stored: float
    largest_key: int
    found: int


async def measure(entries: int) -> Traffic:
    """Reads and publishes as one peer of a run of so many, of which NODES nodes hold the records."""
    is_small = entries <= SMALL_RUN
    async with nodes(NODES) as made:
        fill(made, entries)
        me, place = made[-1].identity, made[-1].directory
        unix = [time.time()]
        reports: list[object] = []
        options: Any = {"rng": random.Random(5), "unix": lambda: unix[0]}
        reader = DirectoryReader(place, RUN_ID, me.peer, STAGES, reports.append, **options)
        await reader.read(Span(1, 1))  # the newcomer's, of all keys of depth 0
        await reader.read(Span(1, 1))
        counted, found = CountedBytes(made), set()
        for _ in range(READS):
            unix[0] += MAX_READ_INTERVAL_S
            found |= {record.peer for batch in await reader.read(Span(1, 1)) for record in batch.records}
        read, counted.total = counted.total / READS, 0
        one_claim, progress = records_of(me.peer, 1)
        shards = reader.shards_to_publish(Span(1, 1))
        assert await place.publish(one_claim, me, 30.0, shards) is not None and not reports
        claimed, counted.total = counted.total, 0
        await place.publish(progress, me, 30.0, shards)
        published = 60 / PUBLISH_CLAIM_INTERVAL_S * claimed + 60 / PUBLISH_PROGRESS_INTERVAL_S * counted.total
        tables = [node.directory._node.protocol.storage.data for node in made]
        values = [entry.value for table in tables for entry in table.values()]
        stored = sum(len(item.value) for value in values for _, item in value.items())
        per_minute = read * 60 / (CALM_READ_INTERVAL_S if is_small else MAX_READ_INTERVAL_S)
        largest = max(len(value) for value in values)
        return Traffic(entries, read, per_minute, published, stored / entries, largest, len(found))


def measured(entries: int) -> Traffic:
    """Measures on a loop of its own, as in a swarm of so many nodes: too many to ask all of them, if more than 20."""
    all_asked, directory.SMALL_SWARM = directory.SMALL_SWARM, directory.SMALL_SWARM if entries <= 20 else 0
    try:
        return run(lambda: measure(entries), timeout_s=120.0)
    finally:
        directory.SMALL_SWARM = all_asked


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ("10", "100", "1000")):
        sys.stdout.write(f"{measured(count)}\n")
