"""The sentences that explain a wrong manifest: section, key, value, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from agora_protocol.errors import ManifestError
from agora_protocol.fields import describe
from agora_protocol.manifest_toml import toml_value


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


def nearest_multiple(value: int, of: int) -> int:
    """Returns the multiple of `of` that is closest to `value`, at least `of` itself."""
    return max(round(value / of), 1) * of
