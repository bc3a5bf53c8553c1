"""The span: what lives as long as this daemon holds the same stages, and how it is loaded.

Knows: the rooms that work on stages, how they are wired to each other and to the local peer, and the steps of loading.
Must not know: processes, signals, or how any room does its work.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import torch
from agora_protocol.errors import AgoraError, InputError, LocalError
from agora_protocol.ids import Span
from agora_protocol.messages import Contribute, GossipSteps, Process, Recall
from agora_protocol.records import Progress

from agora.averaging.group import ReplicaGroup
from agora.averaging.replica_progress import live_replicas
from agora.calls import Reply
from agora.clock import loop_time
from agora.data.corpus import open_corpus
from agora.data.sampling import OriginBatches, Sampler
from agora.data.tokenizer import open_tokenizer
from agora.model import family_of
from agora.net.incoming import IncomingCall
from agora.node import doctor
from agora.node.background import BackgroundTasks
from agora.node.local_peer import LocalPeer, usual_in_flight
from agora.node.node_report import SpanReport
from agora.node.requests import STATE_REQUESTS, WORK_REQUESTS
from agora.observe import events, faults
from agora.pipeline import opening
from agora.pipeline.barrier import MeanBarrier, StepBarrier
from agora.pipeline.hop import Hop
from agora.pipeline.opening import StepState, Surroundings
from agora.pipeline.origin import Origin, OriginConfig
from agora.state.collector import StageCollector
from agora.state.keeper import StageHolders, StateKeeper
from agora.stepping import ShareClosed
from agora.swarm.placement import Placement
from agora.threads import run_in_thread
from agora.train.compute import Compute
from agora.train.memory import available_bytes
from agora.train.trained_stage import stage_layout

MOST_LOADS = 3
"""When other peers take the span while this one loads it, it loads another; the last one it serves in any case."""
T = TypeVar("T")


class LoadedSpan:
    """The stages that this daemon holds, and the hop, origin, replicas and keeper that work on them, wired together."""

    def __init__(
        self, local_peer: LocalPeer, compute: Compute, keeper: StateKeeper, batches: OriginBatches | None
    ) -> None:
        """batches: what the origin draws, None without stage 0."""
        startup, signed, manifest = local_peer.startup, local_peer.signed, local_peer.manifest
        self._local_peer = local_peer
        self.compute = compute
        self.keeper = keeper
        self.replicas = ReplicaGroup(
            signed,
            startup.me,
            stages=compute,
            caller=local_peer.network,
            state=keeper,
            listing=local_peer,
            report=startup.report_event,
            report_offence=local_peer.offences.report_offence,
        )
        self._is_synchronous = manifest.schedule.kind == "synchronous"
        self._barrier: StepBarrier | MeanBarrier = MeanBarrier(compute.span, self.replicas.awaits_mean)
        if self._is_synchronous:
            self._barrier = StepBarrier(compute.span, compute.step_of)
        self.hop = Hop(
            compute,
            local_peer.router,
            local_peer.ledger,
            report=startup.report_event,
            barrier=self._barrier,
            on_trained=self._on_trained,
        )
        self.origin = None if batches is None else self._make_origin(batches)
        self.collector = StageCollector(
            signed.run_id,
            startup.home.runs / signed.run_id / "collected",
            layouts=lambda: [stage_layout(manifest, stage) for stage in range(manifest.stage_count)],
            stages=compute,
            serving=local_peer.steps_of,
            caller=local_peer.network,
            report_offence=local_peer.offences.report_offence,
        )
        self.tasks = BackgroundTasks()

    def _make_origin(self, batches: OriginBatches) -> Origin:
        """Returns the origin of this peer, which sends the microbatches that `batches` draws through the swarm."""
        startup, manifest = self._local_peer.startup, self._local_peer.manifest
        config = OriginConfig(
            me=startup.me,
            stage_count=manifest.stage_count,
            ceiling=self._local_peer.seats if not self._is_synchronous else usual_in_flight(manifest),
            max_in_flight=manifest.schedule.max_in_flight,
            objective=manifest.objective.kind,
        )
        return Origin(config, self.hop, batches.draw, batches.heldout, startup.report_event, self._look_around)

    def _look_around(self) -> Surroundings:
        """Returns what the origin must know: whether every stage has enough replicas, the path's time, and its limits.

        While it is not in the view, it counts as the only origin.
        """
        local_peer, manifest = self._local_peer, self._local_peer.manifest
        view, me = local_peer.membership.view, local_peer.startup.me
        least, path_s = manifest.schedule.least_replicas, self.hop.path_s()
        ready = least == 1 or all(len(view.replicas(stage)) >= least for stage in range(manifest.stage_count))
        origins = [seen.peer for seen in view.replicas(0)]
        rank, count = (origins.index(me), len(origins)) if me in origins else (0, 1)
        whole = math.ceil(manifest.optimizer.target_tokens / manifest.tokens_per_microbatch)
        if not self._is_synchronous:
            if (lacking := self.replicas.tokens_before_mean(0)) is not None:
                before = math.ceil(lacking / manifest.tokens_per_microbatch)
                return Surroundings(ready, None, path_s, before_mean=before)
            most = opening.staleness_limit(manifest.schedule.staleness, whole, rank, count)
            return Surroundings(ready, None, path_s, most)
        lacking = math.ceil(self.replicas.missing_tokens(0) / manifest.tokens_per_microbatch)
        return Surroundings(ready, StepState(self.compute.step_of(0), whole, lacking, rank, count), path_s)

    @property
    def span(self) -> Span:
        """The stages held."""
        return self.compute.span

    @property
    def in_hand(self) -> int:
        """How many microbatches this peer has accepted or originated and not finished."""
        return self._local_peer.ledger.taken + (self.origin.open_count if self.origin else 0)

    def take_span_report(self) -> SpanReport:
        """Returns a snapshot of the span: steps, what each stage waits for, load, queue, and the origin's loss."""
        return SpanReport(
            span=self.span,
            stages=self.compute.progress(),
            waits_for={stage: self.replicas.reason(stage) for stage in self.span.stages},
            gradient_wire=self.replicas.gradient_wire,
            behind={stage: self._steps_behind(stage) for stage in self.span.stages},
            busy_fraction=self.compute.busy_fraction(),
            in_hand=self.in_hand,
            queue=self.hop.queue,
            path_s=self.hop.path_s(),
            is_origin=self.origin is not None,
            loss=self.origin.loss.value if self.origin else None,
            metrics=self.origin.mean_metrics if self.origin else {},
            credit=self.origin.credit.reason if self.origin else "",
            shortage=self.origin.credit.shortage if self.origin else "",
        )

    def _steps_behind(self, stage: int) -> int:
        """Returns how many steps the stage is behind the live replica that has reported most; 0 when it is not."""
        gossip, step = self.replicas.gossip, self.compute.step_of(stage)
        live = live_replicas(gossip.known(stage), gossip.listed_others(stage), loop_time())
        return max([0, *(last.direct.step - step for last in live.values())])

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a request of WORK_REQUESTS: Process by the hop, the others (averaging) by the replicas."""
        match call.message:
            case Process() as request:
                return await self.hop.process(request, call.tensors, call.deadline, call.progress)
            case GossipSteps() as request:
                return Reply(self.replicas.gossip.answer(call.peer, request))
            case Contribute() as request:
                return Reply(*await self.replicas.answer_contribution(call.peer, request, call.tensors, call.deadline))
            case Recall() as request:
                return Reply(*self.replicas.reducer.answer_recall(request))
            case other:
                raise AssertionError(f"{type(other).__name__} is not among WORK_REQUESTS")

    def _on_trained(self) -> None:
        """Called when a training microbatch has left the hop: a share of a step may be complete by that."""
        for stage in self.span.stages:
            self.replicas.on_microbatch_left(stage, self.hop.training)

    async def follow_steps(self) -> None:
        """Tells replicas, keeper, barrier and origin of each step that the device thread takes, until cancelled."""
        async for event in self.compute.step_events():
            if isinstance(event, ShareClosed):
                self.replicas.on_share_closed(event.stage)
                continue
            self.replicas.on_stepped(event.stage, event.step, event.own_tokens)
            self.keeper.on_stepped(event.stage, event.step)
            for waiting in (self._barrier, self.origin):
                if waiting is not None:
                    waiting.stepped()

    def pause(self) -> None:
        """Refuses others' new microbatches and opens none as origin; those in hand are finished."""
        self._local_peer.ledger.stop_accepting("paused by its owner")
        if self.origin is not None:
            self.origin.pause()

    def resume(self) -> None:
        """Takes and opens microbatches again after `pause`."""
        self._local_peer.ledger.start_accepting()
        if self.origin is not None:
            self.origin.resume()

    async def write_checkpoints(self, within_s: float) -> None:
        """Stops taking and following steps, and writes a checkpoint of every stage, within `within_s` for all together.

        A timeout or an AgoraError is reported as TaskFailed, never raised.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.replicas.leave(within_s / 2)
                await self.keeper.write_checkpoints()
        except (TimeoutError, AgoraError) as error:
            reason = str(error) or f"not written in {within_s:.0f} s"
            self._local_peer.startup.report_event(events.TaskFailed("checkpoint", reason))


# --- loading


@asynccontextmanager
async def load_span(local_peer: LocalPeer, wanted: Span | None) -> AsyncIterator[LoadedSpan]:
    """Claims and loads a span and answers requests for it until the block ends; the caller announces it as serving.

    wanted: None lets placement choose. Raises an AgoraError that says what to do.
    """
    async with AsyncExitStack() as closing:
        loading = load_until_it_stands(
            await _claim(local_peer, wanted),
            load=lambda span: _load_stages(local_peer, span),
            confirm=lambda: _confirm(local_peer),
            loads=MOST_LOADS if wanted is None else 1,
        )
        compute, batches = await closing.enter_async_context(loading)
        keeper = await _fill_stages(local_peer, compute, closing)
        span = LoadedSpan(local_peer, compute, keeper, batches)
        closing.callback(span.collector.close)
        closing.push_async_callback(span.tasks.close)
        local_peer.ledger.start_accepting()  # a former span refused new work when it ended
        closing.enter_context(local_peer.requests.answering(WORK_REQUESTS, span.answer))
        span.tasks.start("step events", span.follow_steps())
        span.tasks.start("keeper", keeper.run())
        span.tasks.start("replicas", span.replicas.run())
        yield span


async def _fill_stages(local_peer: LocalPeer, compute: Compute, closing: AsyncExitStack) -> StateKeeper:
    """Fills the stages from checkpoints or other replicas. Returns their keeper, which gives others copies of them."""
    startup, membership, manifest = local_peer.startup, local_peer.membership, local_peer.manifest
    holders = StageHolders(
        startup.me,
        serving=local_peer.steps_of,
        claimants=lambda stage: {seen.peer: seen.step_of(stage) for seen in membership.view.claimants(stage)},
    )
    keeper = StateKeeper(
        manifest,
        startup.home.checkpoints(manifest.run_id),
        stages=compute,
        holders=holders,
        caller=local_peer.network,
        report=startup.report_event,
        report_offence=local_peer.offences.report_offence,
    )

    async def answer(call: IncomingCall) -> Reply:
        """Answers a request of STATE_REQUESTS, by the keeper."""
        await faults.reach("state.giving")
        assert isinstance(call.message, STATE_REQUESTS)
        return await keeper.answer(call.message)

    with startup.steps.step("state") as note:
        steps = await keeper.find_checkpoints()
        closing.enter_context(local_peer.requests.answering(STATE_REQUESTS, answer))
        if any(steps):
            await membership.publish_progress(
                Progress(startup.me, compute.span, 0, steps, tokens_per_second=0.0, loss=None, queue=0, completed=0)
            )
        await membership.refresh()
        note.text = await keeper.fill_stages()
    return keeper


async def _claim(local_peer: LocalPeer, wanted: Span | None) -> Span:
    """Claims the wanted span, or the best one, and returns it. Raises InputError or LocalError when it cannot."""
    manifest, supply = local_peer.manifest, local_peer.base_supply
    count = manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")
    with local_peer.startup.steps.step("placement") as note:
        await run_in_thread(lambda: family_of(manifest.model).check_machine(supply.folder_to_check()))
        placement = await local_peer.membership.claim_span(1, wanted)
        note.text = _check_placement_memory(local_peer, placement)
    return placement.span


def _check_placement_memory(local_peer: LocalPeer, placement: Placement) -> str:
    """Raises MemoryError_ without the memory that the span needs; else returns why it was chosen and what it needs."""
    free, limit_gib = available_bytes(torch.device("cpu")), local_peer.startup.settings.memory_gib
    need = doctor.check_memory(local_peer.manifest, placement.span, free, limit_gib)
    return f"stages {placement.span}: {placement.reason}; {need}"


async def _confirm(local_peer: LocalPeer) -> Span | None:
    """Asks whether the claimed span still stands; None if so, else the span to load instead, already claimed."""
    with local_peer.startup.steps.step("confirm") as note:
        placement = await local_peer.membership.confirm()
        if placement is None:
            note.text = "the span stands"
            return None
        note.text = f"others took it meanwhile; {_check_placement_memory(local_peer, placement)}"
        return placement.span


@asynccontextmanager
async def load_until_it_stands(
    span: Span,
    load: Callable[[Span], AbstractAsyncContextManager[T]],
    confirm: Callable[[], Awaitable[Span | None]],
    loads: int,
) -> AsyncIterator[T]:
    """Loads the span and yields it; when `confirm` names another one before, closes it and loads that one instead.

    loads: the most loads in all; after the last one, `confirm` is not asked.
    """
    while True:
        async with load(span) as loaded:
            loads -= 1
            other = await confirm() if loads else None
            if other is None:
                yield loaded
                return
        span = other


@asynccontextmanager
async def _load_stages(local_peer: LocalPeer, span: Span) -> AsyncIterator[tuple[Compute, OriginBatches | None]]:
    """Builds the stages and yields their Compute and the batches (None without stage 0); at the end closes the Compute.

    Opens the corpus first if stage 0 is among the stages, and sets torch's thread count for the whole process.
    """
    startup, manifest, settings = local_peer.startup, local_peer.manifest, local_peer.startup.settings
    batches = await _load_corpus(local_peer) if 0 in span else None
    if settings.threads:
        torch.set_num_threads(settings.threads)
    base_model = await local_peer.base_supply.provide(span)
    with startup.steps.step("model") as note:
        compute = await Compute.create(
            manifest,
            span,
            report=startup.report_event,
            device=settings.device,
            in_flight=usual_in_flight(manifest),
            fault=faults.reach_blocking,
            base_model=base_model,
        )
        count = family_of(manifest.model).parameter_count(manifest.layers_in(span))
        note.text = f"{count:,} parameters on {compute.device}, {torch.get_num_threads()} threads"
    try:
        yield compute, batches
    finally:
        await compute.close(1.0)


async def _load_corpus(local_peer: LocalPeer) -> OriginBatches:
    """Opens the text that this origin draws from. Raises LocalError for files that the owner did not allow to read."""
    startup, manifest, base = local_peer.startup, local_peer.manifest, local_peer.startup.reference.base
    sources = [source for source in manifest.data.corpus if source != "stdlib"]
    sources += [manifest.data.tokenizer] if manifest.data.tokenizer != "bytes" else []
    if startup.reference.file is None and sources and not startup.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )
    cache = Path(startup.settings.corpus_cache or startup.home.root / "corpus")

    def load() -> tuple[Sampler, int]:
        """Opens tokenizer and corpus, which may take long; returns the sampler and how many tokens there are."""
        tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=base)
        corpus = open_corpus(manifest.data.corpus, tokenizer, cache, base=base)
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        return sampler, len(corpus)

    with startup.steps.step("corpus") as note:
        sampler, count = await run_in_thread(load)
        note.text = f"{count:,} tokens"
    reserved = startup.home.manifest(manifest.run_id).with_name("drawn.txt")
    return OriginBatches(sampler, startup.me, manifest.schedule.microbatch, reserved, startup.report_event)
