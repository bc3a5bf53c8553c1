"""The one closed list of what happens in a daemon; log, journal, counters, status and tests are projections of it.

Knows: names, fields and one-line sentences. Must not know: clocks, files, torch, asyncio. Every event is a frozen
dataclass of plain values (str, int, float, bool, None, tuples of them), so that it survives a trip through JSON. Peers
are base58 peer ids, microbatches are 32 hex characters, durations are seconds.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Level = Literal["debug", "info", "warning", "error"]


def name_of(microbatch: bytes) -> str:
    """The 32 hex characters by which events name a 16-byte microbatch id."""
    return microbatch.hex()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Subclasses below are the whole list; `EVENTS` names them for readers of the journal."""

    level: ClassVar[Level] = "debug"

    def say(self) -> str:
        """One line for a person; the default lists the fields."""
        shown = (f"{f.name} {getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}: " + ", ".join(shown)


Report = Callable[[Event], None]
"""How every room tells what happened: never blocks, never raises, may be called from any thread."""


# --- a daemon's life


@dataclass(frozen=True, slots=True)
class StartStep(Event):
    """One named step of the daemon's start ended after `seconds`; `note` is what it found."""

    level: ClassVar[Level] = "info"
    name: str
    seconds: float
    note: str = ""

    def say(self) -> str:
        return f"{self.name:<10} {self.seconds:7.2f} s  {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class PeerStarted(Event):
    """This daemon is about to serve its span in the run."""

    peer: str
    run: str
    first_stage: int
    last_stage: int
    incarnation: int
    pid: int
    addresses: tuple[str, ...]

    def say(self) -> str:
        span = f"{self.first_stage}-{self.last_stage}"
        return f"peer {self.peer} (pid {self.pid}) holds stages {span} of run {self.run[:12]}"


@dataclass(frozen=True, slots=True)
class FirstHopServed(Event):
    """The first microbatch went through this peer's span and back, `seconds` after the process started."""

    level: ClassVar[Level] = "info"
    stage: int
    seconds: float

    def say(self) -> str:
        return f"first microbatch through stage {self.stage} after {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The daemon's own state is now one of joining, serving, paused, leaving, left."""

    level: ClassVar[Level] = "info"
    state: str
    reason: str

    def say(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """Nothing can be done until `what` happens ("" when the wait ended). A stated wait keeps the watchdog content."""

    what: str

    def say(self) -> str:
        return f"waiting for {self.what}" if self.what else "the wait is over"


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A task of this daemon ended by an unforeseen exception; `error` is its type and text."""

    level: ClassVar[Level] = "error"
    task: str
    error: str

    def say(self) -> str:
        return f"task {self.task} failed: {self.error}"


@dataclass(frozen=True, slots=True)
class DiskTrouble(Event):
    """A file of this daemon could not be written; the daemon goes on without it."""

    level: ClassVar[Level] = "error"
    path: str
    error: str

    def say(self) -> str:
        return f"cannot write {self.path}: {self.error}; free some space, the daemon goes on without it"


@dataclass(frozen=True, slots=True)
class FaultFired(Event):
    """A fault that a test asked for through AGORA_FAULTS is about to act."""

    level: ClassVar[Level] = "warning"
    point: str
    action: str


# --- a microbatch's way


@dataclass(frozen=True, slots=True)
class MicrobatchStarted(Event):
    """An origin drew a batch and entered its own first hop with it. `purpose` is "train" or "evaluate"."""

    microbatch: str
    purpose: str = "train"


@dataclass(frozen=True, slots=True)
class MicrobatchCompleted(Event):
    """The origin has the answer: `loss_sum` over `tokens` supervised tokens, `seconds` after it started."""

    microbatch: str
    loss_sum: float
    tokens: int
    seconds: float
    purpose: str = "train"


@dataclass(frozen=True, slots=True)
class MicrobatchDropped(Event):
    """The origin gave up on a microbatch that it had started."""

    level: ClassVar[Level] = "warning"
    microbatch: str
    reason: str

    def say(self) -> str:
        return f"dropped microbatch {self.microbatch}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MicrobatchRerouted(Event):
    """A call for `stage` to `from_peer` failed and the microbatch goes to a sibling (or to the same peer again)."""

    microbatch: str
    stage: int
    from_peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class MicrobatchCounted(Event):
    """This peer added the microbatch's gradient to the sums of `stages`; seen twice for one stage: counted twice."""

    microbatch: str
    stages: tuple[int, ...]
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RepeatServed(Event):
    """A microbatch came again and was answered from the result cache, or joined the running work: not counted twice."""

    microbatch: str
    stage: int


@dataclass(frozen=True, slots=True)
class HopRefused(Event):
    """This peer refused a microbatch before any work (code is the refusal's word, e.g. "busy")."""

    microbatch: str
    stage: int
    code: str


@dataclass(frozen=True, slots=True)
class RouteChanged(Event):
    """Routing now prefers `peer` for `stage` ("" when nobody can be asked), for `reason`."""

    stage: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationDone(Event):
    """The held-out loss per token, evaluated through the swarm."""

    level: ClassVar[Level] = "info"
    loss: float
    tokens: int
    seconds: float

    def say(self) -> str:
        return f"held-out loss {self.loss:.4f} over {self.tokens} tokens in {self.seconds:.1f} s"


# --- training


@dataclass(frozen=True, slots=True)
class StepTaken(Event):
    """An optimizer step of one stage; `tokens` of this peer went into it (0: the stage's other replicas took it, and
    this one took its number), `staleness` is the mean age in steps of their gradients.

    `loss` is the mean loss per token of its microbatches where this peer knows it (last stage), else None.
    """

    stage: int
    step: int
    tokens: int
    loss: float | None
    seconds: float
    learning_rate: float = 0.0
    gradient_norm: float | None = None
    staleness: float = 0.0


@dataclass(frozen=True, slots=True)
class StepsSkipped(Event):
    """A stage was behind its other replicas and took their step; the samples of its own old step did not count."""

    level: ClassVar[Level] = "warning"
    stage: int
    step: int
    steps: int
    tokens: int

    def say(self) -> str:
        return (
            f"stage {self.stage} was {self.steps} steps behind and is at step {self.step} now; "
            f"{self.tokens} of its tokens came too late"
        )


@dataclass(frozen=True, slots=True)
class GradientLate(Event):
    """In a synchronous run: a gradient arrived after the sum of its step had been handed to the replicas; it goes into
    the next step's.
    """

    level: ClassVar[Level] = "warning"
    stage: int
    step: int
    microbatch: str
    tokens: int


@dataclass(frozen=True, slots=True)
class GradientRefused(Event):
    """A gradient was not finite and was not added; the weights are untouched."""

    level: ClassVar[Level] = "warning"
    stage: int
    microbatch: str
    reason: str

    def say(self) -> str:
        return f"refused a gradient of stage {self.stage}: {self.reason}"


# --- replicas


@dataclass(frozen=True, slots=True)
class RoundDone(Event):
    """A round of one stage ended: `failed_parts` of `parts` stayed as they were; `members` of `expected` replicas, as a
    mean over the parts, took part in time. Distances are root mean squares to the average: of this replica, and the
    median of the others.
    """

    stage: int
    what: str
    round: int
    parts: int
    failed_parts: int
    members: float
    expected: int
    weight: float
    seconds: float
    bytes_out: int
    distance: float
    distance_others: float


@dataclass(frozen=True, slots=True)
class RoundSkipped(Event):
    """A round was due and did not begin."""

    stage: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartFailed(Event):
    """A part of a round stayed as it was here: neither owner gave an average that could be used."""

    stage: int
    what: str
    round: int
    part: int
    reason: str


# --- what lasts


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint of one stage is on this peer's disk."""

    stage: int
    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(Event):
    """A checkpoint on this peer's disk is not as it was written, and is not used; the text names file and hashes."""

    level: ClassVar[Level] = "error"
    text: str

    def say(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class StateFetched(Event):
    """A stage's weights and moments came from peers: `step` of the snapshot, chunks that had to be asked for again."""

    level: ClassVar[Level] = "info"
    stage: int
    step: int
    bytes: int
    seconds: float
    fetched_again: int = 0

    def say(self) -> str:
        return f"stage {self.stage} fetched at step {self.step}: {self.bytes / 1e6:.1f} MB in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class StateLost(Event):
    """A stage of this peer fell so far behind the others that it fetches their state again."""

    level: ClassVar[Level] = "warning"
    stage: int
    step: int
    others: int

    def say(self) -> str:
        return f"stage {self.stage} is at step {self.step}, the others at {self.others}: it fetches their state"


# --- the swarm


@dataclass(frozen=True, slots=True)
class PeerSeen(Event):
    """A peer of the run came into view, or changed its span or state."""

    peer: str
    first_stage: int
    last_stage: int
    state: str


@dataclass(frozen=True, slots=True)
class PeerGone(Event):
    """A peer left the view: it said so, its claim expired, or its connection broke."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpanChosen(Event):
    """Placement decided which stages this peer holds, and why."""

    first_stage: int
    last_stage: int
    reason: str

    def say(self) -> str:
        return f"takes stages {self.first_stage}-{self.last_stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class HealthChanged(Event):
    """The swarm's health as this peer judges it: OK, DEGRADED, STALLED, PAUSED; why, and what to do."""

    level: ClassVar[Level] = "info"
    state: str
    why: str
    do: str | None

    def say(self) -> str:
        return f"health {self.state}: {self.why}" + (f"; {self.do}" if self.do else "")


@dataclass(frozen=True, slots=True)
class OffenceRecorded(Event):
    """A peer did what no honest peer does. offence: a word of swarm.conduct.Offence; follows: what follows, and why.

    shut_out_s: seconds for which the peer is shut out from now, 0.0 when it is not.
    """

    level: ClassVar[Level] = "warning"
    peer: str
    offence: str
    text: str
    follows: str = ""
    shut_out_s: float = 0.0

    def say(self) -> str:
        return f"offence of {self.peer}: {self.offence}, {self.text}" + (f" ({self.follows})" if self.follows else "")


@dataclass(frozen=True, slots=True)
class DirectoryTrouble(Event):
    """A read or a write of the DHT failed or took too long; the last known view stays in use."""

    what: str
    reason: str


# --- the network


@dataclass(frozen=True, slots=True)
class ConnectionOpened(Event):
    """A stream to a peer is up and both sides said hello; `ours` when this peer opened it."""

    peer: str
    ours: bool


@dataclass(frozen=True, slots=True)
class ConnectionClosed(Event):
    """A stream to a peer ended; `calls_failed` open calls failed with it."""

    peer: str
    reason: str
    calls_failed: int = 0


@dataclass(frozen=True, slots=True)
class Traffic(Event):
    """Bytes that this daemon has sent since its start: everything on its streams, and of it what was of each kind."""

    boundary_bytes: int
    sent_bytes: int
    received_bytes: int
    averaging_bytes: int = 0
    state_bytes: int = 0


def _all_events() -> dict[str, type[Event]]:
    return {n: c for n, c in globals().items() if isinstance(c, type) and issubclass(c, Event) and c is not Event}


EVENTS: Mapping[str, type[Event]] = types.MappingProxyType(_all_events())
"""Every event by name: the list is closed, the journal refuses an event defined elsewhere."""
