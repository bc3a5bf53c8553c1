"""Finds out how others can connect to this peer, has it announced, and helps others to find out and to meet.

Knows: whom to ask and when, reservations at relays, introductions. Must not know: what the answers mean
(swarm/reachability.py), how holes are punched or circuits relayed (net).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agora_protocol.errors import AgoraError, Busy, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_PORTS
from agora_protocol.messages import DialBack, DialedBack, GetAddresses, Introduce, Meet, Meeting, PeerAddresses

from agora.calls import Reply
from agora.clock import loop_time
from agora.net import relay
from agora.net.hole_punching import PUNCH_S, HolePuncher
from agora.net.host import Host
from agora.net.incoming import IncomingCall
from agora.net.network import Network
from agora.net.network_errors import ConnectionBroken
from agora.net.own_addresses import host_and_port, is_circuit, is_private, public_only
from agora.swarm.membership import Membership
from agora.swarm.reachability import (
    ASKED,
    CONFIRMING,
    Announcement,
    Findings,
    RelayRefusals,
    announce,
    choose_relays,
    confirmed_addresses,
    needs_relays,
)
from agora.swarm.view import View

LOOK_S: Final = 2.0
"""Seconds between two checks of what is due: asking neighbours, renewing reservations, announcing."""
FIRST_LOOKS_S: Final = 0.25
"""Seconds between two checks while nobody has said yet whether this peer can be dialled, in its first NEW_S."""
NEW_S: Final = 10.0
"""Seconds for which a peer counts as just started."""
RENEW_S: Final = 40.0
"""Seconds after which a reservation at a relay is renewed: it lasts three times as long (relay.RESERVED_S)."""
DIAL_S: Final = 3.0
"""Seconds within which a TCP connection to a caller's port must open, for that port to count as reached."""
ANSWER_S: Final = 6.0
"""Seconds within which a neighbour must answer DialBack; a relay must answer Introduce within half of them."""
FINDING_S: Final = 2.5
"""Seconds for which a hole waits until neighbours have said for the first time whether this peer can be dialled."""
AGAIN_S: Final = 1.5
"""Seconds after which a peer that should dial this one is told so again."""
NO_HOLE_S: Final = 300.0
"""Seconds before hole punching to a peer is retried after a failure."""
POLL_S: Final = 0.1
"""Seconds between two checks whether an expected peer has connected."""
MAX_HELPED: Final = 16
"""At most this many requests of other peers (see `answer`) are worked on at once."""


class ReachabilityKeeper:
    """Keeps this peer reachable: asks neighbours to dial back, holds relay reservations, announces the addresses.

    Also punches holes to peers behind NATs, and does for others what their keepers ask: see `answer`.
    """

    def __init__(
        self, host: Host, network: Network, membership: Membership, allow_private: bool, upnp: bool, relays_for: int
    ) -> None:
        """allow_private: whether private addresses are announced, and dialled when peers announce them.

        upnp: whether the router was asked to forward ports. relays_for: how many peers this one relays for; 0 for none.
        """
        self.findings = Findings()
        self._host = host
        self._network = network
        self._membership = membership
        self._own = host.own
        self._may_be_used: Callable[[str], bool] = (lambda _: True) if allow_private else lambda a: not is_private(a)
        self._has_upnp = upnp
        self._relays_for = relays_for
        self._holes = HolePuncher(host)
        self._no_hole_until: dict[PeerId, float] = {}
        self._circuit_until: dict[PeerId, float] = {}
        self._renewed_at: dict[PeerId, float] = {}
        self._refusals = RelayRefusals()
        self._helped = 0
        self._has_asked = asyncio.Event()

    def announcement(self) -> Announcement:
        """Returns what this peer's claim and HELLO are to say now of how to connect to it."""
        seen = self._membership.view.peers
        addresses = {peer: public_or_any(seen[peer].addresses) for peer in self.findings.relays if peer in seen}
        own = [address for address in self._own if self._may_be_used(address)]
        return announce(self._host.peer, own, self.findings, addresses, self._relays_for)

    def may_dial(self, address: str) -> bool:
        """Returns whether an address that a peer announces may be dialled: a private one only with allow_private."""
        return self._may_be_used(address)

    async def run(self) -> None:
        """Does every LOOK_S what is due (see `_look`), until it is cancelled; then closes all holes.

        In its first seconds it looks more often: hole punching waits until a neighbour has said whether this peer
        can be dialled.
        """
        began = loop_time()
        try:
            while True:
                await self._look()
                is_new = self.findings.asked_at is None and loop_time() - began < NEW_S
                await asyncio.sleep(FIRST_LOOKS_S if is_new else LOOK_S)
        finally:
            await self._holes.close()

    async def _look(self) -> None:
        """Asks neighbours if that is due, makes or renews relay reservations if they are needed, then announces."""
        if self._has_upnp:  # p2pd lists the address outside as soon as the router has forwarded a port
            listed = [address.rpartition("/p2p/")[0] for address in await self._host.addresses()]
            self._own = tuple(dict.fromkeys((*self._host.own, *listed)))
        if self.findings.is_due(loop_time()):
            await self._ask_neighbours()
        # Neighbours are asked first: a peer that can be dialled must not be met through a relay, since a circuit stays.
        is_needed = self.findings.asked_at is not None and needs_relays(self.findings, self._own)
        relays = await self._hold_relays(self._membership.view) if is_needed else ()
        await self._leave_a_circuit()
        was_punched = self.findings.was_punched or "punched" in self._network.paths.values()
        self.findings = replace(self.findings, relays=relays, was_punched=was_punched)
        await self._membership.announce_addresses(self.announcement())

    # --- finding out

    async def _ask_neighbours(self) -> None:
        """Asks up to ASKED directly connected neighbours to dial back; records which addresses they confirm as reached.

        Without any connection it first dials peers of the view. When nobody answers, the former findings stay.
        """
        if not self._network.paths:
            known = [seen for seen in self._membership.view.peers.values() if seen.peer != self._host.peer]
            dialled = [seen.peer for seen in known if not all(map(is_circuit, seen.addresses))]
            await asyncio.gather(*map(self.try_to_connect, dialled[:ASKED]))
        neighbours = [peer for peer, path in self._network.paths.items() if path == "direct"]
        chosen = random.sample(neighbours, min(ASKED, len(neighbours)))
        answers = [answer for answer in await asyncio.gather(*map(self._ask, chosen)) if answer is not None]
        if answers:
            reached = confirmed_addresses(
                [self._addresses_reported_by(answer) for answer in answers], self._own, len(chosen)
            )
            findings = replace(self.findings, asked_at=loop_time(), reached=reached)
            is_confirmed = len(chosen) >= CONFIRMING or not needs_relays(findings, self._own)
            self.findings = replace(findings, is_confirmed=is_confirmed)
            self._has_asked.set()

    def _addresses_reported_by(self, answer: DialedBack) -> set[str]:
        """Returns the addresses, without /p2p/PEER, at which a neighbour says that it reached this peer.

        Left out are ports that it was not asked to dial, and private addresses unless these are allowed.
        """
        seen = host_and_port(answer.seen)
        if seen is None or not self._may_be_used(answer.seen):
            return set()
        return {f"/{seen[0]}/{seen[1]}/tcp/{port}" for port in answer.reached if port in self._ports()}

    async def _ask(self, peer: PeerId) -> DialedBack | None:
        """Asks a neighbour to dial this peer back, and returns its answer; None if none comes within ANSWER_S."""
        try:
            reply = await self._network.call(peer, DialBack(tuple(self._ports())), deadline=loop_time() + ANSWER_S)
        except AgoraError:
            return None
        return reply.message if isinstance(reply.message, DialedBack) else None

    def _ports(self) -> list[int]:
        """Returns the TCP ports of this peer's own addresses (listening or announced): distinct, at most MAX_PORTS."""
        ports = [parts[2] for parts in map(host_and_port, self._own) if parts is not None]
        return list(dict.fromkeys(ports))[:MAX_PORTS]

    async def _hold_relays(self, view: View) -> tuple[PeerId, ...]:
        """Makes or renews reservations at the chosen relays; returns the relays where this peer now holds one.

        A relay that fails or refuses is remembered, and not asked again for a while.
        """
        now = loop_time()
        self._renewed_at = {peer: at for peer, at in self._renewed_at.items() if peer in self._network.paths}
        circuits = {peer for peer, path in self._network.paths.items() if path == "relayed"}  # no relay through a relay
        chosen = choose_relays(self._host.peer, view, self._renewed_at, self._refusals.refusing_relays(now) | circuits)
        for peer in chosen:
            if now - self._renewed_at.get(peer, -RENEW_S) >= RENEW_S:
                try:
                    await self._network.connect(peer)
                    await relay.reserve(self._host, peer)
                    self._renewed_at[peer] = now
                except AgoraError:
                    self._refusals.since[peer] = now
                    self._renewed_at.pop(peer, None)
        return tuple(peer for peer in chosen if peer in self._renewed_at)

    async def _leave_a_circuit(self) -> None:
        """Replaces the circuit to a peer that its claim calls public, if there is one, by a direct connection.

        It came about before the peer knew that it is public, and would stay; over it nothing can be reserved there.
        Calls in progress are made again. A peer that does not answer directly keeps its circuit for NO_HOLE_S.
        """
        now, view = loop_time(), self._membership.view
        self._circuit_until = {known: until for known, until in self._circuit_until.items() if until > now}
        circuits = [peer for peer, path in self._network.paths.items() if path == "relayed"]
        for peer in circuits:
            seen = view.peers.get(peer)
            if seen is None or seen.reachability != "public" or peer in self._circuit_until:
                continue
            self._circuit_until[peer] = now + NO_HOLE_S
            places = [host_and_port(address) for address in seen.addresses if self._may_be_used(address)]
            direct = [place for place in places if place is not None]
            if any(await asyncio.gather(*(_can_open(place[1], place[2]) for place in direct))):
                with contextlib.suppress(ConnectionBroken):
                    await self._host.disconnect(peer)
                await self._network.greet(peer, anew=True)  # the stream may not have noticed yet that it is gone
            return

    # --- holes

    async def punch_hole(self, peer: PeerId, relay_peer: PeerId) -> None:
        """Connects directly to a peer behind a NAT by hole punching, coordinated by `relay_peer`.

        Raises an AgoraError when that fails, and then for NO_HOLE_S at once for the same peer.
        """
        now = loop_time()
        self._no_hole_until = {known: until for known, until in self._no_hole_until.items() if until > now}
        if peer in self._no_hole_until:
            raise ConnectionBroken("hole punching to this peer failed recently")
        if not self._holes.has_room():
            raise ConnectionBroken("too many hole punches are in progress")
        with contextlib.ExitStack() as undo:  # a failure is remembered also when the caller cancels
            undo.callback(self._no_hole_until.__setitem__, peer, now + NO_HOLE_S)
            await self._punch(peer, relay_peer)
            undo.pop_all()

    async def _punch(self, peer: PeerId, relay_peer: PeerId) -> None:
        """Asks the relay for an introduction, then punches a hole, or waits to be dialled if this peer is public.

        Raises an AgoraError when that fails.
        """
        await self._until_asked()
        now = loop_time()
        reply = await self._network.call(relay_peer, Introduce(peer), deadline=now + ANSWER_S / 2)
        if self.findings.reached:
            await self._await_dial(peer, relay_peer)
            return
        if not isinstance(reply.message, Meeting) or not self._may_be_used(reply.message.seen):
            raise ConnectionBroken("the relay gave no address that may be dialled")
        await self._holes.connect(peer, reply.message.seen)

    async def _until_asked(self) -> None:
        """Waits until neighbours have said for the first time whether this peer is public, for FINDING_S at most.

        A public peer that does not know it yet would go through a relay, and a circuit stays until it ends.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINDING_S):
                await self._has_asked.wait()

    async def _await_dial(self, peer: PeerId, relay_peer: PeerId) -> None:
        """Waits until a peer, which the relay told to dial this one, is connected. ConnectionBroken after PUNCH_S.

        The relay tells it again every AGAIN_S: it dials once it has read in the directory that this peer is public.
        """
        now = loop_time()
        until, again_at = now + PUNCH_S, now + AGAIN_S
        while not await self._host.is_connected(peer):
            now = loop_time()
            if now > until:
                raise ConnectionBroken(f"the peer did not dial back within {PUNCH_S:.0f} s")
            if now > again_at:
                await self._network.call(relay_peer, Introduce(peer), deadline=until)
                again_at = loop_time() + AGAIN_S
            await asyncio.sleep(POLL_S)

    # --- helping others

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a DialBack, Introduce, Meet or GetAddresses request of an admitted peer.

        Raises Busy when MAX_HELPED are being answered; Refused for other messages, and when it cannot help.
        """
        if self._helped >= MAX_HELPED:
            raise Busy("this peer helps many others now; ask another", 1000)
        self._helped += 1
        try:
            match call.message:
                case DialBack() as request:
                    return Reply(await self._dial_back(call.peer, request))
                case Introduce() as request:
                    return Reply(await self._introduce(call, request.peer))
                case Meet() as request:
                    return Reply(self._meet(request))
                case GetAddresses() as request:
                    return Reply(PeerAddresses(self._network.addresses_of(request.peer)))
            raise Refused("this peer cannot answer that; ask another")
        finally:
            self._helped -= 1

    async def _dial_back(self, peer: PeerId, request: DialBack) -> DialedBack:
        """Opens and closes TCP connections to the caller's ports, only at the IP address that it calls from.

        Returns the address that this peer sees, and the ports that opened; "" and none for a caller through a relay.
        """
        seen = self._host.remote_address(peer)
        parts = host_and_port(seen)
        if parts is None:
            return DialedBack("", ())
        ports = list(dict.fromkeys(request.ports))
        are_open = await asyncio.gather(*(_can_open(parts[1], port) for port in ports))
        reached = tuple(port for port, is_open in zip(ports, are_open, strict=True) if is_open)
        return DialedBack(f"/{parts[0]}/{parts[1]}/tcp/{parts[2]}", reached)

    async def try_to_connect(self, peer: PeerId) -> None:
        """Connects to a peer unless it is connected. Errors are ignored: whoever needs the connection dials again."""
        with contextlib.suppress(AgoraError):
            await self._network.connect(peer)

    async def _introduce(self, call: IncomingCall, peer: PeerId) -> Meeting:
        """Sends `peer` a Meet with the caller's address as seen here; returns a Meeting with that of `peer`.

        Raises Refused unless both are connected to this peer directly, or an AgoraError when `peer` does not agree.
        """
        caller_seen, peer_seen = self._host.remote_address(call.peer), self._host.remote_address(peer)
        is_direct = self._network.paths.get(peer) == "direct" == self._network.paths.get(call.peer)
        if not is_direct or not caller_seen or not peer_seen:
            raise Refused("this peer is not connected to both directly; ask another")
        await self._network.call(peer, Meet(call.peer, caller_seen), deadline=call.deadline)
        return Meeting(peer_seen)

    def _meet(self, request: Meet) -> Meeting:
        """Starts dialling the peer that asked for the introduction if it is public; else starts to open a hole to it.

        Does not wait for either. Raises Refused for a private address, Busy when too many holes are being opened.
        """
        seen = self._membership.view.peers.get(request.peer)
        if seen is not None and seen.reachability == "public":
            self._network.spawn(self.try_to_connect(request.peer))
            return Meeting("")
        if not self._may_be_used(request.seen):
            raise Refused("this peer dials no private addresses; its owner can say allow_private = true")
        if not self._holes.has_room():
            raise Busy("this peer opens many holes now; ask again", 1000)
        self._holes.expect(request.seen)
        return Meeting("")


def public_or_any(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the first two public ones of a relay's addresses; the first two of all if none is public."""
    return (public_only(addresses) or addresses)[:2]


async def _can_open(host: str, port: int) -> bool:
    """Tries to open a TCP connection within DIAL_S, and closes it at once; returns whether it opened."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
