"""Keeps the ports of the last start, so that this one listens on them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from agora_protocol.errors import LocalError

from agora.net.p2pd.addresses import check_port, host_and_port
from agora.node import paths

FAMILIES: Final = ("ip4", "ip6")
MAX_PORT: Final = 65_535


def read_ports(file: Path) -> dict[str, int]:
    """Returns the TCP port by "ip4" and "ip6" that the file holds; leaves out what is missing or malformed."""
    # Peers remember each other's addresses: when all machines of a run are restarted at the same time, no peer is left
    # to ask, and peers on new ports would not find each other. So a daemon listens on the ports of its last start.
    try:
        words = file.read_text(encoding="ascii").split()[:4]
    except (OSError, ValueError):
        return {}
    pairs = zip(words[::2], words[1::2], strict=False)
    return {
        family: int(port)
        for family, port in pairs
        if family in FAMILIES and port.isdecimal() and 0 < int(port) <= MAX_PORT
    }


def write_ports(file: Path, endpoints: Mapping[str, tuple[str, int]]) -> None:
    """Writes the TCP ports of `endpoints` to a file. Ignores an OSError: the next start then chooses other ports.

    endpoints: by "ip4" and "ip6", (host, port).
    """
    with contextlib.suppress(OSError):
        paths.replace_text(file, "".join(f"{family} {port}\n" for family, (_, port) in sorted(endpoints.items())))


def is_free(family: str, host: str, port: int) -> bool:
    """Tries to listen on a TCP port of an IP address; returns whether that works. family: "ip4" or "ip6"."""
    try:
        check_port("", family, host, port)
    except (LocalError, OSError):  # OSError: the kernel has no IPv6 any more
        return False
    return True


def with_last_ports(
    listen: Sequence[str], last: Mapping[str, int], is_free: Callable[[str, str, int], bool]
) -> tuple[str, ...]:
    """Returns the multiaddrs `listen`; in the first one of each family (ip4, ip6) with TCP port 0, puts the last port.

    An address whose last port is not free stays as it is. last: TCP port by "ip4" and "ip6". is_free: takes a family,
    an IP address and a port, and returns whether that can be listened on.
    """
    chosen = list[str]()
    left = dict(last)
    for address in listen:
        direct = host_and_port(address)
        if direct is not None and direct[2] == 0 and (port := left.pop(direct[0], 0)):
            family, host, _ = direct
            address = f"/{family}/{host}/tcp/{port}" if is_free(family, host, port) else address
        chosen.append(address)
    return tuple(chosen)
