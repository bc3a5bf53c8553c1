"""Every message of the data plane: its fields, their bounds, the frame it travels in, and the tensors it brings.

Knows what peers may say; not how frames carry it, nor what anybody does about it. SPEC.md sections 9 and 10.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar, Final

from agora_protocol import errors
from agora_protocol.errors import PROTOCOL_CODES, AgoraError, ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    Structure,
    address_list,
    choice,
    each,
    flag,
    many,
    number,
    peer_id,
    raw,
    shown,
    text,
    whole,
)
from agora_protocol.ids import MICROBATCH_BYTES, MicrobatchId, PeerId
from agora_protocol.limits import (
    MAX_ANSWER_HEADER_BYTES,
    MAX_DEADLINE_MS,
    MAX_GOSSIPED_REPLICAS,
    MAX_HINTS,
    MAX_MANIFEST_BYTES,
    MAX_NAME_BYTES,
    MAX_STAGES,
    MAX_STATUS_BYTES,
    MAX_TEXT_BYTES,
)
from agora_protocol.packing import pack, unpack


class FrameType(IntEnum):
    """What a frame is for; the second byte of its prefix."""

    HELLO = 1
    REQUEST = 2
    PROGRESS = 3
    ANSWER = 4
    REFUSAL = 5
    CANCEL = 6
    GOODBYE = 7


class Message(Structure):
    """Base of all messages. `KIND` is its number on the wire, `FRAMES` the frame types that may carry it."""

    KIND: ClassVar[int] = 0
    FRAMES: ClassVar[tuple[FrameType, ...]] = ()
    TENSORS: ClassVar[tuple[int, int]] = (0, 0)  # fewest and most tensors that come with it

    def __init_subclass__(
        cls, *, kind: int, frames: tuple[FrameType, ...], tensors: tuple[int, int] = (0, 0), **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if kind in KINDS:
            raise TypeError(f"kind {kind} is {KINDS[kind].__name__} already")
        cls.KIND, cls.FRAMES, cls.TENSORS = kind, frames, tensors
        KINDS[kind] = cls


KINDS: Final[dict[int, type[Message]]] = {}
_DEADLINE_DOC: Final = "milliseconds left for the answer, counted from arrival"


class Hello(Message, kind=1, frames=(FrameType.HELLO,)):
    """Who I am and what I am here for; the first frame in both directions, and the only one until both were seen."""

    version: int = whole(1, 65_535, doc="protocol version of the sender; must be 1")
    run: bytes = raw(0, 32, doc="the run id's 32 bytes; empty for an observer, who may ask but not train")
    software: str = text(MAX_NAME_BYTES, doc="name and version of the program, for people")
    addresses: tuple[str, ...] = address_list(doc="where the sender can be dialled; empty when nowhere")


class Ping(Message, kind=2, frames=(FrameType.REQUEST,)):
    """Are you there? Answered by Pong at once."""

    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Process(Message, kind=3, frames=(FrameType.REQUEST,), tensors=(2, 2)):
    """Please run your span on this microbatch and send me back the gradient of its input.

    Sent by the peer that computed the stage before. Answered by Processed, or by Refusal before any work was done.
    Tensors: the boundary entering `stage` as the run's codec left it, and the tokens [b, s + 1], in the narrowest of
    uint8, int16 and int32 that holds them all.
    """

    microbatch: MicrobatchId = raw(MICROBATCH_BYTES, doc="8 random bytes of the origin's session, 8 of its counter")
    origin: PeerId = peer_id(doc="the peer that drew the microbatch")
    stage: int = whole(0, MAX_STAGES - 1, doc="first stage to run; must lie inside the receiver's span")
    purpose: str = choice("train", "evaluate", doc="evaluate: no backward, no gradient, nothing is kept")
    deadline_ms: int = whole(
        1, MAX_DEADLINE_MS, doc="milliseconds left for everything downstream, already reduced by the caller"
    )
    hint: tuple[tuple[int, PeerId], ...] = many(
        each(whole(0, MAX_STAGES - 1), peer_id()),
        MAX_HINTS,
        default=(),
        doc="peers that took this microbatch for a stage in an earlier attempt",
    )
    step: int = whole(
        0,
        MAX_UINT,
        default=0,
        doc="synchronous runs: the optimizer step it belongs to; a stage waits until it has taken that many",
    )


class Processed(Message, kind=4, frames=(FrameType.ANSWER,), tensors=(0, 1)):
    """The answer to Process. Tensor: the gradient of the boundary, in its shape; none when evaluating."""

    loss_sum: float = number(-1e30, 1e30, doc="sum of the token losses, in nats")
    tokens: int = whole(0, MAX_UINT, doc="supervised tokens the sum is over")
    busy_ms: float = number(0, MAX_DEADLINE_MS, doc="device time the answering peer itself spent, in milliseconds")
    path_ms: float = number(
        0,
        MAX_DEADLINE_MS,
        default=0.0,
        doc="how long the way from there to the last stage and back would have taken if nothing had waited: device "
        "times, round trips, transfers, in milliseconds; 0 is unknown",
    )


class Advance(Message, kind=5, frames=(FrameType.PROGRESS,)):
    """News of a call that is still open: how long the callee's queue is, and a hint for a retry."""

    stage: int = whole(0, MAX_STAGES - 1, doc="the stage at which it happened")
    peer: PeerId = peer_id(doc="the peer to which it happened")
    what: str = choice("accepted", "finished", doc="took a seat; has the result in its cache")
    queue: int = whole(0, MAX_UINT, doc="microbatches that peer has in hand")


class Refusal(Message, kind=6, frames=(FrameType.REFUSAL, FrameType.GOODBYE)):
    """No, and why. As a REFUSAL it ends one call; in a GOODBYE it says why the connection ends."""

    code: str = text(32, pattern="[a-z][a-z0-9-]*", doc="a word of the error table")
    text: str = text(MAX_TEXT_BYTES, default="", doc="one sentence for people")
    retry_after_ms: int = whole(0, MAX_DEADLINE_MS, default=0, doc="for busy: asking earlier is pointless")
    stage: int = whole(0, MAX_STAGES - 1, default=0, doc="for unavailable: the stage nobody could serve")


class Pong(Message, kind=7, frames=(FrameType.ANSWER,)):
    """The answer to Ping."""


class GetManifest(Message, kind=8, frames=(FrameType.REQUEST,)):
    """Please send the signed manifest of your run."""

    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class ManifestAnswer(Message, kind=9, frames=(FrameType.ANSWER,)):
    """The answer to GetManifest; the receiver checks hash and signature itself."""

    manifest: bytes = raw(most=MAX_MANIFEST_BYTES, doc="the signed manifest, as SPEC section 3 writes it")


class GetStatus(Message, kind=10, frames=(FrameType.REQUEST,)):
    """What do you see of the run?"""

    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class StatusAnswer(Message, kind=11, frames=(FrameType.ANSWER,)):
    """The answer to GetStatus."""

    status: bytes = raw(most=MAX_STATUS_BYTES, doc="UTF-8 JSON, one object, as `swarm status --json` prints it")


def _replica_steps(doc: str) -> Any:
    return many(
        each(peer_id(), whole(0, MAX_UINT), whole(0, MAX_UINT), whole(0, MAX_DEADLINE_MS)),
        MAX_GOSSIPED_REPLICAS,
        doc=doc,
    )


class GossipSteps(Message, kind=12, frames=(FrameType.REQUEST,)):
    """Tells a replica how far I know the stage's replicas to be; GossipedSteps answers how far it knows them to be.

    Both sides keep, of each replica, the report that is further.
    """

    stage: int = whole(0, MAX_STAGES - 1, doc="the stage spoken of")
    replicas: tuple[tuple[PeerId, int, int, int], ...] = _replica_steps(
        "replica, optimizer steps it has taken, tokens counted since, milliseconds since it spoke; the sender first"
    )
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class GossipedSteps(Message, kind=13, frames=(FrameType.ANSWER,)):
    """The answer to GossipSteps."""

    replicas: tuple[tuple[PeerId, int, int, int], ...] = _replica_steps("as in GossipSteps")


_WHAT: Final = ("weights", "gradient")


class Contribute(Message, kind=14, frames=(FrameType.REQUEST,), tensors=(1, 2)):
    """My values of one part of a round that you own; please answer with the average, or what to add to them to have it.

    Tensors: the part in the run's averaging codec, float32 [n], bf16 [n], or int8 [n] and its exponents, int8
    [ceil(n / QUANTISER_BLOCK)].
    """

    stage: int = whole(0, MAX_STAGES - 1, doc="the stage whose replicas average")
    what: str = choice(*_WHAT, doc="a slice of the weights, or the mean gradient of an exact step")
    round: int = whole(0, MAX_UINT, doc="number of the round")
    part: int = whole(0, MAX_UINT, doc="number of the part within the round's slice")
    weight: float = number(0, 1e18, doc="supervised tokens behind these values; 0 takes the average and adds nothing")
    second: bool = flag(doc="the part's first owner failed the sender")
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, doc=_DEADLINE_DOC)


class Averaged(Message, kind=15, frames=(FrameType.ANSWER,), tensors=(1, 2)):
    """The answer to Contribute. Tensors, in the codec and shape the values came in: of weights the average minus the
    sender's values, of a gradient the average itself.
    """

    members: int = whole(1, MAX_UINT, doc="contributions in the average")
    present: int = whole(1, MAX_UINT, doc="contributions in time: those in the average, and those of weight 0")
    weight: float = number(0, 1e21, doc="the sum of the weights in the average")
    distance: float = number(0, 1e30, doc="median over the members of the root mean square of (values - average)")


class Recall(Message, kind=16, frames=(FrameType.REQUEST,)):
    """You may have got this part's average from its first owner, which has failed me: please tell me what it was."""

    stage: int = whole(0, MAX_STAGES - 1, doc="as in Contribute")
    what: str = choice(*_WHAT, doc="as in Contribute")
    round: int = whole(0, MAX_UINT, doc="as in Contribute")
    part: int = whole(0, MAX_UINT, doc="as in Contribute")
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Recalled(Message, kind=17, frames=(FrameType.ANSWER,), tensors=(0, 1)):
    """The answer to Recall. Tensor: the average itself, float32 [n]; none while the answerer has no average."""

    members: int = whole(0, MAX_UINT, doc="as in Averaged; 0 without an average")
    present: int = whole(0, MAX_UINT, doc="as in Averaged")
    weight: float = number(0, 1e21, doc="as in Averaged")
    distance: float = number(0, 1e30, doc="as in Averaged")


class GetState(Message, kind=18, frames=(FrameType.REQUEST,)):
    """Which snapshot of a stage's weights and moments can I have from you?"""

    stage: int = whole(0, MAX_STAGES - 1, doc="the stage wanted")
    at_least: int = whole(0, MAX_UINT, default=0, doc="a snapshot of an earlier step is of no use")
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class StateIndex(Message, kind=19, frames=(FrameType.ANSWER,), tensors=(0, 1)):
    """The answer to GetState. Tensor: SHA-256 of each chunk, uint8 [chunks, 32]; none where `size` is 0."""

    snapshot: bytes = raw(0, 32, doc="SHA-256 over the chunks' hashes; empty when there is no snapshot to give")
    step: int = whole(0, MAX_UINT, doc="optimizer steps that the snapshot has in it")
    updates: int = whole(0, MAX_UINT, doc="of these, the steps in which this replica's own moments took part")
    size: int = whole(0, MAX_UINT, doc="bytes of the snapshot")


class GetChunk(Message, kind=20, frames=(FrameType.REQUEST,)):
    """Please send one chunk of a snapshot that you have told me of."""

    snapshot: bytes = raw(32, doc="as in StateIndex")
    chunk: int = whole(0, MAX_UINT, doc="its number; section 14 says which elements it has")
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class Chunk(Message, kind=21, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """The answer to GetChunk. Tensor: its bytes, uint8 [n]."""


class GetSlice(Message, kind=22, frames=(FrameType.REQUEST,)):
    """Please send a chunk of the slice that this round averages, as your weights are now."""

    stage: int = whole(0, MAX_STAGES - 1, doc="the stage wanted")
    round: int = whole(0, MAX_UINT, doc="the round whose slice is wanted")
    chunk: int = whole(
        0,
        MAX_UINT,
        default=0,
        doc="its number; it has STATE_CHUNK_BYTES / 4 of the slice's elements, the last one fewer",
    )
    deadline_ms: int = whole(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class Slice(Message, kind=23, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """The answer to GetSlice. Tensor: the chunk's elements in the slice's order, float32 [n]."""

    step: int = whole(0, MAX_UINT, doc="optimizer steps that the stage had taken")


Request = Ping | GetManifest | GetStatus | Process | GossipSteps | Contribute | Recall | GetState | GetChunk | GetSlice
ANSWER_OF: Final[dict[type[Message], type[Message]]] = {
    Ping: Pong,
    GetManifest: ManifestAnswer,
    GetStatus: StatusAnswer,
    Process: Processed,
    GossipSteps: GossipedSteps,
    Contribute: Averaged,
    Recall: Recalled,
    GetState: StateIndex,
    GetChunk: Chunk,
    GetSlice: Slice,
}


def encode(message: Message) -> bytes:
    """The msgpack map of a message's fields."""
    return pack(message.to_fields())


def decode(kind: int, data: bytes) -> Message:
    """The message of that kind in `data`. Raises ProtocolError("bad-message" or "too-large")."""
    return from_fields(kind, unpack(data, MAX_ANSWER_HEADER_BYTES))


def from_fields(kind: object, fields: object) -> Message:
    """The message of that kind with those fields, as read from msgpack. Raises ProtocolError("bad-message")."""
    known = KINDS.get(kind) if type(kind) is int else None
    if known is None:
        raise ProtocolError("bad-message", f"{shown(kind)} is not the kind of any message.")
    return known.from_fields(fields)


_REFUSALS: Final = {
    kind.code: kind
    for kind in (errors.NotMyStage, errors.NotAdmitted, errors.WrongRun, errors.Unsupported, errors.Refused)
}


def clip_text(sentence: str, most: int = MAX_TEXT_BYTES) -> str:
    """At most `most` bytes of UTF-8, cut at a character."""
    return sentence.encode(errors="replace")[:most].decode(errors="ignore")


def refusal_to_wire(error: AgoraError) -> Refusal:
    """What to tell the peer. Of this machine's own failures only the kind is told, never its paths or details."""
    sentence = clip_text(str(error))
    if isinstance(error, errors.Busy):
        return Refusal("busy", sentence, min(max(error.retry_after_ms, 0), MAX_DEADLINE_MS))
    if isinstance(error, errors.Unavailable):
        return Refusal("unavailable", clip_text("; ".join(error.reasons)), stage=error.stage)
    if isinstance(error, ProtocolError | errors.Refused | errors.PeerFailed):
        return Refusal(error.code, sentence)
    return Refusal("failed", f"the peer could not finish ({error.code})")


def refusal_from_wire(message: Refusal) -> AgoraError:
    """The error that a peer's Refusal stands for; a word from a newer version becomes PeerFailed."""
    if message.code == errors.Busy.code:
        return errors.Busy(message.text, message.retry_after_ms)
    if message.code == errors.Unavailable.code:
        return errors.Unavailable(message.stage, [message.text] if message.text else [])
    if message.code in _REFUSALS:
        return _REFUSALS[message.code](message.text)
    if message.code in PROTOCOL_CODES:
        return ProtocolError(message.code, message.text)
    unknown = "" if message.code == errors.PeerFailed.code else f"{message.code}: "
    return errors.PeerFailed(unknown + message.text)
