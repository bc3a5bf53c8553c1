"""Checks the multiaddrs that peers send each other before anything dials them.

Only internet addresses are allowed: a stranger must not make this peer dial a Unix socket, for example.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from agora_protocol.ids import PeerId, is_peer_id
from agora_protocol.limits import MAX_ADDRESS_BYTES

_HOST: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?\Z", re.ASCII)
_HASH: Final = re.compile(r"[A-Za-z0-9_-]{1,128}\Z", re.ASCII)
# By IP version, the leading bits of an address that addresses of one network have in common.
PREFIX_BITS: Final = {4: 24, 6: 48}
_RELAY_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{46,60}\Z", re.ASCII)


def _is_ip(version: int) -> Callable[[str], bool]:
    def is_address(text: str) -> bool:
        try:
            return ipaddress.ip_address(text).version == version and "%" not in text
        except ValueError:
            return False

    return is_address


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535


def _is_host(text: str) -> bool:
    return _HOST.match(text) is not None


def _is_hash(text: str) -> bool:
    return _HASH.match(text) is not None


def _is_any_peer_id(text: str) -> bool:
    # Of any key, since relays may not have Ed25519.
    return _RELAY_ID.match(text) is not None


PARTS: Final[dict[str, Callable[[str], bool] | None]] = {
    "ip4": _is_ip(4),
    "ip6": _is_ip(6),
    "dns": _is_host,
    "dns4": _is_host,
    "dns6": _is_host,
    "dnsaddr": _is_host,
    "tcp": _is_port,
    "udp": _is_port,
    "p2p": _is_any_peer_id,
    "certhash": _is_hash,
    "sni": _is_host,
    "quic": None,
    "quic-v1": None,
    "webtransport": None,
    "tls": None,
    "noise": None,
    "ws": None,
    "wss": None,
    "p2p-circuit": None,
}


@lru_cache(maxsize=4096)
def _grammar_problem(text: str) -> str | None:
    words = text.split("/")
    if words[0] != "" or len(words) < 2:
        return "must begin with /"
    at = 1
    while at < len(words):
        name = words[at]
        if name not in PARTS:
            return f"{name[:20]!r} is not an address part that agora uses"
        check = PARTS[name]
        if check is not None:
            at += 1
            if at >= len(words) or not check(words[at]):
                return f"/{name} is not followed by what belongs there"
        at += 1
    if len(words) < 3 or words[-2] != "p2p" or not is_peer_id(words[-1]):
        return "must end with /p2p/ and the peer id of an Ed25519 key"
    return None


def address_problem(text: str) -> str | None:
    """Returns in words what is wrong with a multiaddr (length, parts, an end other than /p2p/PEER); None: nothing."""
    if len(text) > MAX_ADDRESS_BYTES or not text.isascii():
        return f"must be at most {MAX_ADDRESS_BYTES} ASCII characters"
    return _grammar_problem(text)


def peer_of_address(address: str) -> PeerId:
    """Returns the peer id at the end of an address that is known to be valid; checks nothing."""
    return PeerId(address.rpartition("/")[2])


def address_prefix(multiaddr: str) -> str:
    """Returns the network that a multiaddr belongs to, as 203.0.113.0/24 or 2001:db8:1::/48; "" for any other text.

    Of a relayed address this is the relay's network: all that come through one relay share its part.
    """
    parts = multiaddr.split("/")
    for name, value in zip(parts[1::2], parts[2::2], strict=False):
        if name in ("ip4", "ip6"):
            try:
                address = ipaddress.ip_address(value)
            except ValueError:
                return ""
            return str(ipaddress.ip_network((address, PREFIX_BITS[address.version]), strict=False))
    return ""
