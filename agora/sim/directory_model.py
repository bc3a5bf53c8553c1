"""The directory of a simulation: claims, when they end, what a peer reads of them, and how many records it reads.

Knows: claims, their lifetime, samples of a stage's replicas. Must not know: how records are stored, or microbatches.

Every few seconds a peer reads a bounded sample of the replicas of the stage that it calls. When it looks for a better
place it gets the claims of all peers, at most VIEW_AGE_S old. The claim of a peer that dies stays until it expires.
"""

from __future__ import annotations

import random
from collections import deque

from agora_protocol.ids import PeerId, Span

from agora.sim.measurements import Measurements
from agora.sim.simulated_peer import SimulatedPeer
from agora.swarm.directory_reader import CALM_READ_S, JITTER
from agora.swarm.membership import LIFETIME_S, PUBLISH_CLAIM_S, PUBLISH_PROGRESS_S
from agora.swarm.view import PeerView, View

SAMPLE = 32
"""The most replicas of the next stage that a peer knows."""
NEWCOMERS = 64
"""How many of a stage's latest newcomers are remembered, so that readers may take them into their samples."""
FETCH_SAMPLE = 8
"""The most servers of a stage from which a newcomer chooses donors."""
VIEW_AGE_S = 4.0
"""The greatest age, in seconds, of the view by which peers judge their place."""


class DirectoryModel:
    """Keeps the claims of all peers. Every change of a stage's servers raises the stage's version by one.

    work: of each stage, see SimulatedModel. Counts the records that are read in `measurements`.
    """

    def __init__(self, work: tuple[float, ...], rng: random.Random, measurements: Measurements) -> None:
        stages = len(work)
        self._work = work
        self._rng = rng
        self._measurements = measurements
        self._claims: dict[PeerId, PeerView] = {}
        self._servers: list[dict[PeerId, PeerView]] = [{} for _ in range(stages)]
        self._newcomers: list[deque[tuple[int, PeerId]]] = [deque(maxlen=NEWCOMERS) for _ in range(stages)]
        self.versions = [0] * stages
        self._snapshot = View()
        self._snapshot_at = float("-inf")
        self._is_changed = False

    def claim(self, peer: SimulatedPeer, span: Span, state: str) -> None:
        """Stores a peer's claim of its present incarnation, in place of its earlier one."""
        self.withdraw(peer.id)
        rate = peer.equipment.speed / sum(self._work[span.first : span.last + 1])
        bandwidth = peer.equipment.link.spec.rate
        view = PeerView(peer.id, span, peer.incarnation, state=state, capacity=rate, bandwidth=bandwidth)
        self._claims[peer.id] = view
        self._is_changed = True
        if state == "serving":
            for stage in span.stages:
                self._servers[stage][peer.id] = view
                self.versions[stage] += 1
                self._newcomers[stage].append((self.versions[stage], peer.id))

    def withdraw(self, peer: PeerId) -> None:
        """Removes a peer's claim, if there is one."""
        claimed = self._claims.pop(peer, None)
        self._is_changed = True
        if claimed is not None and claimed.state == "serving":
            for stage in claimed.span.stages:
                del self._servers[stage][peer]
                self.versions[stage] += 1

    def is_current(self, peer: PeerId, incarnation: int) -> bool:
        """Returns whether a peer has a claim and it is of this incarnation."""
        claimed = self._claims.get(peer)
        return claimed is not None and claimed.incarnation == incarnation

    def seconds_to_end(self) -> float:
        """Returns the seconds, drawn at random, until the claim of a peer that stops publishing now expires."""
        return LIFETIME_S - self._rng.uniform(0.0, PUBLISH_CLAIM_S)

    def servers(self, stage: int) -> int:
        """Returns how many peers claim to serve a stage."""
        return len(self._servers[stage])

    def read_interval_s(self) -> float:
        """Returns the seconds until a peer reads again, drawn at random."""
        return CALM_READ_S * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    def read(self, peer: SimulatedPeer, stage: int) -> bool:
        """Refreshes a peer's sample of the servers of `stage`; returns whether it has changed.

        Servers of the sample that still serve stay in it, so that what was measured of them is not lost. A newcomer
        gets into a full sample with probability SAMPLE / servers; so each server is in about equally many samples.
        """
        servers = self._servers[stage]
        self._measurements.directory_read += min(SAMPLE, len(servers)) + len(self._servers)
        if peer.replicas_version == self.versions[stage]:
            return False
        kept = [view for old in peer.replicas if (view := servers.get(old.peer)) is not None]
        most = min(SAMPLE, len(servers))
        for version, newcomer in self._newcomers[stage]:
            view = servers.get(newcomer)
            if version <= peer.replicas_version or view is None or len(kept) < SAMPLE:
                continue
            if self._rng.random() < SAMPLE / len(servers) and view not in kept:
                kept[self._rng.randrange(len(kept))] = view
        peer.replicas_version = self.versions[stage]
        if len(kept) < most:
            known = {view.peer for view in kept}
            others = [view for name, view in servers.items() if name not in known]
            kept += self._rng.sample(others, most - len(kept))
        fresh = tuple(sorted(kept, key=lambda view: view.peer))
        is_new = len(fresh) != len(peer.replicas) or any(
            new is not old for new, old in zip(fresh, peer.replicas, strict=True)
        )
        if is_new:
            peer.replicas = fresh
        return is_new

    def view(self, now: float) -> View:
        """Returns the claims of all peers, as they were at most VIEW_AGE_S ago."""
        if self._is_changed and now - self._snapshot_at > VIEW_AGE_S:
            self._snapshot = View(dict(self._claims))
            self._snapshot_at, self._is_changed = now, False
        return self._snapshot

    def sample_servers(self, stage: int) -> list[PeerView]:
        """Returns at most FETCH_SAMPLE of the peers that claim to serve a stage, drawn at random."""
        servers = list(self._servers[stage].values())
        return servers if len(servers) <= FETCH_SAMPLE else self._rng.sample(servers, FETCH_SAMPLE)

    def records_stored_per_s(self, spans: int) -> float:
        """Returns the records per second that a peer with `spans` stages stores: claim and progress for each stage."""
        return spans * (1.0 / PUBLISH_CLAIM_S + 1.0 / PUBLISH_PROGRESS_S)
