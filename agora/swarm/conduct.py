"""What other peers did wrong, what each offence costs, and who is shut out for it. Pure: `now` is an argument.

Knows: offences and their penalties. Must not know: how an offence is detected, nor any clock. Each offence adds points
to the peer's sum; a sum of `POINTS_TO_SHUT_OUT` shuts the peer out: it is neither called nor answered, and routing does
not count it as a replica. Points are taken off again when they are `heals_s` old.

| offence          | what the peer did                             | what follows at once                             |
|------------------|-----------------------------------------------|--------------------------------------------------|
| bad-frame        | sent a frame that the protocol forbids        | GOODBYE, and the connection ends                 |
| bad-request      | sent a request that no honest peer makes      | the request is refused                           |
| bad-answer       | answered with a wrong message, shape or number | routing backs off; a sibling is asked            |
| useless-gradient | returned a gradient that backward cannot use  | routing backs off; a sibling is asked            |
| bad-average      | sent a part that no replica may send          | the part is refused; counted once for each round |
| false-state      | sent state that is not what it had announced  | the transfer goes on with other sources          |
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


class Offence(Enum):
    """The kinds of wrong that a peer can do; the table at the top of this module tells what each is."""

    BAD_FRAME = "bad-frame"
    BAD_REQUEST = "bad-request"
    BAD_ANSWER = "bad-answer"
    USELESS_GRADIENT = "useless-gradient"
    BAD_AVERAGE = "bad-average"
    FALSE_STATE = "false-state"


@dataclass(frozen=True, slots=True)
class Penalty:
    """One offence adds `points` for `heals_s` s; a sum of POINTS_TO_SHUT_OUT shuts the peer out for `shut_out_s` s."""

    points: int = 1
    heals_s: float = 600.0
    shut_out_s: float = 300.0


PENALTIES: Final[Mapping[Offence, Penalty]] = dict.fromkeys(Offence, Penalty())


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows from an offence, and why. shut_out_s: seconds for which the peer is shut out from now, 0.0: not."""

    shut_out_s: float
    reason: str


class ReportOffence(Protocol):
    """A function to call when an offence of `peer` is detected: records it. text: what was wrong. Never raises.

    An offence of the same peer and kind on the same `occasion`, such as one round, as the last is not counted again;
    "" is no occasion.
    """

    def __call__(self, peer: PeerId, offence: Offence, text: str, occasion: str = "") -> None: ...


@dataclass(slots=True)
class _Record:
    """What is remembered of one peer. unhealed: offences as (when it heals, points). occasions: each kind's last."""

    unhealed: list[tuple[float, int]] = field(default_factory=list)
    shut_out_until: float = 0.0
    occasions: dict[Offence, str] = field(default_factory=dict)


class Conduct:
    """Counts the offences of all peers, and says who is shut out; for as long as the daemon lives.

    It forgets the peer with the oldest last offence beyond `max_peers`. `now`: seconds on any monotonic clock.
    """

    def __init__(self, penalties: Mapping[Offence, Penalty] = PENALTIES, max_peers: int = MAX_PEERS) -> None:
        self._penalties = penalties
        self._max_peers = max_peers
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def record(self, peer: PeerId, offence: Offence, now: float, occasion: str = "") -> Consequence | None:
        """Adds an offence to the peer's record, and shuts it out when its points are full. Returns what follows.

        None when this kind's last offence of the peer was on the same `occasion`: then it is not counted.
        """
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > self._max_peers:
            self._records.popitem(last=False)
        if occasion and record.occasions.get(offence) == occasion:
            return None
        record.occasions[offence] = occasion
        penalty = self._penalties[offence]
        unhealed = [entry for entry in record.unhealed if entry[0] >= now]
        # Entries older than the newest three could not change what follows.
        record.unhealed = [*unhealed, (now + penalty.heals_s, penalty.points)][-POINTS_TO_SHUT_OUT:]
        points = sum(points for _, points in record.unhealed)
        if points >= POINTS_TO_SHUT_OUT:
            record.shut_out_until = max(record.shut_out_until, now + penalty.shut_out_s)
        seconds = self.shut_out_s(peer, now)
        follows = f"shut out for {seconds:.0f} s" if seconds else f"they heal after {penalty.heals_s:.0f} s"
        return Consequence(seconds, f"{points} of {POINTS_TO_SHUT_OUT} points; {follows}")

    def shut_out_s(self, peer: PeerId, now: float) -> float:
        """Returns for how many more seconds the peer is shut out; 0.0 when it is not."""
        record = self._records.get(peer)
        return 0.0 if record is None else max(0.0, record.shut_out_until - now)
