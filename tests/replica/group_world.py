"""Replica groups in one process and in virtual time: fake stages of one vector, calls that arrive or break at once."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from agora_protocol.errors import PeerFailed, Refused, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.messages import Contribute, GossipSteps, Message, Recall
from agora_protocol.records import StageAccount

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.step_instructions import StepInstructions
from agora.core.step_schedule import SyncChangeRule, first_sync_schedule
from agora.observe.events import Event
from agora.replica.gossip import SwarmQueries
from agora.replica.span_replicas import SpanReplicas
from agora.state.layout import Layout, lay_out
from agora.swarm.peer_score import PeerScore, Violation
from agora.train.diloco import OuterOptimizer
from agora.train.gradients import GradientShare
from agora.train.history_hash import INITIAL_HASH, extend_history, hash_of
from agora.train.stage import StageProgress
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults
from tests.replica.world import IDENTITIES, identities
from tests.train.support import small_manifest

NUMEL = 4 * SLICE_BLOCK
LAYOUT = lay_out([("weights", (4, SLICE_BLOCK))])
TICK_S = 0.05


class FakeStage:
    """Stage 0: counts tokens at `rate` per second, and its own gradient is its peer's alone."""

    span = Span(0, 0)
    predicts_weights = True

    def __init__(self, number: int, rate: float, manifest: Manifest) -> None:
        self.gradient = number * torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
        self.rate = rate
        self.manifest = manifest
        self.live = LiveManifest(manifest)
        self.sync_schedule = first_sync_schedule(manifest)
        self.outer = OuterOptimizer(LAYOUT, torch.zeros(NUMEL))
        self.weights = torch.zeros(NUMEL)
        self.step = self.tokens = self.counted = 0
        self.busy_s = 0.0
        """For how long its device is in the middle of a job, when it is to close its share."""
        self.history = {0: INITIAL_HASH}
        self.share: GradientShare | None = None
        self.instructions = StepInstructions(10**9)
        self.alone_at: list[int] = []
        self.closed: list[int] = []
        """The tokens of each part that was closed."""
        self.group: SpanReplicas | None = None

    def layout(self, stage: int) -> Layout:
        return LAYOUT

    def progress(self) -> list[StageProgress]:
        progress = StageProgress(
            stage=0,
            step=self.step,
            open_step=self.step + (self.share is not None),
            tokens_in_share=self.tokens,
            tokens_counted=self.counted,
            tokens_total=self.counted,
            staleness=(),
            tokens_predicted=0,
            refused_nonfinite=0,
            account=StageAccount(),
            sync_schedule=self.sync_schedule,
            history=self.history,
        )
        return [progress]

    @property
    def agreed_step(self) -> int:
        return max(self.history)

    def step_of(self, stage: int) -> int:
        return self.step

    def progress_of(self, stage: int) -> StageProgress:
        return self.progress()[0]

    def set_step_instructions(self, stage: int, instructions: StepInstructions) -> None:
        self.instructions = instructions

    async def count(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tokens += int(self.rate * TICK_S)
            self.counted += int(self.rate * TICK_S)
            self._take_due_step()
            if self.group is not None:
                self.group.stages[0].on_microbatch_finished(in_progress=0)

    def _take_due_step(self) -> None:
        """As train.Stage.step_or_close_share."""
        if self.share is not None or not 0 < self.tokens >= self.instructions.tokens_needed(self.step):
            return
        if self.instructions.run_ends_before(self.step):
            return
        if not self.instructions.uses_mean_gradient(self.step, self.sync_schedule):
            self._step_alone()
        elif self.instructions.must_close(self.step, self.sync_schedule):
            self._close()

    def _step_alone(self) -> None:
        self.alone_at.append(self.step)
        self.closed.append(self.tokens)
        tokens, self.tokens = self.tokens, 0
        self._step(self.gradient, tokens)

    def _close(self) -> None:
        self.share = GradientShare(self.step, self.tokens, self.gradient)
        self.closed.append(self.tokens)
        self.tokens = 0
        assert self.group is not None
        asyncio.get_running_loop().call_soon(self.group.stages[0].on_share_closed)

    def _step(self, gradient: torch.Tensor, own_tokens: int) -> None:
        self.weights = self.weights - 0.01 * gradient
        was_local = self.sync_schedule.is_inner(self.step)
        self.step, self.share = self.step + 1, None
        if not was_local:
            checksum, amended = hash_of(gradient.numpy().data), self.live.hash_at(self.step - 1)
            self.history = extend_history(self.history, self.step, checksum, amended=amended)
            self.outer = OuterOptimizer(LAYOUT, self.weights)
        elif not self.sync_schedule.is_inner(self.step):
            self.history = {self.step: hash_of(self.weights.numpy().data)}
        self._tell(own_tokens)

    def _tell(self, own: int) -> None:
        assert self.group is not None
        asyncio.get_running_loop().call_soon(self.group.stages[0].on_stepped, self.step, own)

    async def outer_gradient(self, stage: int, blocks: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.sync_schedule.is_inner(self.step):
            return None
        snapshot = self.weights.view(-1, SLICE_BLOCK)[blocks].flatten()
        return self.outer.outer_gradient(torch.from_numpy(blocks), snapshot), snapshot

    async def outer_step(
        self, stage: int, step: int, blocks: Any, snapshot: torch.Tensor, averaged: Any, wanted_fragments: int
    ) -> None:
        if step <= self.agreed_step or not self.sync_schedule.is_inner(self.step):
            return
        rows = torch.from_numpy(blocks)
        if averaged is None:
            self.outer.restart(rows, snapshot)
            checksum = hash_of(snapshot.numpy().data)
        else:
            averaging = self.live.at(step - 1).averaging
            pass_steps = averaging.every * self.sync_schedule.fragments_at(step - 1)
            mean, has_mean = averaged
            outer_step = self.outer.prepare(averaging, rows, snapshot, mean, has_mean, pass_steps)
            self.outer.take(outer_step)
            self.weights = self.weights.clone()
            self.weights.view(-1, SLICE_BLOCK)[rows] += outer_step.change.view(-1, SLICE_BLOCK)
            checksum = hash_of(mean.numpy().data, bytes([*has_mean, wanted_fragments]))
        amended = self.live.hash_at(step - 1)
        self.history = extend_history(self.history, step, checksum, last=self.agreed_step, amended=amended)
        rule = SyncChangeRule.from_manifest(self.live.at(step - 1))
        self.sync_schedule = rule.after_fragment_sync(self.sync_schedule, step, wanted_fragments)

    async def catch_up(self, stage: int, step: int) -> None:
        """As train.Stage."""
        if step > self.step and self.share is None:
            if self.tokens and (step == self.step + 1 or self.sync_schedule.is_inner(self.step)):
                self._step_alone()
            if step > self.step:
                if not self.sync_schedule.is_inner(step - 1):
                    self.history = extend_history({step - 1: self.history[self.agreed_step]}, step, 0)
                self.step, self.tokens = step, 0
                self._tell(0)
        self._take_due_step()

    async def close_share(self, stage: int) -> GradientShare:
        await asyncio.sleep(self.busy_s)
        if self.share is None:
            self._close()
        assert self.share is not None
        return self.share

    async def step_with_gradient(
        self, stage: int, step: int, mean_gradient: torch.Tensor, tokens: int, wanted_fragments: int
    ) -> None:
        assert self.step == step
        rule = SyncChangeRule.from_manifest(self.live.at(step))
        self.sync_schedule = rule.after_all_reduce(self.sync_schedule, step, wanted_fragments)
        self._step(mean_gradient, self.share.tokens if self.share else 0)


class GroupPeer:
    """One peer with a replica group; `sees` is its view, None for everyone; alone_in: stages without other replicas."""

    def __init__(self, world: GroupWorld, peer: PeerId, stage: FakeStage) -> None:
        self.world, self.peer, self.stage = world, peer, stage
        self.alone_in: set[int] = set()
        self.sees: list[PeerId] | None = None
        self.uplink_rate: float | None = None
        self.goes_on = False
        """Whether its owner goes on after the run's end."""
        self.events: list[Event] = []
        self.fetches: list[int] = []
        self.violations: list[tuple[PeerId, Violation, str]] = []
        self.score = PeerScore(lambda event: None, loop_time)
        self.group = SpanReplicas(
            world.signed,
            IDENTITIES[peer],
            worker=self.stage,
            peer_caller=world.network.join(peer, self._answer),
            swarm=SwarmQueries(
                self.replicas_in_view,
                bandwidths=lambda stage: self.world.bandwidths,
                has_connections=self.has_connections,
                uplink_bytes_per_s=self.uplink_bytes_per_s,
                steps_of_run=lambda: self.world.run_steps,
                stops_at=lambda: 0 if self.goes_on else self.world.stops_at,
            ),
            fetch_state=self.fetch,
            report=self.events.append,
            report_violation=self._record,
            live=stage.live,
        )
        self.stage.group = self.group
        self.tasks: list[asyncio.Task[None]] = []

    def _record(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "", /) -> None:
        self.violations.append((peer, violation, dedup_key))
        self.score.report_violation(peer, violation, text, dedup_key)

    def has_suspended(self, peer: PeerId) -> bool:
        return self.world.suspends and self.score.suspended_s(peer) > 0

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self.group.run()), asyncio.create_task(self.stage.count())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def replicas_in_view(self, stage: int) -> list[PeerId]:
        if stage in self.alone_in:
            return [self.peer]
        listed = self.world.peers if self.sees is None else self.sees
        return [peer for peer in listed if not self.has_suspended(peer)]

    def uplink_bytes_per_s(self) -> float | None:
        return self.uplink_rate

    def has_connections(self) -> bool:
        return self.world.has_connections

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> None:
        """As the state keeper does: from the first source that is reachable and far enough."""
        self.fetches.append(at_least)
        await asyncio.sleep(0.1)
        for source in sources:
            other = self.world.peers[source].stage
            if other.step >= at_least and not self.world.network.is_cut_between(self.peer, source):
                given = copy.copy(other)
                moments = {name: values.clone() for name, values in other.outer.moments.items()}
                await asyncio.sleep(self.world.transfer_s)
                self.stage.weights, self.stage.step = given.weights, given.step
                self.stage.share, self.stage.tokens = None, 0
                self.stage.history = {given.agreed_step: given.history[given.agreed_step]}
                self.stage.sync_schedule = given.sync_schedule
                for name, values in self.stage.outer.moments.items():
                    values.copy_(moments[name])
                return
        raise Unavailable(stage, ["nobody is that far"])

    async def _answer(self, call: MemoryCall) -> Reply:
        self.world.calls[type(call.message).__name__] += 1
        if self.has_suspended(call.peer):
            raise Refused("suspended")
        if type(call.message) in self.world.failing:
            raise PeerFailed("as the test wants it")
        match call.message:
            case GossipSteps() | Recall() | Contribute() as request:
                return await self.group.answer(call.peer, request, call.tensors, call.deadline)
        raise AssertionError(call.message)


class GroupWorld:
    """Groups of one run, and their network; requests of a kind in `failing` fail."""

    def __init__(
        self, rates: Sequence[float], target: int = 1024, stage_type: type[FakeStage] = FakeStage, **sections: Any
    ) -> None:
        sections["optimizer"] = {"target_tokens": target}
        self.signed = SignedManifest.sign(small_manifest(**sections), Identity(bytes([9]) * 32))
        self.network = MemoryNetwork(NetworkFaults(latency_s=(0.0025, 0.0025)))
        self.failing: set[type[Message]] = set()
        self.calls: Counter[str] = Counter()
        self.run_steps: list[list[int]] = [[0]]
        self.stops_at = 0
        """How many steps the run has; 0: no end."""
        self.bandwidths: dict[PeerId, float] = {}
        self.transfer_s = 0.0  # seconds from a source's snapshot of its state to the end of the transfer
        self.suspends = False  # whether peers refuse those that they have suspended
        self.has_connections = False
        """Whether peers have connections to peers that are not in this world, of other stages."""
        self.peers: dict[PeerId, GroupPeer] = {}
        for number, (peer, rate) in enumerate(zip(identities(len(rates)), rates, strict=True)):
            self.peers[peer] = GroupPeer(self, peer, stage_type(number + 1, rate, self.signed.manifest))

    @property
    def all(self) -> list[GroupPeer]:
        return list(self.peers.values())

    async def __aenter__(self) -> GroupWorld:
        for peer in self.all:
            peer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self.all:
            await peer.stop()

    def join(self, number: int, rate: float, source: GroupPeer) -> GroupPeer:
        """Starts a replica with its own id or that of an ended one, and the present state of `source`."""
        stage = FakeStage(number, rate, self.signed.manifest)
        stage.weights, stage.step, stage.history = source.stage.weights, source.stage.step, dict(source.stage.history)
        peer = identities(number)[-1]
        joined = self.peers[peer] = GroupPeer(self, peer, stage)
        joined.start()
        return joined

    async def kill(self, peer: GroupPeer) -> None:
        self.network.dead.add(peer.peer)
        await peer.stop()
