"""Base class of messages and records, whose annotated fields carry their bounds and their documentation.

    class Pair(Structure):
        stage: int = int_field(0, 1023, doc="first stage to run")

Every instance is valid: the constructor checks every field, whether it was read from the wire or built by hand.

Not pydantic: every message passes here, and its strict floats take integers. Not msgspec either (tried with 0.22): it
would let pass what the protocol forbids, an integer for a float, the last of two equal keys, a default in place of a
missing key, and a text whose characters are few enough but whose bytes are not; and it checks nothing built by hand.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Self, dataclass_transform

from agora_protocol.addresses import address_problem
from agora_protocol.errors import AgoraError, ProtocolError
from agora_protocol.ids import Span, is_peer_id
from agora_protocol.limits import MAX_ADDRESSES, MAX_SPAN_STAGES, MAX_STAGES

Check = Callable[[Any], "str | None"]  # returns what is wrong with a value, or None
REQUIRED: Final = object()
MAX_UINT: Final = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a Structure; immutable.

    words: the field's type as SPEC.md prints it.
    check: returns what is wrong with a value, or None.
    default: REQUIRED if the field has none.
    load, dump: convert a value from and to its msgpack form; None if both are the same.
    """

    words: str
    check: Check
    default: Any = REQUIRED
    doc: str = ""
    load: Callable[[Any], Any] | None = None
    dump: Callable[[Any], Any] | None = None


def describe(value: object) -> str:
    """Returns any value that a peer or file has sent as text for an error message: short, and safe to print."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    if isinstance(value, int | float | str | bytes) or value is None:
        return repr(value[:40] if isinstance(value, str | bytes) else value)[:80]
    return f"a {type(value).__name__}"


def int_field(low: int, high: int, *, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: an int, not a bool, from `low` to `high`."""

    def find_problem(value: Any) -> str | None:
        if type(value) is not int:
            return f"is {describe(value)}; it must be an integer"
        return None if low <= value <= high else f"is {describe(value)}; it must be from {low} to {high}"

    return Field(f"int {low}..{high}", find_problem, default, doc)


def float_field(low: float, high: float, *, optional: bool = False, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: a finite float from `low` to `high`, or None if `optional`; an int is refused."""

    def find_problem(value: Any) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, float) or not math.isfinite(value):
            return f"is {describe(value)}; it must be a finite float"
        return None if low <= value <= high else f"is {describe(value)}; it must be from {low} to {high}"

    return Field(f"float {low:g}..{high:g}" + (" or nil" if optional else ""), find_problem, default, doc)


def bool_field(*, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: a bool."""

    def find_problem(value: Any) -> str | None:
        return None if isinstance(value, bool) else f"is {describe(value)}; it must be true or false"

    return Field("bool", find_problem, default, doc)


def text_field(most: int, *, pattern: str | None = None, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: a text of at most `most` bytes of UTF-8, all of which must match `pattern`, if given."""
    compiled = re.compile(pattern, re.ASCII) if pattern else None

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"is {describe(value)}; it must be a text"
        if len(value) > most or (not value.isascii() and _utf8_length(value) > most):
            return f"is longer than {most} bytes of UTF-8, or not valid Unicode"
        if compiled is not None and compiled.fullmatch(value) is None:
            return f"is {describe(value)}; it must match {pattern}"
        return None

    return Field(f"text <= {most} bytes" + (f", matches {pattern}" if pattern else ""), find_problem, default, doc)


def _utf8_length(value: str) -> float:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return math.inf


def bytes_field(*lengths: int, most: int | None = None, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: bytes of one of the `lengths`; or, if `most` is given, at most that many bytes."""
    words = " or ".join(map(str, lengths)) if most is None else f"<= {most}"

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, bytes):
            return f"is {describe(value)}; it must be bytes"
        fits = len(value) in lengths if most is None else len(value) <= most
        return None if fits else f"has {len(value)} bytes; it must have {words}"

    return Field(f"bytes {words}", find_problem, default, doc)


def hash_field(*, doc: str = "") -> Any:
    """Declares a field: a hash as a number below 2^256, 0 if unknown; on the wire it is 32 bytes, big-endian."""

    def find_problem(value: Any) -> str | None:
        fits = type(value) is int and 0 <= value < 2**256
        return None if fits else f"is {describe(value)}; it must be 32 bytes"

    return Field("bytes 32", find_problem, doc=doc, load=load_hash, dump=dump_hash)


def load_hash(value: Any) -> Any:
    """Returns 32 bytes as a number; anything else unchanged but for an integer, so that the check refuses it."""
    if isinstance(value, bytes) and len(value) == 32:
        return int.from_bytes(value, "big")
    return None if type(value) is int else value


def dump_hash(value: int) -> bytes:
    return value.to_bytes(32, "big")


def choice_field(*words: str, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: a text that is one of `words`."""

    def find_problem(value: Any) -> str | None:
        return (
            None
            if isinstance(value, str) and value in words
            else f"is {describe(value)}; it must be one of {', '.join(words)}"
        )

    return Field("one of " + ", ".join(words), find_problem, default, doc)


def peer_id_field(*, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: the base58 peer id of an Ed25519 key."""

    def find_problem(value: Any) -> str | None:
        fits = isinstance(value, str) and is_peer_id(value)
        return None if fits else f"is {describe(value)}; it must be the peer id of an Ed25519 key"

    return Field("peer id", find_problem, default, doc)


def span_field(*, doc: str = "") -> Any:
    """Declares a field: a Span of at most MAX_SPAN_STAGES stages; on the wire it is [first, last]."""

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, Span):
            return f"is {describe(value)}; it must be [first, last], two stages from 0 to {MAX_STAGES - 1} in order"
        return None if len(value) <= MAX_SPAN_STAGES else f"is {value}; a span has at most {MAX_SPAN_STAGES} stages"

    def load(value: Any) -> Any:
        # Anything but [first, last] is returned unchanged, so that the check refuses it.
        if isinstance(value, tuple) and len(value) == 2 and all(type(end) is int for end in value):
            try:
                return Span(*value)
            except AgoraError:
                return value
        return value

    return Field(
        f"[first, last], <= {MAX_SPAN_STAGES} stages",
        find_problem,
        REQUIRED,
        doc,
        load,
        lambda stages: (stages.first, stages.last),
    )


def list_field(item: Any, most: int, *, default: Any = REQUIRED, doc: str = "") -> Any:
    """Declares a field: a tuple of at most `most` items, each of which passes the check of the field `item`."""
    check_item: Check = item.check

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) > most:
            return f"must be a list of at most {most}"
        for position, entry in enumerate(value):
            if problem := check_item(entry):
                return f"[{position}] {problem}"
        return None

    return Field(f"list of <= {most} of ({item.words})", find_problem, default, doc)


def tuple_field(*items: Any) -> Any:
    """Declares a tuple of one value for each field of `items`, checked by it; for use as the item of a list_field."""

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(items):
            return f"is {describe(value)}; it must be a list of {len(items)}"
        for item, part in zip(items, value, strict=True):
            if problem := item.check(part):
                return problem  # type: ignore[no-any-return]
        return None

    return Field(f"[{', '.join(item.words for item in items)}]", find_problem)


def addresses_field(*, doc: str = "") -> Any:
    """Declares a field: a tuple of at most MAX_ADDRESSES multiaddrs that each end in /p2p/PEER."""

    def find_problem(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"is {describe(value)}; it must be a text"
        problem = address_problem(value)
        return f"is {describe(value)}; an address {problem}" if problem else None

    return list_field(Field("address", find_problem), MAX_ADDRESSES, doc=doc)


@dataclass_transform(
    frozen_default=True,
    field_specifiers=(
        int_field,
        float_field,
        bool_field,
        text_field,
        bytes_field,
        hash_field,
        choice_field,
        peer_id_field,
        span_field,
        list_field,
        addresses_field,
    ),
)
class Structure:
    """Base of messages and records: an immutable object whose fields convert to and from the map on the wire.

    Subclasses become frozen dataclasses. Every way to make an instance checks each field, and raises ProtocolError,
    with the code ERROR, for an invalid one.
    """

    FIELDS: ClassVar[dict[str, Field]] = {}
    # Whether a newer peer may send fields that this version does not know, and an older one lack fields with a default.
    # Not for what grants or forbids: who ignores half of a ticket grants too much.
    IS_OPEN: ClassVar[bool] = False
    ERROR: ClassVar[str] = "bad-message"
    # What follows from FIELDS, in tuples, which are faster to go through.
    _checks: ClassVar[tuple[tuple[str, Check], ...]] = ()
    _loads: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()
    _dumps: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.FIELDS = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        for name, field in cls.FIELDS.items():
            if field.default is REQUIRED:
                delattr(cls, name)
            else:
                setattr(cls, name, field.default)
        cls._checks = tuple((name, field.check) for name, field in cls.FIELDS.items())
        cls._loads = tuple((name, field.load) for name, field in cls.FIELDS.items() if field.load)
        cls._dumps = tuple((name, field.dump) for name, field in cls.FIELDS.items() if field.dump)
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, check in self._checks:
            if problem := check(values[name]):
                raise ProtocolError(self.ERROR, f"{type(self).__name__}.{name} {problem}.")
        if problem := self.find_problem():
            raise ProtocolError(self.ERROR, f"{type(self).__name__} {problem}.")

    def find_problem(self) -> str | None:
        """Returns why fields that are each valid do not fit together, or None; always None unless overridden."""
        return None

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields as plain values by name, for the wire.

        Do not change the map: it may be the instance's own.
        """
        fields = self.__dict__
        if self._dumps:
            fields = dict(fields)
            for name, dump in self._dumps:
                fields[name] = dump(fields[name])
        return fields

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Returns the instance with these fields, a map read from the wire.

        Raises ProtocolError when a field is invalid. One that is unknown is left out, and a missing one has its
        default, if the class IS_OPEN; else, and for a missing one without a default, it raises as well.
        """
        if not isinstance(fields, Mapping):
            raise ProtocolError(cls.ERROR, f"{cls.__name__} must be a map, not {describe(fields)}.")
        if fields.keys() != cls.FIELDS.keys():
            fields = _known_fields(cls, fields)
        made = object.__new__(cls)  # not cls(**fields): a frozen dataclass sets field by field, slowly
        values = made.__dict__
        for name in cls.FIELDS:  # in their order, which to_fields keeps
            values[name] = fields[name]
        for name, load in cls._loads:
            values[name] = load(values[name])
        made.__post_init__()
        return made


def _known_fields(cls: type[Structure], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    missing = {name: cls.FIELDS[name] for name in cls.FIELDS.keys() - fields.keys()}
    if not cls.IS_OPEN or any(field.default is REQUIRED for field in missing.values()):
        raise ProtocolError(cls.ERROR, _key_problem(cls, fields))
    usual = {name: field.dump(field.default) if field.dump else field.default for name, field in missing.items()}
    return {name: fields[name] if name in fields else usual[name] for name in cls.FIELDS}


def _key_problem(cls: type[Structure], fields: Mapping[str, Any]) -> str:
    unknown = sorted(describe(key) for key in fields.keys() - cls.FIELDS.keys())
    missing = sorted(
        name
        for name, field in cls.FIELDS.items()
        if name not in fields and (field.default is REQUIRED or not cls.IS_OPEN)
    )
    if unknown and not cls.IS_OPEN:
        return f"{cls.__name__} has no field {', '.join(unknown)[:200]}."
    return f"{cls.__name__} lacks {', '.join(missing)}."
