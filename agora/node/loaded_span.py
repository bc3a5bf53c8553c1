"""The span: what lives as long as this daemon holds the same stages.

Knows: the rooms that work on stages, and how they are wired to each other and to the peer. Must not know: how the
stages were loaded (span_loading.py), processes, signals, or how any room does its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import Contribute, GossipSteps, Message, Process, Recall

from agora.averaging.group import ReplicaGroup
from agora.calls import Reply
from agora.data.sampling import OriginBatches
from agora.model import family_of
from agora.net.incoming import IncomingCall
from agora.node.background import BackgroundTasks
from agora.node.node_report import SpanReport, StageReport
from agora.node.peer import Peer, usual_in_flight
from agora.observe import events, faults
from agora.pipeline.barrier import StepBarrier
from agora.pipeline.hop import Hop
from agora.pipeline.opening import Share, Surroundings
from agora.pipeline.origin import Origin, OriginConfig
from agora.state.collector import StageCollector
from agora.state.keeper import StateKeeper
from agora.state.layout import Layout, lay_out
from agora.swarm.membership import Membership
from agora.train.compute import Compute

WORK_REQUESTS: tuple[type[Message], ...] = (Process, GossipSteps, Contribute, Recall)
"""The requests that a loaded span answers."""


class MembershipListing:
    """The replicas that the membership's view lists; a ReplicaListing."""

    def __init__(self, membership: Membership, stage_count: int) -> None:
        self._membership = membership
        self._stages = range(stage_count)

    def listed(self, stage: int) -> Mapping[PeerId, float]:
        """Returns a stage's replicas, with their bandwidths in bytes per second."""
        return {seen.peer: seen.bandwidth for seen in self._membership.view.replicas(stage)}

    def steps_of_run(self) -> list[list[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""
        view = self._membership.view
        return [[seen.step_of(stage) for seen in view.replicas(stage)] for stage in self._stages]


class LoadedSpan:
    """The stages that this daemon holds, and all that works on them."""

    def __init__(self, peer: Peer, compute: Compute, keeper: StateKeeper, batches: OriginBatches | None) -> None:
        """Wires the rooms to each other. batches: what the origin draws, None without stage 0."""
        startup, signed = peer.startup, peer.signed
        self._peer = peer
        self.compute = compute
        self.keeper = keeper
        self.replicas = ReplicaGroup(
            signed,
            startup.peer,
            compute,
            peer.network,
            keeper,
            MembershipListing(peer.membership, signed.manifest.stage_count),
            startup.report,
            peer.offences.report_offence,
        )
        self._barrier = step_barrier(signed.manifest, compute)
        self.hop = Hop(
            compute,
            peer.router,
            peer.ledger,
            stage_count=signed.manifest.stage_count,
            shapes=peer.shapes,
            report=startup.report,
            barrier=self._barrier,
            fault=faults.reach,
        )
        self.origin = None if batches is None else self._make_origin(batches)
        self.collector = StageCollector(
            signed.run_id,
            startup.home.runs / signed.run_id / "collected",
            lambda: stage_layouts(signed.manifest),
            compute,
            lambda stage: {holder.peer: holder.step_of(stage) for holder in peer.membership.view.replicas(stage)},
            peer.network,
            peer.offences.report_offence,
        )
        self.tasks = BackgroundTasks()

    def _make_origin(self, batches: OriginBatches) -> Origin:
        """Returns the origin of this peer, which opens the microbatches that `batches` draws."""
        peer, manifest = self._peer, self._peer.signed.manifest
        is_synchronous = manifest.schedule.kind == "synchronous"
        config = OriginConfig(
            me=peer.startup.peer,
            stage_count=manifest.stage_count,
            synchronous=is_synchronous,
            target_tokens=manifest.optimizer.target_tokens,
            tokens_per_microbatch=manifest.tokens_per_microbatch,
            ceiling=usual_in_flight(manifest) if is_synchronous else peer.seats,
            max_in_flight=manifest.schedule.max_in_flight,
        )
        return Origin(config, self.hop, batches.draw, batches.heldout, peer.startup.report, self._look_around)

    def _look_around(self) -> Surroundings:
        """Returns what the origin must know. Its share of a step is all of it while it is not seen in the view."""
        ready, path_s = self._has_enough_replicas(), self.hop.path_s()
        if self._barrier is None:
            return Surroundings(ready, path_s=path_s)
        origins, me = [seen.peer for seen in self._peer.membership.view.replicas(0)], self._peer.startup.peer
        share = Share(origins.index(me), len(origins)) if me in origins else Share()
        return Surroundings(ready, share, self.compute.step_of(0), self.replicas.missing_tokens(0), path_s)

    def _has_enough_replicas(self) -> bool:
        """Whether every stage has as many replicas as the run requires before it trains."""
        manifest, view = self._peer.signed.manifest, self._peer.membership.view
        least = manifest.schedule.least_replicas
        return least == 1 or all(len(view.replicas(stage)) >= least for stage in range(manifest.stage_count))

    @property
    def span(self) -> Span:
        """The stages held."""
        return self.compute.span

    @property
    def in_hand(self) -> int:
        """How many microbatches this peer has accepted or originated and not finished."""
        return self._peer.ledger.taken + (self.origin.open_microbatches if self.origin else 0)

    def report(self) -> SpanReport:
        """Returns a snapshot of the span."""
        origin = self.origin
        stages = (
            StageReport(
                stage.stage,
                stage.step,
                tuple(stage.staleness),
                stage.refused_nonfinite,
                self.replicas.reason(stage.stage),
            )
            for stage in self.compute.progress()
        )
        return SpanReport(
            self.span,
            tuple(stages),
            self.compute.busy_fraction(),
            self.in_hand,
            self.hop.queue,
            self.hop.path_s(),
            origin is not None,
            origin.loss if origin else None,
            origin.credit.reason if origin else "",
        )

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers one of WORK_REQUESTS."""
        match call.message:
            case Process() as request:
                return await self.hop.process(request, call.tensors, call.deadline, call.progress)
            case GossipSteps() as request:
                return Reply(self.replicas.gossip.answer(call.peer, request))
            case Contribute() as request:
                return Reply(*await self.replicas.contribute(call.peer, request, call.tensors, call.deadline))
            case Recall() as request:
                return Reply(*self.replicas.owner.recall(request))
            case other:
                raise AssertionError(f"{type(other).__name__} is not among WORK_REQUESTS")

    async def follow_steps(self) -> None:
        """Passes each step that the device thread takes on to everyone whom it concerns, until cancelled."""
        async for event in self.compute.step_events():
            self.replicas.stepped(event.stage, event.step, event.own_tokens)
            self.keeper.note_step(event.stage, event.step)
            for waiting in (self._barrier, self.origin):
                if waiting is not None:
                    waiting.stepped()

    def pause(self) -> None:
        """Takes and opens no more microbatches; those in hand are finished."""
        self._peer.ledger.refuse_new("paused by its owner")
        if self.origin is not None:
            self.origin.pause()

    def resume(self) -> None:
        """Takes and opens microbatches again."""
        self._peer.ledger.accept_new()
        if self.origin is not None:
            self.origin.resume()

    async def finish_own(self, within_s: float) -> None:
        """Opens no more microbatches and waits for those in flight; drops those that are not back in `within_s`."""
        if self.origin is not None:
            await self.origin.leave(within_s)

    async def write_checkpoints(self, within_s: float) -> None:
        """Writes a checkpoint of every stage. One that takes longer than `within_s` is given up, which is reported."""
        self.replicas.leave()
        try:
            async with asyncio.timeout(within_s):
                await self.keeper.write_checkpoints()
        except (TimeoutError, AgoraError) as error:
            reason = str(error) or f"not written in {within_s:.0f} s"
            self._peer.startup.report(events.TaskFailed("checkpoint", reason))


def stage_layouts(manifest: Manifest) -> list[Layout]:
    """Returns the layout of every stage of the run, held or not. Computed from the manifest; no stage is built."""
    family, stages = family_of(manifest.model), range(manifest.stage_count)
    return [lay_out(family.parameter_shapes(manifest.layers_of(stage)).items()) for stage in stages]


def step_barrier(manifest: Manifest, compute: Compute) -> StepBarrier | None:
    """Returns where microbatches wait for their step; None in an asynchronous run, in which none ever waits."""
    return StepBarrier(compute.span, compute.step_of) if manifest.schedule.kind == "synchronous" else None
