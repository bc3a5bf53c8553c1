"""The span: how stages are claimed and loaded, and what lives as long as this daemon holds them."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Literal, TypeVar

import torch
from agora_protocol.errors import AgoraError, InputError, NotMyStage, ProtocolError
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import Contribute, GossipedSteps, GossipEpochs, GossipSteps, Process, Recall
from agora_protocol.records import Progress

from agora.core.calls import Caller, Reply
from agora.core.clock import loop_time
from agora.core.rates import Client
from agora.core.sync_mode import ShareClosed
from agora.core.tasks import BackgroundTasks, run_in_thread
from agora.cost.manifest_cost import usual_in_flight
from agora.model import family_of
from agora.net.rpc.connection import IncomingCall
from agora.node.control.node_report import SpanReport
from agora.node.limits.disk import DiskGuard
from agora.node.limits.memory import check_memory, keeps_state_in_host, limit_device, measure_budget
from agora.node.peer.local_peer import LocalPeer
from agora.node.peer.requests import STATE_REQUESTS, WORK_REQUESTS
from agora.node.span.training_data import OriginData, Samples, open_training_data
from agora.observe import events, faults
from agora.pipeline import flow_control
from agora.pipeline.flow_control import SendInputs, StepState
from agora.pipeline.hop import Hop, MeanBarrier, StepBarrier
from agora.pipeline.origin import MicrobatchSource, Origin, OriginConfig
from agora.pipeline.router import ProcessCall
from agora.replica.gossip import SwarmView
from agora.replica.replica_group import ReplicaGroup
from agora.replica.view import live_replicas
from agora.state.collector import StageCollector
from agora.state.keeper import StageHolders, StateKeeper
from agora.swarm.health import has_ended
from agora.swarm.rebalancing import judge_interval_s
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker
from agora.train.stage import stage_layout
from agora.tuning.epochs.batches import EpochBatches, EpochFile
from agora.tuning.epochs.gossip import EpochGossip

# Assume that at least one token in this many of a microbatch is supervised, however few were measured.
MAX_UNSUPERVISED = 64
# Maximum number of spans loaded one after another, if others take each of them meanwhile; the last one is served.
MAX_LOADS = 3
ASK_S = 3.0  # seconds within which a replica must answer how many steps it has taken
T = TypeVar("T")


@asynccontextmanager
async def load_span(local_peer: LocalPeer, wanted: Span | None) -> AsyncIterator[LoadedSpan]:
    """Claims and loads a span, starts its tasks, and answers requests for it until the block ends; then closes it.

    The caller announces the span as serving, and starts its origin. wanted: None lets placement choose. Raises an
    AgoraError whose text says what to do, such as OutOfMemory, DiskError or Unavailable.
    """
    async with AsyncExitStack() as closing:
        loading = load_until_confirmed(
            await _claim_span(local_peer, wanted),
            load=lambda span: _load_stages(local_peer, span),
            confirm=lambda: _confirm_claim(local_peer),
            max_loads=MAX_LOADS if wanted is None else 1,
        )
        worker, data = await closing.enter_async_context(loading)
        epoch_file = data.epoch_file if isinstance(data, Samples) else None
        keeper = await _fill_stages(local_peer, worker, epoch_file, closing)
        span = LoadedSpan(local_peer, worker, keeper, data)
        closing.callback(span.collector.close)
        closing.push_async_callback(span.tasks.close)
        local_peer.ledger.start_accepting()  # a former span refused new work when it ended
        closing.enter_context(local_peer.requests.answering(WORK_REQUESTS, span.answer))
        span.tasks.start("step events", span.follow_steps())
        span.tasks.start("device", worker.watch())
        span.tasks.start("keeper", keeper.run())
        span.tasks.start("replicas", span.replicas.run())
        if span.epoch_gossip is not None:
            span.tasks.start("epochs", span.epoch_gossip.run())
        yield span


# --- which stages


async def _claim_span(local_peer: LocalPeer, wanted: Span | None) -> Span:
    manifest, supply = local_peer.manifest, local_peer.base_supply
    count = manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")
    with local_peer.startup.phases.enter("placement") as note:
        await run_in_thread(lambda: family_of(manifest.model).check_machine(supply.folder_to_check()))
        await local_peer.capacity_probe.assess_machine()
        span, reason = await _claim_or_stand_by(local_peer, wanted)
        note.text = _check_placement_memory(local_peer, span, reason)
    return span


async def _claim_or_stand_by(local_peer: LocalPeer, wanted: Span | None) -> tuple[Span, str]:
    own = local_peer.capacity_probe
    rng = random.Random()
    if wanted is None and not any(own.machine.max_span_lengths):
        _check_placement_memory(local_peer, Span(0, 0), "")
    while True:
        placement = await local_peer.membership.claim_span(own.needs, own.machine, wanted)
        if placement.span is not None:
            return placement.span, placement.reason
        local_peer.startup.phases.report_progress(f"standing by: {placement.reason}")
        await asyncio.sleep(judge_interval_s(rng))


def _check_placement_memory(local_peer: LocalPeer, span: Span, reason: str) -> str:
    settings = local_peer.startup.settings
    budget = measure_budget(settings.device, settings.memory_gib)
    need = check_memory(local_peer.manifest, span, budget, local_peer.capacity_probe.base_bytes)
    return f"stages {span}: {reason}; {need}"


@asynccontextmanager
async def load_until_confirmed(
    span: Span,
    load: Callable[[Span], AbstractAsyncContextManager[T]],
    confirm: Callable[[], Awaitable[Span | None]],
    max_loads: int,
) -> AsyncIterator[T]:
    """Loads `span`; as long as `confirm` returns another span, closes the loaded one and loads the other.

    Yields what the last `load` gave. confirm: returns None if the loaded span stands. max_loads: how many spans may be
    loaded; the last is not confirmed.
    """
    loads_left = max_loads
    while True:
        async with load(span) as loaded:
            loads_left -= 1
            other = await confirm() if loads_left else None
            if other is None:
                yield loaded
                return
        span = other


@asynccontextmanager
async def _load_stages(local_peer: LocalPeer, span: Span) -> AsyncIterator[tuple[DeviceWorker, OriginData | None]]:
    startup, manifest, settings = local_peer.startup, local_peer.manifest, local_peer.startup.settings
    data = await open_training_data(local_peer) if 0 in span else None
    if settings.memory_bytes:
        limit_device(settings.device, settings.memory_bytes)
    base_model = await local_peer.base_supply.provide(span)
    machine = measure_budget(settings.device, settings.memory_gib).for_stages(local_peer.capacity_probe.base_bytes)
    in_host = await run_in_thread(lambda: keeps_state_in_host(manifest, span, machine))
    with startup.phases.enter("model") as note:
        worker = await DeviceWorker.create(
            manifest,
            span,
            report=startup.report_event,
            device=DeviceOptions(settings.device, in_host, settings.slowdown, faults.reach_blocking),
            in_flight=usual_in_flight(manifest),
            base_model=base_model,
        )
        count = family_of(manifest.model).parameter_count(manifest.layers_in(span))
        note.text = f"{count:,} parameters on {worker.device}, {torch.get_num_threads()} threads"
        if in_host:
            note.text += "; the optimizer's state is in host memory"
    try:
        yield worker, data
    finally:
        await worker.close(1.0)


async def _confirm_claim(local_peer: LocalPeer) -> Span | None:
    with local_peer.startup.phases.enter("confirm") as note:
        placement = await local_peer.membership.confirm()
        if placement is None or placement.span is None:
            note.text = "the span stands"
            return None
        note.text = "others took it meanwhile; " + _check_placement_memory(local_peer, placement.span, placement.reason)
        return placement.span


# --- the stages' state


async def _fill_stages(
    local_peer: LocalPeer, worker: DeviceWorker, epoch_file: EpochFile | None, closing: AsyncExitStack
) -> StateKeeper:
    startup, membership = local_peer.startup, local_peer.membership
    keeper = _make_keeper(local_peer, worker, epoch_file)

    async def answer(call: IncomingCall) -> Reply:
        await faults.reach("state.giving")
        assert isinstance(call.message, STATE_REQUESTS)
        return await keeper.answer(call.message, call.peer)

    with startup.phases.enter("state") as note:
        steps = await keeper.find_checkpoints()
        # Others may ask while this peer still fills its stages: after a restart of all machines, each may need what the
        # others have.
        closing.enter_context(local_peer.requests.answering(STATE_REQUESTS, answer))
        if any(steps):
            await membership.publish_progress(
                Progress(startup.me, worker.span, 0, steps, tokens_per_second=0.0, loss=None, queue=0, completed=0)
            )
        await membership.refresh()
        note.text = await keeper.fill_stages()
    return keeper


def _make_keeper(local_peer: LocalPeer, worker: DeviceWorker, epoch_file: EpochFile | None) -> StateKeeper:
    startup, membership, manifest = local_peer.startup, local_peer.membership, local_peer.manifest
    holders = StageHolders(
        startup.me,
        serving=local_peer.steps_of,
        claimants=lambda stage: {seen.peer: seen.step_of(stage) for seen in membership.view.claimants(stage)},
        ask=partial(ask_steps, local_peer.network),
    )

    def on_written(stage: int, step: int) -> None:
        if epoch_file is not None and stage == 0:
            epoch_file.write(step)

    disk = DiskGuard(startup.home, startup.settings.disk_bytes)
    return StateKeeper(
        manifest,
        startup.home.checkpoints(manifest.run_id),
        stages=worker,
        holders=holders,
        caller=local_peer.network,
        report=startup.report_event,
        report_violation=local_peer.peer_score.report_violation,
        on_written=on_written,
        make_room=lambda stage, nbytes: disk.make_room(manifest, stage, nbytes),
    )


async def ask_steps(caller: Caller, stage: int, peers: Collection[PeerId]) -> Mapping[PeerId, int]:
    """Asks the peers, concurrently, how many steps they have taken at a stage; returns the steps by peer.

    Waits ASK_S at most; leaves out peers that fail or whose answer has no step.
    """

    async def ask(peer: PeerId) -> int:
        reply = await caller.call(peer, GossipSteps(stage, ()), (), deadline=loop_time() + ASK_S)
        replicas = reply.message.replicas if isinstance(reply.message, GossipedSteps) else ()
        steps = [entry[1] for entry in replicas if entry[0] == peer]
        if not steps:
            raise ProtocolError("bad-message", f"{peer} was asked for its step, and did not tell it.")
        return steps[0]

    answers = await asyncio.gather(*map(ask, peers), return_exceptions=True)
    return {peer: step for peer, step in zip(peers, answers, strict=True) if isinstance(step, int)}


# --- the span at work


class LoadedSpan:
    """The stages that this daemon holds, with all that works on them: hop, origin, replicas, keeper, collector.

    load_span makes it, starts its `tasks`, and closes them when the stages are given up. loaded_at: when it was made,
    on the loop's clock. origin: sends this peer's microbatches, None without stage 0. epoch_gossip: None unless the run
    trains on samples and stage 0 is held.
    """

    def __init__(
        self, local_peer: LocalPeer, worker: DeviceWorker, keeper: StateKeeper, data: OriginData | None
    ) -> None:
        """data: the data that the origin draws from; None without stage 0: then there is no origin."""
        startup, signed, manifest = local_peer.startup, local_peer.signed, local_peer.manifest
        self._local_peer = local_peer
        self.worker = worker
        self.keeper = keeper
        self.replicas = ReplicaGroup(
            signed,
            startup.me,
            worker=worker,
            caller=local_peer.network,
            swarm=SwarmView(
                local_peer.replicas_in_view,
                local_peer.has_connections,
                local_peer.uplink_bytes_per_s,
                local_peer.steps_of_run,
            ),
            fetch_state=keeper.fetch,
            report=startup.report_event,
            report_violation=local_peer.peer_score.report_violation,
        )
        stages = self.replicas.stages
        self._is_synchronous = manifest.schedule.kind == "synchronous"
        self._barrier: StepBarrier | MeanBarrier
        if self._is_synchronous:
            self._barrier = StepBarrier(worker.span, worker.step_of)
        else:
            self._barrier = MeanBarrier(worker.span, lambda number: stages[number].is_awaiting_mean())
        self.hop = Hop(
            worker,
            local_peer.router,
            local_peer.ledger,
            report=startup.report_event,
            barrier=self._barrier,
            on_trained=self._on_trained,
        )
        self._epoch_file: EpochFile | None = None
        self._epochs: EpochBatches | None = None
        self.epoch_gossip: EpochGossip | None = None
        if isinstance(data, Samples):
            self._epoch_file = data.epoch_file
            self._epochs = self._resume_epochs(data)
            self.epoch_gossip = self._make_epoch_gossip(self._epochs)
        source: MicrobatchSource | None = self._epochs if isinstance(data, Samples) else data
        self.origin = None if source is None else self._make_origin(source)
        self.collector = StageCollector(
            manifest,
            startup.home.runs / signed.run_id / "collected",
            layouts=lambda: [stage_layout(manifest, stage) for stage in range(manifest.stage_count)],
            stages=worker,
            serving=local_peer.steps_of,
            caller=local_peer.network,
            report_violation=local_peer.peer_score.report_violation,
        )
        self.tasks = BackgroundTasks()
        self.loaded_at = loop_time()

    def _resume_epochs(self, samples: Samples) -> EpochBatches:
        me, manifest = self._local_peer.startup.me, self._local_peer.manifest
        session = int.from_bytes(os.urandom(8), "big") >> 1
        batches = EpochBatches(
            samples.rows,
            seed=manifest.seed,
            microbatch_size=manifest.schedule.microbatch,
            me=me,
            session=session,
            live=self._other_origins,
        )
        # The epochs go on from the state at this step of stage 0, or at the newest step before it. If there is none, or
        # a malformed one, the first epoch begins.
        if (state := samples.epoch_file.latest_up_to(self.worker.step_of(0))) is not None:
            with suppress(ValueError):
                batches.assigner.restore(state)
        return batches

    def _make_epoch_gossip(self, epochs: EpochBatches) -> EpochGossip:
        local_peer = self._local_peer
        return EpochGossip(
            epochs.assigner,
            local_peer.network,
            self._other_origins,
            report=local_peer.startup.report_event,
            report_violation=local_peer.peer_score.report_violation,
        )

    def _other_origins(self) -> set[PeerId]:
        gossip = self.replicas.gossip
        known = gossip.known_progress(0)
        listed = gossip.others_in_view(0)
        live = live_replicas(known, listed, loop_time())
        return {peer for peer in listed if peer in live or peer not in known}

    def _make_origin(self, source: MicrobatchSource) -> Origin:
        startup, manifest = self._local_peer.startup, self._local_peer.manifest
        config = OriginConfig(
            me=startup.me,
            stage_count=manifest.stage_count,
            ceiling=self._local_peer.slots if not self._is_synchronous else usual_in_flight(manifest),
            max_in_flight=manifest.schedule.max_in_flight,
            objective=manifest.objective.kind,
        )
        return Origin(config, self.hop, source, startup.report_event, self._gather_opening_inputs)

    def _gather_opening_inputs(self) -> SendInputs:
        manifest, view = self._local_peer.manifest, self._local_peer.view
        needed = manifest.schedule.least_replicas
        ready = needed == 1 or all(len(view.replicas(stage)) >= needed for stage in range(manifest.stage_count))
        if end := self._end_of_run():
            return SendInputs(ready, path_s=self.hop.path_s(), end=end)
        if self._is_synchronous:
            return self._gather_synchronous_inputs(ready)
        return self._gather_asynchronous_inputs(ready)

    def _gather_synchronous_inputs(self, ready: bool) -> SendInputs:
        lacking = math.ceil(self.replicas.stages[0].missing_tokens() / self._tokens_per_microbatch())
        rank, count = self._rank_among_origins()
        step_state = StepState(self.worker.step_of(0), self._microbatches_per_step(), lacking, rank, count)
        return SendInputs(ready, step_state, self.hop.path_s())

    def _gather_asynchronous_inputs(self, ready: bool) -> SendInputs:
        path_s = self.hop.path_s()
        if (lacking_tokens := self.replicas.stages[0].tokens_until_origins_wait()) is not None:
            before_mean = math.ceil(lacking_tokens / self._tokens_per_microbatch())
            return SendInputs(ready, None, path_s, before_mean=before_mean)
        rank, count = self._rank_among_origins()
        staleness = flow_control.staleness_ceiling(
            self._local_peer.manifest.schedule.staleness,
            self._microbatches_per_step(),
            rank,
            count,
            predicts=self.worker.predicts_weights,
        )
        return SendInputs(ready, None, path_s, staleness)

    def _rank_among_origins(self) -> tuple[int, int]:
        me = self._local_peer.startup.me
        origins = [seen.peer for seen in self._local_peer.view.replicas(0)]
        return (origins.index(me), len(origins)) if me in origins else (0, 1)

    def _microbatches_per_step(self) -> int:
        return math.ceil(self._local_peer.manifest.optimizer.target_tokens / self._tokens_per_microbatch())

    def _end_of_run(self) -> Literal["", "last", "over"]:
        local_peer, total_steps = self._local_peer, self._local_peer.manifest.optimizer.total_steps
        if local_peer.startup.settings.at_end == "go-on" or self.worker.step_of(0) < total_steps:
            return ""
        count = local_peer.manifest.stage_count
        return "over" if has_ended(local_peer.view, count, total_steps, self.own_steps) else "last"

    def _tokens_per_microbatch(self) -> float:
        manifest = self._local_peer.manifest
        measured = self.origin.microbatch_tokens.value if self.origin and manifest.has_marks else None
        all_tokens = manifest.tokens_per_microbatch
        return max(1.0, all_tokens if measured is None else max(measured, all_tokens / MAX_UNSUPERVISED))

    @property
    def span(self) -> Span:
        return self.worker.span

    @property
    def own_steps(self) -> Mapping[int, int]:
        return {stage: self.worker.step_of(stage) for stage in self.span.stages}

    @property
    def in_progress(self) -> int:
        return self._local_peer.ledger.taken + (self.origin.open_count if self.origin else 0)

    def take_span_report(self) -> SpanReport:
        """Returns a snapshot of the span: steps, what each stage waits for, load, queue, and the origin's loss."""
        return SpanReport(
            span=self.span,
            stages=self.worker.progress(),
            waits_for={number: stage.reason for number, stage in self.replicas.stages.items()},
            gradient_wires={number: stage.compression for number, stage in self.replicas.stages.items()},
            agreement={number: stage.agreement() for number, stage in self.replicas.stages.items()},
            behind={stage: self._steps_behind(stage) for stage in self.span.stages},
            busy_fraction=self.worker.busy_fraction(),
            in_progress=self.in_progress,
            queue=self.hop.queue,
            path_s=self.hop.path_s(),
            is_origin=self.origin is not None,
            loss=self.origin.loss.value if self.origin else None,
            metrics=self.origin.mean_metrics if self.origin else {},
            send_window=self.origin.window.reason if self.origin else "",
            shortage=self.origin.window.shortage if self.origin else "",
            correction=self.origin.window.correction if self.origin else "",
        )

    def _steps_behind(self, stage: int) -> int:
        step = self.worker.step_of(stage)
        gossip = self.replicas.gossip
        live = live_replicas(gossip.known_progress(stage), gossip.others_in_view(stage), loop_time())
        return max([0, *(last.direct.step - step for last in live.values())])

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a request of WORK_REQUESTS by the hop, the epoch gossip or the replica group; asserts that it is one.

        Raises NotMyStage for GossipEpochs if this peer draws no samples, and for a Process of another stage; of the
        other AgoraErrors of an answer, Busy asks the caller to come again later, ProtocolError says that the request is
        wrong.
        """
        match call.message:
            case Process() as request:
                requester = Client(call.prefix, call.peer)
                return await self.hop.process(
                    ProcessCall(request, call.tensors, call.deadline, call.progress, requester)
                )
            case GossipSteps() as request:
                return Reply(self.replicas.gossip.answer(call.peer, request))
            case GossipEpochs() as request:
                if self.epoch_gossip is None:
                    raise NotMyStage("this peer draws no samples; ask those that hold stage 0")
                return Reply(self.epoch_gossip.answer(call.peer, request))
            case Contribute() as request:
                return await self.replicas.answer_contribution(call.peer, request, call.tensors, call.deadline)
            case Recall() as request:
                return self.replicas.all_reduce.answer_recall(request)
            case other:
                raise AssertionError(f"{type(other).__name__} is not among WORK_REQUESTS")

    def _on_trained(self) -> None:
        for stage in self.replicas.stages.values():
            stage.on_microbatch_left(self.hop.training_count)

    async def follow_steps(self) -> None:
        """Notifies replicas, keeper, barrier and origin of each step that the device thread takes, until cancelled.

        At each step of stage 0 it also records the epochs. Of a closed share of a step it notifies only the replicas.
        """
        async for event in self.worker.step_events():
            if isinstance(event, ShareClosed):
                self.replicas.stages[event.stage].on_share_closed()
                continue
            self.replicas.stages[event.stage].on_stepped(event.step, event.own_tokens)
            if event.stage == 0:
                self._record_epochs(event.step)
            self.keeper.on_stepped(event.stage, event.step)
            for waiting in (self._barrier, self.origin):
                if waiting is not None:
                    waiting.notify_step()

    def _record_epochs(self, step: int) -> None:
        if self._epochs is None or self._epoch_file is None:
            return
        self._epoch_file.remember(step, self._epochs.assigner.snapshot())
        counts = self._epochs.counts()
        report = self._local_peer.startup.report_event
        report(events.SamplesCounted(step, counts.epoch, counts.seen, counts.repeated, counts.missed))

    async def write_checkpoints(self, within_s: float) -> None:
        """Ends the replica group's steps and rounds for good, records the epochs, writes a checkpoint of each stage.

        All of this takes `within_s` seconds at most. A timeout or an AgoraError is reported as TaskFailed, not raised.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.replicas.leave(within_s / 2)
                if 0 in self.span:
                    self._record_epochs(self.worker.step_of(0))
                await self.keeper.write_checkpoints()
        except (TimeoutError, AgoraError) as error:
            reason = str(error) or f"not written in {within_s:.0f} s"
            self._local_peer.startup.report_event(events.TaskFailed("checkpoint", reason))
