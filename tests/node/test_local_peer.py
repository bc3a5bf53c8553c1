"""What a daemon tells its network of the peers in its view, and what it keeps of them for the next start."""

from __future__ import annotations

from agora_protocol.identity import Identity
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, SignedManifest

from agora.core.calls import Announcement
from agora.net.nat.reachability import choose_relays
from agora.net.p2pd.addresses import is_private
from agora.net.rpc.dialling import AddressBook
from agora.node.peer.local_peer import KEPT_ADDRESSES, addresses_to_keep, announcements
from agora.node.process.joining import make_invite
from agora.swarm.view import PeerView, View


def test_a_peer_that_is_leaving_is_no_relay() -> None:
    me, stays, leaves = (Identity.generate().peer for _ in range(3))
    public = {"addresses": ("/ip4/44.77.0.1/tcp/1",), "reachability": "public", "relays_for": 16}
    view = View(
        {
            stays: PeerView(stays, Span(0, 0), 1, state="serving", **public),
            leaves: PeerView(leaves, Span(0, 0), 1, state="leaving", **public),
        }
    )
    known = announcements(view)
    assert known[stays] == Announcement("public", ("/ip4/44.77.0.1/tcp/1",), 16)
    assert choose_relays(me, known, (), ()) == [stays]


def test_a_name_that_only_a_peer_announced_is_not_dialled_unchecked_after_a_restart() -> None:
    invited, peer = (Identity.generate().peer for _ in range(2))
    book = AddressBook(lambda address: not is_private(address))
    of_the_invite = f"/dns4/home.lan/tcp/1/p2p/{invited}"
    book.learn(invited, [of_the_invite])
    announced = [f"/dns4/{host}/tcp/9200/p2p/{peer}" for host in ("localhost", "peer.example.org", "169.254.169.254")]
    book.learn_announced(peer, announced)
    direct = [f"/ip4/44.77.0.{last}/tcp/1/p2p/{peer}" for last in range(3)]
    assert addresses_to_keep([[of_the_invite], announced, [*announced, *direct]], book) == [of_the_invite, *direct[:2]]
    assert len(addresses_to_keep([direct] * 20, book)) == KEPT_ADDRESSES


def test_an_invite_passes_on_no_names_and_no_private_addresses_of_others() -> None:
    founder = Identity.generate()
    signed = SignedManifest.sign(Manifest(name="run"), founder)
    own = [f"/dns4/own.example.org/tcp/1/p2p/{founder.peer}", f"/ip4/127.0.0.1/tcp/1/p2p/{founder.peer}"]
    hosts = ["/dns4/localhost", "/ip4/169.254.169.254", "/ip4/10.0.0.1", "/ip4/44.77.0.1"]
    peers = {Identity.generate().peer: host for host in hosts}
    view = View(
        {
            peer: PeerView(peer, Span(0, 0), 1, (f"{host}/tcp/1/p2p/{peer}",), state="serving")
            for peer, host in peers.items()
        }
    )

    def others(allow_private: bool) -> list[str]:
        invite = make_invite(signed, founder.peer, own, view, allow_private=allow_private)
        return ["/".join(address.split("/")[:3]) for address in invite.addresses[len(own) :]]

    assert others(allow_private=False) == ["/ip4/44.77.0.1"]
    assert "/dns4/localhost" not in others(allow_private=True) and "/ip4/10.0.0.1" in others(allow_private=True)
