"""SPEC.md says what the code does: every table, every constant in the prose, every name it uses."""

from __future__ import annotations

import re
from types import ModuleType

from agora_protocol import errors, frames, limits, messages, records, tensors

from .conftest import PROTOCOL

SPEC = (PROTOCOL / "SPEC.md").read_text(encoding="utf-8")


def rows(block: str) -> list[list[str]]:
    """The cells of a table of SPEC.md, read from its text alone."""
    inside = SPEC.split(f"<!-- begin {block} -->")[1].split(f"<!-- end {block} -->")[0]
    lines = [line for line in inside.splitlines() if line.startswith("|")]
    return [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| ---")
    ]


def test_every_table_is_as_the_code_renders_it(tables_script: ModuleType) -> None:
    assert tables_script.render(SPEC) == SPEC, "run protocol/tables.py"
    assert set(re.findall(r"<!-- begin (\w+) -->", SPEC)) == set(tables_script.TABLES)


def test_the_limits_quoted_are_those_enforced() -> None:
    quoted = {row[0]: row[1] for row in rows("limits")[1:]}
    assert quoted == {name: str(value) for name, value in vars(limits).items() if name.isupper()}
    assert len(quoted) > 25


def test_the_frame_types_and_dtypes_quoted_are_those_spoken() -> None:
    assert {(int(row[0]), row[1]) for row in rows("frames")[1:]} == {(int(it), it.name) for it in frames.FrameType}
    assert {row[0]: int(row[1]) for row in rows("dtypes")[1:]} == tensors.ITEM_BYTES


def test_the_errors_quoted_are_all_that_a_refusal_can_say() -> None:
    quoted = {row[0]: row[1] for row in rows("errors")[1:]}
    kinds: list[type[errors.AgoraError]] = [errors.Busy, errors.NotMyStage, errors.NotAdmitted, errors.WrongRun]
    kinds += [errors.Unsupported, errors.Refused, errors.Unavailable, errors.PeerFailed]
    soft = {kind.code for kind in kinds}
    assert {code for code, strike in quoted.items() if strike == "no"} == soft
    assert quoted.keys() == soft | errors.PROTOCOL_CODES.keys()


def test_every_field_of_every_message_and_record_is_quoted() -> None:
    for block, kinds in (("messages", messages.KINDS.values()), ("records", records.RECORDS.values())):
        expected = [[name, field.words] for kind in kinds for name, field in kind.FIELDS.items()]
        assert [row[:2] for row in rows(block) if row[0] != "field"] == expected


def test_the_prose_names_only_limits_that_exist() -> None:
    named = set(re.findall(r"\b(?:MAX_[A-Z_]+|PROTOCOL_[A-Z]+|[A-Z_]+_S)\b", SPEC))
    assert named <= vars(limits).keys()


def test_every_refusal_word_in_the_prose_exists() -> None:
    known = {row[0] for row in rows("errors")[1:]}
    words = set(re.findall(r"`(bad-[a-z]+|too-[a-z-]+|wrong-[a-z]+|not-[a-z-]+|out-of-[a-z]+|lives-[a-z-]+)`", SPEC))
    assert words and words <= known


def test_the_prefix_in_the_prose_is_the_prefix_in_the_code() -> None:
    table = SPEC.split("## 7. Frames")[1].split("<!--")[0]
    found = re.findall(r"^\| (\d+) \| (\d+) \| (\w+)", table, re.M)
    assert found == [
        ("0", "1", "magic"), ("1", "1", "type"), ("2", "2", "reserved"), ("4", "4", "call"), ("8", "4", "header_bytes"),
        ("12", "4", "payload_bytes"),
    ]  # fmt: skip
    assert f"magic, 0x{limits.FRAME_MAGIC:X}" in table
    prefix = frames.Prefix(frames.FrameType.REQUEST, 0x11223344, 0x55667788, 0x99AABBCC)
    assert prefix.to_bytes().hex() == "a6020000" + "44332211" + "88776655" + "ccbbaa99"


def test_the_sections_are_those_of_the_contents() -> None:
    listed = re.findall(r"^(\d{1,2})\. (.+)$", SPEC.split("## 1. Limits")[0], re.M)
    assert listed == re.findall(r"^## (\d+)\. (.+)$", SPEC, re.M)
