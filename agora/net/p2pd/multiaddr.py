"""The binary form of multiaddrs, also of those that go through a relay. Pure.

It is written by hand. hivemind's Multiaddr cannot read an address that goes through a relay. The `multiaddr` package
can, but it reads an address that is cut short as another address, and refuses host names with a "_", as containers have
them, which p2pd dials.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from agora.net.p2pd.hivemind_shim import PeerID

CIRCUIT: Final = "p2p-circuit"
_CODES: Final = {"ip4": 4, "tcp": 6, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55, "p2p": 421, CIRCUIT: 290}
_NAMES: Final = {code: name for name, code in _CODES.items()}
_FIXED_BYTES: Final = {"ip4": 4, "ip6": 16, "tcp": 2, CIRCUIT: 0}


def encode_multiaddr(text: str) -> bytes:
    """Returns the binary form of a multiaddr; what stands before its first "/" is ignored.

    Raises ValueError for a protocol that is not in _CODES (IP, TCP, DNS, p2p, p2p-circuit), or a malformed value.
    """
    words = iter(text.split("/")[1:])
    encoded = b""
    for name in words:
        if name not in _CODES:
            raise ValueError(f"/{name} is not converted here")
        encoded += varint(_CODES[name])
        if name != CIRCUIT:
            encoded += _value_bytes(name, next(words, ""))
    return encoded


def decode_multiaddr(raw: bytes) -> str:
    """Returns the text of a binary multiaddr; "" for no bytes.

    Raises ValueError for a protocol that is not in _CODES, or malformed bytes.
    """
    rest = raw
    text = ""
    while rest:
        code, rest = read_varint(rest)
        if code not in _NAMES:
            raise ValueError(f"the address has a part of unknown code {code}")
        name = _NAMES[code]
        length = _FIXED_BYTES.get(name)
        if length is None:
            length, rest = read_varint(rest)
        if length > len(rest):
            raise ValueError("the address is cut short")
        value, rest = rest[:length], rest[length:]
        text += f"/{name}" if name == CIRCUIT else f"/{name}/{_value_text(name, value)}"
    return text


def varint(number: int) -> bytes:
    """Returns a number as protobuf's variable-length integer."""
    low = number & 0x7F
    return bytes([low]) if number == low else bytes([low | 0x80]) + varint(number >> 7)


def read_varint(data: bytes) -> tuple[int, bytes]:
    """Returns the variable-length integer with which `data` begins, and the bytes after it.

    Raises ValueError if the integer does not end within 10 bytes.
    """
    number = 0
    for index, byte in enumerate(data[:10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, data[index + 1 :]
    raise ValueError("a number is cut short")


def _value_bytes(name: str, value: str) -> bytes:
    if name in ("ip4", "ip6"):
        packed = ipaddress.ip_address(value).packed
        if len(packed) != _FIXED_BYTES[name]:
            raise ValueError(f"{value} is not a value of /{name}")
        return packed
    if name == "tcp":
        if not 0 <= int(value) < 65_536:
            raise ValueError(f"{value} is not a TCP port")
        return int(value).to_bytes(2, "big")
    if not value:
        raise ValueError(f"/{name} has no value")
    raw = PeerID.from_base58(value).to_bytes() if name == "p2p" else value.encode()
    return with_length(raw)


def _value_text(name: str, value: bytes) -> str:
    if name in ("ip4", "ip6"):
        return str(ipaddress.ip_address(value))
    if name == "tcp":
        return str(int.from_bytes(value, "big"))
    return str(PeerID(value)) if name == "p2p" else value.decode("ascii")


def with_length(body: bytes) -> bytes:
    """Returns `body` with its length before it, as a varint."""
    return varint(len(body)) + body
