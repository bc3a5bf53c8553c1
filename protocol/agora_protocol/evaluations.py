"""Signed results of evaluations: what a member has measured of a task through the live pipeline.

Sealed like a ticket, under a tag of its own, so that others can pass a result on after its issuer has gone.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar, Final

from agora_protocol.errors import ProtocolError
from agora_protocol.fields import (
    MAX_UINT,
    Structure,
    bytes_field,
    float_field,
    int_field,
    list_field,
    peer_id_field,
    text_field,
    tuple_field,
)
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_EVALUATION_BYTES, MAX_EVALUATION_VALUES, MAX_NAME_BYTES, MAX_PROOF_BYTES
from agora_protocol.tickets import MAX_UNIX, open_sealed, seal

EVALUATION_TAG: Final = b"agora evaluation 1\0"
EVALUATOR_TAG: Final = b"agora evaluator 1\0"  # begins what is hashed to choose who evaluates
MAX_METRIC_BYTES: Final = 32  # a metric's name
_NAME: Final = "[ -~]+"  # printable ASCII, which cannot move the cursor of a terminal


class Evaluation(Structure):
    """Says what `issuer` has measured of a task. It counts only if the run admits the issuer as a member."""

    IS_OPEN: ClassVar[bool] = True
    ERROR: ClassVar[str] = "bad-record"
    issuer: PeerId = peer_id_field(doc="who has evaluated, and signs it")
    task: str = text_field(MAX_NAME_BYTES, pattern=_NAME, doc="the task's name")
    step: int = int_field(0, MAX_UINT, doc="optimizer steps that the issuer's stages had taken when it began")
    values: tuple[tuple[str, float], ...] = list_field(
        tuple_field(text_field(MAX_METRIC_BYTES, pattern=_NAME), float_field(-1e30, 1e30)),
        MAX_EVALUATION_VALUES,
        doc="what was measured: name and value of each metric, such as loss in nats per token, accuracy from 0 to 1",
    )
    items: int = int_field(0, MAX_UINT, doc="texts or questions of the task that were measured")
    tokens: int = int_field(0, MAX_UINT, doc="tokens that counted; 0 when unknown")
    seconds: float = float_field(0, 1e9, doc="how long it took")
    issued_unix: int = int_field(0, MAX_UNIX, doc="unix seconds when it was signed")
    proof: bytes = bytes_field(
        most=MAX_PROOF_BYTES, default=b"", doc="the issuer's tickets, as in its HELLO; empty where it has none"
    )

    def find_problem(self) -> str | None:
        """Returns a complaint when nothing was measured, or a metric is there twice; else None."""
        if not self.values:
            return "has no value"
        return "has a metric twice" if len(dict(self.values)) < len(self.values) else None


def seal_evaluation(evaluation: Evaluation, run: RunId, issuer: Identity) -> bytes:
    """Returns the signed bytes of a result. Raises ProtocolError "wrong-key" unless `issuer` is its issuer, "too-large"
    for one that no reader would take.
    """
    sealed = seal(evaluation, EVALUATION_TAG, run, issuer)
    if len(sealed) > MAX_EVALUATION_BYTES:
        raise ProtocolError("too-large", f"An evaluation of {len(sealed)} bytes; {MAX_EVALUATION_BYTES} are the most.")
    return sealed


def open_evaluation(data: bytes, run: RunId) -> Evaluation:
    """Returns a result whose signature is its issuer's for this run; whether the run admits the issuer is not judged.

    Raises ProtocolError: "too-large", "bad-record", "bad-signature".
    """
    return open_sealed(data, Evaluation, EVALUATION_TAG, run, MAX_EVALUATION_BYTES)[0]


def evaluator_rank(run: RunId, round_number: int, peer: PeerId) -> bytes:
    """Returns the hash by which peers of stage 0 take turns: the lowest of those that serve evaluates in this round.

    Rendezvous hashing: when one comes or goes, no other two change places.
    """
    return hashlib.sha256(
        EVALUATOR_TAG + bytes.fromhex(run) + round_number.to_bytes(8, "big") + peer.encode("ascii")
    ).digest()
