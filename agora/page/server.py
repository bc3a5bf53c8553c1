"""A small HTTP server in the running event loop, for this machine's user: it answers GET, and no foreign web page.

A web page that a browser of this machine shows can send requests to servers on loopback. It gets nothing: its origin is
refused, and so is any foreign name, since its owner may let it point here (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator

import prometheus_client
import uvicorn
from agora_protocol.errors import LocalError
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_CONNECTIONS = 64
CLOSE_TIMEOUT_S = 1  # seconds that open answers get when the server is closed
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; require-trusted-types-for 'script'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets only GET and HEAD of this machine's own names and addresses through, and adds SECURITY_HEADERS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        refusal = _refuse(scope["method"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)


def _refuse(method: str, headers: Headers) -> PlainTextResponse | None:
    host = headers.get("host", "")
    if not is_own_host(host):
        return PlainTextResponse("Ask by an address, localhost, or this machine's name.\n", 421)
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        return PlainTextResponse("Other web pages get nothing here.\n", 403)
    is_foreign = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
    if is_foreign and headers.get("sec-fetch-mode") != "navigate":  # a link to the page is no harm
        return PlainTextResponse("Other web pages get nothing here.\n", 403)
    if method not in ("GET", "HEAD"):
        return PlainTextResponse("Everything here is read only.\n", 405, {"Allow": "GET, HEAD"})
    return None


def is_own_host(host: str, name: str | None = None) -> bool:
    """Returns whether a Host header is an IP address, localhost, or this machine's `name`, with or without a port."""
    plain, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    if port and not port.isdecimal():
        return False
    bare = plain.removeprefix("[").removesuffix("]").lower()
    if bare in ("localhost", (name or socket.gethostname()).lower()):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(bare)
        return True
    return False


def listen(address: tuple[str, int], remedy: str) -> socket.socket:
    """Returns a socket that listens on (host, port). Raises LocalError, which ends with `remedy`, if it cannot."""
    host, port = address
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise LocalError(f"Cannot listen on {host}:{port} ({error.strerror or error}); {remedy}") from error


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the command's or the daemon's


class HttpServer:
    """Serves `app`, behind a Guard, on a listening socket: `run` until `close`, then for CLOSE_TIMEOUT_S at most."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # says of every broken connection what it was
        config = uvicorn.Config(
            Guard(app),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        self._server = _QuietServer(config)
        self._listening = listening

    @property
    def url(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> None:
        await self._server.serve(sockets=[self._listening])

    def close(self) -> None:
        self._server.should_exit = True


def metrics_app(registry: CollectorRegistry) -> Starlette:
    """Returns an application that answers GET /metrics in Prometheus' text format."""

    async def answer(_: Request) -> Response:
        return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/metrics", answer)])
