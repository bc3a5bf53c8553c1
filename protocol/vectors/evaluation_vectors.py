"""The vectors of evaluations: results of a founder and of a member with a ticket, what is refused; for `make.py`."""

from __future__ import annotations

from typing import Any

import msgpack
from agora_protocol.evaluations import EVALUATION_TAG, Evaluation, evaluator_rank, seal_evaluation
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.tickets import REVOCATION_TAG


def evaluations(
    run: RunId, founder: Identity, other: Identity, proof: bytes, now_unix: int
) -> list[tuple[Evaluation, bytes]]:
    """Returns results and their sealed bytes: of questions, by the founder; of texts, by a member with a ticket."""
    questions = (("accuracy", 0.5), ("accuracy_by_length", 0.25))
    texts = (("loss", 2.5), ("perplexity", 12.182493960703473))
    made = (
        (founder, Evaluation(founder.peer, "sums", 400, questions, 50, 1_200, 61.5, now_unix)),
        (other, Evaluation(other.peer, "heldout", 512, texts, 16, 16_384, 30.25, now_unix + 1, proof)),
    )
    return [(evaluation, seal_evaluation(evaluation, run, issuer)) for issuer, evaluation in made]


def turns(run: RunId, *peers: Identity) -> list[dict[str, Any]]:
    """Returns the hash of each peer in some rounds; the lowest evaluates."""
    return [
        {"round": number, "ranks": [[each.peer, evaluator_rank(run, number, each.peer)] for each in peers]}
        for number in (1, 2, 3, 1_000_000)
    ]


def bad_evaluations(run: RunId, founder: Identity, other: Identity, now_unix: int) -> list[tuple[str, str, bytes]]:
    """Returns results that must be refused: what is wrong, the code, the bytes."""
    good = Evaluation(founder.peer, "sums", 400, (("accuracy", 0.5),), 50, 1_200, 61.5, now_unix)
    fields = good.to_fields()

    def sealed(changed: dict[str, Any], signer: Identity = founder, tag: bytes = EVALUATION_TAG) -> bytes:
        data = bytes(msgpack.packb([1, {**fields, **changed}]))
        return bytes(msgpack.packb([data, signer.sign(tag + bytes.fromhex(run) + data)]))

    return [
        ("signed by another key", "bad-signature", sealed({}, other)),
        ("signed as a revocation", "bad-signature", sealed({}, tag=REVOCATION_TAG)),
        ("without a value", "bad-record", sealed({"values": []})),
        ("a metric twice", "bad-record", sealed({"values": [["loss", 1.0], ["loss", 2.0]]})),
        ("too many metrics", "bad-record", sealed({"values": [[f"m{n}", 1.0] for n in range(9)]})),
        ("a value that is not finite", "bad-record", sealed({"values": [["loss", float("nan")]]})),
        ("a name with a line break", "bad-record", sealed({"task": "sums\nloss"})),
        ("a task without a name", "bad-record", sealed({"task": ""})),
        ("a step below 0", "bad-record", sealed({"step": -1})),
        ("too many bytes", "too-large", seal_evaluation(good, run, founder) + bytes(1792)),
        ("no msgpack", "bad-record", b"\xc1"),
    ]
