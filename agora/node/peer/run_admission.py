"""Decides for one daemon who takes part in the run: judges other peers, keeps bans on disk, passes revocations on.

A revocation comes from `swarm ban`, from a neighbour or from the DHT. One that is new is written to the disk; the
connections of the banned peer end; the view, the directory and the routing forget the peer; and the revocation is sent
to all neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.errors import AgoraError, DiskError, NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import MAX_SHARED_REVOCATIONS
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.manifest_sections import AdmissionSection
from agora_protocol.messages import ShareRevocations, TookRevocations
from agora_protocol.records import BanList, Claim, Record

from agora import SOFTWARE
from agora.core.calls import Reply
from agora.net.dht.directory import Directory
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from agora.node import run_files
from agora.node.daemon_context import DaemonContext
from agora.node.paths import Home
from agora.observe import events
from agora.swarm.admission import AdmissionBook, AdmissionPolicy, refusal_of_version

SHARE_TIMEOUT_S = 10.0  # seconds within which a neighbour must answer each message of revocations
BAN_LIST_INTERVAL_S = 10.0  # seconds between two reads of the ban lists in the DHT
BAN_LIST_LIFETIME_S = 60.0  # seconds after which a published ban list expires, unless it is published again
BAN_SHARD = DirectoryShard(0)  # the shard of the DHT in which ban lists are published


def load_admission_book(home: Home, signed: SignedManifest, now_unix: float) -> AdmissionBook:
    """Returns the admission book of a run: policy, as the last amendment on this disk has it, bans and revocations.

    Leaves out revocations that are invalid by now. Raises DiskError when a file cannot be read.
    """
    banned = run_files.read_banned(home)
    policy = AdmissionPolicy.of(run_files.manifest_on_disk([home], signed, now_unix))
    book = AdmissionBook(signed.run_id, policy, banned)
    for sealed in run_files.read_revocations(home, signed.run_id):
        with contextlib.suppress(AgoraError):  # one that does not count any more is as good as none
            book.add_revocation(sealed, now_unix)
    return book


class PeerDataHolder(Protocol):
    """Protocol: an object that keeps data of peers, and can drop the data of peers that are not admitted any more."""

    def forget_refused(self) -> None:
        """Drops the data of all peers that are not admitted any more: banned, or with an expired ticket."""


class RunAdmission:
    """Decides which peers may take part in the run, and whose records this peer's DHT node keeps.

    gate: judges HELLOs for the network. proof: this machine's own tickets, b"" for none. book: what is known of the
    run's admission.
    """

    def __init__(
        self,
        context: DaemonContext,
        signed: SignedManifest,
        proof: bytes,
        *,
        addresses: Callable[[], Sequence[str]] = tuple,
        rules: Callable[[], AdmissionSection] | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Reads the revocations and bans that are on this disk. Raises DiskError.

        addresses: returns where this peer can be dialled, sent in HELLO. rules: returns the manifest's
        admission section as it was amended last; None: the signed one. unix: returns the present unix time.
        """
        self._unix = unix
        self.proof = proof
        self.book = load_admission_book(context.home, signed, unix())
        self.gate = Gate(
            context.me,
            signed.run_id,
            SOFTWARE,
            addresses,
            proof=proof,
            judge=lambda peer, shown: self.book.judge(peer, shown, self._unix()).role,
            refusal_reason=lambda peer: self.book.refusal_reason(peer, self._unix()),
            refusal_of_version=lambda software: refusal_of_version(
                software, rules() if rules is not None else signed.manifest.admission, self._unix()
            ),
        )

    def follow(self, manifest: Manifest, me: PeerId) -> events.AdmissionChanged | None:
        """Admits by another manifest from now on, as it was amended; returns what that changes, None if nothing.

        Connections to those that are not admitted any more are ended by Bans.enforce.
        """
        policy = AdmissionPolicy.of(manifest)
        if policy == self.book.policy:
            return None
        self.book.policy = policy
        is_admitted = self.book.admits_signer(me, self.proof, self._unix())
        return events.AdmissionChanged(policy.mode, len(policy.listed), policy.public_status, is_admitted)

    def is_member(self, peer: PeerId) -> bool:
        """Returns whether `peer` is a member now, by the last proof that it has shown; in an open run it needs none."""
        return self.book.is_member(peer, self._unix())

    def may_call(self, peer: PeerId) -> bool:
        """Returns whether `peer` may be dialled: it is not banned, and a member as far as its proof is known."""
        return self.gate.find_refusal(peer) is None

    def is_from_member(self, record: Record) -> bool:
        """Returns whether the DHT node may keep a verified record: its peer is a member, or it is a ban list.

        A claim is judged by the proof in it, which the book remembers. A ban list may come from any peer: the
        signatures of its revocations count.
        """
        if isinstance(record, Claim):
            return self.book.is_member_by_proof(record.peer, record.proof, self._unix())
        return isinstance(record, BanList) or self.is_member(record.peer)


class Bans:
    """Takes, enforces and passes on the bans of a run, and those of this machine's owner.

    To enforce is to end the network's connections with peers that are not admitted any more, and to have the holders of
    peers' data forget them.
    """

    def __init__(
        self,
        context: DaemonContext,
        run: RunId,
        book: AdmissionBook,
        network: Network,
        data_holders: Sequence[PeerDataHolder],
        *,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._run = run
        self._book = book
        self._network = network
        self._data_holders = data_holders
        self._unix = unix

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a ShareRevocations request: takes the revocations; replies how many are new and how many invalid."""
        assert isinstance(call.message, ShareRevocations)
        new, refused = self.take_revocations(call.message.revocations)
        return Reply(TookRevocations(new, refused))

    def take_revocations(self, sealed: Sequence[bytes]) -> tuple[int, int]:
        """Verifies sealed revocations; reports new ones, writes them to disk, enforces them, sends them to neighbours.

        Returns, before they are sent, (number of new ones, number of invalid ones); known ones count in neither number.
        """
        new = list[bytes]()
        refused = 0
        for data in sealed:
            try:
                revocation = self._book.add_revocation(data, self._unix())
            except (NotAdmitted, ProtocolError):
                refused += 1
                continue
            if revocation is not None:
                new.append(data)
                self._context.report_event(events.PeerBanned(revocation.subject, f"by {revocation.issuer}"))
        if new:
            self._write_revocations()
            self.enforce()
            for peer in self._network.members():
                self._start_sending(peer, new)
        return len(new), refused

    def ban_here(self, peer: PeerId) -> None:
        """Bans a peer from this machine from now on, and reports it. The caller writes banned.txt, for later starts."""
        self._book.banned_here.add(peer)
        self._context.report_event(events.PeerBanned(peer, "by this machine's owner"))
        self.enforce()

    def enforce(self) -> None:
        """Ends connections with peers that are not admitted any more, and has the data holders forget them."""
        self._network.end_refused()
        for each in self._data_holders:
            each.forget_refused()

    def _write_revocations(self) -> None:
        try:
            run_files.write_revocations(self._context.home, self._run, self._book.signed_revocations())
        except DiskError as error:  # they then hold only until the daemon ends
            self._context.report_event(events.DiskTrouble(str(self._context.home.revocations(self._run)), str(error)))

    def send_revocations(self, peer: PeerId) -> None:
        """Starts to send all revocations to a member that has said HELLO."""
        if sealed := self._book.signed_revocations():
            self._start_sending(peer, sealed)

    def _start_sending(self, peer: PeerId, sealed: Sequence[bytes]) -> None:
        parts = range(0, len(sealed), MAX_SHARED_REVOCATIONS)
        requests = (ShareRevocations(tuple(sealed[first : first + MAX_SHARED_REVOCATIONS])) for first in parts)
        # If it fails, the neighbour gets them at its next HELLO, or from the DHT.
        self._network.start_calls(peer, requests, SHARE_TIMEOUT_S)

    async def exchange_lists(self, directory: Directory) -> None:
        """Every BAN_LIST_INTERVAL_S, until cancelled, publishes the newest revocations in the DHT and takes others'
        from there.

        Then ends connections with peers whose tickets have expired. Ignores failures of the DHT until the next time.
        """
        while True:
            await asyncio.sleep(BAN_LIST_INTERVAL_S)
            with contextlib.suppress(AgoraError):
                if newest := self._book.signed_revocations()[-MAX_SHARED_REVOCATIONS:]:
                    record = BanList(self._context.me, Span(0, 0), tuple(newest))
                    await directory.publish(record, self._context.identity, BAN_LIST_LIFETIME_S, [BAN_SHARD])
                found = await directory.read_many(BanList, [BAN_SHARD])
                for record_found in found.get(BAN_SHARD, []):
                    if isinstance(record_found, BanList):
                        self.take_revocations(record_found.revocations)
            self.enforce()
