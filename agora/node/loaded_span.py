"""The span: what lives as long as this daemon holds the same stages.

Knows: the rooms that work on stages, and how they are wired to each other and to the peer. Must not know: processes,
signals, or how any room does its work.

Opened in this order, closed in the opposite one:

| step | opens |
|---|---|
| placement | nothing; chooses the span and claims it in the directory |
| corpus | the text that an origin draws from (spans with stage 0) |
| model | the compute: stages, device thread |
| confirm | nothing; asks whether the claimed span still stands, else back to placement |
| state | checkpoints; fills the stages with the newest state there is |
| - | replicas, hop, origin, collector |
| serve | nothing; says in the directory that this peer serves |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from agora_protocol.errors import AgoraError, InputError, LocalError, ProtocolError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import (
    Contribute,
    GetChunk,
    GetSlice,
    GetState,
    GossipSteps,
    Message,
    Process,
    Recall,
)
from agora_protocol.records import Progress

from agora.averaging.slices import Slices
from agora.calls import Reply
from agora.data import Sampler, open_corpus, open_tokenizer
from agora.model import family_of
from agora.net.calls import IncomingCall
from agora.node import doctor
from agora.node.background import BackgroundTasks
from agora.node.origin_batches import OriginBatches
from agora.node.peer import Peer, usual_in_flight, wire_shapes
from agora.node.replicas import Replicas
from agora.node.requests import Answerer
from agora.node.startup import Startup
from agora.observe import events, faults
from agora.pipeline.barrier import StepBarrier
from agora.pipeline.hop import Hop, HopConfig
from agora.pipeline.ledger import WorkLedger
from agora.pipeline.opening import Share
from agora.pipeline.origin import Origin, OriginConfig, OwnStage
from agora.state.collector import StageCollector
from agora.state.keeper import KeeperConfig, StateKeeper
from agora.state.layout import Layout, lay_out
from agora.swarm.conduct import Offence
from agora.swarm.placement import Placement
from agora.threads import run_in_thread
from agora.train.compute import Compute
from agora.train.memory import available_bytes

MOST_LOADS = 3
"""When other peers take the span while this one loads it, it loads another; the last one it serves in any case."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """The stages that this daemon holds, and all that works on them."""

    compute: Compute
    keeper: StateKeeper
    replicas: Replicas
    ledger: WorkLedger
    hop: Hop
    origin: Origin | None
    collector: StageCollector
    tasks: BackgroundTasks

    @property
    def span(self) -> Span:
        """The stages held."""
        return self.compute.span

    @property
    def in_hand(self) -> int:
        """How many microbatches this peer has accepted or originated and not finished."""
        return self.ledger.taken + (self.origin.open_microbatches if self.origin else 0)

    def pause(self) -> None:
        """Takes and opens no more microbatches; those in hand are finished."""
        self.hop.pause()
        if self.origin is not None:
            self.origin.pause()

    def resume(self) -> None:
        """Takes and opens microbatches again."""
        self.hop.resume()
        if self.origin is not None:
            self.origin.resume()

    async def finish_own(self, within_s: float) -> None:
        """Opens no more microbatches and waits for those in flight; drops those that are not back in `within_s`."""
        if self.origin is not None:
            await self.origin.leave(within_s)

    async def write_checkpoints(self, within_s: float, report: events.Report) -> None:
        """Writes a checkpoint of every stage. One that takes longer than `within_s` is given up, which is reported."""
        self.replicas.rest()
        try:
            async with asyncio.timeout(within_s):
                await self.keeper.write_checkpoints()
        except (TimeoutError, AgoraError) as error:
            report(events.TaskFailed("checkpoint", str(error) or f"not written in {within_s:.0f} s"))


@asynccontextmanager
async def load_span(startup: Startup, peer: Peer, wanted: Span | None) -> AsyncIterator[LoadedSpan]:
    """Claims and loads a span and answers requests for it until the block ends; others do not know yet that it serves.

    wanted: None lets placement choose. Raises an
    AgoraError that says what to do.
    """
    manifest = peer.signed.manifest
    async with AsyncExitStack() as closing:
        span = await _claim(startup, peer, wanted)
        loads = MOST_LOADS if wanted is None else 1
        compute, batches = await load_until_it_stands(
            span,
            lambda span: _load_stages(startup, peer, span),
            lambda: _confirm(startup, peer),
            closing,
            loads,
        )
        tasks = await closing.enter_async_context(BackgroundTasks())
        keeper = _make_keeper(startup, peer, compute)
        with startup.steps.step("state") as note:
            steps = await keeper.find_checkpoints()
            closing.enter_context(peer.requests.answering(_state_answerers(keeper, peer)))
            if any(steps):
                await peer.membership.publish_progress(Progress(startup.peer, compute.span, 0, steps, 0.0, None, 0, 0))
            await peer.membership.refresh()
            note.text = await keeper.fill_stages()
        replicas = Replicas(
            peer.signed,
            startup.peer,
            compute,
            peer.membership,
            peer.caller,
            keeper,
            startup.report,
            peer.offences.report_offence,
        )
        barrier = step_barrier(manifest, compute)
        hop = _make_hop(startup, peer, compute, barrier)
        origin = None if batches is None else _make_origin(startup, peer, hop, batches, replicas)
        collected = startup.home.collected(peer.signed.run_id)
        collector = StageCollector(
            peer.signed.run_id,
            collected,
            lambda: stage_layouts(manifest),
            compute,
            lambda: peer.membership.view,
            peer.network,
            peer.offences.report_offence,
        )
        closing.callback(collector.close)
        closing.enter_context(peer.requests.answering(_work_answerers(hop, replicas)))
        tasks.start("step events", _follow_steps(compute, keeper, replicas, barrier, origin))
        tasks.start("keeper", keeper.run())
        tasks.start("replicas", replicas.run())
        yield LoadedSpan(compute, keeper, replicas, peer.ledger, hop, origin, collector, tasks)


# --- placement, and the loading that goes with it


async def _claim(startup: Startup, peer: Peer, wanted: Span | None) -> Span:
    count = peer.signed.manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")
    with startup.steps.step("placement") as note:
        placement = await peer.membership.claim_span(1, wanted)
        note.text = _placement_note(startup, peer, placement)
    return placement.span


def _placement_note(startup: Startup, peer: Peer, placement: Placement) -> str:
    need = doctor.check_memory(
        peer.signed.manifest, placement.span, available_bytes(torch.device("cpu")), startup.settings.memory_gib
    )
    return f"stages {placement.span}: {placement.reason}; {need}"


async def _confirm(startup: Startup, peer: Peer) -> Span | None:
    """Asks whether the claimed span still stands; returns None, or the span to load instead, already claimed."""
    with startup.steps.step("confirm") as note:
        placement = await peer.membership.confirm()
        note.text = "the span stands" if placement is None else "others took it meanwhile"
    if placement is None:
        return None
    with startup.steps.step("placement") as note:
        note.text = _placement_note(startup, peer, placement)
    return placement.span


async def load_until_it_stands(
    span: Span,
    load: Callable[[Span], AbstractAsyncContextManager[T]],
    confirm: Callable[[], Awaitable[Span | None]],
    closing: AsyncExitStack,
    loads: int,
) -> T:
    """Loads the span, and another one when `confirm` says so, at most `loads` times; two are never loaded at once.

    `closing` takes over the one that stays.
    """
    while True:
        async with AsyncExitStack() as loading:
            loaded = await loading.enter_async_context(load(span))
            loads -= 1
            other = await confirm() if loads else None
            if other is None:
                closing.push_async_exit(loading.pop_all())
                return loaded
        span = other


@asynccontextmanager
async def _load_stages(startup: Startup, peer: Peer, span: Span) -> AsyncIterator[tuple[Compute, OriginBatches | None]]:
    """Loads the corpus, if the span holds stage 0, and the stages with their initial weights."""
    manifest = peer.signed.manifest
    batches = await _load_corpus(startup, peer) if 0 in span else None
    if startup.settings.threads:
        torch.set_num_threads(startup.settings.threads)
    with startup.steps.step("model") as note:
        compute = await Compute.create(
            manifest,
            span,
            report=startup.report,
            device=startup.settings.device,
            in_flight=usual_in_flight(manifest),
            fault=faults.reach_blocking,
        )
        count = family_of(manifest.model).parameter_count(manifest.layers_in(span))
        note.text = f"{count:,} parameters on {compute.device}, {torch.get_num_threads()} threads"
    try:
        yield compute, batches
    finally:
        await compute.close(1.0)


async def _load_corpus(startup: Startup, peer: Peer) -> OriginBatches:
    """Opens the text that this origin draws from, in a thread, since tokenising it may take long."""
    manifest, base = peer.signed.manifest, startup.run.base
    _check_files(startup, manifest)
    cache = Path(startup.settings.corpus_cache or startup.home.corpus)

    def load() -> tuple[Sampler, int]:
        tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=base)
        corpus = open_corpus(manifest.data.corpus, tokenizer, cache, base=base)
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        return sampler, len(corpus.tokens)

    with startup.steps.step("corpus") as note:
        sampler, count = await run_in_thread(load)
        note.text = f"{count:,} tokens"
    reserved = startup.home.manifest(peer.signed.run_id).with_name("drawn.txt")
    return OriginBatches(sampler, startup.peer, manifest.schedule.microbatch, reserved, startup.report)


def _check_files(startup: Startup, manifest: Manifest) -> None:
    """Raises LocalError when a manifest from the network names files of this machine and the owner did not allow it."""
    sources = [source for source in manifest.data.corpus if source != "stdlib"]
    sources += [manifest.data.tokenizer] if manifest.data.tokenizer != "bytes" else []
    if startup.run.file is None and sources and not startup.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )


# --- what works on the stages


def _make_keeper(startup: Startup, peer: Peer, compute: Compute) -> StateKeeper:
    run, manifest = peer.signed.run_id, peer.signed.manifest
    config = KeeperConfig(startup.peer, run, manifest, startup.home.checkpoints(run))
    slices = {
        stage: Slices(compute.layout(stage).numel, manifest.averaging.fraction, manifest.seed)
        for stage in compute.span.stages
    }
    report_offence = peer.offences.report_offence
    return StateKeeper(
        config, compute, slices, lambda: peer.membership.view, peer.network, startup.report, report_offence
    )


def stage_layouts(manifest: Manifest) -> list[Layout]:
    """Returns the layout of every stage of the run, held or not. Computed from the manifest; no stage is built."""
    family, stages = family_of(manifest.model), range(manifest.stage_count)
    return [lay_out(family.parameter_shapes(manifest.layers_of(stage)).items()) for stage in stages]


def _make_hop(startup: Startup, peer: Peer, compute: Compute, barrier: StepBarrier | None) -> Hop:
    manifest = peer.signed.manifest
    peer.ledger.accept_new()  # after a move; the hop before has refused new work when it left
    config = HopConfig(startup.peer, manifest.stage_count, wire_shapes(manifest))
    return Hop(
        config,
        compute,
        peer.router,
        peer.ledger,
        report=startup.report,
        barrier=barrier,
        fault=faults.reach,
    )


def _make_origin(startup: Startup, peer: Peer, hop: Hop, batches: OriginBatches, replicas: Replicas) -> Origin:
    manifest, me, membership = peer.signed.manifest, startup.peer, peer.membership
    schedule = manifest.schedule
    synchronous = schedule.kind == "synchronous"
    config = OriginConfig(
        me=me,
        stage_count=manifest.stage_count,
        synchronous=synchronous,
        target_tokens=manifest.optimizer.target_tokens,
        tokens_per_microbatch=manifest.tokens_per_microbatch,
        ceiling=usual_in_flight(manifest) if synchronous else peer.seats,
        max_in_flight=schedule.max_in_flight,
    )

    def share() -> Share:
        origins = [seen.peer for seen in membership.view.replicas(0)]
        return Share(origins.index(me), len(origins)) if me in origins else Share()

    def ready() -> bool:
        view, stages = membership.view, range(manifest.stage_count)
        return schedule.least_replicas == 1 or all(
            len(view.replicas(stage)) >= schedule.least_replicas for stage in stages
        )

    return Origin(
        config,
        hop,
        batches,
        startup.report,
        share=share,
        stage=OwnStage(lambda: replicas.step_of(0), lambda: replicas.missing_tokens(0), ready),
        path_s=hop.path_s,
    )


def step_barrier(manifest: Manifest, compute: Compute) -> StepBarrier | None:
    """Returns where microbatches wait for their step; None in an asynchronous run, in which none ever waits."""
    return StepBarrier(compute.span, compute.step_of) if manifest.schedule.kind == "synchronous" else None


async def _follow_steps(
    compute: Compute, keeper: StateKeeper, replicas: Replicas, barrier: StepBarrier | None, origin: Origin | None
) -> None:
    """Passes each step that the device thread takes on to everyone whom it concerns."""
    async for event in compute.step_events():
        replicas.stepped(event.stage, event.step, event.own_tokens)
        keeper.note_step(event.stage, event.step)
        if barrier is not None:
            barrier.stepped()
        if origin is not None:
            origin.stepped()


# --- what is answered for other peers


def _state_answerers(keeper: StateKeeper, peer: Peer) -> Mapping[type[Message], Answerer]:
    async def give(call: IncomingCall) -> Reply:
        await faults.reach("state.giving")
        assert isinstance(call.message, GetState | GetChunk | GetSlice)
        try:
            return await keeper.answer(call.message)
        except ProtocolError as error:
            peer.offences.report_offence(call.peer, Offence.BAD_REQUEST, f"{error.code}: {error}")
            raise

    return {GetState: give, GetChunk: give, GetSlice: give}


def _work_answerers(hop: Hop, replicas: Replicas) -> Mapping[type[Message], Answerer]:
    async def process(call: IncomingCall) -> Reply:
        assert isinstance(call.message, Process)
        answer = await hop.process(call.message, call.tensors, call.deadline, call.progress)
        return Reply(answer.message, list(answer.tensors))

    async def gossip(call: IncomingCall) -> Reply:
        assert isinstance(call.message, GossipSteps)
        return Reply(replicas.gossip(call.peer, call.message))

    async def contribute(call: IncomingCall) -> Reply:
        assert isinstance(call.message, Contribute)
        return Reply(*await replicas.contribute(call.peer, call.message, call.tensors, call.deadline))

    async def recall(call: IncomingCall) -> Reply:
        assert isinstance(call.message, Recall)
        return Reply(*replicas.recall(call.message))

    return {Process: process, GossipSteps: gossip, Contribute: contribute, Recall: recall}
