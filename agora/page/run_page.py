"""The page of a run: one static bundle, and what a Feed knows as JSON and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agora.page.feed import Feed

MAX_SUBSCRIBERS: Final = 16  # browsers' tabs that are sent updates at a time
MAX_NUMBER: Final = 10**9
# The whole bundle: what a browser gets for each path, and of which kind it is. Nothing else of this machine is served.
BUNDLE: Final = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
    "/uplot.css": ("uplot/uPlot.min.css", "text/css"),
}


def page_app(feed: Feed) -> Starlette:
    """Returns the application: the bundle, /status.json, /peers.json?stage=N&start=K and /updates."""

    async def answer_status(_: Request) -> Response:
        return _json(await feed.status())

    async def answer_peers(request: Request) -> Response:
        try:
            asked = {name: _number(value) for name, value in request.query_params.items()}
        except ValueError:
            return PlainTextResponse("stage and start are numbers.\n", 400)
        return _json(await feed.peers(asked.get("stage"), asked.get("start", 0)))

    async def send_updates(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if feed.subscribers >= MAX_SUBSCRIBERS:
            text = f"{MAX_SUBSCRIBERS} pages are open already; close one.\n"
            return PlainTextResponse(text, 503, {"Retry-After": "30"})
        return StreamingResponse(_events(feed), media_type="text/event-stream")

    routes = [Route(path, _file(name, kind)) for path, (name, kind) in BUNDLE.items()]
    routes += [Route("/status.json", answer_status), Route("/peers.json", answer_peers)]
    return Starlette(routes=[*routes, Route("/updates", send_updates)])


def _file(name: str, kind: str) -> Any:
    content = (Path(__file__).parent / "bundle" / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_NUMBER))):
        raise ValueError(text)
    return int(text)


async def _events(feed: Feed) -> AsyncIterator[str]:
    async for update in feed.follow():
        yield f"data: {update}\n\n"
