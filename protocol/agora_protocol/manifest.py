"""The manifest: the immutable description of a run, its TOML form, its canonical bytes, its hash and its signature.

The run id is SHA-256(b"agora manifest 1\0" || canonical bytes), the founder included, so nothing in a run can change
under its name.
"""

from __future__ import annotations

import hashlib
import math
import operator
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self, cast

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator, model_validator

from agora_protocol import manifest_toml
from agora_protocol.codec_names import DIRECTIONS, parse_codec
from agora_protocol.errors import ManifestError, ProtocolError
from agora_protocol.fields import describe
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import PeerId, RunId, Span, is_peer_id
from agora_protocol.limits import MAX_MANIFEST_BYTES, MAX_PAYLOAD_BYTES, MAX_REFERENCES, STATE_CHUNK_BYTES
from agora_protocol.manifest_errors import explain_error, nearest_multiple, suggest
from agora_protocol.manifest_model import (
    ModelSection,
    SubspaceSection,
    model_with_changes,
    read_model_section,
)
from agora_protocol.manifest_sections import (
    ALL_STEPS,
    MAX_SEED,
    AdmissionSection,
    AveragingSection,
    BoundarySection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ObjectiveSection,
    OptimizerSection,
    ScheduleSection,
    Section,
    StagesSection,
)
from agora_protocol.packing import is_version, pack, pack_canonical, unpack
from agora_protocol.presets import PRESETS

# Keys that came after version 1 was used. While they have their default, no run's id and signature contains them: runs
# that were founded before are still the same.
ADDED_LATER: Final = (
    ("admission", "oldest_version"),
    ("admission", "oldest_version_from"),
    *(("evaluation", key) for key in EvaluationSection.model_fields),
)
RUN_TAG: Final = b"agora manifest 1\0"
SIGNATURE_TAG: Final = b"agora founder 1\0"
SIGNED_VERSION: Final = 1
SIGNING_BYTES: Final = 128  # bytes kept free for founder, signature and their msgpack


class Manifest(Section):
    """Everything that the peers of a run agree on; immutable.

    from_values and from_toml check it and raise ManifestError; model_copy checks nothing. `founder` is empty until the
    manifest is signed.
    """

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="a name for people")
    seed: int = Field(
        default=0, ge=0, le=MAX_SEED, description="decides initial weights, samples and the held-out part"
    )
    founder: str = Field(default="", max_length=64, description="peer id of who signed; empty until then")
    model: SerializeAsAny[ModelSection] = SubspaceSection()
    stages: StagesSection = StagesSection()
    boundary: BoundarySection = BoundarySection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    averaging: AveragingSection = AveragingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    evaluation: EvaluationSection = EvaluationSection()
    admission: AdmissionSection = AdmissionSection()

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        # Strict sections need tuples for lists. -0.0 becomes 0.0, so that equal manifests have equal canonical bytes.
        return _normalise(values)

    @field_validator("model", mode="before")
    @classmethod
    def _read_model(cls, values: Any, info: ValidationInfo) -> Any:
        return read_model_section(values, _source_of(info))

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        for rule in RULES:
            if problem := rule(self):
                raise ManifestError(f"{_source_of(info)}: {problem}")
        return self

    @classmethod
    def from_values(cls, values: dict[str, Any], source: str) -> Manifest:
        """Returns the manifest of plain values, by section and key, with defaults for the rest.

        Raises ManifestError, whose text begins with `source`.
        """
        try:
            return cls.model_validate(values, context={"source": source})
        except ValidationError as error:
            raise explain_error(error, cls, source) from None

    @classmethod
    def from_toml(cls, text: str, source: str = "manifest") -> Manifest:
        """Returns the manifest in a file's text, and ignores its [signed] table. Raises ManifestError."""
        values = _parse_toml(text, source)
        values.pop("signed", None)
        return cls.from_values(values, source)

    def to_toml(self) -> str:
        """Returns the manifest as the text of a commented TOML file; from_toml of it gives an equal manifest."""
        return manifest_toml.manifest_text(self, self._unused())

    def with_values(self, **overrides: Any) -> Manifest:
        """Returns a checked copy with values changed, tables key by key: with_values(seed=1, stages={"count": 4})."""
        return Manifest.from_values(_with_changes(self.model_dump(), overrides), "manifest")

    def canonical(self) -> bytes:
        """Returns the bytes that are hashed and signed: msgpack, keys sorted, floats as float64, of every field but
        those of ADDED_LATER that have their default; a section of which no key is left is left out.
        """
        values = self.model_dump()
        for section, name in self._unused():
            del values[section][name]
        return pack_canonical({name: value for name, value in values.items() if value != {}})

    def _unused(self) -> list[tuple[str, str]]:
        sections = {section: getattr(self, section) for section, _ in ADDED_LATER}
        return [
            (section, name)
            for section, name in ADDED_LATER
            if getattr(sections[section], name) == type(sections[section]).model_fields[name].default
        ]

    @property
    def run_id(self) -> RunId:
        return RunId(hashlib.sha256(RUN_TAG + self.canonical()).hexdigest())

    @property
    def stage_count(self) -> int:
        return self.stages.count

    def layers_of(self, stage: int) -> range:
        """Returns the layers of a stage: cut by first_layers, evenly if that is empty. Raises ValueError if unknown."""
        count, layers = self.stages.count, self.model.layers
        if not 0 <= stage < count:
            raise ValueError(f"stage {stage} is not one of {count}")
        cuts = self.stages.first_layers or tuple(index * layers // count for index in range(count))
        return range(cuts[stage], cuts[stage + 1] if stage + 1 < count else layers)

    def layers_in(self, span: Span) -> range:
        """Returns the layers of all stages of a span, as one range."""
        return range(self.layers_of(span.first).start, self.layers_of(span.last).stop)

    @property
    def exact_steps(self) -> int:
        return ALL_STEPS if self.schedule.kind == "synchronous" else self.averaging.exact_steps

    @property
    def tokens_per_microbatch(self) -> int:
        return self.schedule.microbatch * self.model.context

    @property
    def quota_tokens(self) -> int:
        # Steps are counted in multiples of this. Microbatches of sft differ in their number of supervised tokens.
        return 1 if self.objective.kind == "sft" else self.tokens_per_microbatch

    @property
    def has_marks(self) -> bool:
        # Marks say of each token what is learnt, and where sequences begin.
        return self.objective.kind != "lm"

    def tokens_shape(self) -> tuple[int, ...]:
        """Returns the shape in which a microbatch's tokens are sent: [b, s + 1], with marks [2, b, s + 1]."""
        shape = self.schedule.microbatch, self.model.context + 1
        return (2, *shape) if self.has_marks else shape

    def boundary_shape(self) -> tuple[int, int, int]:
        """Returns the shape (b, s, k) of every boundary: sequences, positions, values of each token."""
        return self.schedule.microbatch, self.model.context, self.model.boundary_width

    @property
    def max_payload_bytes(self) -> int:
        shape, codec = self.boundary_shape(), parse_codec(self.boundary.codec)
        boundary = max(codec.bytes_of(shape, direction) for direction in DIRECTIONS)
        return max(STATE_CHUNK_BYTES, boundary + 4 * math.prod(self.tokens_shape()))

    @property
    def largest_payload_bytes(self) -> int:
        # As max_payload_bytes, by any codec: an amendment may bring another one.
        whole = 4 * (math.prod(self.boundary_shape()) + math.prod(self.tokens_shape()))
        return max(self.max_payload_bytes, min(MAX_PAYLOAD_BYTES, whole))

    def admits_without_ticket(self, peer: PeerId) -> bool:
        """Returns whether `peer` may take part without a ticket: all in mode open, otherwise founder and listed peers.

        Ignores revocations; which peers are really admitted is decided in agora/swarm/admission.py.
        """
        return self.admission.mode == "open" or peer == self.founder or peer in self.admission.peers


# --- rules between the sections: each returns an error sentence with its remedy, or None if it holds


def _check_stages(manifest: Manifest) -> str | None:
    count, cuts, layers = manifest.stages.count, manifest.stages.first_layers, manifest.model.layers
    if layers < count:
        return (
            f"[model] layers {layers} are fewer than [stages] count {count}, and every stage needs a layer; "
            f"use at most {layers} stages, or more layers."
        )
    if not cuts:
        return None
    if len(cuts) != count:
        return f"[stages] first_layers names {len(cuts)} stages where count is {count}; name the first layer of each."
    if cuts[0] != 0 or any(a >= b for a, b in pairwise(cuts)) or cuts[-1] >= layers:
        return (
            f"[stages] first_layers {list(cuts)} is not a cut of {layers} layers; "
            f"begin with 0 and rise to at most {layers - 1}, or remove it to cut evenly."
        )
    return None


def _check_step_tokens(manifest: Manifest) -> str | None:
    each, target = manifest.quota_tokens, manifest.optimizer.target_tokens
    if target % each:
        return (
            f"[optimizer] target_tokens {target} is not a multiple of the {each} tokens of a "
            f"microbatch ([schedule] microbatch {manifest.schedule.microbatch} x [model] context "
            f"{manifest.model.context}); use target_tokens = {nearest_multiple(target, each)}."
        )
    return None


def _check_warmup(manifest: Manifest) -> str | None:
    if manifest.optimizer.warmup_steps >= manifest.optimizer.total_steps:
        return (
            f"[optimizer] warmup_steps {manifest.optimizer.warmup_steps} leaves nothing of total_steps "
            f"{manifest.optimizer.total_steps}; use fewer warmup_steps."
        )
    return None


def _check_codec(manifest: Manifest) -> str | None:
    try:
        codec = parse_codec(manifest.boundary.codec)
    except ManifestError as unknown:
        return str(unknown)
    if codec.columns >= manifest.model.boundary_width:
        return (
            f"[boundary] codec {codec.name} keeps {codec.columns} columns of boundaries that have "
            f"{manifest.model.boundary_width}; use fewer, or no top{codec.columns}: to send all of them."
        )
    return None


def _check_payload(manifest: Manifest) -> str | None:
    needed = manifest.max_payload_bytes
    if needed > MAX_PAYLOAD_BYTES:
        model = manifest.model
        return (
            f"A microbatch of {manifest.schedule.microbatch} x {model.context} x {model.boundary_width} "
            f"{manifest.boundary.codec} is {needed} bytes on the wire, over the limit of {MAX_PAYLOAD_BYTES}; "
            "use a smaller [schedule] microbatch."
        )
    return None


def _check_size(manifest: Manifest) -> str | None:
    try:
        size = len(manifest.canonical()) + SIGNING_BYTES
    except UnicodeEncodeError as error:  # a lone surrogate, where pydantic lets it pass
        return f"The text {describe(error.object)} is not valid Unicode; write it again."
    if size > MAX_MANIFEST_BYTES:
        return (
            f"The manifest has {size} bytes once signed, more than the {MAX_MANIFEST_BYTES} allowed; "
            f"list fewer [data] corpus paths or [admission] peers."
        )
    return None


def _check_tokenizer(manifest: Manifest) -> str | None:
    if manifest.data.tokenizer == "bytes" and manifest.model.vocabulary < 256:
        return (
            f"[model] vocabulary {manifest.model.vocabulary} is too small for [data] tokenizer bytes, which has 256 "
            "ids; use vocabulary = 256."
        )
    return None


def _check_weights(manifest: Manifest) -> str | None:
    weights, corpus = manifest.data.weights, manifest.data.corpus
    if not weights:
        return None
    if manifest.objective.kind != "lm":
        return f"[data] weights have no effect with [objective] kind {manifest.objective.kind}; remove them."
    if len(weights) != len(corpus):
        return f"[data] weights has {len(weights)} numbers where corpus has {len(corpus)} entries; give one for each."
    return None if any(weights) else "[data] weights are all 0, so nothing could be drawn; make one of them 1.0."


def _check_objective(manifest: Manifest) -> str | None:
    kind, microbatch = manifest.objective.kind, manifest.schedule.microbatch
    if kind == "lm":
        if manifest.data.samples:
            return "[data] samples has no effect with [objective] kind lm; use kind sft or dpo, or remove samples."
        return None
    if not manifest.data.samples:
        return f"[objective] kind {kind} learns from [data] samples, which names no file; give one, or use kind lm."
    if not manifest.model.can_learn_samples:
        return (
            f"[objective] kind {kind} needs a base model, and [model] family {manifest.model.family} has none; "
            "write the manifest with `swarm new run.toml --base-model DIR`."
        )
    if kind == "dpo" and not manifest.model.has_reference:
        return '[objective] kind dpo compares with the model as it began; use [model] trained = "lora".'
    if kind == "dpo" and (microbatch % 2 or microbatch > MAX_REFERENCES):
        return (
            f"[schedule] microbatch {microbatch} cannot hold pairs of answers; for [objective] kind dpo use an even "
            f"number up to {MAX_REFERENCES}."
        )
    return None


def _check_evaluation(manifest: Manifest) -> str | None:
    tasks = manifest.evaluation.tasks
    if len(set(tasks)) < len(tasks):
        return "[evaluation] tasks names one task twice; remove the repetition."
    if tasks and manifest.objective.kind == "dpo":
        return (
            "[evaluation] tasks has no effect with [objective] kind dpo, which has no loss of single texts; remove it."
        )
    if "heldout" in tasks and not manifest.data.heldout:
        return "[evaluation] tasks has heldout, and [data] heldout is 0; hold out some text, or remove the task."
    return None


def _check_founder(manifest: Manifest) -> str | None:
    if manifest.founder and not is_peer_id(manifest.founder):
        return "founder is not a peer id; remove it, joining signs the manifest and sets it."
    return None


def _check_admission(manifest: Manifest) -> str | None:
    mode, peers = manifest.admission.mode, manifest.admission.peers
    for peer in peers:
        if not is_peer_id(peer):
            return (
                f"[admission] {peer[:60]!r} is not a peer id; "
                f"list ids as `agora-node doctor` prints them, such as 12D3KooW..."
            )
    if len(set(peers)) != len(peers):
        return "[admission] peers names one peer twice; remove the repetition."
    if mode == "listed" and not peers:
        return "[admission] mode listed with no peers admits nobody but the founder; list peers, or use mode open."
    if mode != "listed" and peers:
        return f"[admission] peers has no effect in mode {mode}; use mode listed, or remove peers."
    return None


RULES: Final[tuple[Callable[[Manifest], str | None], ...]] = (
    lambda manifest: manifest.model.check_values(),
    _check_stages,
    _check_step_tokens,
    _check_warmup,
    _check_codec,
    _check_payload,
    _check_size,
    _check_tokenizer,
    _check_weights,
    _check_objective,
    _check_evaluation,
    _check_founder,
    _check_admission,
)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest and its founder's signature over its canonical bytes. Immutable.

    `sign` makes one, `verify` checks it. from_bytes and from_toml raise for a signature that does not verify.
    """

    manifest: Manifest
    signature: bytes

    @property
    def founder(self) -> PeerId:
        return PeerId(self.manifest.founder)

    @property
    def run_id(self) -> RunId:
        return self.manifest.run_id

    @classmethod
    def sign(cls, manifest: Manifest, identity: Identity) -> SignedManifest:
        """Returns a copy of `manifest`, signed by `identity`, which becomes the founder; that changes the run id."""
        founded = manifest.model_copy(update={"founder": identity.peer})
        return cls(founded, identity.sign(SIGNATURE_TAG + founded.canonical()))

    def verify(self, run: RunId | None = None) -> None:
        """Raises ManifestError unless the founder has signed exactly this manifest and, if given, its id is `run`."""
        if not verify(self.founder, SIGNATURE_TAG + self.manifest.canonical(), self.signature):
            raise ManifestError(
                "The manifest's signature is not its founder's, so somebody changed it; "
                "ask for the original, or remove founder and [signed] to found a run of your own."
            )
        if run is not None and self.run_id != run:
            raise ManifestError(
                f"The manifest is of run {self.run_id}, not {run}; ask another peer, or for a new invite."
            )

    def to_bytes(self) -> bytes:
        """Returns the msgpack [1, canonical bytes, signature] that ManifestAnswer carries."""
        return pack((SIGNED_VERSION, self.manifest.canonical(), self.signature))

    @classmethod
    def from_bytes(cls, data: bytes, run: RunId | None = None) -> SignedManifest:
        """Returns the verified manifest in the bytes that a peer has sent.

        Raises ManifestError if they are malformed or not in canonical form, if the signature is wrong, or if
        `run` is given and the manifest is of another run.
        """
        try:
            parts = unpack(data, MAX_MANIFEST_BYTES)
            if not isinstance(parts, tuple) or len(parts) != 3 or not is_version(parts[0], SIGNED_VERSION):
                raise ProtocolError("bad-message", "It is not [1, canonical, signature].")
            values = unpack(parts[1], MAX_MANIFEST_BYTES) if isinstance(parts[1], bytes) else None
        except ProtocolError as error:
            raise ManifestError(f"The bytes are not a signed manifest ({error}); ask another peer.") from None
        if not isinstance(values, dict) or not isinstance(parts[2], bytes) or len(parts[2]) != 64:
            raise ManifestError("The bytes are not a signed manifest; ask another peer.")
        signed = cls(Manifest.from_values(values, "the received manifest"), parts[2])
        if signed.manifest.canonical() != parts[1]:
            raise ManifestError("The received manifest is not in canonical form; ask another peer.")
        signed.verify(run)
        return signed

    def to_toml(self) -> str:
        """Returns the manifest as the text of a commented TOML file with a [signed] table at its end."""
        return self.manifest.to_toml() + manifest_toml.signed_table(self.run_id, self.signature)

    @classmethod
    def from_toml(cls, text: str, source: str = "manifest") -> SignedManifest:
        """Returns the manifest in a file's text, verified by the signature in its [signed] table.

        Raises ManifestError, also without such a table. The `run` in that table is not compared.
        """
        table = _parse_toml(text, source).get("signed")
        if not isinstance(table, dict) or set(table) - {"run", "signature"} or "signature" not in table:
            raise ManifestError(f"{source}: there is no [signed] table with a signature; join it once to sign it.")
        try:
            signature = bytes.fromhex(cast(str, table["signature"]))
        except (ValueError, TypeError):
            raise ManifestError(f"{source}: [signed] signature is not hex; copy the file again.") from None
        signed = cls(Manifest.from_toml(text, source), signature)
        signed.verify()
        return signed


def is_signed(text: str, source: str = "manifest") -> bool:
    """Returns whether a manifest file's text has a [signed] table. Raises ManifestError if it is not TOML."""
    return "signed" in _parse_toml(text, source)


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    if len(text.encode(errors="replace")) > 4 * MAX_MANIFEST_BYTES:
        raise ManifestError(f"{source}: the file has more than {4 * MAX_MANIFEST_BYTES} bytes; is it a manifest?")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, and integers of 4300 digits
        raise ManifestError(f"{source}: this is not valid TOML ({str(error)[:200]}); correct that line.") from None


def _source_of(info: ValidationInfo) -> str:
    return str((info.context or {}).get("source", "manifest"))


def _normalise(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _normalise(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return tuple(_normalise(value) for value in values)
    return values + 0.0 if isinstance(values, float) else values


def _with_changes(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    changed = values | changes
    for name in values.keys() & changes.keys():
        if isinstance(values[name], dict) and isinstance(changes[name], dict):
            change = model_with_changes if name == "model" else operator.or_
            changed[name] = change(values[name], changes[name])
    return changed


def preset(name: str, /, **overrides: Any) -> Manifest:
    """Returns a preset's manifest with changed values: preset("tiny", stages={"count": 4}). Raises ManifestError."""
    if name not in PRESETS:
        raise ManifestError(f"There is no preset {name[:40]!r}; {suggest(name, PRESETS)}")
    return Manifest.from_values(_with_changes(PRESETS[name], overrides), f"preset {name}")
