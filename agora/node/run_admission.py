"""Who takes part in the run, for one daemon: judges other peers, keeps bans on disk, and passes revocations on.

Knows: the admission book, its files, the network's gate, who must forget a banned peer. Must not know: the rules
(agora/swarm/admission.py), spans, training.

A revocation comes from `swarm ban`, from a neighbour or from the DHT. One that is new is written to the disk; the
connections of the banned peer end; the view, the directory and the routing forget it; and all neighbours are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from agora_protocol import __version__
from agora_protocol.errors import AgoraError, DiskError, NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, Span
from agora_protocol.limits import MAX_SHARED_REVOCATIONS
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import ShareRevocations, TookRevocations
from agora_protocol.records import BanList, Claim, Record
from agora_protocol.shards import Shard

from agora.calls import Reply
from agora.clock import loop_time
from agora.net.directory import Directory
from agora.net.gate import Gate
from agora.net.incoming import IncomingCall
from agora.net.network import Network
from agora.node import admission_files
from agora.node.paths import Home
from agora.node.startup import Startup
from agora.observe import events
from agora.swarm.admission import AdmissionPolicy
from agora.swarm.admission_book import AdmissionBook

SHARE_S = 10.0
"""Seconds within which a neighbour must answer each message of revocations."""
BAN_LIST_S = 10.0
"""Seconds between two reads of the ban lists in the DHT."""
BAN_LIST_LIFETIME_S = 60.0
"""Seconds after which a published ban list expires, unless it is published again."""
BAN_SHARD = Shard(0)
"""Where ban lists are published."""


def load_book(home: Home, signed: SignedManifest, now_unix: float) -> AdmissionBook:
    """Returns what this machine knows of a run's admission: its manifest, bans and revocations. Raises DiskError."""
    policy, banned = AdmissionPolicy.of(signed.manifest), admission_files.read_banned(home)
    book = AdmissionBook(signed.run_id, policy, banned)
    for sealed in admission_files.read_revocations(home, signed.run_id):
        with contextlib.suppress(AgoraError):  # one that does not count any more is as good as none
            book.add_revocation(sealed, now_unix)
    return book


class PeerDataHolder(Protocol):
    """Protocol: something that keeps data of peers, and drops those that are banned or expired."""

    def forget_refused(self) -> None:
        """Drops the data of all peers that must not be called any more."""


class RunAdmission:
    """Judges who takes part in a run, keeps its bans, and is the guard of its DHT (a DhtGuard).

    gate: for the network. proof: this machine's own tickets, b"" for none. Bans reach connections after `attach`.
    """

    def __init__(
        self,
        startup: Startup,
        signed: SignedManifest,
        addresses: Sequence[str],
        proof: bytes,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Reads the revocations and bans that are on this disk. Raises DiskError."""
        self._startup = startup
        self._run = run = signed.run_id
        self._unix = unix
        self.proof = proof
        self.book = load_book(startup.home, signed, unix())
        self.gate = Gate(
            startup.me,
            run,
            f"agora {__version__}",
            addresses,
            proof=proof,
            judge=lambda peer, shown: self.book.judge(peer, shown, self._unix()).role,
            why_not=lambda peer: self.book.why_not_to_call(peer, self._unix()),
        )
        self._network: Network | None = None
        self._data_holders: tuple[PeerDataHolder, ...] = ()

    def attach(self, network: Network, *data_holders: PeerDataHolder) -> None:
        """From now on, sends revocations over `network`, and has each of `data_holders` drop peers that are banned.

        Peers whose tickets have expired are dropped in the same way.
        """
        self._network, self._data_holders = network, data_holders
        network.on_met.append(self._send_revocations)

    # --- who takes part (a DhtGuard)

    def is_member(self, peer: PeerId) -> bool:
        """Returns whether `peer` is a member by the last proof that it has shown, or without one in an open run."""
        return self.book.is_member(peer, self._unix())

    def may_call(self, peer: PeerId) -> bool:
        """Returns whether `peer` may be dialled."""
        return self.gate.refusal(peer) is None

    def is_greeted(self, peer: PeerId) -> bool:
        """Returns whether HELLO was exchanged with `peer`, which is a member of the run."""
        return self.gate.is_greeted(peer)

    async def greet(self, peer: PeerId, *, anew: bool = False, named_by: PeerId | None = None) -> bool:
        """Exchanges HELLOs with `peer` if there is no connection (anew: in any case); returns if it is a member.

        named_by: who is asked for its addresses if need be.
        """
        return self._network is not None and await self._network.greet(peer, anew=anew, named_by=named_by)

    def is_by_member(self, record: Record) -> bool:
        """Returns whether a verified record is kept: of a member, which a claim proves by the proof in it.

        A ban list is always kept: the signatures in it count, whoever publishes it.
        """
        if isinstance(record, Claim):
            return self.book.is_member_by_proof(record.peer, record.proof, self._unix())
        return isinstance(record, BanList) or self.is_member(record.peer)

    # --- bans

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers ShareRevocations (the network's handler)."""
        assert isinstance(call.message, ShareRevocations)
        return Reply(TookRevocations(*self.take(call.message.revocations)))

    def take(self, sealed: Sequence[bytes]) -> tuple[int, int]:
        """Verifies revocations; new ones are written to disk, enforced, and sent to all neighbours.

        Returns how many were new, and how many do not count; those known already are neither.
        """
        new, refused = list[bytes](), 0
        for data in sealed:
            try:
                revocation = self.book.add_revocation(data, self._unix())
            except (NotAdmitted, ProtocolError):
                refused += 1
                continue
            if revocation is not None:
                new.append(data)
                self._startup.report_event(events.PeerBanned(revocation.subject, f"by {revocation.issuer}"))
        if new:
            self._write_revocations()
            self.enforce()
            for peer in self._network.members() if self._network is not None else ():
                self._send(peer, new)
        return len(new), refused

    def ban_here(self, peer: PeerId) -> None:
        """Bans a peer from this machine until the daemon ends; the caller writes it to banned.txt for later starts."""
        self.book.banned_here.add(peer)
        self._startup.report_event(events.PeerBanned(peer, "by this machine's owner"))
        self.enforce()

    def enforce(self) -> None:
        """Ends connections with peers that take part no more, and has everything forget them."""
        if self._network is not None:
            self._network.end_refused()
        for each in self._data_holders:
            each.forget_refused()

    def _write_revocations(self) -> None:
        """Writes the revocations to the disk; when that fails, it is reported and they hold until the daemon ends."""
        try:
            admission_files.write_revocations(self._startup.home, self._run, self.book.sealed_revocations())
        except DiskError as error:
            self._startup.report_event(events.DiskTrouble(str(self._startup.home.revocations(self._run)), str(error)))

    def _send_revocations(self, peer: PeerId) -> None:
        """Called when HELLO was exchanged with a member: sends it all revocations that are known here."""
        if sealed := self.book.sealed_revocations():
            self._send(peer, sealed)

    def _send(self, peer: PeerId, sealed: Sequence[bytes]) -> None:
        """Sends revocations to a neighbour, in a task. If that fails, it gets them at its next HELLO or by the DHT."""
        if self._network is not None:
            self._network.spawn(self._call_in_parts(self._network.call, peer, sealed))

    async def _call_in_parts(
        self, call: Callable[..., Awaitable[Reply]], peer: PeerId, sealed: Sequence[bytes]
    ) -> None:
        """Sends revocations by `call`, MAX_SHARED_REVOCATIONS at a time; stops at the first failure."""
        with contextlib.suppress(AgoraError):
            for first in range(0, len(sealed), MAX_SHARED_REVOCATIONS):
                request = ShareRevocations(tuple(sealed[first : first + MAX_SHARED_REVOCATIONS]))
                await call(peer, request, deadline=loop_time() + SHARE_S)

    async def exchange_ban_lists(self, directory: Directory) -> None:
        """Every BAN_LIST_S, until cancelled, publishes the newest revocations in the DHT and takes those of others.

        Also drops peers whose tickets have expired.
        """
        while True:
            await asyncio.sleep(BAN_LIST_S)
            with contextlib.suppress(AgoraError):
                if newest := self.book.sealed_revocations()[-MAX_SHARED_REVOCATIONS:]:
                    record = BanList(self._startup.me, Span(0, 0), tuple(newest))
                    await directory.publish(record, self._startup.identity, BAN_LIST_LIFETIME_S, [BAN_SHARD])
                found = await directory.read_many(BanList, [BAN_SHARD])
                for record_found in found.get(BAN_SHARD, []):
                    if isinstance(record_found, BanList):
                        self.take(record_found.revocations)
            self.enforce()
