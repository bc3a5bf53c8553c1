"""Keeps a stage of this peer in step with its replicas at other peers.

At every event of a stage, such as a step or gossip, `StageReplicas.consider` fills a view of the stage, decides by it
what the stage does next, and starts that: a step with the other replicas, a fetch of a state, or a fragment sync.
docs/understand/averaging.md describes what follows when one of these fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.manifest_sections import PREDICTED_FACTOR

from agora.core.calls import PeerCaller
from agora.core.clock import loop_time, time_with_suspend
from agora.core.live_manifest import LiveManifest
from agora.core.step_instructions import StepInstructions
from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule
from agora.observe import events
from agora.replica.all_reduce import AllReduce
from agora.replica.background import start_reported
from agora.replica.decide import Action, Situation, StepSettings, decide, step_instructions
from agora.replica.divergence import Electorate, SharedHistory, replicas_to_fetch_from, with_reports
from agora.replica.fragment_syncs import FragmentSyncs
from agora.replica.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip, SwarmQueries
from agora.replica.gradient_steps import GradientSteps
from agora.replica.mean_comparison import MeanComparison
from agora.replica.pacing import BatchSizeCorrection, StepPacing
from agora.replica.round_contexts import RoundContexts
from agora.replica.shard_codec import RoundConfig, ShardCodec
from agora.replica.stage_view import (
    KnownReplicas,
    Membership,
    ReplicaCounts,
    StageView,
    cap_reported_tokens,
    count_tokens,
)
from agora.replica.step_worker import StepWorker
from agora.replica.sync_choice import SyncChoice
from agora.replica.sync_rules import ReplicaUplink
from agora.replica.trust import (
    MAX_INNER_LEAD,
    MAX_LEAD,
    MAX_STATE_AGE_S,
    LevelStep,
    StepPace,
    highest_plausible_step,
)
from agora.replica.work_before_mean import WorkBeforeMean
from agora.swarm.peer_score import ReportViolation, Violation
from agora.train.stage import StageProgress

# Maximum number of thousandths of a byte, for each value and step, that gossip reports of an uplink.
MAX_CARRIED: Final = 1_000_000
# A replica that has taken no step of its own for AWAY_S seconds and for AWAY_STEPS usual steps was asleep, or its
# voters were. If it knows no voter any more, it catches up with any replica.
AWAY_S: Final = 60.0
AWAY_STEPS: Final = 10

# Called with the stage, the sources, and the least number of steps: replaces the stage's state by that of one source.
# Raises Unavailable if none has it.
FetchState = Callable[[int, Sequence[PeerId], int], Awaitable[object]]


class StageReplicas:
    """One stage among its replicas: decides at each event what the stage does next, and starts it."""

    def __init__(
        self,
        stage: int,
        signed: SignedManifest,
        identity: Identity,
        *,
        worker: StepWorker,
        peer_caller: PeerCaller,
        swarm: SwarmQueries,
        fetch_state: FetchState,
        replicated_numel: Callable[[], int],
        report: events.Report,
        report_violation: ReportViolation,
        live: LiveManifest | None = None,
    ) -> None:
        """replicated_numel: returns how many elements all of this peer's stages with other replicas have together.

        They share its uplink. live: the manifest in force at each step; None: the signed one at every step.
        """
        manifest, me = signed.manifest, identity.peer
        self._live_manifest = live = live or LiveManifest(manifest)
        self._stage = stage
        self._me = me
        self._worker = worker
        self._report = report
        self._report_violation = report_violation
        self._settings = StepSettings.from_manifest(live.at(worker.progress_of(stage).open_step))
        self._start_step = step = worker.step_of(stage)
        self._sync_schedule = worker.progress_of(stage).sync_schedule
        self._present_fragments = self._sync_schedule.fragments_at(step)
        self._level_step = LevelStep(step, time_with_suspend() - MAX_STATE_AGE_S)
        self._leading_step = 0
        self._behind_at: tuple[int, float] | None = None  # the step at which this stage is behind, and since when
        self._in_progress = 0
        self._networks = swarm.networks
        self._stops_at = swarm.stops_at
        self._fetch = fetch_state
        self._shared_histories: Mapping[PeerId, SharedHistory] = {}
        self._joined_history_at_step = step  # see Electorate
        self._is_leaving = False
        self._task: asyncio.Task[None] | None = None  # the latest step, fetch or catch-up
        self.reason = ""  # of the latest decision
        self.pacing = StepPacing(manifest.quota_tokens, BatchSizeCorrection(self._settings.target_tokens))
        self.gossip = StepGossip(
            me,
            stage,
            peer_caller,
            swarm,
            counts=self.counts,
            on_change=self.consider,
            highest_plausible=self.highest_plausible_step,
            report_implausible=self._report_implausible,
            interval_s=SYNCHRONOUS_INTERVAL_S if self._settings.synchronous else INTERVAL_S,
        )
        self.round_contexts = RoundContexts(
            stage,
            manifest,
            me,
            live=live,
            worker=worker,
            gossip=self.gossip,
            bandwidths=lambda: swarm.bandwidths(stage),
            pacing=self.pacing,
        )
        codec = ShardCodec(RoundConfig.from_manifest(signed, me, live))
        self.sync_choice = SyncChoice(
            stage,
            live,
            codec,
            uplinks=self._uplinks,
            uplink_bytes_per_s=swarm.uplink_bytes_per_s,
            replicated_numel=replicated_numel,
            report=report,
        )
        self.all_reduce = AllReduce(
            codec,
            peer_caller,
            self.round_contexts.context_of,
            self.sync_choice.fragments_to_ask_for,
            identity.sign,
            report,
            report_violation,
        )
        every = manifest.averaging.every
        self._mean_comparison = MeanComparison(stage, every, self.all_reduce.kept_means, report)
        self._fragment_syncs = FragmentSyncs(
            stage,
            every,
            lambda: SyncChangeRule.of_run(live).most_fragments,
            worker,
            self.all_reduce,
            self.round_contexts.division_of,
            report,
        )
        self._gradient_steps = GradientSteps(
            stage,
            me,
            synchronous=self._settings.synchronous,
            worker=worker,
            all_reduce=self.all_reduce,
            pacing=self.pacing,
            members=self.round_contexts.members,
            live_progress=self.gossip.live_progress,
            fetch_state=self.fetch_state,
            report=report,
        )
        worker.set_step_instructions(stage, StepInstructions(self._settings.target_tokens, averages=True))

    # --- events

    def on_share_closed(self) -> None:
        """Called when the device thread closed a share."""
        self.pacing.on_share_closed(loop_time())
        self.gossip.tick()
        self.consider()

    def on_microbatch_finished(self, in_progress: int) -> None:
        """Called when a training microbatch has left. in_progress: how many are still in progress at this peer."""
        self._in_progress = in_progress
        if (work := self.work_before_mean()) is not None and work.counts.tokens >= work.quota:
            self.consider()

    def on_stepped(self, step: int, tokens: int) -> None:
        """Called after each optimizer step. step: steps taken so far. tokens: of this replica in that step."""
        now = loop_time()
        self.pacing.on_stepped(now)
        self._level_step = self._level_step.after_step(step, time_with_suspend(), self.gossip.furthest_step())
        if self.counts().open_step > step:
            self.pacing.on_share_closed(now)
        self.sync_choice.choose_compression(
            step,
            len(self.round_contexts.members()),
            self.pacing.expected_s or None,
            is_inner=self._takes_inner_step_now(),
        )
        self._apply_sync_change(step)
        self.sync_choice.update_wish(self._sync_schedule.fragments_at(step))
        if self._sync_schedule.is_inner(step - 1):
            self.pacing.record_inner_step(tokens)
            self._fragment_syncs.record_inner_step(tokens)
        self.gossip.tick()
        self.consider()

    def on_leading_step(self, leading: int) -> None:
        """Called in synchronous runs with the step of the run's furthest stage; notes since when this one is behind."""
        self._leading_step = leading
        step = self._worker.step_of(self._stage)
        if step >= leading:
            self._behind_at = None
        elif self._behind_at is None or self._behind_at[0] != step:
            self._behind_at = (step, loop_time())

    # --- view, decision, performance

    def consider(self) -> None:
        """Decides what the stage does next and starts it; also sets the device thread's instructions."""
        now = loop_time()
        self._settings = StepSettings.from_manifest(self._live_manifest.at(self._progress().open_step))
        membership = self.gossip.membership()
        view = self._make_view(membership, now)
        self._mean_comparison.compare_if_different(self._progress(), membership)
        situation = Situation.of(view, now, self._settings)
        if situation.all_shares_closed:
            self.pacing.on_all_shares_closed(now)
        instructions = step_instructions(situation, device_closes_share=not self._drains())
        self._worker.set_step_instructions(self._stage, instructions)
        action, self.reason = decide(situation)
        self._perform(action, view.counts.step)

    def counts(self) -> ReplicaCounts:
        """Returns how far this replica is, as it is gossiped."""
        progress, carried = self._progress(), self.sync_choice.compression.carried
        return ReplicaCounts(
            step=progress.step,
            open_step=progress.open_step,
            tokens=progress.tokens_in_share,
            tokens_counted=progress.tokens_counted,
            agreed_step=progress.agreed_step,
            history_hash=0 if progress.is_torn else progress.history_hash,
            start_step=self._start_step,
            carried=0 if math.isinf(carried) else 1 + min(int(1000 * carried), MAX_CARRIED),
        )

    def _progress(self) -> StageProgress:
        return self._worker.progress_of(self._stage)

    def _uplinks(self) -> list[ReplicaUplink]:
        rates = self.pacing.believed_rates
        uplinks = [
            ReplicaUplink(None if each.direct.meter.per_second is None else rates.get(peer), each.counts.bytes_carried)
            for peer, each in self.gossip.live_progress().items()
        ]
        return [*uplinks, ReplicaUplink(self.pacing.meter.per_second, self.counts().bytes_carried)]

    def _takes_inner_step_now(self) -> bool:
        return self._progress().sync_schedule.is_inner(self._worker.step_of(self._stage))

    def _apply_sync_change(self, step: int) -> None:
        sync_schedule = self._progress().sync_schedule
        if sync_schedule != self._sync_schedule:
            _, reason = self.sync_choice.explain_fragments(sync_schedule.fragments)
            change = events.StepPlanChanged(
                self._stage, sync_schedule.change_at, sync_schedule.fragments, sync_schedule.later_fragments, reason
            )
            self._report(change)
        before, fragments = self._present_fragments, sync_schedule.fragments_at(step)
        if fragments != before:
            self.all_reduce.codec.drop_stage(self._stage)
        if before == ALL_REDUCE != fragments:
            self._fragment_syncs.forget_tokens()
        elif before != ALL_REDUCE == fragments:
            start_reported(self._fragment_syncs.stop(), self._report, "end of fragment syncs")
        self._sync_schedule, self._present_fragments = sync_schedule, fragments

    def _update_quota(self, own: ReplicaCounts, membership: Membership, now: float) -> int:
        self.pacing.set_target(self._settings.target_tokens)
        self.pacing.measure(now, own.tokens_counted, step=own.step, open_step=own.open_step)
        rates = {peer: last.direct.meter.per_second for peer, last in membership.live.items()}
        return self.pacing.update_quota(self._me, rates)

    def _update_electorate(self, membership: Membership) -> Electorate:
        reports = {peer: last.direct.history for peer, last in membership.live.items()}
        self._shared_histories = with_reports(
            self._shared_histories, self._progress().history, reports, time_with_suspend(), self.pacing.step_s.value
        )
        networks = partial(self._networks, self._stage)
        return Electorate(self._me, self._joined_history_at_step, reports, self._shared_histories, networks)

    def _make_view(self, membership: Membership, now: float) -> StageView:
        own, progress = self.counts(), self._progress()
        quota = self._update_quota(own, membership, now)
        electorate = self._update_electorate(membership)
        sync_schedule = progress.sync_schedule
        takes_inner_steps = sync_schedule.is_inner(own.step - 1) and sync_schedule.is_inner(own.step)
        behind_at, behind_since = self._behind_at or (-1, None)
        return StageView(
            own,
            membership,
            self._leading_step,
            sync_schedule,
            quota,
            self._end_in_force(membership.live),
            # Not in synchronous runs: if the replicas believed different token counts, they would wait for each other
            # forever.
            shares=None if self._settings.synchronous else self.pacing.shares,
            step_s=self.pacing.expected_s,
            open_fraction=self.pacing.open_fraction(now),
            is_leaving=self._is_leaving,
            is_busy=self._task is not None and not self._task.done(),
            sync_due=self._fragment_syncs.next_due(own.step, own.agreed_step) if takes_inner_steps else None,
            behind_since=behind_since if behind_at == own.step < self._leading_step else None,
            diverged_from=replicas_to_fetch_from(progress.history, electorate, is_torn=progress.is_torn),
            voters=self._find_voters(electorate, own.agreed_step),
            in_progress=self._in_progress if self._drains() else 0,
        )

    def _end_in_force(self, live: KnownReplicas) -> int:
        # A replica that counts for a step after the end belongs to an owner who goes on: it needs the others' shares.
        stops_at = self._stops_at()
        goes_on = any(last.direct.open_step > stops_at for last in live.values())
        return 0 if goes_on else stops_at

    def _find_voters(self, electorate: Electorate, step: int) -> set[PeerId] | None:
        voters = electorate.others_to_follow(step)
        away_s = max(AWAY_S, AWAY_STEPS * (self.pacing.expected_s or 0.0))
        is_away = time_with_suspend() - self._level_step.at > away_s
        return None if is_away and not voters else voters

    def _perform(self, action: Action, step: int) -> None:
        stage = self._stage
        match action.kind:
            case "wait":
                return
            case "fragment sync":
                self._fragment_syncs.begin(action.number, step)
                self.consider()  # more may be due beside it
                return
            case "catch up":
                work = self._worker.catch_up(stage, action.number)
            case "step":
                work = self._worker.catch_up(stage, step + 1)
            case "replay":
                work = self._gradient_steps.replay(action.number)
            case "step together":
                work = self._gradient_steps.step_together(action.number)
            case "fetch":
                if action.sources:
                    self._report(events.StageDiverged(stage, step, ", ".join(action.sources)))
                else:
                    self._report(events.StageFellBehind(stage, step, action.number))
                work = self._gradient_steps.fetch_or_catch_up(action.at_least, action.number, action.sources)
        self._task = start_reported(work, self._report)

    async def fetch_state(self, sources: Sequence[PeerId], at_least: int) -> None:
        """Stops the fragment syncs and replaces the state by a source's.

        Raises Unavailable if none has `at_least` steps.
        """
        await self._fragment_syncs.stop()
        was_alone = not self._shared_histories.keys() & self.gossip.live_progress().keys()
        await self._fetch(self._stage, sources, at_least)
        if was_alone:
            self._joined_history_at_step = self._worker.step_of(self._stage)
        self.all_reduce.codec.drop_stage(self._stage)

    # --- what gossip asks

    def highest_plausible_step(self) -> int:
        """Returns the highest step that another replica can have taken by now, see trust.highest_plausible_step."""
        step = self._worker.step_of(self._stage)
        lead = MAX_INNER_LEAD if self._progress().sync_schedule.is_inner(step) else MAX_LEAD
        pace = StepPace(self.pacing.step_s.value, self._settings.target_tokens, lead)
        listed = self._shared_histories.keys() & self.gossip.others_in_view()
        shared_histories = [self._shared_histories[peer] for peer in listed]
        return highest_plausible_step(step, self._level_step, shared_histories, pace, time_with_suspend())

    def _report_implausible(self, peer: PeerId, step: int) -> None:
        highest = self.highest_plausible_step()
        text = f"says that it is at step {step} of stage {self._stage}; {highest} is the most that time allows"
        # It counts once a minute.
        dedup_key = f"stage {self._stage}, minute {loop_time() // 60:.0f}"
        self._report_violation(peer, Violation.IMPLAUSIBLE_STEP, text, dedup_key)

    # --- what origins and the status ask

    def missing_tokens(self) -> int:
        """Returns how many tokens this replica and the other live ones must together still count for the open step."""
        own = self.counts()
        if own.open_step > own.step:
            return 0
        live = self.gossip.membership().live
        if not self._settings.synchronous:
            live = cap_reported_tokens(live, own, self.pacing.shares)
        return max(0, self._settings.target_tokens - own.tokens - count_tokens(live, own.open_step))

    def work_before_mean(self) -> WorkBeforeMean | None:
        """Returns what may begin before the mean that is awaited or comes next; None where nothing waits for means."""
        if self._settings.synchronous or self._takes_inner_step_now() or not self.pacing.quota_now:
            return None
        if not self.pacing.should_origins_wait(loop_time()):
            return None
        return WorkBeforeMean(self.counts(), self.pacing.quota_now, self._tokens_ahead(), self.pacing.microbatch_tokens)

    def _drains(self) -> bool:
        work = self.work_before_mean()
        return work is not None and work.drains

    def _tokens_ahead(self) -> int:
        # At weights that are not predicted it would cost too much loss (docs/notes/averaging.md).
        if not self._worker.predicts_weights:
            return 0
        staleness = self._live_manifest.at(self._progress().open_step).schedule.staleness
        return self.pacing.tokens_ahead(min(1.0, PREDICTED_FACTOR * staleness))

    def agreement(self) -> str:
        """Returns in words how the stage agrees with its replicas now: by gradients or by fragments, and why."""
        step = self._worker.step_of(self._stage)
        return self.sync_choice.describe(self._progress().sync_schedule.fragments_at(step))

    # --- the end

    def leave(self) -> asyncio.Task[None] | None:
        """Starts no more steps or syncs; returns the running step or fetch, if there is one."""
        self._is_leaving = True
        return self._task

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled."""
        try:
            await self.gossip.run()
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self._mean_comparison.stop()
            await self._fragment_syncs.stop()
            await self.all_reduce.close()
