"""Claims about admission with real hosts, a real DHT and real files: what a stranger gets, and what a ban ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.amendments import Amendment, seal_amendment
from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.errors import NotAdmitted
from agora_protocol.frames import FrameType, encode_frame
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.manifest import Manifest, SignedManifest, preset
from agora_protocol.messages import (
    KINDS,
    GetAddresses,
    GetStatus,
    Message,
    PeerAddresses,
    Refusal,
    ShareRevocations,
    TookRevocations,
)
from agora_protocol.packing import pack, pack_canonical
from agora_protocol.records import Claim, record_key, seal_record
from agora_protocol.tickets import READER, Revocation, Ticket, make_proof, seal_revocation, seal_ticket
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2

from agora.core.calls import Reply
from agora.net.dht.bounded_dht import DhtRules
from agora.net.dht.directory import Directory
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from agora.node import run_files
from agora.node.paths import Home
from agora.node.peer.run_admission import Bans, RunAdmission, load_admission_book
from agora.node.process import joining
from agora.observe import events
from tests.net.helpers import Peer, after, echo, introduce, make_host, open_directory, run, until
from tests.net.test_hostile import raw_stream
from tests.protocol.conftest import PROTOCOL

FOUNDER = Identity(bytes([1]) * 32)
SHARD = DirectoryShard(0)


def all_requests() -> list[tuple[str, bytes]]:
    """A frame of every request that there is, from the vectors of the protocol, all with call 1."""
    vectors = json.loads((PROTOCOL / "vectors" / "frames.json").read_text())
    frames = {it["message"]: bytes.fromhex(it["bytes"]["hex"]) for it in vectors if it["type"] == "REQUEST"}
    expected = {kind.__name__ for kind in KINDS.values() if FrameType.REQUEST in kind.FRAMES}
    assert frames.keys() == expected, "every kind of request"
    return [(name, data[:4] + (1).to_bytes(4, "little") + data[8:]) for name, data in frames.items()]


def signed(mode: str = "ticket", **admission: Any) -> SignedManifest:
    return SignedManifest.sign(preset("tiny", admission={"mode": mode, **admission}), FOUNDER)


def ticket_of(run_id: RunId, holder: PeerId, role: str = "member") -> bytes:
    ticket = Ticket(FOUNDER.peer, holder, False, role, int(time.time()) + 600)
    return make_proof(seal_ticket(ticket, run_id, FOUNDER))


def ban_of(run_id: RunId, subject: PeerId) -> bytes:
    return seal_revocation(Revocation(FOUNDER.peer, subject, int(time.time()), b""), run_id, FOUNDER)


@dataclass
class Member(Peer):
    """A peer with its admission and its node of the DHT, as a daemon has them. answered: what its handler answered."""

    admission: RunAdmission
    bans: Bans
    directory: Directory
    home: Home
    answered: list[Message]
    context: Any

    def publish(self) -> Awaitable[bool]:
        """Publishes this peer's claim."""
        claim = Claim(self.id, Span(0, 0), 1, (), "serving", 0.0, proof=self.admission.proof)
        return self.directory.publish(claim, self.identity, 30.0, [SHARD])

    async def claimants(self) -> set[PeerId]:
        """The peers whose claims it reads."""
        return {record.peer for record in (await self.directory.read_many(Claim, [SHARD])).get(SHARD, [])}


async def make_member(
    folder: Path, name: str, manifest: SignedManifest, proof: bytes | None, unix: Callable[[], float]
) -> Member:
    """proof: None for a ticket of the founder. unix: the clock by which it judges others."""
    host, identity = await make_host(folder / name, "identity")
    home, events = Home(folder / name), list[Any]()
    addresses = await host.addresses()
    context: Any = SimpleNamespace(home=home, me=host.peer, identity=identity, report_event=events.append)
    shown = ticket_of(manifest.run_id, host.peer) if proof is None else proof
    admission = RunAdmission(context, manifest, shown, addresses=lambda: addresses, unix=unix)
    answered = list[Message]()

    async def answer(call: IncomingCall) -> Reply:
        """Answers as a daemon does, as far as admission goes."""
        answered.append(call.message)
        if isinstance(call.message, GetAddresses):
            return Reply(PeerAddresses(network.addresses_of(call.message.peer)))
        return await (bans.answer if isinstance(call.message, ShareRevocations) else echo)(call)

    network = Network(host, admission.gate, answer, on_handshake=lambda peer: bans.send_revocations(peer))
    rules = DhtRules(
        may_call=admission.may_call,
        is_admitted_member=admission.gate.is_admitted_member,
        is_from_member=admission.is_from_member,
        greet=network.connect_member,
    )
    directory = await open_directory(host, manifest.run_id, (), stages=2, rules=rules)
    bans = Bans(context, manifest.run_id, admission.book, network, [directory], unix=unix)
    await network.start()
    network.spawn(network.check_connections())
    return Member(host, network, identity, addresses, [], [], admission, bans, directory, home, answered, context)


@asynccontextmanager
async def swarm(
    folder: Path, manifest: SignedManifest, proofs: Sequence[bytes | None], unix: Callable[[], float] = time.time
) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        made = []
        for number, proof in enumerate(proofs):
            member = await make_member(folder, f"p{number}", manifest, proof, unix)
            stack.push_async_callback(member.close)
            stack.push_async_callback(member.directory.close)
            made.append(member)
        introduce(*made)
        yield made


def hello_frame(gate: Gate, to: PeerId) -> bytes:
    return b"".join(encode_frame(FrameType.HELLO, 0, gate.hello_to(to)))


async def hears(caller: Member, to: Member, *said: bytes) -> list[tuple[FrameType, str]]:
    """What comes back on a new stream after these bytes, up to a GOODBYE or a REFUSAL: frame types and codes."""
    async with raw_stream(caller, to, b"".join(said)) as raw, asyncio.timeout(5):
        heard: list[tuple[FrameType, str]] = []
        while not heard or heard[-1][0] not in (FrameType.GOODBYE, FrameType.REFUSAL):
            prefix, message = await raw.next()
            assert (
                to.admission.gate is not caller.admission.gate
                and signed().run_id.encode() not in repr(message).encode()
            )
            if prefix.type is not FrameType.REQUEST:  # the callee pings a peer that it has admitted
                heard.append((prefix.type, message.code if isinstance(message, Refusal) else ""))
        return heard


async def reads_and_does_nothing_else(reader: Member, member: Member, run_id: RunId) -> None:
    """With a ticket of a reader the same peer may ask for six things, and is not a member."""
    gate = Gate(reader.id, run_id, "raw", proof=ticket_of(run_id, reader.id, READER), role=READER)
    may = {"Ping", "GetStatus", "GetManifest", "GetAmendments", "ShareRevocations", "ShareAmendments"}
    hello = hello_frame(gate, member.id)
    for name, request in all_requests():
        if name not in may:
            heard = await hears(reader, member, hello, request)
            assert heard == [(FrameType.HELLO, ""), (FrameType.REFUSAL, "not-admitted")], name
    assert not member.answered
    assert not member.admission.gate.is_admitted_member(reader.id)
    async with raw_stream(reader, member, hello + dict(all_requests())["GetStatus"]) as raw, asyncio.timeout(5):
        assert [(await raw.next())[0].type for _ in range(2)] == [FrameType.HELLO, FrameType.ANSWER]


def test_an_unadmitted_peer_gets_nothing_whatever_it_sends_and_a_reader_only_reads(tmp_path: Path) -> None:
    """It knows address and run id, even a ticket of somebody else's, and gets one GOODBYE: no HELLO, no answer."""

    async def main() -> None:
        manifest = signed()
        async with swarm(tmp_path, manifest, [None, b""]) as (member, stranger):
            run_id, refused = manifest.run_id, [(FrameType.GOODBYE, "not-admitted")]
            stolen = member.admission.proof
            gates = {
                "no ticket": Gate(stranger.id, run_id, "raw"),
                "another's ticket": Gate(stranger.id, run_id, "raw", proof=stolen),
                "a reader's ticket": Gate(stranger.id, run_id, "raw", proof=ticket_of(run_id, stranger.id, READER)),
                "a ticket of another run": Gate(stranger.id, run_id, "raw", proof=b""),
            }
            await stranger.host.connect(member.addresses)
            for gate in gates.values():
                assert await hears(stranger, member, hello_frame(gate, member.id)) == refused
            other = Gate(stranger.id, RunId("cd" * 32), "raw")
            assert await hears(stranger, member, hello_frame(other, member.id)) == [(FrameType.GOODBYE, "wrong-run")]
            hello = hello_frame(gates["no ticket"], member.id)
            for name, request in all_requests():
                assert await hears(stranger, member, hello, request) == refused, name
                assert await hears(stranger, member, request) == [(FrameType.REFUSAL, "out-of-order")], name
            assert not member.answered
            with pytest.raises(NotAdmitted):
                await stranger.network.call(member.id, GetStatus(), deadline=after(5))
            with pytest.raises(NotAdmitted):
                await member.network.call(stranger.id, GetStatus(), deadline=after(5))
            assert not stranger.answered
            assert not member.network.paths
            await reads_and_does_nothing_else(stranger, member, run_id)

    run(main)


def dht_calls(node: Any, run_id: RunId, stranger: Member) -> dict[str, Any]:
    """A request of each kind of call of the DHT, by name; the one to store brings a record of `stranger`."""
    key, expires = DHTID.generate(record_key(run_id, Claim, 0)).to_bytes(), time.time() + 30
    claim = Claim(stranger.id, Span(0, 0), 1, (), "serving", 0.0)
    sealed = pack(seal_record(claim, run_id, stranger.identity, expires))
    stored = {
        "subkeys": [pack(str(stranger.id))],
        "values": [sealed],
        "expiration_time": [expires],
        "in_cache": [False],
    }
    return {
        "rpc_ping": dht_pb2.PingRequest(peer=node),
        "rpc_find": dht_pb2.FindRequest(keys=[key], peer=node),
        "rpc_store": dht_pb2.StoreRequest(keys=[key], peer=node, **stored),
    }


def test_the_dht_answers_members_only_and_keeps_only_the_callers_own_records(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = signed()
        async with swarm(tmp_path, manifest, [None, None, b""]) as (first, second, stranger):
            await second.directory.bootstrap(first.addresses)
            assert await second.publish()
            assert await first.claimants() == {second.id}
            for caller in (stranger, second):
                protocol = caller.directory._node.protocol
                await caller.host.connect(first.addresses)
                bare: Any = super(type(protocol), protocol).get_stub(protocol.p2p._p2p, PeerID.from_base58(first.id))
                for name, request in dht_calls(protocol.node_info, manifest.run_id, stranger).items():
                    asking = getattr(bare, name)(request, timeout=5)
                    if caller is stranger:
                        with pytest.raises(P2PHandlerError, match="say HELLO first"):
                            await asking
                    elif name == "rpc_store":
                        assert list((await asking).store_ok) == [False], "a record of somebody else"
                    else:
                        await asking
            assert await first.claimants() == {second.id}
            assert not await stranger.claimants()
            assert stranger.directory.neighbours == 0
            known = first.directory._node.protocol.routing_table.peer_id_to_uid
            assert {str(peer) for peer in known} == {second.id}

    run(main)


def test_a_node_that_forgot_a_caller_is_greeted_anew_and_a_claim_without_a_ticket_is_in_no_view(tmp_path: Path) -> None:
    """It forgets as by a restart, while the caller's connection has not broken yet."""

    async def main() -> None:
        async with swarm(tmp_path, signed(), [None, None]) as (first, second):
            await second.directory.bootstrap(first.addresses)
            assert await second.publish()
            first.admission.gate.forget(second.id)
            assert not first.admission.gate.is_admitted_member(second.id)
            assert await second.publish()
            assert first.admission.gate.is_admitted_member(second.id)
            assert await first.claimants() == {second.id}
            second.admission.proof = b""
            assert await second.publish() and await first.claimants() == set(), "a claim without a ticket"

    run(main)


def test_a_node_that_has_moved_is_met_where_the_one_that_names_it_says(tmp_path: Path) -> None:
    """The libp2p process itself looks for no peer. Of one that it has not met, a member says nothing."""

    async def main() -> None:
        async with swarm(tmp_path, signed(), [None, None, None]) as (first, second, third):
            for member, other in ((second, third), (third, second)):
                member.network.address_book.learn(other.id, [f"/ip4/127.0.0.1/tcp/9/p2p/{other.id}"])
            for member in (second, third):
                await member.directory.bootstrap(first.addresses)
                assert await member.publish()
            assert await third.claimants() == {second.id, third.id}
            assert second.id in third.network.paths
            assert second.id in {each.peer for each in first.answered if isinstance(each, GetAddresses)}
            assert third.network.addresses_of(second.id) == second.addresses
            assert first.network.addresses_of(FOUNDER.peer) == ()

    run(main, timeout_s=60.0)


def test_a_ban_ends_everything_at_every_neighbour_and_outlasts_the_daemon(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = signed()
        async with swarm(tmp_path, manifest, [None, None, None]) as (first, second, banned):
            for member in (second, banned):
                await member.directory.bootstrap(first.addresses)
                assert await member.publish()
            await first.network.call(banned.id, GetStatus(), deadline=after(5))
            await second.network.call(first.id, GetStatus(), deadline=after(5))
            assert await first.claimants() == {second.id, banned.id}
            assert first.bans.take_revocations([ban_of(manifest.run_id, banned.id)]) == (1, 0)
            for member in (first, second):
                await until(lambda member=member: not member.admission.is_member(banned.id))
                await until(lambda member=member: banned.id not in member.network.paths)
                assert await member.claimants() == {second.id}
                with pytest.raises(NotAdmitted, match="banned"):
                    await member.network.call(banned.id, GetStatus(), deadline=after(5))
            known = first.directory._node.protocol.routing_table.peer_id_to_uid
            async with asyncio.timeout(60.0):  # a reply that was on its way may bring it back until it is called next
                while banned.id in {str(peer) for peer in known}:
                    assert await first.claimants() == {second.id}
            answered = len(banned.answered)
            with pytest.raises(NotAdmitted, match="banned"):
                await banned.network.call(first.id, GetStatus(), deadline=after(5))
            assert not await banned.network.connect_member(second.id)
            assert len(banned.answered) == answered
            again = RunAdmission(first.context, manifest, first.admission.proof)
            assert not again.is_member(banned.id)
            assert again.is_member(FOUNDER.peer)

    run(main)


def test_a_member_that_connects_later_is_told_of_every_ban_and_ends_with_its_ticket(tmp_path: Path) -> None:
    async def main() -> None:
        manifest, now = signed(), [time.time()]
        async with swarm(tmp_path, manifest, [None, None], lambda: now[0]) as (first, second):
            bans = [ban_of(manifest.run_id, Identity.generate().peer) for _ in range(30)]
            first.bans.take_revocations(bans)
            await second.network.call(first.id, GetStatus(), deadline=after(5))
            await until(lambda: len(second.admission.book.signed_revocations()) == 30)
            assert second.home.revocations(manifest.run_id).stat().st_mode & 0o777 == 0o600
            forged = seal_revocation(
                Revocation(second.id, first.id, int(time.time()), b""), manifest.run_id, second.identity
            )
            answer = await second.network.call(first.id, ShareRevocations((forged, bans[0])), deadline=after(5))
            assert answer.message == TookRevocations(new=0, refused=1)
            now[0] += 3600
            first.network.end_refused()
            assert not first.network.members(), "their tickets have ended"
            with pytest.raises(NotAdmitted, match="expired"):
                await first.network.call(second.id, GetStatus(), deadline=after(5))

    run(main)


def test_an_owner_bans_a_peer_from_this_machine_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, signed("open"), [b"", b"", b""]) as (first, second, third):
            await first.network.call(third.id, GetStatus(), deadline=after(5))
            first.bans.ban_here(run_files.add_banned(first.home, third.id))
            await until(lambda: third.id not in first.network.paths)
            with pytest.raises(NotAdmitted, match="owner"):
                await first.network.call(third.id, GetStatus(), deadline=after(5))
            await second.network.call(third.id, GetStatus(), deadline=after(5))
            assert run_files.read_banned(first.home) == [third.id]

    run(main)


def test_in_mode_listed_only_the_listed_are_called_and_strangers_read_if_the_manifest_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        peers = [Identity.load_or_create(tmp_path / name / "identity.key").peer for name in ("p0", "p1")]
        manifest = signed("listed", peers=peers, public_status=True)
        async with swarm(tmp_path, manifest, [b"", b"", b""]) as (first, other, stranger):
            await first.network.call(other.id, GetStatus(), deadline=after(5))
            with pytest.raises(NotAdmitted):
                await first.network.call(stranger.id, GetStatus(), deadline=after(5))
            assert not first.admission.may_call(stranger.id)
            assert not first.admission.is_member(stranger.id)
            await stranger.host.connect(first.addresses)
            gate = Gate(stranger.id, manifest.run_id, "raw")
            assert await hears(stranger, first, hello_frame(gate, first.id)) == [(FrameType.GOODBYE, "not-admitted")]
            reader_gate = Gate(stranger.id, manifest.run_id, "raw", role=READER)
            said = hello_frame(reader_gate, first.id) + dict(all_requests())["GetStatus"]
            async with raw_stream(stranger, first, said) as raw, asyncio.timeout(5):
                assert [(await raw.next())[0].type for _ in range(2)] == [FrameType.HELLO, FrameType.ANSWER]

    run(main)


def test_when_admission_is_amended_who_is_out_loses_its_connections_and_records_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = signed("open")
        async with swarm(tmp_path, manifest, [b"", b"", b""]) as (first, second, out):
            before, amended = manifest.manifest, signed("listed", peers=[first.id, second.id]).manifest
            for member in (second, out):
                await member.network.call(first.id, GetStatus(), deadline=after(5))
                await member.directory.bootstrap(first.addresses)
                assert await member.publish()
            assert await first.claimants() == {second.id, out.id}
            await until(lambda: {second.id, out.id} <= set(first.network.members()))

            def follow(member: Member, manifest: Manifest) -> events.AdmissionChanged | None:
                changed = member.admission.follow(manifest, member.id)
                if changed is not None:
                    member.bans.enforce()
                return changed

            assert follow(first, before) is None, "nothing has changed"
            assert follow(first, amended) == events.AdmissionChanged("listed", 2, False, True)
            assert follow(out, amended) == events.AdmissionChanged("listed", 2, False, False)
            follow(second, amended)
            await until(lambda: set(first.network.members()) == {second.id})
            assert await first.claimants() == {second.id}
            assert not first.admission.may_call(out.id) and not first.admission.gate.is_admitted_member(out.id)
            assert await hears(out, first, hello_frame(out.admission.gate, first.id)) == [
                (FrameType.GOODBYE, "not-admitted")
            ]
            for member in (first, second, out):
                assert follow(member, before) == events.AdmissionChanged("open", 0, False, True)
            await out.network.call(first.id, GetStatus(), deadline=after(10))

    run(main)


def test_a_machine_judges_itself_by_the_amendments_that_it_knows(tmp_path: Path) -> None:
    manifest, home, me = signed("open"), Home(tmp_path), Identity(bytes([7]) * 32)
    values = {"admission.mode": "listed", "admission.peers": [FOUNDER.peer]}
    amendment = Amendment(
        FOUNDER.peer, 1, bytes.fromhex(manifest.run_id), 10, 100, int(time.time()), pack_canonical(values), b""
    )
    assert load_admission_book(home, manifest, time.time()).is_member(me.peer, time.time())
    run_files.write_amendments(home, manifest.run_id, [seal_amendment(amendment, manifest.run_id, FOUNDER)])
    book = load_admission_book(home, manifest, time.time())
    assert not book.is_member(me.peer, time.time()) and book.is_member(FOUNDER.peer, time.time())


def test_a_daemon_that_starts_does_not_dial_whom_it_remembers_as_banned(tmp_path: Path) -> None:
    manifest, home = signed("open"), Home(tmp_path)
    banned, banned_here, other = (Identity(bytes([n]) * 32).peer for n in (20, 21, 22))
    run_files.write_revocations(home, manifest.run_id, [ban_of(manifest.run_id, banned)])
    run_files.add_banned(home, banned_here)
    context: Any = SimpleNamespace(home=home)
    known = [f"/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in (banned, banned_here, other)]
    assert joining.leave_out_banned(context, manifest, known) == tuple(known[2:])
    assert joining.leave_out_banned(context, None, known) == (known[0], known[2]), "the run's bans are not known yet"
