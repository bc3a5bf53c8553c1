"""The amendments of the run, for one daemon: takes them from its owner and from peers, keeps them, passes them on.

A new amendment is written to the disk, and sent to all neighbours. At HELLO each side sends what it knows, and every
PULL_INTERVAL_S a peer asks another one for what it lacks. What counts is decided by `agora.swarm.amendments`, and read
by everything else from the LiveManifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.amendments import NOTICE, SealedAmendment, open_amendment
from agora_protocol.errors import AgoraError, AmendmentError, DiskError, ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_SHARED_AMENDMENTS, MAX_TEXT_BYTES
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import GetAmendments, KnownAmendments, ShareAmendments, TookAmendments

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.network import Network
from agora.node import run_files
from agora.node.daemon_context import DaemonContext
from agora.observe import events
from agora.swarm.amendments import IsBanned, describe_changes
from agora.swarm.peer_score import ReportViolation, Violation

SHARE_TIMEOUT_S: Final = 10.0  # seconds within which a neighbour must answer each message of amendments
PULL_INTERVAL_S: Final = 10.0  # seconds between two questions to another peer for what is not known here
FETCH_TIMEOUT_S: Final = 5.0  # seconds that a start waits for the answers of other peers
MAX_ASKED: Final = 8  # peers that a start asks


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of sealed amendments. why: the reason of the first one that was refused."""

    new: int
    refused: int
    why: str = ""


class Amendments:
    """Takes, keeps and passes on the amendments of a run. live: the manifest with those that count."""

    def __init__(
        self,
        context: DaemonContext,
        signed: SignedManifest,
        network: Network,
        report_violation: ReportViolation,
        *,
        is_banned: IsBanned,
        present_step: Callable[[], int],
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Reads the amendments that are on this disk. Raises DiskError.

        is_banned: whether the founder has banned a delegate. present_step: returns the step that the run has come to.
        """
        self.book = run_files.amendments_on_disk([context.home], signed, unix(), is_banned)
        self.live = LiveManifest(signed.manifest, self.book.chain)
        self._context = context
        self._run: RunId = signed.run_id
        self._network = network
        self._report_violation = report_violation
        self._present_step = present_step
        self._unix = unix

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers ShareAmendments: takes them and says what became of them; and GetAmendments: those that are known."""
        match call.message:
            case ShareAmendments() as request:
                connection = self._network.connection_to(call.peer)
                is_reader = connection is None or connection.is_reader
                taken = self.take(request.amendments, call.peer, begins_here=is_reader)
                why = taken.why.encode("ascii", "replace").decode()[:MAX_TEXT_BYTES]
                return Reply(TookAmendments(taken.new, taken.refused, why))
            case GetAmendments() as request:
                known = () if request.known == self.book.digest() else tuple(self.book.sealed())
                return Reply(KnownAmendments(known))
            case other:
                raise AssertionError(f"{type(other).__name__} is not among AMENDMENT_REQUESTS")

    def take(self, sealed: Sequence[bytes], peer: PeerId | None = None, *, begins_here: bool = False) -> Taken:
        """Verifies sealed amendments, keeps those that are new, decides which count, and sends them to neighbours.

        peer: who sent them; None for this machine's owner. begins_here: no other peer has them yet; then an amendment
        whose first step is near is refused. Amendments that are known count neither as new nor as refused. A malformed
        or falsely signed one is a violation of the peer's, since honest peers verify what they pass on.
        """
        new, refused, why = 0, 0, ""
        for data in sealed:
            try:
                if begins_here:
                    self._check_time(data)
                new += self.book.add(data, self._unix()) is not None
            except (AmendmentError, ProtocolError) as error:
                refused, why = refused + 1, why or str(error)
                if peer is not None and isinstance(error, ProtocolError):
                    self._report_violation(peer, Violation.BAD_REQUEST, f"{error.code}: {error}")
        if refused:
            self._context.report_event(events.AmendmentRefused(peer or "", refused, why))
        if new:
            self._write()
            self.reconsider()
            for member in self._network.members():
                self.send_all(member)
        return Taken(new, refused, why)

    def in_words(self) -> tuple[tuple[int, int, str], ...]:
        """Returns for each amendment that counts its number, its first step, and its new values in words."""
        counting = (each.amendment for each in self.book.chain)
        return tuple((each.number, each.from_step, describe_changes(each)) for each in counting)

    def _check_time(self, sealed: bytes) -> None:
        # Whoever signs may not know how far the run is, and what was signed long ago may be handed in now.
        opened = open_amendment(sealed, self._run)
        if self.book.knows(opened.hash):
            return
        step, from_step = self._present_step(), opened.amendment.from_step
        has_ended = self.live.total_steps <= step <= from_step
        if from_step < step + NOTICE // 2 and not has_ended:
            raise AmendmentError(
                f"Step {from_step} is too near or over: the run is at step {step}; sign it again with --from-step "
                f"{step + 2 * NOTICE} or later."
            )

    def reconsider(self) -> None:
        """Decides anew which amendments count: after a new one, or a ban. Reports what that has changed."""
        change = self.book.choose()
        if not change.added and not change.dropped:
            return
        self.live.amend(self.book.chain)
        for each in change.dropped:
            self._context.report_event(events.AmendmentDropped(*_event_fields(each)))
        for each in change.added:
            self._context.report_event(events.AmendmentTaken(*_event_fields(each)))

    def forget_refused(self) -> None:
        """As PeerDataHolder: drops the amendments of delegates that are banned now."""
        self.reconsider()

    def send_all(self, peer: PeerId) -> None:
        """Starts to send all known amendments to a member, which must have said HELLO."""
        sealed = self.book.sealed()
        parts = range(0, len(sealed), MAX_SHARED_AMENDMENTS)
        requests = (ShareAmendments(tuple(sealed[first : first + MAX_SHARED_AMENDMENTS])) for first in parts)
        # If it fails, the member asks, or gets them at its next HELLO.
        self._network.start_calls(peer, requests, SHARE_TIMEOUT_S)

    async def fetch(self, peers: Collection[PeerId]) -> None:
        """Asks up to MAX_ASKED of `peers` for what is not known here. Ignores those that do not answer in
        FETCH_TIMEOUT_S.

        To be called before a stage is loaded: its next step may be amended already.
        """
        asked = random.sample(sorted(peers), min(len(peers), MAX_ASKED))
        await asyncio.gather(*(self._ask(peer, FETCH_TIMEOUT_S) for peer in asked))

    async def keep_asking(self) -> None:
        """Every PULL_INTERVAL_S, until cancelled, asks one member at random for what is not known here."""
        while True:
            await asyncio.sleep(PULL_INTERVAL_S)
            if members := self._network.members():
                await self._ask(random.choice(members), SHARE_TIMEOUT_S)

    async def _ask(self, peer: PeerId, within_s: float) -> None:
        with contextlib.suppress(AgoraError):
            request = GetAmendments(self.book.digest())
            reply = await self._network.call(peer, request, deadline=loop_time() + within_s)
            if isinstance(reply.message, KnownAmendments):
                self.take(reply.message.amendments, peer)

    def _write(self) -> None:
        try:
            run_files.write_amendments(self._context.home, self._run, self.book.sealed())
        except DiskError as error:  # they then hold only until the daemon ends, and are fetched again
            self._context.report_event(events.DiskTrouble(str(self._context.home.amendments(self._run)), str(error)))


def _event_fields(each: SealedAmendment) -> tuple[int, int, str, str, str]:
    amendment = each.amendment
    return amendment.number, amendment.from_step, amendment.issuer, describe_changes(amendment), each.hash.hex()
