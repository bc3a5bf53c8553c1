"""The rules between the sections of a manifest, and the sentences that explain a wrong manifest.

A rule returns an error sentence, remedy included, or None if it holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from agora_protocol.codec_names import parse_codec
from agora_protocol.errors import ManifestError
from agora_protocol.fields import describe
from agora_protocol.ids import is_peer_id
from agora_protocol.limits import MAX_MANIFEST_BYTES, MAX_PAYLOAD_BYTES, MAX_REFERENCES
from agora_protocol.manifest_toml import toml_value

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

SIGNING_BYTES: Final = 128  # bytes kept free for founder, signature and their msgpack


def nearest_multiple(value: int, of: int) -> int:
    """Returns the multiple of `of` that is closest to `value`, at least `of` itself."""
    return max(round(value / of), 1) * of


def _check_model(manifest: Manifest) -> str | None:
    # None otherwise.
    return manifest.model.check_values()


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
    # None otherwise.
    each, target = manifest.quota_tokens, manifest.optimizer.target_tokens
    if target % each:
        return (
            f"[optimizer] target_tokens {target} is not a multiple of the {each} tokens of a "
            f"microbatch ([schedule] microbatch {manifest.schedule.microbatch} x [model] context "
            f"{manifest.model.context}); use target_tokens = {nearest_multiple(target, each)}."
        )
    return None


def _check_warmup(manifest: Manifest) -> str | None:
    # None otherwise.
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
        return '[objective] kind dpo compares with the model without lora; use [model] trained = "lora".'
    if kind == "dpo" and (microbatch % 2 or microbatch > MAX_REFERENCES):
        return (
            f"[schedule] microbatch {microbatch} cannot hold pairs of answers; for [objective] kind dpo use an even "
            f"number up to {MAX_REFERENCES}."
        )
    return None


def _check_founder(manifest: Manifest) -> str | None:
    # None otherwise.
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
    _check_model,
    _check_stages,
    _check_step_tokens,
    _check_warmup,
    _check_codec,
    _check_payload,
    _check_size,
    _check_tokenizer,
    _check_objective,
    _check_founder,
    _check_admission,
)


def check_rules(manifest: Manifest, source: str) -> None:
    """Raises ManifestError, which begins with `source`, for the first rule that does not hold."""
    for rule in RULES:
        if problem := rule(manifest):
            raise ManifestError(f"{source}: {problem}")


def explain_error(error: ValidationError, section: type[BaseModel], source: str, within: str = "") -> ManifestError:
    """Returns pydantic's first complaint as a ManifestError: one sentence that names section, key, value and remedy.

    section: the class that was validated. within: its name in the manifest; empty for the manifest itself.
    """
    first = error.errors(include_url=False)[0]
    path = first["loc"]
    place = _key_text((within, *path) if within else path)
    if first["type"] == "extra_forbidden":
        table = f"{place[: place.rindex(' ')]} has" if " " in place else "there is"
        key, known = str(path[-1]), _fields_beside(path, section)
        return ManifestError(f"{source}: {table} no key {key[:40]!r}; {suggest(key, known)}")
    value = first["input"]
    value_text = f" {describe(value)}" if isinstance(value, int | float | str) else ""
    default = _default_text(path, section)
    remedy = "correct it, or remove it" + (f" for the default {default}." if default else ".")
    return ManifestError(f"{source}: {place}{value_text} {_complaint_text(first)}; {remedy}")


def _key_text(path: Sequence[str | int]) -> str:
    keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return f"[{path[0]}] {keys[1:]}" if keys else f"{path[0]}" if path else "the manifest"


def _complaint_text(first: Mapping[str, Any]) -> str:
    limits = first.get("ctx", {})
    match first["type"]:
        case "model_type" | "model_attributes_type":
            return "must be a table, written as a line in square brackets"
        case "too_short":
            return f"must have at least {limits['min_length']} item"
        case "too_long":
            return f"must have at most {limits['max_length']} items"
        case "string_unicode":
            return "must be valid Unicode"
        case "tuple_type":
            return "must be a list"
        case "string_pattern_mismatch":
            return "must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
    return str(first["msg"]).removeprefix("Input ").removeprefix("String ").replace("should", "must", 1)


def _fields_beside(path: Sequence[str | int], section: type[BaseModel]) -> Mapping[str, FieldInfo]:
    fields = section.model_fields
    if len(path) > 1 and isinstance(path[1], str):
        table = fields[str(path[0])].default
        fields = type(table).model_fields if isinstance(table, BaseModel) else {}
    return fields


def _default_text(path: Sequence[str | int], section: type[BaseModel]) -> str | None:
    keys = [part for part in path if isinstance(part, str)]
    field = _fields_beside(path, section).get(keys[-1]) if keys else None
    default = field.default if field else None
    return toml_value(default) if isinstance(default, int | float | str | tuple) else None


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown word, as the end of a sentence: the nearest known word; all if none is near."""
    names = list(known)
    close = difflib.get_close_matches(word[:64], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}."
