"""Claims about the HTTP server: read only, for this machine's names, closed to other web pages, and it ends."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from agora_protocol.errors import LocalError
from prometheus_client import CollectorRegistry, Counter

from agora.page.server import SECURITY_HEADERS, HttpServer, is_own_host, listen, metrics_app

Answer = tuple[int, dict[str, str], str]


@contextmanager
def serving() -> Iterator[int]:
    """A server of metrics on a free port of loopback, in its own thread and event loop; ended afterwards."""
    registry = CollectorRegistry()
    Counter("agora_tests", "Tests.", registry=registry).inc()
    server = HttpServer(metrics_app(registry), listening := listen(("127.0.0.1", 0), "choose another"))
    thread = threading.Thread(target=lambda: asyncio.run(server.run()))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive(), "it ends when it is closed"


def ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> Answer:
    """Status, headers in lower case, and text of an answer. headers: as HTTP names them, with _ for -."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def test_it_answers_who_asks_by_an_address_or_by_localhost() -> None:
    with serving() as port:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "127.0.0.1"):
            status, headers, text = ask(port, Host=host)
            assert status == 200 and "agora_tests_total 1.0" in text
            assert headers["content-type"].startswith("text/plain")
            assert {name: headers[name.lower()] for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert ask(port, "/other")[0] == 404


def test_a_name_that_was_made_to_point_here_gets_nothing() -> None:
    with serving() as port:
        for host in (f"evil.example:{port}", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""):
            status, _, text = ask(port, Host=host)
            assert status in (400, 421) and "agora_tests" not in text, host


def test_other_web_pages_get_nothing() -> None:
    with serving() as port:
        host = f"127.0.0.1:{port}"
        for origin in ("http://evil.example", "null", "https://127.0.0.1", f"http://localhost:{port}"):
            status, headers, text = ask(port, Host=host, Origin=origin)
            assert status == 403 and "agora_tests" not in text, origin
            assert "access-control-allow-origin" not in headers
        assert ask(port, Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_written(method: str) -> None:
    with serving() as port:
        status, headers, _ = ask(port, method=method)
        assert status == 405 and headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("192.168.1.4:9464", True),
        ("[::1]:9464", True),
        ("[::1]", True),
        ("LOCALHOST:1", True),
        ("trainer:9464", True),
        ("trainer.evil.example", False),
        ("evil.example:80", False),
        ("127.0.0.1:evil", False),
        ("localhost:80@evil.example", False),
        ("", False),
        (":80", False),
    ],
)
def test_which_hosts_are_this_machine(host: str, is_own: bool) -> None:
    assert is_own_host(host, "trainer") == is_own


def test_a_client_that_says_nothing_keeps_no_one_else_waiting() -> None:
    with serving() as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert ask(port)[0] == 200
        for channel in silent:
            channel.close()


def test_an_address_that_is_taken_is_one_sentence_with_what_to_do() -> None:
    with listen(("127.0.0.1", 0), "") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalError, match=f"Cannot listen on 127.0.0.1:{port} .*; choose another with --metrics"):
            listen(("127.0.0.1", port), "choose another with --metrics")
