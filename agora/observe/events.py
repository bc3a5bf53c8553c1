"""The one closed list of events of a daemon; log, journal, counters, status and tests are projections of it.

Every event is a frozen dataclass of plain values (str, int, float, bool, None, tuples of them), so that it survives a
trip through JSON. Peers are base58 peer ids, microbatches are 32 hex characters, durations are seconds. Events of level
debug go to the journal only. In order: a daemon's life, a microbatch's way, training, replicas and state, the swarm.
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
    """Base class of everything that a daemon reports; each subclass becomes a frozen dataclass.

    level: the severity, by which logs choose what they show. template: see `describe`.
    """

    level: ClassVar[Level] = "debug"
    template: ClassVar[str] = ""  # a sentence with the fields' names in braces; "" lists all fields

    def __init_subclass__(cls, level: Level = "debug", template: str = "") -> None:
        cls.level, cls.template = level, template
        dataclass(frozen=True)(cls)

    def describe(self) -> str:
        """Returns a sentence for a person: the filled template; without one, the class's name and all fields.

        Values are not escaped.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.template:
            return self.template.format(**values).rstrip(" ;")
        return f"{type(self).__name__}: " + ", ".join(f"{name} {value}" for name, value in values.items())


Report = Callable[
    [Event], None
]  # takes an event from any module and any thread. It never raises, and waits for a write at most.


class StartStep(Event, level="info", template="{name:<10} {seconds:7.2f} s  {note}"):
    """Event: a named phase of a start, or of a move to other stages, ended after `seconds`; `note`: its result."""

    name: str
    seconds: float
    note: str = ""


class PeerStarted(Event, template="peer {peer} (pid {pid}) holds stages {first_stage}-{last_stage} of run {run:.12}"):
    """Event: the daemon begins to serve its first span after its start, or after a pause; not after a move."""

    peer: str
    run: str
    first_stage: int
    last_stage: int
    incarnation: int
    pid: int
    addresses: tuple[str, ...]


class FirstHopServed(Event, level="info", template="first microbatch through stage {stage} after {seconds:.1f} s"):
    """Event: this peer counted its first microbatch, `seconds` after its process started.

    stage: the first stage of this peer's span.
    """

    stage: int
    seconds: float


class OwnerTold(Event, level="warning", template="{text}"):
    """Event: a sentence for the owner of this machine."""

    text: str


class StateChanged(Event, level="info", template="{state}: {reason}"):
    """Event: the daemon's own state changed. `state`: serving, paused, moving, completed, leaving or left."""

    state: str
    reason: str


class ResultExported(Event, level="info", template="the run's result is in {folder}"):
    """Event: the run has ended, and what `swarm export` writes of it is in a folder of this machine."""

    folder: str


class TaskFailed(Event, level="error", template="{task} failed: {error}"):
    """Event: a task or an action of this daemon failed. error: what went wrong, mostly the error's type and text."""

    task: str
    error: str


class DiskTrouble(
    Event, level="error", template="cannot write {path}: {error}; free some space, the daemon goes on without it"
):
    """Event: a file of this daemon could not be written; the daemon continues without it."""

    path: str
    error: str


class MicrobatchStarted(Event):
    """Event: an origin drew a microbatch and entered its own first hop with it.

    purpose: "train", "evaluate", or "reference" (dpo).
    """

    microbatch: str
    purpose: str = "train"


class MicrobatchCompleted(Event):
    """Event: the origin received a microbatch's answer, `seconds` after it started the microbatch.

    loss_sum: mean loss in nats * `tokens`, the loss weight: supervised tokens, of dpo all. metrics: see core.metrics.
    """

    microbatch: str
    loss_sum: float
    tokens: int
    seconds: float
    purpose: str = "train"
    metrics: tuple[float, ...] = ()


class MicrobatchDropped(Event, level="warning", template="dropped microbatch {microbatch}: {reason}"):
    """Event: the origin has ended work on a microbatch without an answer: it was cancelled, or an error escaped."""

    microbatch: str
    reason: str
    purpose: str = "train"


class MicrobatchRerouted(Event):
    """Event: a call for `stage` to `from_peer` failed, other than as Busy; any peer of it gets the microbatch again."""

    microbatch: str
    stage: int
    from_peer: str
    reason: str


class MicrobatchCounted(Event):
    """Event: this peer added a microbatch's gradient, over `tokens` tokens, to the gradient sums of `stages`."""

    microbatch: str
    stages: tuple[int, ...]
    tokens: int = 0


class RepeatServed(Event):
    """Event: a microbatch came again and was not counted again: its sender gets the kept or the pending answer."""

    microbatch: str
    stage: int


class SlotsChanged(Event):
    """Event: from now on this peer has at most `slots` microbatches in progress at a time: the slots of its hop."""

    slots: int
    most: int  # how many slots it had at its start
    reason: str


class HopRefused(Event):
    """Event: this peer refused a microbatch before doing any work. code: the error's code, for example "busy"."""

    microbatch: str
    stage: int
    code: str


class RouteChanged(Event):
    """Event: no peer of `stage` can be asked any more (`is_empty`), or some peer of it can be asked again."""

    stage: int
    is_empty: bool
    peer: str  # the one chosen for the call that noticed the change; "" if none was chosen
    reason: str  # why it was chosen


class EvaluationDone(Event, level="info", template="held-out loss {loss:.4f} over {tokens} tokens in {seconds:.1f} s"):
    """Event: this origin evaluated the held-out loss per token through the swarm. metrics: sums, see core.metrics."""

    loss: float
    tokens: int
    seconds: float
    metrics: tuple[float, ...] = ()


class TaskEvaluated(Event, level="info", template="task {task}: {metric} {value:.4f} over {items} items"):
    """Event: this origin evaluated a task of `swarm evaluate` through the swarm; one for each metric of the task.

    metric: loss and perplexity of texts; accuracy and accuracy_by_length of questions; what lm-evaluation-harness calls
    it. tokens: those that counted; 0 where that is not known.
    """

    task: str
    metric: str
    value: float
    items: int
    tokens: int
    seconds: float


class AdmissionChanged(
    Event, level="info", template="admission is {mode} from now on ({listed} listed); this machine: {is_admitted}"
):
    """Event: an amendment of who takes part came into force here. is_admitted: whether this machine still does."""

    mode: str
    listed: int
    public_status: bool
    is_admitted: bool


class EvaluationTaken(
    Event, level="info", template="task {task}: {metric} {value:.4f} over {items} items at step {step}, by {peer}"
):
    """Event: a result that another member has signed came to be known here; one for each metric, see TaskEvaluated."""

    task: str
    metric: str
    value: float
    items: int
    step: int
    peer: str


class SamplesCounted(Event):
    """Event: how many samples the swarm had trained on when stage 0 took `step`, as far as this origin knows."""

    step: int
    epoch: int  # the first epoch that is not complete
    seen: int  # samples trained on; a sample counts once in each epoch
    repeated: int  # times that a sample was trained on again in the same epoch
    missed: int  # samples of the epochs before the newest that are not trained on yet


class StepTaken(Event):
    """Event: a stage took an optimizer step, or only set its number of steps to that of its replicas."""

    stage: int
    step: int  # steps taken, with this one
    tokens: int  # of this peer in the step; 0 if only other replicas took the step, and this peer only set its number
    loss: float | None  # mean per token of this peer's microbatches; None unless it holds the last stage
    seconds: float  # since the step before
    learning_rate: float = 0.0  # 0.0 if it only set its number
    gradient_norm: float | None = None  # None if it only set its number
    staleness: float = 0.0  # mean age of this peer's gradients, in steps
    predicted: float = 0.0  # fraction of `tokens` whose gradients were computed at predicted weights
    step_tokens: int | None = None  # of all replicas in the mean gradient; None if only this peer's gradient was used


class StepsSkipped(
    Event,
    level="warning",
    template="stage {stage} was {steps} steps behind and is at step {step} now; {tokens} of its tokens came too late",
):
    """Event: a stage, `steps` steps behind its replicas, set its step to theirs; its own `tokens` were dropped."""

    stage: int
    step: int
    steps: int
    tokens: int


class StepTorn(
    Event,
    level="error",
    template="step {step} of stage {stage} has changed only a part of the weights, because the device failed; "
    "this peer fetches the state of another replica, if there is one",
):
    """Event: a step was taken by half. Until it has fetched a state, this peer's history is unknown to the others."""

    stage: int
    step: int


class LayersCompiled(Event, level="info", template="layers of one kind were compiled in {seconds:.0f} s"):
    """Event: from now on, layers of this kind are computed by compiled code."""

    seconds: float


class CompileFailed(Event, level="warning", template="{problem}; training goes on with them as they are, slower"):
    """Event: some layers could not be compiled, or failed when they ran. problem: a sentence, with the reason."""

    problem: str


class GradientLate(Event, level="warning"):
    """Event, in synchronous runs: a gradient came after its step's share was closed; the next step uses it."""

    stage: int
    step: int  # steps that the stage has taken
    microbatch: str
    tokens: int


class GradientRefused(Event, level="warning", template="refused a gradient of stage {stage}: {reason}"):
    """Event: a microbatch or a sum of gradients was refused: a value was not finite, or the loss was too large.

    No weight changed. `microbatch`: "" for a sum.
    """

    stage: int
    microbatch: str
    reason: str


class RoundDone(Event):
    """Event: an averaging round of one stage ended at this peer, which is one of its `members`."""

    stage: int
    what: str  # what was averaged: "gradient", or "slice" for one fragment of the weights
    round: int  # its number, counted by stage and `what`
    parts: int  # into which the values were cut
    failed_parts: int  # parts for which no mean could be used
    contributors: float  # how many of the `members` contributed in time, a mean over the parts
    members: int
    weight: float  # tokens behind this peer's values; with 0 they do not enter the mean
    lost: float  # tokens of this replica that came too late for this round and for the one before
    seconds: float
    bytes_out: int


class GradientWireChosen(Event, level="info", template="stage {stage}: gradients are sent as {reason}"):
    """Event: this peer sends a stage's gradients in another format from now on; `reason` has the measured rates."""

    stage: int
    wire: str
    reason: str


class StepPlanChanged(
    Event, level="info", template="stage {stage}: {slices} slices, from step {change_at} on {later_slices}: {reason}"
):
    """Event: a stage's replicas have decided to agree in another number of fragments from step `change_at` on.

    slices: the number of fragments; 0 stands for all-reduce steps, any other number for inner steps.
    """

    stage: int
    change_at: int
    slices: int  # before that step
    later_slices: int  # from that step on
    reason: str


class PartFailed(Event):
    """Event: this peer could use no mean of one shard of a round: no reducer gave a plausible one in time."""

    stage: int
    what: str
    round: int
    part: int  # its index in the round
    reason: str


class CheckpointWritten(Event):
    """Event: a checkpoint of one stage was written to this peer's disk, which took `seconds`."""

    stage: int
    step: int
    bytes: int  # of the stage's state
    seconds: float


class CheckpointDamaged(Event, level="error", template="{text}"):
    """Event: a checkpoint on this peer's disk is damaged, and is not used; `text` has the file and the hashes."""

    text: str


class BaseTensorDamaged(
    Event,
    level="error",
    template="{path} does not have the tensor {name} as the run's list says; other peers do not get it from here",
):
    """Event: a tensor of the base model on this disk differs from the run's list; it is no longer sent to peers."""

    path: str
    name: str


class StateFetched(
    Event, level="info", template="stage {stage} fetched at step {step}: {bytes:,} bytes in {seconds:.1f} s"
):
    """Event: a stage's state was fetched from peers. fetched_again: how many chunks had to be requested again."""

    stage: int
    step: int
    bytes: int
    seconds: float
    fetched_again: int = 0


class StateNotCompared(
    Event,
    level="warning",
    template="stage {stage} at step {step} came from one source: nothing could be compared; trust it as you trust that "
    "peer",
):
    """Event: a stage's state was fetched, and no second source had one to compare it with."""

    stage: int
    step: int


class StageFellBehind(
    Event, level="warning", template="stage {stage} is at step {step}, the others at {others}: it fetches their state"
):
    """Event: a stage is at `step`, too far behind its replicas at `others`, and begins to fetch their state."""

    stage: int
    step: int
    others: int


class StageDiverged(
    Event,
    level="warning",
    template="stage {stage} differs from its replicas at step {step}: it fetches the state of {sources}",
):
    """Event: this peer's stage differs from the replicas whose history is right, `sources`: it fetches their state.

    Replicas differ when they applied different means in averaging rounds.
    """

    stage: int
    step: int
    sources: str


class PeerSeen(Event):
    """Event: a peer of the run came into view, or changed its span, state, incarnation or addresses."""

    peer: str
    first_stage: int
    last_stage: int
    state: str


class PeerGone(Event):
    """Event: a peer left the view: its claim ended or is not found any more, it cannot be reached, or it is banned."""

    peer: str
    reason: str


class SpanChosen(Event, template="takes stages {first_stage}-{last_stage}: {reason}"):
    """Event: this peer's span has settled, chosen by placement or pinned by its owner."""

    first_stage: int
    last_stage: int
    reason: str


class MoveChosen(Event, level="info", template="moves to stages {first_stage}-{last_stage}: {reason}"):
    """Event: rebalancing decided that this peer moves to other stages, and why."""

    first_stage: int
    last_stage: int
    reason: str


class HealthChanged(Event, level="info", template="health {state}: {why}; {do}"):
    """Event: the swarm's health, as this peer judges it, has changed. state: see agora.swarm.health. `do`: advice."""

    state: str
    why: str
    do: str = ""


class OffenceRecorded(Event, level="warning", template="offence of {peer}: {offence}, {text}; {follows}"):
    """Event: a peer did what no honest peer does.

    offence: the value of a Violation. text: what it did. follows: the consequence, for a person to read.
    """

    peer: str
    offence: str
    text: str
    follows: str = ""
    suspended_s: float = 0.0  # seconds for which the peer is suspended from now on


class AmendmentTaken(
    Event, level="info", template="amendment {number} counts, from step {from_step} on: {changes}; signed by {issuer}"
):
    """Event: an amendment of the manifest counts from now on, and is in force once its step is reached.

    changes: the new values in words. digest: its hash, in hex.
    """

    number: int
    from_step: int
    issuer: str
    changes: str
    digest: str


class AmendmentDropped(
    Event,
    level="warning",
    template="amendment {number}, from step {from_step} on, counts no more ({changes}): another of its "
    "number goes before it, or its signer was banned",
):
    """Event: an amendment that counted does not any more: another of its number goes first, or its delegate is banned.

    The fields are those of AmendmentTaken.
    """

    number: int
    from_step: int
    issuer: str
    changes: str
    digest: str


class AmendmentRefused(Event, level="warning", template="{count} amendments are refused: {reason}"):
    """Event: amendments that `peer` has sent (empty: this machine's owner) are false, or not allowed in this run.

    reason: that of the first.
    """

    peer: str
    count: int
    reason: str


class AmendmentInForce(
    Event, level="info", template="stage {stage} has taken {step} steps, and takes the next by amendment {number}"
):
    """Event: a stage has come to the step from which an amendment is in force; 0: from which none is any more."""

    stage: int
    step: int
    number: int


class PeerBanned(Event, level="warning", template="{peer} is banned {by}: it is neither called nor answered"):
    """Event: a peer, or the key of a bearer ticket, was banned for good."""

    peer: str
    by: str  # such as "by this machine's owner"


class DirectoryTrouble(Event):
    """Event: a read or a write of the DHT failed or took too long; the daemon keeps using its last view of the swarm.

    what: the operation that failed.
    """

    what: str
    reason: str


class Traffic(Event):
    """Event: bytes since the daemon's start: sent and received on all streams, and tensor bytes sent, by kind."""

    boundary_bytes: int
    sent_bytes: int
    received_bytes: int
    averaging_bytes: int = 0
    state_bytes: int = 0


class DeviceUsed(Event):
    """Event: how the device is used now.

    memory_used, memory_total: bytes. mfu: the model's operations per second, recomputed ones left out, by those of the
    device's data sheet. idle_in_jobs: share of its jobs' time in which the device is idle. Both None if unknown.
    precision: of products: bf16, fp16 or float32; "" if unknown.
    """

    name: str
    memory_used: int
    memory_total: int
    mfu: float | None = None
    idle_in_jobs: float | None = None
    precision: str = ""

    def in_words(self) -> str:
        mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        idle = (
            f", idle for {self.idle_in_jobs:.0%} of the time within its jobs" if self.idle_in_jobs is not None else ""
        )
        precision = f", {self.precision}" if self.precision else ""
        return (
            f"{self.name}{precision}, {self.memory_used / 2**30:.1f} of {self.memory_total / 2**30:.1f} GiB{mfu}{idle}"
        )


class DeviceWaited(Event):
    """Event: seconds since the span was loaded: of the device's jobs, and of what it waited for without one.

    The fields from busy to wire add up to `seconds`; queued: of jobs that waited for the device, summed over all jobs.
    """

    seconds: float
    busy: float
    microbatches: float
    mean: float
    peer: float
    wire: float
    queued: float


# Every event by name: the list is closed, the journal refuses an event defined elsewhere.
EVENTS: Final[Mapping[str, type[Event]]] = types.MappingProxyType({cls.__name__: cls for cls in Event.__subclasses__()})
