"""Checks what a source answers when it is asked for a stage's state, before anything of it is used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Chunk, StateIndex

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.sync_mode import EXACT, ChangeRule, StepPlan
from agora.state.layout import HASH_BYTES, VALUE_BYTES, Flat, Layout, unpack_chunk


class CorruptStateError(ProtocolError):
    """Raised when a source's answer to GetState or GetChunk cannot be true: malformed, wrong hash, impossible values.

    No network fault causes such an answer: code that catches the error reports an offence.
    """


# (agreed step, lineage, step or 0, step plan): chunks of snapshots with equal keys may be mixed in one state.
MixingKey = tuple[int, int, int, int, int, int]


def mixing_key(index: StateIndex) -> MixingKey:
    """Returns a snapshot's mixing key; its third number is the step if the lineage is unknown (0), otherwise 0.

    Replicas of one lineage have applied the same means up to the step `agreed`; each may have taken local steps since.
    """
    step = 0 if index.lineage else index.step
    return index.agreed, index.lineage, step, *plan_of(index)


def plan_of(index: StateIndex) -> StepPlan:
    """Returns the step plan of a snapshot's stage."""
    return StepPlan(index.slices, index.change_at, index.later_slices)


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a source can give. index: the snapshot's name, steps, lineage and size.

    hashes: the SHA-256 of each chunk, 32 bytes each, in order. layout: of the snapshot's state.
    """

    index: StateIndex
    hashes: bytes
    layout: Layout

    def hash_of(self, chunk: int) -> bytes:
        """Returns the SHA-256 that the source has announced for chunk number `chunk`, 32 bytes."""
        return self.hashes[HASH_BYTES * chunk :][:HASH_BYTES]

    @property
    def mixing_key(self) -> MixingKey:
        return mixing_key(self.index)


def milliseconds_until(moment: float) -> int:
    """Returns the whole milliseconds from now until `moment` (loop time), at least 1 and at most MAX_DEADLINE_MS.

    Requests carry this number as their deadline.
    """
    return min(max(int((moment - loop_time()) * 1000), 1), MAX_DEADLINE_MS)


def check_offer(reply: Reply, exact_layout: Layout, change_rule: ChangeRule) -> Offer:
    """Returns the offer in an answer to GetState. exact_layout: that of the stage during exact steps.

    Raises Refused if the source has no snapshot, or none that takes part in local steps since they began.
    Raises CorruptStateError for another message and for an offer whose size or number of hashes does not fit the stage,
    whose name is not the hash of the hashes, whose moments have more updates than steps were taken, or whose step plan
    no stage of the run can have. Whether the steps themselves are plausible is not checked.
    """
    index = reply.message
    if not isinstance(index, StateIndex):
        raise CorruptStateError("bad-message", f"GetState was answered by {type(index).__name__}.")
    if index.size == 0:
        raise Refused("has no snapshot of this stage to give")
    plan = plan_of(index)
    if not change_rule.is_possible(plan, index.step):
        raise CorruptStateError("bad-message", f"No stage of this run has the plan {tuple(plan)} at step {index.step}.")
    if plan.slices == EXACT and plan.is_local(index.step) and index.agreed < plan.change_at:
        raise Refused("has a snapshot without the weights at which its local steps began")
    layout = exact_layout.at_step(index.step, plan)
    if index.size != layout.nbytes:
        raise CorruptStateError("bad-tensor", f"The snapshot has {index.size} bytes, not {layout.nbytes}.")
    if index.updates > index.step:
        raise CorruptStateError("bad-message", f"The snapshot has {index.updates} updates in {index.step} steps.")
    tensor = reply.tensors[0] if reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("uint8", (layout.chunk_count, HASH_BYTES)):
        raise CorruptStateError("bad-tensor", f"The snapshot's index is not {layout.chunk_count} hashes.")
    hashes = bytes(tensor.data)
    if hashlib.sha256(hashes).digest() != index.snapshot:
        raise CorruptStateError("bad-tensor", "The snapshot's name is not the hash of its chunks' hashes.")
    return Offer(index, hashes, layout)


def check_chunk(reply: Reply, expected: bytes, layout: Layout, chunk: int) -> list[Flat]:
    """Returns the weights and each moment's values in an answer to GetChunk: views of its bytes, see `unpack_chunk`.

    expected: the chunk's SHA-256. Raises CorruptStateError for another message, another size or hash, NaN, infinity,
    and a negative value in a moment that is_square.
    """
    nbytes = VALUE_BYTES * sum(place.stop - place.start for place in layout.chunk_places(chunk))
    tensor = reply.tensors[0] if isinstance(reply.message, Chunk) and reply.tensors else None
    if tensor is None or tensor.dtype != "uint8" or tensor.nbytes != nbytes:
        raise CorruptStateError("bad-tensor", f"A chunk is not uint8 [{nbytes}].")
    if (digest := hashlib.sha256(tensor.data).digest()) != expected:
        raise CorruptStateError("bad-tensor", f"A chunk's SHA-256 should be {expected.hex()}, and is {digest.hex()}.")
    _, *moments = values = unpack_chunk(tensor.data, layout, chunk)
    negative = any(moment.is_square and (part < 0).any() for moment, part in zip(layout.moments, moments, strict=True))
    if negative or not all(np.isfinite(part).all() for part in values):
        raise CorruptStateError("bad-tensor", "A chunk holds values that are not finite, or a negative square.")
    return values
