"""Gathers what an origin must know before it opens a microbatch: from the view, stage 0 and the hop of this peer."""

from __future__ import annotations

import math
from collections.abc import Callable

from agora.node.peer.local_peer import LocalPeer
from agora.pipeline import flow_control
from agora.pipeline.flow_control import SendInputs, StepState
from agora.pipeline.hop import Hop
from agora.replica.stage_replicas import StageReplicas
from agora.swarm.run_end import OriginEnd
from agora.train.device_worker import DeviceWorker

# Assume that at least one token in this many of a microbatch is supervised, however few were measured.
MAX_UNSUPERVISED = 64


class SendInputsGatherer:
    """Gathers the SendInputs of this peer's origin, each time that it decides whether to open a microbatch."""

    def __init__(
        self,
        local_peer: LocalPeer,
        worker: DeviceWorker,
        hop: Hop,
        first_stage: StageReplicas,
        *,
        end_of_run: Callable[[], OriginEnd],
        measured_tokens: Callable[[], float | None],
    ) -> None:
        """first_stage: stage 0 among its replicas. measured_tokens: the mean tokens of a microbatch that count."""
        self._local_peer = local_peer
        self._worker = worker
        self._hop = hop
        self._first_stage = first_stage
        self._end_of_run = end_of_run
        self._measured_tokens = measured_tokens
        self._is_synchronous = local_peer.manifest.schedule.kind == "synchronous"

    def gather(self) -> SendInputs:
        manifest, view = self._local_peer.manifest, self._local_peer.view
        needed = manifest.schedule.least_replicas
        has_enough = needed == 1 or all(len(view.replicas(stage)) >= needed for stage in range(manifest.stage_count))
        if end := self._end_of_run():
            return SendInputs(has_enough, latency_s=self._hop.latency_s(), end=end)
        if self._is_synchronous:
            return self._gather_synchronous(has_enough)
        return self._gather_asynchronous(has_enough)

    def _gather_synchronous(self, has_enough: bool) -> SendInputs:
        lacking = math.ceil(self._first_stage.missing_tokens() / self._tokens_per_microbatch())
        position, count = self._position_among_origins()
        step_state = StepState(self._worker.step_of(0), self._microbatches_per_step(), lacking, position, count)
        return SendInputs(has_enough, step_state, self._hop.latency_s())

    def _gather_asynchronous(self, has_enough: bool) -> SendInputs:
        latency_s = self._hop.latency_s()
        if (work := self._first_stage.work_before_mean()) is not None:
            max_open_before_mean = math.ceil(work.tokens_in_flight / self._tokens_per_microbatch())
            return SendInputs(has_enough, None, latency_s, max_open_before_mean=max_open_before_mean)
        position, count = self._position_among_origins()
        staleness = flow_control.staleness_ceiling(
            self._local_peer.live.at(self._worker.progress_of(0).open_step).schedule.staleness,
            self._microbatches_per_step(),
            position,
            count,
            predicts=self._worker.predicts_weights,
        )
        return SendInputs(has_enough, None, latency_s, staleness)

    def _position_among_origins(self) -> tuple[int, int]:
        me = self._local_peer.context.me
        origins = [seen.peer for seen in self._local_peer.view.replicas(0)]
        return (origins.index(me), len(origins)) if me in origins else (0, 1)

    def _microbatches_per_step(self) -> int:
        target_tokens = self._local_peer.live.target_tokens(self._worker.progress_of(0).open_step)
        return math.ceil(target_tokens / self._tokens_per_microbatch())

    def _tokens_per_microbatch(self) -> float:
        manifest = self._local_peer.manifest
        all_tokens = manifest.tokens_per_microbatch
        measured = self._measured_tokens() if manifest.has_marks else None
        return max(1.0, all_tokens if measured is None else max(measured, all_tokens / MAX_UNSUPERVISED))
