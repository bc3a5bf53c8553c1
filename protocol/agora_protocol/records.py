"""The signed records that peers publish in the DHT: claims, progress, ban lists, evaluation lists.

A record is msgpack [payload, signature]; payload is msgpack [1, kind, expires_unix, fields]; the signature is over
b"agora record 1\0" || run (32 bytes) || payload, by the peer that the fields and the DHT subkey both name.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple

from agora_protocol.addresses import peer_of_address
from agora_protocol.directory_shards import DirectoryShard, is_shard_bits, shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    Structure,
    addresses_field,
    bytes_field,
    choice_field,
    describe,
    float_field,
    int_field,
    list_field,
    peer_id_field,
    span_field,
    text_field,
    tuple_field,
)
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import PeerId, RunId, Span, is_run_id
from agora_protocol.limits import (
    CLOCK_TOLERANCE_S,
    MAX_EVALUATION_BYTES,
    MAX_METRICS,
    MAX_PROOF_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFETIME_S,
    MAX_RELAYED_PEERS,
    MAX_REVOCATION_BYTES,
    MAX_SHARED_EVALUATIONS,
    MAX_SHARED_REVOCATIONS,
    MAX_SPAN_STAGES,
    MAX_STAGES,
    MAX_TEXT_BYTES,
    RECENT_STEPS,
)
from agora_protocol.packing import is_version, pack, unpack

RECORD_TAG: Final = b"agora record 1\0"
RECORD_VERSION: Final = 1
SIGNATURE_BYTES: Final = 64
# The pattern of texts that people read on a terminal: printable ASCII, which cannot move the cursor.
PRINTABLE: Final = "[ -~]*"


class Record(Structure):
    """Base of all records, in which `peer` publishes facts about itself and its `span` of stages."""

    IS_OPEN: ClassVar[bool] = True
    ERROR: ClassVar[str] = "bad-record"
    KIND: ClassVar[int] = 0
    NAME: ClassVar[str] = ""  # the word in the DHT key
    peer: PeerId
    span: Span

    def __init_subclass__(cls, *, kind: int, name: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind in RECORDS:
            raise TypeError(f"kind {kind} is {RECORDS[kind].__name__} already")
        cls.KIND, cls.NAME = kind, name
        RECORDS[kind] = cls


RECORDS: Final[dict[int, type[Record]]] = {}


class Claim(Record, kind=1, name="claim"):
    """Says which stages a peer holds and where it can be reached."""

    peer: PeerId = peer_id_field(doc="the peer that claims; it signs the record and is its subkey")
    span: Span = span_field(doc="the stages claimed; the record is published once under each of them")
    incarnation: int = int_field(
        0,
        MAX_UINT,
        doc="unix nanoseconds when the daemon started, plus 1 for each later claim of other stages; the newest wins",
    )
    addresses: tuple[str, ...] = addresses_field(doc="where the peer can be dialled, each ending in its own /p2p/PEER")
    state: str = choice_field("joining", "serving", "leaving", doc="only serving peers are sent microbatches")
    capacity: float = float_field(
        0, 1e9, doc="microbatches per second that the peer can do for its span; 0 when unknown"
    )
    bandwidth: float = float_field(
        0, 1e12, default=0.0, doc="bytes per second, the lesser of up and down; 0 when unknown: the others' median"
    )
    reachability: str = choice_field(
        "unknown",
        "public",
        "punched",
        "relayed",
        "unreachable",
        default="unknown",
        doc="how others can open connections to it, as it found out by asking them (section 10)",
    )
    relays_for: int = int_field(
        0,
        MAX_RELAYED_PEERS,
        default=0,
        doc="the most peers for which it relays connections at the same time; 0: for none",
    )
    proof: bytes = bytes_field(
        most=MAX_PROOF_BYTES, default=b"", doc="the peer's tickets, as in its HELLO; empty where it has none"
    )

    def find_problem(self) -> str | None:
        """Returns what is wrong if an address is of another peer, otherwise None."""
        if any(peer_of_address(address) != self.peer for address in self.addresses):
            return "has an address of another peer"
        return None


class StageAccount(NamedTuple):
    """Counts of the tokens whose gradient a peer has computed for one of its stages since it loaded the span.

    Tokens that are neither `waiting` nor `counted` are lost. Recent steps are at most the last RECENT_STEPS.
    """

    computed: int = 0  # tokens whose gradient it has computed
    waiting: int = 0  # of these, in no step yet
    counted: int = 0  # of these, their gradient went into a step
    own_steps: int = 0  # recent steps that it took along its own gradient
    along_own: int = 0  # its tokens in them
    mean_steps: int = 0  # recent steps that it took along the mean gradient of all replicas
    in_mean: int = 0  # the tokens of all replicas in these means
    staleness: float = 0.0  # mean age in steps of its gradients in its recent steps


class Progress(Record, kind=2, name="progress"):
    """Says how far a peer's stages are."""

    peer: PeerId = peer_id_field(doc="the peer whose progress it is; it signs the record and is its subkey")
    span: Span = span_field(doc="the stages held")
    incarnation: int = int_field(0, MAX_UINT, doc="as in the peer's claim")
    steps: tuple[int, ...] = list_field(
        int_field(0, MAX_UINT), MAX_SPAN_STAGES, doc="optimizer steps taken, one number for each stage of the span"
    )
    tokens_per_second: float = float_field(0, 1e12, doc="supervised tokens per second through this peer, recently")
    loss: float | None = float_field(
        -1e30, 1e30, optional=True, doc="recent mean loss per token in nats; nil when unknown"
    )
    queue: int = int_field(0, MAX_UINT, doc="microbatches that wait for the device or are on it now")
    completed: int = int_field(0, MAX_UINT, doc="microbatches finished since the start of this incarnation")
    accounts: tuple[tuple[int | float, ...], ...] = list_field(
        tuple_field(
            *(int_field(0, MAX_UINT) for _ in range(3)),
            *(int_field(0, most) for most in (RECENT_STEPS, MAX_UINT) * 2),
            float_field(0, 1e12),
        ),
        MAX_SPAN_STAGES,
        default=(),
        doc="for each stage of the span what became of its tokens, as said below; empty before a microbatch is taken",
    )
    metrics: tuple[float, ...] = list_field(
        float_field(-1e30, 1e30),
        MAX_METRICS,
        default=(),
        doc="recent means of the metrics of the run's objective; sft: token accuracy; dpo: rewards of chosen, of "
        "rejected answers, accuracy, margin; empty when unknown",
    )
    waits_for: str = text_field(
        MAX_TEXT_BYTES // 4, pattern=PRINTABLE, default="", doc="what its stages do or wait for, for people"
    )
    note: str = text_field(
        MAX_TEXT_BYTES, pattern=PRINTABLE, default="", doc="why it is behind, what limits it, for people"
    )

    def find_problem(self) -> str | None:
        """Returns what is wrong, or None: each stage needs one step; accounts must be empty, or one for each stage."""
        if len(self.steps) != len(self.span):
            return f"has {len(self.steps)} steps for a span of {len(self.span)} stages"
        if len(self.accounts) not in (0, len(self.span)):
            return f"has {len(self.accounts)} accounts for a span of {len(self.span)} stages"
        for account in map(StageAccount._make, self.accounts):
            if account.waiting + account.counted > account.computed:
                return f"counts {account.waiting + account.counted} tokens of {account.computed} that were computed"
        return None


def _why_not_at_stage_0(span: Span) -> str | None:
    return None if span == Span(0, 0) else "has another span than [0, 0]"


class BanList(Record, kind=4, name="bans"):
    """Passes on revocations that the publisher knows, the newest first. It is published under stage 0 only."""

    peer: PeerId = peer_id_field(doc="who passes them on, which need not be who signed them")
    span: Span = span_field(doc="always [0, 0]")
    revocations: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_REVOCATION_BYTES), MAX_SHARED_REVOCATIONS, doc="sealed revocations, section 4"
    )

    def find_problem(self) -> str | None:
        """Returns a complaint when the span is another than that of stage 0, else None."""
        return _why_not_at_stage_0(self.span)


class EvaluationList(Record, kind=5, name="evaluations"):
    """Passes on signed results of evaluations: the publisher's own, and others'. It is published under stage 0 only."""

    peer: PeerId = peer_id_field(doc="who passes them on, which need not be who signed them")
    span: Span = span_field(doc="always [0, 0]")
    evaluations: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_EVALUATION_BYTES), MAX_SHARED_EVALUATIONS, doc="sealed evaluations, section 4"
    )

    def find_problem(self) -> str | None:
        """Returns a complaint when the span is another than that of stage 0, else None."""
        return _why_not_at_stage_0(self.span)


NAMES: Final = {record.NAME: kind for kind, record in RECORDS.items()}


def record_key(run: RunId, kind: str | type[Record], stage: int, bits: str = "") -> str:
    """Returns the DHT key of a stage's records: RUN/claim/STAGE or RUN/progress/STAGE, plus /BITS for a shard.

    Its subkeys are peer ids. kind: "claim", "progress", "bans", "evaluations", or a Record class; raises ValueError for
    any other.
    """
    name = kind if isinstance(kind, str) else kind.NAME
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a record; use one of {', '.join(NAMES)}")
    return f"{run}/{name}/{stage}/{bits}" if bits else f"{run}/{name}/{stage}"


def seal_record(record: Record, run: RunId, identity: Identity, expires_unix: float) -> bytes:
    """Returns the record as bytes to publish, signed by `identity` and valid until `expires_unix`.

    Raises ProtocolError: "too-large" beyond MAX_RECORD_BYTES, "wrong-key" for another peer's record.
    """
    if record.peer != identity.peer:
        raise ProtocolError("wrong-key", "A record can only be sealed by the peer that it is about.")
    payload = pack((RECORD_VERSION, record.KIND, float(expires_unix), record.to_fields()))
    sealed = pack((payload, identity.sign(_signed_bytes(run, payload))))
    if len(sealed) > MAX_RECORD_BYTES:
        raise ProtocolError(
            "too-large", f"The record has {len(sealed)} bytes of {MAX_RECORD_BYTES}; give fewer addresses."
        )
    return sealed


def open_record(data: bytes, *, run: RunId, key: str, subkey_peer: PeerId, now_unix: float) -> Record:
    """Returns the verified record in `data`, which was found in the DHT under `key` and `subkey_peer`.

    Raises ProtocolError: "too-large", "bad-record", "wrong-run", "wrong-key", "bad-signature", "expired",
    "lives-too-long". A record of another run fails as "bad-signature", since the run is part of what is signed.
    """
    name, shard = _parse_key(run, key)
    payload, signature = _parse_envelope(data)
    record, expires_unix = _parse_payload(payload)
    if name != record.NAME or shard.stage not in record.span:
        raise ProtocolError(
            "bad-record", f"A {record.NAME} does not belong under the key of {name} for stage {shard.stage}."
        )
    if record.peer != subkey_peer:
        raise ProtocolError("wrong-key", "The record is about another peer than its subkey names.")
    if not shard.contains(shard_hash(run, record.peer)):
        raise ProtocolError("bad-record", "The record is of a peer of another shard than its key names.")
    if expires_unix <= now_unix:
        raise ProtocolError("expired", f"The record expired {now_unix - expires_unix:.1f} s ago.")
    if expires_unix > now_unix + MAX_RECORD_LIFETIME_S + CLOCK_TOLERANCE_S:
        raise ProtocolError("lives-too-long", f"The record expires more than {MAX_RECORD_LIFETIME_S} s from now.")
    _check_signature(subkey_peer, run, payload, signature)
    return record


def read_unverified(data: bytes) -> tuple[Record, float]:
    """Returns a record and the unix time at which it expires; verifies nothing. Raises ProtocolError if malformed."""
    return _parse_payload(_parse_envelope(data)[0])


def read_signed(data: bytes, run: RunId) -> Record:
    """Returns a record that its own peer has signed for this run; its key and expiry are not looked at.

    Raises ProtocolError if it is malformed, "bad-signature" if it is another's.
    """
    payload, signature = _parse_envelope(data)
    record, _ = _parse_payload(payload)
    _check_signature(record.peer, run, payload, signature)
    return record


def _check_signature(peer: PeerId, run: RunId, payload: bytes, signature: bytes) -> None:
    if not verify(peer, _signed_bytes(run, payload), signature):
        raise ProtocolError(
            "bad-signature", "The record's signature is not that of the peer and run it is published for."
        )


def _signed_bytes(run: RunId, payload: bytes) -> bytes:
    return RECORD_TAG + bytes.fromhex(run) + payload


def _parse_key(run: RunId, key: str) -> tuple[str, DirectoryShard]:
    owner, name, stage, bits = (*key.split("/"), "", "", "")[:4]
    is_complete = key.count("/") == 2 or (key.count("/") == 3 and is_shard_bits(bits))
    if not is_complete or name not in NAMES or not (stage.isascii() and stage.isdigit() and len(stage) <= 4):
        raise ProtocolError("bad-record", f"{describe(key)} is not the key of any record.")
    if not is_run_id(run) or owner != run:
        raise ProtocolError("wrong-run", "The key names another run.")
    if int(stage) >= MAX_STAGES or stage != str(int(stage)):
        raise ProtocolError("bad-record", f"{describe(stage)} is not a stage.")
    return name, DirectoryShard(int(stage), bits)


def _parse_envelope(data: bytes) -> tuple[bytes, bytes]:
    parts = unpack(data, MAX_RECORD_BYTES, "bad-record")
    if not isinstance(parts, tuple) or len(parts) != 2 or not all(isinstance(part, bytes) for part in parts):
        raise ProtocolError("bad-record", "A record must be a list of payload and signature.")
    if len(parts[1]) != SIGNATURE_BYTES:
        raise ProtocolError("bad-signature", f"A signature has {SIGNATURE_BYTES} bytes; this record is not signed.")
    return parts[0], parts[1]


def _parse_payload(payload: bytes) -> tuple[Record, float]:
    parts = unpack(payload, MAX_RECORD_BYTES, "bad-record")
    if not isinstance(parts, tuple) or len(parts) != 4 or not is_version(parts[0], RECORD_VERSION):
        raise ProtocolError("bad-record", "A record's payload must be a list of 1, kind, expiry and fields.")
    known = RECORDS.get(parts[1]) if type(parts[1]) is int else None
    if known is None:
        raise ProtocolError("bad-record", f"{describe(parts[1])} is not the kind of any record.")
    if not isinstance(parts[2], float) or not 0 < parts[2] < 1e12:
        raise ProtocolError("bad-record", f"{describe(parts[2])} is not a time in unix seconds.")
    return known.from_fields(parts[3]), parts[2]
