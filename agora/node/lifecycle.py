"""One daemon in its event loop: it opens the peer, holds one span after another, and leaves in order.

Knows: the order of a daemon's life, and what is there at any moment. Must not know: processes and signals (daemon.py),
or how the peer and the span do their work.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agora_protocol.errors import AgoraError, InputError, LocalError
from agora_protocol.ids import Span
from agora_protocol.invite import Invite
from agora_protocol.manifest import SignedManifest

from agora.clock import loop_time
from agora.node import joining, paths
from agora.node.control import ControlSocket
from agora.node.loaded_span import LoadedSpan, load_span
from agora.node.node_report import NO_TRAFFIC, NodeReport, WindowedRate
from agora.node.peer import Peer, open_peer
from agora.node.questions import questions_of
from agora.node.startup import Startup
from agora.node.systemd import Notifier
from agora.node.watchdog import Watchdog
from agora.observe import events
from agora.observe.reporter import Reporter
from agora.swarm import health
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity
from agora.swarm.view import View

LEAVE_SECONDS = 9.0
"""For all of leaving: a second less than promised."""
ANNOUNCE_SECONDS = 1.5
ORIGIN_SECONDS = 5.0
CLOSE_SECONDS = 3.0
MOVE_FINISH_SECONDS = 30.0
"""How long a move waits for this origin's own microbatches, and then for those of others."""
MOVE_CHECKPOINT_SECONDS = 60.0
MORE_ADDRESSES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Move:
    """A move that was asked for: to which span, and a future that ends when it is served, or with an error."""

    span: Span
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Stopped(Exception):
    """Raised within the node when `stop` is set: the daemon was asked to leave, and leaves in order."""


class _CannotGoOn(LocalError):
    """Raised when p2pd or a background task has ended by itself: the daemon leaves in order and fails."""


class Node:
    """One daemon: opens the peer, serves a span, moves to other stages when asked, and leaves once `stop` is set.

    `span` is None before the first one is served and again during a move.
    """

    def __init__(self, startup: Startup, reporter: Reporter, notifier: Notifier) -> None:
        self.startup = startup
        self.report = reporter.report
        self.signed: SignedManifest | None = None
        self.peer: Peer | None = None
        self.span: LoadedSpan | None = None
        self.stop = asyncio.Event()
        self.reason = "asked to leave"
        self.is_paused = False
        self._reporter = reporter
        self._notifier = notifier
        self._watchdog = Watchdog(self.take_report, self.report, notifier, startup.incarnation / 1e9)
        self._addresses: tuple[str, ...] = ()
        self._rate = WindowedRate()
        self._since_unix = time.time()
        self._move: _Move | None = None
        self._move_wanted = asyncio.Event()
        self._peer_closing = AsyncExitStack()
        self._span_closing = AsyncExitStack()

    async def run(self) -> None:
        """Opens the control socket, joins, serves until asked to leave, leaves in order and closes everything.

        Raises an AgoraError when it cannot start or cannot go on.
        """
        control = ControlSocket(paths.socket_of(self.startup.home), questions_of(self))
        await control.start()
        try:
            await self._start_and_serve()
        except _Stopped:
            await self._leave(self.reason)
        except _CannotGoOn as error:
            await self._leave(str(error))
            raise
        finally:
            await self._close()
            await control.close()

    # --- what is there

    def serving_span(self) -> LoadedSpan:
        """Returns the span that is held; raises LocalError while there is none."""
        if self.span is None:
            raise LocalError(f"this daemon is {self._describe_state()}; ask again when it serves")
        return self.span

    def _describe_state(self) -> str:
        """Completes "this daemon is ..." while no span is held: "still starting" or "moving to stages A-B"."""
        return "still starting" if self._move is None else f"moving to stages {self._move.span}"

    def addresses(self) -> tuple[str, ...]:
        """Returns up to 8 addresses of this peer, then one address each of up to 8 other serving peers.

        Raises LocalError while it has none.
        """
        if not self._addresses:
            raise LocalError("this daemon has no address yet; ask again in a moment")
        peers = self.peer.membership.view.peers.values() if self.peer is not None else ()
        serving = (seen for seen in peers if seen.peer != self.startup.peer and seen.state == "serving")
        others = [address for seen in serving for address in seen.addresses[:1]]
        return (*self._addresses[:MORE_ADDRESSES], *others[:MORE_ADDRESSES])

    def invite(self) -> Invite:
        """Returns the invite: run id, addresses, name. Raises LocalError before the run and the addresses are known."""
        if self.signed is None:
            raise LocalError("this daemon does not know its run yet; ask again in a moment")
        return Invite(self.signed.run_id, self.addresses(), self.signed.manifest.name)

    def take_report(self) -> NodeReport:
        """Returns a snapshot of this daemon (state, health, counters, traffic, span ...); updates the token rate."""
        startup, peer, counters, now_unix = self.startup, self.peer, self._reporter.snapshot(), time.time()
        self._rate.add(now_unix, counters.counted_tokens)
        view = peer.membership.view if peer else View()
        claim = peer.membership.claim if peer else None
        run = RunIdentity(startup.run.run, startup.run.name, 0)
        if self.signed is not None:
            run = RunIdentity(self.signed.run_id, self.signed.manifest.name, self.signed.manifest.stage_count)
        return NodeReport(
            startup.peer,
            claim.incarnation if claim else startup.incarnation,
            run,
            claim.state if claim else "joining",
            startup.steps.current,
            self.is_paused,
            startup.settings.link,
            self._judge(view, run.stage_count, now_unix),
            now_unix,
            counters,
            self._rate.per_second,
            view,
            peer.network.paths if peer else {},
            peer.traffic() if peer else NO_TRAFFIC,
            self.span.report() if self.span else None,
        )

    def _judge(self, view: View, stage_count: int, now_unix: float) -> Health:
        """Returns the swarm's health as this peer sees it; DEGRADED while this daemon serves no span."""
        if self.span is None:
            step = self.startup.steps.current or "serve"
            return Health(health.DEGRADED, f"this daemon is {self._describe_state()}: {step}", "wait until it serves")
        return health.judge(view, stage_count, now_unix, since_unix=self._since_unix, paused=self.is_paused)

    # --- start and serve

    async def _start_and_serve(self) -> None:
        """Opens the peer, serves a span, prints the invite, and carries out each move that is asked for.

        Only an exception ends it: _Stopped, _CannotGoOn or an AgoraError.
        """
        peer = await self._unless_stopped(self._open_peer())
        await self._serve_span(peer, self.startup.settings.span)
        span, incarnation = self.serving_span().span, self.startup.incarnation
        self.report(
            events.PeerStarted(
                self.startup.peer, peer.signed.run_id, span.first, span.last, incarnation, os.getpid(), self._addresses
            )
        )
        print(f"invite {self.invite()}", flush=True)
        peer.tasks.start("watchdog", self._watchdog.run())
        while True:
            await self._until_asked_to_move(peer)
            await self._carry_out_move(peer)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns. When the daemon is asked to leave meanwhile, cancels it and raises _Stopped."""
        working = asyncio.create_task(work, name="start")
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            raise _Stopped
        return working.result()

    async def _open_peer(self) -> Peer:
        """Finds the run, connects to it and opens the peer.

        Sets `signed`, the addresses and `peer` as soon as each is there, so that they can be asked for meanwhile.
        """
        startup, closing = self.startup, self._peer_closing
        if startup.run.signed is not None or not startup.run.run:
            self.signed = await joining.read_manifest(startup)
        host, self._addresses = await closing.enter_async_context(joining.open_host(startup))
        others = await joining.connect_to_run(startup, host, self.signed)
        if self.signed is None:
            self.signed = await joining.fetch_manifest(startup, host, others)
        opening = open_peer(startup, self.signed, host, self._addresses, others, self.take_report)
        self.peer = await closing.enter_async_context(opening)
        return self.peer

    async def _serve_span(self, peer: Peer, wanted: Span | None) -> None:
        """Loads a span (None: placement chooses), announces it as serving, and starts the origin if there is one.

        Raises _Stopped, or an AgoraError when it cannot; then nothing is held.
        """
        loading = load_span(peer, wanted)
        span = await self._unless_stopped(self._span_closing.enter_async_context(loading))
        if self.is_paused:
            span.pause()
        with self.startup.steps.step("serve") as note:
            self.span = span
            await peer.membership.announce("serving")
            note.text = f"stages {span.span}"
        self.report(events.StateChanged("serving", f"stages {span.span}"))
        if span.origin is not None:
            span.tasks.start("origin", span.origin.run())

    async def _until_asked_to_move(self, peer: Peer) -> None:
        """Returns when a move is asked for. Raises _Stopped to leave, _CannotGoOn if p2pd or a task has ended."""
        groups = (peer.tasks, self.serving_span().tasks)
        waits = [asyncio.create_task(event.wait()) for event in (self.stop, peer.host.died, self._move_wanted)]
        try:
            running = [task for group in groups for task in group.running]
            await asyncio.wait((*waits, *running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.stop.is_set():
            raise _Stopped
        if peer.host.died.is_set():
            raise _CannotGoOn(
                "the network process p2pd ended by itself; start the daemon again, and look at its memory"
            )
        for task, error in (ended for group in groups if (ended := group.first_ended()) is not None):
            text = f"{type(error).__name__}: {error}" if error is not None else "it ended"
            self.report(events.TaskFailed(task, text))
            is_known = isinstance(error, AgoraError)
            raise _CannotGoOn(str(error) if is_known else f"its task {task} failed ({text}); please report this")

    # --- move

    async def move(self, stages: Span) -> None:
        """Makes the daemon hold other stages, on the same network connections; returns when they are served.

        Raises LocalError or InputError, and changes nothing, when it cannot begin. When the new stages cannot be
        loaded, the former ones are loaded again and that error is raised.
        """
        if self._move is not None:
            raise LocalError(f"this daemon is moving to stages {self._move.span} already; wait until it serves them")
        held = self.serving_span().span
        count = self.signed.manifest.stage_count if self.signed else 0
        if stages.last >= count:
            raise InputError(f"stages {stages} are beyond the run's last stage; give stages within 0-{count - 1}.")
        if stages == held:
            raise LocalError(f"this daemon holds stages {held} already; give other stages, within 0-{count - 1}")
        self._move = move = _Move(stages)
        self._move_wanted.set()
        await asyncio.shield(move.done)

    async def _carry_out_move(self, peer: Peer) -> None:
        """Gives up the span and serves the wanted one, or the former one again when that cannot be loaded.

        Then sets `done` of the move, with the error if it failed, for `move` to return or raise.
        """
        move, former = self._move, self.serving_span()
        assert move is not None
        self._move_wanted.clear()
        self.report(events.StateChanged("moving", f"from stages {former.span} to stages {move.span}"))
        failure: AgoraError | None = LocalError("this daemon is leaving, and has not moved")
        try:
            await self._unless_stopped(self._give_up(peer, former))
            try:
                await self._serve_span(peer, move.span)
                failure = None
            except AgoraError as error:
                self.report(events.TaskFailed("move", f"{error.code}: {error}"))
                await self._serve_span(peer, former.span)
                failure = error
            self._move = None
        finally:
            if failure is None:
                move.done.set_result(None)
            else:
                move.done.set_exception(failure)
                move.done.exception()  # nobody may be waiting any more

    async def _give_up(self, peer: Peer, span: LoadedSpan) -> None:
        """Finishes or cancels what the span has in hand, writes its checkpoints, and closes it; `span` is then None."""
        # While a stage has no peer, this origin's own microbatches cannot come back.
        patience_s = MOVE_FINISH_SECONDS if not self.take_report().empty_stages else ORIGIN_SECONDS
        await self._finish(peer, span, patience_s, loop_time() + 2 * patience_s, "moving to other stages")
        await span.write_checkpoints(MOVE_CHECKPOINT_SECONDS)
        self.span = None
        await self._span_closing.aclose()

    # --- leave

    async def _leave(self, reason: str) -> None:
        """Announces the leaving, finishes what is in hand, cancels what is late, and writes checkpoints; within 9 s."""
        self._notifier.send(STOPPING=1, STATUS=f"leaving: {reason}")
        self.report(events.StateChanged("leaving", reason))
        peer, span, until = self.peer, self.span, loop_time() + LEAVE_SECONDS - 3.0
        if peer is not None and span is None:
            await self._announce_leaving(peer)
        if peer is None or span is None:
            return
        span.collector.close()
        if not peer.host.died.is_set():
            await self._finish(peer, span, ORIGIN_SECONDS, until, "leaving")
        await span.write_checkpoints(max(1.0, until + 1.0 - loop_time()))
        self._watchdog.report_traffic(self.take_report())

    async def _finish(self, peer: Peer, span: LoadedSpan, origin_s: float, until: float, reason: str) -> None:
        """Announces "leaving", finishes what is in hand, and at `until` cancels the rest: its callers ask others.

        origin_s: how long it waits for this origin's own microbatches. reason: completes "this peer is ...".
        """
        try:
            async with asyncio.timeout(origin_s):
                own = [span.origin.leave(origin_s - 1.0)] if span.origin is not None else []
                await asyncio.gather(self._announce_leaving(peer), *own)
        except TimeoutError:
            self.report(events.TaskFailed("leave", "what was in hand could not be ended in time"))
        await peer.ledger.finish(max(0.1, until - loop_time()), reason)

    async def _announce_leaving(self, peer: Peer) -> None:
        """Says in the directory that this peer leaves; gives up after ANNOUNCE_SECONDS, which is reported."""
        try:
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await peer.membership.announce("leaving")
        except TimeoutError:
            self.report(events.DirectoryTrouble("leave", "the directory did not answer in time"))

    async def _close(self) -> None:
        """Closes the span and the peer within CLOSE_SECONDS; the rest is left to the process' end, and reported."""
        self.span = None
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._span_closing.aclose()
                await self._peer_closing.aclose()
        except TimeoutError:
            self.report(events.TaskFailed("close", f"not everything could be closed within {CLOSE_SECONDS:.0f} s"))
        self.report(events.StateChanged("left", "the daemon has ended"))
