"""The vectors of amendments: a chain of four, what the manifest is at some steps, what is refused; for `make.py`."""

from __future__ import annotations

from typing import Any

import msgpack
from agora_protocol import messages
from agora_protocol.amendments import AMENDMENT_TAG, Amendment, manifest_at, open_amendment, seal_amendment
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest
from agora_protocol.packing import pack_canonical
from agora_protocol.tickets import TICKET_TAG
from ticket_vectors import proofs

STEPS = (0, 99, 100, 159, 160, 199, 200, 2000)

AGREEMENT = {
    "averaging.aggregation": "clip",
    "averaging.fraction": 0.1,
    "averaging.gradient_wire": "normal3",
    "boundary.codec": "int8/int4",
    "checkpoint.every": 50,
    "schedule.staleness": 0.25,
}


def chain(signed: SignedManifest, founder: Identity, other: Identity, now_unix: int) -> list[bytes]:
    """Returns a chain of sealed amendments: two of the founder, one of a delegate, and another of the founder."""
    proof = proofs(signed.run_id, founder, other, now_unix + 86_400)["delegate"]
    previous, sealed = bytes.fromhex(signed.run_id), list[bytes]()
    for issuer, signed_step, from_step, values in (
        (founder, 40, 100, {"optimizer.learning_rate": 0.001, "optimizer.total_steps": 4000}),
        (founder, 120, 160, {"optimizer.target_tokens": 32_768}),
        (other, 121, 160, {"optimizer.minimum_ratio": 0.0, "optimizer.warmup_steps": 10}),
        (founder, 130, 200, AGREEMENT),
    ):
        number, shown = len(sealed) + 1, proof if issuer is other else b""
        changes = pack_canonical(values)
        amendment = Amendment(issuer.peer, number, previous, signed_step, from_step, now_unix + number, changes, shown)
        sealed.append(seal_amendment(amendment, signed.run_id, issuer))
        previous = open_amendment(sealed[-1], signed.run_id).hash
    return sealed


def amendment_vectors(signed: SignedManifest, founder: Identity, other: Identity, now_unix: int) -> dict[str, Any]:
    """Returns the chain with its hashes, and the manifest's canonical bytes at steps before, between and after."""
    opened = [open_amendment(sealed, signed.run_id) for sealed in chain(signed, founder, other, now_unix)]
    amendments = [each.amendment for each in opened]
    return {
        "run": signed.run_id,
        "core": signed.manifest.canonical(),
        "chain": [
            {
                "fields": each.amendment.to_fields(),
                "values": each.amendment.values,
                "sealed": each.sealed,
                "hash": each.hash,
            }
            for each in opened
        ],
        "manifests": [
            {"step": step, "canonical": manifest_at(signed.manifest, amendments, step).canonical()} for step in STEPS
        ],
    }


def amendment_frames(signed: SignedManifest, founder: Identity, other: Identity, now_unix: int) -> list[Any]:
    """Returns a frame of each message about amendments: type, call, message, tensors."""
    kind, made = messages.FrameType, tuple(chain(signed, founder, other, now_unix))
    return [
        (kind.REQUEST, 11, messages.ShareAmendments(made), []),
        (kind.ANSWER, 11, messages.TookAmendments(2, 1, "it is signed by another peer"), []),
        (kind.REQUEST, 13, messages.GetAmendments(bytes(range(32))), []),
        (kind.ANSWER, 13, messages.KnownAmendments(made[:1]), []),
        (kind.ANSWER, 13, messages.KnownAmendments(()), []),
    ]


def bad_amendments(
    signed: SignedManifest, founder: Identity, other: Identity, now_unix: int
) -> list[tuple[str, str, bytes]]:
    """Returns amendments that must be refused: what is wrong, the code, the bytes."""
    run, good = signed.run_id, chain(signed, founder, other, now_unix)[0]
    fields = open_amendment(good, run).amendment.to_fields()

    def sealed(
        changed: dict[str, Any], signer: Identity = founder, tag: bytes = AMENDMENT_TAG, version: int = 1
    ) -> bytes:
        data = bytes(msgpack.packb([version, {**fields, **changed}]))
        return bytes(msgpack.packb([data, signer.sign(tag + bytes.fromhex(run) + data)]))

    def changing(values: Any) -> bytes:
        return sealed({"changes": bytes(msgpack.packb(values))})

    unsorted = {"optimizer.total_steps": 4000, "optimizer.learning_rate": 0.001}
    return [
        ("signed by another key", "bad-signature", sealed({}, other)),
        ("signed as a ticket", "bad-signature", sealed({}, tag=TICKET_TAG)),
        ("unsigned", "bad-signature", bytes(msgpack.packb([msgpack.unpackb(good)[0], b""]))),
        ("another version", "bad-amendment", sealed({}, version=2)),
        ("number 0", "bad-amendment", sealed({"number": 0})),
        ("a number beyond the chain's limit", "bad-amendment", sealed({"number": 65})),
        ("a short hash", "bad-amendment", sealed({"previous": bytes(31)})),
        ("from step 0", "bad-amendment", sealed({"from_step": 0})),
        ("changing nothing", "bad-amendment", changing({})),
        ("changing the core", "bad-amendment", changing({"model.layers": 8})),
        ("changes that are no map", "bad-amendment", changing([1])),
        ("keys that are not sorted", "bad-amendment", changing(unsorted)),
        ("changes with too many bytes", "bad-amendment", sealed({"changes": bytes(4097)})),
        ("too many bytes", "too-large", good + bytes(6144)),
        ("no msgpack", "bad-amendment", b"\xc1"),
    ]
