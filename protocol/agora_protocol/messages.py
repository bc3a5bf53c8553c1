"""Every message that peers send each other: its fields, their bounds, its frame types, and its tensors.

SPEC.md sections 4, 9 and 10. In order: how two peers meet (Hello, Ping, Refusal), a microbatch, averaging, state,
epochs, revocations, amendments, and how peers find out where they can be dialled.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any, ClassVar, Final

from agora_protocol.addresses import PARTS
from agora_protocol.codec_names import NUMBER_FORMAT_NAMES
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    Structure,
    addresses_field,
    bool_field,
    bytes_field,
    choice_field,
    describe,
    dump_hash,
    float_field,
    hash_field,
    int_field,
    list_field,
    load_hash,
    peer_id_field,
    text_field,
    tuple_field,
)
from agora_protocol.ids import MICROBATCH_BYTES, PEER_ID_CHARACTERS, MicrobatchId, PeerId
from agora_protocol.limits import (
    MAX_AMENDMENT_BYTES,
    MAX_BASE_TENSORS,
    MAX_DEADLINE_MS,
    MAX_EPOCH_STATE,
    MAX_GOSSIPED_REPLICAS,
    MAX_HINTS,
    MAX_KEPT_AMENDMENTS,
    MAX_MANIFEST_BYTES,
    MAX_METRICS,
    MAX_NAME_BYTES,
    MAX_PORTS,
    MAX_PROOF_BYTES,
    MAX_REFERENCES,
    MAX_REVOCATION_BYTES,
    MAX_SEEN_BYTES,
    MAX_SHARED_AMENDMENTS,
    MAX_SHARED_REVOCATIONS,
    MAX_SKETCHED_CHUNKS,
    MAX_SLICES,
    MAX_STAGES,
    MAX_STATUS_BYTES,
    MAX_TENSOR_LIST_BYTES,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    SALT_BYTES,
)

_DEADLINE_DOC: Final = "milliseconds left for the answer, counted from arrival"


class FrameType(IntEnum):
    """The type of a frame: the second byte of its prefix."""

    HELLO = 1
    REQUEST = 2
    PROGRESS = 3
    ANSWER = 4
    REFUSAL = 5
    CANCEL = 6
    GOODBYE = 7


class Message(Structure):
    """Base of all messages.

    KIND: the message's number on the wire. FRAMES: the frame types that may carry it. TENSORS: the least and the
    greatest number of tensors that come with it.
    """

    IS_OPEN: ClassVar[bool] = True
    KIND: ClassVar[int] = 0
    FRAMES: ClassVar[tuple[FrameType, ...]] = ()
    TENSORS: ClassVar[tuple[int, int]] = (0, 0)

    def __init_subclass__(
        cls, *, kind: int | None, frames: tuple[FrameType, ...], tensors: tuple[int, int] = (0, 0), **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        cls.FRAMES, cls.TENSORS = frames, tensors
        if kind is None:
            return
        if kind in KINDS:
            raise TypeError(f"kind {kind} is {KINDS[kind].__name__} already")
        cls.KIND = kind
        KINDS[kind] = cls


KINDS: Final[dict[int, type[Message]]] = {}


class Hello(Message, kind=1, frames=(FrameType.HELLO,)):
    """Introduces the sender, and proves that it may take part. The first frame in both directions.

    The opener of the stream sends it first; the other side sends its own only after it has admitted the opener.
    """

    version: int = int_field(1, 65_535, doc="newest protocol version that the sender speaks")
    salt: bytes = bytes_field(SALT_BYTES, doc="random bytes, new for each HELLO")
    run: bytes = bytes_field(
        32, doc="the salted hash of section 10: only those who know the run's id can tell which it is"
    )
    role: str = choice_field(
        "member", "reader", doc="what the sender wants to be: one who takes part, or one who reads status and manifest"
    )
    proof: bytes = bytes_field(most=MAX_PROOF_BYTES, doc="the sender's tickets, section 4; empty where it has none")
    software: str = text_field(MAX_NAME_BYTES, doc="name and version of the program, for people")
    addresses: tuple[str, ...] = addresses_field(doc="where the sender can be dialled; empty when nowhere")


class Ping(Message, kind=2, frames=(FrameType.REQUEST,)):
    """Asks whether the receiver is still there. Answered by Pong, without waiting for other work."""

    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Process(Message, kind=3, frames=(FrameType.REQUEST,), tensors=(2, 2)):
    """Asks the receiver to run its stages on a microbatch and to answer with the gradient of the boundary.

    Sent by the peer that computed the stage before. Answered by Processed, or by Refusal: before any work if the peer
    refuses, later if its work fails.
    Tensors: the boundary that enters `stage`, encoded by `codec`, and the tokens [b, s + 1], or with marks
    [2, b, s + 1], in the narrowest of uint8, int16 and int32 that holds them all.
    """

    microbatch: MicrobatchId = bytes_field(
        MICROBATCH_BYTES, doc="nobody but its origin can foretell it: see section 11"
    )
    origin: PeerId = peer_id_field(doc="the peer that drew the microbatch")
    stage: int = int_field(0, MAX_STAGES - 1, doc="first stage to run; must lie inside the receiver's span")
    purpose: str = choice_field(
        "train",
        "evaluate",
        "reference",
        doc="evaluate: no backward, no gradient, nothing is kept; reference: as evaluate, by the model as it began",
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
    codec: str = text_field(
        32,
        default="",
        doc="of its boundaries and gradients, as an amendment names it; empty: the one that the run was founded with",
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


_WHAT: Final = ("gradient", "slice")

# How far a replica is, in the order that `replicas` of GossipSteps describes.
GossipEntry = tuple[PeerId, int, int, int, int, int, int, int, int, int]


def _replica_steps(doc: str) -> Any:
    counts = (int_field(0, MAX_UINT) for _ in range(5))
    lineage, start_step, carried = hash_field(), int_field(0, MAX_UINT), int_field(0, MAX_UINT)
    entry = tuple_field(peer_id_field(), *counts, lineage, start_step, carried, int_field(0, MAX_DEADLINE_MS))
    entries = list_field(entry, MAX_GOSSIPED_REPLICAS, doc=doc)
    return replace(entries, load=_load_entries, dump=_dump_entries)


_HASH_AT: Final = 6  # of an entry's values, the history hash


def _load_entries(value: Any) -> Any:
    if not isinstance(value, tuple) or not all(isinstance(entry, tuple) for entry in value):
        return value
    return tuple(
        (*entry[:_HASH_AT], *map(load_hash, entry[_HASH_AT : _HASH_AT + 1]), *entry[_HASH_AT + 1 :]) for entry in value
    )


def _dump_entries(value: tuple[GossipEntry, ...]) -> tuple[tuple[Any, ...], ...]:
    return tuple((*entry[:_HASH_AT], dump_hash(entry[_HASH_AT]), *entry[_HASH_AT + 1 :]) for entry in value)


class GossipSteps(Message, kind=12, frames=(FrameType.REQUEST,)):
    """Sends a replica what the sender knows of the progress of a stage's replicas. Answered by GossipedSteps.

    Both sides believe a sender about itself as far as the time since allows (section 16), also when its numbers are
    lower than before: it may have restarted. About another replica they keep the report with more progress, or any
    report when they know nothing live of it.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage whose replicas are listed")
    replicas: tuple[GossipEntry, ...] = _replica_steps(
        "[replica, optimizer steps taken, number of the step it counts for, tokens counted for that step, tokens "
        "counted since it started, step up to which it has agreed with the others, history hash of that step, steps "
        "of the state with which it started, 1 + thousandths of a byte that its uplink carries for each value and "
        "step (0: it is never full), milliseconds since it reported]; the sender comes first"
    )
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class GossipedSteps(Message, kind=13, frames=(FrameType.ANSWER,)):
    """Answers GossipSteps with what the answering replica knows."""

    replicas: tuple[GossipEntry, ...] = _replica_steps("as in GossipSteps")


class Contribute(Message, kind=14, frames=(FrameType.REQUEST,), tensors=(1, 2)):
    """Sends the sender's values of one shard of a round to the shard's reducer. Answered by Averaged.

    Tensors: the shard as `wire` says: float32 [n]; bf16 [n]; of int8 levels, int8 [n], and exponents, int8 [blocks]; of
    normal2 to normal4 scales, uint8 [1 + blocks], and packed levels, uint8. A block has QUANTISER_BLOCK elements.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="the stage whose replicas average")
    what: str = choice_field(
        *_WHAT,
        doc="what is averaged: the gradient of an all-reduce step, or a slice's (fragment's) difference to the anchor",
    )
    round: int = int_field(0, MAX_UINT, doc="number of the round")
    part: int = int_field(0, MAX_UINT, doc="number of the shard within the round")
    slices: int = int_field(
        0, MAX_SLICES, doc="number of slices of the stage, of which the round averages one; 0: a whole gradient"
    )
    weight: float = float_field(
        0, 1e18, doc="supervised tokens behind these values; with 0 they do not count in the mean"
    )
    first_owner_failed: bool = bool_field(
        doc="whether the shard's first reducer has failed the sender: the receiver is the second one"
    )
    wire: str = choice_field(*NUMBER_FORMAT_NAMES, doc="the format of the tensors, which the sender chooses")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, doc=_DEADLINE_DOC)


class Averaged(Message, kind=15, frames=(FrameType.ANSWER,), tensors=(1, 2)):
    """Answers Contribute. Tensors: the mean, as `wire` says; the same bytes for every member."""

    in_mean: int = int_field(0, MAX_UINT, doc="contributions that count in the mean; 0: the mean is 0")
    contributors: int = int_field(0, MAX_UINT, doc="members that contributed in time, those of weight 0 included")
    weight: float = float_field(0, 1e21, doc="the sum of the weights in the mean")
    counted: bool = bool_field(doc="whether the sender's values are in the mean: false when they came too late")
    wire: str = choice_field(*NUMBER_FORMAT_NAMES, doc="the format of the tensors, which the reducer chooses")
    wanted_slices: int = int_field(
        0,
        MAX_SLICES,
        default=0,
        doc="in how many slices the reducer wants the stage to agree later, 0: by all-reduce steps",
    )
    reducer: str = text_field(
        PEER_ID_CHARACTERS,
        default="",
        doc="peer id of the replica that has averaged and signed the shard; empty where nobody signed: a mean of 0 or "
        "of one contribution, or a reducer that may not sign",
    )
    signature: bytes = bytes_field(0, 64, default=b"", doc="the reducer's, of the mean (section 12); empty likewise")


class Recall(Message, kind=16, frames=(FrameType.REQUEST,)):
    """Asks a member of a round for the mean of a shard, which it has from the shard's reducer.

    Sent by the second reducer after the first has failed, and by replicas that miss a mean or replay a step. Answered
    by Recalled.
    """

    stage: int = int_field(0, MAX_STAGES - 1, doc="as in Contribute")
    what: str = choice_field(*_WHAT, doc="as in Contribute")
    round: int = int_field(0, MAX_UINT, doc="as in Contribute")
    part: int = int_field(0, MAX_UINT, doc="as in Contribute")
    slices: int = int_field(0, MAX_SLICES, doc="as in Contribute")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class Recalled(Message, kind=17, frames=(FrameType.ANSWER,), tensors=(0, 2)):
    """Answers Recall. Tensors: those with which the shard's reducer has answered Contribute; none when the answering
    peer does not have them."""

    in_mean: int = int_field(0, MAX_UINT, doc="as in Averaged; 0 without a mean")
    contributors: int = int_field(0, MAX_UINT, doc="as in Averaged")
    weight: float = float_field(0, 1e21, doc="as in Averaged")
    wire: str = choice_field(*NUMBER_FORMAT_NAMES, doc="as in Averaged")
    wanted_slices: int = int_field(0, MAX_SLICES, default=0, doc="as in Averaged")
    reducer: str = text_field(PEER_ID_CHARACTERS, default="", doc="as in Averaged")
    signature: bytes = bytes_field(0, 64, default=b"", doc="as in Averaged")


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
    lineage: int = hash_field(doc="the history hash of step `agreed` (section 13), zeros when it is unknown")
    slices: int = int_field(
        0, MAX_SLICES, doc="number of slices in which the stage agrees before step `change_at`; 0: all-reduce steps"
    )
    change_at: int = int_field(
        0, MAX_UINT, doc="number of the step from which `later_slices` hold; 10^9 when none does"
    )
    later_slices: int = int_field(0, MAX_SLICES, doc="slices from that step on; 0: all-reduce steps")
    size: int = int_field(0, MAX_UINT, doc="bytes of the snapshot; 0 when there is none to give")


class GetChunk(Message, kind=20, frames=(FrameType.REQUEST,)):
    """Asks for one chunk of a snapshot that the receiver has offered in StateIndex. Answered by Chunk."""

    snapshot: bytes = bytes_field(32, doc="as in StateIndex")
    chunk: int = int_field(0, MAX_UINT, doc="the chunk's number; section 14 says which elements it has")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=60_000, doc=_DEADLINE_DOC)


class Chunk(Message, kind=21, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """Answers GetChunk. Tensor: the chunk's bytes, uint8 [n]."""


class GetSketches(Message, kind=30, frames=(FrameType.REQUEST,)):
    """Asks for sketches of some chunks of a snapshot that the receiver has offered in StateIndex: sums by which arrays
    are compared without being sent. Answered by Sketches."""

    snapshot: bytes = bytes_field(32, doc="as in StateIndex")
    seed: bytes = bytes_field(SALT_BYTES, doc="random bytes, drawn once all offers to be compared have come")
    first: int = int_field(0, MAX_UINT, doc="number of the first chunk")
    count: int = int_field(1, MAX_SKETCHED_CHUNKS, doc="how many chunks, from the first on")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=30_000, doc=_DEADLINE_DOC)


class Sketches(Message, kind=31, frames=(FrameType.ANSWER,), tensors=(1, 1)):
    """Answers GetSketches. Tensor: float32 [chunks, arrays, SKETCH_SUMS]; section 14 has the formula."""


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


class GossipEpochs(Message, kind=26, frames=(FrameType.REQUEST,)):
    """Sends an origin what the sender knows of the epochs in progress. Answered by GossipedEpochs."""

    state: tuple[int, ...] = list_field(int_field(0, MAX_UINT), MAX_EPOCH_STATE, doc="the state, as said below")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=5_000, doc=_DEADLINE_DOC)


class GossipedEpochs(Message, kind=27, frames=(FrameType.ANSWER,)):
    """Answers GossipEpochs with what the answering origin knows."""

    state: tuple[int, ...] = list_field(int_field(0, MAX_UINT), MAX_EPOCH_STATE, doc="as in GossipEpochs")


class ShareRevocations(Message, kind=28, frames=(FrameType.REQUEST,)):
    """Passes on revocations, section 4: all that the sender knows when a connection begins, then each new one.

    Answered by TookRevocations. Readers may send it too: a revocation counts by its signature, whoever passes it on.
    """

    revocations: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_REVOCATION_BYTES), MAX_SHARED_REVOCATIONS, doc="sealed revocations"
    )
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class TookRevocations(Message, kind=29, frames=(FrameType.ANSWER,)):
    """Answers ShareRevocations."""

    new: int = int_field(0, MAX_SHARED_REVOCATIONS, doc="how many of them the receiver did not know and accepted")
    refused: int = int_field(0, MAX_SHARED_REVOCATIONS, doc="how many do not count: malformed, or of no delegate")


class ShareAmendments(Message, kind=32, frames=(FrameType.REQUEST,)):
    """Passes on amendments, section 4: all that the sender knows when a connection begins, then each new one.

    Answered by TookAmendments. Readers may send it too: an amendment counts by its signature, whoever passes it on.
    """

    amendments: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_AMENDMENT_BYTES), MAX_SHARED_AMENDMENTS, doc="sealed amendments, the lowest number first"
    )
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class TookAmendments(Message, kind=33, frames=(FrameType.ANSWER,)):
    """Answers ShareAmendments."""

    new: int = int_field(0, MAX_SHARED_AMENDMENTS, doc="how many of them the receiver did not know and keeps")
    refused: int = int_field(0, MAX_SHARED_AMENDMENTS, doc="how many it does not keep: malformed, or of no delegate")
    why: str = text_field(MAX_TEXT_BYTES, default="", doc="why the first of them is not kept, for people")


class GetAmendments(Message, kind=34, frames=(FrameType.REQUEST,)):
    """Asks for the amendments that the receiver knows. Answered by KnownAmendments."""

    known: bytes = bytes_field(
        32, doc="SHA-256 of the hashes of all amendments that the sender knows, joined in rising order"
    )
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=10_000, doc=_DEADLINE_DOC)


class KnownAmendments(Message, kind=35, frames=(FrameType.ANSWER,)):
    """Answers GetAmendments."""

    amendments: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_AMENDMENT_BYTES),
        MAX_KEPT_AMENDMENTS,
        doc="sealed amendments, the lowest number first; none where both know the same",
    )


_NOT_AN_ADDRESS: Final = "must be empty, or like /ip4/ADDRESS/tcp/PORT"


def _find_address_problem(address: str) -> str | None:
    if not address:
        return None
    words = address.split("/")
    if len(words) != 5 or words[0] or words[1] not in ("ip4", "ip6") or words[3] != "tcp":
        return _NOT_AN_ADDRESS
    is_ip, is_port = PARTS[words[1]], PARTS["tcp"]
    is_address = is_ip is not None and is_port is not None and is_ip(words[2]) and is_port(words[4])
    return None if is_address else _NOT_AN_ADDRESS


def _port_field() -> Any:
    return int_field(1, 65_535)


class DialBack(Message, kind=40, frames=(FrameType.REQUEST,)):
    """Asks the receiver to open a TCP connection to the sender at the IP address from which it sees the sender."""

    ports: tuple[int, ...] = list_field(_port_field(), MAX_PORTS, doc="the ports to try; nothing is sent there")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)


class DialedBack(Message, kind=41, frames=(FrameType.ANSWER,)):
    """Answers DialBack."""

    seen: str = text_field(
        MAX_SEEN_BYTES, doc="where the answering peer sees the asker, /ip4/ADDRESS/tcp/PORT; empty if through a relay"
    )
    reached: tuple[int, ...] = list_field(_port_field(), MAX_PORTS, doc="the ports at which it was reached")

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class Introduce(Message, kind=42, frames=(FrameType.REQUEST,)):
    """Asks the receiver, connected to both, to have `peer` and the sender dial each other at the same moment."""

    peer: PeerId = peer_id_field(doc="whom the sender wants to meet")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)


class Meet(Message, kind=43, frames=(FrameType.REQUEST,)):
    """Asks the receiver to dial `peer` now; that peer dials the receiver at the same moment."""

    peer: PeerId = peer_id_field(doc="who asked for an introduction")
    seen: str = text_field(MAX_SEEN_BYTES, doc="where the sender sees that peer, /ip4/ADDRESS/tcp/PORT")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class Meeting(Message, kind=44, frames=(FrameType.ANSWER,)):
    """Answers Introduce: the other peer dials the sender now; and Meet: the receiver dials `peer` now."""

    seen: str = text_field(
        MAX_SEEN_BYTES, doc="to Introduce: where the answering peer sees the other one; to Meet: empty"
    )

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class GetAddresses(Message, kind=45, frames=(FrameType.REQUEST,)):
    """Asks where `peer`, which the receiver named as a DHT node, can be dialled. Answered by PeerAddresses."""

    peer: PeerId = peer_id_field(doc="whom the sender wants to dial")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=2_000, doc=_DEADLINE_DOC)


class PeerAddresses(Message, kind=46, frames=(FrameType.ANSWER,)):
    """Answers GetAddresses with what that peer has announced in its HELLO or claim."""

    addresses: tuple[str, ...] = addresses_field(doc="where it can be dialled; empty when that is not known")


Request = (
    Ping
    | GetManifest
    | GetStatus
    | Process
    | GossipSteps
    | GossipEpochs
    | Contribute
    | Recall
    | GetState
    | GetChunk
    | GetSketches
    | GetBase
    | GetPiece
    | ShareRevocations
    | ShareAmendments
    | GetAmendments
    | DialBack
    | Introduce
    | Meet
    | GetAddresses
)
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
    GetSketches: Sketches,
    GetBase: BaseIndex,
    GetPiece: TensorPiece,
    ShareRevocations: TookRevocations,
    ShareAmendments: TookAmendments,
    GetAmendments: KnownAmendments,
    DialBack: DialedBack,
    Introduce: Meeting,
    Meet: Meeting,
    GetAddresses: PeerAddresses,
}


class UnknownRequest(Message, kind=None, frames=(FrameType.REQUEST,), tensors=(0, MAX_TENSORS)):
    """Stands for a request of a kind that this version does not have, which is refused as unsupported; never sent."""

    number: int = int_field(1, 65_535, doc="its kind")


def message_from_fields(kind: object, fields: object) -> Message:
    """Returns the message of number `kind` with these fields, as read from msgpack.

    Raises ProtocolError("bad-message") for an unknown kind or wrong fields.
    """
    known = KINDS.get(kind) if type(kind) is int else None
    if known is None:
        raise ProtocolError("bad-message", f"{describe(kind)} is not the kind of any message.")
    return known.from_fields(fields)
