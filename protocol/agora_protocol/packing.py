"""Writes msgpack in one form, and reads msgpack from any peer with every length and depth bounded beforehand.

Equal values in equal order give equal bytes: shortest integers, float64 for every float, str for text, bin for bytes.
`pack_canonical` also sorts the keys of every map.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from agora_protocol.errors import ProtocolError
from agora_protocol.limits import MAX_ARRAY_ITEMS, MAX_DEPTH, MAX_MAP_ITEMS, MAX_VALUES

_CONTAINERS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_REASONS: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException)


def pack(value: object) -> bytes:
    """Returns the msgpack of a plain value (None, bool, int, float, str, bytes, list, tuple, dict)."""
    # packb does the same behind a wrapper, for twice the time.
    return msgpack.Packer(use_bin_type=True).pack(value)  # type: ignore[no-any-return]


def pack_canonical(value: Any) -> bytes:
    """Returns the msgpack of `value` with the keys of every map sorted by their bytes; for hashes and signatures."""
    return pack(_sort_keys(value))


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sort_keys(item) for item in value]
    return value


def unpack(
    data: bytes | bytearray | memoryview,
    most: int,
    code: str = "bad-message",
    *,
    max_items: int = MAX_ARRAY_ITEMS,
    max_values: int = MAX_VALUES,
) -> Any:
    """Returns the value in `data`, with arrays as tuples.

    Raises ProtocolError with `code` for malformed bytes, with "too-large" for more than `most` bytes. Before anything
    is built, it bounds the size, the nesting depth, the number of values, and the length of every array, map, text and
    bytes; so neither a false length nor a million tiny values cost much. Map keys must be texts, and no key may appear
    twice. max_items: items of one array. max_values: keys and values in all.
    """
    if len(data) > most:
        raise ProtocolError("too-large", f"{len(data)} bytes of msgpack where at most {most} are allowed.")
    plain = bytes(data)
    _check_structure(plain, code, max_values)
    try:
        return msgpack.unpackb(
            plain,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_dict_of_unique,
            max_array_len=max_items,
            max_map_len=MAX_MAP_ITEMS,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except _REASONS as error:
        raise ProtocolError(code, f"The bytes are not acceptable msgpack ({_short(error)}).") from None


def is_version(value: object, version: int) -> bool:
    """Returns whether `value` is exactly this integer: True and 1.0, which equal 1 in Python, are not."""
    return type(value) is int and value == version


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError("an extension type")


def _dict_of_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a map names one key twice")
    return values


def _check_structure(data: bytes, code: str, max_values: int) -> None:
    # Before msgpack's own reader, which allows 1024 levels and could reserve an array for each. Deep nesting and many
    # values both need many bytes that open a container. Honest headers have few, which this fast count shows; only the
    # others are walked token by token.
    if len(data) - len(data.translate(None, _CONTAINERS)) > MAX_DEPTH and (
        problem := _find_structure_problem(data, max_values)
    ):
        raise ProtocolError(code, f"The msgpack {problem}.")


# For each first byte of a msgpack token: the bytes to skip, the bytes of the length field that follows, and the items
# for each unit of that length (0 where the length counts bytes).
def _token_sizes() -> tuple[tuple[int, int, int], ...]:
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


def _item_count(data: bytes, at: int) -> int:
    # -1: no container. A map's keys and values both count.
    byte = data[at]
    if 0x90 <= byte < 0xA0:
        return byte & 0x0F
    if 0x80 <= byte < 0x90:
        return 2 * (byte & 0x0F)
    _, length, unit = _TOKENS[byte]
    return unit * int.from_bytes(data[at + 1 : at + 1 + length], "big") if unit else -1


def _find_structure_problem(data: bytes, max_values: int) -> str | None:
    open_items, at, end, seen = [1], 0, len(data), 0
    while open_items and at < end:
        open_items[-1] -= 1
        items = _item_count(data, at)
        skip, length, unit = _TOKENS[data[at]]
        at += skip if unit or not length else skip + int.from_bytes(data[at + 1 : at + 1 + length], "big")
        seen += 1
        if items >= 0:
            open_items.append(items)
        if len(open_items) > MAX_DEPTH + 1:
            return f"nests deeper than {MAX_DEPTH} levels"
        if seen > max_values:
            return f"has more than {max_values} values"
        while open_items and open_items[-1] == 0:
            open_items.pop()
    return None
