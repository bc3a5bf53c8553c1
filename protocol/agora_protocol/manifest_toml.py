"""Makes the text of a manifest file that people can edit: every key with a line that documents it. Reads nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

_COLUMN = 34


def manifest_text(manifest: Manifest) -> str:
    """Returns the text of a manifest file without [signed]: every key (founder only if set) with its documentation."""
    lines = ["# A run of agora. Every key is optional except where a comment says so; unknown keys are errors.", ""]
    sections = {}
    for name, field in type(manifest).model_fields.items():
        value = getattr(manifest, name)
        if isinstance(value, BaseModel):
            sections[name] = value
        elif name != "founder" or value:
            lines.append(_key_line(name, value, field))
    for name, section in sections.items():
        lines += ["", f"[{name}]  # {_section_summary(section)}"]
        lines += [_key_line(key, getattr(section, key), field) for key, field in type(section).model_fields.items()]
    return "\n".join(lines) + "\n"


def signed_table(run: str, signature: bytes) -> str:
    """Returns the [signed] table, with run id and signature, that is appended to make a manifest file a signed one."""
    return (
        "\n[signed]  # by founder, over everything above; any change makes it invalid"
        f'\nrun = "{run}"\nsignature = "{signature.hex()}"\n'
    )


def _section_summary(section: BaseModel) -> str:
    return (type(section).__doc__ or "").strip().splitlines()[0]


def _key_line(name: str, value: Any, field: FieldInfo) -> str:
    return f"{f'{name} = {toml_value(value)}':<{_COLUMN}}  # {field.description}"


def toml_value(value: Any) -> str:
    """Returns the TOML of a text, a number, a bool or a tuple of these; a tuple of tuples has a line for each."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            return "[\n" + "".join(f"    {toml_value(item)},\n" for item in value) + "]"
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return _toml_text(value)
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def _toml_text(value: str) -> str:
    # Returns a TOML string: in single quotes if it has double quotes; otherwise as in JSON, with DEL escaped.
    if '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
