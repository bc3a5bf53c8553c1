"""What peers publish in the DHT: claims and progress, signed, and over soon. Knows bytes and rules, not the DHT.

A record is msgpack [payload, signature]; payload is msgpack [1, kind, expires_unix, fields]; the signature is over
b"agora record 1\\0" || run (32 bytes) || payload, by the peer that the fields and the DHT subkey both name.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from agora_protocol.addresses import peer_of_address
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    Structure,
    address_list,
    choice,
    many,
    number,
    peer_id,
    shown,
    span,
    whole,
)
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import PeerId, RunId, Span, is_run_id
from agora_protocol.limits import (
    CLOCK_TOLERANCE_S,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFETIME_S,
    MAX_SPAN_STAGES,
    MAX_STAGES,
)
from agora_protocol.packing import is_version, pack, unpack

RECORD_TAG: Final = b"agora record 1\0"
RECORD_VERSION: Final = 1
SIGNATURE_BYTES: Final = 64


class Record(Structure):
    """Base of all records; every one has the fields `peer` and `span`."""

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
    """I hold these stages; here is where to reach me."""

    peer: PeerId = peer_id(doc="who claims; signs the record and is its subkey")
    span: Span = span(doc="the stages claimed; the record is published once under each of them")
    incarnation: int = whole(0, MAX_UINT, doc="unix nanoseconds at which this daemon started; the newest wins")
    addresses: tuple[str, ...] = address_list(doc="where the peer can be dialled, each ending in its own /p2p/PEER")
    state: str = choice("joining", "serving", "leaving", doc="only serving peers are sent microbatches")
    capacity: float = number(0, 1e9, doc="microbatches per second the peer measured for its span; 0 when unknown")
    bandwidth: float = number(
        0, 1e12, default=0.0, doc="bytes per second, the lesser of up and down; 0 when unknown: the others' median"
    )

    def problem(self) -> str | None:
        if any(peer_of_address(address) != self.peer for address in self.addresses):
            return "has an address of another peer"
        return None


class Progress(Record, kind=2, name="progress"):
    """This far am I."""

    peer: PeerId = peer_id(doc="who speaks; signs the record and is its subkey")
    span: Span = span(doc="the stages held")
    incarnation: int = whole(0, MAX_UINT, doc="as in the peer's claim")
    steps: tuple[int, ...] = many(
        whole(0, MAX_UINT), MAX_SPAN_STAGES, doc="optimizer steps taken, one number for each stage of the span"
    )
    tokens_per_second: float = number(0, 1e12, doc="supervised tokens per second through this peer, recently")
    loss: float | None = number(-1e30, 1e30, optional=True, doc="recent mean loss per token in nats; nil when unknown")
    queue: int = whole(0, MAX_UINT, doc="microbatches in hand now")
    completed: int = whole(0, MAX_UINT, doc="microbatches finished since the start of this incarnation")

    def problem(self) -> str | None:
        if len(self.steps) != len(self.span):
            return f"has {len(self.steps)} steps for a span of {len(self.span)} stages"
        return None


NAMES: Final = {record.NAME: kind for kind, record in RECORDS.items()}


def record_key(run: RunId, kind: str | type[Record], stage: int) -> str:
    """The DHT key of a stage's records of one kind, such as "<run>/claim/3"; the subkey is the peer id."""
    name = kind if isinstance(kind, str) else kind.NAME
    if name not in NAMES:
        raise ValueError(f"{name!r} is no record; use one of {', '.join(NAMES)}")
    return f"{run}/{name}/{stage}"


def seal(record: Record, run: RunId, identity: Identity, expires_unix: float) -> bytes:
    """The signed bytes to publish. Raises ProtocolError("too-large"), or "wrong-key" when the record is not ours."""
    if record.peer != identity.peer:
        raise ProtocolError("wrong-key", "A record can only be sealed by the peer that it speaks for.")
    payload = pack((RECORD_VERSION, record.KIND, float(expires_unix), record.to_fields()))
    sealed = pack((payload, identity.sign(_signed_bytes(run, payload))))
    if len(sealed) > MAX_RECORD_BYTES:
        raise ProtocolError(
            "too-large", f"The record has {len(sealed)} bytes of {MAX_RECORD_BYTES}; give fewer addresses."
        )
    return sealed


def open_record(data: bytes, *, run: RunId, key: str, subkey_peer: PeerId, now_unix: float) -> Record:
    """The record in `data`, found in the DHT under `key` and `subkey_peer`; everything about it holds.

    Raises ProtocolError: "too-large", "bad-record", "wrong-run", "wrong-key", "bad-signature", "expired",
    "lives-too-long". A record of another run fails as "bad-signature", since the run is part of what is signed.
    """
    name, stage = _read_key(run, key)
    payload, signature = _envelope(data)
    record, expires_unix = _parse_payload(payload)
    if name != record.NAME or stage not in record.span:
        raise ProtocolError("bad-record", f"A {record.NAME} does not belong under the key of {name} for stage {stage}.")
    if record.peer != subkey_peer:
        raise ProtocolError("wrong-key", "The record speaks for another peer than its subkey names.")
    if expires_unix <= now_unix:
        raise ProtocolError("expired", f"The record expired {now_unix - expires_unix:.1f} s ago.")
    if expires_unix > now_unix + MAX_RECORD_LIFETIME_S + CLOCK_TOLERANCE_S:
        raise ProtocolError("lives-too-long", f"The record wants to live more than {MAX_RECORD_LIFETIME_S} s.")
    if not verify(subkey_peer, _signed_bytes(run, payload), signature):
        raise ProtocolError(
            "bad-signature", "The record's signature is not that of the peer and run it is published for."
        )
    return record


def expiry_of(data: bytes) -> float:
    """The unix time at which a record ends, unverified. Raises ProtocolError("bad-record" or "too-large")."""
    return _parse_payload(_envelope(data)[0])[1]


def _signed_bytes(run: RunId, payload: bytes) -> bytes:
    return RECORD_TAG + bytes.fromhex(run) + payload


def _read_key(run: RunId, key: str) -> tuple[str, int]:
    owner, name, stage = (*key.split("/"), "", "")[:3]
    if key.count("/") != 2 or name not in NAMES or not (stage.isascii() and stage.isdigit() and len(stage) <= 4):
        raise ProtocolError("bad-record", f"{shown(key)} is not the key of any record.")
    if not is_run_id(run) or owner != run:
        raise ProtocolError("wrong-run", "The key names another run.")
    if int(stage) >= MAX_STAGES or stage != str(int(stage)):
        raise ProtocolError("bad-record", f"{shown(stage)} is not a stage.")
    return name, int(stage)


def _envelope(data: bytes) -> tuple[bytes, bytes]:
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
        raise ProtocolError("bad-record", f"{shown(parts[1])} is not the kind of any record.")
    if not isinstance(parts[2], float) or not 0 < parts[2] < 1e12:
        raise ProtocolError("bad-record", f"{shown(parts[2])} is not a time in unix seconds.")
    return known.from_fields(parts[3]), parts[2]
