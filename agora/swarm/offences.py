"""Records the offences of other peers when they are detected, by the event loop's clock, and reports them as events.

Knows: the clock, the event, and `Conduct`. Must not know: how an offence is detected, or how a peer is kept out.
"""

from __future__ import annotations

from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId

from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.conduct import Conduct, Offence


class OffenceLog:
    """Records the offences of other peers, reports each as an event, and says which peers are shut out."""

    def __init__(self, report: Report, conduct: Conduct | None = None) -> None:
        self._report = report
        self._conduct = conduct or Conduct()

    def report_offence(self, peer: PeerId, offence: Offence, text: str, occasion: str = "") -> None:
        """Records an offence detected now, and reports it as OffenceRecorded unless its `occasion` was counted."""
        if consequence := self._conduct.record(peer, offence, loop_time(), occasion):
            kind, follows = offence.value, consequence.reason
            self._report(events.OffenceRecorded(peer, kind, text, follows, consequence.shut_out_s))

    def report_violation(self, peer: PeerId, error: ProtocolError) -> None:
        """Records a BAD_FRAME offence: the peer sent a frame that the protocol forbids, as `error` tells."""
        self.report_offence(peer, Offence.BAD_FRAME, f"{error.code}: {error}")

    def shut_out_s(self, peer: PeerId) -> float:
        """Returns for how many more seconds the peer must be neither called nor answered; 0.0 when it may be."""
        return self._conduct.shut_out_s(peer, loop_time())
