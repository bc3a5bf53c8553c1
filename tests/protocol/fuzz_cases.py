"""Cases of fuzzing by number: what a stranger may send, damaged, and what must hold of each. Seeds are the vectors."""

from __future__ import annotations

import contextlib
import gc
import json
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import torch
from agora_protocol.amendments import AMENDMENT_TAG, check_follows, open_amendment, seal_amendment, with_changes
from agora_protocol.codec_names import NUMBER_FORMAT_NAMES
from agora_protocol.errors import AgoraError, AmendmentError, InputError, ManifestError, ProtocolError
from agora_protocol.evaluations import EVALUATION_TAG, open_evaluation, seal_evaluation
from agora_protocol.frames import FrameLimits, FrameType, Prefix, decode_header, encode_frame, slice_payload
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.messages import ANSWER_OF, Message, Refusal, UnknownRequest
from agora_protocol.records import RECORD_TAG, open_record, seal_record
from agora_protocol.tensor_list import TensorList, bits_to_held, held_to_bits
from agora_protocol.tensors import WireTensor, count_bytes
from agora_protocol.tickets import (
    REVOCATION_TAG,
    TICKET_TAG,
    make_proof,
    open_proof,
    open_revocation,
    seal_revocation,
    seal_ticket,
)

from agora.cli.status_command import check_status
from agora.codec import BoundaryCodec
from agora.net.dht.stored_records import BoundedStorage, SignedRecords, dht_id_of
from agora.net.nat.circuit_wire import (
    CircuitMessage,
    HopType,
    decode_hop,
    decode_stop,
    encode_hop,
)
from agora.net.p2pd.hivemind_shim import DHTID
from agora.net.p2pd.multiaddr import decode_multiaddr, encode_multiaddr
from agora.replica.number_formats import NumberFormat
from agora.replica.reducers import reducing_bandwidths
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity, build_status
from agora.swarm.view import View, merge

from .mutator import Mutator
from .receiver import ME, OTHERS, Receiver, valid_messages

Vectors = Callable[[str], Any]
Case = Callable[[Mutator], tuple[int, str]]  # (bytes tried, outcome: "accepted" or the word of the refusal)
LIMITS = FrameLimits(max_payload_bytes=1 << 20)
MAX_CASE_S = 2.0  # of processor time; the dearest case measured takes some milliseconds
MEMORY_SAMPLE = 400
RECEIVER_CASES = 50_000  # after which a receiver is replaced: a failure is repeated from there
FUZZ_CORE = Manifest()
CODECS = ("float32", "bf16", "int8", "int6/int4h", "int3", "top16:bf16")


def read_frame(data: bytes) -> tuple[Any, ...]:
    """As a receiver reads it: every piece judged before the next is taken."""
    prefix = Prefix.parse(data[:16], LIMITS)
    header = data[16 : 16 + prefix.header_bytes]
    message, specs = decode_header(prefix, header)
    return prefix, message, slice_payload(specs, memoryview(data)[16 + prefix.header_bytes :])


def damaged_frame(seeds: list[bytes], mutator: Mutator) -> bytes:
    seed = mutator.choice(seeds)
    prefix = Prefix.parse(seed[:16])
    data = seed
    if prefix.header_bytes and mutator.random() < 0.6:
        end = 16 + prefix.header_bytes
        header = mutator.packed(mutator.value_of(msgpack.unpackb(seed[16:end])))
        payload = seed[end:] if mutator.random() < 0.8 else mutator.bytes_of(seed[end:])
        data = seed[:8] + struct.pack("<II", len(header), len(payload)) + header + payload
    if data == seed or mutator.random() < 0.1:
        data = mutator.bytes_of(data, seeds)
    return data


def frame_case(seeds: list[bytes], mutator: Mutator) -> tuple[int, str]:
    data = damaged_frame(seeds, mutator)
    try:
        kind, message, tensors = read_frame(data)
    except ProtocolError as error:
        return len(data), error.code
    if isinstance(message, UnknownRequest):
        return len(data), "accepted"  # to be refused, and never sent
    again = read_frame(b"".join(encode_frame(kind.type, kind.call, message, tensors)))
    assert again == (kind, message, tensors) or again[0].header_bytes != kind.header_bytes
    assert again[1:] == (message, tensors)
    return len(data), "accepted"


def record_case(seeds: list[dict[str, Any]], signers: dict[str, Identity], mutator: Mutator) -> tuple[int, str]:
    seed = mutator.choice(seeds)
    run, key, peer, now = RunId(seed["run"]), seed["key"], seed["subkey"], seed["now_unix"]
    data = seed["sealed"]
    match mutator.randrange(4):
        case 0:
            data = mutator.bytes_of(data)
        case 1:
            key = mutator.text_of(key)
        case _:
            payload = mutator.packed(mutator.value_of(msgpack.unpackb(msgpack.unpackb(data)[0])))
            signature = mutator.choice([*signers.values()]).sign(RECORD_TAG + bytes.fromhex(run) + payload)
            data = msgpack.packb([payload, signature])
    now += mutator.choice((0, 0, 0, 60, 61, -600, -601, -700))
    try:
        record = open_record(data, run=run, key=key, subkey_peer=peer, now_unix=now)
    except ProtocolError as error:
        return len(data), error.code
    sealed = seal_record(record, run, signers[peer], now + 1)
    assert open_record(sealed, run=run, key=key, subkey_peer=peer, now_unix=now) == record
    return len(data), "accepted"


def manifest_case(seeds: list[dict[str, Any]], signers: dict[str, Identity], mutator: Mutator) -> tuple[int, str]:
    seed = mutator.choice(seeds)
    data = seed["signed"]
    if mutator.random() < 0.7:
        canonical = mutator.packed(mutator.value_of(msgpack.unpackb(seed["canonical"])))
        data = msgpack.packb([1, canonical, signers[seed["founder"]].sign(b"agora founder 1\0" + canonical)])
    else:
        data = mutator.bytes_of(data)
    try:
        signed = SignedManifest.from_bytes(data)
    except ManifestError as error:
        assert len(str(error)) < 1000
        return len(data), error.code
    assert SignedManifest.from_toml(signed.to_toml()).to_bytes() == data == signed.to_bytes()
    return len(data), "accepted"


def text_case(invites: list[str], tomls: list[str], mutator: Mutator) -> tuple[int, str]:
    if mutator.random() < 0.8:
        text = mutator.text_of(mutator.choice(invites))
        try:
            invite = Invite.parse(text)
        except InputError as error:
            assert len(str(error)) < 1000
            return len(text), error.code
        assert Invite.parse(str(invite)) == invite
        return len(text), "accepted"
    text = mutator.text_of(mutator.choice(tomls))
    try:
        manifest = Manifest.from_toml(text, "run.toml")
    except ManifestError as error:
        assert len(str(error)) < 1000
        return len(text), error.code
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    return len(text), "accepted"


def tensor_list_case(seeds: list[bytes], mutator: Mutator) -> tuple[int, str]:
    seed = mutator.choice(seeds)
    data = seed
    while data == seed and mutator.random() < 0.9:
        if mutator.random() < 0.5:
            data = mutator.packed(mutator.value_of(msgpack.unpackb(seed)))
        else:
            data = mutator.bytes_of(data, seeds)
    try:
        made = TensorList.from_bytes(data)
    except ProtocolError as error:
        assert len(str(error)) < 1000
        return len(data), error.code
    assert made.to_bytes() == data
    assert all(len(it.hashes) == 32 * it.piece_count and it.piece_bytes(it.piece_count - 1) > 0 for it in made.tensors)
    return len(data), "accepted"


def ticket_case(
    run: RunId, seeds: list[tuple[bytes, bytes]], signers: list[Identity], mutator: Mutator
) -> tuple[int, str]:
    """A proof of one ticket, or a revocation: mutated as bytes, or its fields, signed again by some key."""
    tag, data = mutator.choice(seeds)
    if mutator.random() < 0.3:
        data = mutator.bytes_of(data, [seed for _, seed in seeds])
    elif mutator.random() < 0.9:
        payload = mutator.packed(mutator.value_of(msgpack.unpackb(msgpack.unpackb(data)[0])))
        data = msgpack.packb([payload, mutator.choice(signers).sign(tag + bytes.fromhex(run) + payload)])
    try:
        if tag == REVOCATION_TAG:
            revocation = open_revocation(data, run)
            again = [seal_revocation(revocation, run, key) for key in signers if key.peer == revocation.issuer]
            assert [open_revocation(sealed, run) for sealed in again] == [revocation] * len(again)
        else:
            (ticket,) = open_proof(msgpack.packb([data]), run)
            again = [seal_ticket(ticket, run, key) for key in signers if key.peer == ticket.issuer]
            assert [open_proof(make_proof(sealed), run) for sealed in again] == [(ticket,)] * len(again)
    except ProtocolError as error:
        assert len(str(error)) < 1000
        return len(data), error.code
    return len(data), "accepted"


def amendment_case(run: RunId, seeds: list[bytes], signers: list[Identity], mutator: Mutator) -> tuple[int, str]:
    """An amendment, mutated as bytes, or its fields or new values, signed again by some key."""
    data = mutator.choice(seeds)
    if mutator.random() < 0.3:
        data = mutator.bytes_of(data, seeds)
    elif mutator.random() < 0.9:
        version, fields = msgpack.unpackb(msgpack.unpackb(data)[0])
        if mutator.random() < 0.5:
            fields["changes"] = mutator.packed(mutator.value_of(msgpack.unpackb(fields["changes"])))
            payload = msgpack.packb([version, fields])
        else:
            payload = mutator.packed(mutator.value_of([version, fields]))
        data = msgpack.packb([payload, mutator.choice(signers).sign(AMENDMENT_TAG + bytes.fromhex(run) + payload)])
    try:
        opened = open_amendment(data, run)
        again = [seal_amendment(opened.amendment, run, key) for key in signers if key.peer == opened.amendment.issuer]
        assert [open_amendment(sealed, run).hash for sealed in again] == [opened.hash] * len(again)
        check_follows(opened.amendment, FUZZ_CORE, [])
    except (ProtocolError, AmendmentError) as error:
        assert len(str(error)) < 1500
        return len(data), error.code if isinstance(error, ProtocolError) else "refused"
    return len(data), "accepted"


def evaluation_case(run: RunId, seeds: list[bytes], signers: list[Identity], mutator: Mutator) -> tuple[int, str]:
    """A result of an evaluation, mutated as bytes, or its fields, signed again by some key."""
    data = mutator.choice(seeds)
    if mutator.random() < 0.3:
        data = mutator.bytes_of(data, seeds)
    elif mutator.random() < 0.9:
        payload = mutator.packed(mutator.value_of(msgpack.unpackb(msgpack.unpackb(data)[0])))
        data = msgpack.packb([payload, mutator.choice(signers).sign(EVALUATION_TAG + bytes.fromhex(run) + payload)])
    try:
        opened = open_evaluation(data, run)
        again = [seal_evaluation(opened, run, key) for key in signers if key.peer == opened.issuer]
        assert [open_evaluation(sealed, run) for sealed in again] == [opened] * len(again)
    except ProtocolError as error:
        assert len(str(error)) < 1500
        return len(data), error.code
    return len(data), "accepted"


def proof_case(run: RunId, seeds: list[bytes], mutator: Mutator) -> tuple[int, str]:
    """A whole proof, mutated as bytes or as a list of tickets."""
    data = mutator.choice(seeds)
    if mutator.random() < 0.5:
        data = mutator.packed(mutator.value_of(msgpack.unpackb(data)))
    elif mutator.random() < 0.9:
        data = mutator.bytes_of(data, seeds)
    try:
        assert len(open_proof(data, run)) <= 3
    except ProtocolError as error:
        return len(data), error.code
    return len(data), "accepted"


def bits_case(mutator: Mutator) -> tuple[int, str]:
    count = mutator.randint(1, 100)
    bits = mutator.randbytes(mutator.choice([-(-count // 8)] * 4 + [0, 1, 13]))
    try:
        held = bits_to_held(bits, count)
    except ProtocolError as error:
        return len(bits), error.code
    assert held_to_bits(held, count) == bits
    return len(bits), "accepted"


class MessageCases:
    """Frames whose message one long-lived receiver handles, if they can be read: tensors and fields are damaged."""

    def __init__(self, run: RunId, founder: Identity, frames: list[bytes]) -> None:
        self._mutator = Mutator(0)
        self._seeds: dict[type[Message], list[bytes]] = {}
        for seed in frames:
            _, message, _ = read_frame(seed)
            if message is not None:
                self._seeds.setdefault(type(message), []).append(seed)
        for message, tensors in valid_messages(run):
            frame = b"".join(
                encode_frame(message.FRAMES[0], int(message.FRAMES[0] != FrameType.HELLO), message, tensors)
            )
            self._seeds.setdefault(type(message), []).append(frame)
        self._kinds = [*self._seeds]
        self._make = lambda: Receiver(run, founder.peer, self._answer)
        self._receiver = self._make()
        self._taken = 0

    def __call__(self, mutator: Mutator) -> tuple[int, str]:
        self._mutator = mutator
        self._taken += 1
        if self._taken % RECEIVER_CASES == 0:
            self._receiver.close()
            self._receiver = self._make()
        data = self._damaged(mutator.choice(self._kinds))
        try:
            _, message, tensors = read_frame(data)
            if message is not None:
                self._receiver.take(mutator.choice([ME, *OTHERS]), message, tensors, mutator.uniform(0.0, 2.0))
        except AgoraError as error:
            assert len(str(error)) < 2000
            return len(data), error.code
        return len(data), "accepted"

    def _damaged(self, kind: type[Message]) -> bytes:
        seeds, mutator = self._seeds[kind], self._mutator
        return mutator.choice(seeds) if mutator.random() < 0.2 else damaged_fields(mutator.choice(seeds), mutator)

    def _answer(self, request: Message) -> tuple[Message, list[Any]]:
        kind = ANSWER_OF.get(type(request), type(request))
        kind = self._mutator.choice((kind, kind, kind, kind, Refusal, *self._kinds))
        _, message, tensors = read_frame(self._damaged(kind))
        if message is None:
            raise ProtocolError("bad-message", "an answer without a message")
        return message, tensors


def damaged_fields(seed: bytes, mutator: Mutator) -> bytes:
    """A frame of which one field is another value of its kind, or its tensors other bytes, dtypes, shapes."""
    prefix = Prefix.parse(seed[:16])
    end = 16 + prefix.header_bytes
    kind, fields, specs = msgpack.unpackb(seed[16:end])
    payload = seed[end:]
    match mutator.randrange(4):
        case 0 if payload:
            damaged = mutator.bytes_of(payload)
            payload = (damaged + payload)[: len(payload)]
        case 1 if specs:
            specs = mutator.value_of(specs)
        case _ if fields:
            name = mutator.choice([*fields])
            fields = fields | {name: mutator.like(fields[name])}
    if mutator.random() < 0.02:
        damaged = mutator.doubled_key(fields) if fields and mutator.random() < 0.7 else mutator.buried()
        header = b"\x93" + msgpack.packb(kind) + damaged + msgpack.packb(specs)
    else:
        header = msgpack.packb([kind, fields, specs])
    return seed[:8] + struct.pack("<II", len(header), len(payload)) + header + payload


class DirectoryCases:
    """Records as nodes of the DHT give them: verified, stored, merged into a view, shown as a status."""

    def __init__(self, seeds: list[dict[str, Any]], signers: dict[str, Identity]) -> None:
        self._seeds, self._signers = seeds, signers
        self._now = 0.0
        run = RunId(seeds[0]["run"])
        self._records = SignedRecords(run, 64, lambda: self._now)
        self._stored = BoundedStorage(run)
        self._view = View()
        self._identity = RunIdentity(run, "fuzz", 4, 1000)

    def __call__(self, mutator: Mutator) -> tuple[int, str]:
        seed = mutator.choice(self._seeds)
        run, peer = RunId(seed["run"]), seed["subkey"]
        self._now = seed["now_unix"] + mutator.choice((0, 0, 0, 60, -600))
        version, kind, expires, fields = msgpack.unpackb(msgpack.unpackb(seed["sealed"])[0])
        name = mutator.choice([*fields])
        fields |= {name: mutator.like(fields[name])}
        payload = mutator.packed([version, kind, expires, fields])
        signature = self._signers[peer].sign(RECORD_TAG + bytes.fromhex(run) + payload)
        packed = msgpack.packb(msgpack.packb([payload, signature]))
        key, subkey = dht_id_of(seed["key"]), msgpack.packb(peer)
        if mutator.random() < 0.05:
            packed, subkey = mutator.bytes_of(packed), mutator.bytes_of(subkey)
        try:
            record = self._records.verify(key, subkey, packed, expires)
        except ProtocolError as error:
            return len(packed), error.code
        self._stored.store(DHTID.from_bytes(key), packed, time.time() + 60.0, subkey=peer)
        self._view = merge(self._view, [record], self._now, 60.0)
        if mutator.random() < 0.8:
            return len(packed), "accepted"
        shown = build_status(self._view, self._identity, Health("OK", "", None), self._now)
        check_status(json.loads(json.dumps(shown, allow_nan=False)))
        reducing_bandwidths({it.peer: (it.bandwidth, it.reachability) for it in self._view.peers.values()})
        return len(packed), "accepted"


Decode = Callable[[list[WireTensor]], torch.Tensor]


def codec_seeds() -> list[tuple[list[WireTensor], Decode]]:
    """Encoded values of each boundary codec and number format, with what decodes them."""
    shape = (2, 4, 64)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    seeds: list[tuple[list[WireTensor], Decode]] = []
    for codec in map(BoundaryCodec, CODECS):
        for direction in ("forward", "backward"):
            decode = lambda made, codec=codec, direction=direction: codec.decode(made[0], shape, direction)  # noqa: E731
            seeds.append(([codec.encode(values, direction)], decode))
    for wire in NUMBER_FORMAT_NAMES:
        format_ = NumberFormat(wire)
        decode = partial(format_.decode, numel=values.numel())
        seeds.append((format_.encode(values.view(-1)), decode))
    return seeds


def codec_case(seeds: list[tuple[list[WireTensor], Decode]], mutator: Mutator) -> tuple[int, str]:
    """A boundary or a shard as some codec or number format sends it, with other bytes, dtype or shape."""
    encoded, decode = mutator.choice(seeds)
    damaged = damaged_tensors(encoded, mutator)
    size = sum(tensor.nbytes for tensor in damaged)
    try:
        decoded = decode(damaged)
    except ProtocolError as error:
        return size, error.code
    assert decoded.numel() == 2 * 4 * 64
    return size, "accepted"


def damaged_tensors(tensors: list[WireTensor], mutator: Mutator) -> list[WireTensor]:
    at = mutator.randrange(len(tensors))
    old = tensors[at]
    match mutator.randrange(4):
        case 0:
            dtype = mutator.choice(("float32", "bf16", "int8", "uint8", "int16"))
            made = (
                [WireTensor(dtype, (old.nbytes // count_bytes(dtype, (1,)),), old.data)] if old.nbytes % 4 == 0 else []
            )
        case 1:
            cut = mutator.randint(1, old.nbytes)
            made = [WireTensor("uint8", (cut,), old.data[:cut])]
        case _:
            data = (mutator.bytes_of(bytes(old.data)) + bytes(old.data))[: old.nbytes]
            made = [WireTensor(old.dtype, old.shape, memoryview(data))]
    return [*tensors[:at], *made, *tensors[at + 1 :]] or [old]


def circuit_case(seeds: list[bytes], mutator: Mutator) -> tuple[int, str]:
    """A message of libp2p's relays, or an address in bytes."""
    data = mutator.bytes_of(mutator.choice(seeds), seeds)
    try:
        mutator.choice((decode_hop, decode_stop, decode_multiaddr))(data)
    except (AgoraError, ValueError):
        return len(data), "bad-circuit"
    return len(data), "accepted"


def judge(case: Case, first: int, count: int) -> Counter[str]:
    """Runs cases first..first+count; how often each outcome was seen."""
    outcomes: Counter[str] = Counter()
    # What a whole run of tests has left would be looked through by a garbage collection in the middle of a case.
    gc.freeze()
    try:
        for number in range(first, first + count):
            before = time.process_time()
            try:
                _, outcome = case(Mutator(number))
            except BaseException as error:
                error.add_note(f"fuzz case {number} of {case}")
                raise
            assert time.process_time() - before < MAX_CASE_S, f"fuzz case {number} hangs"
            outcomes[outcome] += 1
    finally:
        gc.unfreeze()
    return outcomes


def memory(case: Case, count: int) -> None:
    """No case takes memory beyond its own bytes several times over and a fixed allowance."""
    case(Mutator(0))
    tracemalloc.start()
    try:
        for number in range(count):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            size, _ = case(Mutator(number))
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < 2_000_000 + 20 * size, f"fuzz case {number} took {taken} bytes for {size}"
    finally:
        tracemalloc.stop()


def ticket_seeds(vector: dict[str, Any]) -> tuple[RunId, list[tuple[bytes, bytes]]]:
    """The run, and its sealed tickets and revocations, each with the tag that its signature begins with."""
    tickets = [(TICKET_TAG, sealed) for it in vector["proofs"] for sealed in msgpack.unpackb(it["bytes"])]
    return vector["run"], tickets + [(REVOCATION_TAG, it["sealed"]) for it in vector["revocations"]]


def circuit_seeds(make_script: Any) -> list[bytes]:
    message = CircuitMessage(HopType.CONNECT, make_script.FIRST.peer, 100)
    return [encode_hop(message, 5)[1:], encode_hop(message)[1:], encode_multiaddr(make_script.RELAYED)]


def make_cases(vectors: Vectors, make_script: Any) -> dict[str, Case]:
    """Every kind of case by name. make_script: protocol/vectors/make.py, which has the keys that signed the vectors."""
    signers = {it.peer: it for it in (make_script.FIRST, make_script.SECOND)}
    with contextlib.suppress(ManifestError):  # what the first refusal of values imports and caches is no case's memory
        with_changes(FUZZ_CORE, {"optimizer.learning_rate": -1.0})
    manifests, signed = vectors("manifests"), make_script.SIGNED
    return {
        "frames": partial(frame_case, [it["bytes"] for it in vectors("frames")]),
        "records": partial(record_case, vectors("records"), signers),
        "manifests": partial(manifest_case, manifests, signers),
        "tensor lists": partial(tensor_list_case, [it["bytes"] for it in vectors("tensor_lists")["lists"]]),
        "bits": bits_case,
        "tickets": partial(ticket_case, *ticket_seeds(vectors("tickets")), [*signers.values()]),
        "proofs": partial(proof_case, vectors("tickets")["run"], [it["bytes"] for it in vectors("tickets")["proofs"]]),
        "amendments": partial(
            amendment_case, signed.run_id, [it["sealed"] for it in vectors("amendments")["chain"]], [*signers.values()]
        ),
        "evaluations": partial(
            evaluation_case,
            signed.run_id,
            [it["sealed"] for it in vectors("evaluations")["results"]],
            [*signers.values()],
        ),
        "messages": MessageCases(signed.run_id, make_script.FIRST, [it["bytes"] for it in vectors("frames")]),
        "directory": DirectoryCases(vectors("records"), signers),
        "codecs": partial(codec_case, codec_seeds()),
        "circuits": partial(circuit_case, circuit_seeds(make_script)),
        "texts": partial(text_case, [it["text"] for it in vectors("invites")], [it["toml"] for it in manifests]),
    }


EXPECTED = {
    "frames": {"accepted", "bad-frame", "too-large", "bad-message", "bad-tensor"},
    "records": {
        "accepted", "bad-record", "too-large", "bad-signature", "wrong-key", "wrong-run", "expired", "lives-too-long",
    },
    "manifests": {"accepted", "bad-manifest"},
    "texts": {"accepted", "bad-manifest", "bad-input"},
    "tensor lists": {"accepted", "bad-message"},
    "bits": {"accepted", "bad-tensor"},
    "tickets": {"accepted", "bad-ticket", "bad-signature", "too-large"},
    "proofs": {"accepted", "bad-ticket", "bad-signature", "too-large"},
    "amendments": {"accepted", "bad-amendment", "bad-signature", "refused"},
    "evaluations": {"accepted", "bad-record", "bad-signature"},
    "messages": {"accepted", "bad-message", "bad-tensor", "refused", "not-admitted", "wrong-run"},
    "directory": {"accepted", "bad-record"},
    "codecs": {"accepted", "bad-tensor"},
    "circuits": {"accepted", "bad-circuit"},
}  # fmt: skip
# What a few thousand cases may lack.
RARE = {
    "amendments": {"too-large"},
    "evaluations": {"too-large"},
    "messages": {
        "bad-ticket",
        "bad-amendment",
        "bad-signature",
        "wrong-version",
        "too-large",
        "busy",
        "failed",
        "unavailable",
        "deadline",
        "not-my-stage",
    },
    "directory": {"wrong-run", "wrong-key", "too-large", "bad-signature", "expired", "lives-too-long"},
}
SHARE = {
    "frames": 0.5,
    "records": 0.25,
    "manifests": 0.1,
    "texts": 0.15,
    "tensor lists": 0.1,
    "bits": 0.02,
    "tickets": 0.05,
    "proofs": 0.05,
    "amendments": 0.05,
    "evaluations": 0.05,
    "messages": 0.4,
    "directory": 0.15,
    "codecs": 0.15,
    "circuits": 0.05,
}
