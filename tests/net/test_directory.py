"""The DHT directory on real nodes: what is published is seen, what is forged is not, and no node is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from agora_protocol.errors import InputError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId, Span
from agora_protocol.limits import MAX_RECORD_BYTES
from agora_protocol.packing import pack
from agora_protocol.records import Claim, Progress, Record, record_key, seal_record
from agora_protocol.shards import Shard
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID

from agora.net.directory import Directory
from agora.net.host import Host
from agora.net.stored_records import BoundedStorage, SignedRecords
from tests.net.helpers import RUN, kill_p2pd, make_host, run, until

RUN_ID = RunId(RUN)


class Node:
    """A host, its identity and its directory."""

    def __init__(self, host: Host, identity: Identity, place: Directory) -> None:
        self.host, self.identity, self.directory = host, identity, place

    async def publish(self, span: str = "0-1", incarnation: int = 1, lifetime_s: float = 30.0) -> bool:
        record = claim(self.identity, span, incarnation)
        return await self.directory.publish(record, self.identity, lifetime_s, [Shard(n) for n in record.span.stages])

    async def close(self) -> None:
        await self.directory.close()
        await self.host.close()


def claim(identity: Identity, span: str = "0-1", incarnation: int = 1) -> Claim:
    return Claim(identity.peer, Span.parse(span), incarnation, (), "serving", 1.0)


def names(records: list[Record]) -> set[Any]:
    return {record.peer for record in records if isinstance(record, Claim | Progress)}


async def read(directory: Directory, kind: type[Record], stage: int) -> list[Record]:
    return (await directory.read_many(kind, [Shard(stage)]))[Shard(stage)]


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Node]]:
    """Directories that met through the first."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="agora-test-")))
        made: list[Node] = []
        for number in range(count):
            host, identity = await make_host(folder, f"d{number}")
            stack.push_async_callback(host.close)
            bootstrap = await made[0].host.addresses() if made else ()
            made.append(Node(host, identity, await Directory.create(host, RUN_ID, bootstrap, stages=4)))
            stack.push_async_callback(made[-1].close)
        yield made


def test_claims_of_three_nodes_are_seen_by_all_at_once_and_the_newest_version_wins() -> None:
    async def main() -> None:
        async with nodes(3) as made:
            assert all(node.directory.neighbours == 2 for node in made)
            assert all(await asyncio.gather(*(node.publish() for node in made)))
            everyone = {node.identity.peer for node in made}
            for node in made:
                for stage in (0, 1):
                    assert names(await read(node.directory, Claim, stage)) == everyone
                assert await read(node.directory, Claim, 2) == []
                assert await read(node.directory, Progress, 0) == []
            # a later record replaces the one before, also one that asks for less time
            assert await made[1].publish(incarnation=2, lifetime_s=1.0)
            found = await made[2].directory.read_many(Claim, [Shard(0), Shard(1), Shard(2)])
            for stage in (0, 1):
                assert {it.incarnation for it in found[Shard(stage)] if it.peer == made[1].identity.peer} == {2}  # type: ignore[attr-defined]
            assert found[Shard(2)] == []
            assert not any(node.directory.refused for node in made)

    run(main)


def test_a_node_alone_works_and_hands_what_it_has_to_those_who_come() -> None:
    async def main() -> None:
        async with nodes(1) as (first,):
            assert first.directory.neighbours == 0
            assert await first.publish()
            assert names(await read(first.directory, Claim, 0)) == {first.identity.peer}
            await first.directory.bootstrap([])
            await first.directory.bootstrap(await first.host.addresses())  # itself
            assert first.directory.neighbours == 0
            with pytest.raises(InputError):
                await first.directory.bootstrap(["/ip4/127.0.0.1/tcp/1"])
            with TemporaryDirectory(prefix="agora-test-") as folder:
                host, identity = await make_host(Path(folder), "second")
                entrance = await first.host.addresses()
                second = Node(host, identity, await Directory.create(host, RUN_ID, entrance, stages=4))
                try:
                    await until(lambda: bool(second.directory._node.protocol.storage.data))
                    kill_p2pd(first.host)
                    await first.host.died.wait()
                    assert names(await read(second.directory, Claim, 1)) == {first.identity.peer}
                finally:
                    await second.close()

    run(main)


def test_the_swarm_goes_on_when_the_first_peer_is_killed_and_newcomers_enter_through_another() -> None:
    async def main() -> None:
        async with nodes(3) as (first, second, third):
            for node in (first, second, third):
                assert await node.publish()
            dead = await first.host.addresses()
            kill_p2pd(first.host)
            await first.host.died.wait()

            began = time.monotonic()
            assert {second.identity.peer, third.identity.peer} <= names(await read(second.directory, Claim, 0))
            assert await third.publish(incarnation=2)
            assert time.monotonic() - began < 8

            with TemporaryDirectory(prefix="agora-test-") as folder:
                host, identity = await make_host(Path(folder), "late")
                late = Node(host, identity, await Directory.create(host, RUN_ID, dead, stages=4))
                try:
                    assert late.directory.neighbours == 0
                    assert await late.publish()
                    await late.directory.bootstrap([*dead, *await second.host.addresses()])
                    assert late.directory.neighbours >= 1
                    survivors = {second.identity.peer, third.identity.peer, identity.peer}
                    assert survivors <= names(await read(late.directory, Claim, 1))
                    assert await late.publish(incarnation=2)
                    assert identity.peer in names(await read(third.directory, Claim, 1))
                finally:
                    await late.close()

    run(main, timeout_s=45)


def test_what_is_not_signed_and_in_its_place_is_refused_by_every_node_that_is_asked_to_store_it() -> None:
    async def main() -> None:
        async with nodes(3) as made:
            liar, *honest = made
            other = Identity.generate()
            now = time.time()
            key = record_key(RUN_ID, Claim, 0)
            good = seal_record(claim(other), RUN_ID, other, now + 30)
            tampered = good[:-70] + bytes([good[-70] ^ 1]) + good[-69:]
            forgeries: list[tuple[str, str, Any, Any, float]] = [
                ("bad-signature", key, other.peer, tampered, now + 30),
                (
                    "bad-signature",
                    key,
                    other.peer,
                    seal_record(claim(other), RunId("cd" * 32), other, now + 30),
                    now + 30,
                ),
                ("wrong-key", key, liar.identity.peer, good, now + 30),
                ("wrong-key", key, "someone", good, now + 30),
                ("wrong-run", record_key(RunId("cd" * 32), Claim, 0), other.peer, good, now + 30),
                ("wrong-run", "anything else", other.peer, good, now + 30),
                ("bad-record", record_key(RUN_ID, Claim, 2), other.peer, good, now + 30),  # it claims 0-1
                ("bad-record", record_key(RUN_ID, Progress, 0), other.peer, good, now + 30),
                ("bad-record", key, other.peer, good, now + 300),  # lives longer than what was signed
                ("bad-record", key, other.peer, b"junk", now + 30),
                ("bad-record", key, other.peer, {"a": 1}, now + 30),
                ("bad-record", key, None, good, now + 30),  # no subkey: would replace everybody's
                ("too-large", key, other.peer, b"x" * (MAX_RECORD_BYTES + 1_000), now + 30),
                ("lives-too-long", key, other.peer, seal_record(claim(other), RUN_ID, other, now + 9_999), now + 9_999),
            ]
            liar.directory._node.protocol.record_validator = None
            for number, (code, at, subkey, value, expires) in enumerate(forgeries):
                before = [sum(node.directory.refused.values()) for node in honest]
                await liar.directory._node.store(at, value, expires, subkey=subkey, exclude_self=True)
                for node, count in zip(honest, before, strict=True):
                    assert sum(node.directory.refused.values()) == count + 1, (number, code)
                    assert node.directory.refused[code] > 0, (number, code)
                    assert not node.directory._node.protocol.storage.data
            for node in honest:
                assert sum(node.directory.refused.values()) == len(forgeries)
                assert await read(node.directory, Claim, 0) == []
            # what a liar stores at home is refused by who reads it there
            await liar.directory._node.store(key, tampered, now + 30, subkey=other.peer)
            assert liar.directory._node.protocol.storage.data
            assert await read(honest[0].directory, Claim, 0) == []
            await honest[0].publish()
            assert names(await read(honest[1].directory, Claim, 0)) == {honest[0].identity.peer}

    run(main)


def test_an_expired_record_is_refused_and_a_replay_does_not_shorten_a_newer_ones_life() -> None:
    identity, validator, now = Identity.generate(), SignedRecords(RUN_ID, 4), time.time()
    key = DHTID.generate(record_key(RUN_ID, Claim, 0))

    def judged(expires: float) -> bool:
        sealed = seal_record(claim(identity), RUN_ID, identity, expires)
        return validator.validate(DHTRecord(key.to_bytes(), pack(identity.peer), pack(sealed), expires))

    assert judged(now + 5) and judged(now + 500)
    assert not judged(now - 100) and validator.refused == {"expired": 1}
    assert judged(now - 1)  # ended on its way here: hivemind drops it, and the rest of the answer is good

    storage = BoundedStorage(RUN_ID)
    assert storage.store_subkey(key, identity.peer, b"new", now + 30)
    assert not storage.store_subkey(key, identity.peer, b"old", now + 0.05)
    time.sleep(0.1)
    assert storage.get(key).value.get(identity.peer).value == b"new"
    assert not storage.store(key, b"regular", now + 900)
