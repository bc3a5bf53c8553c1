"""What a simulation counts while it runs, and the samples that it takes at equal intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

from agora.planning.simulator.simulated_peer import Visit


@dataclass(frozen=True, slots=True)
class Sample:
    """rate, messages, stored, read, keys: means since the previous sample."""

    time: float
    peers: int  # machines that are up
    serving: int  # those of them that serve
    rate: float  # microbatches completed per second
    bound: float  # the flow bound of the serving machines
    best: float  # best_whole_placement of all machines that are up
    messages: float  # sent per peer and second
    stored: float  # directory records published per peer and second
    read: float  # directory records read per peer and second
    keys: float  # reads of one directory key per peer and second
    empty_stages: int  # how many stages have no server


@dataclass(slots=True)
class Measurements:
    """Counters since the start of the simulation, and its samples."""

    completed: int = 0  # microbatches whose origin has the answer
    counted: int = 0  # visits whose gradient was added
    counted_twice: int = 0  # (microbatch, stage) pairs counted again
    rerouted: int = 0  # calls that failed, and attempts that ended without a result
    lost: int = 0  # open microbatches of origins that have gone
    dropped: int = 0  # microbatches that an origin gave up
    messages: int = 0  # frames between peers, of any size
    directory_stored: float = 0.0  # records published
    directory_read: int = 0  # records read
    directory_keys: int = 0  # reads of one key
    moves: int = 0  # of machines, as the four below
    joins: int = 0
    kills: int = 0
    leaves: int = 0
    hangs: int = 0
    empty_s: dict[int, float] = field(default_factory=dict)  # seconds for which a stage had no server, by stage
    longest_empty_s: float = 0.0  # the longest such time without a break
    samples: list[Sample] = field(default_factory=list)

    def record_visit(self, visit: Visit) -> None:
        bits = (1 << (visit.last + 1)) - (1 << visit.entry_stage)
        self.counted += 1
        self.counted_twice += (visit.microbatch.counted & bits).bit_count()
        visit.microbatch.counted |= bits
