"""What a running daemon is made of, and what is known of it while it is still being built.

Knows: names of parts. Must not know: how they are built, or what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import SignedManifest

from agora.net.calls import Network
from agora.net.directory import Directory
from agora.net.host import Host
from agora.node.collecting import Collector
from agora.node.keeping import Keeper
from agora.node.paths import Home
from agora.node.replicas import Replicas
from agora.node.runs import RunReference
from agora.node.serving import Meter
from agora.node.settings import Settings
from agora.pipeline.admission import Admission
from agora.pipeline.hop import Hop
from agora.pipeline.origin import Origin
from agora.pipeline.router import Router
from agora.swarm.membership import Membership
from agora.train.compute import Compute


@dataclass(frozen=True, slots=True)
class Where:
    """What the daemon was told of itself; `incarnation` is the unix time of its start, in nanoseconds."""

    run: RunReference
    home: Home
    settings: Settings
    identity: Identity
    incarnation: int

    @property
    def peer(self) -> PeerId:
        """This peer."""
        return self.identity.peer


@dataclass(slots=True)
class Early:
    """What is known before everything is built: enough for an invite."""

    addresses: tuple[str, ...] = ()
    signed: SignedManifest | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything, built and wired."""

    signed: SignedManifest
    host: Host
    network: Network
    directory: Directory
    membership: Membership
    compute: Compute
    admission: Admission
    router: Router
    hop: Hop
    origin: Origin | None
    meter: Meter
    keeper: Keeper
    replicas: Replicas
    collector: Collector

    @property
    def span(self) -> Span:
        """The stages held."""
        return self.compute.span

    @property
    def in_hand(self) -> int:
        """Microbatches accepted or originated here and not finished."""
        return self.admission.taken + (self.origin.open_microbatches if self.origin else 0)
