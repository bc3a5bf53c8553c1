"""Draws when machines join, leave, are killed and hang in a simulation. Pure, apart from the random generator's state.

The shapes `p3` and `g4dn` stand for two published logs of preemptible machines: which fraction of the mean fleet leaves
per hour, and the most machines that leave at the same moment. How many leave together is drawn from 1 to that number.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ChurnKind = Literal["join", "kill", "leave", "hang"]
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Churn:
    """How a fleet changes. kills, leaves, hangs: fractions of the fleet per hour; joins make up for all departures.

    kills: of machines that vanish.
    leaves: of machines that announce their departure and finish their work.
    hangs: of machines that stop with their connections open.
    at_once: maximum number of machines killed at one moment; each number from 1 to this is equally likely.
    return_s: mean seconds from a departure to the join that replaces it.
    """

    kills: float = 0.0
    leaves: float = 0.0
    hangs: float = 0.0
    at_once: int = 1
    return_s: float = 120.0


SHAPES: Mapping[str, Churn] = {
    "none": Churn(),
    "p3": Churn(kills=0.61, at_once=6, return_s=600.0),
    "g4dn": Churn(kills=0.55, at_once=5, return_s=600.0),
}


@dataclass(frozen=True, slots=True)
class FleetEvent:
    time: float
    kind: ChurnKind
    count: int = 1


def fleet_events(churn: Churn, peers: int, seconds: float, rng: random.Random) -> list[FleetEvent]:
    """Returns what happens to a fleet of `peers` machines in the first `seconds`, in order of time.

    Departures are a Poisson process for each kind; kills come in groups, so many that churn.kills is the fraction of
    the fleet killed per hour. Each departed machine is followed by a join after an exponentially distributed time, so
    that the fleet stays near its size; joins after `seconds` are left out.
    """
    events: list[FleetEvent] = []
    kinds: tuple[tuple[ChurnKind, float, int], ...] = (
        ("kill", churn.kills, churn.at_once),
        ("leave", churn.leaves, 1),
        ("hang", churn.hangs, 1),
    )
    for kind, share, at_once in kinds:
        mean_group = (1 + at_once) / 2.0
        rate = share * peers / HOUR_S / mean_group
        time = rng.expovariate(rate) if rate > 0.0 else seconds
        while time < seconds:
            count = rng.randint(1, at_once)
            events.append(FleetEvent(time, kind, count))
            events += [FleetEvent(time + rng.expovariate(1.0 / churn.return_s), "join") for _ in range(count)]
            time += rng.expovariate(rate)
    return sorted((event for event in events if event.time < seconds), key=lambda event: event.time)
