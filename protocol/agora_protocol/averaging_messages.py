"""The messages by which replicas agree: gossip of steps, the parts of averaging rounds, and their means.

SPEC.md, section 10.
"""

from __future__ import annotations

from typing import Any, Final

from agora_protocol.codec_names import WIRE_NAMES
from agora_protocol.fields import (
    MAX_UINT,
    bool_field,
    choice_field,
    float_field,
    int_field,
    list_field,
    peer_id_field,
    tuple_field,
)
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_GOSSIPED_REPLICAS, MAX_SLICES, MAX_STAGES
from agora_protocol.message_base import FrameType, Message

_DEADLINE_DOC: Final = "milliseconds left for the answer, counted from arrival"
_WHAT: Final = ("gradient", "slice")

# How far a replica is, in the order that `replicas` of GossipSteps describes.
GossipEntry = tuple[PeerId, int, int, int, int, int, int, int, int, int]


def _replica_steps(doc: str) -> Any:
    counts = (int_field(0, MAX_UINT) for _ in range(5))
    lineage, start_step, carried = int_field(0, 2**32 - 1), int_field(0, MAX_UINT), int_field(0, MAX_UINT)
    entry = tuple_field(peer_id_field(), *counts, lineage, start_step, carried, int_field(0, MAX_DEADLINE_MS))
    return list_field(entry, MAX_GOSSIPED_REPLICAS, doc=doc)


class GossipSteps(Message, kind=12, frames=(FrameType.REQUEST,)):
    """Sends a replica what the sender knows of the progress of a stage's replicas. Answered by GossipedSteps.

    Both sides believe a sender about itself, also when its numbers are lower than before: it may have restarted. About
    another replica they keep the report with more progress, or any report when they know nothing live of it.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage whose replicas are listed")
    replicas: tuple[GossipEntry, ...] = _replica_steps(
        "[replica, optimizer steps taken, number of the step it counts for, tokens counted for that step, tokens "
        "counted since it started, step up to which it has agreed with the others, lineage of that step, steps of the "
        "state with which it started, 1 + thousandths of a byte that its uplink carries for each value and step (0: "
        "it is never full), milliseconds since it reported]; the sender comes first"
    )
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class GossipedSteps(Message, kind=13, frames=(FrameType.ANSWER,)):
    """Answers GossipSteps with what the answering replica knows."""

    replicas: tuple[GossipEntry, ...] = _replica_steps("as in GossipSteps")


class Contribute(Message, kind=14, frames=(FrameType.REQUEST,), tensors=(1, 2)):
    """Sends the sender's values of one part of a round to the part's owner. Answered by Averaged.

    Tensors: the part as `wire` says: float32 [n]; bf16 [n]; of int8 levels, int8 [n], and exponents, int8 [blocks]; of
    normal2 to normal4 scales, uint8 [1 + blocks], and packed levels, uint8. A block has QUANTISER_BLOCK elements.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage whose replicas average")
    what: str = choice_field(
        *_WHAT, doc="what is averaged: the gradient of an exact step, or a slice's difference to the anchor"
    )
    round: int = int_field(0, MAX_UINT, doc="number of the round")
    part: int = int_field(0, MAX_UINT, doc="number of the part within the round")
    slices: int = int_field(
        0, MAX_SLICES, doc="number of slices of the stage, of which the round averages one; 0: a whole gradient"
    )
    weight: float = float_field(
        0, 1e18, doc="supervised tokens behind these values; with 0 they do not count in the mean"
    )
    first_owner_failed: bool = bool_field(
        doc="whether the part's first owner has failed the sender: the receiver is the second owner"
    )
    wire: str = choice_field(*WIRE_NAMES, doc="the format of the tensors, which the sender chooses")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, doc=_DEADLINE_DOC)


class Averaged(Message, kind=15, frames=(FrameType.ANSWER,), tensors=(1, 2)):
    """Answers Contribute. Tensors: the mean, as `wire` says; the same bytes for every member."""

    in_mean: int = int_field(0, MAX_UINT, doc="contributions that count in the mean; 0: the mean is 0")
    contributors: int = int_field(0, MAX_UINT, doc="members that contributed in time, those of weight 0 included")
    weight: float = float_field(0, 1e21, doc="the sum of the weights in the mean")
    counted: bool = bool_field(doc="whether the sender's values are in the mean: false when they came too late")
    wire: str = choice_field(*WIRE_NAMES, doc="the format of the tensors, which the owner chooses")
    wanted_slices: int = int_field(
        0, MAX_SLICES, default=0, doc="in how many slices the owner wants the stage to agree later, 0: in exact steps"
    )


class Recall(Message, kind=16, frames=(FrameType.REQUEST,)):
    """Asks a member of a round for the mean of a part, which it has from the part's owner.

    Sent by the second owner after the first has failed, and by replicas that miss a mean or replay a step. Answered by
    Recalled.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="as in Contribute")
    what: str = choice_field(*_WHAT, doc="as in Contribute")
    round: int = int_field(0, MAX_UINT, doc="as in Contribute")
    part: int = int_field(0, MAX_UINT, doc="as in Contribute")
    slices: int = int_field(0, MAX_SLICES, doc="as in Contribute")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Recalled(Message, kind=17, frames=(FrameType.ANSWER,), tensors=(0, 2)):
    """Answers Recall. Tensors: those with which the part's owner has answered Contribute; none when the answering peer
    does not have them."""

    in_mean: int = int_field(0, MAX_UINT, doc="as in Averaged; 0 without a mean")
    contributors: int = int_field(0, MAX_UINT, doc="as in Averaged")
    weight: float = float_field(0, 1e21, doc="as in Averaged")
    wire: str = choice_field(*WIRE_NAMES, doc="as in Averaged")
    wanted_slices: int = int_field(0, MAX_SLICES, default=0, doc="as in Averaged")
