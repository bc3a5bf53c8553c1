"""Encodes and decodes base58 with Bitcoin's alphabet, as libp2p writes peer ids.

The cost is quadratic in the length, so callers bound the length first.
"""

from typing import Final

ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUE: Final = {character: value for value, character in enumerate(ALPHABET)}


def encode(data: bytes) -> str:
    """Returns `data` in base58: a '1' for each leading zero byte, then the rest as a big-endian number."""
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = ALPHABET[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def decode(text: str) -> bytes:
    """Returns the bytes of a base58 text, a zero byte for each leading '1'. Raises ValueError for other characters."""
    number = 0
    for character in text:
        if character not in _VALUE:
            raise ValueError(f"{character!r} is not a base58 character")
        number = number * 58 + _VALUE[character]
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
