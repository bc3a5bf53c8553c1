"""What a simulation counts while it runs, and the samples that it takes at equal intervals.

Knows: counters, samples over time. Must not know: why anything happened, how a report looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agora.sim.simulated_peer import Visit


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one simulated time, in seconds; rates are means since the sample before.

    peers: machines that are up. serving: those of them that serve. rate: microbatches completed per second. bound: the
    flow bound of the serving machines. best: the rate of the best placement of all machines that are up, on one stage
    each. fluid: the sum of all speeds divided by the sum of all work. messages: sent per peer and second. stored, read:
    directory records per peer and second. keys: reads of one directory key per peer and second. empty_stages: how many
    stages have no server.
    """

    time: float
    peers: int
    serving: int
    rate: float
    bound: float
    best: float
    fluid: float
    messages: float
    stored: float
    read: float
    keys: float
    empty_stages: int


@dataclass(slots=True)
class Measurements:
    """Counters since the start of the simulation.

    completed: microbatches whose origin has the answer. counted: visits of peers whose gradient was added. twice:
    (microbatch, stage) pairs counted a second time. lost: microbatches whose origin was killed. dropped: those that an
    origin gave up. messages: frames between peers, of any size. directory_stored, directory_read: records.
    directory_keys: reads of one key. moves, joins, kills, leaves, hangs: of machines. empty_s: seconds for which a
    stage had no server, by stage. longest_empty_s: the longest such time without a break.
    """

    completed: int = 0
    counted: int = 0
    twice: int = 0
    rerouted: int = 0
    timeouts: int = 0
    busy: int = 0
    repeats: int = 0
    lost: int = 0
    dropped: int = 0
    messages: int = 0
    directory_stored: float = 0.0
    directory_read: int = 0
    directory_keys: int = 0
    moves: int = 0
    joins: int = 0
    kills: int = 0
    leaves: int = 0
    hangs: int = 0
    empty_s: dict[int, float] = field(default_factory=dict)
    longest_empty_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def count(self, visit: Visit) -> None:
        """Counts a visit's gradient at each of its stages, and marks them in the microbatch's `counted` bits."""
        bits = (1 << (visit.last + 1)) - (1 << visit.entry)
        self.counted += 1
        self.twice += (visit.microbatch.counted & bits).bit_count()
        visit.microbatch.counted |= bits
