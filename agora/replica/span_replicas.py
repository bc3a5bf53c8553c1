"""All stages of this peer among their replicas: starts and ends them, and passes on what other replicas ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from agora_protocol.errors import NotMyStage
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Contribute, GossipSteps, Recall
from agora_protocol.tensors import WireTensor

from agora.core.calls import PeerCaller, Reply
from agora.core.live_manifest import LiveManifest
from agora.observe import events
from agora.replica.background import start_reported
from agora.replica.gossip import SwarmQueries
from agora.replica.stage_replicas import FetchState, StageReplicas
from agora.replica.stage_view import leading_step
from agora.replica.step_worker import StepWorker
from agora.swarm.peer_score import ReportViolation

# Seconds between two measurements, in a synchronous run, of how far the other stages are.
LEADING_STEP_INTERVAL_S: Final = 5.0


class SpanReplicas:
    """All of this peer's stages among their replicas. The `on_...` methods of `stages` are called on the event loop."""

    def __init__(
        self,
        signed: SignedManifest,
        identity: Identity,
        *,
        worker: StepWorker,
        peer_caller: PeerCaller,
        swarm: SwarmQueries,
        fetch_state: FetchState,
        report: events.Report,
        report_violation: ReportViolation,
        live: LiveManifest | None = None,
    ) -> None:
        """live: the manifest in force at each step; None: the signed one at every step."""
        self._worker = worker
        self._swarm = swarm
        self._report = report
        self._synchronous = signed.manifest.schedule.kind == "synchronous"
        self.stages: Mapping[int, StageReplicas] = {
            stage: StageReplicas(
                stage,
                signed,
                identity,
                worker=worker,
                peer_caller=peer_caller,
                swarm=swarm,
                fetch_state=fetch_state,
                replicated_numel=self._replicated_numel,
                report=report,
                report_violation=report_violation,
                live=live,
            )
            for stage in worker.span.stages
        }

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled."""
        tasks = [asyncio.create_task(stage.run()) for stage in self.stages.values()]
        tasks.append(start_reported(self._watch_other_stages(), self._report, "steps of other stages"))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self, within_s: float) -> None:
        """Starts no more steps or rounds; waits up to `within_s` seconds for steps and fetches, then cancels them."""
        # Running fragment syncs go on: a state that is exported afterwards may lack their means.
        if running := [task for stage in self.stages.values() if (task := stage.leave()) is not None]:
            _, unfinished = await asyncio.wait(running, timeout=within_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def answer(
        self, peer: PeerId, message: GossipSteps | Contribute | Recall, tensors: Sequence[WireTensor], deadline: float
    ) -> Reply:
        """Answers what another replica of a stage asks; raises what AllReduce.contribute raises.

        Raises NotMyStage for a stage that this peer does not hold.
        """
        if (stage := self.stages.get(message.stage)) is None:
            span = self._worker.span
            raise NotMyStage(f"this peer holds stages {span}, not {message.stage}; read the directory again")
        match message:
            case GossipSteps():
                return Reply(stage.gossip.answer(peer, message))
            case Contribute():
                return await stage.all_reduce.answer_contribution(peer, message, tensors, deadline)
            case Recall():
                return stage.all_reduce.kept_means.answer_recall(message)

    def _replicated_numel(self) -> int:
        replicated = [number for number, stage in self.stages.items() if len(stage.round_contexts.members()) > 1]
        return sum(self._worker.layout(number).numel for number in replicated)

    async def _watch_other_stages(self) -> None:
        # Without this, stages that begin from checkpoints of different steps would wait for one another forever.
        while self._synchronous:
            await asyncio.sleep(LEADING_STEP_INTERVAL_S)
            # All stages step together, so the bound is the highest step that is plausible in any stage here.
            highest = max(stage.highest_plausible_step() for stage in self.stages.values())
            leading = leading_step(
                [[step for step in steps if step <= highest] for steps in self._swarm.steps_of_run()]
            )
            for stage in self.stages.values():
                stage.on_leading_step(leading)
