"""What a daemon says when no peer of its invite answers: the cause, and what to do about it."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agora.node.process import unreachable
from agora.node.process.unreachable import cause_of, explain_nobody_left, explain_unreachable
from tests.net.helpers import run

PEER = "12D3KooWP93rHj8zHB4FK1SHUFT4H6LT8qPegVN3oMLXTr7rV134"


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "host", "says"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "nosuch.invalid", "no host nosuch.invalid"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "a.example", "cannot be looked up .*resolv.conf"),
        (UnicodeError("label too long"), "a" * 70, "correct the name in the invite"),
        (failed(errno.ECONNREFUSED), "192.0.2.1", r"192.0.2.1:7 refuses .*no daemon listens"),
        (failed(errno.ENETUNREACH), "2001:db8::1", "no IPv6 route to 2001:db8::1"),
        (failed(errno.EAFNOSUPPORT), "2001:db8::1", "no IPv6 route"),
        (failed(errno.ENETUNREACH), "192.0.2.1", "no route to 192.0.2.1; check its network"),
        (failed(errno.EHOSTUNREACH), "203.0.113.9", r"No route to host.*"),
        (TimeoutError(), "8.8.8.8", "8.8.8.8:7 does not answer: that machine is off, or a firewall"),
        (failed(errno.ETIMEDOUT), "10.1.2.3", "private address, which only machines on its own network"),
        (TimeoutError(), "fd00::1", r"\[fd00::1\]:7 does not answer: it is a private"),
        (None, "8.8.8.8", "the peer that the invite names is not there"),
    ],
)
def test_each_way_to_fail_has_its_cause_and_a_remedy(error: Exception | None, host: str, says: str) -> None:
    said = cause_of(error, host, 7)
    assert re.search(says, said), said
    assert any(word in said for word in ("ask for", "check", "correct")), "nothing to do is named"


@pytest.mark.parametrize(
    ("given", "others", "says"),
    [(0, 0, "names no address"), (2, 0, "only this machine's own key"), (3, 2, "banned here; look at /d/banned.txt")],
)
def test_without_an_address_to_dial_the_sentence_says_why(given: int, others: int, says: str) -> None:
    assert says in explain_nobody_left(given, others, Path("/d/banned.txt"))


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_hosts_are_dialled_to_find_the_cause(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    addresses = [
        f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/{free}/p2p/{PEER}",
        f"/dns4/nosuchhost.invalid/tcp/31330/p2p/{PEER}",
        f"/dns4/nosuchhost.invalid/tcp/31330/p2p/{PEER}",
    ]

    async def main() -> None:
        said = (await explain_unreachable(addresses)).split("; ")
        text = "; ".join(said)
        assert f"127.0.0.1:{port} accepts connections" in text and f"127.0.0.1:{free} refuses" in text
        assert text.count("nosuchhost.invalid") == 1
        relayed = f"/ip4/127.0.0.1/udp/1/quic-v1/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
        assert "only through relays" in await explain_unreachable([relayed])

    monkeypatch.setattr(unreachable, "EXPLAIN_TIMEOUT_S", 1.0)
    run(main)
