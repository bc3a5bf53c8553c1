"""Loads a span: claims stages, opens the data, builds the stages and fills them from checkpoints or replicas.

Knows: the steps of loading and their order. Must not know: what a loaded span does (loaded_span.py), processes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import torch
from agora_protocol.errors import InputError, ProtocolError
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import GossipedSteps, GossipSteps
from agora_protocol.records import Progress

from agora.calls import Caller, Reply
from agora.clock import loop_time
from agora.model import family_of
from agora.net.incoming import IncomingCall
from agora.node import doctor
from agora.node.disk_guard import DiskGuard
from agora.node.loaded_span import LoadedSpan
from agora.node.local_peer import LocalPeer
from agora.node.memory_guard import limit_device
from agora.node.requests import STATE_REQUESTS, WORK_REQUESTS
from agora.node.training_data import Epochs, TrainingData, open_training_data
from agora.observe import faults
from agora.plan.cost_of_run import usual_in_flight
from agora.state.keeper import StageHolders, StateKeeper
from agora.swarm.rebalancing import next_look_s
from agora.threads import run_in_thread
from agora.train.compute import Compute
from agora.train.memory import available_bytes

MAX_LOADS = 3
"""At most this many spans are loaded, one after another, if others take each meanwhile; the last one is served."""
ASK_S = 3.0
"""Seconds within which a replica must answer how many steps it has taken."""
T = TypeVar("T")


@asynccontextmanager
async def load_span(local_peer: LocalPeer, wanted: Span | None) -> AsyncIterator[LoadedSpan]:
    """Claims and loads a span and answers requests for it until the block ends; the caller announces it as serving.

    wanted: None lets placement choose. Raises an AgoraError that says what to do.
    """
    async with AsyncExitStack() as closing:
        loading = load_until_confirmed(
            await _claim(local_peer, wanted),
            load=lambda span: _load_stages(local_peer, span),
            confirm=lambda: _confirm(local_peer),
            loads=MAX_LOADS if wanted is None else 1,
        )
        compute, data = await closing.enter_async_context(loading)
        epochs = data if isinstance(data, Epochs) else None
        keeper = await _fill_stages(local_peer, compute, epochs, closing)
        if epochs is not None:
            epochs.resume(compute.step_of(0))
        span = LoadedSpan(local_peer, compute, keeper, data)
        closing.callback(span.collector.close)
        closing.push_async_callback(span.tasks.close)
        local_peer.ledger.start_accepting()  # a former span refused new work when it ended
        closing.enter_context(local_peer.requests.answering(WORK_REQUESTS, span.answer))
        span.tasks.start("step events", span.follow_steps())
        span.tasks.start("device", compute.watch())
        span.tasks.start("keeper", keeper.run())
        span.tasks.start("replicas", span.replicas.run())
        if span.epoch_gossip is not None:
            span.tasks.start("epochs", span.epoch_gossip.run())
        yield span


async def _fill_stages(
    local_peer: LocalPeer, compute: Compute, epochs: Epochs | None, closing: AsyncExitStack
) -> StateKeeper:
    """Fills the stages from checkpoints or other replicas. Returns their keeper, which gives others copies of them.

    epochs: as for _make_keeper.
    """
    startup, membership = local_peer.startup, local_peer.membership
    keeper = _make_keeper(local_peer, compute, epochs)

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


def _make_keeper(local_peer: LocalPeer, compute: Compute, epochs: Epochs | None) -> StateKeeper:
    """Returns the StateKeeper that checkpoints and serves the stages' state. epochs: written with stage 0's, if any."""
    startup, membership, manifest = local_peer.startup, local_peer.membership, local_peer.manifest
    holders = StageHolders(
        startup.me,
        serving=local_peer.steps_of,
        claimants=lambda stage: {seen.peer: seen.step_of(stage) for seen in membership.view.claimants(stage)},
        ask=partial(ask_steps, local_peer.network),
    )

    def on_written(stage: int, step: int) -> None:
        """Called when a checkpoint was written: writes the state of the epochs together with that of stage 0."""
        if epochs is not None and stage == 0:
            epochs.record.write(step)

    keeper = StateKeeper(
        manifest,
        startup.home.checkpoints(manifest.run_id),
        stages=compute,
        holders=holders,
        caller=local_peer.network,
        report=startup.report_event,
        report_offence=local_peer.offences.report_offence,
        on_written=on_written,
    )
    disk = DiskGuard(startup.home, startup.settings.disk_bytes)
    keeper.make_room = lambda stage, nbytes: disk.make_room(manifest, stage, nbytes)
    return keeper


async def ask_steps(caller: Caller, stage: int, peers: Collection[PeerId]) -> Mapping[PeerId, int]:
    """Asks peers directly how many steps they have taken at a stage; returns the steps of those that answered."""

    async def ask(peer: PeerId) -> int:
        """Returns the peer's own step. Raises AgoraError when it does not answer with it."""
        reply = await caller.call(peer, GossipSteps(stage, ()), (), deadline=loop_time() + ASK_S)
        replicas = reply.message.replicas if isinstance(reply.message, GossipedSteps) else ()
        steps = [entry[1] for entry in replicas if entry[0] == peer]
        if not steps:
            raise ProtocolError("bad-message", f"{peer} was asked for its step, and did not tell it.")
        return steps[0]

    answers = await asyncio.gather(*map(ask, peers), return_exceptions=True)
    return {peer: step for peer, step in zip(peers, answers, strict=True) if isinstance(step, int)}


async def _claim(local_peer: LocalPeer, wanted: Span | None) -> Span:
    """Claims the wanted span, or the best one, and returns it. Raises InputError or LocalError when it cannot."""
    manifest, supply = local_peer.manifest, local_peer.base_supply
    count = manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")
    with local_peer.startup.steps.step("placement") as note:
        await run_in_thread(lambda: family_of(manifest.model).check_machine(supply.folder_to_check()))
        await local_peer.ability.look_at_machine()
        span, reason = await _claim_or_stand_by(local_peer, wanted)
        note.text = _check_placement_memory(local_peer, span, reason)
    return span


async def _claim_or_stand_by(local_peer: LocalPeer, wanted: Span | None) -> tuple[Span, str]:
    """Claims a span, and returns it with the reason; stands by, and says so, as long as placement claims none.

    Raises OutOfMemory when no stage at all fits into this machine's memory.
    """
    own, rng = local_peer.ability, random.Random()
    if wanted is None and not any(own.ability.longest):
        _check_placement_memory(local_peer, Span(0, 0), "")
    while True:
        placement = await local_peer.membership.claim_span(own.demands, own.ability, wanted)
        if placement.span is not None:
            return placement.span, placement.reason
        local_peer.startup.steps.report_progress(f"standing by: {placement.reason}")
        await asyncio.sleep(next_look_s(rng))


def _check_placement_memory(local_peer: LocalPeer, span: Span, reason: str) -> str:
    """Returns in words why the span was chosen and what memory it needs. Raises OutOfMemory if it is not there."""
    free, limit_gib = available_bytes(torch.device("cpu"), within_limit=False), local_peer.startup.settings.memory_gib
    need = doctor.check_memory(local_peer.manifest, span, free, limit_gib, local_peer.ability.base_bytes)
    return f"stages {span}: {reason}; {need}"


async def _confirm(local_peer: LocalPeer) -> Span | None:
    """Checks whether this peer's claim still stands. Returns None if so, else another span, which it has claimed."""
    with local_peer.startup.steps.step("confirm") as note:
        placement = await local_peer.membership.confirm()
        if placement is None or placement.span is None:
            note.text = "the span stands"
            return None
        note.text = "others took it meanwhile; " + _check_placement_memory(local_peer, placement.span, placement.reason)
        return placement.span


@asynccontextmanager
async def load_until_confirmed(
    span: Span,
    load: Callable[[Span], AbstractAsyncContextManager[T]],
    confirm: Callable[[], Awaitable[Span | None]],
    loads: int,
) -> AsyncIterator[T]:
    """Loads the span; while `confirm` then returns another span, closes it and loads that one instead; yields it.

    confirm: returns None if the loaded span stands. loads: the most loads in all; the last is not confirmed.
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
async def _load_stages(local_peer: LocalPeer, span: Span) -> AsyncIterator[tuple[Compute, TrainingData | None]]:
    """Builds the stages and yields their Compute and the data (None without stage 0); at the end closes the Compute.

    Opens the data first if stage 0 is among the stages, and sets torch's thread count for the whole process.
    """
    startup, manifest, settings = local_peer.startup, local_peer.manifest, local_peer.startup.settings
    data = await open_training_data(local_peer) if 0 in span else None
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.memory_bytes:
        limit_device(settings.device, settings.memory_bytes)
    base_model = await local_peer.base_supply.provide(span)
    with startup.steps.step("model") as note:
        compute = await Compute.create(
            manifest,
            span,
            report=startup.report_event,
            device=settings.device,
            in_flight=usual_in_flight(manifest),
            slowdown=settings.slowdown,
            fault=faults.reach_blocking,
            base_model=base_model,
        )
        count = family_of(manifest.model).parameter_count(manifest.layers_in(span))
        note.text = f"{count:,} parameters on {compute.device}, {torch.get_num_threads()} threads"
    try:
        yield compute, data
    finally:
        await compute.close(1.0)
