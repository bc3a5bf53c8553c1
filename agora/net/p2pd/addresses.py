"""Finds this machine's own addresses and ports, and which addresses are private.

An address is private if not all of the internet can dial it: of a LAN, of one cable, of loopback, behind a carrier's
NAT, or reserved (RFC 6890).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import psutil
from agora_protocol.addresses import address_prefix, address_problem, peer_of_address
from agora_protocol.errors import InputError, LocalError
from agora_protocol.ids import PeerId

ANY: Final = {"ip4": "0.0.0.0", "ip6": "::"}  # the addresses to listen on that stand for all of the machine's
RESOLVE_TIMEOUT_S: Final = 2.0  # seconds that a resolver may take for one name
_NAME_FAMILIES: Final = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP: Final = (0x00005EFE, 0x02005EFE)  # the third of an address' four words, of which the last is an IPv4 address
# Private, although is_global has some as global, depending on Python's version: a cloud's own services (192.0.0.192 has
# Oracle's metadata, 168.63.129.16 Azure's), translations within a network, Teredo, site-local.
_NOT_GLOBAL: Final = [
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",
        "168.63.129.16/32",
        "::/96",
        "::ffff:0:0:0/96",
        "64:ff9b:1::/48",
        "2001::/23",
        "fec0::/10",
    )
]
_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


def host_and_port(address: str) -> tuple[str, str, int] | None:
    """Returns ("ip4" or "ip6", the host as written, the port) of a direct TCP multiaddr; None for any other text."""
    words = address.split("/")
    if len(words) < 5 or words[1] not in ANY or words[3] != "tcp" or not words[4].isdecimal():
        return None
    return None if is_circuit(address) else (words[1], words[2], int(words[4]))


def is_circuit(address: str) -> bool:
    """Returns whether a multiaddr goes through a relay."""
    return "/p2p-circuit" in address


def is_private(address: str) -> bool:
    """Returns whether a multiaddr begins with an IP address that not all of the internet can dial.

    False for host names (/dns...), see resolve_name; True for a malformed address.
    """
    words = address.split("/")
    if len(words) < 3 or words[1] not in ANY:
        return len(words) < 3 or not words[1].startswith("dns")
    try:
        return not _is_global(words[2])
    except ValueError:
        return True


def _is_global(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    if not ip.is_global or ip.is_multicast or any(ip in network for network in _NOT_GLOBAL):
        return False
    if ip.version == 6:
        # IPv6 addresses that stand for an IPv4 address lead where that does: mapped, 6to4, NAT64 (RFC 6052), ISATAP.
        is_last = ip in _NAT64 or int(ip) >> 32 & 0xFFFFFFFF in _ISATAP
        within = ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if is_last else None)
        return within is None or _is_global(str(within))
    return True


def is_named(address: str) -> bool:
    """Returns whether a multiaddr begins with a host name: only who resolves it knows where it leads."""
    return address.startswith("/dns")


async def resolve_name(address: str) -> list[str]:
    """Returns a multiaddr that begins with a host name (/dns, /dns4, /dns6), with each IP address that the name has.

    Empty when the name does not resolve within RESOLVE_TIMEOUT_S, and for /dnsaddr.
    """
    _, kind, host, *rest = address.split("/")
    if kind not in _NAME_FAMILIES:
        return []
    family, resolver = _NAME_FAMILIES[kind], asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await resolver.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return []
    hosts = dict.fromkeys((family, str(place[0])) for family, *_, place in found)
    return ["/".join(["", "ip6" if family == socket.AF_INET6 else "ip4", ip, *rest]) for family, ip in hosts]


def addresses_by_peer(addresses: Iterable[str]) -> dict[PeerId, list[str]]:
    """Returns each peer's multiaddrs, in the order given: those that end in /p2p/ and the peer's id.

    Raises InputError for the first malformed one.
    """
    by_peer: dict[PeerId, list[str]] = defaultdict(list)
    for address in addresses:
        if problem := address_problem(address):
            raise InputError(f"{address!r} {problem}; it should look like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...")
        by_peer[peer_of_address(address)].append(address)
    return dict(by_peer)


def relays_of(addresses: Sequence[str]) -> dict[PeerId, list[str]]:
    """Returns the relays that `addresses` go through: peer id -> the relay's own addresses, each with /p2p/RELAY.

    Addresses that go through no relay, or do not name it, are ignored.
    """
    relays: dict[PeerId, list[str]] = {}
    for address in filter(is_circuit, addresses):
        own = address.partition("/p2p-circuit")[0]
        if "/p2p/" in own:
            relays.setdefault(PeerId(own.rpartition("/")[2]), []).append(own)
    return relays


def public_only(addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns the addresses that are not private, in their order."""
    return tuple(address for address in addresses if not is_private(address))


@functools.lru_cache(maxsize=4096)  # it is asked for all replicas, for each shard of a round
def public_network(observed: str, announced: tuple[str, ...]) -> str:
    """Returns the public network of a peer, as 203.0.113.0/24: that of `observed`, else of an `announced` address.

    observed: the network in which it is connected, see address_prefix; "" if it is not. Returns "" where both are
    private or unknown, as in a LAN.
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_network(observed).is_global:
            return observed
    return next(filter(None, map(address_prefix, public_only(announced))), "")


def interface_addresses(listen: Sequence[str]) -> list[str]:
    """Returns the direct TCP multiaddrs of `listen`; 0.0.0.0 and :: become one for each address of the interfaces.

    Leaves out all other addresses. The interfaces' addresses include loopback, but not link-local IPv6.
    """
    found = []
    for address in listen:
        parts = host_and_port(address)
        if parts is None:
            continue
        kind, host, port = parts
        hosts = _own_ips(_FAMILIES[kind]) if host == ANY[kind] else [host]
        found += [f"/{kind}/{each}/tcp/{port}" for each in hosts]
    return found


def listening_places(listen: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns the host and port at which this machine itself can dial what listens at `listen`, by "ip4" and "ip6".

    Of each kind, takes the last on 127.x, else the first; replaces 0.0.0.0 and :: by loopback. A kind may be missing.
    """
    places = {}
    for kind, host, port in filter(None, map(host_and_port, listen)):
        if kind not in places or host.startswith("127."):
            places[kind] = ("127.0.0.1" if kind == "ip4" else "::1") if host == ANY[kind] else host, port
    return places


def _own_ips(family: socket.AddressFamily) -> list[str]:
    known = [each.address for listed in psutil.net_if_addrs().values() for each in listed if each.family == family]
    return [each for each in known if "%" not in each]


class HeldPorts:
    """Chooses free TCP ports, and keeps other programs from getting them before p2pd listens there, until `close`.

    p2pd can listen on a held port, because both set SO_REUSEPORT and belong to one user.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def hold_free_ports(self, listen: Sequence[str]) -> list[str]:
        """Returns the multiaddrs `listen`; in those of TCP port 0, puts free ports, which are held until `close`.

        Leaves out addresses of an IP version that this machine's kernel does not have, unless none would be left.
        Raises LocalError for a host that is not an address of this machine.
        """
        present = [address for address in listen if _has_ip_version_of(address)]
        return [self._hold_free_port(address) for address in present or listen]

    def _hold_free_port(self, address: str) -> str:
        parts = host_and_port(address)
        if parts is None or parts[2] != 0:
            return address
        kind, host, _ = parts
        try:
            held = socket.socket(_FAMILIES[kind])
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if kind == "ip6":
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind((host, 0))
        except OSError as error:
            raise _listen_error(address, 0, error) from error
        return f"/{kind}/{host}/tcp/{held.getsockname()[1]}"

    def close(self) -> None:
        """Stops holding the ports. May be called twice."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def check_port(address: str, family: str, host: str, port: int) -> None:
    """Checks that this machine can listen on a TCP port, by doing so for a moment; raises LocalError if it cannot.

    address: the multiaddr that the error names. family: "ip4" or "ip6", of `host`.
    """
    # p2pd listens with SO_REUSEPORT, so a second one on the same port would start and take some of the first's streams.
    try:
        with socket.socket(_FAMILIES[family]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        raise _listen_error(address, port, error) from error


def _has_ip_version_of(address: str) -> bool:
    parts = host_and_port(address)
    if parts is None:
        return True
    try:
        socket.socket(_FAMILIES[parts[0]]).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def _listen_error(address: str, port: int, error: OSError) -> LocalError:
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} is taken; choose another with --listen, or stop the program that listens there"
    else:
        why = f"{error.strerror}; choose an address of this machine, such as /ip4/0.0.0.0/tcp/{port}"
    return LocalError(f"Cannot listen on {address}: {why}.")
