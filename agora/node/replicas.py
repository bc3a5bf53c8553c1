"""Keeps this peer's stages together with the other replicas of them: when to step, and what to average.

Knows: the gossip, the rounds, the compute, and which calls which. Must not know: how any of them works.

After every `averaging.every`-th step of a stage a round on one slice of its weights runs in the background, and what it
changes is added to the weights when it is back; one such round of a stage at a time. An exact step is one for which the
replicas average their gradients when its tokens are in, and which they take along the average: all steps of synchronous
runs are, and the first `averaging.exact_steps` of others. The rounds of weights then change nothing, except to heal
what a failed part or a missed step has left. A stage that fell behind all that others can give (in synchronous runs: a
whole step) fetches their state again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agora_protocol.errors import AgoraError, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute, GossipedSteps, GossipSteps, Recall, Recalled
from agora_protocol.tensors import WireTensor

from agora.averaging.drift import Newcomer
from agora.averaging.gossip import Judgement, StepGossip
from agora.averaging.owner import Owner
from agora.averaging.rounds import Rounds
from agora.averaging.slices import Slices, parts
from agora.averaging.terms import AveragingTerms, Part
from agora.calls import Caller
from agora.observe import events, faults
from agora.observe.events import Report
from agora.state.keeper import StateKeeper
from agora.state.rules import leading_step
from agora.stepping import EVERY_STEP, StepPolicy
from agora.swarm.conduct import Offence, ReportOffence
from agora.swarm.membership import Membership
from agora.train.compute import Compute

MOST_WEIGHT = 64
"""A contribution of more tokens than this many rounds' worth is absurd."""
ROUNDS_APART = 2
"""Replicas average a round only when this near to it."""
AGAIN_S = 1.0
"""Until a fetch that failed is tried again."""
MEND_TRIES = 3
"""Fetches that failed, after which the least peer id of those that are not sure of their state is sure of its own."""
LOOK_S = 5.0
"""Between two looks whether a synchronous stage waits behind the others; after LOOKS in a row it does."""
LOOKS = 3
LOST_COVERS = 0.5
"""Covers of the averaging by which a stage may be behind before what it holds is worth less than a fetch."""


@dataclass(slots=True)
class _Stage:
    """What is known of one stage between its rounds."""

    slices: Slices
    newcomer: Newcomer
    tokens: int = 0
    begun: int = -1
    """The number of the last round of weights that this peer came to."""
    round: asyncio.Task[None] | None = None
    work: asyncio.Task[None] | None = None
    """An exact step, or a fetch."""


class Replicas:
    """One for each daemon. `run` until cancelled; `stepped` is told of each step, on the loop."""

    def __init__(
        self,
        signed: SignedManifest,
        me: PeerId,
        compute: Compute,
        membership: Membership,
        caller: Caller,
        keeper: StateKeeper,
        report: Report,
        report_offence: ReportOffence,
    ) -> None:
        """A stage whose state the keeper fetched from other replicas is a newcomer among them. `report_offence` takes
        each peer that brings to a round what nobody may bring.
        """
        self._manifest = manifest = signed.manifest
        self._averaging = manifest.averaging
        self.synchronous = manifest.schedule.kind == "synchronous"
        self._me = me
        self._compute = compute
        self._membership = membership
        self._keeper = keeper
        self._report = report
        self._report_offence = report_offence
        target = manifest.optimizer.target_tokens
        self._most_tokens = MOST_WEIGHT * target * self._averaging.every
        wire = "float32" if self.synchronous else self._averaging.wire
        terms = AveragingTerms(
            me,
            signed.run_id,
            self._averaging.aggregation,
            wire,
            self._averaging.round_s,
            self._most_tokens,
            self.synchronous,
        )
        self.owner = Owner(terms, caller, self._members, self._size_of, faults.reach)
        self._rounds = Rounds(terms, caller, self.owner, report, faults.reach)
        self._gossip = StepGossip(me, compute.span, target, caller, self._peers, self._counts, soon=self.synchronous)
        self._gossip.act = self._act
        self._stages = {stage: self._new_stage(stage, stage in keeper.fetched) for stage in compute.span.stages}
        self._resting = False
        self._gossip.changed = self._publish_policy
        exact = EVERY_STEP if self.synchronous else self._averaging.exact_steps
        self._policy = StepPolicy(target, exact)
        for stage in compute.span.stages:
            compute.publish_policy(stage, self._policy)

    def _new_stage(self, stage: int, fetched: bool) -> _Stage:
        """In synchronous runs a newcomer's gradient counts at once, and its weights are those of the others."""
        slices = Slices(self._compute.layout(stage).numel, self._averaging.fraction, self._manifest.seed)
        return _Stage(slices, Newcomer(counts=self.synchronous or not fetched))

    async def run(self) -> None:
        """Tells and hears how far the replicas are, until cancelled."""
        resuming = asyncio.get_running_loop().create_task(self._reported(None, self._resume_together()))
        try:
            await self._gossip.run()
        finally:
            works = [
                resuming,
                *(work for it in self._stages.values() for work in (it.round, it.work) if work is not None),
            ]
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            await self.owner.close()

    def rest(self) -> None:
        """From now on no step is followed: what a leaving peer writes down is how it ends."""
        self._resting = True

    def _is_exact(self, step: int) -> bool:
        """Whether the step after so many is along the mean gradient of all replicas."""
        return self.synchronous or step < self._averaging.exact_steps

    # --- what others ask

    def gossip(self, peer: PeerId, message: GossipSteps) -> GossipedSteps:
        """A replica says how far it is."""
        return self._gossip.answer(peer, message)

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: list[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """A replica brings a part that this peer owns."""
        try:
            return await self.owner.contribute(peer, message, tensors, deadline)
        except ProtocolError as error:
            # Counted once for a round, however many parts are wrong: who has restarted within it brings them all again.
            occasion = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_offence(peer, Offence.BAD_AVERAGE, f"{error.code}: {error}", occasion)
            raise

    def recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """A second owner asks for an average."""
        return self.owner.recall(message)

    def step_of(self, stage: int) -> int:
        """Optimizer steps that a stage held here has taken."""
        return self._compute.step_of(stage)

    def missing_tokens(self, stage: int) -> int:
        """What the stage's step still lacks, as far as was heard."""
        return self._gossip.missing(stage)

    # --- what they are asked of

    def _peers(self, stage: int) -> list[PeerId]:
        return [seen.peer for seen in self._membership.view.replicas(stage)]

    def _members(self, stage: int) -> Mapping[PeerId, float]:
        """A stage's replicas that are there, and their bandwidths."""
        bandwidths = {seen.peer: seen.bandwidth for seen in self._membership.view.replicas(stage)}
        return {peer: bandwidths.get(peer, 0.0) for peer in self._gossip.present(stage)}

    def _counts(self) -> Mapping[int, tuple[int, int]]:
        return {it.stage: (it.step, it.tokens_in_step) for it in self._compute.progress()}

    def _size_of(self, part: Part) -> int:
        it, gradient = self._stages.get(part.stage), part.what == "gradient"
        if it is None or (gradient and not self._is_exact(part.number)):
            raise ProtocolError("bad-message", f"stage {part.stage} averages no {part.what} here")
        step = self._compute.step_of(part.stage)
        here = step if gradient else step // self._averaging.every
        if abs(part.number - here) > ROUNDS_APART:
            raise Refused(f"round {part.number} is too far from this peer's round {here}")
        numel = self._compute.layout(part.stage).numel if gradient else it.slices.numel_of(part.number)
        cuts = parts(numel)
        if part.part >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.number} has {len(cuts)} parts, not {part.part + 1}")
        return len(range(numel)[cuts[part.part]])

    # --- stepping

    def _publish_policy(self, stage: int, step: int) -> None:
        """Tells the device thread when to take step number `step` of a stage, by what its other replicas have said."""
        to_go, alone = self._gossip.tokens_to_go(stage, step), self._gossip.alone(stage)
        self._compute.publish_policy(stage, replace(self._policy, step=step, tokens_to_go=to_go, alone=alone))

    def stepped(self, stage: int, step: int, tokens: int) -> None:
        """A stage has taken `step`, `tokens` of this peer's in it: tell the others, and average when it is time."""
        it = self._stages[stage]
        it.tokens = min(it.tokens + tokens, self._most_tokens)
        self._gossip.tell()
        if step % self._averaging.every or len(self._gossip.present(stage)) < 2:
            return
        number = step // self._averaging.every
        if number <= it.begun:
            return  # others came to it first
        if _busy(it.round):
            self._report(events.RoundSkipped(stage, number, "the one before is not back yet"))
        else:
            it.round = self._start(stage, self._rounds_from(stage, it, number))

    def _act(self, judgement: Judgement) -> None:
        """A stage is due, or has stepped elsewhere."""
        stage, it = judgement.stage, self._stages[judgement.stage]
        behind = judgement.reached - judgement.step
        if self._resting or _busy(it.work):
            return  # judged again when that is done
        if behind > self._most_behind:
            it.work = self._start(stage, self._recover(stage, it, judgement))
        elif behind > 1 or not self._is_exact(judgement.step):
            self._follow(stage, max(judgement.reached, judgement.step))
        elif self._gossip.alone(stage):
            self._follow(stage, judgement.step)  # whoever was to take it along has left
        else:
            it.work = self._start(stage, self._exact_step(stage, it, judgement.step))

    def _follow(self, stage: int, step: int) -> None:
        """Also takes a step that is due here: the device looks for those after each of its jobs."""
        task = asyncio.get_running_loop().create_task(self._compute.catch_up(stage, step))
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(events.TaskFailed("catch up", f"{type(error).__name__}: {error}"))

    @property
    def _most_behind(self) -> int:
        return 1 if self.synchronous else max(20, round(LOST_COVERS * self._averaging.every / self._averaging.fraction))

    def _start(self, stage: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self._reported(stage, work))

    async def _reported(self, stage: int | None, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except AgoraError as error:
            self._report(events.TaskFailed("averaging", f"{error.code}: {error}"))
        finally:
            if stage is not None:
                self._gossip.judge_again(stage)

    # --- rounds

    async def _rounds_from(self, stage: int, it: _Stage, number: int) -> None:
        """A round, and then at once the one that is due by now, where others may be waiting."""
        while True:
            await self._round(stage, it, number)
            due = self._compute.step_of(stage) // self._averaging.every
            newest = max(due, self.owner.newest(stage, "weights"))
            if newest <= number:
                return
            number = newest

    async def _round(self, stage: int, it: _Stage, number: int) -> None:
        """One slice, in the background."""
        it.begun, blocks = number, it.slices.blocks(number)
        weight, it.tokens = float(it.tokens if it.newcomer.counts else 0), 0
        values, _ = await self._compute.snapshot_blocks(stage, blocks)
        result = await self._rounds.run(
            stage, "weights", number, values, weight, self._members(stage), self._deadline()
        )
        took = result.averaged_blocks()
        if len(took):
            delta, snapshot = (flat.view(-1, SLICE_BLOCK)[took].flatten() for flat in (result.answer, values))
            await self._compute.apply_average(stage, blocks[took], delta, snapshot, self._averaging.rule)
        if not result.failed_parts:
            near = result.distance, result.distance_others, result.members
            it.newcomer = it.newcomer.seen(*near, cover=it.slices.count)

    async def _exact_step(self, stage: int, it: _Stage, step: int) -> None:
        """The mean gradient over all replicas' tokens; that of a newcomer, who is elsewhere, does not count."""
        own = await self._compute.take_mean_gradient(stage)
        if own.step != step:
            return
        weight = float(own.tokens if it.newcomer.counts else 0)
        result = await self._rounds.run(
            stage, "gradient", step, own.values, weight, self._members(stage), self._deadline()
        )
        tokens = max(own.tokens, round(result.weight))
        if unsure := bool(result.failed_parts) and self.synchronous:
            self._keeper.doubt(stage)
        try:
            await self._compute.step_with_gradient(stage, step, result.answer, tokens)
        except ProtocolError:
            if self.synchronous:
                raise
            await self._compute.step_with_gradient(
                stage, step, own.values, tokens=0
            )  # the step is over, without a part in it
        if unsure:
            await self._mend(stage, step + 1)

    async def _mend(self, stage: int, step: int) -> None:
        """A part that failed may have left this replica, which is in doubt, unlike the others: takes the state of one
        that is sure.

        Who is not sure gives no state. When nobody is, the others take that of the least peer id, which asks a few
        times: who is sure may be about to take the step.
        """
        tries = 0
        while others := sorted(self._gossip.heard(stage)):
            tries += 1
            try:
                await self._keeper.fetch(stage, others, step)
                return
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if self._me < others[0] and tries >= MEND_TRIES:
                break
            await asyncio.sleep(AGAIN_S)
        self._keeper.trust(stage)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._averaging.round_s

    async def _resume_together(self) -> None:
        """Synchronous stages that begin from checkpoints of different steps would wait for one another for ever: those
        that stay behind take the number of the furthest, with the weights that they have.
        """
        looks: dict[tuple[int, int], int] = {}
        while self.synchronous:
            await asyncio.sleep(LOOK_S)
            view, stages = self._membership.view, range(self._manifest.stage_count)
            leading = leading_step([[seen.step_of(k) for seen in view.replicas(k)] for k in stages])
            here = [(stage, self._compute.step_of(stage)) for stage in self._stages]
            looks = {it: looks.get(it, 0) + 1 for it in here if it[1] < leading}
            for stage, step in here:
                if looks.get((stage, step), 0) >= LOOKS:
                    await self._compute.catch_up(stage, leading)

    async def _recover(self, stage: int, it: _Stage, judgement: Judgement) -> None:
        """So far behind that only the others' state helps."""
        self._report(events.StateLost(stage, judgement.step, judgement.reached))
        others = [peer for peer in self._peers(stage) if peer != self._me]
        least = judgement.reached if self.synchronous else judgement.step + 1
        try:
            await self._keeper.fetch(stage, others, least)
            it.newcomer = Newcomer(counts=self.synchronous)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            if self.synchronous:
                await asyncio.sleep(AGAIN_S)
            else:
                await self._compute.catch_up(stage, judgement.reached)


def _busy(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
