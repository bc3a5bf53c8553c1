"""A daemon listens where it listened last, if its owner named no port and the port is free."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from agora.node.process.last_ports import is_free, read_ports, with_last_ports, write_ports

ANY_PORT = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")


def test_the_ports_of_the_last_start_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "ports"
    assert read_ports(file) == {}
    write_ports(file, {"ip6": ("::1", 4002), "ip4": ("127.0.0.1", 4001)})
    assert read_ports(file) == {"ip4": 4001, "ip6": 4002}


@pytest.mark.parametrize("text", ["", "ip4", "ip4 x", "ip4 0", "ip4 70000", "ip5 4001", "ip4 -1", "\xff"])
def test_a_malformed_file_names_no_port(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports").write_bytes(text.encode("latin-1"))
    assert read_ports(tmp_path / "ports") == {}


def test_only_addresses_without_a_port_get_the_last_one_and_each_port_is_given_once() -> None:
    last = {"ip4": 4001, "ip6": 4002}
    assert with_last_ports(ANY_PORT, last, lambda *_: True) == ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4002")
    assert with_last_ports(ANY_PORT, {"ip4": 4001}, lambda *_: True) == ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/0")
    named = ("/ip4/10.0.0.1/tcp/31330", "/dns4/here/tcp/0")
    assert with_last_ports(named, last, lambda *_: True) == named
    twice = ("/ip4/127.0.0.1/tcp/0", "/ip4/10.0.0.1/tcp/0")
    assert with_last_ports(twice, last, lambda *_: True) == ("/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/0")


def test_a_port_that_another_program_has_taken_meanwhile_is_not_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not is_free("ip4", "127.0.0.1", port)
        assert with_last_ports(["/ip4/127.0.0.1/tcp/0"], {"ip4": port}, is_free) == ("/ip4/127.0.0.1/tcp/0",)
    assert with_last_ports(["/ip4/127.0.0.1/tcp/0"], {"ip4": port}, is_free) == (f"/ip4/127.0.0.1/tcp/{port}",)


def test_a_port_of_a_family_that_the_kernel_lacks_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(family: int) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", without_ipv6)
    assert not is_free("ip6", "::", 31330)
