"""The one closed list of events of a daemon; log, journal, counters, status and tests are projections of it.

Knows: names, fields and one-line sentences. Must not know: clocks, files, torch, asyncio. Every event is a frozen
dataclass of plain values (str, int, float, bool, None, tuples of them), so that it survives a trip through JSON. Peers
are base58 peer ids, microbatches are 32 hex characters, durations are seconds. Events of level debug go to the journal
only; the others are shown to people as well, with the sentence that `describe` returns.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, dataclass_transform

Level = Literal["debug", "info", "warning", "error"]


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Something that happened in a daemon. The subclasses below are the whole list; each becomes a frozen dataclass.

    template: a sentence with the fields' names in braces; "" lists all fields.
    """

    level: ClassVar[Level] = "debug"
    template: ClassVar[str] = ""

    def __init_subclass__(cls, level: Level = "debug", template: str = "") -> None:
        cls.level, cls.template = level, template
        dataclass(frozen=True)(cls)

    def describe(self) -> str:
        """Returns one line for a person."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.template:
            return self.template.format(**values).rstrip(" ;")
        return f"{type(self).__name__}: " + ", ".join(f"{name} {value}" for name, value in values.items())


Report = Callable[[Event], None]
"""Takes an event from any room and any thread. It never blocks and never raises."""


# --- a daemon's life


class StartStep(Event, level="info", template="{name:<10} {seconds:7.2f} s  {note}"):
    """A named step of a start, or of a move to other stages, ended after `seconds`; `note` tells its result."""

    name: str
    seconds: float
    note: str = ""


class PeerStarted(Event, template="peer {peer} (pid {pid}) holds stages {first_stage}-{last_stage} of run {run:.12}"):
    """The daemon serves its first span; reported once in its life."""

    peer: str
    run: str
    first_stage: int
    last_stage: int
    incarnation: int
    pid: int
    addresses: tuple[str, ...]


class FirstHopServed(Event, level="info", template="first microbatch through stage {stage} after {seconds:.1f} s"):
    """The first microbatch went through this peer's span and back, `seconds` after the process started."""

    stage: int
    seconds: float


class StateChanged(Event, level="info", template="{state}: {reason}"):
    """The daemon's own state changed. `state`: serving, paused, moving, leaving or left."""

    state: str
    reason: str


class TaskFailed(Event, level="error", template="task {task} failed: {error}"):
    """A task of this daemon failed; `error` is the error's type and text."""

    task: str
    error: str


class DiskTrouble(
    Event, level="error", template="cannot write {path}: {error}; free some space, the daemon goes on without it"
):
    """A file of this daemon could not be written; the daemon goes on without it."""

    path: str
    error: str


# --- a microbatch's way


class MicrobatchStarted(Event):
    """An origin drew a microbatch and entered its own first hop with it. `purpose` is "train" or "evaluate"."""

    microbatch: str
    purpose: str = "train"


class MicrobatchCompleted(Event):
    """The origin has the answer: `loss_sum` over `tokens` supervised tokens, `seconds` after it started."""

    microbatch: str
    loss_sum: float
    tokens: int
    seconds: float
    purpose: str = "train"


class MicrobatchDropped(Event, level="warning", template="dropped microbatch {microbatch}: {reason}"):
    """The origin gave up a microbatch that it had started."""

    microbatch: str
    reason: str
    purpose: str = "train"


class MicrobatchRerouted(Event):
    """A call for `stage` to `from_peer` failed; the microbatch goes to another replica, or to the same peer again."""

    microbatch: str
    stage: int
    from_peer: str
    reason: str


class MicrobatchCounted(Event):
    """This peer added the microbatch's gradient to the sums of `stages`."""

    microbatch: str
    stages: tuple[int, ...]
    tokens: int = 0


class RepeatServed(Event):
    """A microbatch came again and was not counted again: it got the kept answer, or joined the work that still ran."""

    microbatch: str
    stage: int


class HopRefused(Event):
    """This peer refused a microbatch before any work. `code` is the refusal's word, for example "busy"."""

    microbatch: str
    stage: int
    code: str


class RouteChanged(Event):
    """Routing now prefers `peer` for `stage` ("" when no peer can be asked), for `reason`."""

    stage: int
    peer: str
    reason: str


class EvaluationDone(Event, level="info", template="held-out loss {loss:.4f} over {tokens} tokens in {seconds:.1f} s"):
    """The held-out loss per token was evaluated through the swarm."""

    loss: float
    tokens: int
    seconds: float


# --- training


class StepTaken(Event):
    """A stage took an optimizer step.

    tokens: of this peer in the step; 0 when only the stage's other replicas took it, and this one took over its number.
    loss: mean loss per token of its microbatches where this peer knows it (last stage), else None. staleness: mean age
    of their gradients, in steps.
    """

    stage: int
    step: int
    tokens: int
    loss: float | None
    seconds: float
    learning_rate: float = 0.0
    gradient_norm: float | None = None
    staleness: float = 0.0


class StepsSkipped(
    Event,
    level="warning",
    template="stage {stage} was {steps} steps behind and is at step {step} now; {tokens} of its tokens came too late",
):
    """A stage was `steps` steps behind its other replicas and took over their step; its own `tokens` did not count."""

    stage: int
    step: int
    steps: int
    tokens: int


class GradientLate(Event, level="warning"):
    """In a synchronous run, a gradient came after its step's sum had gone to the replicas; the next step counts it."""

    stage: int
    step: int
    microbatch: str
    tokens: int


class GradientRefused(Event, level="warning", template="refused a gradient of stage {stage}: {reason}"):
    """A gradient was not finite and was not added; the weights are untouched."""

    stage: int
    microbatch: str
    reason: str


# --- replicas and their state


class RoundDone(Event):
    """An averaging round of one stage ended.

    what: "weights" or "gradient". failed_parts: of `parts`, those that stayed as they were. members: replicas that took
    part in time, of `expected`, as a mean over the parts. distance, distance_others: root mean square difference from
    the average, of this replica and the median of the others.
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


class PartFailed(Event):
    """A part of a round stayed as it was here: neither owner gave an average that could be used."""

    stage: int
    what: str
    round: int
    part: int
    reason: str


class CheckpointWritten(Event):
    """A checkpoint of one stage is on this peer's disk."""

    stage: int
    step: int
    bytes: int
    seconds: float


class CheckpointDamaged(Event, level="error", template="{text}"):
    """A checkpoint on this peer's disk is not as it was written, and is not used; `text` names the file and hashes."""

    text: str


class StateFetched(
    Event, level="info", template="stage {stage} fetched at step {step}: {bytes:,} bytes in {seconds:.1f} s"
):
    """A stage's weights and moments came from peers. `fetched_again`: chunks that had to be asked for again."""

    stage: int
    step: int
    bytes: int
    seconds: float
    fetched_again: int = 0


class StageFellBehind(
    Event, level="warning", template="stage {stage} is at step {step}, the others at {others}: it fetches their state"
):
    """A stage of this peer is so far behind the other replicas that it fetches their state again."""

    stage: int
    step: int
    others: int


# --- the swarm


class PeerSeen(Event):
    """A peer of the run came into view, or changed its span or state."""

    peer: str
    first_stage: int
    last_stage: int
    state: str


class PeerGone(Event):
    """A peer left the view: it said so, its claim expired, or its connection broke."""

    peer: str
    reason: str


class SpanChosen(Event, template="takes stages {first_stage}-{last_stage}: {reason}"):
    """Placement decided which stages this peer holds, and why."""

    first_stage: int
    last_stage: int
    reason: str


class HealthChanged(Event, level="info", template="health {state}: {why}; {do}"):
    """This peer judges the swarm's health anew. `state`: OK, DEGRADED, STALLED, PAUSED; `do`: what a reader can do."""

    state: str
    why: str
    do: str = ""


class OffenceRecorded(Event, level="warning", template="offence of {peer}: {offence}, {text}; {follows}"):
    """A peer did what no honest peer does. offence: a word of swarm.conduct.Offence; follows: the consequence, and why.

    shut_out_s: seconds for which the peer is shut out from now, 0.0 when it is not.
    """

    peer: str
    offence: str
    text: str
    follows: str = ""
    shut_out_s: float = 0.0


class DirectoryTrouble(Event):
    """A read or a write of the DHT failed or took too long; the last known view stays in use."""

    what: str
    reason: str


class Traffic(Event):
    """Bytes since the daemon's start: everything on its streams, and of what it sent the tensors of each kind."""

    boundary_bytes: int
    sent_bytes: int
    received_bytes: int
    averaging_bytes: int = 0
    state_bytes: int = 0


EVENTS: Final[Mapping[str, type[Event]]] = types.MappingProxyType({cls.__name__: cls for cls in Event.__subclasses__()})
"""Every event by name: the list is closed, the journal refuses an event defined elsewhere."""
