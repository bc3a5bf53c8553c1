"""The vectors: what we write is what they hold, what they hold is what we read, and what they forbid we refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from agora_protocol import messages
from agora_protocol.amendments import Amendment, manifest_at, open_amendment, seal_amendment
from agora_protocol.directory_shards import shard_hash
from agora_protocol.errors import ManifestError, ProtocolError
from agora_protocol.evaluations import Evaluation, evaluator_rank, open_evaluation, seal_evaluation
from agora_protocol.frames import FrameType, Prefix, decode_header, encode_frame, slice_payload
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import peer_name
from agora_protocol.invite import Invite
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.messages import KINDS
from agora_protocol.records import RECORDS, open_record, seal_record
from agora_protocol.tensor_list import TensorList, bits_to_held, held_to_bits
from agora_protocol.tensors import WireTensor
from agora_protocol.tickets import InviteTicket, Revocation, Ticket, open_proof, open_revocation, run_token

from .conftest import PROTOCOL

Vectors = Callable[[str], Any]


def test_the_script_makes_the_files_byte_for_byte(make_script: ModuleType) -> None:
    made = make_script.build()
    assert {it.name for it in (PROTOCOL / "vectors").glob("*.json")} == made.keys()
    for name, text in made.items():
        assert (PROTOCOL / "vectors" / name).read_text(encoding="ascii") == text, (
            f"run protocol/vectors/make.py ({name})"
        )


def test_identities(vectors: Vectors) -> None:
    for vector in vectors("identities"):
        identity = Identity(vector["private"])
        assert identity.peer == vector["peer"] and identity.key_file_bytes() == vector["key_file"]
        assert identity.sign(vector["message"]) == vector["signature"]
        assert verify(vector["peer"], vector["message"], vector["signature"])
        assert peer_name(vector["peer"]) == vector["name"]


def test_manifests(vectors: Vectors) -> None:
    for vector in vectors("manifests"):
        signed = SignedManifest.from_toml(vector["toml"])
        assert signed == SignedManifest.from_bytes(vector["signed"], vector["run_id"])
        assert signed.manifest.canonical() == vector["canonical"] and signed.to_bytes() == vector["signed"]
        assert (signed.founder, signed.signature) == (vector["founder"], vector["signature"])
        assert signed.to_toml() == vector["toml"] and Manifest.from_toml(vector["toml"]).run_id == vector["run_id"]
        assert (
            tuple(tuple(signed.manifest.layers_of(k)) for k in range(signed.manifest.stage_count)) == vector["layers"]
        )
        assert signed.manifest.max_payload_bytes == vector["max_payload_bytes"]


def test_invites(vectors: Vectors) -> None:
    for vector in vectors("invites"):
        invite = Invite(vector["run"], vector["addresses"], vector["name"], vector["ticket"])
        assert Invite.parse(vector["text"]) == invite and str(invite) == vector["text"]


def test_tickets(vectors: Vectors, make_script: ModuleType) -> None:
    vector, second = vectors("tickets"), make_script.SECOND
    run, proofs = vector["run"], {it["name"]: it["bytes"] for it in vector["proofs"]}
    for it in vector["proofs"]:
        tickets = tuple(Ticket(**fields) for fields in it["tickets"])
        assert open_proof(it["bytes"], run) == tickets
    invite = InviteTicket(proofs["invite"], vector["invite"]["secret"])
    assert str(invite) == vector["invite"]["text"] and InviteTicket.parse(str(invite)) == invite
    assert invite.proof_for(second.peer, run) == proofs["bearer"]
    for it in vector["revocations"]:
        assert open_revocation(it["sealed"], run) == Revocation(**it["fields"])
    hello = vector["hello"]
    assert run_token(run, hello["salt"], hello["sender"], hello["receiver"]) == hello["run"]


def test_amendments(vectors: Vectors, make_script: ModuleType) -> None:
    vector, keys = vectors("amendments"), {it.peer: it for it in (make_script.FIRST, make_script.SECOND)}
    run, chain = vector["run"], []
    for it in vector["chain"]:
        opened = open_amendment(it["sealed"], run)
        assert opened.amendment == Amendment(**it["fields"]) and opened.hash == it["hash"]
        assert opened.amendment.values == it["values"]
        assert seal_amendment(opened.amendment, run, keys[opened.amendment.issuer]) == it["sealed"]
        chain.append(opened.amendment)
    core = SignedManifest.from_bytes(make_script.SIGNED.to_bytes(), run).manifest
    assert core.canonical() == vector["core"]
    for it in vector["manifests"]:
        assert manifest_at(core, chain, it["step"]).canonical() == it["canonical"]
    assert len({it["canonical"] for it in vector["manifests"]}) == 4


def test_evaluations(vectors: Vectors, make_script: ModuleType) -> None:
    vector, keys = vectors("evaluations"), {it.peer: it for it in (make_script.FIRST, make_script.SECOND)}
    for it in vector["results"]:
        opened = open_evaluation(it["sealed"], vector["run"])
        assert opened == Evaluation(**it["fields"])
        assert seal_evaluation(opened, vector["run"], keys[opened.issuer]) == it["sealed"]
    for it in vector["turns"]:
        for peer, rank in it["ranks"]:
            number = it["round"].to_bytes(8, "big")
            text = b"agora evaluator 1\0" + bytes.fromhex(vector["run"]) + number + peer.encode()
            assert evaluator_rank(vector["run"], it["round"], peer) == hashlib.sha256(text).digest() == rank


def test_records(vectors: Vectors, make_script: ModuleType) -> None:
    signers = {it.peer: it for it in (make_script.FIRST, make_script.SECOND)}
    seen = set()
    for vector in vectors("records"):
        record = RECORDS[vector["kind"]].from_fields(vector["fields"])
        how = {
            "run": vector["run"],
            "key": vector["key"],
            "subkey_peer": vector["subkey"],
            "now_unix": vector["now_unix"],
        }
        assert open_record(vector["sealed"], **how) == record
        assert f"{shard_hash(vector['run'], vector['subkey']):016x}" == vector["hash"]
        assert seal_record(record, vector["run"], signers[vector["subkey"]], vector["expires_unix"]) == vector["sealed"]
        seen.add(type(record))
    assert seen == {*RECORDS.values()}


def test_frames(vectors: Vectors) -> None:
    seen = set()
    for vector in vectors("frames"):
        data, kind = vector["bytes"], FrameType[vector["type"]]
        prefix = Prefix.parse(data[:16])
        message, specs = decode_header(prefix, data[16 : 16 + prefix.header_bytes])
        tensors = slice_payload(specs, data[16 + prefix.header_bytes :])
        assert (prefix.type, prefix.call) == (kind, vector["call"])
        assert message == (messages.message_from_fields(vector["kind"], vector["fields"]) if vector["kind"] else None)
        assert tensors == [WireTensor(it["dtype"], it["shape"], memoryview(it["data"])) for it in vector["tensors"]]
        assert b"".join(encode_frame(kind, vector["call"], message, tensors)) == data
        seen |= {kind, type(message)}
    assert seen == {*FrameType, *KINDS.values(), type(None)}


def test_tensor_lists(vectors: Vectors) -> None:
    vector: dict[str, Any]
    for vector in vectors("tensor_lists")["lists"]:
        made = TensorList.from_bytes(vector["bytes"])
        assert tuple((it.name, it.dtype, it.shape, it.hashes) for it in made.tensors) == vector["tensors"]
        sizes = tuple(tuple(it.piece_bytes(piece) for piece in range(it.piece_count)) for it in made.tensors)
        assert sizes == vector["piece_bytes"]
        assert made.to_bytes() == vector["bytes"] and made.digest == vector["tensors_hash"]
        assert hashlib.sha256(vector["bytes"]).hexdigest() == vector["tensors_hash"]
        count = len(made.tensors)
        assert held_to_bits(vector["held"], count) == vector["bits"]
        assert sorted(bits_to_held(vector["bits"], count)) == list(vector["held"])
    for vector in vectors("tensor_lists")["refused"]:
        with pytest.raises(ProtocolError) as caught:
            TensorList.from_bytes(vector["bytes"])
        assert caught.value.code == vector["code"], (vector["why"], str(caught.value))


def test_what_must_be_refused_is_refused_with_its_word(vectors: Vectors) -> None:
    refused = vectors("refused")
    how = refused["records_opened_with"]
    codes = set()
    for vector in refused["frames"]:
        data = vector["bytes"]
        with pytest.raises(ProtocolError) as caught:
            prefix = Prefix.parse(data[:16])
            _, specs = decode_header(prefix, data[16 : 16 + prefix.header_bytes])
            slice_payload(specs, data[16 + prefix.header_bytes :])
        assert caught.value.code == vector["code"], (vector["why"], str(caught.value))
        codes.add(vector["code"])
    for vector in refused["proofs"]:
        with pytest.raises(ProtocolError) as caught:
            open_proof(vector["bytes"], how["run"])
        assert caught.value.code == vector["code"], (vector["why"], str(caught.value))
        codes.add(vector["code"])
    for vector in refused["evaluations"]:
        with pytest.raises(ProtocolError) as caught:
            open_evaluation(vector["bytes"], how["run"])
        assert caught.value.code == vector["code"], vector["why"]
    for vector in refused["amendments"]:
        with pytest.raises(ProtocolError) as caught:
            open_amendment(vector["bytes"], how["run"])
        assert caught.value.code == vector["code"], (vector["why"], str(caught.value))
        codes.add(vector["code"])
    for vector in refused["records"]:
        with pytest.raises(ProtocolError) as caught:
            open_record(
                vector["bytes"], run=how["run"], key=how["key"], subkey_peer=how["subkey"], now_unix=how["now_unix"]
            )
        assert caught.value.code == vector["code"], (vector["why"], str(caught.value))
        codes.add(vector["code"])
    for vector in refused["manifests"]:
        with pytest.raises(ManifestError):
            SignedManifest.from_bytes(vector["bytes"])
    assert codes == {
        "bad-frame", "too-large", "bad-message", "bad-tensor", "bad-record", "bad-signature", "wrong-key", "expired",
        "lives-too-long", "bad-ticket", "bad-amendment",
    }  # fmt: skip
