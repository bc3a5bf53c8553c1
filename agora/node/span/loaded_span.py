"""The span: what lives as long as this daemon holds the same stages."""

from __future__ import annotations

import asyncio
import math

from agora_protocol.errors import AgoraError, NotMyStage
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import Contribute, GossipEpochs, GossipSteps, Process, Recall

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.fair_share import Client
from agora.core.stepping import ShareClosed
from agora.cost.run_cost import usual_in_flight
from agora.net.rpc.incoming import IncomingCall
from agora.node.control.node_report import SpanReport
from agora.node.peer.local_peer import LocalPeer
from agora.node.process.background import BackgroundTasks
from agora.node.span.training_data import Epochs, OriginData
from agora.observe import events
from agora.pipeline import flow_control
from agora.pipeline.barrier import MeanBarrier, StepBarrier
from agora.pipeline.flow_control import SendInputs, StepState
from agora.pipeline.hop import Hop
from agora.pipeline.interfaces import MicrobatchSource
from agora.pipeline.origin import Origin, OriginConfig
from agora.replica.group import ReplicaGroup
from agora.replica.replica_progress import live_replicas
from agora.state.collector import StageCollector
from agora.state.keeper import StateKeeper
from agora.train.device_worker import DeviceWorker
from agora.train.stage import stage_layout
from agora.tuning.epochs.gossip import EpochGossip

# At least this part of a microbatch's tokens, 1 in 64, is assumed to be supervised, however few were measured.
MAX_UNSUPERVISED = 64


class LoadedSpan:
    """The stages that this daemon holds, with all that works on them: hop, origin, replicas, keeper, collector.

    load_span makes it, starts its `tasks`, and closes them when the stages are given up. loaded_at: when it was made,
    on the loop's clock. origin: sends this peer's microbatches, None without stage 0. epoch_gossip: None unless the run
    trains on samples and stage 0 is held.
    """

    def __init__(
        self, local_peer: LocalPeer, compute: DeviceWorker, keeper: StateKeeper, data: OriginData | None
    ) -> None:
        """data: the data that the origin draws from; None without stage 0: then there is no origin."""
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
            report_violation=local_peer.offences.report_violation,
        )
        self._is_synchronous = manifest.schedule.kind == "synchronous"
        self._barrier: StepBarrier | MeanBarrier = MeanBarrier(compute.span, self.replicas.is_awaiting_mean)
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
        self._epochs = data if isinstance(data, Epochs) else None
        self.epoch_gossip = None if self._epochs is None else self._make_epoch_gossip(self._epochs)
        source: MicrobatchSource | None = data.batches if isinstance(data, Epochs) else data
        self.origin = None if source is None else self._make_origin(source)
        self.collector = StageCollector(
            manifest,
            startup.home.runs / signed.run_id / "collected",
            layouts=lambda: [stage_layout(manifest, stage) for stage in range(manifest.stage_count)],
            stages=compute,
            serving=local_peer.steps_of,
            caller=local_peer.network,
            report_violation=local_peer.offences.report_violation,
        )
        self.tasks = BackgroundTasks()
        self.loaded_at = loop_time()

    def _make_epoch_gossip(self, epochs: Epochs) -> EpochGossip:
        local_peer = self._local_peer
        epochs.other_origins.peers = self._other_origins
        return EpochGossip(
            epochs.batches.shares,
            local_peer.network,
            self._other_origins,
            report=local_peer.startup.report_event,
            report_violation=local_peer.offences.report_violation,
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
        local_peer, manifest = self._local_peer, self._local_peer.manifest
        me = local_peer.startup.me
        view = local_peer.membership.view
        path_s = self.hop.path_s()
        needed = manifest.schedule.least_replicas
        ready = needed == 1 or all(len(view.replicas(stage)) >= needed for stage in range(manifest.stage_count))
        origins = [seen.peer for seen in view.replicas(0)]
        rank, count = (origins.index(me), len(origins)) if me in origins else (0, 1)
        tokens_each = max(self._tokens_per_microbatch(), 1.0)
        per_step = math.ceil(manifest.optimizer.target_tokens / tokens_each)
        if not self._is_synchronous:
            if (lacking_tokens := self.replicas.tokens_until_origins_wait(0)) is not None:
                before_mean = math.ceil(lacking_tokens / tokens_each)
                return SendInputs(ready, None, path_s, before_mean=before_mean)
            allowed, predicts = manifest.schedule.staleness, self.compute.predicts_weights
            staleness = flow_control.staleness_ceiling(allowed, per_step, rank, count, predicts=predicts)
            return SendInputs(ready, None, path_s, staleness)
        lacking = math.ceil(self.replicas.missing_tokens(0) / tokens_each)
        return SendInputs(ready, StepState(self.compute.step_of(0), per_step, lacking, rank, count), path_s)

    def _tokens_per_microbatch(self) -> float:
        manifest = self._local_peer.manifest
        measured = self.origin.microbatch_tokens.value if self.origin and manifest.has_marks else None
        all_tokens = manifest.tokens_per_microbatch
        return all_tokens if measured is None else max(measured, all_tokens / MAX_UNSUPERVISED)

    @property
    def span(self) -> Span:
        return self.compute.span

    @property
    def in_progress(self) -> int:
        return self._local_peer.ledger.taken + (self.origin.open_count if self.origin else 0)

    def take_span_report(self) -> SpanReport:
        """Returns a snapshot of the span: steps, what each stage waits for, load, queue, and the origin's loss."""
        return SpanReport(
            span=self.span,
            stages=self.compute.progress(),
            waits_for={stage: self.replicas.reason(stage) for stage in self.span.stages},
            gradient_wires={stage: self.replicas.gradient_wire(stage) for stage in self.span.stages},
            agreement={stage: self.replicas.agreement(stage) for stage in self.span.stages},
            behind={stage: self._steps_behind(stage) for stage in self.span.stages},
            busy_fraction=self.compute.busy_fraction(),
            in_progress=self.in_progress,
            queue=self.hop.queue,
            path_s=self.hop.path_s(),
            is_origin=self.origin is not None,
            loss=self.origin.loss.value if self.origin else None,
            metrics=self.origin.mean_metrics if self.origin else {},
            credit=self.origin.credit.reason if self.origin else "",
            shortage=self.origin.credit.shortage if self.origin else "",
            correction=self.origin.credit.correction if self.origin else "",
        )

    def _steps_behind(self, stage: int) -> int:
        step = self.compute.step_of(stage)
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
                consumer = Client(call.prefix, call.peer)
                return await self.hop.process(request, call.tensors, call.deadline, call.progress, consumer)
            case GossipSteps() as request:
                return Reply(self.replicas.gossip.answer(call.peer, request))
            case GossipEpochs() as request:
                if self.epoch_gossip is None:
                    raise NotMyStage("this peer draws no samples; ask those that hold stage 0")
                return Reply(self.epoch_gossip.answer(call.peer, request))
            case Contribute() as request:
                return Reply(*await self.replicas.answer_contribution(call.peer, request, call.tensors, call.deadline))
            case Recall() as request:
                return Reply(*self.replicas.reducer.answer_recall(request))
            case other:
                raise AssertionError(f"{type(other).__name__} is not among WORK_REQUESTS")

    def _on_trained(self) -> None:
        for stage in self.span.stages:
            self.replicas.on_microbatch_left(stage, self.hop.training_count)

    async def follow_steps(self) -> None:
        """Notifies replicas, keeper, barrier and origin of each step that the device thread takes, until cancelled.

        At each step of stage 0 also records the epochs. Of a closed share of a step it notifies the replicas only.
        """
        async for event in self.compute.step_events():
            if isinstance(event, ShareClosed):
                self.replicas.on_share_closed(event.stage)
                continue
            self.replicas.on_stepped(event.stage, event.step, event.own_tokens)
            if event.stage == 0:
                self._record_epochs(event.step)
            self.keeper.on_stepped(event.stage, event.step)
            for waiting in (self._barrier, self.origin):
                if waiting is not None:
                    waiting.notify_step()

    def _record_epochs(self, step: int) -> None:
        if self._epochs is None:
            return
        self._epochs.record.remember(step, self._epochs.batches.shares.snapshot())
        counts = self._epochs.batches.counts()
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
                    self._record_epochs(self.compute.step_of(0))
                await self.keeper.write_checkpoints()
        except (TimeoutError, AgoraError) as error:
            reason = str(error) or f"not written in {within_s:.0f} s"
            self._local_peer.startup.report_event(events.TaskFailed("checkpoint", reason))
