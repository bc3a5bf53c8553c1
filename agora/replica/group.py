"""Keeps this peer's stages in step with their replicas at other peers: carries out what `next_action` decides.

docs/understand/averaging.md has what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.parts import slice_count
from agora_protocol.tensors import WireTensor

from agora.core.calls import Caller
from agora.core.clock import loop_time
from agora.core.stepping import StepPolicy
from agora.core.sync_mode import EXACT, StepPlan
from agora.observe import events
from agora.replica import next_action, replica_progress
from agora.replica.background_tasks import start_reported
from agora.replica.divergence import replicas_to_fetch_from
from agora.replica.exact_steps import ExactSteps
from agora.replica.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.replica.gradient_wire import GradientWire, MeasuredUplink, choose_gradient_wire
from agora.replica.next_action import Action, ActionConfig, OtherReplicas, OwnStage
from agora.replica.quota import StepMeter, StepTokenPlan
from agora.replica.replica_progress import ReplicaCounts
from agora.replica.replicated_stages import ReplicaListing, ReplicatedStages, StateFetcher
from agora.replica.slice_rounds import SliceRounds
from agora.replica.stage_rounds import StageRounds
from agora.replica.step_bounds import StepBounds
from agora.swarm.peer_score import ReportViolation, Violation

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
            occasion = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_violation(peer, Violation.BAD_AVERAGE, f"{error.code}: {error}", occasion)
            raise

    def missing_tokens(self, stage: int) -> int:
        """Returns how many tokens this replica and the other live ones must together still count for the open step.

        Returns 0 if they have enough, and while a share that was closed here awaits its mean.
        """
        own = self._counts()[stage]
        if own.open_step > own.step:
            return 0
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage))
        _, live = next_action.counting_replicas(loop_time(), others)
        return max(0, self._config.target_tokens - own.tokens - replica_progress.count_tokens(live, own.open_step))

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
        replicas, live = next_action.counting_replicas(now, others)
        state.meter.measure(now, own.tokens_counted)
        quota = state.meter.update_quota(self._me, {peer: last.direct.rate.per_second for peer, last in live.items()})
        waits = self._origins_wait(stage)
        plan = self._stages.step_plan(stage)
        is_local = plan.is_local(own.open_step)
        policy = next_action.step_policy(
            own.open_step, replicas, live, quota, self._config, is_local=is_local, by_device=not waits
        )
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
        action, state.reason = next_action.next_action(now, own_stage, others, self._config)
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
            self._leading_step = replica_progress.leading_step(of_run)
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
