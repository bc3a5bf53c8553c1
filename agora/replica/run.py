"""Keeps this peer's stages in step with their replicas at other peers: carries out what `decide` decides.

docs/understand/averaging.md has what the rounds are for, and what follows when one fails."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from agora_protocol.errors import AgoraError, ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.parts import slice_count
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.core.calls import Caller
from agora.core.clock import loop_time
from agora.core.sync_mode import EXACT, StepPlan, StepPolicy
from agora.observe import events
from agora.replica.all_reduce import (
    MAX_RUNNING_SLICE_ROUNDS,
    RoundGroup,
    RoundResult,
    StageRounds,
    recall_failed_parts,
    recall_repeatedly,
)
from agora.replica.decide import Action, GradientWire, MeasuredUplink, choose_gradient_wire, next_action, step_policy
from agora.replica.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.replica.replicated_stages import ReplicaListing, ReplicatedStages, StateFetcher
from agora.replica.shard_codec import Part, cut_into_parts
from agora.replica.trust import StepBounds, replicas_to_fetch_from
from agora.replica.view import (
    ActionConfig,
    OtherReplicas,
    OwnStage,
    ReplicaCounts,
    StepMeter,
    StepTokenPlan,
    count_tokens,
    counting_replicas,
    leading_step,
)
from agora.swarm.peer_score import ReportViolation, Violation

# --- background_tasks

# Starts background work of averaging whose errors are reported as events, because nothing waits for its result.


def start_reported(work: Coroutine[Any, Any, None], report: events.Report, name: str = "") -> asyncio.Task[None]:
    """Starts `work` as a task and returns the task; if the task ends with an error, reports TaskFailed of "averaging".

    The event's text is NAME: CODE: MESSAGE, with the type's name as the code of an error that is not an AgoraError;
    without a `name`, the code comes first. A cancelled task is not reported.
    """

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            code = error.code if isinstance(error, AgoraError) else type(error).__name__
            report(events.TaskFailed("averaging", ": ".join(filter(None, (name, code, str(error))))))

    task = asyncio.create_task(work)
    task.add_done_callback(report_failure)
    return task


# --- exact_steps

# Takes exact steps, along the mean gradient of all replicas: by a round, by a replay, or by fetching a state.

FETCH_AGAIN_S: Final = 1.0  # seconds of pause after a failed fetch of a state
# Failed fetches of a state after which, if no replica has taken the step, the peer with the least id takes it.
FETCH_TRIES: Final = 3


class ExactStepGroup(Protocol):
    """Protocol: what an exact step changes besides the stage's weights; implemented by ReplicaGroup."""

    def record_exact_step(self, stage: int, tokens: float) -> None:
        """Records that the stage took a step along a mean gradient of which no part failed.

        tokens: number of tokens, of all replicas, behind the mean; they decide how many tokens the next steps have.
        """

    async def fetch_state(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by a source's of at least `at_least` steps; the result has no meaning here.

        Raises Unavailable if no source has such a state.
        """


class ExactSteps:
    """Takes exact steps of the stages of a span: steps along the mean gradient of all replicas.

    Every public method returns when the step is taken or given up. ReplicaGroup calls each when next_action decides so,
    and again after a step that was given up.
    """

    def __init__(
        self,
        me: PeerId,
        synchronous: bool,
        stages: ReplicatedStages,
        rounds: RoundGroup,
        group: ExactStepGroup,
        report: events.Report,
    ) -> None:
        self._me = me
        self._synchronous = synchronous
        self._stages = stages
        self._rounds = rounds
        self._group = group
        self._report = report

    async def step_together(self, stage: int, step: int) -> None:
        """Averages the gradient of step `step` with the other replicas in one round, and takes the step along the mean.

        First closes this replica's share (its own gradient for the step) if it is open.

        | a part failed here, and | asynchronous run | synchronous run |
        |---|---|---|
        | another replica keeps its mean | step along it | fetch the state of one that has taken the step |
        | there is no other replica | step along this peer's gradient | the same |
        | no other replica keeps it | step along 0, see _fill_failed_parts | see _fetch_until_taken |

        If the closed share belongs to another step than `step`, returns without a round. A mean that is 0 everywhere or
        cannot be used only counts the step and leaves the weights as they are; in a synchronous run one that cannot be
        used raises ProtocolError. A step without failed parts is passed to record_exact_step.
        """
        share = await self._stages.take_gradient_share(stage)
        if share.step != step:
            return
        result = await self._rounds.run_round(stage, "gradient", step, share.values, float(share.tokens))
        nonzero_fraction = 1.0
        if result.failed_parts and not self._synchronous:
            first_part = Part(stage, "gradient", step, 0)
            nonzero_fraction = await self._fill_failed_parts(first_part, share.values, share.tokens, result)
        elif result.failed_parts and await self._fetch_until_taken(stage, step + 1):
            return
        tokens = round(nonzero_fraction * max(share.tokens, result.weight))
        try:
            await self._stages.step_with_gradient(stage, step, result.mean, tokens, result.wanted_slices)
        except ProtocolError:
            if self._synchronous:
                raise
            # The step counts, but changes nothing.
            await self._stages.step_with_gradient(stage, step, share.values, tokens=0, wanted_slices=EXACT)
        else:
            if not result.failed_parts:
                self._group.record_exact_step(stage, result.weight)

    async def _fill_failed_parts(self, first_part: Part, values: Tensor, tokens: int, result: RoundResult) -> float:
        failed = [index for index, is_averaged in enumerate(result.averaged) if not is_averaged]
        await recall_repeatedly(self._rounds, first_part, result)
        if len(self._rounds.members(first_part.stage)) == 1:
            return 1.0
        cuts = cut_into_parts(len(result.mean))
        zeros = 0
        for index in failed:
            part, cut = first_part._replace(position=index), cuts[index]
            if not result.averaged[index]:
                zero_mean = self._rounds.reducer.averager.encode_zero_mean(part, len(values[cut]))
                self._rounds.reducer.keep_mean(part, zero_mean)
                result.mean[cut] = zero_mean.values
            if not result.mean[cut].any():
                zeros += 1
                self._rounds.reducer.averager.contributions.carry_over(part, values[cut], float(tokens))
        return 1 - zeros / len(cuts)

    async def replay(self, stage: int, step: int) -> None:
        """Asks other replicas for the mean gradient of the past step `step`, takes the step, calls record_exact_step.

        If a part of the mean is not found, replaces the state instead, by fetch_or_catch_up. The tokens in this
        replica's open share stay there, for a later step.
        """
        result = RoundResult.of_failed_parts(torch.zeros(self._stages.layout(stage).numel), EXACT)
        await recall_failed_parts(self._rounds, Part(stage, "gradient", step, 0), result)
        if result.failed_parts:
            await self.fetch_or_catch_up(stage, step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if result.mean.any() else 0
        await self._stages.step_with_gradient(stage, step, result.mean, tokens, result.wanted_slices)
        self._group.record_exact_step(stage, result.weight)

    async def fetch_or_catch_up(
        self, stage: int, at_least: int, reached: int, sources: Collection[PeerId] = ()
    ) -> None:
        """Replaces the stage's state by one of at least `at_least` steps from `sources`, by default any live replica.

        If no source gives one, reports TaskFailed and waits FETCH_AGAIN_S; in an asynchronous run it then sets the
        stage's step count to `reached` without a state, see ReplicatedStages.catch_up.
        """
        try:
            await self._group.fetch_state(stage, sorted(sources or self._rounds.live_others(stage)), at_least)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            await asyncio.sleep(FETCH_AGAIN_S)
            if not self._synchronous:
                await self._stages.catch_up(stage, reached)

    async def _fetch_until_taken(self, stage: int, at_least: int) -> bool:
        tries = 0
        while others := sorted(self._rounds.members(stage).keys() - {self._me}):
            tries += 1
            try:
                await self._group.fetch_state(stage, others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._me < others[0]:
                return False
            await asyncio.sleep(FETCH_AGAIN_S)
        return False


# --- slice_rounds

# Runs the slice rounds of runs with local steps: replicas average their slice's difference to the common anchor.
#
# Round r begins after local step r * every, over slice r mod the number of slices. Its mean difference moves anchor and
# weights (train.outer_step). Up to MAX_RUNNING_SLICE_ROUNDS rounds run while training goes on; their means are
# applied in
# the order of their numbers. A failed part whose mean no replica keeps changes nothing: the slice's next round averages
# that difference.

# In a round that begins this many rounds late or more, a replica first asks for the means, and then takes part.
RECALL_FIRST: Final = 2


class SliceRounds:
    """Runs the slice rounds of one stage, several concurrently, as background tasks; used on the event loop only."""

    def __init__(
        self,
        stage: int,
        every: int,
        most_slices: int,
        stages: ReplicatedStages,
        rounds: RoundGroup,
        report: events.Report,
    ) -> None:
        """every: optimizer steps from one round to the next. most_slices: how many the stage may have."""
        self._stage = stage
        self._every = every
        self._stages = stages
        self._rounds = rounds
        self._report = report
        self._step_tokens: deque[int] = deque(maxlen=most_slices * every)
        self._last_begun = -1
        self._last_contributed = -1
        self._running: dict[int, asyncio.Task[None]] = {}

    def record_local_step(self, tokens: int) -> None:
        """Records the tokens of a local step; a round's weight is the sum over the last slices * every steps."""
        self._step_tokens.append(tokens)

    def forget_tokens(self) -> None:
        """Forgets the recorded steps, because exact ones came after them: what they learnt is in no difference."""
        self._step_tokens.clear()

    def next_due(self, step: int, agreed: int) -> int | None:
        """Returns the number of the round to begin now, after `step` steps; None if none is due or no more may run.

        agreed: the step of the last round whose mean was applied. At most MAX_RUNNING_SLICE_ROUNDS run at the same
        time, and never two over the same weights: neither two of one slice, nor two of other numbers of slices.
        """
        number = max(self._last_begun, agreed // self._every) + 1
        if number > step // self._every:
            return None
        count = self._count_at(number)
        is_of_running = all(self._count_at(running) == count for running in self._running)
        return number if is_of_running and len(self._running) < min(MAX_RUNNING_SLICE_ROUNDS, count) else None

    def _count_at(self, number: int) -> int:
        return self._rounds.slices(self._stage, number).count

    def begin(self, number: int, step: int) -> None:
        """Starts round `number` as a background task, and reports an error in it as TaskFailed.

        step: steps taken here by now, which show how late the round begins.
        """
        self._last_begun = number
        previous = self._running.get(number - 1)
        rounds_late = step // self._every - number
        work = self._run(number, previous, rounds_late)
        task = self._running[number] = start_reported(work, self._report, f"slice round {number}")
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Cancels the running rounds and waits for their end, because the state is replaced or the peer leaves.

        Rounds whose means were not applied become due again. A cancelled round that begins again only asks other
        replicas for its means, because this peer may have contributed some parts.
        """
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._last_contributed = max(self._last_contributed, self._last_begun)
        self._last_begun = -1

    async def _run(self, number: int, previous: asyncio.Task[None] | None, rounds_late: int) -> None:
        # First waits for the end of the `previous` round, so that means are applied in order.
        slices = self._rounds.slices(self._stage, number)
        blocks = slices.blocks(number)
        found = await self._stages.outer_gradient(self._stage, blocks)
        if found is None:
            return
        difference, snapshot = found
        result = None
        if len(self._rounds.members(self._stage)) > 1:
            result = await self._average(number, slices.count, difference, rounds_late)
        if previous is not None:
            await asyncio.wait([previous])
        averaged = None if result is None else (result.mean, tuple(result.averaged))
        wanted = slices.count if result is None else result.wanted_slices
        await self._stages.outer_step(self._stage, number * self._every, blocks, snapshot, averaged, wanted)

    async def _average(self, number: int, slices: int, difference: Tensor, rounds_late: int) -> RoundResult:
        # Averages `difference` with those of the other members in slice round `number`; failed parts have the mean 0.
        # slices: how many the stage has. | rounds_late | the means come from | |---|---| | below RECALL_FIRST | the
        # round; for failed parts, replicas that keep their means | | RECALL_FIRST or more | replicas that keep them; if
        # a part is missing then, as above | | `slices` or more, and contributions wait here | as for RECALL_FIRST or
        # more | | `slices` or more otherwise | replicas that keep them, which are asked once | The waiting
        # contributions show which rounds the others are in: without that, replicas that are all late might take part in
        # different rounds forever.
        first_part = Part(self._stage, "slice", number, 0, slices)
        cuts = cut_into_parts(len(difference))
        result = RoundResult.of_failed_parts(difference.clone(), slices)
        is_superseded = rounds_late >= slices and not self._rounds.reducer.has_waiting_contributions(first_part)
        if rounds_late >= min(RECALL_FIRST, slices):
            await recall_failed_parts(self._rounds, first_part, result)
        if result.failed_parts and number > self._last_contributed and not is_superseded:
            weight = float(sum(list(self._step_tokens)[-slices * self._every :]))
            recalled = result
            result = await self._rounds.run_round(self._stage, "slice", number, difference, weight, slices)
            for index, cut in enumerate(cuts):
                if recalled.averaged[index]:  # the mean that others have taken in, whatever this round gave
                    result.mean[cut] = recalled.mean[cut]
                    result.averaged[index], result.wanted[index] = True, recalled.wanted[index]
        is_slice_due = self._stages.step_of(self._stage) // self._every - number >= slices
        if result.failed_parts and not is_slice_due:
            await recall_repeatedly(self._rounds, first_part, result)
        for cut, is_averaged in zip(cuts, result.averaged, strict=True):
            if not is_averaged:
                result.mean[cut] = 0.0
        return result


# --- group

# Keeps this peer's stages in step with their replicas at other peers: carries out what `next_action` decides.
#
# docs/understand/averaging.md has what the rounds are for, and what follows when one fails.

# Maximum number of thousandths of a byte, for each value and step, that gossip reports of an uplink.
MAX_CARRIED: Final = 1_000_000
# Seconds between two measurements, in a synchronous run, of how far the other stages are.
LEADING_STEP_INTERVAL_S: Final = 5.0


@dataclass(slots=True)
class _GroupStage:
    """What the group keeps for one stage. task: the latest step, fetch or catch-up. reason: of the latest decision.

    plan: the step plan when it was last looked at; slices: of the step that was the next one then. wire: how gradients
    are sent, and what the uplink carries. uplink: the peer's, as it counts after the stage's latest step.
    behind_at: if the stage is behind the run's leading stage, its step and the loop time when that was noticed.
    """

    slice_rounds: SliceRounds
    meter: StepMeter
    plan: StepPlan
    slices: int
    wire: GradientWire
    uplink: MeasuredUplink = field(default_factory=MeasuredUplink)
    behind_at: tuple[int, float] | None = None
    task: asyncio.Task[None] | None = None
    reason: str = ""


class ReplicaGroup:
    """This peer's stages among their replicas: gossips, and starts the steps, slice rounds and fetches that are due.

    The daemon runs `run` until it cancels it, and calls the `on_...` methods; everything happens on the event loop.
    """

    def __init__(
        self,
        signed: SignedManifest,
        me: PeerId,
        stages: ReplicatedStages,
        caller: Caller,
        state: StateFetcher,
        listing: ReplicaListing,
        report: events.Report,
        report_violation: ReportViolation,
    ) -> None:
        """Gives each stage its first StepPolicy. report_violation: is called for replicas that break the protocol."""
        self._averaging = averaging = signed.manifest.averaging
        self._config = config = ActionConfig.from_manifest(signed.manifest)
        self._me = me
        self._stages = stages
        self._state = state
        self._listing = listing
        self._leading_step = 0
        self._in_progress = 0
        self._report = report
        self._report_violation = report_violation
        self._leaving = False
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = gossip = StepGossip(
            me, stages.span, caller, listing, self._counts, self._decide_and_start, interval_s=interval_s
        )
        self._bounds = StepBounds(stages, self._recent_step_s, gossip.furthest_step, config, report_violation)
        gossip.bounds = self._bounds
        self._start_steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        microbatch_tokens, target = signed.manifest.quota_tokens, config.target_tokens
        meters = {stage: StepMeter(microbatch_tokens, StepTokenPlan(target)) for stage in stages.span.stages}
        self.rounds = rounds = StageRounds(signed, me, stages, gossip, listing, meters, caller, report)
        self.reducer = rounds.reducer
        self._exact = ExactSteps(me, config.synchronous, stages, rounds, self, report)
        self._stage_states: dict[int, _GroupStage] = {}
        most_slices = slice_count(averaging.fraction)
        for stage, meter in meters.items():
            slice_rounds = SliceRounds(stage, averaging.every, most_slices, stages, rounds, report)
            wire = GradientWire(self.reducer.config.gradient_wire, "")
            plan, step = stages.step_plan(stage), stages.step_of(stage)
            self._stage_states[stage] = _GroupStage(slice_rounds, meter, plan, plan.slices_at(step), wire)
            stages.set_step_policy(stage, StepPolicy(config.target_tokens, averages=True))

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled; then cancels all running work, awaits it, closes the reducer."""
        watching = start_reported(self._watch_other_stages(), self._report, "steps of other stages")
        try:
            await self.gossip.run()
        finally:
            tasks = [watching, *(state.task for state in self._stage_states.values() if state.task is not None)]
            for task in tasks:
                task.cancel()
            stops = [state.slice_rounds.stop() for state in self._stage_states.values()]
            await asyncio.gather(*tasks, *stops, return_exceptions=True)
            await self.reducer.close()

    async def leave(self, within_s: float) -> None:
        """Starts no more steps or rounds; waits up to `within_s` seconds for steps and fetches, then cancels them.

        Running slice rounds go on: a state that is exported afterwards may lack their means.
        """
        self._leaving = True
        running = [state.task for state in self._stage_states.values() if state.task is not None]
        if running:
            _, unfinished = await asyncio.wait(running, timeout=within_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    # --- what other replicas and other packages ask

    async def answer_contribution(
        self, peer: PeerId, message: Contribute, tensors: list[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """Answers Contribute with the mean, see PartReducer.answer_contribution; reports ProtocolErrors as offences."""
        try:
            return await self.reducer.answer_contribution(peer, message, tensors, deadline)
        except ProtocolError as error:
            # Counted once for a round, however many parts are wrong: a peer that has restarted sends all of them again.
            dedup_key = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_violation(peer, Violation.BAD_AVERAGE, f"{error.code}: {error}", dedup_key)
            raise

    def missing_tokens(self, stage: int) -> int:
        """Returns how many tokens this replica and the other live ones must together still count for the open step.

        Returns 0 if they have enough, and while a share that was closed here awaits its mean.
        """
        own = self._counts()[stage]
        if own.open_step > own.step:
            return 0
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage))
        _, live = counting_replicas(loop_time(), others)
        return max(0, self._config.target_tokens - own.tokens - count_tokens(live, own.open_step))

    def reason(self, stage: int) -> str:
        """Returns the sentence with next_action's latest reason for what the stage does; "" before the first."""
        return self._stage_states[stage].reason

    def gradient_wire(self, stage: int) -> GradientWire:
        """Returns how this peer sends the stage's gradients, as chosen after its latest step."""
        return self._stage_states[stage].wire

    def agreement(self, stage: int) -> str:
        """Returns in words how the stage agrees with its replicas now: by gradients or by slices, and why."""
        slices = self._stages.step_plan(stage).slices_at(self._stages.step_of(stage))
        if slices == EXACT:
            wire = self.gradient_wire(stage)
            return f"mean gradients, sent as {wire.reason or wire.name}"
        text = f"local steps, all weights in {slices * self._averaging.every} as {self._averaging.slice_wire}"
        return f"{text}: {self.rounds.explain_slices(stage, slices)[1]}"

    # --- what exact steps ask, see ExactStepGroup

    def record_exact_step(self, stage: int, tokens: float) -> None:
        """Corrects the stage's StepTokenPlan (tokens of the next steps) after an exact step over `tokens` tokens."""
        meter = self._stage_states[stage].meter
        meter.token_plan = meter.token_plan.after_step(tokens)

    async def fetch_state(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Stops the stage's slice rounds, replaces its state by StateFetcher.fetch, then calls PartAverager.drop_stage.

        Returns fetch's result. Raises Unavailable, with the rounds stopped, when no source has such a state.
        """
        await self._stage_states[stage].slice_rounds.stop()
        fetched = await self._state.fetch(stage, sources, at_least)
        self.reducer.averager.drop_stage(stage)
        return fetched

    # --- deciding

    def on_share_closed(self, stage: int) -> None:
        """Called when the device thread closed a share: notes the time, gossips immediately, starts what is due."""
        self._stage_states[stage].meter.on_share_closed(loop_time())
        self.gossip.tick()

    def on_microbatch_left(self, stage: int, in_progress: int) -> None:
        """Called for each stage when a training microbatch has left. in_progress: how many are still in progress here.

        If origins wait for means and the stage's open share has its quota, starts what is due in the stage.
        """
        self._in_progress = in_progress
        if self._origins_wait(stage) and self._counts()[stage].tokens >= self._stage_states[stage].meter.quota_now:
            self._decide_and_start(stage)

    def is_awaiting_mean(self, stage: int) -> bool:
        """Returns whether origins wait now because a share closed here lacks its mean; see StepMeter."""
        own = self._counts()[stage]
        return own.open_step > own.step and self._origins_wait(stage)

    def tokens_until_origins_wait(self, stage: int) -> int | None:
        """Returns how many tokens origins may have in flight; at 0 or less they wait for a mean. None: no limit.

        The number is quota - tokens of this replica's open share; it is -tokens while a closed share awaits its mean.
        """
        own = self._counts()[stage]
        if not self._origins_wait(stage):
            return None
        return -own.tokens if own.open_step > own.step else self._stage_states[stage].meter.quota_now - own.tokens

    def on_stepped(self, stage: int, step: int, tokens: int) -> None:
        """Called after each optimizer step: measures it, chooses the format of gradients, gossips, starts what is due.

        step: steps taken so far. tokens: of this replica in that step; in local steps they weigh its next slices.
        """
        state = self._stage_states[stage]
        state.meter.on_stepped(loop_time())
        if self._counts()[stage].open_step > step:
            state.meter.on_share_closed(loop_time())
        self._choose_gradient_wire(stage)
        self._notice_change(stage, step)
        self.rounds.update_wish(stage, state.plan.slices_at(step))
        if state.plan.is_local(step - 1):
            state.meter.record_local_step(tokens)
            state.slice_rounds.record_local_step(tokens)
        self.gossip.tick()

    def _origins_wait(self, stage: int) -> bool:
        meter = self._stage_states[stage].meter
        if self._config.synchronous or self._is_local_now(stage):
            return False
        return meter.quota_now > 0 and meter.should_origins_wait(loop_time())

    def _recent_step_s(self, stage: int) -> float | None:
        return self._stage_states[stage].meter.step_s.value

    def _is_local_now(self, stage: int) -> bool:
        return self._stages.step_plan(stage).is_local(self._stages.step_of(stage))

    def _choose_gradient_wire(self, stage: int) -> None:
        if self._config.synchronous:
            return
        state = self._stage_states[stage]
        state.uplink = uplink = state.uplink.after_step(self._listing.uplink_bytes_per_s())
        members = {own: len(self.rounds.members(own)) for own in self._stage_states}
        numel = sum(self._stages.layout(own).numel for own, count in members.items() if count > 1)
        if not state.meter.expected_s and uplink.rate is not None and members[stage] > 1:
            return
        section, step_s = self._averaging, state.meter.expected_s or None
        most, share = section.gradient_wire, section.share_of_uplink
        chosen = choose_gradient_wire(most, numel, members[stage], uplink, step_s, share)
        if chosen.name != state.wire.name and not self._is_local_now(stage):
            self._report(events.GradientWireChosen(stage, chosen.name, chosen.reason))
        state.wire = chosen
        self.reducer.averager.gradient_wires[stage] = chosen.name

    def _notice_change(self, stage: int, step: int) -> None:
        state, plan = self._stage_states[stage], self._stages.step_plan(stage)
        if plan != state.plan:
            _, reason = self.rounds.explain_slices(stage, plan.slices)
            self._report(events.StepPlanChanged(stage, plan.change_at, plan.slices, plan.later_slices, reason))
        before, slices = state.slices, plan.slices_at(step)
        if slices != before:
            self.reducer.averager.drop_stage(stage)
        if before == EXACT != slices:
            state.slice_rounds.forget_tokens()
        elif before != EXACT == slices:
            start_reported(state.slice_rounds.stop(), self._report, "end of slice rounds")
        state.plan, state.slices = plan, slices

    def _decide_and_start(self, stage: int) -> None:
        now, state, own = loop_time(), self._stage_states[stage], self._counts()[stage]
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage), self._leading_step)
        replicas, live = counting_replicas(now, others)
        state.meter.measure(now, own.tokens_counted)
        quota = state.meter.update_quota(self._me, {peer: last.direct.rate.per_second for peer, last in live.items()})
        waits = self._origins_wait(stage)
        plan = self._stages.step_plan(stage)
        is_local = plan.is_local(own.open_step)
        policy = step_policy(own.open_step, replicas, live, quota, self._config, is_local=is_local, by_device=not waits)
        self._stages.set_step_policy(stage, policy)
        behind_at, is_running = state.behind_at, state.task is not None and not state.task.done()
        takes_slices = plan.is_local(own.step - 1) and plan.is_local(own.step)
        own_stage = OwnStage(
            own,
            plan,
            quota,
            step_s=state.meter.expected_s,
            is_leaving=self._leaving,
            is_busy=is_running,
            slice_due=state.slice_rounds.next_due(own.step, own.agreed) if takes_slices else None,
            behind_since=behind_at[1] if behind_at and behind_at[0] == own.step < self._leading_step else None,
            diverged_from=replicas_to_fetch_from(self._lineages(stage), self._me, live),
            in_progress=self._in_progress if waits else 0,
        )
        action, state.reason = next_action(now, own_stage, others, self._config)
        self._start(stage, action, own.step)

    def _start(self, stage: int, action: Action, step: int) -> None:
        state = self._stage_states[stage]
        match action.kind:
            case "slice round":
                state.slice_rounds.begin(action.number, step)
                self._decide_and_start(stage)
            case "catch up":
                state.task = start_reported(self._stages.catch_up(stage, action.number), self._report)
            case "step":
                state.task = start_reported(self._stages.catch_up(stage, step + 1), self._report)
            case "replay":
                state.task = start_reported(self._exact.replay(stage, action.number), self._report)
            case "step together":
                state.task = start_reported(self._exact.step_together(stage, action.number), self._report)
            case "fetch":
                if action.sources:
                    self._report(events.StageDiverged(stage, step, ", ".join(action.sources)))
                else:
                    self._report(events.StageFellBehind(stage, step, action.number))
                fetch = self._exact.fetch_or_catch_up(stage, action.at_least, action.number, action.sources)
                state.task = start_reported(fetch, self._report)

    async def _watch_other_stages(self) -> None:
        # Without this, stages that begin from checkpoints of different steps would wait for one another forever.
        while self._config.synchronous:
            await asyncio.sleep(LEADING_STEP_INTERVAL_S)
            of_run = self._bounds.plausible_of_run(self._listing.steps_of_run())
            self._leading_step = leading_step(of_run)
            for stage, state in self._stage_states.items():
                step = self._stages.step_of(stage)
                if step >= self._leading_step:
                    state.behind_at = None
                elif state.behind_at is None or state.behind_at[0] != step:
                    state.behind_at = (step, loop_time())

    def _counts(self) -> Mapping[int, ReplicaCounts]:
        starts, carried = self._start_steps, self._reported_carried
        return {
            p.stage: ReplicaCounts(
                *(p.step, p.open_step, p.tokens_in_share, p.tokens_counted, p.agreed, p.lineage),
                *(starts[p.stage], carried(p.stage)),
            )
            for p in self._stages.progress()
        }

    def _reported_carried(self, stage: int) -> int:
        carried = self._stage_states[stage].wire.carried
        return 0 if math.isinf(carried) else 1 + min(int(1000 * carried), MAX_CARRIED)

    def _lineages(self, stage: int) -> Mapping[int, int]:
        return next(progress.lineages for progress in self._stages.progress() if progress.stage == stage)
