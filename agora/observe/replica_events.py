"""Events of the replicas of a stage, and of its state: rounds, how replicas agree, checkpoints, transfers.

A part of the list in events.py, which has all of them, and says what an event is.
"""

from __future__ import annotations

from agora.observe.event_base import Event


class RoundDone(Event):
    """Event: an averaging round of one stage ended at this peer, which is one of its `members`."""

    stage: int
    what: str  # what was averaged: "gradient", or "slice" for one slice of the weights
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
    """Event: a stage's replicas have decided to agree in another number of slices from step `change_at` on.

    0 slices stand for exact steps, along mean gradients; any other number for local steps. See step_kinds.
    """

    stage: int
    change_at: int
    slices: int  # before that step
    later_slices: int  # from that step on
    reason: str


class PartFailed(Event):
    """Event: this peer could use no mean of one part of an averaging round: no owner gave a plausible one in time."""

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
    """Event: this peer's stage differs from the largest group of its replicas, `sources`, and fetches their state.

    Replicas differ when they applied different means in averaging rounds.
    """

    stage: int
    step: int
    sources: str
