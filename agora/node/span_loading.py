"""Loads a span: claims it, builds its stages, fills them with the newest state, and answers requests for it.

Knows: the order of these steps. Must not know: what a loaded span does (loaded_span.py), processes, signals.

| step | does |
|---|---|
| placement | chooses the span and claims it in the directory as joining |
| corpus | opens the text that an origin draws from (spans with stage 0) |
| model | builds the stages on the device, with their initial weights |
| confirm | asks whether the claimed span still stands; else it goes back to placement |
| state | fills the stages from a checkpoint or from other replicas |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import torch
from agora_protocol.errors import InputError, LocalError
from agora_protocol.ids import Span
from agora_protocol.messages import GetChunk, GetSlice, GetState
from agora_protocol.records import Progress

from agora.averaging.partition import Slices
from agora.calls import Reply
from agora.data.corpus import open_corpus
from agora.data.sampling import OriginBatches, Sampler
from agora.data.tokenizer import open_tokenizer
from agora.model import family_of
from agora.net.incoming import IncomingCall
from agora.node import doctor
from agora.node.loaded_span import WORK_REQUESTS, LoadedSpan
from agora.node.peer import Peer, usual_in_flight
from agora.observe import faults
from agora.state.keeper import StateKeeper
from agora.swarm.placement import Placement
from agora.threads import run_in_thread
from agora.train.compute import Compute
from agora.train.memory import available_bytes

MOST_LOADS = 3
"""When other peers take the span while this one loads it, it loads another; the last one it serves in any case."""
STATE_REQUESTS: Final = (GetState, GetChunk, GetSlice)
T = TypeVar("T")


@asynccontextmanager
async def load_span(peer: Peer, wanted: Span | None) -> AsyncIterator[LoadedSpan]:
    """Claims and loads a span and answers requests for it until the block ends; others do not know yet that it serves.

    wanted: None lets placement choose. Raises an AgoraError that says what to do.
    """
    async with AsyncExitStack() as closing:
        claimed = await _claim(peer, wanted)
        loads = MOST_LOADS if wanted is None else 1
        compute, batches = await load_until_it_stands(
            claimed, lambda span: _load_stages(peer, span), lambda: _confirm(peer), closing, loads
        )
        keeper = await _fill_stages(peer, compute, closing)
        span = LoadedSpan(peer, compute, keeper, batches)
        closing.callback(span.collector.close)
        tasks = await closing.enter_async_context(span.tasks)
        peer.ledger.accept_new()  # a former span refused new work when it ended
        closing.enter_context(peer.requests.answering(WORK_REQUESTS, span.answer))
        tasks.start("step events", span.follow_steps())
        tasks.start("keeper", keeper.run())
        tasks.start("replicas", span.replicas.run())
        yield span


async def _fill_stages(peer: Peer, compute: Compute, closing: AsyncExitStack) -> StateKeeper:
    """Fills the stages with the newest state there is: this machine's, the other replicas', or the seed's.

    Until `closing` ends, the state is given to peers that join, also while this one still fetches it.
    """
    startup, membership, manifest = peer.startup, peer.membership, peer.signed.manifest
    slices = {
        stage: Slices(compute.layout(stage).numel, manifest.averaging.fraction, manifest.seed)
        for stage in compute.span.stages
    }
    keeper = StateKeeper(
        startup.peer,
        manifest,
        startup.home.checkpoints(manifest.run_id),
        compute,
        slices,
        lambda stage: {holder.peer: holder.step_of(stage) for holder in membership.view.replicas(stage)},
        lambda stage: {holder.peer: holder.step_of(stage) for holder in membership.view.claimants(stage)},
        peer.network,
        startup.report,
        peer.offences.report_offence,
    )

    async def answer(call: IncomingCall) -> Reply:
        """Answers one of STATE_REQUESTS."""
        await faults.reach("state.giving")
        assert isinstance(call.message, STATE_REQUESTS)
        return await keeper.answer(call.message)

    with startup.steps.step("state") as note:
        steps = await keeper.find_checkpoints()
        closing.enter_context(peer.requests.answering(STATE_REQUESTS, answer))
        if any(steps):
            await membership.publish_progress(Progress(startup.peer, compute.span, 0, steps, 0.0, None, 0, 0))
        await membership.refresh()
        note.text = await keeper.fill_stages()
    return keeper


async def _claim(peer: Peer, wanted: Span | None) -> Span:
    """Claims the wanted span, or the best one, and returns it. Raises InputError, MemoryError_."""
    count = peer.signed.manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")
    with peer.startup.steps.step("placement") as note:
        placement = await peer.membership.claim_span(1, wanted)
        note.text = _placement_note(peer, placement)
    return placement.span


def _placement_note(peer: Peer, placement: Placement) -> str:
    """Returns why the span was chosen and what memory it needs. Raises MemoryError_ when that is not there."""
    free, limit_gib = available_bytes(torch.device("cpu")), peer.startup.settings.memory_gib
    need = doctor.check_memory(peer.signed.manifest, placement.span, free, limit_gib)
    return f"stages {placement.span}: {placement.reason}; {need}"


async def _confirm(peer: Peer) -> Span | None:
    """Asks whether the claimed span still stands; returns None, or the span to load instead, already claimed."""
    with peer.startup.steps.step("confirm") as note:
        placement = await peer.membership.confirm()
        note.text = "the span stands" if placement is None else "others took it meanwhile"
    if placement is None:
        return None
    with peer.startup.steps.step("placement") as note:
        note.text = _placement_note(peer, placement)
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
async def _load_stages(peer: Peer, span: Span) -> AsyncIterator[tuple[Compute, OriginBatches | None]]:
    """Loads the corpus, if the span holds stage 0, and the stages with their initial weights."""
    startup, manifest = peer.startup, peer.signed.manifest
    batches = await _load_corpus(peer) if 0 in span else None
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


async def _load_corpus(peer: Peer) -> OriginBatches:
    """Opens the text that this origin draws from, in a thread, since tokenising it may take long."""
    startup, manifest, base = peer.startup, peer.signed.manifest, peer.startup.run.base
    _check_files(peer)
    cache = Path(startup.settings.corpus_cache or startup.home.root / "corpus")

    def load() -> tuple[Sampler, int]:
        """Returns the sampler and the number of tokens of the text."""
        tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=base)
        corpus = open_corpus(manifest.data.corpus, tokenizer, cache, base=base)
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        return sampler, len(corpus)

    with startup.steps.step("corpus") as note:
        sampler, count = await run_in_thread(load)
        note.text = f"{count:,} tokens"
    reserved = startup.home.manifest(peer.signed.run_id).with_name("drawn.txt")
    return OriginBatches(sampler, startup.peer, manifest.schedule.microbatch, reserved, startup.report)


def _check_files(peer: Peer) -> None:
    """Raises LocalError when a manifest from the network names files of this machine and the owner did not allow it."""
    startup, manifest = peer.startup, peer.signed.manifest
    sources = [source for source in manifest.data.corpus if source != "stdlib"]
    sources += [manifest.data.tokenizer] if manifest.data.tokenizer != "bytes" else []
    if startup.run.file is None and sources and not startup.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )
