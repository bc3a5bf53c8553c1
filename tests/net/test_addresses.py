"""Which addresses are private, and which ports are held for p2pd."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from agora_protocol.addresses import address_problem
from agora_protocol.errors import LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.net.p2pd.addresses import (
    HeldPorts,
    check_port,
    host_and_port,
    interface_addresses,
    is_private,
    listening_places,
    public_network,
    public_only,
)
from agora.net.rpc.dialling import AddressBook

RELAYED = "/p2p/12D3KooWJh8qcyGgNZcyHmiyKVcAPggbd4AoSmPxExqV161dWcct/p2p-circuit"


@pytest.mark.parametrize(
    "host",
    [
        "/ip4/10.1.2.3",
        "/ip4/192.168.1.2",
        "/ip4/172.20.0.1",
        "/ip4/127.0.0.1",
        "/ip4/169.254.1.1",
        "/ip4/100.64.0.1",
        "/ip4/0.0.0.0",
        "/ip6/::1",
        "/ip6/fe80::1",
        "/ip6/fd00::1",
        "/ip6/::ffff:127.0.0.1",
        "/ip6/64:ff9b::7f00:1",
        "/ip6/2002:7f00:1::1",
        "/ip4/255.255.255.255",
        "/ip4/239.255.255.250",
        "/ip6/ff02::1",
        "/ip6/fec0::1",
        "/ip6/::",
        "/ip6/::7f00:1",
        "/ip6/::ffff:0:7f00:1",
        "/ip6/64:ff9b:1::a00:1",
        "/ip6/2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "/ip6/2a00:1450::5efe:a00:1",
        "/ip6/2a00:1450::200:5efe:a9fe:a9fe",
    ],
)
def test_addresses_of_a_lan_a_cable_or_this_machine_are_private(host: str) -> None:
    assert is_private(f"{host}/tcp/4001") and is_private(f"{host}/tcp/4001{RELAYED}")


METADATA = {
    "ip4": ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192"],
    "ip6": ["fd00:ec2::254", "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "2002:c000:c0::1"],
}


def test_the_metadata_services_of_clouds_are_private_in_every_form() -> None:
    for kind, hosts in METADATA.items():
        assert all(is_private(f"/{kind}/{host}/tcp/80") for host in hosts)


@pytest.mark.parametrize(
    "host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "0177.0.0.1", "0"]
)
def test_a_number_in_another_form_is_no_address_and_as_a_name_leads_nowhere(host: str) -> None:
    # Not the fixture's resolver: the machine's own, which reads them as addresses.
    assert address_problem(f"/ip4/{host}/tcp/80/p2p/{PEER}") is not None
    assert is_private(f"/ip4/{host}/tcp/80")
    book = AddressBook(lambda address: not is_private(address))
    book.learn_announced(PeerId(PEER), [f"/dns4/{host}/tcp/80/p2p/{PEER}"])
    assert dialled(book, PeerId(PEER)) == []


@pytest.mark.parametrize("host", ["/ip4/44.77.0.1", "/ip6/2a00:1450::1", "/dns4/example.org"])
def test_addresses_of_the_internet_are_not(host: str) -> None:
    addresses = [f"{host}/tcp/4001", f"{host}/tcp/4001{RELAYED}"]
    assert public_only([*addresses, "/ip4/10.0.0.1/tcp/1"]) == tuple(addresses)


def test_only_direct_tcp_addresses_have_a_host_and_a_port() -> None:
    assert host_and_port("/ip6/::1/tcp/4001") == ("ip6", "::1", 4001)
    assert host_and_port("/ip4/1.2.3.4/udp/4001/quic-v1") is None
    assert host_and_port(f"/ip4/1.2.3.4/tcp/4001{RELAYED}") is None


def test_a_held_port_is_free_for_one_who_shares_it_and_for_nobody_else() -> None:
    ports = HeldPorts()
    address, fixed = ports.hold_free_ports(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/4001"])
    parts = host_and_port(address)
    assert parts is not None and parts[2] != 0
    assert fixed == "/ip4/127.0.0.1/tcp/4001"
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", parts[2]))
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", parts[2]))
    ports.close()


def test_an_address_that_is_not_this_machines_is_named_with_what_to_do() -> None:
    with pytest.raises(LocalError, match="choose an address of this machine"):
        HeldPorts().hold_free_ports(["/ip4/192.0.2.1/tcp/0"])


def test_a_machine_without_ipv6_listens_on_ipv4_alone_and_says_so_when_that_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SocketWithoutIpv6(socket.socket):
        def __init__(self, family: int = socket.AF_INET) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family)

    monkeypatch.setattr("agora.net.p2pd.addresses.socket.socket", SocketWithoutIpv6)
    ports = HeldPorts()
    (address,) = ports.hold_free_ports(["/ip4/127.0.0.1/tcp/0", "/ip6/::/tcp/0"])
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    ports.close()
    with pytest.raises(LocalError, match="Address family not supported"):
        ports.hold_free_ports(["/ip6/::/tcp/0"])
    with pytest.raises(LocalError, match="Address family not supported"):
        check_port("/ip6/::/tcp/4001", "ip6", "::", 4001)


def test_a_machine_that_listens_everywhere_has_its_interfaces_addresses() -> None:
    assert "/ip4/127.0.0.1/tcp/4001" in interface_addresses(["/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/1/quic-v1"])
    assert listening_places(["/ip4/0.0.0.0/tcp/4001"]) == {"ip4": ("127.0.0.1", 4001)}
    assert listening_places(["/ip4/10.0.0.9/tcp/5", "/ip6/::/tcp/6"]) == {"ip4": ("10.0.0.9", 5), "ip6": ("::1", 6)}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A resolver: the IP addresses of each name."""
    known: dict[str, list[str]] = {}

    async def getaddrinfo(_: object, host: str, port: None, *, family: int = 0, type: int = 0) -> list[object]:
        found = [(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip) for ip in known.get(host, [])]
        if not found:
            raise socket.gaierror("no such name")
        return [(kind, type, 6, "", (ip, 0)) for kind, ip in found if family in (0, kind)]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


def dialled(book: AddressBook, peer: PeerId) -> list[str]:
    return asyncio.run(book.dialable(peer))


PEER = "12D3KooWJh8qcyGgNZcyHmiyKVcAPggbd4AoSmPxExqV161dWcct"


@pytest.mark.parametrize(
    ("kind", "host", "ips"),
    [
        ("dns4", "localhost", ["127.0.0.1"]),
        ("dns4", "169.254.169.254", ["169.254.169.254"]),
        ("dns6", "ip6-localhost", ["::1"]),
        ("dns4", "router.lan", ["192.168.0.1"]),
        ("dns", "mine.example.org", ["10.0.0.7", "fd00::7"]),
        ("dns6", "mapped.example.org", ["::ffff:127.0.0.1"]),
        ("dns6", "nat64.example.org", ["64:ff9b::a9fe:a9fe"]),
        ("dns4", "nowhere.example.org", []),
        ("dnsaddr", "any.example.org", ["44.77.0.1"]),
    ],
)
@pytest.mark.parametrize("relayed", [False, True])
def test_a_name_that_a_peer_announces_does_not_lead_to_private_addresses(
    names: dict[str, list[str]], kind: str, host: str, ips: list[str], relayed: bool
) -> None:
    names[host] = ips
    announced = f"/{kind}/{host}/tcp/9200{RELAYED if relayed else ''}/p2p/{PEER}"
    strict, lenient = AddressBook(lambda address: not is_private(address)), AddressBook()
    for book in (strict, lenient):
        book.learn_announced(PeerId(PEER), [announced])
    assert dialled(strict, PeerId(PEER)) == []
    assert len(dialled(lenient, PeerId(PEER))) == (0 if kind == "dnsaddr" else len(ips))
    strict.learn(PeerId(PEER), [announced])
    assert dialled(strict, PeerId(PEER)) == [announced], "an invite's is dialled"


def test_what_is_dialled_is_what_was_checked_and_public_names_still_lead_there(names: dict[str, list[str]]) -> None:
    names["peer.example.org"] = ["44.77.0.1", "10.0.0.1", "2a00:1450::1"]
    book = AddressBook(lambda address: not is_private(address))
    direct = f"/ip4/44.77.0.2/tcp/1/p2p/{PEER}"
    book.learn_announced(PeerId(PEER), [f"/dns/peer.example.org/tcp/4001/p2p/{PEER}", direct])
    expected = [f"/ip4/44.77.0.1/tcp/4001/p2p/{PEER}", f"/ip6/2a00:1450::1/tcp/4001/p2p/{PEER}", direct]
    assert dialled(book, PeerId(PEER)) == expected


def test_a_name_that_changes_after_it_was_checked_is_checked_each_time(names: dict[str, list[str]]) -> None:
    names["peer.example.org"] = ["44.77.0.1"]
    book = AddressBook(lambda address: not is_private(address))
    announced = f"/dns/peer.example.org/tcp/4001/p2p/{PEER}"
    public = f"/ip4/44.77.0.1/tcp/4001/p2p/{PEER}"
    assert asyncio.run(book.resolve([announced])) == [public]
    names["peer.example.org"] = ["169.254.169.254"]
    assert asyncio.run(book.resolve([announced, public])) == [public]


def test_a_relays_name_is_checked_as_well(names: dict[str, list[str]]) -> None:
    names["relay.lan"] = ["192.168.0.9"]
    relay, book = RELAYED.split("/")[2], AddressBook(lambda address: not is_private(address))
    other = Identity(bytes([7]) * 32).peer
    book.learn_announced(other, [f"/dns4/relay.lan/tcp/1{RELAYED}/p2p/{other}"])
    assert dialled(book, PeerId(relay)) == dialled(book, other) == []


@pytest.mark.parametrize(
    ("observed", "announced", "network"),
    [
        ("203.0.114.0/24", ("/ip4/198.41.0.4/tcp/1",), "203.0.114.0/24"),
        ("", ("/ip4/192.168.1.7/tcp/1", "/ip4/198.41.0.4/tcp/1"), "198.41.0.0/24"),
        ("127.0.0.0/24", ("/ip4/198.41.0.4/tcp/1",), "198.41.0.0/24"),
        ("192.168.1.0/24", ("/ip4/192.168.1.7/tcp/1",), ""),
        ("2a00:1450:1::/48", (), "2a00:1450:1::/48"),
        ("", (), ""),
    ],
    ids=["seen", "not connected", "through a tunnel", "in a LAN", "IPv6", "unknown"],
)
def test_the_network_of_a_peer_is_where_it_is_seen_and_only_without_that_what_it_announces(
    observed: str, announced: tuple[str, ...], network: str
) -> None:
    assert public_network(observed, announced) == network
