"""Runs for the tests of the page: statuses as daemons make them, sources of a Feed, and a server of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agora_protocol.errors import AgoraError
from agora_protocol.records import StageAccount

from agora.observe import events
from agora.observe.journal import Journal, LineFile
from agora.observe.metrics import FILE_NAME, Row
from agora.page.feed import Feed, Invitation
from agora.page.run_page import page_app
from agora.page.server import HttpServer, listen
from agora.swarm.health import assess_health
from agora.swarm.status import RunIdentity, build_status
from agora.swarm.view import PeerView, View
from tests.swarm.makers import peer_id, seen, view

NOW = 1_800_000_000.0
RUN = "ab" * 32
INVITE = f"agora://{RUN}/poems@/ip4/203.0.113.4/tcp/31330/p2p/{peer_id('a')}"


def peer(name: str, span: str, *, step: int = 184, ago_s: float = 3.0, **rest: Any) -> PeerView:
    """A peer that serves and has stepped `ago_s` ago."""
    stages = len(range(int(span.split("-")[0]), int(span.split("-")[-1]) + 1))
    account = StageAccount(computed=2_000_000, counted=1_990_000, in_mean=3_000_000, mean_steps=step)
    values: dict[str, Any] = {"steps": (step,) * stages, "accounts": (account,) * stages, "tokens_per_second": 900.0}
    values |= {"seen_unix": NOW - 1.5, "stepped_unix": NOW - ago_s, "bandwidth": 5e6, "loss": 2.41}
    values |= {"waits_for": "700 of the 1024 tokens of its share are counted", "reachability": "direct"}
    return seen(name, span, **(values | rest))


def good_view() -> View:
    return view(*(peer(name, span) for name, span in (("a", "0"), ("b", "0"), ("c", "1"), ("d", "1"))))


def status_of(known: View, stages: int = 2, *, since: float = 0.0) -> dict[str, Any]:
    """What `swarm status --json` prints of a view, with the diagnosis that a daemon makes."""
    health = assess_health(known, stages, NOW, since_unix=since)
    run = RunIdentity(RUN, "poems", stages, 16_384)
    return build_status(known, run, health, NOW, paths={peer_id("a"): "self"})


class Fixed:
    """A Source that says what it was given; `asked` counts how often."""

    look_s = 0.05

    def __init__(self, status: Mapping[str, Any] | AgoraError, folder: Path | None = None) -> None:
        self.now = status
        self.where = folder
        self.asked = 0
        self.written: str | AgoraError = "Once upon a time\nthere was a swarm."

    async def status(self) -> Mapping[str, Any]:
        self.asked += 1
        if isinstance(self.now, AgoraError):
            raise self.now
        return self.now

    async def folder(self) -> Path | None:
        return self.where

    async def invitation(self) -> Invitation | None:
        return Invitation(INVITE, "open")

    async def text(self) -> str:
        if isinstance(self.written, AgoraError):
            raise self.written
        return self.written


@contextmanager
def serving(source: Any, pause: Callable[[int, float], float] | None = None) -> Iterator[str]:
    """The page of a source on a free port of loopback, in its own thread and event loop; yields its URL."""
    listening = listen(("127.0.0.1", 0), "choose another")
    servers: list[HttpServer] = []
    is_ready = threading.Event()

    async def serve() -> None:
        feed = Feed(source, pause)
        servers.append(server := HttpServer(page_app(feed), listening))
        is_ready.set()
        looking = asyncio.create_task(feed.run())
        await server.run()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_ready.wait(30)
    try:
        yield servers[0].url
    finally:
        servers[0].close()
        thread.join(30)
        assert not thread.is_alive(), "it ends when it is closed, whoever follows"


def write_history(folder: Path) -> None:
    """A daemon's journal and metrics of the last hour before NOW."""
    rows = LineFile(folder / FILE_NAME, 10**7)
    for at in range(240):
        metrics = {"run_loss_nats": 2.4 + 4.0 * 0.98**at, "run_tokens_per_second": 1500.0 + 300.0 * (at % 7) / 7}
        metrics |= {"microbatches_started/purpose_train": 40.0 * at, "microbatches_completed/purpose_train": 40.0 * at}
        metrics |= {"microbatches_rerouted/stage_1/reason_timeout": 3.0}
        if at > 20:
            metrics["heldout_loss_nats"] = 2.5 + 4.0 * 0.98 ** (at // 20 * 20)
        rows.append(Row(NOW - 3600.0 + 15.0 * at, RUN, at, metrics).to_line())
    journal = Journal(folder)
    banned = events.PeerBanned(peer_id("evil"), "by the founder")
    told = (
        events.PeerSeen(peer_id("c"), 1, 1, "serving"),
        events.HealthChanged("DEGRADED", "stage 1 has a single peer", "add one"),
        events.RoundDone(1, "gradient", 183, 16, 1, 1.9, 2, 8000.0, 0.0, 0.41, 1_400_000),
        events.TaskEvaluated("words", "accuracy", 0.41, 50, 900, 3.0),
        events.MicrobatchStarted("00" * 16),
        banned,
        events.PeerGone(peer_id("evil"), "banned by the founder"),
    )
    for at, event in enumerate(told):
        journal.take(event, NOW - 600.0 + at)
