"""Makes the text of a manifest file that people can edit: every key with a line that documents it. Reads nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Item

_COLUMN = 34  # at which the comments begin, where the values leave room
_HEAD = "A run of agora. Every key is optional except where a comment says so; unknown keys are errors."


def manifest_text(manifest: BaseModel, left_out: Collection[tuple[str, str]] = ()) -> str:
    """Returns the text of a manifest file without [signed]: every key (founder only if set) with its documentation.

    left_out: sections and keys that it does not have.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEAD))
    document.add(tomlkit.nl())
    sections = {}
    for name, field in type(manifest).model_fields.items():
        value = getattr(manifest, name)
        if isinstance(value, BaseModel):
            sections[name] = value
        elif name != "founder" or value:
            document.add(name, _commented(name, value, field.description))
    for name, section in sections.items():
        table = tomlkit.table()
        table.comment((type(section).__doc__ or "").strip().splitlines()[0])
        table.trivia.comment_ws = "  "
        for key, field in type(section).model_fields.items():
            if (name, key) not in left_out:
                table.add(key, _commented(key, getattr(section, key), field.description))
        if table:
            document.add(name, table)
    return document.as_string()


def signed_table(run: str, signature: bytes) -> str:
    """Returns the [signed] table, with run id and signature, that is appended to make a manifest file a signed one."""
    return (
        "\n[signed]  # by founder, over everything above; any change makes it invalid"
        f'\nrun = "{run}"\nsignature = "{signature.hex()}"\n'
    )


def toml_value(value: Any) -> str:
    """Returns the TOML of a text, a number, a bool or a tuple of these; a tuple of tuples has a line for each."""
    return _toml_item(value).as_string()


def _commented(key: str, value: Any, comment: str | None) -> Item:
    item = _toml_item(value).comment(comment or "")
    item.trivia.comment_ws = " " * (_COLUMN - len(f"{key} = {item.as_string()}")) + "  "
    return item


def _toml_item(value: Any) -> Item:
    if isinstance(value, tuple):
        array = tomlkit.array()
        array.extend(map(_toml_item, value))
        return array.multiline(bool(value) and isinstance(value[0], tuple))
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return tomlkit.string(value, literal=True)  # JSON, such as a model's config, stays readable
    item: Item = tomlkit.item(value)
    return item
