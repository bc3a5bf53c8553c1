"""Peers, claims and views for the tests of swarm/."""

from __future__ import annotations

import hashlib

from agora_protocol.ids import PeerId, RunId, Span, peer_id_of
from agora_protocol.records import Claim, Progress

from agora.core.moving_average import MovingAverage
from agora.swarm.view import STEP_S_WEIGHT, PeerView, View

RUN = RunId("ab" * 32)


def peer_id(name: str) -> PeerId:
    return peer_id_of(hashlib.sha256(name.encode()).digest())


def claim(name: str, span: str, *, state: str = "serving", incarnation: int = 1, capacity: float = 0.0) -> Claim:
    address = f"/ip4/10.0.0.1/tcp/4001/p2p/{peer_id(name)}"
    return Claim(peer_id(name), Span.parse(span), incarnation, (address,), state, capacity)


def progress(name: str, span: str, steps: tuple[int, ...], *, incarnation: int = 1, loss=None, rate=0.0) -> Progress:
    return Progress(peer_id(name), Span.parse(span), incarnation, steps, rate, loss, 3, 40)


def seen(name: str, span: str, state: str = "serving", step_s: float | None = None, **rest) -> PeerView:
    """A peer of the view; `step_s`: the mean seconds between two of its steps."""
    rest["mean_step_s"] = MovingAverage(STEP_S_WEIGHT, step_s, int(step_s is not None))
    values = {"seen_unix": 1000.0, "expires_unix": 1e9, "steps": (0,) * len(Span.parse(span))} | rest
    return PeerView(peer_id(name), Span.parse(span), 1, state=state, **values)


def view(*peers: PeerView) -> View:
    return View({peer.peer: peer for peer in peers})
