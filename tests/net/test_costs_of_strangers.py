"""What strangers and peers can cost: how late the event loop becomes, how memory grows, what honest calls still get.

Each attack runs beside an honest peer that calls all the while. The figures of docs/understand/limits.md are printed by
`pytest -s tests/net/test_costs_of_strangers.py --slow`.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.directory_shards import DirectoryShard, shard_bits, shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.frames import FrameType, encode_frame
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId, Span
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_SHARD_BITS
from agora_protocol.messages import Chunk, GetChunk, GetStatus
from agora_protocol.packing import pack
from agora_protocol.records import Claim, record_key, seal_record
from agora_protocol.tensors import WireTensor
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from agora.core.calls import Reply
from agora.net.dht import bounded_dht, stored_records
from agora.net.dht.bounded_dht import BURST_S, LOOKUP_PRICE, TOKENS_PER_S, TOKENS_PER_STAGE, BoundedP2P, DhtRules
from agora.net.dht.stored_records import SignedRecords
from agora.net.p2pd.hivemind_shim import DHTRecord
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.connection import IncomingCall
from tests.net.crowded_directory import RUN_ID, Node, claim, nodes
from tests.net.helpers import Peer, after, boundary, echo, peers, process, run
from tests.net.test_hostile import raw_stream

MAX_LAG_S, MAX_GROWTH_MB, MIN_THROUGHPUT = 0.1, 100.0, 0.9


def resident_mb() -> float:
    """Returns the memory that this process has now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


class Watch:
    """Measures, while it is entered: the longest time for which the event loop did nothing else, and memory growth.

    lag_s: in CPU time of the loop's thread, so that other work on the machine does not count. growth_mb: resident.
    """

    def __init__(self) -> None:
        self.lag_s = self.growth_mb = 0.0

    async def __aenter__(self) -> Watch:
        self._before = self._most = resident_mb()
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.02)
        self.lag_s = 0.0
        return self

    async def _tick(self) -> None:
        """Wakes each 5 ms; the CPU time that passed meanwhile was spent by others on this loop, or by threads."""
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            self.lag_s = max(self.lag_s, time.thread_time() - before)
            self._most = max(self._most, resident_mb())

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.02)
        self._task.cancel()
        self.growth_mb = self._most - self._before

    def judge(self, attack: str) -> None:
        """Prints the figures, and fails if memory grew by too much."""
        sys.stdout.write(f"\n| {attack} | {1000 * self.lag_s:.0f} ms | {self.growth_mb:.0f} MB |")
        assert self.growth_mb < MAX_GROWTH_MB


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[Node, Node]]:
    async with nodes(2) as (victim, liar):
        yield victim, liar


async def ask(liar: Node, victim: Node, name: str, request: Any) -> bytes:
    """Sends a request to the victim's node of the DHT by hand; raises what it answers."""
    client = liar.host.p2p._client
    peer = PeerID.from_base58(victim.identity.peer)
    return await client.call_unary_handler(peer, f"DHTProtocol.{name}", request.SerializeToString())


async def until_all(calls: list[Awaitable[Any]]) -> tuple[int, int]:
    """Awaits all calls; returns how many were answered, and how many refused."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = sum(isinstance(outcome, Exception) for outcome in outcomes)
    return len(outcomes) - refused, refused


def test_a_find_of_100_000_keys_is_refused_before_it_is_parsed_and_honest_reads_go_on() -> None:
    async def main() -> None:
        async with two_nodes() as (victim, liar):
            await victim.publish()
            keys = [DHTID.generate(number).to_bytes() for number in range(100_000)]
            async with Watch() as watch:
                answered, refused = await until_all(
                    [ask(liar, victim, "rpc_find", dht_pb2.FindRequest(keys=keys)) for _ in range(5)]
                )
                assert (answered, refused) == (0, 5) and victim.directory.refused["too-large"] == 5
                honest = await liar.directory.read_many(Claim, [DirectoryShard(0)])
                assert [record.peer for record in honest[DirectoryShard(0)]] == [victim.identity.peer]
            watch.judge("5 finds of 100,000 keys")

    run(main, timeout_s=60)


def test_finds_without_end_are_paid_for_and_then_refused() -> None:
    async def main() -> None:
        async with two_nodes() as (victim, liar):
            keys = [DHTID.generate(number).to_bytes() for number in range(64)]
            request = dht_pb2.FindRequest(keys=keys)
            answered, refused = await until_all([ask(liar, victim, "rpc_find", request) for _ in range(200)])
            stages = victim.directory.bounds.max_keys
            most = bounded_dht.BURST_S * (bounded_dht.TOKENS_PER_S + 4 * bounded_dht.TOKENS_PER_STAGE)
            assert answered <= 1.5 * most / len(keys) and refused >= 100 and stages == 64
            assert victim.directory.refused["busy"] >= 100

    run(main, timeout_s=60)


def reply_of(count: int) -> Any:
    """A find's reply that names so many nodes."""
    result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
    for number in range(count):
        peer = b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")
        result.nearest_peer_ids.append(peer)
        result.nearest_node_ids.append(DHTID.generate(peer).to_bytes())
    return dht_pb2.FindResponse(results=[result])


class Replies:
    """Stands for p2p: answers every call with the same bytes."""

    def __init__(self, peer: Any, raw: bytes) -> None:
        self.peer_id, self._raw, self._client = peer, raw, self

    async def call_unary_handler(self, *_: object) -> bytes:
        return self._raw


def bounded(reply: Any) -> tuple[BoundedP2P, list[str]]:
    """A node's side of a call that is answered so, and the violations that it reports."""
    validator, violations = SignedRecords(RUN_ID, 4), list[str]()
    raw = reply if isinstance(reply, bytes) else reply.SerializeToString()
    rules = DhtRules(report_protocol_error=lambda _, error: violations.append(error.code))
    made = BoundedP2P(Replies(PeerID.from_base58(Identity.generate().peer), raw), validator, 4, rules)
    return made, violations


async def find(made: BoundedP2P, key: bytes) -> Any:
    """Calls another node, which replies as it does."""
    peer = PeerID.from_base58(Identity.generate().peer)
    return await made.call_protobuf_handler(
        peer, "DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=[key]), dht_pb2.FindResponse
    )


def test_a_reply_of_60_000_nodes_is_not_followed_and_who_sent_it_pays() -> None:
    async def main() -> None:
        made, violations = bounded(reply_of(60_000))
        async with Watch() as watch:
            for _ in range(3):
                with pytest.raises(Exception, match="60000 nodes"):
                    await find(made, bytes(20))
                await asyncio.sleep(0.01)
        watch.judge("3 replies of 60,000 nodes")
        assert violations == ["too-large"] * 3

    run(main)


def test_a_reply_that_is_no_message_is_a_violation_of_who_sent_it_whatever_was_asked() -> None:
    async def main() -> None:
        made, violations = bounded(b"\xff")
        ping = made.call_protobuf_handler(
            PeerID.from_base58(Identity.generate().peer),
            "DHTProtocol.rpc_ping",
            dht_pb2.PingRequest(),
            dht_pb2.PingResponse,
        )
        for call in (find(made, bytes(20)), ping):
            with pytest.raises(ProtocolError, match="Response are malformed"):
                await call
        assert violations == ["bad-record"] * 2

    run(main)


def test_nodes_whose_ids_are_not_those_of_their_peers_are_left_out() -> None:
    async def main() -> None:
        reply = reply_of(20)
        reply.results[0].nearest_node_ids[3] = bytes(20)
        made, _ = bounded(reply)
        assert len((await find(made, bytes(20))).results[0].nearest_node_ids) == 19

    run(main)


def test_of_a_thousand_signed_claims_under_a_key_none_is_verified_and_64_are_within_a_budget() -> None:
    async def main() -> None:
        key, expires = DHTID.generate(record_key(RUN_ID, Claim, 0)), time.time() + 60.0

        def reply(count: int) -> Any:
            """A reply with the true claims of so many invented peers."""
            entries = []
            for _ in range(count):
                identity = Identity.generate()
                sealed = seal_record(claim(identity), RUN_ID, identity, expires)
                entries.append(bounded_dht.ReplyEntry(str(identity.peer), pack(sealed), expires))
            value = bounded_dht.pack_dictionary(entries)
            found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=expires)
            return dht_pb2.FindResponse(results=[found])

        (crowd, _), (made, violations) = bounded(reply(1000)), bounded(reply(MAX_KEY_RECORDS))
        async with Watch() as watch:
            with pytest.raises(Exception, match="not up to 64 records"):
                await find(crowd, key.to_bytes())
            await asyncio.sleep(0.01)
            answer = await find(made, key.to_bytes())
        watch.judge("a reply of 1,000 signed claims, one of 64")
        assert len(bounded_dht.read_dictionary(answer.results[0].value)) == MAX_KEY_RECORDS and not violations

    run(main)


def test_400_node_ids_of_one_peer_enter_no_routing_table_and_its_own_enters_once() -> None:
    async def main() -> None:
        async with two_nodes() as (victim, liar):
            table = victim.directory._node.protocol.routing_table
            async with Watch() as watch:
                for number in range(400):
                    info = dht_pb2.NodeInfo(node_id=DHTID.generate(number).to_bytes())
                    await ask(liar, victim, "rpc_ping", dht_pb2.PingRequest(peer=info))
            watch.judge("400 node ids of one peer")
            assert len(table.uid_to_peer_id) == 1 and victim.directory.neighbours == 1

    run(main, timeout_s=60)


def test_a_peer_stores_its_own_records_and_nobody_elses() -> None:
    async def main() -> None:
        async with two_nodes() as (victim, liar):
            phantoms = [Identity.generate() for _ in range(50)]
            expires, key = time.time() + 30, DHTID.generate(record_key(RUN_ID, Claim, 0)).to_bytes()
            request = dht_pb2.StoreRequest()
            for identity in phantoms:
                request.keys.append(key)
                request.subkeys.append(pack(str(identity.peer)))
                request.values.append(pack(seal_record(claim(identity), RUN_ID, identity, expires)))
                request.expiration_time.append(expires)
                request.in_cache.append(False)
            answer = dht_pb2.StoreResponse.FromString(await ask(liar, victim, "rpc_store", request))
            assert list(answer.store_ok) == [False] * 50 and victim.directory.refused["wrong-key"] == 50
            assert not victim.directory._node.protocol.storage.data
            assert await liar.publish(), "its own are stored"

    run(main, timeout_s=60)


async def serve_chunks(call: IncomingCall) -> Reply:
    """Gives chunks of 4 MB, and echoes boundaries."""
    if isinstance(call.message, GetChunk):
        return Reply(Chunk(), [WireTensor("uint8", (4_194_304,), memoryview(bytearray(4_194_304)))])
    return await echo(call)


async def honest_calls(honest: Peer, victim: Peer, count: int) -> float:
    """Makes so many calls with a boundary of 100 kB; returns how many are answered in a second of this process's CPU.

    All peers are in this process; what else the machine does must not count.
    """
    began = time.process_time()
    for number in range(count):
        tensors = boundary(100_000, number)
        reply = await honest.network.call(victim.id, process(honest.id), tensors, deadline=after(20))
        assert reply.tensors[0].data == tensors[0].data
    return count / (time.process_time() - began)


async def beside(attack: Callable[[Peer, Peer], Any], name: str, calls: int = 1500) -> float:
    """Runs an attack on a peer; returns the rate of an honest peer's calls beside it, of their rate before."""
    limits = NetLimits(max_payload_bytes=4_194_400)
    async with peers(serve_chunks, echo, echo, limits=limits) as (victim, attacker, honest):
        await attacker.host.connect(victim.addresses)
        await honest_calls(honest, victim, 300)
        alone = await honest_calls(honest, victim, calls)
        async with Watch() as watch, attack(attacker, victim):
            beside_it = await honest_calls(honest, victim, calls)
        watch.judge(f"{name}; honest calls {100 * beside_it / alone:.0f} %")
        assert watch.lag_s < MAX_LAG_S  # a time, so only in the slow tier, where all callers of this function are
        return beside_it / alone


@pytest.mark.slow
def test_256_answers_of_4_mb_that_nobody_reads_cost_a_bounded_amount() -> None:
    @asynccontextmanager
    async def attack(attacker: Peer, victim: Peer) -> AsyncIterator[None]:
        async with raw_stream(attacker, victim) as raw:
            for number in range(256):
                raw.send(encode_frame(FrameType.REQUEST, 2 * number + 1, GetChunk(bytes(32), number)))
            await asyncio.sleep(0.5)
            yield
            assert sum(victim.network.answers.capacity.held.values()) <= 33_554_432

    assert run(lambda: beside(attack, "256 unread answers of 4 MB"), timeout_s=60) >= MIN_THROUGHPUT


@pytest.mark.slow
def test_300_requests_half_sent_cost_a_bounded_amount() -> None:
    @asynccontextmanager
    async def attack(attacker: Peer, victim: Peer) -> AsyncIterator[None]:
        async def half() -> None:
            async with raw_stream(attacker, victim) as raw:
                whole = b"".join(encode_frame(FrameType.REQUEST, 1, process(attacker.id), boundary(4_000_000)))
                raw.send(whole[:2_000_000])
                await asyncio.sleep(0.01)

        for _ in range(300):
            await half()
        yield

    assert run(lambda: beside(attack, "300 half-sent requests of 4 MB"), timeout_s=110) >= MIN_THROUGHPUT


@pytest.mark.slow
def test_512_silent_streams_leave_honest_calls_alone() -> None:
    @asynccontextmanager
    async def attack(attacker: Peer, victim: Peer) -> AsyncIterator[None]:
        peer, streams = PeerID.from_base58(victim.id), list[Any]()
        for _ in range(512):
            streams.append(await attacker.host.p2p.call_binary_stream_handler(peer, "/agora/1"))
        yield
        assert len(victim.network.paths) <= 3
        for _, _, writer in streams:
            writer.close()

    assert run(lambda: beside(attack, "512 silent streams"), timeout_s=110) >= MIN_THROUGHPUT


@pytest.mark.slow
def test_a_flood_of_questions_for_the_status_is_rationed() -> None:
    @asynccontextmanager
    async def attack(attacker: Peer, victim: Peer) -> AsyncIterator[None]:
        async with raw_stream(attacker, victim) as raw:
            for number in range(2000):
                raw.send(encode_frame(FrameType.REQUEST, 2 * number + 1, GetStatus()))
            yield

    assert run(lambda: beside(attack, "2,000 questions for the status"), timeout_s=60) >= MIN_THROUGHPUT


def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys whose hashes are computed from now on."""
    keys = list[str]()
    computed = stored_records.dht_id_of

    def count(key: str) -> bytes:
        keys.append(key)
        return computed(key)

    monkeypatch.setattr(stored_records, "dht_id_of", count)
    return keys


@pytest.mark.parametrize("signer", ["nobody", "another", "another run"])
def test_the_search_for_a_new_key_begins_with_the_signature(monkeypatch: pytest.MonkeyPatch, signer: str) -> None:
    validator, author, now = SignedRecords(RUN_ID, 256), Identity.generate(), time.time()
    claim = Claim(author.peer, Span(0, 255), 1, (), "serving", 0.0)
    run = RunId("00" * 32) if signer == "another run" else RUN_ID
    sealed = seal_record(claim, run, author, now + 60)
    if signer != "another run":
        sealed = sealed[:-64] + (Identity.generate().sign(sealed) if signer == "another" else bytes(64))
    keys = searched(monkeypatch)
    assert not validator.validate(DHTRecord(bytes(20), pack(str(author.peer)), pack(sealed), now + 60))
    assert not keys


@pytest.mark.parametrize("spans", [1, 40])
def test_a_member_pays_for_the_search_by_its_span(monkeypatch: pytest.MonkeyPatch, spans: int) -> None:
    async def main() -> None:
        author, now, count = Identity.generate(), time.time(), 400
        validator = SignedRecords(RUN_ID, 256)
        made = BoundedP2P(Replies(PeerID.from_base58(Identity.generate().peer), b""), validator, 256, DhtRules())
        claims = [Claim(author.peer, Span(n % spans, 255), 1, (), "serving", 0.0) for n in range(count)]
        keys = searched(monkeypatch)
        request = dht_pb2.StoreRequest(
            keys=[number.to_bytes(20, "big") for number in range(count)],
            subkeys=[pack(str(author.peer))] * count,
            values=[pack(seal_record(each, RUN_ID, author, now + 60)) for each in claims],
            expiration_time=[now + 60] * count,
            in_cache=[False] * count,
        )
        began = asyncio.get_running_loop().time()
        assert not any(await made._keep_own_records(request, author.peer))
        seconds = BURST_S + asyncio.get_running_loop().time() - began
        assert len(keys) <= seconds * (TOKENS_PER_S + 256 * TOKENS_PER_STAGE) / LOOKUP_PRICE
        if spans == 1:
            assert len(keys) == 4096, "once for all keys of one record"
        else:
            assert validator.refused["busy"] > count / 4

    run(main)


def test_a_record_of_all_stages_is_stored_under_each_of_its_keys() -> None:
    async def main() -> None:
        author, now, validator = Identity.generate(), time.time(), SignedRecords(RUN_ID, 64)
        made = BoundedP2P(Replies(PeerID.from_base58(Identity.generate().peer), b""), validator, 64, DhtRules())
        claim = Claim(author.peer, Span(0, 63), 1, (), "serving", 0.0)
        bits = shard_bits(shard_hash(RUN_ID, author.peer), MAX_SHARD_BITS)
        keys = [record_key(RUN_ID, Claim, stage, bits[:depth]) for stage in range(64) for depth in (0, 4, 5)]
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(key).to_bytes() for key in keys],
            subkeys=[pack(str(author.peer))] * len(keys),
            values=[pack(seal_record(claim, RUN_ID, author, now + 60))] * len(keys),
            expiration_time=[now + 60] * len(keys),
            in_cache=[False] * len(keys),
        )
        assert all(await made._keep_own_records(request, author.peer))

    run(main)
