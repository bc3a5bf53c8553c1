"""One daemon in its event loop: it opens the local peer, holds one span after another, and leaves in order."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from agora_protocol.errors import AgoraError, InputError, LocalError
from agora_protocol.ids import Span
from agora_protocol.invite import Invite
from agora_protocol.manifest import SignedManifest
from agora_protocol.manifest_sections import AdmissionSection

from agora import SOFTWARE
from agora.core.clock import loop_time
from agora.core.moving_average import WindowedRate
from agora.core.tasks import BackgroundTasks, wait_for_any
from agora.net.p2pd.host import Host
from agora.node.control.node_report import NO_TRAFFIC, NodeReport, add_traffic
from agora.node.daemon_context import DaemonContext
from agora.node.limits.pausing import Pausing
from agora.node.peer.local_peer import LocalPeer
from agora.node.process import joining
from agora.node.process.balancing import keep_claimed_capacity_current, rebalance_repeatedly
from agora.node.process.evaluation import ScheduledEvaluation
from agora.node.process.machine_watch import MachineWatch, gpu_id_of, observers_of
from agora.node.process.run_completion import RunCompletion
from agora.node.process.watchdog import Watchdog
from agora.node.span.load_span import load_span
from agora.node.span.loaded_span import LoadedSpan
from agora.observe import events, faults
from agora.pipeline.origin import Origin
from agora.pipeline.work_ledger import MAX_ENDING_TIMEOUT_S
from agora.swarm import health
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity
from agora.swarm.swarm_clock import clock_remark
from agora.swarm.view import View

# Seconds from the request to leave, or to pause, until all is closed (users are told 10 s). The timeouts below divide
# it; time for checkpoints and closing is set aside before unfinished work gets any.
LEAVE_TIMEOUT_S = 9.0
STOP_TIMEOUT_S = 3.0  # seconds that a start, or a move, has to end when it is cancelled
ANNOUNCE_TIMEOUT_S = 1.5  # seconds that storing the claim that says `leaving` in the directory may take
# Seconds that this origin's microbatches get when the daemon leaves, or moves while a stage is empty.
ORIGIN_TIMEOUT_S = 5.0
# Seconds that device jobs get to count their gradients when other peers' work is cancelled.
CANCELLED_WORK_TIMEOUT_S = 1.5
MIN_CHECKPOINT_TIMEOUT_S = 1.0  # seconds that writing the checkpoints may take at least, however long the work took
# Seconds that closing the span may take at least, and one more if the device's job does not end.
CLOSE_SPAN_TIMEOUT_S = 1.0
CLOSE_PEER_TIMEOUT_S = 1.0  # seconds that closing the local peer may take at least
CLOSE_TIMEOUT_S = CLOSE_SPAN_TIMEOUT_S + 1.0 + CLOSE_PEER_TIMEOUT_S
# Seconds that a move waits for this origin's own microbatches, and then for those of others.
MOVE_FINISH_TIMEOUT_S = 30.0
MOVE_CHECKPOINT_TIMEOUT_S = 60.0  # seconds that a move waits for the checkpoints of all stages


# A request to serve the stages `span`. done: ends when they are served, or with the error that prevents it.
@dataclass(frozen=True, slots=True)
class _MoveRequest:
    span: Span
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Daemon:
    """One running daemon: opens the local peer, serves a span, moves to others when asked, until `leave`.

    loaded: the held span; None before the first one is served, in a move and in a pause.
    local_peer: None before it is open, and in a pause.
    signed: the manifest; None until it is known.
    leave_reason: that of `leave`.
    run_is_over: whether it leaves because the run has taken its steps.
    completion: does what follows then; None until the first span is served.
    """

    def __init__(self, context: DaemonContext, on_leave: Callable[[], None] = lambda: None) -> None:
        """on_leave: called once, when the daemon begins to leave."""
        self.context = context
        self.signed: SignedManifest | None = None
        self.local_peer: LocalPeer | None = None
        self.loaded: LoadedSpan | None = None
        chosen = context.settings
        self.pausing = Pausing(context.home.paused, chosen.work_hours, context.clock.unix, 60.0 * chosen.idle_minutes)
        gpu = functools.cache(partial(gpu_id_of, chosen.device))
        observers = observers_of(chosen, gpu, time.time)
        self.machine = MachineWatch(chosen, self.pausing, context.report_event, observers, gpu)
        self._stop = asyncio.Event()
        self.leave_reason = ""
        self.run_is_over = False
        self._failure: LocalError | None = None
        self._on_leave = on_leave
        self._leave_by: float | None = None  # loop time
        self._key_remark = ""
        self._report_event = context.report_event
        self._since_unix = context.clock.unix()
        self._watchdog = Watchdog(self.sample_node_report, context.report_event, context.notifier, context.age_s)
        self._addresses: tuple[str, ...] = ()
        self._rate = WindowedRate()
        self._move: _MoveRequest | None = None
        self._move_wanted = asyncio.Event()
        self.completion: RunCompletion | None = None
        self._tasks = BackgroundTasks(self.fail_since_task_ended)
        self._past_traffic = NO_TRAFFIC
        self._peer_closing = AsyncExitStack()
        self._span_closing = AsyncExitStack()

    async def run(self) -> None:
        """Joins, serves or pauses until `leave` is called; then leaves in order. Raises the error that ended it."""
        self._tasks.start("watchdog", self._watchdog.run())
        try:
            await wait_for_any(self._stop.wait(), self.machine.look())  # before anything is claimed
            self._tasks.start("machine", self.machine.run())
            while not self.is_leaving:
                if not self.pausing.reason:
                    await self._serve_until_stopped()
                if not self.is_leaving:  # also if the pause has ended by now: what was opened must be closed first
                    await self._stay_paused()
            await self._leave_in_order(self.leave_reason)
            if self._failure is not None:
                raise self._failure
        finally:
            await self._close(self._leave_by or loop_time() + CLOSE_TIMEOUT_S)
            await self._tasks.close()

    def leave(self, reason: str) -> None:
        """Makes `run` leave in order, within LEAVE_TIMEOUT_S; a second call does nothing. reason: for the log."""
        if self.is_leaving:
            return
        self.leave_reason = reason
        self._leave_by = loop_time() + LEAVE_TIMEOUT_S
        self._stop.set()
        self._on_leave()

    def _leave_at_end(self, reason: str) -> None:
        self.run_is_over = not self.is_leaving
        self.leave(reason)

    def fail_since_task_ended(self, name: str, error: BaseException | None) -> None:
        """Makes `run` leave in order and then raise LocalError, since a task of this daemon has ended before its time.

        A daemon without one of its tasks, or without p2pd, looks alive and is not. See BackgroundTasks.
        """
        if self.is_leaving:
            return
        text = self.report_task_end(name, error)
        is_known = isinstance(error, AgoraError)
        why = str(error) if is_known else f"The daemon's task {name} failed ({text}); please report this."
        self._failure = LocalError(why)
        self._failure.__cause__ = error
        self.leave(str(self._failure))

    def report_task_end(self, name: str, error: BaseException | None) -> str:
        """Reports that a task has ended; returns the reason in words."""
        text = f"{type(error).__name__}: {error}" if error is not None else "it ended"
        self._report_event(events.TaskFailed(name, text))
        return text

    def note_copied_key(self, root: str, pid: int) -> None:
        """Notes that a daemon of this machine was refused because its data directory `root` has this one's key."""
        told = "a daemon was started with a copy of this one's data directory and key{}, and refused; "
        told += "remove identity.key there, so that it gets its own"
        # Other machines read the remark in the status, and are told no path of this one.
        self._key_remark = told.format(" on this machine")
        self._report_event(events.OwnerTold(told.format(f", in {root} of this machine (pid {pid})")))

    @property
    def is_leaving(self) -> bool:
        return self._stop.is_set()

    # --- the present state

    def serving_span(self) -> LoadedSpan:
        """Returns `loaded`, the held span. Raises LocalError, which says what the daemon does, while it is None."""
        if self.loaded is None:
            raise LocalError(f"This daemon is {self.describe_state()}; ask again when it serves.")
        return self.loaded

    def describe_state(self) -> str:
        """Returns what completes "this daemon is ..." while no span is held: the reason of a pause, or what it does."""
        if self.pausing.reason:
            return self.pausing.reason
        return "still starting" if self._move is None else f"moving to stages {self._move.span}"

    def invite(self) -> Invite:
        """Returns an invite with own and others' addresses. Raises LocalError while run or own address is unknown."""
        if self.signed is None or not self._addresses:
            missing = "know its run" if self.signed is None else "have an address"
            raise LocalError(f"This daemon does not {missing} yet; ask again in a moment.")
        known = self.local_peer.view if self.local_peer is not None else View()
        announced = self.local_peer.reachability.announcement().addresses if self.local_peer is not None else ()
        own = tuple(dict.fromkeys((*announced, *self._addresses)))
        allow_private = self.context.settings.allow_private
        return joining.make_invite(self.signed, self.context.me, own, known, allow_private=allow_private)

    def sample_node_report(self) -> NodeReport:
        """Returns a snapshot of this daemon: state, health, counters, traffic, view, span. Updates the token rate."""
        context, local_peer = self.context, self.local_peer
        counters = context.reporter.snapshot()
        now_unix = context.clock.unix()
        view = local_peer.view if local_peer else View()
        claim = local_peer.membership.claim if local_peer else None
        link = local_peer.host.link if local_peer else None
        run = RunIdentity(context.reference.run, context.reference.name, 0, 0)
        if self.signed is not None:
            run = RunIdentity.of(self.signed.manifest)
        if local_peer is not None:
            step = max(local_peer.steps_of(0).values(), default=0)
            run = replace(run, target_tokens=local_peer.live.target_tokens(step))
        return NodeReport(
            peer=context.me,
            incarnation=claim.incarnation if claim else context.incarnation,
            run=run,
            state=claim.state if claim else "joining",
            start_phase=context.phases.current,
            pause_reason=self.pausing.reason,
            link=link.spec.text if link is not None else context.settings.link,
            health=self._assess_health(view, run.stage_count, now_unix),
            now_unix=now_unix,
            clock_remark=clock_remark(context.clock.correction),
            key_remark=self._key_remark or (local_peer.membership.key_use.remark if local_peer else ""),
            counters=counters,
            tokens_per_second=self._rate.update(now_unix, counters.counted_tokens),
            view=view,
            paths=local_peer.network.paths if local_peer else {},
            traffic=self._total_traffic(),
            span=self.loaded.take_span_report() if self.loaded else None,
            amendments=local_peer.amendments.in_words() if local_peer else (),
            evaluations=[each.evaluation for each in local_peer.evaluations.book.known()] if local_peer else (),
            software={**local_peer.network.software, context.me: SOFTWARE} if local_peer else {},
            admission=local_peer.live.last.admission if local_peer else AdmissionSection(),
        )

    def _assess_health(self, view: View, stage_count: int, now_unix: float) -> Health:
        if self.pausing.reason:
            return Health(health.PAUSED, f"this peer is {self.pausing.reason}", self.pausing.remedy)
        if self.loaded is None:
            phase = self.context.phases.current or "serve"
            return Health(health.DEGRADED, f"this daemon is {self.describe_state()}: {phase}", "wait until it serves")
        return health.assess_health(
            view,
            stage_count,
            now_unix,
            since_unix=self._since_unix,
            total_steps=self.loaded.run_end.total_steps,
            own_steps=self.loaded.own_steps,
        )

    def _total_traffic(self) -> events.Traffic:
        return add_traffic(self._past_traffic, self.local_peer.traffic()) if self.local_peer else self._past_traffic

    # --- start and serve

    async def _serve_until_stopped(self) -> None:
        serving = asyncio.create_task(self._start_and_serve(), name="serve")
        await wait_for_any(serving, self._stop.wait(), self.pausing.wait_until(paused=True))
        if serving.done() and not self.is_leaving:
            serving.result()
        serving.cancel()  # closes nothing: the span is still wanted for leaving in order
        await asyncio.wait([serving], timeout=STOP_TIMEOUT_S)
        if serving.done() and not serving.cancelled():
            serving.exception()  # retrieved: leaving was first

    async def _stay_paused(self) -> None:
        self._report_event(events.StateChanged("paused", self.pausing.full_reason or "resumed meanwhile"))
        until = loop_time() + LEAVE_TIMEOUT_S
        await self._wind_down("paused", until)
        await self._close(until)  # all that talks to other peers; control socket, metrics and page stay
        joining.register_paused(self.context, self.signed)
        await wait_for_any(self._stop.wait(), self.pausing.wait_until(paused=False))
        if not self.is_leaving:
            self.context = joining.context_after_pause(self.context, self.signed)

    async def _start_and_serve(self) -> None:
        local_peer = await self._open_local_peer()
        loaded = await self._serve_span(local_peer, self.context.settings.span)
        self._report_event(
            events.PeerStarted(
                peer=self.context.me,
                run=local_peer.signed.run_id,
                first_stage=loaded.span.first,
                last_stage=loaded.span.last,
                incarnation=self.context.incarnation,
                pid=os.getpid(),
                addresses=self._addresses,
            )
        )
        self._print_invite()
        local_peer.tasks.start("capacity", keep_claimed_capacity_current(local_peer, lambda: self.loaded))
        self.completion = RunCompletion(local_peer, lambda: self.loaded, self._leave_at_end)
        local_peer.tasks.start("end", self.completion.run())
        local_peer.tasks.start("evaluation", ScheduledEvaluation(local_peer, lambda: self.loaded).run())
        if self.context.settings.rebalance and self.context.settings.span is None:
            local_peer.tasks.start("rebalance", rebalance_repeatedly(local_peer, self._movable_span, self.move))
        while True:
            await self._move_wanted.wait()
            await self._carry_out_move(local_peer)

    def _print_invite(self) -> None:
        try:
            print(f"invite {self.invite()}", flush=True)
        except OSError as error:  # whoever read it has ended, as in `agora-node join RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            told = f"the invite could not be printed ({error.strerror}); `swarm invite RUN` prints it"
            self._report_event(events.OwnerTold(told))

    async def _open_local_peer(self) -> LocalPeer:
        # Sets `signed` and `_addresses` as soon as each is known, since other daemons may ask for the invite.
        context, closing = self.context, self._peer_closing
        # Before a draft is signed: its port may be taken.
        host, self._addresses = await joining.open_host(context)
        closing.push_async_callback(host.close)
        watching = BackgroundTasks(self.fail_since_task_ended)
        closing.push_async_callback(watching.close)
        watching.start("p2pd", _watch_p2pd(host))
        if host.rate_limiter is not None:
            watching.start("rate limiter", host.rate_limiter.wait())
        if self.signed is None and (context.reference.signed is not None or not context.reference.run):
            self.signed = await joining.read_manifest(context, host)
        others = await joining.connect_to_run(context, host, self.signed)
        if self.signed is None:
            self.signed = await joining.fetch_manifest(context, host, others)
        with context.phases.enter("doctor") as note:
            note.text = await asyncio.to_thread(joining.check_disk_room, context, self.signed.manifest)
        proof = joining.own_proof(context, self.signed.run_id)
        with context.phases.enter("directory"):
            local_peer = LocalPeer(
                context, self.signed, host, proof, self.sample_node_report, self.fail_since_task_ended
            )
            closing.push_async_callback(local_peer.close)
            await local_peer.start(others)
        self.local_peer = local_peer
        self._since_unix = context.clock.unix()
        return local_peer

    async def _serve_span(self, local_peer: LocalPeer, wanted: Span | None) -> LoadedSpan:
        loaded = await self._span_closing.enter_async_context(load_span(local_peer, wanted))
        with self.context.phases.enter("serve") as note:
            self.loaded = loaded
            await local_peer.membership.set_state("serving")
            note.text = f"stages {loaded.span}"
        self._report_event(events.StateChanged("serving", f"stages {loaded.span}"))
        if loaded.origin is not None:
            loaded.tasks.start("origin", _run_origin(loaded.origin))
        return loaded

    # --- move

    def _movable_span(self) -> LoadedSpan | None:
        return None if self._move is not None else self.loaded

    async def move(self, stages: Span) -> None:
        """Moves this daemon to `stages`; returns once it serves them. Raises LocalError or InputError if it cannot.

        If loading fails, serves the former stages again and raises the error. Cancelling does not stop the move.
        """
        if self.is_leaving or self.pausing.reason:
            raise LocalError(f"This daemon is {self.pausing.reason or 'leaving'}, and does not move.")
        if self._move is not None:
            raise LocalError(f"This daemon is moving to stages {self._move.span} already; wait until it serves them.")
        held = self.serving_span().span
        count = self.signed.manifest.stage_count if self.signed else 0
        if stages.last >= count:
            raise InputError(f"Stages {stages} are beyond the run's last stage; give stages within 0-{count - 1}.")
        if stages == held:
            raise LocalError(f"This daemon holds stages {held} already; give other stages, within 0-{count - 1}.")
        self._move = move = _MoveRequest(stages)
        self._move_wanted.set()
        await asyncio.shield(move.done)  # who asked may hang up; the move goes on

    async def _carry_out_move(self, local_peer: LocalPeer) -> None:
        move, former = self._move, self.serving_span()
        assert move is not None
        self._move_wanted.clear()
        self._report_event(events.StateChanged("moving", f"from stages {former.span} to stages {move.span}"))
        failure: AgoraError | None = LocalError("This daemon has ended its work, and has not moved.")
        try:
            await self._give_up_span(local_peer, former)
            try:
                await self._serve_span(local_peer, move.span)
                failure = None
            except AgoraError as error:
                failure = error
                self._report_event(events.TaskFailed("move", f"{error.code}: {error}"))
                await self._serve_span(local_peer, former.span)
        finally:
            self._move = None
            if failure is None:
                move.done.set_result(None)
            else:
                move.done.set_exception(failure)
                move.done.exception()  # retrieved, since no task may wait any more

    async def _give_up_span(self, local_peer: LocalPeer, loaded: LoadedSpan) -> None:
        # While a stage has no peer, this origin's own microbatches cannot come back.
        timeout_s = ORIGIN_TIMEOUT_S if self.sample_node_report().empty_stages else MOVE_FINISH_TIMEOUT_S
        await self._finish_work(local_peer, loaded, timeout_s, loop_time() + 2 * timeout_s, "moving to other stages")
        await loaded.end_steps_and_write_checkpoints(MOVE_CHECKPOINT_TIMEOUT_S)
        self.loaded = None
        await self._span_closing.aclose()

    # --- leave

    async def _leave_in_order(self, reason: str) -> None:
        self.context.notifier.send(STOPPING=1, STATUS=f"leaving: {reason}")
        self._report_event(events.StateChanged("leaving", reason))
        await faults.inject_fault("daemon.leaving")
        await self._wind_down("leaving", self._leave_by or loop_time() + LEAVE_TIMEOUT_S)

    async def _wind_down(self, reason: str, until: float) -> None:
        local_peer, loaded = self.local_peer, self.loaded
        close_at = until - CLOSE_TIMEOUT_S
        work_until = close_at - MIN_CHECKPOINT_TIMEOUT_S - CANCELLED_WORK_TIMEOUT_S
        if local_peer is not None and loaded is None and not local_peer.host.died.is_set():
            await self._announce_leaving(local_peer)
        if local_peer is None or loaded is None:
            return
        loaded.collector.close()
        # When p2pd is gone, neither requesters nor the directory can be told: what is open is lost either way.
        if not local_peer.host.died.is_set():
            origin_s = min(ORIGIN_TIMEOUT_S, max(0.1, work_until - loop_time()))
            await self._finish_work(local_peer, loaded, origin_s, work_until, reason, CANCELLED_WORK_TIMEOUT_S)
        await loaded.end_steps_and_write_checkpoints(max(MIN_CHECKPOINT_TIMEOUT_S, close_at - loop_time()))
        self._watchdog.report_traffic(self.sample_node_report())

    async def _finish_work(
        self,
        local_peer: LocalPeer,
        loaded: LoadedSpan,
        origin_s: float,
        deadline: float,
        reason: str,
        ending_s: float = MAX_ENDING_TIMEOUT_S,
    ) -> None:
        try:
            async with asyncio.timeout(origin_s):
                own_work = [loaded.origin.leave(origin_s - 1.0)] if loaded.origin is not None else []
                await asyncio.gather(self._announce_leaving(local_peer), *own_work)
        except TimeoutError:
            self._report_event(events.TaskFailed("leave", "open work could not be ended in time"))
        await local_peer.ledger.drain(max(0.1, deadline - loop_time()), reason, ending_s)

    async def _announce_leaving(self, local_peer: LocalPeer) -> None:
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                await local_peer.membership.set_state("leaving")
        except TimeoutError:
            self._report_event(events.DirectoryTrouble("leave", "the directory did not answer in time"))

    async def _close(self, until: float) -> None:
        self._past_traffic = self._total_traffic()
        self.loaded = self.local_peer = None
        # What is not closed in time ends with the process. A span that hangs must not stop the goodbye to others.
        for what, closing, by in (
            ("stages", self._span_closing, until - CLOSE_PEER_TIMEOUT_S - 1.0),
            ("local peer", self._peer_closing, until),
        ):
            try:
                async with asyncio.timeout_at(max(by, loop_time() + CLOSE_PEER_TIMEOUT_S)):
                    await closing.aclose()
            except TimeoutError:
                self._report_event(events.TaskFailed("close", f"the {what} could not be closed in time"))


async def _run_origin(origin: Origin) -> None:
    await origin.run()
    # A pause or a move has made it leave: that is no task that has failed, and the span is closed soon.
    await asyncio.Event().wait()


async def _watch_p2pd(host: Host) -> None:
    await host.died.wait()
    raise LocalError("The network process p2pd ended by itself; start the daemon again and look at its memory.")
