"""Keeps this peer's stages in step with their replicas at other peers: carries out what `next_action` decides.

Knows: step gossip, rounds, stages (through ReplicatedStages). Must not know: networks, optimizers, files, the view.
docs/averaging.md has what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging import next_action, replica_progress
from agora.averaging.background_tasks import start_reported
from agora.averaging.divergence import replicas_to_fetch_from
from agora.averaging.exact_steps import ExactSteps
from agora.averaging.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.averaging.gradient_wire import GradientWire, choose_gradient_wire
from agora.averaging.next_action import ActionConfig, OtherReplicas, OwnStage
from agora.averaging.part_averager import Part, RoundConfig
from agora.averaging.partition import Members, Slices, cut_into_parts
from agora.averaging.quota import StepMeter, StepTokenPlan
from agora.averaging.reducer import PartReducer
from agora.averaging.replica_progress import ReplicaCounts
from agora.averaging.replicated_stages import ReplicaListing, ReplicatedStages, StateFetcher
from agora.averaging.rounds import Round, RoundResult
from agora.averaging.slice_rounds import SliceRounds
from agora.averaging.step_bounds import StepBounds
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import events
from agora.stepping import StepPolicy
from agora.swarm.conduct import Offence, ReportOffence

MAX_ROUNDS_APART: Final = 2
"""An owner refuses a part more than this many gradient rounds, or passes over all slices, away from its own round."""
MAX_REPORT_LAG: Final = 2
"""Steps by which a replica's last report may lag behind the step of a slice round in which it takes part."""
ROUND_STEPS: Final = 2.0
"""A round of an asynchronous run may take max(MIN_ROUND_S, ROUND_STEPS * the average duration of a step)."""
MIN_ROUND_S: Final = 4.0
LEADING_STEP_INTERVAL_S: Final = 5.0
"""Seconds between two measurements, in a synchronous run, of how far the other stages are."""


@dataclass(slots=True)
class _GroupStage:
    """What the group keeps for one stage. task: the latest step, fetch or catch-up. reason: of the latest decision.

    behind_at: if the stage is behind the run's leading stage, its step and the loop time when that was noticed.
    """

    slices: Slices
    slice_rounds: SliceRounds
    meter: StepMeter
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
        report_offence: ReportOffence,
    ) -> None:
        """Gives each stage its first StepPolicy. report_offence: is called for replicas that break the protocol."""
        self._averaging = averaging = signed.manifest.averaging
        self._config = config = ActionConfig.from_manifest(signed.manifest)
        self._me = me
        self._stages = stages
        self._state = state
        self._listing = listing
        self._leading_step = 0
        self._in_progress = 0
        self._report = report
        self._report_offence = report_offence
        self._leaving = False
        self.reducer = PartReducer(RoundConfig.from_manifest(signed, me), caller, self)
        self._exact = ExactSteps(me, config.synchronous, stages, self.reducer, self, report)
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = gossip = StepGossip(
            me, stages.span, caller, listing, self._counts, self._decide_and_start, interval_s=interval_s
        )
        self._bounds = StepBounds(stages, self._recent_step_s, gossip.furthest_step, config, report_offence)
        gossip.bounds = self._bounds
        self.gradient_wire = GradientWire(self.reducer.averager.gradient_wire, "")
        self._start_steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._stage_states: dict[int, _GroupStage] = {}
        microbatch_tokens, target = signed.manifest.quota_tokens, config.target_tokens
        for stage in stages.span.stages:
            slices = Slices(stages.layout(stage).numel, averaging.fraction, signed.manifest.seed)
            rounds = SliceRounds(stage, slices, averaging.every, stages, self.reducer, self, report)
            self._stage_states[stage] = _GroupStage(slices, rounds, StepMeter(microbatch_tokens, StepTokenPlan(target)))
            stages.set_step_policy(stage, StepPolicy(config.target_tokens, config.exact_steps))

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
            self._report_offence(peer, Offence.BAD_AVERAGE, f"{error.code}: {error}", occasion)
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

    # --- what the reducer asks, see ReducerView

    def members(self, stage: int) -> Members:
        """Returns the members of the stage's next round, with this peer, by id, and their bandwidths, see `Members`.

        Newcomers own no part. In asynchronous runs lagging replicas are not members at exact steps: they replay them.
        """
        listed, known = self._listing.replicas_in_view(stage), self.gossip.known_progress(stage)
        step = self._stages.step_of(stage)
        others = replica_progress.round_members(known, self.gossip.others_in_view(stage), loop_time())
        if self._config.is_exact(step) and not self._config.synchronous:
            others -= replica_progress.lagging_replicas(known, others, step)
        new = replica_progress.newcomers(known, others, step)
        if self._start_steps[stage] > step - replica_progress.NEWCOMER_STEPS >= 0:
            new.add(self._me)
        return {peer: None if peer in new else listed.get(peer, 0.0) for peer in {*others, self._me}}

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round may take: the manifest's `averaging.round_s`.

        In an asynchronous run at most max(MIN_ROUND_S, ROUND_STEPS * a recent step's seconds), once these are known.
        """
        step_s, manifest_s = self._recent_step_s(stage), self._averaging.round_s
        if self._config.synchronous or step_s is None:
            return manifest_s
        return min(manifest_s, max(MIN_ROUND_S, ROUND_STEPS * step_s))

    def peers_not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` whose contributions to `part` need not be waited for: the unreachable ones.

        In asynchronous runs also others that have not reported yet (after step 0), or whose last report was more than 1
        step (for slices MAX_REPORT_LAG + 1) behind the part's step. A slice's step is part.round * averaging.every.
        """
        known = self.gossip.known_progress(part.stage)
        not_awaited = replica_progress.unreachable_replicas(known, peers, loop_time())
        if not self._config.synchronous:
            step = part.round if part.kind == "gradient" else part.round * self._averaging.every - MAX_REPORT_LAG
            not_awaited |= replica_progress.lagging_or_unheard_replicas(known, set(peers) - {self._me}, step)
        return not_awaited

    def check_part(self, part: Part) -> int:
        """Checks that `part` can be averaged here now, and returns its number of elements.

        Raises ProtocolError if no stage here averages such a part, Refused if its round is too far from this peer's.
        """
        state, is_gradient = self._stage_states.get(part.stage), part.kind == "gradient"
        averaged_step = part.round if is_gradient else part.round * self._averaging.every - 1
        if state is None or self._config.is_exact(averaged_step) != is_gradient:
            raise ProtocolError("bad-message", f"stage {part.stage} averages no {part.kind} {part.round} here")
        step = self._stages.step_of(part.stage)
        own_number = step if is_gradient else step // self._averaging.every
        if abs(part.round - own_number) > (MAX_ROUNDS_APART if is_gradient else MAX_ROUNDS_APART * state.slices.count):
            raise Refused(f"round {part.round} is too far from this peer's round {own_number}")
        numel = self._stages.layout(part.stage).numel if is_gradient else state.slices.numel_of(part.round)
        cuts = cut_into_parts(numel)
        if part.position >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.round} has {len(cuts)} parts, not {part.position + 1}")
        return len(range(numel)[cuts[part.position]])

    # --- what exact steps and slice rounds ask, see RoundGroup and ExactStepGroup

    def live_others(self, stage: int) -> set[PeerId]:
        """Returns the ids of the stage's other replicas that are both listed and live."""
        known, listed = self.gossip.known_progress(stage), self.gossip.others_in_view(stage)
        return set(replica_progress.live_replicas(known, listed, loop_time()))

    async def run_round(self, stage: int, kind: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Averages `values`, float32 [n], with those of the present members, within round_s seconds; see Round."""
        deadline = loop_time() + self.round_s(stage)
        members = self.members(stage)
        return await Round(self.reducer, self._report, stage, kind, number, weight, members, deadline).run(values)

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
        if not self._config.is_exact(step - 1):
            state.meter.record_local_step(tokens)
            state.slice_rounds.record_local_step(tokens)
        self.gossip.tick()

    def _origins_wait(self, stage: int) -> bool:
        """Returns StepMeter.should_origins_wait; False if synchronous, at local steps, and while the quota is 0."""
        meter = self._stage_states[stage].meter
        if self._config.synchronous or not self._config.is_exact(self._stages.step_of(stage)):
            return False
        return meter.quota_now > 0 and meter.should_origins_wait(loop_time())

    def _recent_step_s(self, stage: int) -> float | None:
        """Returns the moving average of the durations of the stage's steps in seconds, None before the first."""
        return self._stage_states[stage].meter.step_s.value

    def _choose_gradient_wire(self, stage: int) -> None:
        """Chooses the format of gradients again, reports a change; not if synchronous or at local steps."""
        if self._config.synchronous or not self._config.is_exact(self._stages.step_of(stage)):
            return
        numel, members = sum(self._stages.layout(own).numel for own in self._stage_states), len(self.members(stage))
        uplink, step_s = self._listing.uplink_bytes_per_s(), self._recent_step_s(stage)
        section, averager = self._averaging, self.reducer.averager
        chosen = choose_gradient_wire(section.gradient_wire, numel, members, uplink, step_s, section.share_of_uplink)
        if chosen.name != averager.gradient_wire:
            self._report(events.GradientWireChosen(chosen.name, chosen.reason))
        self.gradient_wire, averager.gradient_wire = chosen, chosen.name

    def _decide_and_start(self, stage: int) -> None:
        """Updates the stage's meter, StepPolicy and reason; starts what next_action chooses; reports why it fetches."""
        now, state, own = loop_time(), self._stage_states[stage], self._counts()[stage]
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage), self._leading_step)
        replicas, live = next_action.counting_replicas(now, others)
        state.meter.measure(now, own.tokens_counted)
        quota = state.meter.update_quota(self._me, {peer: last.direct.rate.per_second for peer, last in live.items()})
        waits = self._origins_wait(stage)
        policy = next_action.step_policy(own.open_step, replicas, live, quota, self._config, by_device=not waits)
        self._stages.set_step_policy(stage, policy)
        behind_at, is_running = state.behind_at, state.task is not None and not state.task.done()
        takes_slices = not self._config.is_exact(own.step - 1)
        own_stage = OwnStage(
            own,
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
        match action.kind:
            case "slice round":
                state.slice_rounds.begin(action.number, own.step)
                self._decide_and_start(stage)
            case "catch up":
                state.task = start_reported(self._stages.catch_up(stage, action.number), self._report)
            case "step":
                state.task = start_reported(self._stages.catch_up(stage, own.step + 1), self._report)
            case "replay":
                state.task = start_reported(self._exact.replay(stage, action.number), self._report)
            case "step together":
                state.task = start_reported(self._exact.step_together(stage, action.number), self._report)
            case "fetch":
                if action.sources:
                    self._report(events.StageDiverged(stage, own.step, ", ".join(action.sources)))
                else:
                    self._report(events.StageFellBehind(stage, own.step, action.number))
                fetch = self._exact.fetch_or_catch_up(stage, action.at_least, action.number, action.sources)
                state.task = start_reported(fetch, self._report)

    async def _watch_other_stages(self) -> None:
        """In a synchronous run, records every few seconds the leading stage's step, and which stages here are behind.

        Without this, stages that begin from checkpoints of different steps would wait for one another forever.
        """
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
        """Returns this peer's own progress in each stage of its span, by stage."""
        starts = self._start_steps
        return {
            p.stage: ReplicaCounts(
                p.step, p.open_step, p.tokens_in_share, p.tokens_counted, p.agreed, p.lineage, starts[p.stage]
            )
            for p in self._stages.progress()
        }

    def _lineages(self, stage: int) -> Mapping[int, int]:
        """Returns the stage's latest lineages (train.lineage), by the step up to which each counts the means."""
        return next(progress.lineages for progress in self._stages.progress() if progress.stage == stage)
