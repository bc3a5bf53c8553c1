"""Invites and addresses: what they look like, and what is never dialled."""

from __future__ import annotations

import shlex

import pytest
from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.errors import InputError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_ADDRESS_BYTES, MAX_ADDRESSES, MAX_INVITE_BYTES

RUN = RunId("ab" * 32)
PEER = Identity(bytes(range(32))).peer
ADDRESS = f"/ip4/203.0.113.7/tcp/31000/p2p/{PEER}"
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize("name", ["", "tiny", "two words", "a/b@c,d%20", "\u00e9\u4e2d"])
def test_an_invite_reads_what_it_writes_and_needs_no_quoting(name: str) -> None:
    invite = Invite(RUN, (ADDRESS, f"/dns4/a.example/tcp/1/p2p/{PEER}"), name)
    assert Invite.parse(f"  {invite}\n") == invite
    assert shlex.split(str(invite)) == [str(invite)] == [shlex.quote(str(invite))]


def test_the_run_id_may_be_typed_in_capitals() -> None:
    text = str(Invite(RUN, (ADDRESS,)))
    assert Invite.parse(text.replace("ab" * 32, "AB" * 32)).run == RUN


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with agora://"),
        ("http://x", "begins with agora://"),
        ("agora://" + "a" * MAX_INVITE_BYTES, "at most"),
        (f"agora://{RUN}", "not of the form"),
        (f"agora://{RUN}/tiny", "not of the form"),
        (f"agora://{RUN[:-1]}/tiny@{ADDRESS}", "run id is not 64 hex"),
        (f"agora://{RUN}/tiny@", "address ''"),
        (f"agora://{RUN}/tiny@{ADDRESS[:-1]}", "must end with /p2p/"),
        (f"agora://{RUN}/tiny@{ADDRESS},", "address ''"),
        (f"agora://{RUN}/tiny@" + ",".join([ADDRESS] * (MAX_ADDRESSES + 1)), f"1 to {MAX_ADDRESSES} addresses, not 17"),
        (f"agora://{RUN}/tiny@/unix/run/docker.sock/p2p/{PEER}", "'unix' is not an address part"),
        (f"agora://{RUN}/{'x' * 65}@{ADDRESS}", "longer than 64 bytes"),
        (f"agora://{RUN}/a%0Ab@{ADDRESS}", "unprintable"),
        (f"agora://{RUN}/a%ED%A0%80b%00@{ADDRESS}", "unprintable"),
    ],
)
def test_a_damaged_invite_says_what_is_wrong_and_what_to_do(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        Invite.parse(text)
    assert says in str(caught.value) and "copy the whole line" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "address",
    [
        ADDRESS,
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
        f"/ip6/::1/udp/65535/quic-v1/p2p/{PEER}",
        f"/dns4/a-b.example./tcp/443/tls/ws/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{RSA}/p2p-circuit/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/1/quic-v1/webtransport/certhash/uEiA_-9/p2p/{PEER}",
        f"/p2p/{PEER}",
    ],
)
def test_internet_addresses_are_addresses(address: str) -> None:
    assert address_problem(address) is None
    assert peer_of_address(address) == PEER


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "//",
        PEER,
        f"p2p/{PEER}",
        f"/p2p/{PEER}/",
        f"/p2p/{RSA}",
        "/ip4/1.2.3.4/tcp/1",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit",
        f"/ip4/1.2.3/tcp/1/p2p/{PEER}",
        f"/ip4/::1/tcp/1/p2p/{PEER}",
        f"/ip6/fe80::1%25eth0/tcp/1/p2p/{PEER}",
        f"/ip6/fe80::1%eth0/tcp/1/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/\u0661/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/-1/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp//p2p/{PEER}",
        f"/dns4/a b/tcp/1/p2p/{PEER}",
        f"/dns4/{'a' * 64}.b/tcp/1/p2p/{PEER}",
        f"/unix/tmp/p2p/{PEER}",
        f"/onion3/x:1/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}\n",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}\u00e9",
        "/ip4/1.2.3.4/tcp/1" + "/ws" * 100 + f"/p2p/{PEER}",
        "/" * 1_000_000,
    ],
)
def test_everything_else_is_not(address: str) -> None:
    problem = address_problem(address)
    assert problem is not None and len(problem) < 120


def test_the_longest_honest_addresses_fit() -> None:
    six = "/ip6/2001:0db8:ffff:ffff:ffff:ffff:ffff:ffff/udp/65535/quic-v1"
    assert len(f"{six}/p2p/{PEER}/p2p-circuit/p2p/{PEER}") <= MAX_ADDRESS_BYTES
