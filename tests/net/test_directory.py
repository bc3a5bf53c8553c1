"""The DHT directory on real nodes: what is published is seen, what is forged is not, and no node is needed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from agora_protocol.directory_shards import DirectoryShard, shard_bits, shard_hash
from agora_protocol.errors import InputError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_RECORD_BYTES, MAX_SHARD_BITS
from agora_protocol.packing import pack
from agora_protocol.records import Claim, Progress, Record, record_key, seal_record
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID

from agora.net.dht import directory, stored_records
from agora.net.dht.closest_nodes import NODES_PER_KEY
from agora.net.dht.directory import Directory
from agora.net.dht.stored_records import BoundedStorage, SignedRecords
from agora.net.p2pd.hivemind_shim import set_dht_time
from tests.net.crowded_directory import RUN_ID, Node, claim, nodes
from tests.net.helpers import kill_p2pd, make_host, open_directory, run

AnyRecord = TypeVar("AnyRecord", bound=Record)


def names(records: list[Record]) -> set[Any]:
    return {record.peer for record in records if isinstance(record, Claim | Progress)}


async def read(directory: Directory, kind: type[AnyRecord], stage: int) -> list[AnyRecord]:
    found = (await directory.read_many(kind, [DirectoryShard(stage)]))[DirectoryShard(stage)]
    records = [record for record in found if isinstance(record, kind)]
    assert len(records) == len(found)
    return records


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
            for stage in (0, 1):
                found = await read(made[2].directory, Claim, stage)
                assert {it.incarnation for it in found if it.peer == made[1].identity.peer} == {2}
            assert await read(made[2].directory, Claim, 2) == []
            assert not any(node.directory.refused for node in made)

    run(main)


def test_a_peer_whose_clock_was_ahead_before_its_restart_is_heard_at_once() -> None:
    """Its old record expires later than the new one would; nodes keep the later one."""

    async def main() -> None:
        with TemporaryDirectory(prefix="agora-test-") as folder:
            async with nodes(1) as (seed,):
                for incarnation, lifetime_s in ((1, 300.0), (2, 20.0)):
                    host, identity = await make_host(Path(folder), "peer")
                    place = await open_directory(host, RUN_ID, await seed.host.addresses(), stages=2)
                    peer = Node(host, identity, place)
                    await read(place, Claim, 0)
                    assert await peer.publish("0-0", incarnation, lifetime_s)
                    (found,) = await read(seed.directory, Claim, 0)
                    assert isinstance(found, Claim) and found.incarnation == incarnation
                    await peer.close()

    run(main)


def test_records_are_published_and_judged_by_the_time_that_a_node_was_given() -> None:
    """All nodes of this process are given one that is an hour behind the wall clock."""

    async def main() -> None:
        with TemporaryDirectory(prefix="agora-test-") as folder:
            async with nodes(1) as (seed,):
                host, identity = await make_host(Path(folder), "peer")
                try:
                    place = await open_directory(host, RUN_ID, (), stages=2, unix=lambda: time.time() - 3600.0)
                    peer = Node(host, identity, place)
                    assert await peer.publish("0-0", lifetime_s=20.0)
                    assert names(await read(place, Claim, 0)) == {identity.peer}
                    await place.bootstrap(await seed.host.addresses())
                    assert names(await read(seed.directory, Claim, 0)) == set(), "it lives by the wall clock"
                finally:
                    set_dht_time(time.time)
                    await peer.close()

    run(main)


def test_a_node_alone_works_and_newcomers_find_what_it_has() -> None:
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
                second = Node(host, identity, await open_directory(host, RUN_ID, entrance, stages=4))
                try:
                    assert names(await read(second.directory, Claim, 1)) == {first.identity.peer}
                    assert not second.directory._node.protocol.storage.data, "each publishes its records itself"
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

            assert {second.identity.peer, third.identity.peer} <= names(await read(second.directory, Claim, 0))
            assert await third.publish(incarnation=2)

            with TemporaryDirectory(prefix="agora-test-") as folder:
                host, identity = await make_host(Path(folder), "late")
                late = Node(host, identity, await open_directory(host, RUN_ID, dead, stages=4))
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
            tampered = good[:-10] + bytes([good[-10] ^ 1]) + good[-9:]  # in the signature
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


def test_a_record_is_stored_and_found_in_its_peers_shards_and_refused_in_others() -> None:
    async def main() -> None:
        async with nodes(3) as made:
            liar, *honest = made
            bits = shard_bits(shard_hash(RUN_ID, liar.identity.peer), MAX_SHARD_BITS)
            other = bits[:2] + str(1 - int(bits[2]))
            shards = [DirectoryShard(0), DirectoryShard(1, bits[:3]), DirectoryShard(0, bits)]
            record = claim(liar.identity)
            assert await liar.directory.publish(record, liar.identity, 30.0, shards)
            found = await honest[0].directory.read_many(
                Claim, [*shards, DirectoryShard(1), DirectoryShard(0, bits[:3])]
            )
            assert {shard for shard, records in found.items() if records == [record]} == set(shards)
            assert not any(node.directory.refused for node in made)

            liar.directory._node.protocol.record_validator = None
            sealed, expires = (seal_record(record, RUN_ID, liar.identity, at := time.time() + 30), at)
            for key in (record_key(RUN_ID, Claim, 0, other), record_key(RUN_ID, Claim, 2, bits[:3])):
                await liar.directory._node.store(key, sealed, expires, liar.identity.peer, exclude_self=True)
            assert all(node.directory.refused == {"wrong-run": 2} for node in honest)

    run(main)


def test_a_key_keeps_the_records_of_the_least_hashes_whoever_came_first() -> None:
    storage, key, now = BoundedStorage(RUN_ID), DHTID.generate("k"), time.time()
    peers = [PeerId(f"peer {number}") for number in range(3 * MAX_KEY_RECORDS)]
    least = sorted(peers, key=lambda peer: shard_hash(RUN_ID, peer))[:MAX_KEY_RECORDS]
    stored = [storage.store_subkey(key, peer, b"x", now + 30) for peer in peers]
    assert all(stored[:MAX_KEY_RECORDS]) and not all(stored)
    assert {peer for peer, _ in storage.get(key).value.items()} == set(least)
    assert storage.store_subkey(key, least[-1], b"y", now + 40), "one that is there is renewed"
    late = next(peer for peer in peers if peer not in least)
    assert not storage.store_subkey(key, late, b"x", now + 50)
    crowd = BoundedStorage(RUN_ID)
    assert crowd.store_subkey(key, late, b"x", now + 30)
    assert crowd.store(key, storage.get(key).value, now + 60)
    assert len(crowd.get(key).value) == MAX_KEY_RECORDS and crowd.get(key).value.get(late) is None


def test_a_node_stores_under_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_records, "MAX_STORED_KEYS", 2)
    storage, now = BoundedStorage(RUN_ID), time.time()
    keys = [DHTID.generate(f"k{number}") for number in range(3)]
    assert [storage.store_subkey(key, "p", b"x", now + 30) for key in keys] == [True, True, False]
    assert storage.store_subkey(keys[1], "q", b"x", now + 30)


def test_a_large_swarm_finds_what_was_published_also_after_nodes_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many nodes to ask all, two of the five nearest to a key are asked."""
    monkeypatch.setattr(directory, "SMALL_SWARM", 0)

    async def main() -> None:
        async with nodes(7) as made:
            assert all(await asyncio.gather(*(node.publish() for node in made)))
            held = [len(node.directory._node.protocol.storage.data) for node in made]
            assert sum(held) == 2 * NODES_PER_KEY, "two keys, each at the nodes that are nearest"
            everyone = {node.identity.peer for node in made}
            for node in made:
                assert names(await read(node.directory, Claim, 0)) == everyone
                assert await read(node.directory, Claim, 3) == []
            dead = [node for node, keys in zip(made, held, strict=True) if keys][:2]
            left = [node for node in made if node not in dead]
            for node in dead:
                kill_p2pd(node.host)
                await node.host.died.wait()
            for node in left:
                assert await node.publish(incarnation=2)
            for node in left:
                newer = [record for record in await read(node.directory, Claim, 1) if record.incarnation == 2]
                assert names(newer) == {alive.identity.peer for alive in left}

    run(main, timeout_s=60)
