"""The messages by which peers admit each other: HELLO, and the revocations that they pass on.

SPEC.md sections 4 and 10.
"""

from __future__ import annotations

from agora_protocol.fields import addresses_field, bytes_field, choice_field, int_field, list_field, text_field
from agora_protocol.limits import (
    MAX_DEADLINE_MS,
    MAX_NAME_BYTES,
    MAX_PROOF_BYTES,
    MAX_REVOCATION_BYTES,
    MAX_SHARED_REVOCATIONS,
    SALT_BYTES,
)
from agora_protocol.message_base import FrameType, Message


class Hello(Message, kind=1, frames=(FrameType.HELLO,)):
    """Introduces the sender, and proves that it may take part. The first frame in both directions.

    The opener of the stream sends it first; the other side sends its own only after it has admitted the opener.
    """

    version: int = int_field(1, 65_535, doc="protocol version of the sender; must be 1")
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


class ShareRevocations(Message, kind=28, frames=(FrameType.REQUEST,)):
    """Passes on revocations, section 4: all that the sender knows when a connection begins, then each new one.

    Answered by TookRevocations. Readers may send it too: a revocation counts by its signature, whoever passes it on.
    """

    revocations: tuple[bytes, ...] = list_field(
        bytes_field(most=MAX_REVOCATION_BYTES), MAX_SHARED_REVOCATIONS, doc="sealed revocations"
    )
    deadline_ms: int = int_field(
        1, MAX_DEADLINE_MS, default=10_000, doc="milliseconds left for the answer, counted from arrival"
    )


class TookRevocations(Message, kind=29, frames=(FrameType.ANSWER,)):
    """Answers ShareRevocations."""

    new: int = int_field(0, MAX_SHARED_REVOCATIONS, doc="how many of them the receiver did not know and accepted")
    refused: int = int_field(0, MAX_SHARED_REVOCATIONS, doc="how many do not count: malformed, or of no delegate")
