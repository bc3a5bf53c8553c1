"""Every message that peers send each other: its fields, their bounds, its frame types, and its tensors.

SPEC.md sections 9 and 10.
"""

from __future__ import annotations

from typing import Final

from agora_protocol.admission_messages import Hello as Hello
from agora_protocol.admission_messages import ShareRevocations as ShareRevocations
from agora_protocol.admission_messages import TookRevocations as TookRevocations
from agora_protocol.averaging_messages import Averaged as Averaged
from agora_protocol.averaging_messages import Contribute as Contribute
from agora_protocol.averaging_messages import GossipedSteps as GossipedSteps
from agora_protocol.averaging_messages import GossipEntry as GossipEntry
from agora_protocol.averaging_messages import GossipSteps as GossipSteps
from agora_protocol.averaging_messages import Recall as Recall
from agora_protocol.averaging_messages import Recalled as Recalled
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    bytes_field,
    choice_field,
    describe,
    float_field,
    int_field,
    list_field,
    peer_id_field,
    text_field,
    tuple_field,
)
from agora_protocol.ids import MICROBATCH_BYTES, MicrobatchId, PeerId
from agora_protocol.limits import (
    MAX_BASE_TENSORS,
    MAX_DEADLINE_MS,
    MAX_EPOCH_STATE,
    MAX_HINTS,
    MAX_MANIFEST_BYTES,
    MAX_METRICS,
    MAX_REFERENCES,
    MAX_SLICES,
    MAX_STAGES,
    MAX_STATUS_BYTES,
    MAX_TENSOR_LIST_BYTES,
    MAX_TEXT_BYTES,
)
from agora_protocol.message_base import KINDS as KINDS
from agora_protocol.message_base import FrameType as FrameType
from agora_protocol.message_base import Message as Message
from agora_protocol.reach_messages import DialBack as DialBack
from agora_protocol.reach_messages import DialedBack as DialedBack
from agora_protocol.reach_messages import GetAddresses as GetAddresses
from agora_protocol.reach_messages import Introduce as Introduce
from agora_protocol.reach_messages import Meet as Meet
from agora_protocol.reach_messages import Meeting as Meeting
from agora_protocol.reach_messages import PeerAddresses as PeerAddresses

_DEADLINE_DOC: Final = "milliseconds left for the answer, counted from arrival"


class Ping(Message, kind=2, frames=(FrameType.REQUEST,)):
    """Asks whether the receiver is still there. Answered by Pong, without waiting for other work."""

    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Process(Message, kind=3, frames=(FrameType.REQUEST,), tensors=(2, 2)):
    """Asks the receiver to run its stages on a microbatch and to answer with the gradient of the boundary.

    Sent by the peer that computed the stage before. Answered by Processed, or by Refusal before any work was done.
    Tensors: the boundary that enters `stage`, encoded by the run's codec, and the tokens [b, s + 1], or with marks
    [2, b, s + 1], in the narrowest of uint8, int16 and int32 that holds them all.
    """

    microbatch: MicrobatchId = bytes_field(
        MICROBATCH_BYTES, doc="8 random bytes of the origin's session, then its counter"
    )
    origin: PeerId = peer_id_field(doc="the peer that drew the microbatch")
    stage: int = int_field(0, MAX_STAGES - 1, doc="first stage to run; must lie inside the receiver's span")
    purpose: str = choice_field(
        "train",
        "evaluate",
        "reference",
        doc="evaluate: no backward, no gradient, nothing is kept; reference: as evaluate, by the model without lora",
    )
    deadline_ms: int = int_field(
        1,
        MAX_DEADLINE_MS,
        doc="milliseconds left for this call, counted from arrival; the caller has kept what it needs itself",
    )
    hint: tuple[tuple[int, PeerId], ...] = list_field(
        tuple_field(int_field(0, MAX_STAGES - 1), peer_id_field()),
        MAX_HINTS,
        default=(),
        doc="[stage, peer]: peers that have accepted this microbatch in an earlier attempt",
    )
    step: int = int_field(
        0,
        MAX_UINT,
        default=0,
        doc="in synchronous runs, the optimizer step that it belongs to; a stage waits until it has taken that many",
    )
    references: tuple[float, ...] = list_field(
        float_field(-1e30, 0.0),
        MAX_REFERENCES,
        default=(),
        doc="dpo: for each row, the log-probability from the answer to a reference request; none in other runs and "
        "requests",
    )


class Processed(Message, kind=4, frames=(FrameType.ANSWER,), tensors=(0, 1)):
    """Answers Process. Tensor: the gradient of the loss sum by the boundary, in its shape; none when evaluating."""

    loss_sum: float = float_field(-1e30, 1e30, doc="sum of the token losses, in nats")
    tokens: int = int_field(0, MAX_UINT, doc="supervised tokens in the sum")
    busy_ms: float = float_field(
        0, MAX_DEADLINE_MS, doc="device time that the answering peer itself has spent, in milliseconds"
    )
    path_ms: float = float_field(
        0,
        MAX_DEADLINE_MS,
        default=0.0,
        doc="milliseconds from the answering peer to the last stage and back without any waiting: the sum of device "
        "times, round trips and transfers; 0 when unknown",
    )
    log_probabilities: tuple[float, ...] = list_field(
        float_field(-1e30, 0.0),
        MAX_REFERENCES,
        default=(),
        doc="to a reference request: for each row, the sum of the log-probabilities of its supervised tokens",
    )
    metrics: tuple[float, ...] = list_field(
        float_field(-1e30, 1e30),
        MAX_METRICS,
        default=(),
        doc="sums over the microbatch, by the run's objective; sft: tokens predicted right; dpo: rewards of chosen, of "
        "rejected answers, pairs whose chosen answer has the higher reward, pairs",
    )


class CallProgress(Message, kind=5, frames=(FrameType.PROGRESS,)):
    """Reports progress of a call that is still open. The caller uses it as a hint when it must try again."""

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage that advanced")
    peer: PeerId = peer_id_field(doc="the peer that advanced")
    event: str = choice_field(
        "accepted",
        "finished",
        doc="accepted: the peer has begun or queued the work; finished: the result is in its cache",
    )
    queue: int = int_field(0, MAX_UINT, doc="microbatches that wait for this peer's device or are on it")


class Refusal(Message, kind=6, frames=(FrameType.REFUSAL, FrameType.GOODBYE)):
    """Says why a call or a connection ends: one call in a REFUSAL frame, the connection in a GOODBYE frame."""

    code: str = text_field(32, pattern="[a-z][a-z0-9-]*", doc="a code of the error table, section 15")
    text: str = text_field(MAX_TEXT_BYTES, default="", doc="one sentence for people")
    retry_after_ms: int = int_field(
        0, MAX_DEADLINE_MS, default=0, doc="for busy: milliseconds before which asking again is pointless"
    )
    stage: int = int_field(0, MAX_STAGES - 1, default=0, doc="for unavailable: the stage that no peer could serve")


class Pong(Message, kind=7, frames=(FrameType.ANSWER,)):
    """Answers Ping, with the swarm's time as the sender knows it."""

    unix: float = float_field(0, 1e12, default=0.0, doc="unix seconds in swarm time when this was sent; 0: not known")


class GetManifest(Message, kind=8, frames=(FrameType.REQUEST,)):
    """Asks for the signed manifest of the receiver's run."""

    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class ManifestAnswer(Message, kind=9, frames=(FrameType.ANSWER,)):
    """Answers GetManifest. The receiver must check hash and signature."""

    manifest: bytes = bytes_field(most=MAX_MANIFEST_BYTES, doc="the signed manifest, as in section 3")


class GetStatus(Message, kind=10, frames=(FrameType.REQUEST,)):
    """Asks for the receiver's view of the run."""

    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class StatusAnswer(Message, kind=11, frames=(FrameType.ANSWER,)):
    """Answers GetStatus."""

    status: bytes = bytes_field(most=MAX_STATUS_BYTES, doc="UTF-8 JSON, one object, as `swarm status --json` prints it")


class GossipEpochs(Message, kind=26, frames=(FrameType.REQUEST,)):
    """Sends an origin what the sender knows of the epochs in progress. Answered by GossipedEpochs."""

    state: tuple[int, ...] = list_field(int_field(0, MAX_UINT), MAX_EPOCH_STATE, doc="the state, as said below")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class GossipedEpochs(Message, kind=27, frames=(FrameType.ANSWER,)):
    """Answers GossipEpochs with what the answering origin knows."""

    state: tuple[int, ...] = list_field(int_field(0, MAX_UINT), MAX_EPOCH_STATE, doc="as in GossipEpochs")


class GetState(Message, kind=18, frames=(FrameType.REQUEST,)):
    """Asks which snapshot of a stage's weights and moments the receiver can give. Answered by StateIndex."""

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage wanted")
    at_least: int = int_field(0, MAX_UINT, default=0, doc="the lowest step that is of use to the sender")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class StateIndex(Message, kind=19, frames=(FrameType.ANSWER,), tensors=(0, 1)):
    """Answers GetState. Tensor: the SHA-256 of each chunk, uint8 [chunks, 32]; none where `size` is 0."""

    snapshot: bytes = bytes_field(
        0, 32, doc="the snapshot's name: SHA-256 over its chunks' hashes; empty when there is no snapshot to give"
    )
    step: int = int_field(0, MAX_UINT, doc="optimizer steps that the stage had taken")
    updates: int = int_field(0, MAX_UINT, doc="of these, the steps that went into the snapshot's moments")
    agreed: int = int_field(0, MAX_UINT, doc="the last step whose mean over all replicas is in the snapshot")
    lineage: int = int_field(0, 2**32 - 1, doc="the lineage of step `agreed` (section 13), 0 when it is unknown")
    slices: int = int_field(
        0, MAX_SLICES, doc="number of slices in which the stage agrees before step `change_at`; 0: exact"
    )
    change_at: int = int_field(
        0, MAX_UINT, doc="number of the step from which `later_slices` hold; 10^9 when none does"
    )
    later_slices: int = int_field(0, MAX_SLICES, doc="slices from that step on; 0: exact steps")
    size: int = int_field(0, MAX_UINT, doc="bytes of the snapshot; 0 when there is none to give")


class GetChunk(Message, kind=20, frames=(FrameType.REQUEST,)):
    """Asks for one chunk of a snapshot that the receiver has offered in StateIndex. Answered by Chunk."""

    snapshot: bytes = bytes_field(32, doc="as in StateIndex")
    chunk: int = int_field(0, MAX_UINT, doc="the chunk's number; section 14 says which elements it has")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class Chunk(Message, kind=21, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """Answers GetChunk. Tensor: the chunk's bytes, uint8 [n]."""


class GetBase(Message, kind=22, frames=(FrameType.REQUEST,)):
    """Asks which tensors of the run's base model the receiver can give. Answered by BaseIndex."""

    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=30_000, doc=_DEADLINE_DOC)


class BaseIndex(Message, kind=23, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """Answers GetBase. Tensor: a bit for each tensor of the list, uint8 [ceil(tensors / 8)]; section 14 says which."""

    size: int = int_field(1, MAX_TENSOR_LIST_BYTES, doc="bytes of the tensor list")


class GetPiece(Message, kind=24, frames=(FrameType.REQUEST,)):
    """Asks for a piece of a tensor of the base model, or of the tensor list. Answered by TensorPiece."""

    tensor: int = int_field(-1, MAX_BASE_TENSORS - 1, doc="the tensor's number in the list; -1: the list itself")
    piece: int = int_field(0, MAX_UINT, doc="the piece's number: it has the bytes from piece * STATE_CHUNK_BYTES on")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class TensorPiece(Message, kind=25, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """Answers GetPiece. Tensor: the piece's bytes, uint8 [n]."""


_StateRequest = GetState | GetChunk | GetBase | GetPiece
_EverybodysRequest = Ping | GetManifest | GetStatus | ShareRevocations
Request = _EverybodysRequest | Process | GossipSteps | Contribute | Recall | _StateRequest
ANSWER_OF: Final[dict[type[Message], type[Message]]] = {
    Ping: Pong,
    GetManifest: ManifestAnswer,
    GetStatus: StatusAnswer,
    Process: Processed,
    GossipSteps: GossipedSteps,
    GossipEpochs: GossipedEpochs,
    Contribute: Averaged,
    Recall: Recalled,
    GetState: StateIndex,
    GetChunk: Chunk,
    GetBase: BaseIndex,
    GetPiece: TensorPiece,
    ShareRevocations: TookRevocations,
    DialBack: DialedBack,
    Introduce: Meeting,
    Meet: Meeting,
    GetAddresses: PeerAddresses,
}


def message_from_fields(kind: object, fields: object) -> Message:
    """Returns the message of number `kind` with these fields, as read from msgpack.

    Raises ProtocolError("bad-message") for an unknown kind or wrong fields.
    """
    known = KINDS.get(kind) if type(kind) is int else None
    if known is None:
        raise ProtocolError("bad-message", f"{describe(kind)} is not the kind of any message.")
    return known.from_fields(fields)
