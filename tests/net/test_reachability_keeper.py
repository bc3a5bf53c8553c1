"""What a peer does for its own reachability and for others', with a network and a host that only answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from agora_protocol.errors import Busy, Refused
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.messages import DialBack, DialedBack, Introduce, Meet, Meeting, Message, Pong

from agora.core.calls import Announcement, ConnectionBroken, Reply
from agora.net.nat.hole_punching import HolePuncher
from agora.net.nat.reachability_keeper import MAX_HELPED, ReachabilityKeeper
from agora.net.rpc.connection import IncomingCall

ME, CALLER, OTHER = (Identity.generate().peer for _ in range(3))
OUTSIDE, INSIDE = "/ip4/44.77.0.9", "/ip4/192.168.1.2"


class AnsweringNetwork:
    """Answers each request by its type, and records whom it was sent to."""

    def __init__(self, answers: dict[type[Message], Message], paths: dict[PeerId, str]) -> None:
        self.answers, self.paths = answers, paths
        self.sent: list[tuple[PeerId, Message]] = []
        self.dialled: list[PeerId] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def call(self, peer: PeerId, request: Message, *, deadline: float) -> Reply:
        self.sent.append((peer, request))
        if type(request) not in self.answers:
            raise ConnectionBroken("no answer")
        return Reply(self.answers[type(request)])

    async def connect(self, peer: PeerId) -> None:
        self.dialled.append(peer)

    async def connect_member(self, peer: PeerId, *, reconnect: bool) -> bool:
        assert reconnect
        self.dialled.append(peer)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))


class KnownHost:
    """Has addresses, and knows from where others call."""

    peer = ME

    def __init__(self, own: tuple[str, ...], remote: dict[PeerId, str]) -> None:
        self.own_addresses, self.remote = own, remote
        self.disconnected: list[PeerId] = []
        self.listen_endpoints = {"ip4": ("127.0.0.1", 4001)}

    async def addresses(self) -> tuple[str, ...]:
        raise ConnectionBroken("p2pd does not answer in time")

    async def is_connected(self, peer: PeerId) -> bool:
        return peer in self.remote

    async def disconnect(self, peer: PeerId) -> None:
        self.disconnected.append(peer)

    def remote_address(self, peer: PeerId) -> str:
        return self.remote.get(peer, "")


class Claims:
    """What other peers announce, and what this one announced last."""

    def __init__(self, **known: Announcement) -> None:
        self.known = {PeerId(peer): told for peer, told in known.items()}
        self.announced = Announcement()

    async def announce(self, announcement: Announcement) -> None:
        self.announced = announcement


def keeper(
    answers: dict[type[Message], Message] | None = None,
    paths: dict[PeerId, str] | None = None,
    own: tuple[str, ...] = (f"{INSIDE}/tcp/4001",),
    remote: dict[PeerId, str] | None = None,
    allow_private: bool = False,
    upnp: bool = False,
) -> tuple[ReachabilityKeeper, AnsweringNetwork, Claims]:
    network, claims = AnsweringNetwork(answers or {}, paths or {}), Claims(**{CALLER: Announcement()})
    host: Any = KnownHost(own, remote or {})
    double: Any = network
    made = ReachabilityKeeper(
        host,
        double,
        known=lambda: claims.known,
        announce=claims.announce,
        allow_private=allow_private,
        upnp=upnp,
        relays_for=16,
    )
    return made, network, claims


def look(made: ReachabilityKeeper, until: Callable[[], bool]) -> None:
    """Lets the keeper run until a condition holds."""

    async def main() -> None:
        task = asyncio.create_task(made.run())
        async with asyncio.timeout(5.0):
            while not until():
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def asked(message: Message, work: Callable[[IncomingCall], Awaitable[Reply]]) -> Message:
    """Returns the answer to a request of CALLER."""

    async def main() -> Message:
        return (await work(IncomingCall(CALLER, message, [], 1e9))).message

    return asyncio.run(main())


def test_a_peer_that_was_dialled_back_announces_the_address_at_which_it_was_and_offers_to_relay() -> None:
    answers: dict[type[Message], Message] = {DialBack: DialedBack(f"{OUTSIDE}/tcp/50000", (4001,))}
    made, network, claims = keeper(answers, {CALLER: "direct", OTHER: "relayed"})
    look(made, lambda: claims.announced.reachability != "unknown")
    assert claims.announced == Announcement("public", (f"{OUTSIDE}/tcp/4001/p2p/{ME}",), 16)
    assert network.sent == [(CALLER, DialBack((4001,)))], "who is connected through a relay cannot tell"


def test_a_late_answer_of_p2pd_about_upnp_ends_nothing() -> None:
    answers: dict[type[Message], Message] = {DialBack: DialedBack(f"{OUTSIDE}/tcp/50000", (4001,))}
    made, _, claims = keeper(answers, {CALLER: "direct"}, upnp=True)
    look(made, lambda: claims.announced.reachability == "public")


def test_a_neighbours_word_counts_only_for_ports_that_were_asked_for_and_public_addresses() -> None:
    for seen, reached in ((f"{OUTSIDE}/tcp/50000", (22,)), (f"{INSIDE}/tcp/50000", (4001,))):
        answers: dict[type[Message], Message] = {DialBack: DialedBack(seen, reached)}
        made, _, claims = keeper(answers, {CALLER: "direct"})
        look(made, lambda made=made: made.findings.answered_at is not None)
        assert made.announcement() == Announcement("unreachable", (), 0)
    made, _, claims = keeper(answers, {CALLER: "direct"}, allow_private=True)
    look(made, lambda: claims.announced.reachability == "public")
    assert claims.announced.addresses == (f"{INSIDE}/tcp/4001/p2p/{ME}",)


def test_a_neighbour_that_names_a_false_address_does_not_make_this_peer_public() -> None:
    said = {CALLER: DialedBack("/ip4/44.77.0.99/tcp/50000", (4001,)), OTHER: DialedBack(f"{OUTSIDE}/tcp/50000", ())}
    made, network, claims = keeper(paths=dict.fromkeys(said, "direct"))

    async def tell(peer: PeerId, _request: Message, *, deadline: float) -> Reply:
        return Reply(said[peer])

    network.call = tell
    look(made, lambda: claims.announced.reachability != "unknown")
    assert claims.announced == Announcement("unreachable", (), 0)


def test_a_single_neighbours_word_is_soon_asked_for_again() -> None:
    answers: dict[type[Message], Message] = {DialBack: DialedBack(f"{OUTSIDE}/tcp/50000", (4001,))}
    for own, is_confirmed in ((f"{INSIDE}/tcp/4001", False), (f"{OUTSIDE}/tcp/4001", True)):
        made, _, claims = keeper(answers, {CALLER: "direct"}, own=(own,))
        look(made, lambda claims=claims: claims.announced.reachability == "public")
        assert made.findings.is_confirmed == is_confirmed


def test_a_peer_dials_back_at_the_address_that_it_sees_and_at_no_other() -> None:
    async def main() -> Message:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = int(server.sockets[0].getsockname()[1])
        made, *_ = keeper(remote={CALLER: "/ip4/127.0.0.1/tcp/50000"})
        call = IncomingCall(CALLER, DialBack((port, 1)), [], 1e9)
        answer = (await made.answer(call)).message
        server.close()
        assert answer == DialedBack("/ip4/127.0.0.1/tcp/50000", (port,))
        return answer

    asyncio.run(main())
    made, *_ = keeper()
    assert asked(DialBack((4001,)), made.answer) == DialedBack("", ()), "through a relay it sees no address"


def test_an_introduction_tells_both_where_the_introducer_sees_the_other() -> None:
    remote = {CALLER: f"{OUTSIDE}/tcp/1001", OTHER: f"{OUTSIDE}/tcp/1002"}
    made, network, _ = keeper({Meet: Meeting("")}, {CALLER: "direct", OTHER: "direct"}, remote=remote)
    assert asked(Introduce(OTHER), made.answer) == Meeting(remote[OTHER])
    assert network.sent == [(OTHER, Meet(CALLER, remote[CALLER]))]


@pytest.mark.parametrize("path", ["relayed", "punched", None])
def test_nobody_is_introduced_who_is_not_connected_directly(path: str | None) -> None:
    paths = {CALLER: "direct"} | ({OTHER: path} if path else {})
    made, network, _ = keeper({Meet: Meeting("")}, paths, remote={CALLER: f"{OUTSIDE}/tcp/1"})
    with pytest.raises(Refused):
        asked(Introduce(OTHER), made.answer)
    assert not network.sent


def test_nobody_is_met_at_a_private_address_unless_that_is_allowed() -> None:
    made, *_ = keeper()
    with pytest.raises(Refused, match="allow_private"):
        asked(Meet(CALLER, "/ip4/10.0.0.1/tcp/22"), made.answer)


def test_a_peer_that_can_be_dialled_is_dialled_by_the_one_behind_a_nat_that_it_wants_to_meet() -> None:
    made, network, claims = keeper()
    claims.known = {CALLER: Announcement("public")}

    async def meet() -> Message:
        answer = (await made.answer(IncomingCall(CALLER, Meet(CALLER, f"{OUTSIDE}/tcp/1"), [], 1e9))).message
        await asyncio.gather(*network.tasks)
        return answer

    assert asyncio.run(meet()) == Meeting("")
    assert network.dialled == [CALLER]


def test_a_peer_that_can_be_dialled_punches_no_hole_but_waits_for_the_other_to_dial() -> None:
    answers: dict[type[Message], Message] = {
        DialBack: DialedBack(f"{OUTSIDE}/tcp/50000", (4001,)),
        Introduce: Meeting(f"{OUTSIDE}/tcp/1"),
    }
    made, network, claims = keeper(answers, {CALLER: "direct"}, remote={OTHER: f"{OUTSIDE}/tcp/1"})
    look(made, lambda: claims.announced.reachability == "public")
    asyncio.run(made.punch_hole(OTHER, CALLER))
    assert network.sent[-1] == (CALLER, Introduce(OTHER))


def test_a_circuit_to_a_peer_that_turns_out_to_be_public_is_replaced_and_none_is_a_relay() -> None:
    """Only where it answers directly: the listening socket stands for its address, which the other has not."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        places = {CALLER: f"/ip4/127.0.0.1/tcp/{there.getsockname()[1]}", OTHER: "/ip4/127.0.0.1/tcp/9"}
        made, network, claims = keeper({}, dict.fromkeys(places, "relayed"), allow_private=True)
        claims.known = {peer: Announcement("public", (f"{place}/p2p/{peer}",), 16) for peer, place in places.items()}
        made.findings = replace(made.findings, answered_at=0.0)
        host: Any = made._host
        look(made, lambda: CALLER in network.dialled)
        assert host.disconnected == [CALLER]
        look(made, lambda: OTHER in made._circuit_until)
        assert host.disconnected == [CALLER] == network.dialled, "the other keeps its circuit; nothing is reserved"


def test_a_hole_that_could_not_be_opened_is_not_tried_again_for_a_while() -> None:
    made, network, _ = keeper({Introduce: Meeting("/ip6/2a00:1450::1/tcp/1")})  # this host has no IPv6
    for reason in ("no hole can be punched", "to this peer failed recently"):
        with pytest.raises(ConnectionBroken, match=reason):
            asyncio.run(made.punch_hole(OTHER, CALLER))
    assert network.sent == [(CALLER, Introduce(OTHER))]


def test_beyond_the_most_holes_the_error_says_so_and_the_peer_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, network, _ = keeper({Introduce: Meeting("/ip6/2a00:1450::1/tcp/1")})
    monkeypatch.setattr(HolePuncher, "has_room", lambda _: False)
    for _ in range(2):
        with pytest.raises(ConnectionBroken, match="too many hole punches"):
            asyncio.run(made.punch_hole(OTHER, CALLER))
    assert not network.sent


def test_only_so_many_are_helped_at_once() -> None:
    async def main() -> None:
        host_knows = {CALLER: f"{OUTSIDE}/tcp/1", OTHER: f"{OUTSIDE}/tcp/2"}
        made, network, _ = keeper({}, {CALLER: "direct", OTHER: "direct"}, remote=host_knows)
        release = asyncio.Event()

        async def hang(_peer: PeerId, _request: Message, *, deadline: float) -> Reply:
            await release.wait()
            return Reply(Pong())

        network.call = hang
        call = IncomingCall(CALLER, Introduce(OTHER), [], 1e9)
        helped = [asyncio.create_task(made.answer(call)) for _ in range(MAX_HELPED)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await made.answer(call)
        release.set()
        await asyncio.gather(*helped)
        assert (await made.answer(call)).message == Meeting(f"{OUTSIDE}/tcp/2")

    asyncio.run(main())
