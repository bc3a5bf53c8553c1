"""Finds out how others can connect to this peer, announces that, and helps others to find out and to meet."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

from agora_protocol.errors import AgoraError, Busy, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_PORTS
from agora_protocol.messages import DialBack, DialedBack, GetAddresses, Introduce, Meet, Meeting, PeerAddresses

from agora.core.calls import Announcement, ConnectionBroken, Reply
from agora.core.clock import loop_time
from agora.net.nat import relay
from agora.net.nat.hole_punching import PUNCH_TIMEOUT_S, HolePuncher
from agora.net.nat.reachability import (
    ASKED,
    CONFIRMING,
    Findings,
    RelayRefusals,
    build_announcement,
    choose_relays,
    confirmed_addresses,
    needs_relays,
)
from agora.net.p2pd.addresses import host_and_port, is_circuit, is_private, public_only
from agora.net.p2pd.host import Host
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.network import Network

# Seconds between two checks of what is due: asking neighbours, renewing reservations, announcing.
UPDATE_INTERVAL_S: Final = 2.0
# Seconds between two checks in the first JUST_STARTED_S, while no peer has reported yet whether this one can be
# dialled.
FIRST_UPDATE_INTERVAL_S: Final = 0.25
JUST_STARTED_S: Final = 10.0  # seconds for which a peer counts as just started
# Seconds after which a reservation at a relay is renewed: it lasts three times as long (relay.RESERVATION_LIFETIME_S).
RENEWAL_INTERVAL_S: Final = 40.0
# Seconds within which a TCP connection to a caller's port must open, for that port to count as reached.
DIAL_TIMEOUT_S: Final = 3.0
# Seconds within which a neighbour must answer DialBack; a relay must answer Introduce within half of them.
ANSWER_TIMEOUT_S: Final = 6.0
# Seconds that hole punching waits for neighbours to say for the first time whether this peer can be dialled.
FIRST_ANSWER_TIMEOUT_S: Final = 2.5
DIAL_BACK_INTERVAL_S: Final = 1.5  # seconds after which a peer that should dial this one is asked again to do so
# Seconds before hole punching to a peer, or replacing its circuit, is tried again.
PUNCH_RETRY_INTERVAL_S: Final = 300.0
POLL_INTERVAL_S: Final = 0.1  # seconds between two checks whether an expected peer has connected
MAX_HELPED: Final = 16  # at most this many requests of other peers (see `answer`) are worked on at the same time


class ReachabilityKeeper:
    """Keeps this peer reachable: asks neighbours to dial back, holds relay reservations, announces the addresses.

    Also punches holes to peers behind NATs, and answers what other peers' keepers ask: see `answer`. findings: what
    this peer knows of its own reachability.
    """

    def __init__(
        self,
        host: Host,
        network: Network,
        *,
        known: Callable[[], Mapping[PeerId, Announcement]],
        announce: Callable[[Announcement], Awaitable[None]],
        allow_private: bool,
        upnp: bool,
        relays_for: int,
    ) -> None:
        """known: returns what other peers announce now. announce: publishes this peer's announcement if it is new.

        allow_private: whether private addresses are announced, and dialled when peers announce them.
        upnp: whether the router was asked to forward ports. relays_for: how many peers this one relays for; 0 for none.
        """
        self.findings = Findings()
        self._host = host
        self._network = network
        self._known = known
        self._announce = announce
        self._own = host.own_addresses
        self._allow_private = allow_private
        self._has_upnp = upnp
        self._relays_for = relays_for
        self._holes = HolePuncher(host)
        self._no_hole_until: dict[PeerId, float] = {}
        self._circuit_until: dict[PeerId, float] = {}
        self._renewed_at: dict[PeerId, float] = {}
        self._refusals = RelayRefusals()
        self._helped = 0
        self._has_answers = asyncio.Event()

    def announcement(self) -> Announcement:
        """Returns how others can connect to this peer now, for its claim and HELLO: addresses and reachability.

        Private addresses are left out unless the owner allows them.
        """
        known = self._known()
        addresses = {peer: public_or_any(known[peer].addresses) for peer in self.findings.relays if peer in known}
        own = [address for address in self._own if self.may_dial(address)]
        return build_announcement(self._host.peer, own, self.findings, addresses, self._relays_for)

    def may_dial(self, address: str) -> bool:
        """Returns whether an address that a peer announces may be dialled: a private one only with allow_private."""
        return self._allow_private or not is_private(address)

    async def run(self) -> None:
        """Every UPDATE_INTERVAL_S, until cancelled: asks neighbours, renews reservations, announces. Then closes all
        holes.

        Until neighbours have first answered, for JUST_STARTED_S at most, the interval is FIRST_UPDATE_INTERVAL_S: hole
        punching waits for them.
        """
        began = loop_time()
        try:
            while True:
                await self._update_reachability()
                is_new = self.findings.answered_at is None and loop_time() - began < JUST_STARTED_S
                await asyncio.sleep(FIRST_UPDATE_INTERVAL_S if is_new else UPDATE_INTERVAL_S)
        finally:
            await self._holes.close()

    async def _update_reachability(self) -> None:
        if self._has_upnp:  # p2pd lists the address outside as soon as the router has forwarded a port
            with contextlib.suppress(ConnectionBroken):  # if p2pd is gone, the daemon notices that
                listed = [address.rpartition("/p2p/")[0] for address in await self._host.addresses()]
                self._own = tuple(dict.fromkeys((*self._host.own_addresses, *listed)))
        if self.findings.is_due(loop_time()):
            await self._ask_neighbours()
        # Neighbours are asked first, since a circuit stays: others must not reach through a relay a peer that they can
        # dial.
        is_needed = self.findings.answered_at is not None and needs_relays(self.findings, self._own)
        relays = await self._hold_relays() if is_needed else ()
        await self._replace_a_circuit()
        was_punched = self.findings.was_punched or "punched" in self._network.paths.values()
        self.findings = replace(self.findings, relays=relays, was_punched=was_punched)
        await self._announce(self.announcement())

    # --- finding out

    async def _ask_neighbours(self) -> None:
        if not self._network.paths:
            others = [(peer, told) for peer, told in self._known().items() if peer != self._host.peer]
            dialled = [peer for peer, told in others if not all(map(is_circuit, told.addresses))]
            await asyncio.gather(*map(self.try_to_connect, dialled[:ASKED]))
        neighbours = [peer for peer, path in self._network.paths.items() if path == "direct"]
        chosen = random.sample(neighbours, min(ASKED, len(neighbours)))
        answers = await asyncio.gather(*map(self._ask_to_dial_back, chosen))
        reported = [self._addresses_reported_by(answer) for answer in answers if answer is not None]
        if reported:
            reached = confirmed_addresses(reported, self._own, len(chosen))
            findings = replace(self.findings, answered_at=loop_time(), reached=reached)
            is_confirmed = len(chosen) >= CONFIRMING or not needs_relays(findings, self._own)
            self.findings = replace(findings, is_confirmed=is_confirmed)
            self._has_answers.set()

    def _addresses_reported_by(self, answer: DialedBack) -> set[str]:
        seen = host_and_port(answer.seen)
        if seen is None or not self.may_dial(answer.seen):
            return set()
        return {f"/{seen[0]}/{seen[1]}/tcp/{port}" for port in answer.reached if port in self._own_ports()}

    async def _ask_to_dial_back(self, peer: PeerId) -> DialedBack | None:
        try:
            reply = await self._network.call(
                peer, DialBack(tuple(self._own_ports())), deadline=loop_time() + ANSWER_TIMEOUT_S
            )
        except AgoraError:
            return None
        return reply.message if isinstance(reply.message, DialedBack) else None

    def _own_ports(self) -> list[int]:
        ports = [parts[2] for parts in map(host_and_port, self._own) if parts is not None]
        return list(dict.fromkeys(ports))[:MAX_PORTS]

    async def _hold_relays(self) -> tuple[PeerId, ...]:
        now = loop_time()
        self._renewed_at = {peer: at for peer, at in self._renewed_at.items() if peer in self._network.paths}
        circuits = {peer for peer, path in self._network.paths.items() if path == "relayed"}  # no relay through a relay
        refused = self._refusals.refusing_relays(now) | circuits
        chosen = choose_relays(self._host.peer, self._known(), self._renewed_at, refused)
        for peer in chosen:
            if now - self._renewed_at.get(peer, -RENEWAL_INTERVAL_S) >= RENEWAL_INTERVAL_S:
                try:
                    await self._network.connect(peer)
                    await relay.reserve(self._host, peer)
                    self._renewed_at[peer] = now
                except AgoraError:
                    self._refusals.since[peer] = now
                    self._renewed_at.pop(peer, None)
        return tuple(peer for peer in chosen if peer in self._renewed_at)

    async def _replace_a_circuit(self) -> None:
        now = loop_time()
        known = self._known()
        self._circuit_until = {known: until for known, until in self._circuit_until.items() if until > now}
        circuits = [peer for peer, path in self._network.paths.items() if path == "relayed"]
        for peer in circuits:
            told = known.get(peer)
            if told is None or told.reachability != "public" or peer in self._circuit_until:
                continue
            self._circuit_until[peer] = now + PUNCH_RETRY_INTERVAL_S
            endpoints = [host_and_port(address) for address in told.addresses if self.may_dial(address)]
            direct = [endpoint for endpoint in endpoints if endpoint is not None]
            if any(await asyncio.gather(*(_can_open(endpoint[1], endpoint[2]) for endpoint in direct))):
                with contextlib.suppress(ConnectionBroken):
                    await self._host.disconnect(peer)
                await self._network.connect_member(
                    peer, reconnect=True
                )  # the stream may not have noticed yet that it is gone
            return

    # --- holes

    async def punch_hole(self, peer: PeerId, relay_peer: PeerId) -> None:
        """Connects directly to a peer behind a NAT by hole punching, coordinated by `relay_peer`.

        Raises an AgoraError when that fails, or when too many are in progress. For PUNCH_RETRY_INTERVAL_S after a
        failure or a cancellation each call for the same peer fails immediately.
        """
        now = loop_time()
        self._no_hole_until = {known: until for known, until in self._no_hole_until.items() if until > now}
        if peer in self._no_hole_until:
            raise ConnectionBroken("hole punching to this peer failed recently")
        if not self._holes.has_room():
            raise ConnectionBroken("too many hole punches are in progress")
        with contextlib.ExitStack() as undo:  # remembers a failure even if this call is cancelled
            undo.callback(self._no_hole_until.__setitem__, peer, now + PUNCH_RETRY_INTERVAL_S)
            await self._punch(peer, relay_peer)
            undo.pop_all()

    async def _punch(self, peer: PeerId, relay_peer: PeerId) -> None:
        await self._wait_for_first_answer()
        now = loop_time()
        reply = await self._network.call(relay_peer, Introduce(peer), deadline=now + ANSWER_TIMEOUT_S / 2)
        if self.findings.reached:
            await self._wait_for_dial(peer, relay_peer)
            return
        if not isinstance(reply.message, Meeting) or not self.may_dial(reply.message.seen):
            raise ConnectionBroken("the relay gave no address that may be dialled")
        await self._holes.connect(peer, reply.message.seen)

    async def _wait_for_first_answer(self) -> None:
        # Before its neighbours have answered, a public peer would use a relay, and a circuit stays until it ends.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
                await self._has_answers.wait()

    async def _wait_for_dial(self, peer: PeerId, relay_peer: PeerId) -> None:
        now = loop_time()
        until = now + PUNCH_TIMEOUT_S
        again_at = now + DIAL_BACK_INTERVAL_S
        while not await self._host.is_connected(peer):
            now = loop_time()
            if now > until:
                raise ConnectionBroken(f"the peer did not dial back within {PUNCH_TIMEOUT_S:.0f} s")
            if now > again_at:
                await self._network.call(relay_peer, Introduce(peer), deadline=until)
                again_at = loop_time() + DIAL_BACK_INTERVAL_S
            await asyncio.sleep(POLL_INTERVAL_S)

    # --- helping others

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a DialBack, Introduce, Meet or GetAddresses request of an admitted peer.

        Raises Busy while MAX_HELPED others are answered, Refused for other messages and when this peer cannot help.
        """
        if self._helped >= MAX_HELPED:
            raise Busy("this peer helps many others now; ask another", 1000)
        self._helped += 1
        try:
            match call.message:
                case DialBack() as request:
                    return Reply(await self._answer_dial_back(call.peer, request))
                case Introduce() as request:
                    return Reply(await self._answer_introduce(call, request.peer))
                case Meet() as request:
                    return Reply(self._answer_meet(request))
                case GetAddresses() as request:
                    return Reply(PeerAddresses(self._network.addresses_of(request.peer)))
            raise Refused("this peer cannot answer that; ask another")
        finally:
            self._helped -= 1

    async def _answer_dial_back(self, peer: PeerId, request: DialBack) -> DialedBack:
        seen = self._host.remote_address(peer)
        parts = host_and_port(seen)
        if parts is None:
            return DialedBack("", ())
        ports = list(dict.fromkeys(request.ports))
        are_open = await asyncio.gather(*(_can_open(parts[1], port) for port in ports))
        reached = tuple(port for port, is_open in zip(ports, are_open, strict=True) if is_open)
        return DialedBack(f"/{parts[0]}/{parts[1]}/tcp/{parts[2]}", reached)

    async def try_to_connect(self, peer: PeerId) -> None:
        """Connects to a peer unless it is connected. Ignores failures: what needs the connection dials again."""
        with contextlib.suppress(AgoraError):
            await self._network.connect(peer)

    async def _answer_introduce(self, call: IncomingCall, peer: PeerId) -> Meeting:
        caller_seen, peer_seen = self._host.remote_address(call.peer), self._host.remote_address(peer)
        is_direct = self._network.paths.get(peer) == "direct" == self._network.paths.get(call.peer)
        if not is_direct or not caller_seen or not peer_seen:
            raise Refused("this peer is not connected to both directly; ask another")
        await self._network.call(peer, Meet(call.peer, caller_seen), deadline=call.deadline)
        return Meeting(peer_seen)

    def _answer_meet(self, request: Meet) -> Meeting:
        # Starts dialling the peer that asked for a meeting if its claim says "public"; otherwise starts a hole to it.
        told = self._known().get(request.peer)
        if told is not None and told.reachability == "public":
            self._network.spawn(self.try_to_connect(request.peer))
            return Meeting("")
        if not self.may_dial(request.seen):
            raise Refused("this peer dials no private addresses; its owner can say allow_private = true")
        if not self._holes.has_room():
            raise Busy("this peer opens many holes now; ask again", 1000)
        self._holes.expect(request.seen)
        return Meeting("")


def public_or_any(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the first two public ones of a relay's addresses; if none is public, the first two of all."""
    return (public_only(addresses) or addresses)[:2]


async def _can_open(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
