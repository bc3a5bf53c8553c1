"""A swarm in one process, without a network: a tiny language model in two stages, each of them at two peers.

    python docs/examples/one_process.py

Read it from top to bottom. What computes, routes and averages is what `agora-node` runs; the network, the list of peers
and the data are replaced, by a few lines each, and no step has to wait for another.

    peers a and b hold stage 0                          peers c and d hold stage 1
    draw text, forward     --- boundary, 8 bits --->    forward, loss, backward
    backward               <--- its gradient -------    answer

Each peer sums its gradients. Once the replicas of a stage have seen the tokens of a step together, they all-reduce
these sums, and all take the same optimizer step. The text is this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import torch
from agora_protocol.errors import Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.messages import CallProgress, Contribute, GossipSteps, Message, Process, Recall
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.calls import OnProgress, Reply
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.span_work import DrawnMicrobatch
from agora.core.step_instructions import ShareClosed
from agora.core.tasks import ChangeNotifier
from agora.observe.events import Event, StepTaken
from agora.pipeline.flow_control import SendInputs
from agora.pipeline.hop import Hop
from agora.pipeline.origin import Origin, OriginConfig
from agora.pipeline.process_call import ProcessCall, WireRules
from agora.pipeline.router import Router
from agora.pipeline.work_ledger import WorkLedger
from agora.replica.gossip import SwarmQueries
from agora.replica.span_replicas import SpanReplicas
from agora.swarm.peer_score import PeerScore
from agora.swarm.view import PeerView, View
from agora.train.device import DeviceOptions
from agora.train.device_worker import DeviceWorker

RUN = Manifest.from_values(
    {
        "name": "one-process",
        "model": {"width": 64, "layers": 2, "heads": 4, "key_value_heads": 2, "feed_forward": 128, "context": 32},
        "stages": {"count": 2},
        "boundary": {"codec": "int8"},
        "schedule": {"microbatch": 8},
        "optimizer": {"target_tokens": 8 * 8 * 32, "learning_rate": 0.01, "warmup_steps": 2, "total_steps": 1000},
    },
    "one_process.py",
)
SPANS = (Span(0, 0), Span(0, 0), Span(1, 1), Span(1, 1))
SIGNED = SignedManifest.sign(RUN, Identity.generate())


class OwnText:
    """Draws microbatches: rows of this file's bytes, from random places. A run has its corpus here."""

    def __init__(self, seed: int) -> None:
        self._text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
        self._random = np.random.default_rng(seed)

    def draw(self) -> DrawnMicrobatch:
        rows, length = RUN.schedule.microbatch, RUN.model.context + 1
        starts = self._random.integers(0, len(self._text) - length, rows)
        return DrawnMicrobatch(encode_tokens(np.stack([self._text[i : i + length] for i in starts])), number=0)

    def mark_completed(self, number: int) -> None: ...

    def release(self, number: int) -> None: ...

    def heldout_microbatches(self, count: int) -> Iterator[WireTensor]:
        return iter(())


class Swarm:
    """All peers by id. It stands in for the directory, and answers what a peer's replicas ask about the others."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, Peer] = {}
        self.stepped = ChangeNotifier()  # wakes who waits for a step of any peer
        self.losses: list[float] = []  # of each step of a replica of the last stage, in nats per byte

    def report(self, event: Event) -> None:
        """Takes every event of every peer; the daemon has a log and a journal for them."""
        if isinstance(event, StepTaken) and event.loss is not None:
            self.losses.append(event.loss)
            print(f"step {event.step:3}   loss {event.loss:.3f}   {event.step_tokens} tokens of all replicas")

    def view(self) -> View:
        return View({id: PeerView(id, peer.device.span, 1, state="serving") for id, peer in self.peers.items()})

    def view_for_replicas(self) -> SwarmQueries:
        return SwarmQueries(
            self.replicas_in_view,
            bandwidths=lambda stage: {},  # unknown: shards are divided equally
            has_connections=lambda: True,
            uplink_bytes_per_s=lambda: None,
            steps_of_run=self.steps_of_run,
        )

    def replicas_in_view(self, stage: int) -> list[PeerId]:
        return [id for id, peer in self.peers.items() if stage in peer.device.span]

    def steps_of_run(self) -> Collection[Collection[int]]:
        stages: list[list[int]] = [[] for _ in range(RUN.stage_count)]
        for peer in self.peers.values():
            for stage in peer.device.span.stages:
                stages[stage].append(peer.device.step_of(stage))
        return stages

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        raise Unavailable(stage, ["nobody joins late here, so nobody gives a state"])


class MemoryCaller:
    """Calls other peers of this process: what a network does, but for its failures."""

    def __init__(self, swarm: Swarm, me: PeerId) -> None:
        self._swarm = swarm
        self._me = me

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        async with asyncio.timeout_at(deadline):
            callee = self._swarm.peers[peer]
            return await callee.answer(self._me, request, list(tensors), deadline, on_progress or _ignore)


def _ignore(progress: CallProgress) -> None: ...


class Peer:
    """One peer: a device that computes its stages, a hop that answers for them, a seat among each stage's replicas."""

    def __init__(self, swarm: Swarm, identity: Identity, device: DeviceWorker) -> None:
        me = identity.peer
        self.device = device
        self._swarm = swarm
        caller = MemoryCaller(swarm, me)
        score = PeerScore(swarm.report, loop_time)
        router = Router(
            caller,
            swarm.view,
            me=me,
            stage_count=RUN.stage_count,
            wire_rules=WireRules.of_run(LiveManifest(RUN)),
            report=swarm.report,
            peer_score=score,
        )
        ledger = WorkLedger(me, max_slots=32, report=swarm.report)
        self.hop = Hop(device, router, ledger, report=swarm.report, on_trained=self._on_trained)
        self.replicas = SpanReplicas(
            SIGNED,
            identity,
            worker=device,
            peer_caller=caller,
            swarm=swarm.view_for_replicas(),
            fetch_state=swarm.fetch,
            report=swarm.report,
            report_violation=score.report_violation,
        )
        self.origin = Origin(
            OriginConfig(me, RUN.stage_count, ceiling=8),
            self.hop,
            OwnText(seed=len(swarm.peers)),
            swarm.report,
            lambda: SendInputs(latency_s=self.hop.latency_s()),
        )

    async def answer(
        self, caller: PeerId, request: Message, tensors: list[WireTensor], deadline: float, on_progress: OnProgress
    ) -> Reply:
        """Everything that another peer may ask of this one."""
        match request:
            case Process():  # a microbatch: one hop of the pipeline
                return await self.hop.process(ProcessCall(request, tensors, deadline, on_progress))
            # How far a replica is; its shard of a gradient, for which it gets the mean; a mean that it missed.
            case GossipSteps() | Contribute() | Recall():
                return await self.replicas.answer(caller, request, tensors, deadline)
        raise AssertionError(type(request).__name__)

    def _on_trained(self) -> None:
        for stage in self.replicas.stages.values():
            stage.on_microbatch_finished(self.hop.training_count)

    async def follow_steps(self) -> None:
        """Tells the replicas what the device thread has done: it closed its share of a step, or took the step."""
        async for event in self.device.step_events():
            if isinstance(event, ShareClosed):
                self.replicas.stages[event.stage].on_share_closed()
            else:
                self.replicas.stages[event.stage].on_stepped(event.step, event.own_tokens)
                self._swarm.stepped.notify()


async def main(steps: int = 12) -> list[float]:
    """Trains until every replica of every stage has taken `steps` optimizer steps; returns the losses."""
    swarm = Swarm()
    async with AsyncExitStack() as closing, asyncio.TaskGroup() as tasks:
        for span in SPANS:
            device = await DeviceWorker.create(RUN, span, report=swarm.report, device=DeviceOptions("cpu"))
            closing.push_async_callback(device.close)
            identity = Identity.generate()
            swarm.peers[identity.peer] = Peer(swarm, identity, device)
        running = []
        for peer in swarm.peers.values():
            running += [tasks.create_task(peer.replicas.run()), tasks.create_task(peer.follow_steps())]
            if 0 in peer.device.span:
                running.append(tasks.create_task(peer.origin.run()))
        while min(map(min, swarm.steps_of_run())) < steps:
            await swarm.stepped.wait()
        for peer in swarm.peers.values():
            await peer.origin.leave(within_s=5.0)
        for task in running:
            task.cancel()
    return swarm.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
