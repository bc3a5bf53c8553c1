"""Records the offences of other peers when they are detected, by the event loop's clock, and reports them as events."""

from __future__ import annotations

from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId

from agora.core.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.peer_score import PeerScore, Violation


class ViolationLog:
    """Records offences of other peers in a PeerScore, by the event loop's clock, and reports each as an event.

    It also knows which peers are suspended. conduct: None for a new one with the usual penalties.
    """

    def __init__(self, report: Report, conduct: PeerScore | None = None) -> None:
        self._report = report
        self._peer_score = conduct or PeerScore()

    def report_violation(self, peer: PeerId, offence: Violation, text: str, occasion: str = "") -> None:
        """Records an offence of `peer`, detected now, and reports it and what follows as an OffenceRecorded event.

        The offence may suspend the peer. text: what was wrong, in words. occasion: names an event, such as one
        averaging round, on which the peer's offences of this kind count once, see PeerScore.record; "" for none.
        """
        if consequence := self._peer_score.record(peer, offence, loop_time(), occasion):
            self._report(events.OffenceRecorded(peer, offence.value, text, consequence.reason, consequence.suspended_s))

    def report_protocol_error(self, peer: PeerId, error: ProtocolError) -> None:
        """Records and reports a BAD_FRAME offence: `peer` sent a frame that the protocol forbids, see `error`."""
        self.report_violation(peer, Violation.BAD_FRAME, f"{error.code}: {error}")

    def suspended_s(self, peer: PeerId) -> float:
        """Returns for how many more seconds the peer is suspended: neither called nor answered; 0.0 if it is not."""
        return self._peer_score.suspended_s(peer, loop_time())
