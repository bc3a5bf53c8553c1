"""Whatever a stranger sends: a typed refusal or a valid object, soon, and within the limits. Never anything else."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import pytest
from agora_protocol.errors import InputError, ManifestError, ProtocolError
from agora_protocol.frames import FrameLimits, Prefix, decode_header, encode_frame, slice_payload
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.records import RECORD_TAG, open_record, seal_record
from agora_protocol.tensor_list import TensorList, bits_to_held, held_to_bits
from agora_protocol.tickets import (
    REVOCATION_TAG,
    TICKET_TAG,
    make_proof,
    open_proof,
    open_revocation,
    seal_revocation,
    seal_ticket,
)

from .mutator import Mutator

pytestmark = pytest.mark.timeout(3600)  # the million cases of the slow tier take minutes

Vectors = Callable[[str], Any]
Case = Callable[[Mutator], tuple[int, str]]  # (bytes tried, outcome: "accepted" or the word of the refusal)
LIMITS = FrameLimits(max_payload_bytes=1 << 20)
MAX_CASE_S = 2.0  # of processor time; the dearest case measured takes some milliseconds
MEMORY_SAMPLE = 400


def read_frame(data: bytes) -> tuple[Any, ...]:
    """As a receiver reads it: every piece judged before the next is taken."""
    prefix = Prefix.parse(data[:16], LIMITS)
    header = data[16 : 16 + prefix.header_bytes]
    message, specs = decode_header(prefix, header)
    return prefix, message, slice_payload(specs, memoryview(data)[16 + prefix.header_bytes :])


def frame_case(seeds: list[bytes], mutator: Mutator) -> tuple[int, str]:
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
    try:
        kind, message, tensors = read_frame(data)
    except ProtocolError as error:
        return len(data), error.code
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


def judge(case: Case, first: int, count: int) -> Counter[str]:
    """Runs cases first..first+count; how often each outcome was seen."""
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        before = time.process_time()
        try:
            _, outcome = case(Mutator(number))
        except BaseException as error:
            error.add_note(f"fuzz case {number} of {case}")
            raise
        assert time.process_time() - before < MAX_CASE_S, f"fuzz case {number} hangs"
        outcomes[outcome] += 1
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


@pytest.fixture(scope="module")
def cases(vectors: Vectors, make_script: Any) -> dict[str, Case]:
    signers = {it.peer: it for it in (make_script.FIRST, make_script.SECOND)}
    manifests = vectors("manifests")
    return {
        "frames": partial(frame_case, [it["bytes"] for it in vectors("frames")]),
        "records": partial(record_case, vectors("records"), signers),
        "manifests": partial(manifest_case, manifests, signers),
        "tensor lists": partial(tensor_list_case, [it["bytes"] for it in vectors("tensor_lists")["lists"]]),
        "bits": bits_case,
        "tickets": partial(ticket_case, *ticket_seeds(vectors("tickets")), [*signers.values()]),
        "proofs": partial(proof_case, vectors("tickets")["run"], [it["bytes"] for it in vectors("tickets")["proofs"]]),
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
}  # fmt: skip
SHARE = {
    "frames": 0.5,
    "records": 0.25,
    "manifests": 0.1,
    "texts": 0.15,
    "tensor lists": 0.1,
    "bits": 0.02,
    "tickets": 0.05,
    "proofs": 0.05,
}


@pytest.mark.parametrize("target", SHARE)
def test_mutated_input_is_accepted_or_refused_by_its_word(target: str, cases: dict[str, Case], fuzz_cases: int) -> None:
    outcomes = judge(cases[target], 0, int(fuzz_cases * SHARE[target]))
    assert outcomes.keys() == EXPECTED[target], outcomes
    assert outcomes.total() == int(fuzz_cases * SHARE[target])


@pytest.mark.parametrize("target", SHARE)
def test_mutated_input_takes_no_memory_beyond_the_limits(target: str, cases: dict[str, Case]) -> None:
    memory(cases[target], MEMORY_SAMPLE)


def test_every_truncation_of_every_frame_and_record_is_refused(vectors: Vectors) -> None:
    for vector in vectors("frames"):
        data = vector["bytes"]
        for cut in range(len(data)):
            with pytest.raises(ProtocolError):
                read_frame(data[:cut])
    for vector in vectors("records"):
        how = {"run": vector["run"], "key": vector["key"], "subkey_peer": vector["subkey"], "now_unix": 0.0}
        for cut in range(len(vector["sealed"])):
            with pytest.raises(ProtocolError):
                open_record(vector["sealed"][:cut], **how)
