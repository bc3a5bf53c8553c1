"""Claims a span, loads its stages, and fills them with their state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from agora_protocol.errors import InputError, LocalError, OutOfMemory, ProtocolError
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import GossipedSteps, GossipSteps
from agora_protocol.records import Progress

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.core.tasks import run_in_thread
from agora.cost.manifest_cost import default_in_flight
from agora.model import family_of
from agora.net.rpc.connection import IncomingCall
from agora.node.limits.disk import DiskGuard
from agora.node.limits.memory import check_memory, keeps_state_in_host, limit_device, measure_budget
from agora.node.peer.capacity_probe import CapacityProbe
from agora.node.peer.local_peer import LocalPeer
from agora.node.peer.requests import STATE_REQUESTS, WORK_REQUESTS
from agora.node.settings import Settings
from agora.node.span.loaded_span import LoadedSpan
from agora.node.span.training_data import OriginData, Samples, open_training_data
from agora.observe import faults
from agora.state.keeper import StageHolders, StateKeeper
from agora.swarm.rebalancing import rebalance_interval_s
from agora.train.device import DeviceOptions, choose_device
from agora.train.device_worker import DeviceWorker
from agora.tuning.epochs.batches import EpochFile

# Maximum number of spans loaded one after another, if others take each of them meanwhile; the last one is served.
MAX_LOADS = 3
STEP_ANSWER_TIMEOUT_S = 3.0  # seconds within which a replica must answer how many steps it has taken
T = TypeVar("T")


class RunFull(LocalError):
    """Raised where a machine would stand by, since the run needs it nowhere, while other runs wait for it."""

    code = "run-full"


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


def check_stages_fit(manifest: Manifest, settings: Settings, root: Path) -> None:
    """Checks whether this machine can hold the stages that its owner wants, or any stage if placement is to choose.

    root: the data directory. Raises InputError for stages that the run has not, DeviceError for the device, OutOfMemory
    if they do not fit. Blocks.
    """
    _check_stages(manifest, settings.span)
    choose_device(settings.device)
    budget = measure_budget(settings.device, settings.owners_memory)
    base_bytes = CapacityProbe(manifest, settings, root).base_bytes
    spans = [settings.span] if settings.span else [Span(stage, stage) for stage in range(manifest.stage_count)]
    reasons: list[OutOfMemory] = []
    for span in spans:
        try:
            check_memory(manifest, span, budget, base_bytes)
            return
        except OutOfMemory as error:
            reasons.append(error)
    raise reasons[0]


def _check_stages(manifest: Manifest, wanted: Span | None) -> None:
    count = manifest.stage_count
    if wanted is not None and wanted.last >= count:
        raise InputError(f"--stages {wanted} is beyond the run's last stage; give stages within 0-{count - 1}.")


async def _claim_span(local_peer: LocalPeer, wanted: Span | None) -> Span:
    manifest, supply = local_peer.manifest, local_peer.base_supply
    _check_stages(manifest, wanted)
    with local_peer.context.phases.enter("placement") as note:
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
        if local_peer.context.settings.queue:
            raise RunFull(
                f"The run does not need this machine now: {placement.reason}; join it later, or join another run."
            )
        local_peer.context.phases.report_progress(f"standing by: {placement.reason}")
        await asyncio.sleep(rebalance_interval_s(rng))


def _check_placement_memory(local_peer: LocalPeer, span: Span, reason: str) -> str:
    settings = local_peer.context.settings
    probe = local_peer.capacity_probe
    budget = measure_budget(settings.device, settings.owners_memory, probe.dtype)
    need = check_memory(local_peer.manifest, span, budget, probe.base_bytes)
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
    context, manifest, settings = local_peer.context, local_peer.manifest, local_peer.context.settings
    data = await open_training_data(local_peer) if 0 in span else None
    if settings.owners_memory.host:
        limit_device(settings.device, settings.owners_memory)
    base_model = await local_peer.base_supply.provide(span)
    probe = local_peer.capacity_probe
    budget = measure_budget(settings.device, settings.owners_memory, probe.dtype)
    base_bytes = probe.base_bytes
    in_host = await run_in_thread(lambda: keeps_state_in_host(manifest, span, budget, base_bytes))
    with context.phases.enter("model") as note:
        worker = await DeviceWorker.create(
            manifest,
            span,
            report=context.report_event,
            device=DeviceOptions(
                settings.device,
                in_host,
                settings.slowdown,
                settings.emulated_ms / 1000.0,
                faults.inject_fault_blocking,
                settings.compile,
                context.home.root / "compiled",
                probe.dtype,
            ),
            in_flight=default_in_flight(manifest),
            base_model=base_model,
            live=local_peer.live,
            draws=False,  # most starts fetch a state, or have a checkpoint; otherwise `fill_stages` asks for them
        )
        count = family_of(manifest.model).parameter_count(manifest.layers_in(span))
        note.text = f"{count:,} parameters on {worker.device}, {torch.get_num_threads()} threads, {worker.precision}"
        if in_host:
            note.text += "; the optimizer's state is in host memory"
    try:
        yield worker, data
    finally:
        await worker.close(1.0)


async def _confirm_claim(local_peer: LocalPeer) -> Span | None:
    with local_peer.context.phases.enter("confirm") as note:
        placement = await local_peer.membership.confirm()
        if placement is None or placement.span is None:
            note.text = "the span stands"
            return None
        note.text = "others took it meanwhile; " + _check_placement_memory(local_peer, placement.span, placement.reason)
        return placement.span


async def _fill_stages(
    local_peer: LocalPeer, worker: DeviceWorker, epoch_file: EpochFile | None, closing: AsyncExitStack
) -> StateKeeper:
    context, membership = local_peer.context, local_peer.membership
    keeper = _make_keeper(local_peer, worker, epoch_file)

    async def answer(call: IncomingCall) -> Reply:
        await faults.inject_fault("state.giving")
        assert isinstance(call.message, STATE_REQUESTS)
        return await keeper.answer(call.message, call.peer)

    with context.phases.enter("state") as note:
        steps = await keeper.find_checkpoints()
        # Others may ask while this peer still fills its stages: after a restart of all machines, each may need what the
        # others have.
        closing.enter_context(local_peer.requests.answering(STATE_REQUESTS, answer))
        if any(steps):
            await membership.publish_progress(
                Progress(context.me, worker.span, 0, steps, tokens_per_second=0.0, loss=None, queue=0, completed=0)
            )
        await membership.refresh()
        note.text = await keeper.fill_stages()
    return keeper


def _make_keeper(local_peer: LocalPeer, worker: DeviceWorker, epoch_file: EpochFile | None) -> StateKeeper:
    context, membership, manifest = local_peer.context, local_peer.membership, local_peer.manifest
    holders = StageHolders(
        context.me,
        serving=local_peer.steps_of,
        claimants=lambda stage: {seen.peer: seen.step_of(stage) for seen in membership.view.claimants(stage)},
        ask=partial(ask_steps, local_peer.network),
    )

    def on_written(stage: int, step: int) -> None:
        if epoch_file is not None and stage == 0:
            epoch_file.write(step)

    disk = DiskGuard(context.home, context.settings.disk_bytes)
    return StateKeeper(
        manifest,
        context.home.checkpoints(manifest.run_id),
        stages=worker,
        holders=holders,
        peer_caller=local_peer.network,
        report=context.report_event,
        report_violation=local_peer.peer_score.report_violation,
        on_written=on_written,
        live=local_peer.live,
        make_room=lambda stage, nbytes: disk.make_room(manifest, stage, nbytes, local_peer.live.total_steps),
    )


async def ask_steps(peer_caller: PeerCaller, stage: int, peers: Collection[PeerId]) -> Mapping[PeerId, int]:
    """Asks the peers, concurrently, how many steps they have taken at a stage; returns the steps by peer.

    Waits STEP_ANSWER_TIMEOUT_S at most; leaves out peers that fail or whose answer has no step.
    """

    async def ask(peer: PeerId) -> int:
        reply = await peer_caller.call(peer, GossipSteps(stage, ()), (), deadline=loop_time() + STEP_ANSWER_TIMEOUT_S)
        replicas = reply.message.replicas if isinstance(reply.message, GossipedSteps) else ()
        steps = [entry[1] for entry in replicas if entry[0] == peer]
        if not steps:
            raise ProtocolError("bad-message", f"{peer} was asked for its step, and did not tell it.")
        return steps[0]

    answers = await asyncio.gather(*map(ask, peers), return_exceptions=True)
    return {peer: step for peer, step in zip(peers, answers, strict=True) if isinstance(step, int)}
