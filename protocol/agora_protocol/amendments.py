"""Amendments, by which a founder changes a live run: bytes and signatures, and what the manifest is at a step.

An amendment is sealed like a ticket, under a tag of its own. Its hash is SHA-256(b"agora amendment 1\\0" || run (32
bytes) || payload); each names the hash of the one before, the first the run id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from agora_protocol.errors import AmendmentError, ManifestError, ProtocolError
from agora_protocol.fields import MAX_UINT, Structure, bytes_field, int_field, peer_id_field
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_AMENDMENT_BYTES, MAX_AMENDMENTS, MAX_CHANGES_BYTES, MAX_PROOF_BYTES
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_errors import suggest
from agora_protocol.manifest_sections import ALL_STEPS
from agora_protocol.packing import pack_canonical, unpack
from agora_protocol.parts import MIN_FRAGMENTS, fragment_count
from agora_protocol.tickets import MAX_UNIX, open_sealed, seal

AMENDMENT_TAG: Final = b"agora amendment 1\0"
# Steps from the one that the signer knows of to the first one that an amendment may be of: it has to reach everybody.
NOTICE: Final = 20
# What an amendment may change. Everything else is the core of the manifest, which holds for the life of the run: CORE.
AMENDABLE: Final = (
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.total_steps",
    "optimizer.minimum_ratio",
    "optimizer.target_tokens",
    "data.weights",
    "boundary.codec",
    "schedule.staleness",
    "averaging.gradient_wire",
    "averaging.slice_wire",
    "averaging.share_of_uplink",
    "averaging.aggregation",
    "averaging.round_s",
    "averaging.fraction",
    "averaging.outer_rate",
    "averaging.outer_momentum",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluation.tasks",
    "evaluation.every",
    "evaluation.items",
    "evaluation.share",
    "admission.mode",
    "admission.peers",
    "admission.public_status",
    "admission.oldest_version",
    "admission.oldest_version_from",
)
# Of these, what a delegate may not change: who holds a delegate's key could shut everybody else out.
FOUNDER_ONLY: Final = frozenset({"admission.mode", "admission.peers", "admission.public_status"})
# Why the rest cannot be amended, by key or section. A key goes before its section.
CORE: Final[Mapping[str, str]] = {
    "name": "the run's id follows from it",
    "seed": "the first weights and the held-out part follow from it",
    "founder": "whoever signs amendments is judged by it",
    "model": "weights, checkpoints and messages have the shapes that it gives",
    "stages": "weights, checkpoints and messages have the shapes that it gives",
    "optimizer": "the moments of every replica were gathered by it, and are updated by what a stage was loaded with",
    "schedule.kind": "whether stages wait for one another is one for the whole run, and stages are never at one step",
    "schedule.microbatch": "microbatches of its shape are on their way at every moment",
    "schedule.least_replicas": "a run that waits for replicas comes to no step at which this could be taken back",
    "schedule": "each peer divides its memory by it when it loads a stage",
    "averaging.exact_steps": "where a stage is between all-reduces and inner steps is a part of its state",
    "averaging.local_steps": "where a stage is between all-reduces and inner steps is a part of its state",
    "averaging.every": "the rounds of fragments are numbered by it, also in states and checkpoints",
    "data": "what is trained on and what is held out is drawn from all of it",
    "objective": "losses, marks and references of microbatches on their way are those of one objective",
}


class Amendment(Structure):
    """Says that the manifest has other values from step `from_step` on. It counts only if the issuer may amend."""

    ERROR: ClassVar[str] = "bad-amendment"
    issuer: PeerId = peer_id_field(doc="who signs it: the founder or a delegate")
    number: int = int_field(1, MAX_AMENDMENTS, doc="its place in the chain; 1 is the first")
    previous: bytes = bytes_field(32, doc="hash of the amendment before it; of the first the run id")
    signed_step: int = int_field(0, MAX_UINT, doc="the furthest step of the run when it was signed")
    from_step: int = int_field(1, MAX_UINT, doc="number of the first optimizer step that it is in force at")
    issued_unix: int = int_field(0, MAX_UNIX, doc="unix seconds when it was signed")
    changes: bytes = bytes_field(most=MAX_CHANGES_BYTES, doc="the new values: canonical msgpack of a map by key")
    proof: bytes = bytes_field(most=MAX_PROOF_BYTES, doc="the proof by which the issuer is a delegate; founder: empty")

    def find_problem(self) -> str | None:
        """Returns what is wrong with `changes`, which need not fit the run's manifest; None if it is well formed."""
        try:
            values = unpack(self.changes, MAX_CHANGES_BYTES, "bad-amendment")
        except ProtocolError as error:
            return f"has changes that cannot be read: {error}"
        if not isinstance(values, dict) or not values:
            return "changes nothing"
        if not all(isinstance(key, str) for key in values):
            return "has a key that is no text"
        if core := sorted(key for key in values if key not in AMENDABLE and _is_key(key)):
            return f"changes {core[0][:60]!r}, which no amendment may"
        return None if pack_canonical(values) == self.changes else "has changes that are not in canonical form"

    @property
    def values(self) -> dict[str, Any]:
        """The new values by key, such as {"optimizer.total_steps": 4000}."""
        values: dict[str, Any] = unpack(self.changes, MAX_CHANGES_BYTES, "bad-amendment")
        return values


@dataclass(frozen=True, slots=True)
class SealedAmendment:
    """A verified amendment, with its signed bytes and its hash. `open_amendment` makes it."""

    amendment: Amendment
    sealed: bytes
    hash: bytes


def seal_amendment(amendment: Amendment, run: RunId, issuer: Identity) -> bytes:
    """Returns the signed bytes of an amendment. Raises ProtocolError "wrong-key" unless `issuer` is its issuer."""
    return seal(amendment, AMENDMENT_TAG, run, issuer)


def open_amendment(data: bytes, run: RunId) -> SealedAmendment:
    """Returns an amendment whose signature is its issuer's for this run; whether the issuer may amend is not judged.

    Raises ProtocolError: "too-large", "bad-amendment", "bad-signature".
    """
    amendment, payload = open_sealed(data, Amendment, AMENDMENT_TAG, run, MAX_AMENDMENT_BYTES)
    digest = hashlib.sha256(AMENDMENT_TAG + bytes.fromhex(run) + payload).digest()
    return SealedAmendment(amendment, data, digest)


def manifest_at(core: Manifest, amendments: Sequence[Amendment], step: int) -> Manifest:
    """Returns the manifest as optimizer step number `step` (0 is the first) has it: the core, amended in order.

    amendments: those of the run's chain. Raises ManifestError if the values do not fit together.
    """
    in_force = [amendment for amendment in amendments if amendment.from_step <= step]
    return with_changes(core, *(amendment.values for amendment in in_force)) if in_force else core


def with_changes(manifest: Manifest, *changes: Mapping[str, Any]) -> Manifest:
    """Returns the manifest with values changed by key, one map after the other. Raises ManifestError."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in (item for values in changes for item in values.items()):
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return manifest.with_values(**nested)


def _is_key(key: str) -> bool:
    section, _, name = key.partition(".")
    known = getattr(Manifest(), section, None) if section in Manifest.model_fields else None
    return key in ("name", "seed", "founder") or bool(name and hasattr(known, name))


def check_key(key: str) -> None:
    """Raises AmendmentError, which says what to do, for a key that no manifest has or that no amendment may change."""
    if key in AMENDABLE:
        return
    if _is_key(key):
        raise AmendmentError(
            f"{key[:60]} belongs to the core of the manifest, which holds for the life of the run: {_why_core(key)}; "
            f"start a new run to change it.{_may_change(key)}"
        )
    raise AmendmentError(f"There is no key {key[:60]!r} in a manifest; {suggest(key, AMENDABLE)}")


def _may_change(key: str) -> str:
    section = key.partition(".")[0]
    changeable = [known for known in AMENDABLE if known.startswith(f"{section}.")]
    return f" Of [{section}] an amendment may change {', '.join(changeable)}." if changeable else ""


def _why_core(key: str) -> str:
    return CORE[key] if key in CORE else CORE[key.partition(".")[0]]


def check_follows(amendment: Amendment, core: Manifest, before: Sequence[Amendment]) -> None:
    """Raises AmendmentError, which says what to do, unless `amendment` may follow the chain `before` in this run.

    Checks notice, order and values; neither who signed it nor the hashes.
    """
    if unknown := sorted(amendment.values.keys() - set(AMENDABLE)):
        raise AmendmentError(
            f"It changes {unknown[0][:60]!r}, which this version of agora does not know; if a newer one has signed it, "
            "run pip install --upgrade agora-swarm."
        )
    if (own := sorted(FOUNDER_ONLY & amendment.values.keys())) and amendment.issuer != core.founder:
        raise AmendmentError(f"{own[0]} is changed by the founder alone, who is {core.founder}, and not by a delegate.")
    earliest = amendment.signed_step + NOTICE
    if amendment.from_step < earliest and not _has_ended(core, before, amendment):
        raise AmendmentError(
            f"Step {amendment.from_step} is too near: the run was at step {amendment.signed_step}, and every peer must "
            f"know an amendment before its step; use --from-step {earliest} or later."
        )
    if before and amendment.from_step < before[-1].from_step:
        raise AmendmentError(
            f"Amendment {before[-1].number} is in force from step {before[-1].from_step}, so the next cannot be from "
            f"step {amendment.from_step}; use --from-step {before[-1].from_step} or later."
        )
    total = manifest_at(core, before, MAX_UINT).optimizer.total_steps
    if amendment.from_step > total and not _has_ended(core, before, amendment):
        raise AmendmentError(
            f"The run ends after {total} steps, before step {amendment.from_step}; use an earlier --from-step."
        )
    try:
        amended = manifest_at(core, [*before, amendment], amendment.from_step)
    except ManifestError as error:
        raise AmendmentError(f"These values do not fit the run: {error}") from None
    if amended.averaging.fraction != core.averaging.fraction:
        _check_fraction(core, amended)
    if amended.optimizer.total_steps < amendment.from_step:
        raise AmendmentError(
            f"The run would have ended after {amended.optimizer.total_steps} steps, before step {amendment.from_step}; "
            "use more optimizer.total_steps, or an earlier --from-step."
        )


def _check_fraction(core: Manifest, amended: Manifest) -> None:
    if core.exact_steps < ALL_STEPS or core.averaging.local_steps == "never" or core.schedule.kind == "synchronous":
        raise AmendmentError(
            "averaging.fraction can be amended only where stages change to inner steps by themselves (all steps exact, "
            "and averaging.local_steps auto); in this run the number of fragments is a part of every replica's state."
        )
    if fragment_count(max(core.averaging.fraction, amended.averaging.fraction)) < MIN_FRAGMENTS:
        raise AmendmentError(
            f"averaging.fraction {amended.averaging.fraction}, after {core.averaging.fraction}: with fewer than "
            f"{MIN_FRAGMENTS} fragments a stage cannot change between all-reduces and inner steps; use at most "
            f"{1 / MIN_FRAGMENTS}, in a run that was founded with no more."
        )


def _has_ended(core: Manifest, before: Sequence[Amendment], amendment: Amendment) -> bool:
    # Nothing happens any more at a run that has ended: its next step is far enough ahead.
    total = manifest_at(core, before, MAX_UINT).optimizer.total_steps
    return total <= amendment.signed_step <= amendment.from_step
