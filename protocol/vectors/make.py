"""Makes the test vectors beside this file, the same bytes every time: `python protocol/vectors/make.py`.

For whoever writes a peer in another language: every message, frame type, record and document with its exact bytes, and
bytes that must be refused with the word of the refusal. In the JSON, bytes are {"hex": "..."}.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any, Final

import msgpack
from agora_protocol import messages
from agora_protocol.directory_shards import shard_bits, shard_hash
from agora_protocol.frames import FrameType, encode_frame
from agora_protocol.identity import Identity, peer_id_bytes
from agora_protocol.ids import MicrobatchId, RunId, Span, peer_name
from agora_protocol.limits import MAX_RECORD_BYTES, MAX_SHARD_BITS, SKETCH_SUMS
from agora_protocol.manifest import Manifest, SignedManifest, preset
from agora_protocol.messages import Message
from agora_protocol.records import (
    RECORD_TAG,
    BanList,
    Claim,
    EvaluationList,
    Progress,
    Record,
    record_key,
    seal_record,
)
from agora_protocol.tensors import WireTensor
from amendment_vectors import amendment_frames, amendment_vectors, bad_amendments
from averaging_vectors import averaging_frames
from base_model_vectors import adapted_manifest, base_model_frames, tensor_lists
from evaluation_vectors import bad_evaluations, evaluations, turns
from ticket_vectors import admission_frames, bad_proofs, invite_vectors, proofs, revocations, ticket_vectors

HERE: Final = Path(__file__).parent
FIRST: Final = Identity(bytes(range(32)))
SECOND: Final = Identity(hashlib.sha256(b"agora vector 2").digest())
NOW_UNIX: Final = 1_790_000_000.0
SIGNED: Final = SignedManifest.sign(Manifest(name="tiny", seed=7), FIRST)
RUN: Final = SIGNED.run_id
HASH: Final = hashlib.sha256(b"agora vector").digest()
MICROBATCH: Final = MicrobatchId(b"vectors!" + (258).to_bytes(8, "big"))
ADDRESS: Final = f"/ip4/203.0.113.7/tcp/31000/p2p/{FIRST.peer}"
PROOFS: Final = proofs(RUN, FIRST, SECOND, int(NOW_UNIX) + 86_400)
BANS: Final = tuple(sealed for _, sealed in revocations(RUN, FIRST, SECOND, int(NOW_UNIX)))
RESULTS: Final = evaluations(RUN, FIRST, SECOND, PROOFS["named"], int(NOW_UNIX))
RELAYED: Final = f"/ip6/2001:db8::9/tcp/4001/p2p/{SECOND.peer}/p2p-circuit/p2p/{FIRST.peer}"


def _json(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return {"hex": bytes(value).hex()}
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


def identities() -> list[dict[str, Any]]:
    """Returns keys, their files, ids and signatures."""
    message = b"agora"
    return [
        {
            "private": identity.key_file_bytes()[4:36],
            "public": identity.key_file_bytes()[36:],
            "key_file": identity.key_file_bytes(),
            "peer": identity.peer,
            "peer_bytes": peer_id_bytes(identity.peer),
            "name": peer_name(identity.peer),
            "message": message,
            "signature": identity.sign(message),
        }
        for identity in (FIRST, SECOND)
    ]


def manifests() -> list[dict[str, Any]]:
    """Returns manifests as files, canonical bytes and signed bytes."""
    cut = {"count": 3, "first_layers": [0, 1, 5]}
    listed = {"mode": "listed", "peers": [SECOND.peer]}
    evaluated = {"tasks": ["heldout", "sums"], "every": 500}
    other = preset("small", name="listed", stages=cut, admission=listed, boundary={"codec": "float32"})
    measured = preset("tiny", name="measured", evaluation=evaluated)
    return [
        {
            "toml": signed.to_toml(),
            "canonical": signed.manifest.canonical(),
            "run_id": signed.run_id,
            "founder": signed.founder,
            "signature": signed.signature,
            "signed": signed.to_bytes(),
            "layers": [[*signed.manifest.layers_of(k)] for k in range(signed.manifest.stage_count)],
            "max_payload_bytes": signed.manifest.max_payload_bytes,
        }
        for signed in (
            SIGNED,
            SignedManifest.sign(other, SECOND),
            SignedManifest.sign(adapted_manifest(), FIRST),
            SignedManifest.sign(measured, FIRST),
        )
    ]


def _records() -> list[tuple[Record, Identity, int, int]]:
    account = (337_920, 6_144, 329_728, 1, 16_384, 15, 245_760, 0.1875)
    counted = Progress(
        SECOND.peer, Span(3, 3), 0, (40,), 4800.5, None, 1, 330, (account,), (0.625,), "6 tokens", "paused"
    )
    return [
        (Claim(FIRST.peer, Span(0, 1), 1_789_999_000_000_000_000, (ADDRESS, RELAYED), "serving", 12.5), FIRST, 1, 0),
        (Claim(SECOND.peer, Span(3, 3), 0, (), "joining", 0.0), SECOND, 3, 0),
        (Progress(FIRST.peer, Span(0, 1), 1_789_999_000_000_000_000, (40, 41), 9870.0, 2.5, 3, 640), FIRST, 0, 0),
        (Progress(SECOND.peer, Span(3, 3), 0, (0,), 0.0, None, 0, 0), SECOND, 3, 0),
        (counted, SECOND, 3, 0),
        (Claim(SECOND.peer, Span(3, 3), 0, (), "serving", 0.0, 25e6), SECOND, 3, 0),
        (Claim(SECOND.peer, Span(3, 4), 0, (), "serving", 0.0), SECOND, 4, 1),
        (Claim(FIRST.peer, Span(0, 1), 0, (ADDRESS,), "serving", 0.0, 0.0, "public", 16), FIRST, 0, 0),
        (counted, SECOND, 3, MAX_SHARD_BITS),
        (Claim(SECOND.peer, Span(3, 3), 0, (), "serving", 0.0, 0.0, proof=PROOFS["named"]), SECOND, 3, 0),
        (BanList(FIRST.peer, Span(0, 0), BANS), FIRST, 0, 0),
        (BanList(SECOND.peer, Span(0, 0), ()), SECOND, 0, 0),
        (EvaluationList(FIRST.peer, Span(0, 0), tuple(sealed for _, sealed in RESULTS)), FIRST, 0, 0),
    ]


def records() -> list[dict[str, Any]]:
    """Returns records, and what a reader needs to open them."""
    return [
        {
            "record": type(record).__name__,
            "kind": record.KIND,
            "run": RUN,
            "key": record_key(RUN, type(record), stage, shard_bits(shard_hash(RUN, identity.peer), depth)),
            "subkey": identity.peer,
            "hash": f"{shard_hash(RUN, identity.peer):016x}",
            "now_unix": NOW_UNIX,
            "expires_unix": NOW_UNIX + 60,
            "fields": record.to_fields(),
            "sealed": seal_record(record, RUN, identity, NOW_UNIX + 60),
        }
        for record, identity, stage, depth in _records()
    ]


def _tensors() -> tuple[WireTensor, WireTensor]:
    boundary = struct.pack("<12H", *(0x3F80 + 3 * n for n in range(12)))
    tokens = struct.pack("<8i", 72, 101, 108, 108, 111, 33, 10, 0)
    return WireTensor("bf16", (2, 3, 2), memoryview(boundary)), WireTensor("int32", (2, 4), memoryview(tokens))


def _state_frames() -> list[tuple[FrameType, int, Message | None, list[WireTensor]]]:
    kind = FrameType
    chunk = WireTensor("uint8", (5,), memoryview(b"agora"))
    hashes = WireTensor("uint8", (1, 32), memoryview(hashlib.sha256(b"agora").digest()))
    sums = (0.25 * n - 3 for n in range(96))
    sketches = WireTensor("float32", (2, 3, 16), memoryview(struct.pack("<96f", *sums)))
    return [
        (kind.REQUEST, 13, messages.GetState(1, 40, 60_000), []),
        (kind.ANSWER, 13, messages.StateIndex(HASH, 400, 380, 399, 2**32 - 1, 0, 260, 20, 5), [hashes]),
        (kind.ANSWER, 13, messages.StateIndex(b"", 0, 0, 0, 0, 0, 10**9, 0, 0), []),
        (kind.REQUEST, 15, messages.GetChunk(HASH, 0, 60_000), []),
        (kind.ANSWER, 15, messages.Chunk(), [chunk]),
        (kind.REQUEST, 17, messages.GetSketches(HASH, bytes(range(16)), 64, 2, 30_000), []),
        (kind.ANSWER, 17, messages.Sketches(), [sketches]),
        *base_model_frames(),
    ]


def _frames() -> list[tuple[FrameType, int, Message | None, list[WireTensor]]]:
    boundary, tokens = _tensors()
    kind = FrameType
    return [
        *admission_frames(RUN, FIRST, SECOND, int(NOW_UNIX), ADDRESS),
        *amendment_frames(SIGNED, FIRST, SECOND, int(NOW_UNIX)),
        (kind.REQUEST, 1, messages.Ping(5_000), []),
        (kind.ANSWER, 1, messages.Pong(), []),
        (kind.ANSWER, 1, messages.Pong(1_790_000_000.25), []),
        (kind.REQUEST, 3, messages.GetManifest(10_000), []),
        (kind.ANSWER, 3, messages.ManifestAnswer(SIGNED.to_bytes()), []),
        (kind.REQUEST, 2, messages.GetStatus(10_000), []),
        (kind.ANSWER, 2, messages.StatusAnswer(b'{"schema": 1}'), []),
        (kind.REQUEST, 5, messages.Process(MICROBATCH, FIRST.peer, 1, "train", 30_000), [boundary, tokens]),
        (
            kind.REQUEST,
            4_294_967_295,
            messages.Process(
                MICROBATCH, FIRST.peer, 1, "evaluate", 600_000, ((2, SECOND.peer), (3, FIRST.peer)), 17, "bf16"
            ),
            [boundary, tokens],
        ),
        *averaging_frames(FIRST.peer, SECOND.peer),
        *_state_frames(),
        (FrameType.REQUEST, 3, messages.DialBack((31000, 4001), 8_000), []),
        (FrameType.ANSWER, 3, messages.DialedBack("/ip6/2001:db8::7/tcp/31000", (31000,)), []),
        (FrameType.REQUEST, 5, messages.Introduce(SECOND.peer, 6_000), []),
        (FrameType.REQUEST, 2, messages.Meet(FIRST.peer, "/ip4/203.0.113.7/tcp/31000", 5_000), []),
        (FrameType.ANSWER, 2, messages.Meeting(""), []),
        (FrameType.REQUEST, 7, messages.GetAddresses(FIRST.peer, 1_500), []),
        (FrameType.ANSWER, 7, messages.PeerAddresses((ADDRESS, RELAYED)), []),
        (kind.PROGRESS, 5, messages.CallProgress(1, SECOND.peer, "accepted", 4), []),
        (kind.PROGRESS, 5, messages.CallProgress(1, SECOND.peer, "finished", 0), []),
        (kind.PROGRESS, 5, messages.CallProgress(2, FIRST.peer, "finished", 65_536), []),
        (kind.ANSWER, 5, messages.Processed(16.25, 6, 1.5), [boundary]),
        (kind.ANSWER, 5, messages.Processed(16.25, 6, 0.0), []),
        (kind.REFUSAL, 5, messages.Refusal("busy", "no slot free", 250), []),
        (kind.REFUSAL, 5, messages.Refusal("unavailable", "12D3Koo: busy", 0, 3), []),
        (kind.CANCEL, 5, None, []),
        (kind.GOODBYE, 0, None, []),
        (kind.GOODBYE, 0, messages.Refusal("bad-frame", "00000000 begins no frame."), []),
    ]


def sketches() -> list[dict[str, Any]]:
    """Returns the sketches of short arrays: what section 14 of SPEC.md makes of the values of a chunk."""
    seed, made = bytes(range(16)), []
    for chunk, is_square in ((0, False), (0, True), (2**40 + 7, False)):
        values = [(1 if is_square or n % 3 else -1) * (n % 7) * 0.375 for n in range(40)]
        bits = hashlib.shake_128(seed + chunk.to_bytes(8, "little")).digest(5)
        sums = [0.0] * SKETCH_SUMS
        for n, value in enumerate(values):
            term = math.log(max(value, 1e-20)) if is_square else value
            sums[n % SKETCH_SUMS] += -term if bits[n // 8] >> n % 8 & 1 else term
        # Rounded, so that every machine's logarithm makes the same file.
        rounded = [round(total, 6) for total in sums]
        made.append({"seed": seed, "chunk": chunk, "square": is_square, "values": values, "sums": rounded})
    return made


def frames() -> list[dict[str, Any]]:
    """Returns frames in their parts and as bytes."""
    return [
        {
            "type": kind.name,
            "call": call,
            "message": type(message).__name__ if message else None,
            "kind": message.KIND if message else None,
            "fields": message.to_fields() if message else None,
            "tensors": [{"dtype": tensor.dtype, "shape": tensor.shape, "data": tensor.data} for tensor in tensors],
            "bytes": b"".join(encode_frame(kind, call, message, tensors)),
        }
        for kind, call, message, tensors in _frames()
    ]


def _frame(kind: int, call: int, header: Any, payload: bytes = b"", /, **prefix: int) -> bytes:
    data = header if isinstance(header, bytes) else bytes(msgpack.packb(header))
    fields = {"magic": 0xA6, "type": kind, "reserved": 0, "call": call, "header": len(data), "payload": len(payload)}
    return struct.pack("<BBHIII", *(fields | prefix).values()) + data + payload


_PONG: Final = {"unix": 0.0}


def _bad_frames() -> list[tuple[str, str, bytes]]:
    ping, tensor, twice = {"deadline_ms": 1}, ["int8", [4]], b"deadline_ms\x01\xabdeadline_ms\x01\x90"
    no_loss = {"loss_sum": 0.0, "tokens": 1, "busy_ms": 0.0, "path_ms": 0.0, "log_probabilities": [], "metrics": []}
    unknown = {"in_mean": 1, "contributors": 1, "weight": 1.0, "counted": True, "wire": "normal5"}
    goodbye = [6, {"code": "Busy", "text": "", "retry_after_ms": 0, "stage": 0}, []]
    return [
        ("another magic", "bad-frame", _frame(2, 1, [2, ping, []], magic=0xA7)),
        ("type 0", "bad-frame", _frame(0, 1, [2, ping, []])),
        ("type 8", "bad-frame", _frame(8, 1, [2, ping, []])),
        ("reserved bits set", "bad-frame", _frame(2, 1, [2, ping, []], reserved=1)),
        ("a request with call 0", "bad-frame", _frame(2, 0, [2, ping, []])),
        ("a goodbye with a call", "bad-frame", _frame(7, 1, b"")),
        ("a request without header", "bad-frame", _frame(2, 1, b"")),
        ("a cancel with a header", "bad-frame", _frame(6, 1, [2, ping, []])),
        ("a progress with a payload", "bad-frame", _frame(3, 1, [2, ping, [tensor]], b"1234")),
        ("a header beyond its limit", "too-large", _frame(2, 1, b"\xc0", header=65_537)),
        ("an answer's header beyond its limit", "too-large", _frame(4, 1, b"\xc0", header=1_052_673)),
        ("a payload beyond its limit", "too-large", _frame(2, 1, b"\xc0", payload=268_435_457)),
        ("a header that is no msgpack", "bad-message", _frame(2, 1, b"\xc1")),
        ("a header with a byte too many", "bad-message", _frame(2, 1, msgpack.packb([2, ping, []]) + b"\xc0")),
        ("a map where a list belongs", "bad-message", _frame(2, 1, {"kind": 2})),
        ("an answer of an unknown kind", "bad-message", _frame(4, 1, [99, {}, []])),
        ("true as the kind", "bad-message", _frame(2, 1, [True, {}, []])),
        ("a message in another's frame", "bad-message", _frame(4, 1, [2, ping, []])),
        ("a missing field without a usual value", "bad-message", _frame(2, 1, [3, {"stage": 1}, []])),
        ("a field twice", "bad-message", _frame(2, 1, bytes.fromhex("930282ab") + twice)),
        ("a deadline of 0", "bad-message", _frame(2, 1, [2, {"deadline_ms": 0}, []])),
        ("a deadline as float", "bad-message", _frame(2, 1, [2, {"deadline_ms": 5.0}, []])),
        ("a loss that is not finite", "bad-message", _frame(4, 1, [4, no_loss | {"loss_sum": math.inf}, []])),
        ("a refusal word in capitals", "bad-message", _frame(7, 0, goodbye)),
        ("an unknown format of a part", "bad-message", _frame(4, 1, [15, unknown, [tensor]], b"1234")),
        ("nesting too deep", "bad-message", _frame(2, 1, b"\x91" * 17 + b"\xc0")),
        ("an array longer than its bytes", "bad-message", _frame(2, 1, bytes.fromhex("dd00000400c0"))),
        ("an array beyond its limit", "bad-message", _frame(2, 1, [2, [0] * 1025, []])),
        ("an extension type", "bad-message", _frame(2, 1, bytes.fromhex("9302c70305000000") + b"\x90")),
        ("an unknown dtype", "bad-tensor", _frame(4, 1, [7, _PONG, [["float8", [4]]]], b"1234")),
        ("a dimension of 0", "bad-tensor", _frame(4, 1, [7, _PONG, [["int8", [0]]]])),
        ("seven dimensions", "bad-tensor", _frame(4, 1, [7, _PONG, [["int8", [1] * 7]]], b"1")),
        ("nine tensors", "bad-tensor", _frame(4, 1, [7, _PONG, [["int8", [1]]] * 9], b"123456789")),
        ("a shape beyond every limit", "bad-tensor", _frame(4, 1, [7, _PONG, [["int64", [2**31 - 1] * 6]]], b"1234")),
        ("a payload that is not the tensors'", "bad-tensor", _frame(4, 1, [4, no_loss, [tensor]], b"123")),
        ("a tensor where none belongs", "bad-tensor", _frame(4, 1, [7, _PONG, [tensor]], b"1234")),
    ]


def _sealed(payload: Any, signer: Identity = FIRST, run: RunId = RUN) -> bytes:
    data = bytes(msgpack.packb(payload))
    return bytes(msgpack.packb([data, signer.sign(RECORD_TAG + bytes.fromhex(run) + data)]))


def _bad_records() -> list[tuple[str, str, bytes]]:
    fields = Claim(FIRST.peer, Span(0, 1), 1, (), "serving", 0.0).to_fields()
    good = [1, 1, NOW_UNIX + 60, fields]
    stranger = f"/ip4/203.0.113.7/tcp/31000/p2p/{SECOND.peer}"
    unsigned = msgpack.packb([msgpack.packb(good), b""])
    flipped = bytearray(_sealed(good))
    flipped[-1] ^= 1
    return [
        ("unsigned", "bad-signature", unsigned),
        ("a signature with one bit flipped", "bad-signature", bytes(flipped)),
        ("signed by another key", "bad-signature", _sealed(good, SECOND)),
        ("signed for another run", "bad-signature", _sealed(good, run=RunId("00" * 32))),
        (
            "of another peer than the subkey",
            "wrong-key",
            _sealed([1, 1, NOW_UNIX + 60, {**fields, "peer": SECOND.peer}]),
        ),
        ("expired", "expired", _sealed([1, 1, NOW_UNIX, fields])),
        ("living too long", "lives-too-long", _sealed([1, 1, NOW_UNIX + 661, fields])),
        ("too many bytes", "too-large", _sealed(good) + bytes(MAX_RECORD_BYTES)),
        ("no msgpack", "bad-record", b"\xc1"),
        ("another version", "bad-record", _sealed([2, 1, NOW_UNIX + 60, fields])),
        ("an unknown kind", "bad-record", _sealed([1, 6, NOW_UNIX + 60, fields])),
        ("an integer expiry", "bad-record", _sealed([1, 1, int(NOW_UNIX + 60), fields])),
        (
            "an address of another peer",
            "bad-record",
            _sealed([1, 1, NOW_UNIX + 60, {**fields, "addresses": [stranger]}]),
        ),
        (
            "a Unix socket as address",
            "bad-record",
            _sealed([1, 1, NOW_UNIX + 60, {**fields, "addresses": [f"/unix/x/p2p/{FIRST.peer}"]}]),
        ),
        ("a span that runs backwards", "bad-record", _sealed([1, 1, NOW_UNIX + 60, {**fields, "span": [1, 0]}])),
        ("a span without the key's stage", "bad-record", _sealed([1, 1, NOW_UNIX + 60, {**fields, "span": [1, 1]}])),
        (
            "a capacity that is not a number",
            "bad-record",
            _sealed([1, 1, NOW_UNIX + 60, {**fields, "capacity": float("nan")}]),
        ),
    ]


def _bad_manifests() -> list[tuple[str, str, bytes]]:
    values = SIGNED.manifest.model_dump()

    def signed(changed: dict[str, Any], sort: bool = True) -> bytes:
        data = Manifest.canonical(SIGNED.manifest.model_copy(update=changed)) if sort else bytes(msgpack.packb(values))
        return bytes(msgpack.packb([1, data, FIRST.sign(b"agora founder 1\0" + data)]))

    changed = bytes(msgpack.packb([1, SIGNED.manifest.model_copy(update={"seed": 8}).canonical(), SIGNED.signature]))
    return [
        ("changed after it was signed", "bad-manifest", changed),
        ("signed in another form than the canonical", "bad-manifest", signed({}, sort=False)),
        ("without a founder", "bad-manifest", signed({"founder": ""})),
        ("a seed below 0", "bad-manifest", signed({"seed": -1})),
        ("no msgpack", "bad-manifest", b"\xc1"),
    ]


def refused() -> dict[str, Any]:
    """Returns bytes that a reader must refuse, and the code it must refuse them with."""
    claim = {"run": RUN, "key": record_key(RUN, Claim, 0), "subkey": FIRST.peer, "now_unix": NOW_UNIX}
    lists = {"frames": _bad_frames(), "records": _bad_records(), "manifests": _bad_manifests()}
    lists["amendments"] = bad_amendments(SIGNED, FIRST, SECOND, int(NOW_UNIX))
    lists["evaluations"] = bad_evaluations(RUN, FIRST, SECOND, int(NOW_UNIX))
    lists["proofs"] = bad_proofs(RUN, FIRST, SECOND, int(NOW_UNIX))
    rows = {
        name: [{"why": why, "code": code, "bytes": data} for why, code, data in rows] for name, rows in lists.items()
    }
    return {"records_opened_with": claim, **rows}


def build() -> dict[str, str]:
    """Returns the text of every vector file by file name."""
    made = {
        "identities": identities(),
        "manifests": manifests(),
        "invites": invite_vectors(RUN, PROOFS["invite"], (ADDRESS, RELAYED)),
        "records": records(),
        "frames": frames(),
        "tensor_lists": tensor_lists(),
        "tickets": ticket_vectors(RUN, FIRST, SECOND, int(NOW_UNIX)),
        "amendments": amendment_vectors(SIGNED, FIRST, SECOND, int(NOW_UNIX)),
        "evaluations": {
            "run": RUN,
            "turns": turns(RUN, FIRST, SECOND),
            "results": [{"fields": result.to_fields(), "sealed": sealed} for result, sealed in RESULTS],
        },
        "sketches": sketches(),
        "refused": refused(),
    }
    return {f"{name}.json": json.dumps(_json(value), indent=1) + "\n" for name, value in made.items()}


if __name__ == "__main__":
    for name, text in build().items():
        (HERE / name).write_text(text, encoding="ascii")
        sys.stdout.write(f"{HERE / name}\n")
