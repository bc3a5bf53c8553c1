"""msgpack for strangers: one way to write it, and a reader whose every length and depth is bounded beforehand.

Knows msgpack; not what the values mean. Writing is deterministic for equal values given in equal order: shortest
integers, float64 for every float, str for text, bin for bytes; `canonical` also sorts the keys of every map.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from agora_protocol.errors import ProtocolError
from agora_protocol.limits import MAX_ARRAY_ITEMS, MAX_DEPTH, MAX_MAP_ITEMS, MAX_VALUES

_CONTAINERS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_REASONS: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException)


def pack(value: object) -> bytes:
    """The msgpack of plain values (None, bool, int, float, str, bytes, list, tuple, dict)."""
    # packb does the same behind a wrapper, for twice the time.
    return msgpack.Packer(use_bin_type=True).pack(value)  # type: ignore[no-any-return]


def canonical(value: Any) -> bytes:
    """The one msgpack of `value` that hashes and signatures are made of: keys of every map in order of their bytes."""
    return pack(_sorted(value))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def unpack(data: bytes | bytearray | memoryview, most: int, code: str = "bad-message") -> Any:
    """The value in `data`; arrays come as tuples. Raises ProtocolError(code), or "too-large" beyond `most` bytes.

    Before anything is built: size, nesting depth, number of values, and the length of every array, map, text and bytes
    are bounded, so neither a five-byte lie about a length nor a million tiny values cost anything. Map keys must be
    texts, and no key may appear twice.
    """
    if len(data) > most:
        raise ProtocolError("too-large", f"{len(data)} bytes of msgpack where at most {most} are allowed.")
    plain = bytes(data)
    _check_structure(plain, code)
    try:
        return msgpack.unpackb(
            plain,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_ext_len=0,
            ext_hook=_no_extension,
        )
    except _REASONS as error:
        raise ProtocolError(code, f"The bytes are not acceptable msgpack ({_short(error)}).") from None


def is_version(value: object, version: int) -> bool:
    """Whether a version field is exactly this integer; True and 1.0 equal 1 in Python, and are not it."""
    return type(value) is int and value == version


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError("an extension type")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map names one key twice")
    return found


def _check_structure(data: bytes, code: str) -> None:
    """Refuse deep nesting and floods of tiny values before the C reader, whose 1024 levels could each reserve an array.

    Both need many bytes that open a container. Honest headers have few, which one fast count shows; only where there
    are many are the tokens walked, and that walk is bounded too.
    """
    if len(data) - len(data.translate(None, _CONTAINERS)) > MAX_DEPTH and (problem := _walk(data)):
        raise ProtocolError(code, f"The msgpack {problem}.")


def _token_sizes() -> tuple[tuple[int, int, int], ...]:
    """For every first byte: bytes to skip, bytes of a following length, items per unit of it (0: it counts bytes)."""
    sizes = [(1, 0, 0)] * 256
    for byte in range(0xA0, 0xC0):
        sizes[byte] = (1 + (byte & 0x1F), 0, 0)
    for byte, skip in {
        0xCA: 5,
        0xCB: 9,
        0xCC: 2,
        0xCD: 3,
        0xCE: 5,
        0xCF: 9,
        0xD0: 2,
        0xD1: 3,
        0xD2: 5,
        0xD3: 9,
    }.items():
        sizes[byte] = (skip, 0, 0)
    for byte, skip in {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}.items():
        sizes[byte] = (skip, 0, 0)
    for byte, length in {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.items():
        sizes[byte] = (1 + length, length, 0)
    for byte, length in {0xC7: 1, 0xC8: 2, 0xC9: 4}.items():
        sizes[byte] = (2 + length, length, 0)
    for byte, length, unit in ((0xDC, 2, 1), (0xDD, 4, 1), (0xDE, 2, 2), (0xDF, 4, 2)):
        sizes[byte] = (1 + length, length, unit)
    return tuple(sizes)


_TOKENS: Final = _token_sizes()


def _items_opened(data: bytes, at: int) -> int:
    """How many items the container that opens at `at` will hold; -1 when the token there is no container."""
    byte = data[at]
    if 0x90 <= byte < 0xA0:
        return byte & 0x0F
    if 0x80 <= byte < 0x90:
        return 2 * (byte & 0x0F)
    _, length, unit = _TOKENS[byte]
    return unit * int.from_bytes(data[at + 1 : at + 1 + length], "big") if unit else -1


def _walk(data: bytes) -> str | None:
    """What is wrong with the structure of the first value in `data`, walking its tokens and building nothing."""
    open_items, at, end, seen = [1], 0, len(data), 0
    while open_items and at < end:
        open_items[-1] -= 1
        items = _items_opened(data, at)
        skip, length, unit = _TOKENS[data[at]]
        at += skip if unit or not length else skip + int.from_bytes(data[at + 1 : at + 1 + length], "big")
        seen += 1
        if items >= 0:
            open_items.append(items)
        if len(open_items) > MAX_DEPTH + 1:
            return f"nests deeper than {MAX_DEPTH} levels"
        if seen > MAX_VALUES:
            return f"has more than {MAX_VALUES} values"
        while open_items and open_items[-1] == 0:
            open_items.pop()
    return None
