"""Keeps this peer's stages in step with their replicas at other peers: event, view, decision, performance.

Every event of a stage leads to StageReplicas.consider, which looks, decides and performs; that is the one place where
steps, fetches and fragment syncs start. docs/understand/averaging.md has what follows when one fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from agora_protocol.errors import AgoraError, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Contribute
from agora_protocol.parts import slice_count
from agora_protocol.tensors import WireTensor

from agora.core.calls import Caller, Reply
from agora.core.clock import loop_time, slept_s
from agora.core.sync_mode import ALL_REDUCE, ChangeRule, StepPolicy
from agora.observe import events
from agora.replica.all_reduce import AllReduce, Fragments, Members, RepeatedContribution, RoundResult, RoundView
from agora.replica.decide import (
    Action,
    GradientCompression,
    MeasuredUplink,
    ReplicaUplink,
    StepRule,
    Wish,
    choose_gradient_compression,
    counting_replicas,
    decide,
    step_policy,
    wanted_fragments,
)
from agora.replica.fragment_syncs import FragmentSyncs, start_reported
from agora.replica.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip, SwarmView
from agora.replica.shard_codec import RoundConfig, Shard, cut_into_shards
from agora.replica.stage_worker import StageWorker
from agora.replica.trust import JOIN_S, LEAD, LOCAL_LEAD, OwnPace, replicas_to_fetch_from, token_bounds
from agora.replica.view import (
    NEWCOMER_STEPS,
    BatchSizeCorrection,
    KnownReplicas,
    ReplicaCounts,
    StageView,
    StepMeter,
    believe,
    count_tokens,
    lagging_or_unheard_replicas,
    lagging_replicas,
    leading_step,
    live_replicas,
    newcomers,
    round_members,
    unreachable_replicas,
)
from agora.swarm.peer_score import ReportViolation, Violation
from agora.train.gradients import GradientShare
from agora.train.stage import StageProgress

# Maximum number of thousandths of a byte, for each value and step, that gossip reports of an uplink.
MAX_CARRIED: Final = 1_000_000
# Seconds between two measurements, in a synchronous run, of how far the other stages are.
LEADING_STEP_INTERVAL_S: Final = 5.0

# A reducer refuses a shard more than this many gradient rounds, or passes over all fragments, away from its own round.
MAX_ROUNDS_APART: Final = 2
# Steps by which a replica's last report may lag behind the step of a fragment sync in which it takes part.
MAX_REPORT_LAG: Final = 2
# A round of an asynchronous run may take max(MIN_ROUND_S, ROUND_STEPS * the average duration of a step).
ROUND_STEPS: Final = 2.0
MIN_ROUND_S: Final = 4.0

FETCH_AGAIN_S: Final = 1.0  # seconds of pause after a failed fetch of a state
# Failed fetches of a state after which, if no replica has taken the step, the peer with the least id takes it.
FETCH_TRIES: Final = 3


# Fetches a stage's state of at least some steps from sources and replaces the stage's state with it; returns a
# description. Raises Unavailable when no source has such a state.
FetchState = Callable[[int, Sequence[PeerId], int], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Shared:
    signed: SignedManifest
    me: PeerId
    worker: StageWorker
    gossip: StepGossip
    all_reduce: AllReduce
    swarm: SwarmView
    fetch_state: FetchState
    replicated_numel: Callable[[], int]  # elements of the stages that have replicas
    report: events.Report
    report_violation: ReportViolation


class StageReplicas:
    """One stage among its replicas: looks, decides, performs, at every event of the stage. On the event loop only."""

    def __init__(self, stage: int, shared: _Shared) -> None:
        manifest = shared.signed.manifest
        self._stage = stage
        self._shared = shared
        self._seed = manifest.seed
        self._averaging = manifest.averaging
        self._rule = StepRule.from_manifest(manifest)
        self._change_rule = ChangeRule.from_manifest(manifest)
        self._start_step = step = self._shared.worker.step_of(stage)
        self._plan = self._shared.worker.step_plan(stage)
        self._present_fragments = self._plan.fragments_at(step)
        self._fragments: dict[int, Fragments] = {}
        self._wish = Wish(since=loop_time())
        self._pace = OwnPace(step, _time_with_suspend() - JOIN_S, step)
        self._uplink = MeasuredUplink()
        self._leading_step = 0
        self._behind_at: tuple[int, float] | None = None  # the step at which this stage is behind, and since when
        self._in_progress = 0
        self._is_leaving = False
        self._task: asyncio.Task[None] | None = None  # the latest step, fetch or catch-up
        self.reason = ""  # of the latest decision
        self.compression = GradientCompression(self._shared.all_reduce.config.gradient_wire, "")
        self.meter = StepMeter(manifest.quota_tokens, BatchSizeCorrection(self._rule.target_tokens))
        self._syncs = FragmentSyncs(
            stage,
            self._averaging.every,
            slice_count(self._averaging.fraction),
            self._shared.worker,
            self._shared.all_reduce,
            self._fragments_of,
            self._shared.report,
        )
        self._shared.worker.set_step_policy(stage, StepPolicy(self._rule.target_tokens, averages=True))

    # --- events

    def on_share_closed(self) -> None:
        """Called when the device thread closed a share."""
        self.meter.on_share_closed(loop_time())
        self._shared.gossip.tick()

    def on_microbatch_left(self, in_progress: int) -> None:
        """Called when a training microbatch has left. in_progress: how many are still in progress at this peer."""
        self._in_progress = in_progress
        if self._origins_wait() and self.counts().tokens >= self.meter.quota_now:
            self.consider()

    def on_stepped(self, step: int, tokens: int) -> None:
        """Called after each optimizer step. step: steps taken so far. tokens: of this replica in that step."""
        now = loop_time()
        self.meter.on_stepped(now)
        if self.counts().open_step > step:
            self.meter.on_share_closed(now)
        self._choose_compression()
        self._notice_change(step)
        self._update_wish(self._plan.fragments_at(step))
        if self._plan.is_inner(step - 1):
            self.meter.record_inner_step(tokens)
            self._syncs.record_inner_step(tokens)
        self._shared.gossip.tick()

    def on_leading_step(self, leading: int) -> None:
        """Called in synchronous runs with the step of the run's furthest stage; notes since when this one is behind."""
        self._leading_step = leading
        step = self._shared.worker.step_of(self._stage)
        if step >= leading:
            self._behind_at = None
        elif self._behind_at is None or self._behind_at[0] != step:
            self._behind_at = (step, loop_time())

    # --- event, view, decision, performance

    def consider(self) -> None:
        """Looks, decides, performs; also tells the device thread when it may step by itself."""
        now = loop_time()
        view = self._look(now)
        members, live = counting_replicas(view, now)
        step = view.counts.open_step
        is_inner, by_device = view.plan.is_inner(step), not self._origins_wait()
        policy = step_policy(step, members, live, view.quota, self._rule, is_inner=is_inner, by_device=by_device)
        self._shared.worker.set_step_policy(self._stage, policy)
        action, self.reason = decide(view, now, self._rule)
        self._perform(action, view.counts.step)

    def counts(self) -> ReplicaCounts:
        """Returns how far this replica is, as it is gossiped."""
        progress, carried = self._progress(), self.compression.carried
        return ReplicaCounts(
            step=progress.step,
            open_step=progress.open_step,
            tokens=progress.tokens_in_share,
            tokens_counted=progress.tokens_counted,
            agreed=progress.agreed,
            history_hash=0 if progress.is_torn else progress.history_hash,
            start_step=self._start_step,
            carried=0 if math.isinf(carried) else 1 + min(int(1000 * carried), MAX_CARRIED),
        )

    def _progress(self) -> StageProgress:
        return next(progress for progress in self._shared.worker.progress() if progress.stage == self._stage)

    def _others(self) -> tuple[KnownReplicas, set[PeerId]]:
        return self._shared.gossip.known_progress(self._stage), self._shared.gossip.others_in_view(self._stage)

    def _look(self, now: float) -> StageView:
        own, plan, progress = self.counts(), self._shared.worker.step_plan(self._stage), self._progress()
        known, listed = self._others()
        live = live_replicas(known, round_members(known, listed, now), now)
        self.meter.measure(now, own.tokens_counted)
        quota = self.meter.update_quota(
            self._shared.me, {peer: last.direct.rate.per_second for peer, last in live.items()}
        )
        takes_inner_steps = plan.is_inner(own.step - 1) and plan.is_inner(own.step)
        is_behind = self._behind_at is not None and self._behind_at[0] == own.step < self._leading_step
        return StageView(
            own,
            known,
            listed,
            self._leading_step,
            plan,
            quota,
            # Other tokens of a synchronous step than those that all stages count would be waited for for ever.
            shares=None if self._rule.synchronous else self.meter.shares,
            step_s=self.meter.expected_s,
            is_leaving=self._is_leaving,
            is_busy=self._task is not None and not self._task.done(),
            sync_due=self._syncs.next_due(own.step, own.agreed) if takes_inner_steps else None,
            behind_since=self._behind_at[1] if self._behind_at and is_behind else None,
            diverged_from=replicas_to_fetch_from(
                progress.history,
                self._shared.me,
                {peer: last.direct.history for peer, last in live.items()},
                is_torn=progress.is_torn,
            ),
            in_progress=self._in_progress if self._origins_wait() else 0,
        )

    def _perform(self, action: Action, step: int) -> None:
        stage = self._stage
        match action.kind:
            case "wait":
                return
            case "fragment sync":
                self._syncs.begin(action.number, step)
                self.consider()  # more may be due beside it
                return
            case "catch up":
                work = self._shared.worker.catch_up(stage, action.number)
            case "step":
                work = self._shared.worker.catch_up(stage, step + 1)
            case "replay":
                work = self._replay(action.number)
            case "step together":
                work = self._step_together(action.number)
            case "fetch":
                if action.sources:
                    self._shared.report(events.StageDiverged(stage, step, ", ".join(action.sources)))
                else:
                    self._shared.report(events.StageFellBehind(stage, step, action.number))
                work = self._fetch_or_catch_up(action.at_least, action.number, action.sources)
        self._task = start_reported(work, self._shared.report)

    # --- all-reduces

    async def _step_together(self, step: int) -> None:
        stage, synchronous = self._stage, self._rule.synchronous
        share = await self._shared.worker.take_gradient_share(stage)
        if share.step != step:
            return
        result = await self._shared.all_reduce.run(stage, "gradient", step, share.values, float(share.tokens))
        nonzero_fraction = 1.0
        if result.failed_shards and not synchronous:  # steps along the mean that another replica keeps, or along 0
            nonzero_fraction = await self._fill_failed_shards(share, result)
        elif result.failed_shards and await self._fetch_until_taken(step + 1):
            return  # the fetched state has taken the step; without any other replica it is taken along the own gradient
        tokens = round(nonzero_fraction * max(share.tokens, result.weight))
        try:
            await self._shared.worker.step_with_gradient(stage, step, result.mean, tokens, result.wanted_fragments)
        except ProtocolError:
            if synchronous:
                raise
            # The step counts, but changes nothing.
            await self._shared.worker.step_with_gradient(stage, step, share.values, 0, ALL_REDUCE)
        else:
            if not result.failed_shards:
                self.meter.record_step(result.weight)

    async def _fill_failed_shards(self, share: GradientShare, result: RoundResult) -> float:
        # Returns the fraction of all shards whose mean is not 0.
        failed = [index for index, is_averaged in enumerate(result.averaged) if not is_averaged]
        first, codec = Shard(self._stage, "gradient", share.step, 0), self._shared.all_reduce.codec
        await self._shared.all_reduce.recall_repeatedly(first, result)
        if len(self.members()) == 1:  # no other replica could have another mean: the own values are it
            return 1.0
        cuts = cut_into_shards(len(result.mean))
        zeros = 0
        for index in failed:
            shard, cut = first._replace(position=index), cuts[index]
            if not result.averaged[index]:  # nobody keeps one: it is 0 for everybody, also for others that ask later
                zero_mean = codec.zero_mean(shard, len(share.values[cut]))
                self._shared.all_reduce.keep_mean(shard, zero_mean)
                result.mean[cut] = zero_mean.values
            if not result.mean[cut].any():
                zeros += 1
                codec.carry_over(shard, share.values[cut], float(share.tokens))
        return 1 - zeros / len(cuts)

    async def _replay(self, step: int) -> None:
        # The tokens in this replica's open share stay there, for a later step.
        stage = self._stage
        result = RoundResult.of_failed_shards(torch.zeros(self._shared.worker.layout(stage).numel), ALL_REDUCE)
        await self._shared.all_reduce.recall_failed_shards(Shard(stage, "gradient", step, 0), result)
        if result.failed_shards:
            await self._fetch_or_catch_up(step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if result.mean.any() else 0
        await self._shared.worker.step_with_gradient(stage, step, result.mean, tokens, result.wanted_fragments)
        self.meter.record_step(result.weight)

    # --- states of others

    async def _fetch_or_catch_up(self, at_least: int, reached: int, sources: Collection[PeerId] = ()) -> None:
        # sources: empty: any live replica. In an asynchronous run, if no source has a state, only counts up to
        # `reached`.
        if not sources:
            known, listed = self._others()
            sources = live_replicas(known, listed, loop_time()).keys()
        try:
            await self.fetch_state(sorted(sources), at_least)
        except Unavailable as error:
            self._shared.report(events.TaskFailed("fetch state", str(error)))
            await asyncio.sleep(FETCH_AGAIN_S)
            if not self._rule.synchronous:
                await self._shared.worker.catch_up(self._stage, reached)

    async def _fetch_until_taken(self, at_least: int) -> bool:
        # Tries until a member gives a state; False when no other member is left, or when FETCH_TRIES have failed and
        # this peer has the least id of all: then it takes the step itself, and the other members fetch its state.
        tries = 0
        while others := sorted(self.members().keys() - {self._shared.me}):
            tries += 1
            try:
                await self.fetch_state(others, at_least)
                return True
            except Unavailable as error:
                self._shared.report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._shared.me < others[0]:
                return False
            await asyncio.sleep(FETCH_AGAIN_S)
        return False

    async def fetch_state(self, sources: Sequence[PeerId], at_least: int) -> None:
        """Stops the syncs and replaces the state by a source's; raises Unavailable if none has `at_least` steps."""
        await self._syncs.stop()
        await self._shared.fetch_state(self._stage, sources, at_least)
        self._shared.all_reduce.codec.drop_stage(self._stage)

    # --- what rounds ask

    def members(self) -> Members:
        """Returns the members of the stage's next round, this peer included."""
        known, listed = self._others()
        step = self._shared.worker.step_of(self._stage)
        others = round_members(known, listed, loop_time())
        if not self._shared.worker.step_plan(self._stage).is_inner(step) and not self._rule.synchronous:
            # These replay all-reduces.
            others -= lagging_replicas(known, others, step)
        new = newcomers(known, others, step)
        if self._start_step > step - NEWCOMER_STEPS >= 0:
            new.add(self._shared.me)
        bandwidths = self._shared.swarm.replicas_in_view(self._stage)
        return {peer: None if peer in new else bandwidths.get(peer, 0.0) for peer in {*others, self._shared.me}}

    def round_s(self) -> float:
        step_s = self.meter.step_s.value
        if self._rule.synchronous or step_s is None:
            return self._averaging.round_s
        return min(self._averaging.round_s, max(MIN_ROUND_S, ROUND_STEPS * step_s))

    def look_at_round(self, shard: Shard) -> RoundView:
        """Returns what is known of the shard's round."""
        now, (known, listed), members = loop_time(), self._others(), self.members()
        not_awaited = unreachable_replicas(known, members, now)
        if not self._rule.synchronous:
            is_gradient = shard.kind == "gradient"
            step = shard.round if is_gradient else shard.round * self._averaging.every - MAX_REPORT_LAG
            not_awaited |= lagging_or_unheard_replicas(known, members.keys() - {self._shared.me}, step)
        numel, refusal = self._check(shard)
        live = frozenset(live_replicas(known, listed, now))
        return RoundView(
            members,
            live,
            frozenset(not_awaited),
            self.round_s(),
            token_bounds=self._token_bounds(shard, members, known),
            numel=numel,
            refusal=refusal,
        )

    def _token_bounds(self, shard: Shard, members: Members, known: KnownReplicas) -> dict[PeerId, float]:
        rates = {peer: known[peer].direct.rate.per_second for peer in members if peer in known}
        rates[self._shared.me] = self.meter.rate.per_second
        steps = self._averaging.every * shard.fragments or 1
        return {
            peer: steps * bound
            for peer, bound in token_bounds(rates, self._rule.target_tokens, self.meter.microbatch_tokens).items()
        }

    def _check(self, shard: Shard) -> tuple[int, AgoraError | None]:
        stage, is_gradient = self._stage, shard.kind == "gradient"
        every, fragments = self._averaging.every, shard.fragments
        if is_gradient != (fragments == ALL_REDUCE):
            return 0, ProtocolError("bad-message", f"no {shard.kind} of {fragments} fragments is averaged in {stage}")
        averaged_step = shard.round if is_gradient else shard.round * every - 1
        if self._shared.worker.step_plan(stage).fragments_at(averaged_step) != fragments:
            problem = f"stage {stage} averages no {shard.kind} {shard.round} here"
            # Where plans change, an honest member may not know of the change yet.
            return 0, Refused(problem) if self._change_rule.may_change else ProtocolError("bad-message", problem)
        numel = self._shared.worker.layout(stage).numel
        if not is_gradient:
            numel = self._fragments_of(shard.round).numel_of(shard.round)
        cuts = cut_into_shards(numel)
        if shard.position >= len(cuts):
            problem = f"round {shard.round} has {len(cuts)} shards, not {shard.position + 1}"
            return 0, ProtocolError("bad-message", problem)
        step = self._shared.worker.step_of(stage)
        own_number = step if is_gradient else step // every
        if abs(shard.round - own_number) > MAX_ROUNDS_APART * max(fragments, 1):
            return 0, Refused(f"round {shard.round} is too far from this peer's round {own_number}")
        return len(range(numel)[cuts[shard.position]]), None

    def _fragments_of(self, number: int) -> Fragments:
        count = self._shared.worker.step_plan(self._stage).fragments_at(number * self._averaging.every - 1)
        if count not in self._fragments:
            self._fragments[count] = Fragments(self._shared.worker.layout(self._stage).numel, count, self._seed)
        return self._fragments[count]

    # --- what gossip asks

    def highest_plausible_step(self) -> int:
        """Returns the highest step that another replica can have taken by now, see OwnPace."""
        now, step = _time_with_suspend(), self._shared.worker.step_of(self._stage)
        furthest = self._shared.gossip.furthest_step(self._stage)
        self._pace = self._pace.with_step(step, now, self.meter.step_s.value, furthest)
        lead = LOCAL_LEAD if self._shared.worker.step_plan(self._stage).is_inner(step) else LEAD
        return self._pace.highest_plausible_step(now, self._rule.target_tokens, lead)

    def report_implausible(self, peer: PeerId, step: int) -> None:
        """Reports as a violation that `peer` claims to have taken `step` steps; it counts once a minute."""
        highest = self.highest_plausible_step()
        text = f"says that it is at step {step} of stage {self._stage}; {highest} is the most that time allows"
        dedup_key = f"stage {self._stage}, minute {loop_time() // 60:.0f}"
        self._shared.report_violation(peer, Violation.IMPLAUSIBLE_STEP, text, dedup_key)

    # --- gradient compression; all-reduces or inner steps

    def _choose_compression(self) -> None:
        if self._rule.synchronous:
            return
        self._uplink = self._uplink.after_step(self._shared.swarm.uplink_bytes_per_s())
        replicas, step_s = len(self.members()), self.meter.expected_s or None
        if step_s is None and self._uplink.rate is not None and replicas > 1:
            return  # the rate of a replica is unknown, as after a join: the last choice stays
        section = self._averaging
        chosen = choose_gradient_compression(
            section.gradient_wire,
            self._shared.replicated_numel(),
            replicas,
            self._uplink,
            step_s,
            section.share_of_uplink,
        )
        # During inner steps no gradient is sent; the choice still says what the uplink carries.
        if chosen.name != self.compression.name and not self._takes_inner_step_now():
            self._shared.report(events.GradientWireChosen(self._stage, chosen.name, chosen.reason))
        self.compression = chosen
        self._shared.all_reduce.codec.send_gradients_as(self._stage, chosen.name)

    def _takes_inner_step_now(self) -> bool:
        return self._shared.worker.step_plan(self._stage).is_inner(self._shared.worker.step_of(self._stage))

    def _notice_change(self, step: int) -> None:
        plan = self._shared.worker.step_plan(self._stage)
        if plan != self._plan:
            _, reason = self._explain_fragments(plan.fragments)
            change = events.StepPlanChanged(self._stage, plan.change_at, plan.fragments, plan.later_fragments, reason)
            self._shared.report(change)
        before, fragments = self._present_fragments, plan.fragments_at(step)
        if fragments != before:
            self._shared.all_reduce.codec.drop_stage(self._stage)
        if before == ALL_REDUCE != fragments:
            self._syncs.forget_tokens()
        elif before != ALL_REDUCE == fragments:
            start_reported(self._syncs.stop(), self._shared.report, "end of fragment syncs")
        self._plan, self._present_fragments = plan, fragments

    def wanted_fragments(self, shard: Shard) -> int:
        """Returns in how many fragments the shard's stage should agree later, or ALL_REDUCE."""
        wanted = self._update_wish(shard.fragments)
        return wanted if self._wish.is_held(loop_time()) else shard.fragments

    def _update_wish(self, present: int) -> int:
        # Called at least after every step: a wish is held only if nothing else was wanted in between.
        if not self._change_rule.may_change:
            return present
        wanted, _ = self._explain_fragments(present)
        self._wish = self._wish.after(present, wanted, loop_time())
        return wanted

    def _explain_fragments(self, present: int) -> tuple[int, str]:
        known, listed = self._others()
        live = live_replicas(known, listed, loop_time())
        rates = self.meter.believed
        uplinks = [
            ReplicaUplink(None if each.direct.rate.per_second is None else rates.get(peer), each.counts.bytes_carried)
            for peer, each in live.items()
        ]
        uplinks.append(ReplicaUplink(self.meter.rate.per_second, self.counts().bytes_carried))
        return wanted_fragments(present, uplinks, self._change_rule.most_fragments)

    # --- what origins and the status ask

    def missing_tokens(self) -> int:
        """Returns how many tokens this replica and the other live ones must together still count for the open step."""
        own = self.counts()
        if own.open_step > own.step:
            return 0
        known, listed = self._others()
        now = loop_time()
        live = live_replicas(known, round_members(known, listed, now), now)
        if not self._rule.synchronous:
            live = dict(believe(live, own, self.meter.shares))
        return max(0, self._rule.target_tokens - own.tokens - count_tokens(live, own.open_step))

    def is_awaiting_mean(self) -> bool:
        """Returns whether origins wait now because a share closed here lacks its mean."""
        own = self.counts()
        return own.open_step > own.step and self._origins_wait()

    def tokens_until_origins_wait(self) -> int | None:
        """Returns how many tokens origins may have in flight; at 0 or less they wait for a mean. None: no limit."""
        own = self.counts()
        if not self._origins_wait():
            return None
        return -own.tokens if own.open_step > own.step else self.meter.quota_now - own.tokens

    def _origins_wait(self) -> bool:
        if self._rule.synchronous or self._takes_inner_step_now():
            return False
        return self.meter.quota_now > 0 and self.meter.should_origins_wait(loop_time())

    def agreement(self) -> str:
        """Returns in words how the stage agrees with its replicas now: by gradients or by fragments, and why."""
        fragments = self._shared.worker.step_plan(self._stage).fragments_at(self._shared.worker.step_of(self._stage))
        if fragments == ALL_REDUCE:
            return f"mean gradients, sent as {self.compression.reason or self.compression.name}"
        text = f"inner steps, all weights in {fragments * self._averaging.every} as {self._averaging.slice_wire}"
        return f"{text}: {self._explain_fragments(fragments)[1]}"

    # --- the end

    def leave(self) -> asyncio.Task[None] | None:
        """Starts no more steps or syncs; returns the running step or fetch, if there is one."""
        self._is_leaving = True
        return self._task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._syncs.stop()


class ReplicaGroup:
    """This peer's stages among their replicas; `stages` are told of events by their `on_...` methods, on the loop."""

    def __init__(
        self,
        signed: SignedManifest,
        me: PeerId,
        *,
        worker: StageWorker,
        caller: Caller,
        swarm: SwarmView,
        fetch_state: FetchState,
        report: events.Report,
        report_violation: ReportViolation,
    ) -> None:
        self._worker = worker
        self._swarm = swarm
        self._report = report
        self._report_violation = report_violation
        self._synchronous = signed.manifest.schedule.kind == "synchronous"
        self.gossip = StepGossip(
            me,
            worker.span,
            caller,
            swarm,
            self._counts,
            self._consider,
            highest_plausible=self._highest_plausible_step,
            report_implausible=self._report_implausible,
            interval_s=SYNCHRONOUS_INTERVAL_S if self._synchronous else INTERVAL_S,
        )
        self.all_reduce = AllReduce(
            RoundConfig.from_manifest(signed, me),
            caller,
            self._look_at_round,
            self._wanted_fragments,
            report,
            report_violation,
        )
        shared = _Shared(
            signed=signed,
            me=me,
            worker=worker,
            gossip=self.gossip,
            all_reduce=self.all_reduce,
            swarm=swarm,
            fetch_state=fetch_state,
            replicated_numel=self._replicated_numel,
            report=report,
            report_violation=report_violation,
        )
        self.stages: Mapping[int, StageReplicas] = {stage: StageReplicas(stage, shared) for stage in worker.span.stages}

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled."""
        watching = start_reported(self._watch_other_stages(), self._report, "steps of other stages")
        try:
            await self.gossip.run()
        finally:
            watching.cancel()
            stops = [stage.stop() for stage in self.stages.values()]
            await asyncio.gather(watching, *stops, return_exceptions=True)
            await self.all_reduce.close()

    async def leave(self, within_s: float) -> None:
        """Starts no more steps or rounds; waits up to `within_s` seconds for steps and fetches, then cancels them."""
        # Running fragment syncs go on: a state that is exported afterwards may lack their means.
        if running := [task for stage in self.stages.values() if (task := stage.leave()) is not None]:
            _, unfinished = await asyncio.wait(running, timeout=within_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def answer_contribution(
        self, peer: PeerId, message: Contribute, tensors: list[WireTensor], deadline: float
    ) -> Reply:
        """Answers Contribute with the mean, see AllReduce.contribute; reports ProtocolErrors as violations."""
        try:
            return await self.all_reduce.answer_contribution(peer, message, tensors, deadline)
        except RepeatedContribution:
            # No violation: a restarted peer sends its shards again, and so does a second machine with its key.
            raise
        except ProtocolError as error:
            # Counted once for a round, however many shards are wrong: a peer that has restarted sends all of them
            # again.
            dedup_key = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_violation(peer, Violation.BAD_AVERAGE, f"{error.code}: {error}", dedup_key)
            raise

    # --- what gossip and rounds ask, before the stages exist

    def _counts(self) -> dict[int, ReplicaCounts]:
        return {number: stage.counts() for number, stage in self.stages.items()}

    def _consider(self, stage: int) -> None:
        self.stages[stage].consider()

    def _highest_plausible_step(self, stage: int) -> int:
        return self.stages[stage].highest_plausible_step()

    def _report_implausible(self, stage: int, peer: PeerId, step: int) -> None:
        self.stages[stage].report_implausible(peer, step)

    def _wanted_fragments(self, shard: Shard) -> int:
        return self.stages[shard.stage].wanted_fragments(shard)

    def _look_at_round(self, shard: Shard) -> RoundView:
        if stage := self.stages.get(shard.stage):
            return stage.look_at_round(shard)
        problem = f"no {shard.kind} of {shard.fragments} fragments is averaged in {shard.stage}"
        return RoundView({}, frozenset(), frozenset(), 0.0, refusal=ProtocolError("bad-message", problem))

    def _replicated_numel(self) -> int:
        return sum(
            self._worker.layout(number).numel for number, stage in self.stages.items() if len(stage.members()) > 1
        )

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


def _time_with_suspend() -> float:
    # The others go on while this machine sleeps.
    return loop_time() + slept_s()
