"""What a daemon tells its network of the peers in its view."""

from __future__ import annotations

from agora_protocol.identity import Identity
from agora_protocol.ids import Span

from agora.core.calls import Announcement
from agora.net.nat.reachability import choose_relays
from agora.node.peer.local_peer import announcements
from agora.swarm.view import PeerView, View


def test_a_peer_that_is_leaving_is_no_relay() -> None:
    me, stays, leaves = (Identity.generate().peer for _ in range(3))
    public = {"addresses": ("/ip4/44.77.0.1/tcp/1",), "reachability": "public", "relays_for": 16}
    view = View(
        {
            stays: PeerView(stays, Span(0, 0), 1, state="serving", **public),  # type: ignore[arg-type]
            leaves: PeerView(leaves, Span(0, 0), 1, state="leaving", **public),  # type: ignore[arg-type]
        }
    )
    known = announcements(view)
    assert known[stays] == Announcement("public", ("/ip4/44.77.0.1/tcp/1",), 16)
    assert choose_relays(me, known, (), ()) == [stays]
