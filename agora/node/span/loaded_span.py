"""The stages that this daemon holds now, and all that works on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from agora_protocol.errors import AgoraError, NotMyStage
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import Contribute, GossipEpochs, GossipSteps, Process, Recall

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.moving_average import WindowedRate
from agora.core.step_instructions import ShareClosed
from agora.core.tasks import BackgroundTasks
from agora.cost.manifest_cost import default_in_flight, run_cost
from agora.data.sampling import CorpusMicrobatches
from agora.net.rpc.connection import IncomingCall
from agora.node.control.node_report import SpanReport, use_of_device
from agora.node.peer.local_peer import LocalPeer
from agora.node.peer.requests import process_call_of
from agora.node.span.send_inputs import SendInputsGatherer
from agora.node.span.training_data import OriginData, Samples
from agora.observe import events
from agora.pipeline.barriers import MeanBarrier, StepBarrier
from agora.pipeline.hop import Hop
from agora.pipeline.origin import MicrobatchSource, Origin, OriginConfig
from agora.replica.gossip import SwarmQueries
from agora.replica.span_replicas import SpanReplicas
from agora.state.collector import StageCollector
from agora.state.keeper import StateKeeper
from agora.swarm.run_end import RunEnd
from agora.train.device_worker import DeviceWorker
from agora.train.gpu_support import unused_gpus_remark
from agora.train.stage import stage_layout
from agora.tuning.epochs.batches import EpochFile, EpochMicrobatches
from agora.tuning.epochs.gossip import EpochGossip


class LoadedSpan:
    """The stages that this daemon holds, with all that works on them: hop, origin, replicas, keeper, collector.

    load_span makes it, starts its `tasks`, and closes them when the stages are given up. loaded_at: when it was made,
    on the loop's clock. run_end: whether the run is over. origin: sends this peer's microbatches, None without stage 0.
    epoch_gossip: None unless the run trains on samples and stage 0 is held.
    """

    def __init__(
        self, local_peer: LocalPeer, worker: DeviceWorker, keeper: StateKeeper, data: OriginData | None
    ) -> None:
        """data: the data that the origin draws from; None without stage 0: then there is no origin."""
        context, signed, manifest = local_peer.context, local_peer.signed, local_peer.manifest
        self._local_peer = local_peer
        self.worker = worker
        self.keeper = keeper
        self.run_end = RunEnd(local_peer.live, goes_on=context.settings.at_end == "go-on")
        self.replicas = SpanReplicas(
            signed,
            context.identity,
            worker=worker,
            peer_caller=local_peer.network,
            swarm=SwarmQueries(
                replicas_in_view=local_peer.replicas_in_view,
                bandwidths=local_peer.bandwidths,
                has_connections=local_peer.has_connections,
                uplink_bytes_per_s=local_peer.uplink_bytes_per_s,
                steps_of_run=local_peer.steps_of_run,
                networks=local_peer.networks,
                stops_at=lambda: self.run_end.stops_at(local_peer.view, self.own_steps),
            ),
            fetch_state=keeper.fetch,
            report=context.report_event,
            report_violation=local_peer.peer_score.report_violation,
            live=local_peer.live,
        )
        cost = run_cost(manifest)
        self._stage_flops = {stage: cost.flops(Span(stage, stage)) for stage in worker.span.stages}
        self._flops = WindowedRate()
        self._device_remark = unused_gpus_remark() if context.settings.device == "auto" else ""
        if self._device_remark:
            context.report_event(events.OwnerTold(self._device_remark))
        self._is_synchronous = manifest.schedule.kind == "synchronous"
        self._barrier: StepBarrier | MeanBarrier
        if self._is_synchronous:
            self._barrier = StepBarrier(worker.span, worker.step_of)
        else:
            self._barrier = MeanBarrier(worker.span, self._must_hold_next)
        self.hop = Hop(
            worker,
            local_peer.router,
            local_peer.ledger,
            report=context.report_event,
            barrier=self._barrier,
            on_trained=self._on_trained,
        )
        self._load_at_start = worker.device_load()
        self._epoch_file: EpochFile | None = None
        self._epochs: EpochMicrobatches | None = None
        self.epoch_gossip: EpochGossip | None = None
        if isinstance(data, Samples):
            self._epoch_file = data.epoch_file
            self._epochs = self._resume_epochs(data)
            self.epoch_gossip = self._make_epoch_gossip(self._epochs)
        source: MicrobatchSource | None = self._epochs if isinstance(data, Samples) else data
        if isinstance(data, CorpusMicrobatches):
            data.weights = lambda: local_peer.live.at(worker.progress_of(0).open_step).data.weights
        self.origin = None if source is None else self._make_origin(source)
        self.collector = StageCollector(
            local_peer.live,
            context.home.runs / signed.run_id / "collected",
            layouts=lambda: [stage_layout(manifest, stage) for stage in range(manifest.stage_count)],
            stages=worker,
            serving=local_peer.steps_of,
            peer_caller=local_peer.network,
            report_violation=local_peer.peer_score.report_violation,
        )
        self.tasks = BackgroundTasks(local_peer.tasks.on_end)
        self.loaded_at = loop_time()

    def _resume_epochs(self, samples: Samples) -> EpochMicrobatches:
        me, manifest = self._local_peer.context.me, self._local_peer.manifest
        session = int.from_bytes(os.urandom(8), "big") >> 1
        batches = EpochMicrobatches(
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
            try:
                batches.assigner.restore(state)
            except ValueError as error:
                text = f"the epochs of the samples begin again: the state kept of them cannot be read ({error})"
                self._local_peer.context.report_event(events.OwnerTold(text))
        return batches

    def _make_epoch_gossip(self, epochs: EpochMicrobatches) -> EpochGossip:
        local_peer = self._local_peer
        return EpochGossip(
            epochs.assigner,
            local_peer.network,
            self._other_origins,
            report=local_peer.context.report_event,
            report_violation=local_peer.peer_score.report_violation,
        )

    def _other_origins(self) -> set[PeerId]:
        gossip = self.replicas.stages[0].gossip
        known, live = gossip.known_progress(), gossip.live_progress()
        return {peer for peer in gossip.others_in_view() if peer in live or peer not in known}

    def _make_origin(self, source: MicrobatchSource) -> Origin:
        context, manifest = self._local_peer.context, self._local_peer.manifest
        config = OriginConfig(
            me=context.me,
            stage_count=manifest.stage_count,
            ceiling=self._local_peer.slots if not self._is_synchronous else default_in_flight(manifest),
            max_in_flight=manifest.schedule.max_in_flight,
            objective=manifest.objective.kind,
        )
        inputs = SendInputsGatherer(
            self._local_peer,
            self.worker,
            self.hop,
            self.replicas.stages[0],
            end_of_run=lambda: self.run_end.of_origin(self._local_peer.view, self.own_steps),
            measured_tokens=lambda: self.origin.microbatch_tokens.value if self.origin else None,
        )
        return Origin(
            config,
            self.hop,
            source,
            context.report_event,
            inputs.gather,
            on_awaits_mean=lambda awaits: self.hop.device_time.set_awaits_mean(loop_time(), awaits),
            codec=self._present_codec,
        )

    def _present_codec(self) -> str:
        live = self._local_peer.live
        name = live.at(self.worker.progress_of(0).open_step).boundary.codec
        return "" if name == live.core.boundary.codec else name

    def _must_hold_next(self, stage: int) -> bool:
        work = self.replicas.stages[stage].work_before_mean()
        return work is not None and work.must_hold_next(self.hop.training_count)

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
        now, load = loop_time(), self.worker.device_load()
        device_time = self.hop.device_time.total(now, load.busy_s - self._load_at_start.busy_s, load.queued_s)
        return SpanReport(
            span=self.span,
            stages=self.worker.progress(),
            waits_for={number: stage.reason for number, stage in self.replicas.stages.items()},
            gradient_wires={number: stage.sync_choice.compression for number, stage in self.replicas.stages.items()},
            agreement={number: stage.agreement() for number, stage in self.replicas.stages.items()},
            behind={stage: self._steps_behind(stage) for stage in self.span.stages},
            busy_fraction=self.worker.busy_fraction(),
            in_progress=self.in_progress,
            queue=self.hop.queue,
            latency_s=self.hop.latency_s(),
            is_origin=self.origin is not None,
            loss=self.origin.loss.value if self.origin else None,
            metrics=self.origin.mean_metrics if self.origin else {},
            send_window=self.origin.window.reason if self.origin else "",
            window_limit_note=self.origin.window.shortage if self.origin else "",
            staleness_excess_note=self.origin.window.correction if self.origin else "",
            device_remark=self._device_remark,
            compile_problem=self.worker.compile_problem,
            device=self._use_of_device(),
            device_time=device_time,
            recent_device_time=self.hop.device_time.recent(now, device_time),
        )

    def _use_of_device(self) -> events.DeviceUsed:
        counted = self._local_peer.context.reporter.snapshot().counted
        done = sum(flops * counted[stage] for stage, flops in self._stage_flops.items())
        rate = self._flops.update(loop_time(), done)
        worker = self.worker
        return use_of_device(worker.read_device(), rate if done else None, worker.idle_fraction(), worker.precision)

    def _steps_behind(self, stage: int) -> int:
        step = self.worker.step_of(stage)
        live = self.replicas.stages[stage].gossip.live_progress()
        return max([0, *(last.direct.step - step for last in live.values())])

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a request of WORK_REQUESTS by hop, epoch gossip or replicas; asserts that it is one.

        Raises NotMyStage for a stage that is not held, and for GossipEpochs if this peer draws no samples; of the other
        AgoraErrors of an answer, Busy asks the requester to come again later, ProtocolError says that the request is
        wrong.
        """
        match call.message:
            case Process() as request:
                return await self.hop.process(process_call_of(call, request))
            case GossipSteps() | Contribute() | Recall() as request:
                return await self.replicas.answer(call.peer, request, call.tensors, call.deadline)
            case GossipEpochs() as request:
                if self.epoch_gossip is None:
                    raise NotMyStage("this peer draws no samples; ask those that hold stage 0")
                return Reply(self.epoch_gossip.answer(call.peer, request))
            case other:
                raise AssertionError(f"{type(other).__name__} is not among WORK_REQUESTS")

    def _on_trained(self) -> None:
        for stage in self.replicas.stages.values():
            stage.on_microbatch_finished(self.hop.training_count)

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
        report = self._local_peer.context.report_event
        report(events.SamplesCounted(step, counts.epoch, counts.seen, counts.repeated, counts.missed))

    async def end_steps_and_write_checkpoints(self, within_s: float) -> None:
        """Ends the replicas' steps, records the epochs, and writes a checkpoint of each stage.

        Running fragment syncs go on; a checkpoint may lack their means.
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
            self._local_peer.context.report_event(events.TaskFailed("checkpoint", reason))
