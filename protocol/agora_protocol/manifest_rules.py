"""What must hold between the values of a manifest, and how a wrong one is explained: one sentence and what to do.

Knows the sections; reads no files and makes no bytes.
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
from agora_protocol.fields import shown
from agora_protocol.ids import is_peer_id
from agora_protocol.limits import MAX_MANIFEST_BYTES, MAX_PAYLOAD_BYTES
from agora_protocol.manifest_toml import toml_value

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

SIGNING_BYTES: Final = 128  # room for founder, signature and their msgpack


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` closest to value, at least one of it."""
    return max(round(value / of), 1) * of


def _heads(it: Manifest) -> str | None:
    model = it.model
    if model.width % model.heads:
        return (
            f"[model] width {model.width} is not divisible by heads {model.heads}; "
            f"use a multiple of heads, such as width = {nearest_multiple(model.width, 2 * model.heads)}."
        )
    if model.heads % model.key_value_heads:
        fitting = max(n for n in range(1, model.heads + 1) if model.heads % n == 0 and n <= model.key_value_heads)
        return (
            f"[model] heads {model.heads} is not a multiple of key_value_heads {model.key_value_heads}; "
            f"use a divisor of heads, such as key_value_heads = {fitting}."
        )
    size = model.width // model.heads
    if size % 2:
        return (
            f"[model] the head size width / heads = {size} is odd, and rotary positions need pairs; "
            f"use width = {(size + 1) * model.heads}."
        )
    return None


def _subspace(it: Manifest) -> str | None:
    model = it.model
    if model.subspace > model.width:
        return f"[model] subspace {model.subspace} is more than width {model.width}; remove it, or set it to less."
    if model.subspace < model.width and not model.embedding_is_fixed:
        return (
            f"[model] embedding learnt leaves tokens only a subspace of {model.subspace} in width {model.width}; "
            f'use embedding = "fixed".'
        )
    return None


def _stages(it: Manifest) -> str | None:
    count, cuts, layers = it.stages.count, it.stages.first_layers, it.model.layers
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
            f"[stages] first_layers {list(cuts)} is no cut of {layers} layers; "
            f"begin with 0 and rise to at most {layers - 1}, or remove it to cut evenly."
        )
    return None


def _step_tokens(it: Manifest) -> str | None:
    each = it.tokens_per_microbatch
    if it.optimizer.target_tokens % each:
        return (
            f"[optimizer] target_tokens {it.optimizer.target_tokens} is not a multiple of the {each} tokens of a "
            f"microbatch ([schedule] microbatch {it.schedule.microbatch} x [model] context {it.model.context}); "
            f"use target_tokens = {nearest_multiple(it.optimizer.target_tokens, each)}."
        )
    return None


def _warmup(it: Manifest) -> str | None:
    if it.optimizer.warmup_steps >= it.optimizer.total_steps:
        return (
            f"[optimizer] warmup_steps {it.optimizer.warmup_steps} leaves nothing of total_steps "
            f"{it.optimizer.total_steps}; use fewer warmup_steps."
        )
    return None


def _codec(it: Manifest) -> str | None:
    try:
        codec = parse_codec(it.boundary.codec)
    except ManifestError as unknown:
        return str(unknown)
    if codec.columns >= it.model.subspace:
        return (
            f"[boundary] codec {codec.name} keeps {codec.columns} columns of boundaries that have "
            f"{it.model.subspace}; use fewer, or no top{codec.columns}: to send all of them."
        )
    return None


def _payload(it: Manifest) -> str | None:
    needed = it.max_payload_bytes
    if needed > MAX_PAYLOAD_BYTES:
        model = it.model
        return (
            f"A microbatch of {it.schedule.microbatch} x {model.context} x {model.subspace} {it.boundary.codec} is "
            f"{needed} bytes on the wire, over the limit of {MAX_PAYLOAD_BYTES}; use a smaller [schedule] microbatch."
        )
    return None


def _size(it: Manifest) -> str | None:
    try:
        size = len(it.canonical()) + SIGNING_BYTES
    except UnicodeEncodeError as error:  # a lone surrogate, where pydantic lets it pass
        return f"The text {shown(error.object)} is not valid Unicode; write it again."
    if size > MAX_MANIFEST_BYTES:
        return (
            f"The manifest has {size} bytes once signed, more than the {MAX_MANIFEST_BYTES} allowed; "
            f"list fewer [data] corpus paths or [admission] peers."
        )
    return None


def _tokenizer(it: Manifest) -> str | None:
    if it.data.tokenizer == "bytes" and it.model.vocabulary < 256:
        return (
            f"[model] vocabulary {it.model.vocabulary} is too small for [data] tokenizer bytes, which has 256 ids; "
            f"use vocabulary = 256."
        )
    return None


def _founder(it: Manifest) -> str | None:
    if it.founder and not is_peer_id(it.founder):
        return "founder is not a peer id; remove it, joining signs the manifest and sets it."
    return None


def _admission(it: Manifest) -> str | None:
    mode, peers = it.admission.mode, it.admission.peers
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
    if mode == "open" and peers:
        return "[admission] peers has no effect in mode open; use mode listed, or remove peers."
    return None


RULES: Final[tuple[Callable[[Manifest], str | None], ...]] = (
    _heads,
    _subspace,
    _stages,
    _step_tokens,
    _warmup,
    _codec,
    _payload,
    _size,
    _tokenizer,
    _founder,
    _admission,
)


def check_rules(manifest: Manifest, source: str) -> None:
    """Raise ManifestError for the first rule between fields that does not hold."""
    for rule in RULES:
        if problem := rule(manifest):
            raise ManifestError(f"{source}: {problem}")


def explain(error: ValidationError, root: type[BaseModel], source: str) -> ManifestError:
    """The first of pydantic's complaints as one sentence that names section, key, value and remedy."""
    first = error.errors(include_url=False)[0]
    path = first["loc"]
    if first["type"] == "extra_forbidden":
        return ManifestError(f"{source}: {_unknown(path, root)}")
    value = first["input"]
    said = f" {shown(value)}" if isinstance(value, int | float | str) else ""
    default = _default_of(path, root)
    remedy = "correct it, or remove it" + (f" for the default {default}." if default else ".")
    return ManifestError(f"{source}: {_where(path)}{said} {_complaint(first)}; {remedy}")


def _where(path: Sequence[str | int]) -> str:
    """("data", "corpus", 0) as "[data] corpus[0]"."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return f"[{path[0]}] {words[1:]}" if words else f"{path[0]}" if path else "the manifest"


def _complaint(first: Mapping[str, Any]) -> str:
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


def _field_of(path: Sequence[str | int], root: type[BaseModel]) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The section that a path leads into, and the field it names there."""
    section: Any = root
    for name in path[:1] if len(path) > 1 else ():
        field = section.model_fields.get(name)
        section = field.annotation if field else None
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return None, None
    return section, section.model_fields.get(str(path[min(1, len(path) - 1)])) if path else None


def _default_of(path: Sequence[str | int], root: type[BaseModel]) -> str | None:
    default = (_field_of(path, root)[1] or FieldInfo()).default
    return toml_value(default) if isinstance(default, int | float | str | tuple) else None


def _unknown(path: Sequence[str | int], root: type[BaseModel]) -> str:
    section, _ = _field_of(path, root)
    inside = f"[{path[0]}] has" if len(path) > 1 else "there is"
    return f"{inside} no key {str(path[-1])[:40]!r}; {suggest(str(path[-1]), section.model_fields if section else ())}"


def suggest(word: str, known: Iterable[str]) -> str:
    """What to do about an unknown word: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(word[:64], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}."
