"""Why no peer of an invite was reached, and what to do about it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agora.net.p2pd.addresses import is_private

EXPLAIN_TIMEOUT_S: Final = 3.0  # seconds for a dial that finds out why a peer was not reached
MAX_EXPLAINED: Final = 3  # at most this many hosts are dialled for that


def explain_nobody_left(given: int, others: int, banned: Path) -> str:
    """Returns why no address is left to dial, and what to do.

    given: how many addresses there are. others: how many of them are not this peer's own.
    """
    if not given:
        return "it names no address; ask for an invite of a daemon that runs"
    if not others:
        return (
            "it names only this machine's own key; use an invite that another machine gave, "
            "and if that one has a copy of this data directory, remove identity.key in one of the two"
        )
    return f"all its peers are banned here; look at {banned}, or ask for an invite of another peer"


async def explain_unreachable(addresses: Sequence[str]) -> str:
    """Dials the hosts of some addresses, for EXPLAIN_TIMEOUT_S; returns why each cannot be reached, and what to do."""
    found = dict.fromkeys(endpoint for address in addresses if (endpoint := _endpoint_of(address)) is not None)
    causes = await asyncio.gather(*(_dial_for_a_cause(host, port) for host, port in list(found)[:MAX_EXPLAINED]))
    return "; ".join(dict.fromkeys(causes)) or "it is reached only through relays that are gone; ask for a newer invite"


def _endpoint_of(address: str) -> tuple[str, int] | None:
    words = address.split("/")
    is_tcp = len(words) > 4 and words[3] == "tcp" and words[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
    return (words[2], int(words[4])) if is_tcp and words[4].isdecimal() else None


async def _dial_for_a_cause(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError, TimeoutError) as error:
        return cause_of(error, host, port)
    writer.transport.abort()
    return cause_of(None, host, port)


def cause_of(error: Exception | None, host: str, port: int) -> str:
    """Returns why a peer was not reached at a host, by the result of a TCP connection there, and what to do about it.

    error: None if the connection was made.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    number = getattr(error, "errno", None)
    if error is None:
        return (
            f"{place} accepts connections, but the peer that the invite names is not there (a new key, or another "
            "program); ask for a newer invite"
        )
    if isinstance(error, UnicodeError) or number == socket.EAI_NONAME or number == getattr(socket, "EAI_NODATA", None):
        return f"there is no host {host}; correct the name in the invite, or ask for one with an IP address"
    if isinstance(error, socket.gaierror):
        return (
            f"the name {host} cannot be looked up ({error.strerror}); check this machine's network and its name server "
            "in /etc/resolv.conf"
        )
    if number == errno.ECONNREFUSED:
        return f"{place} refuses connections: no daemon listens there now; start it again, or ask for a newer invite"
    if number in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        family = "IPv6 " if ":" in host else ""
        return (
            f"this machine has no {family}route to {host}; check its network, or ask for an invite with other addresses"
        )
    text = f"{place} does not answer"
    if not isinstance(error, TimeoutError) and number != errno.ETIMEDOUT:
        text += f" ({getattr(error, 'strerror', None) or error})"
    if is_private(f"/ip6/{host}" if ":" in host else f"/ip4/{host}"):
        return f"{text}: it is a private address, which only machines on its own network can dial; ask for a public one"
    return f"{text}: that machine is off, or a firewall lets nothing through to that port; check both"
