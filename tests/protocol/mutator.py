"""A seeded, structure-aware mutator: damages bytes, texts and msgpack values in the ways that break parsers.

Every case has its own number and nothing else decides it, so that a failure is repeated by its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

NUMBERS = (0, 1, -1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
EDGES: tuple[Any, ...] = (
    None, True, False, *NUMBERS, *FLOATS, "", "a", "\0", "\u00e9" * 40,
    "x" * 2000, "busy", "train", "/unix/tmp/x", b"", b"\0", bytes(16), bytes(32), bytes(5000), [], {}, [[]],
    [0, 1], [1, 0], [0] * 1100, {"a": 0}, {"": {"": []}}, [[0] * 30] * 30,
)  # fmt: skip
BYTES = bytes.fromhex("00017f8090a0a6c0c1c4c6c7d9dbdcdddedfff")


class Mutator(random.Random):
    """One case's source of damage."""

    def bytes_of(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """`data` with one to four pieces of damage."""
        made = bytearray(data)
        for _ in range(self.randint(1, 4)):
            at = self.randrange(len(made) + 1)
            size = min(self.choice((1, 1, 2, 4, 8, 64)), len(made) - at)
            match self.randrange(8):
                case 0 if at < len(made):
                    made[at] ^= 1 << self.randrange(8)
                case 1 if at < len(made):
                    made[at] = self.choice(BYTES)
                case 2:
                    del made[at:]
                case 3:
                    del made[at : at + size]
                case 4:
                    made[at:at] = self.randbytes(self.choice((1, 2, 4, 16, 300)))
                case 5:
                    made[at:at] = made[at : at + size] * self.choice((1, 2, 50))
                case 6:
                    made[at : at + 4] = self.choice(
                        (b"\xff" * 4, bytes(4), b"\x00\x00\x01\x00", b"\xdd\xff\xff\xff\xff")
                    )
                case 7 if others:
                    made[at:] = self.choice(others)[at:]
        return bytes(made)

    def text_of(self, text: str) -> str:
        """`text` with damage, some of it beyond ASCII."""
        made = list(text)
        for _ in range(self.randint(1, 4)):
            at = self.randrange(len(made) + 1)
            match self.randrange(5):
                case 0:
                    del made[at : at + self.choice((1, 1, 5, 1000))]
                case 1:
                    made[at:at] = self.choice("/@,%.:-=[]\"'\\\n\0 0zOl\u0661\u00e9\ud800")
                case 2:
                    made[at:at] = made[at : at + self.choice((1, 10, 100))] * self.choice((1, 3, 200))
                case 3:
                    made[at : at + 1] = self.choice(
                        ("%00", "%ED%A0%80", "/p2p", "/unix/x", "//", "nan", "1e999", "true")
                    )
                case 4:
                    made[at : at + 1] = str(self.choice((0, -1, 2**31, 2**64, 10**400)))
        return "".join(made)

    def value_of(self, value: Any) -> Any:
        """A msgpack value with one node of it replaced, removed, added, doubled or buried."""
        if isinstance(value, dict) and value and self.random() < 0.85:
            return self._map_of(value)
        if isinstance(value, list | tuple) and value and self.random() < 0.85:
            return self._list_of(list(value))
        if isinstance(value, bytes) and self.random() < 0.5:
            return self.bytes_of(value)
        if isinstance(value, str) and self.random() < 0.5:
            return self.text_of(value).encode(errors="replace").decode()
        if type(value) is int and self.random() < 0.5:
            return max(-(2**63), min(value + self.choice((-1, 1, 256, -256, 2**32)), 2**64 - 1))
        return self.choice(EDGES)

    def _map_of(self, value: dict[str, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = dict(value)
        key = self.choice([*made])
        match self.randrange(12):
            case 0:
                del made[key]
            case 1:
                made[self.choice(("extra", "", key + "x", key.upper(), "k" * 3000))] = self.choice(EDGES)
            case 2:
                made[self.choice((0, None, b"key", 1.5))] = made.pop(key)
            case 3:
                made |= {str(number): number for number in range(70)}
            case _:
                made[key] = self.value_of(made[key])
        return made

    def _list_of(self, made: list[Any]) -> list[Any]:
        at = self.randrange(len(made))
        match self.randrange(12):
            case 0:
                del made[at]
            case 1:
                made.insert(at, self.choice(EDGES))
            case 2:
                made *= self.choice((2, 9, 300))
            case 3:
                self.shuffle(made)
            case 4:
                for _ in range(self.choice((3, 16, 17, 100))):
                    made = [made]
            case _:
                made[at] = self.value_of(made[at])
        return made

    def like(self, value: Any) -> Any:
        """Another value of the same kind, which not only a parser has to judge: an extreme, a neighbour, a part."""
        if isinstance(value, dict) and value:
            key = self.choice([*value])
            return value | {key: self.like(value[key])}
        if isinstance(value, list | tuple) and value:
            return self._list_like(list(value))
        match value:
            case bool():
                return not value
            case int():
                near = value + self.choice((-1, 1, 2, 7, 100))
                return self.choice((near, near, *(number for number in NUMBERS if number >= 0), 3_000, 10**9))
            case float():
                factor = self.choice((0.0, -1.0, 0.5, 8.0, 50.0, 1e6, 1e30, 1e-30))
                return self.choice((value * factor, value * factor, *FLOATS, 1e12, 1e18))
            case bytes():
                return self.choice((self.bytes_of(value), bytes(len(value)), self.randbytes(len(value))))
            case str():
                words = (
                    "gradient",
                    "slice",
                    "train",
                    "evaluate",
                    "reference",
                    "accepted",
                    "finished",
                    "int8",
                    "normal2",
                )
                return self.choice((self.text_of(value).encode(errors="replace").decode(), *words))
        return self.choice(EDGES)

    def _list_like(self, made: list[Any]) -> list[Any]:
        at = self.randrange(len(made))
        match self.randrange(8):
            case 0:
                return made[:at]
            case 1:
                return made * self.choice((2, 3, 20))
            case 2:
                self.shuffle(made)
            case 3:
                made[at] = made[self.randrange(len(made))]
            case _:
                made[at] = self.like(made[at])
        return made

    def doubled_key(self, value: dict[str, Any]) -> bytes:
        """msgpack of a map one of whose keys stands there twice."""
        pairs = [*value.items(), self.choice([*value.items()])]
        return bytes([0xDE, *len(pairs).to_bytes(2, "big")]) + b"".join(
            msgpack.packb(part) for it in pairs for part in it
        )

    def buried(self) -> bytes:
        """msgpack nested deeper than any reader should follow."""
        return self.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01")) * self.choice((20, 1000, 30_000)) + b"\xc0"

    def packed(self, value: Any) -> bytes:
        """msgpack of a mutated value; now and then with its bytes damaged as well."""
        try:
            data = bytes(msgpack.packb(value, use_single_float=self.random() < 0.05))
        except OverflowError:  # a double that no single holds
            data = bytes(msgpack.packb(value))
        return self.bytes_of(data) if self.random() < 0.15 else data
