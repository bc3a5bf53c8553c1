"""Scores other peers by what they did against the protocol, and decides which are suspended, and for how long.

Each violation costs one point, equivocation POINTS_TO_SUSPEND at once; a point expires after VIOLATION_LIFETIME_S. A
peer with POINTS_TO_SUSPEND points is suspended: it is neither called nor answered, and routing does not count it as a
replica. Deterministic: the clock is an argument of the constructor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId

from agora.observe import events
from agora.observe.events import Report

# Maximum number of peers whose violations are remembered; the one whose last violation is oldest is forgotten first,
# and its suspension ends.
MAX_PEERS: Final = 16_384
POINTS_TO_SUSPEND: Final = 3
VIOLATION_LIFETIME_S: Final = 600.0
SUSPENSION_S: Final = 300.0


class Violation(Enum):
    """What a peer did against the protocol, and what follows immediately, besides a point of its score."""

    # It sent a frame that the protocol forbids. It gets a GOODBYE, and the connection ends.
    BAD_FRAME = "bad-frame"
    BAD_REQUEST = "bad-request"  # it sent a request that no honest peer makes. The request is refused.
    # It answered with a wrong message, shape or number. Routing backs off from it, and asks another replica.
    BAD_ANSWER = "bad-answer"
    # It returned a gradient that the backward cannot use. The same follows as for a bad answer.
    USELESS_GRADIENT = "useless-gradient"
    # It sent a shard for an average that no replica may send. It is refused, and counts once for each round.
    BAD_AVERAGE = "bad-average"
    # As the reducer of a shard it answered a mean that cannot be, where the second reducer's was plausible. The second
    # one's is used.
    FALSE_MEAN = "false-mean"
    # As the reducer of a shard it signed two different means: that is proof. It is suspended at once.
    EQUIVOCATION = "equivocation"
    # It reported a step that no peer can be at. Nothing that it reports of the stage counts.
    IMPLAUSIBLE_STEP = "implausible-step"
    # It sent state that is not what it had announced. The transfer goes on with others.
    FALSE_STATE = "false-state"
    # It sent tensors of the base model that are not the manifest's. Others are asked for them.
    FALSE_BASE = "false-base"


class ReportViolation(Protocol):
    """Type of PeerScore.report_violation, for those that only report."""

    def __call__(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "", /) -> None: ...


# One violation that was recorded, and has not expired.
@dataclass(frozen=True, slots=True)
class _Point:
    violation: Violation
    dedup_key: str
    expires_at: float


@dataclass(slots=True)
class _Record:
    points: list[_Point] = field(default_factory=list)  # the newest, at most POINTS_TO_SUSPEND
    suspended_until: float = 0.0


class PeerScore:
    """Counts the violations of other peers, reports each as an event, and knows which peers are suspended."""

    def __init__(self, report: Report, now: Callable[[], float], suspension_s: float = SUSPENSION_S) -> None:
        """now: seconds on a clock that is never set back."""
        self._report = report
        self._now = now
        self._suspension_s = suspension_s
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def report_violation(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "", /) -> None:
        """Records a violation, detected now, and reports it and what follows as an OffenceRecorded event.

        text: what was wrong, in words. dedup_key: names the occasion, such as one averaging round. Violations of one
        kind on one occasion count once; with "" each counts.
        """
        now = self._now()
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        points = [known for known in record.points if known.expires_at >= now]
        if dedup_key and any((known.violation, known.dedup_key) == (violation, dedup_key) for known in points):
            return
        count = POINTS_TO_SUSPEND if violation is Violation.EQUIVOCATION else 1
        # Points older than the newest three could not change what follows.
        record.points = [*points, *[_Point(violation, dedup_key, now + VIOLATION_LIFETIME_S)] * count][
            -POINTS_TO_SUSPEND:
        ]
        if len(record.points) >= POINTS_TO_SUSPEND:  # also if it is suspended already: the time begins again
            record.suspended_until = now + self._suspension_s
        seconds = self.suspended_s(peer)
        follows = f"suspended for {seconds:.0f} s" if seconds else f"they expire after {VIOLATION_LIFETIME_S:.0f} s"
        reason = f"{len(record.points)} of {POINTS_TO_SUSPEND} points; {follows}"
        self._report(events.OffenceRecorded(peer, violation.value, text, reason, seconds))

    def report_protocol_error(self, peer: PeerId, error: ProtocolError) -> None:
        """Records and reports that `peer` sent a frame that the protocol forbids."""
        self.report_violation(peer, Violation.BAD_FRAME, f"{error.code}: {error}")

    def suspended_s(self, peer: PeerId) -> float:
        """Returns for how many more seconds the peer is suspended: neither called nor answered; 0.0 if it is not."""
        record = self._records.get(peer)
        return 0.0 if record is None else max(0.0, record.suspended_until - self._now())
