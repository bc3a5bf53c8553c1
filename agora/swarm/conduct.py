"""Remembers the offences of other peers, and decides who is shut out for them, and for how long.

Deterministic: a Conduct changes only itself, and only by the calls to it; `now` is an argument.

Knows: offences and their penalties. Must not know: how an offence is detected, nor any clock. Each offence adds points
to the peer's sum; a sum of `POINTS_TO_SHUT_OUT` shuts the peer out: it is neither called nor answered, and routing does
not count it as a replica. An offence's points expire `expires_after_s` after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from agora_protocol.ids import PeerId

MAX_PEERS: Final = 16_384
"""Peers whose offences are remembered; the one whose last offence is oldest is forgotten first."""
POINTS_TO_SHUT_OUT: Final = 3
"""The sum of points at which a peer is shut out."""


class Offence(Enum):
    """The kinds of offence. Each comment says what the peer did, and what follows at once in addition to the points."""

    BAD_FRAME = "bad-frame"  # sent a frame that the protocol forbids: GOODBYE, and the connection ends
    BAD_REQUEST = "bad-request"  # sent a request that no honest peer makes: it is refused
    BAD_ANSWER = "bad-answer"  # answered with a wrong message, shape or number: routing backs off, a sibling is asked
    USELESS_GRADIENT = "useless-gradient"  # returned a gradient that backward cannot use: as for a bad answer
    BAD_AVERAGE = "bad-average"  # sent a part that no replica may send: it is refused; counted once for each round
    IMPLAUSIBLE_STEP = "implausible-step"  # reported a step that nobody can be at: nothing it says of the stage counts
    FALSE_STATE = "false-state"  # sent state that is not what it had announced: the transfer goes on with others
    FALSE_BASE = "false-base"  # sent tensors of the base model that are not the manifest's: others are asked for them


@dataclass(frozen=True, slots=True)
class Penalty:
    """What one offence costs: `points`, which expire after `expires_after_s` seconds.

    If the peer's sum then is POINTS_TO_SHUT_OUT or more, it is shut out for `shut_out_s` seconds.
    """

    points: int = 1
    expires_after_s: float = 600.0
    shut_out_s: float = 300.0


PENALTIES: Final[Mapping[Offence, Penalty]] = dict.fromkeys(Offence, Penalty())


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows from an offence, and why. shut_out_s: seconds for which the peer is now shut out; 0.0 if not."""

    shut_out_s: float
    reason: str


class ReportOffence(Protocol):
    """Protocol of the function that records an offence of `peer`; it never raises. text: what was wrong, in words.

    occasion: names an event, such as one round, for which the peer's offences of this kind count once; "" for none.
    """

    def __call__(self, peer: PeerId, offence: Offence, text: str, occasion: str = "") -> None: ...


@dataclass(slots=True)
class _Record:
    """What is remembered of one peer.

    active: offences that count, as (time when it expires, points). occasions: by kind of offence, its latest occasion.
    """

    active: list[tuple[float, int]] = field(default_factory=list)
    shut_out_until: float = 0.0
    occasions: dict[Offence, str] = field(default_factory=dict)


class Conduct:
    """Counts the offences of at most MAX_PEERS peers, and says who is shut out. now: seconds, monotonic clock."""

    def __init__(self, penalties: Mapping[Offence, Penalty] = PENALTIES) -> None:
        self._penalties = penalties
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def record(self, peer: PeerId, offence: Offence, now: float, occasion: str = "") -> Consequence | None:
        """Adds an offence, which may shut the peer out. Returns what follows from it.

        occasion: see ReportOffence; returns None, and adds nothing, if the last offence of this kind had the same one.
        """
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        if occasion and record.occasions.get(offence) == occasion:
            return None
        record.occasions[offence] = occasion
        penalty = self._penalties[offence]
        active = [entry for entry in record.active if entry[0] >= now]
        # Entries older than the newest three could not change what follows.
        record.active = [*active, (now + penalty.expires_after_s, penalty.points)][-POINTS_TO_SHUT_OUT:]
        points = sum(points for _, points in record.active)
        if points >= POINTS_TO_SHUT_OUT:
            record.shut_out_until = max(record.shut_out_until, now + penalty.shut_out_s)
        seconds = self.shut_out_s(peer, now)
        follows = f"shut out for {seconds:.0f} s" if seconds else f"they expire after {penalty.expires_after_s:.0f} s"
        return Consequence(seconds, f"{points} of {POINTS_TO_SHUT_OUT} points; {follows}")

    def shut_out_s(self, peer: PeerId, now: float) -> float:
        """Returns for how many seconds after `now` the peer is shut out; 0.0 when it is not.

        now: on the same clock as `record`'s `now`.
        """
        record = self._records.get(peer)
        return 0.0 if record is None else max(0.0, record.shut_out_until - now)
