"""Remembers the offences of other peers, and decides which are suspended for them, and for how long.

Deterministic: a PeerScore changes only itself, and only by the calls to it; `now` is an argument.

Each offence adds points
to the peer's sum; a sum of `POINTS_TO_SUSPEND` suspends the peer: it is neither called nor answered, and routing does
not count it as a replica. An offence's points expire `expires_after_s` after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from agora_protocol.ids import PeerId

# Maximum number of peers whose offences are remembered; the one whose last offence is oldest is forgotten first.
MAX_PEERS: Final = 16_384
POINTS_TO_SUSPEND: Final = 3  # the sum of points at which a peer is suspended


class Violation(Enum):
    """A kind of offence: what a peer did against the protocol, and what follows immediately, besides the points."""

    # The peer sent a frame that the protocol forbids. It gets a GOODBYE, and the connection ends.
    BAD_FRAME = "bad-frame"
    BAD_REQUEST = "bad-request"  # the peer sent a request that no honest peer makes. The request is refused.
    # The peer answered with a wrong message, shape or number. Routing backs off from it, and asks another replica.
    BAD_ANSWER = "bad-answer"
    # The peer returned a gradient that the backward cannot use. The same follows as for a bad answer.
    USELESS_GRADIENT = "useless-gradient"
    # The peer sent a part for an average that no replica may send. It is refused, and counts once for each round.
    BAD_AVERAGE = "bad-average"
    # The peer reported a step that no peer can be at. Nothing that it reports of the stage counts.
    IMPLAUSIBLE_STEP = "implausible-step"
    # The peer sent state that is not what it had announced. The transfer goes on with others.
    FALSE_STATE = "false-state"
    # The peer sent tensors of the base model that are not the manifest's. Others are asked for them.
    FALSE_BASE = "false-base"


@dataclass(frozen=True, slots=True)
class Penalty:
    """What one offence of some kind costs the peer: `points`, which expire `expires_after_s` seconds after the offence.

    If the points bring the peer's sum to POINTS_TO_SUSPEND or more, the peer is suspended for `suspension_s` seconds.
    """

    points: int = 1
    expires_after_s: float = 600.0
    suspension_s: float = 300.0


PENALTIES: Final[Mapping[Violation, Penalty]] = dict.fromkeys(Violation, Penalty())


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows from one offence that was recorded."""

    suspended_s: float  # seconds for which the peer is suspended from now on; 0.0 if it is not
    reason: str  # the peer's sum of points, and how long it is suspended, or until the points expire, in words


class ReportViolation(Protocol):
    """Records a violation by `peer`; never raises.

    text: what was wrong, in words. occasion: names an event, such as one averaging round: the peer's offences of one
    kind on one occasion count once, see PeerScore.record. "" if each offence counts.
    """

    def __call__(self, peer: PeerId, offence: Violation, text: str, occasion: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class _CountedOffence:
    """One offence that was recorded, and whose points have not expired."""

    offence: Violation
    occasion: str  # "" for none
    points: int
    expires_at: float  # when its points expire, on the clock of `record`'s `now`


@dataclass(slots=True)
class _Record:
    """What is remembered of one peer that has offended."""

    active: list[_CountedOffence] = field(default_factory=list)  # the newest, at most POINTS_TO_SUSPEND
    suspended_until: float = 0.0  # when the suspension ends, on the same clock; 0.0 if the peer never was suspended


class PeerScore:
    """Counts the offences of other peers, decides which are suspended. All times are seconds on one monotonic clock.

    It remembers MAX_PEERS peers; beyond that the peer whose last offence is oldest is forgotten, and its suspension
    ends.
    """

    def __init__(self, penalties: Mapping[Violation, Penalty] = PENALTIES) -> None:
        self._penalties = penalties
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def record(self, peer: PeerId, offence: Violation, now: float, occasion: str = "") -> Consequence | None:
        """Adds an offence of `peer` at `now`, suspends the peer if its sum of points is enough, returns what follows.

        If the sum of points that have not expired is POINTS_TO_SUSPEND or more, the peer is suspended for the penalty's
        time from `now`, even if it is suspended already; a suspension is never shortened. Returns None, and adds
        nothing, if `occasion` is not "" and one of the peer's newest POINTS_TO_SUSPEND offences that count is of this
        kind and had the same occasion.
        """
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        active = [known for known in record.active if known.expires_at >= now]
        if occasion and any((known.offence, known.occasion) == (offence, occasion) for known in active):
            return None
        penalty = self._penalties[offence]
        added = _CountedOffence(offence, occasion, penalty.points, now + penalty.expires_after_s)
        # Older offences than the newest three could not change what follows.
        record.active = [*active, added][-POINTS_TO_SUSPEND:]
        points = sum(known.points for known in record.active)
        if points >= POINTS_TO_SUSPEND:
            record.suspended_until = max(record.suspended_until, now + penalty.suspension_s)
        seconds = self.suspended_s(peer, now)
        follows = f"suspended for {seconds:.0f} s" if seconds else f"they expire after {penalty.expires_after_s:.0f} s"
        return Consequence(seconds, f"{points} of {POINTS_TO_SUSPEND} points; {follows}")

    def suspended_s(self, peer: PeerId, now: float) -> float:
        """Returns for how many seconds after `now` the peer is still suspended; 0.0 if it is not, or is unknown.

        now: seconds, on the same clock as the `now` of `record`.
        """
        record = self._records.get(peer)
        return 0.0 if record is None else max(0.0, record.suspended_until - now)
