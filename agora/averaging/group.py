"""Keeps this peer's stages in step with their replicas at other peers: carries out what `next_action` decides.

Knows: step gossip, rounds, stages (through ReplicatedStages). Must not know: networks, optimizers, files, the view.
docs/averaging.md says what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol.errors import AgoraError, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging import next_action, replica_progress
from agora.averaging.divergence import replicas_to_fetch_from
from agora.averaging.exact_steps import ExactSteps
from agora.averaging.exchange import Part, RoundConfig
from agora.averaging.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.averaging.gradient_wire import GradientWire, choose_gradient_wire
from agora.averaging.next_action import ActionConfig, OtherReplicas, OwnStage
from agora.averaging.partition import Members, Slices, cut_into_parts
from agora.averaging.quota import StepMeter, StepSize
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
"""An owner refuses a part whose round is further from its own: this many rounds of gradients, or this many times all
slices of the stage."""
MAX_REPORT_LAG: Final = 2
"""Steps by which a replica's last report may lag behind the step of a slice round in which it takes part."""
ROUND_STEPS: Final = 2.0
"""A round of an asynchronous run may take max(MIN_ROUND_S, ROUND_STEPS * the average duration of a step)."""
MIN_ROUND_S: Final = 4.0
LEADING_STEP_INTERVAL_S: Final = 5.0
"""Seconds between two measurements, in a synchronous run, of how far the other stages are."""


@dataclass(slots=True)
class _StageState:
    """What the group keeps for one stage. task: the last exact step, fetch or catch-up. reason: of the last action.

    behind_at: the step at which the stage fell behind the run's leading stage, and the loop time then.
    """

    slices: Slices
    slice_rounds: SliceRounds
    meter: StepMeter
    behind_at: tuple[int, float] | None = None
    task: asyncio.Task[None] | None = None
    reason: str = ""


class ReplicaGroup:
    """Gossips with the replicas of each own stage, and starts the steps, slice rounds and fetches that are due.

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
        """report_offence: is called for a replica whose contribution breaks the protocol."""
        self._averaging = averaging = signed.manifest.averaging
        self._config = config = ActionConfig.from_manifest(signed.manifest)
        self._me = me
        self._stages = stages
        self._state = state
        self._listing = listing
        self._leading_step = 0
        self._in_hand = 0
        self._report = report
        self._report_offence = report_offence
        self._leaving = False
        self.reducer = PartReducer(RoundConfig.from_manifest(signed, me), caller, self)
        self._exact = ExactSteps(me, config.synchronous, stages, self.reducer, self, report)
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = gossip = StepGossip(
            me, stages.span, caller, listing, self._counts, self._decide_and_start, interval_s=interval_s
        )
        step_s = lambda stage: self._stage_states[stage].meter.step_s.value  # noqa: E731
        gossip.bounds = self.bounds = StepBounds(stages, step_s, gossip.furthest, config, report_offence)
        self.gradient_wire = GradientWire(self.reducer.exchange.gradient_wire, "")
        self._start_steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._stage_states: dict[int, _StageState] = {}
        microbatch_tokens, target = signed.manifest.quota_tokens, config.target_tokens
        for stage in stages.span.stages:
            slices = Slices(stages.layout(stage).numel, averaging.fraction, signed.manifest.seed)
            rounds = SliceRounds(stage, slices, averaging.every, stages, self.reducer, self, report)
            self._stage_states[stage] = _StageState(slices, rounds, StepMeter(microbatch_tokens, StepSize(target)))
            stages.set_step_policy(stage, StepPolicy(config.target_tokens, config.exact_steps))

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled; then cancels all that is running and waits for its end."""
        watching = asyncio.create_task(self._watch_other_stages())
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
        """Starts nothing more; waits up to `within_s` seconds for running steps and fetches, then cancels them.

        Does not wait for slice rounds. A state exported afterwards is final.
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
        """Answers as PartReducer.answer_contribution does; a ProtocolError is reported as an offence of `peer` too."""
        try:
            return await self.reducer.answer_contribution(peer, message, tensors, deadline)
        except ProtocolError as error:
            # Counted once for a round, however many parts are wrong: a peer that has restarted sends all of them again.
            occasion = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_offence(peer, Offence.BAD_AVERAGE, f"{error.code}: {error}", occasion)
            raise

    def missing_tokens(self, stage: int) -> int:
        """Returns how many tokens all live replicas must still count for the open step.

        Returns 0 while a share that was closed here awaits its mean.
        """
        own = self._counts()[stage]
        if own.open_step > own.step:
            return 0
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage))
        _, live = next_action.counting_replicas(loop_time(), others)
        return max(0, self._config.target_tokens - own.tokens - replica_progress.count_tokens(live, own.open_step))

    def reason(self, stage: int) -> str:
        """Returns the sentence by which `next_action` last explained what the stage does or waits for."""
        return self._stage_states[stage].reason

    # --- what the reducer asks, see ReducerView

    def members(self, stage: int) -> Members:
        """Returns the members of a stage's rounds, this peer included, with bandwidths as in `Members`.

        In asynchronous runs lagging replicas are not members of the rounds of exact steps: they replay those steps.
        """
        listed, known = self._listing.replicas_in_view(stage), self.gossip.known_progress(stage)
        step, others_seen = self._stages.step_of(stage), self.gossip.others_in_view(stage)
        others = replica_progress.round_members(known, others_seen, loop_time())
        if self._config.is_exact(step) and not self._config.synchronous:
            others -= replica_progress.lagging_replicas(known, others, step)
        new = replica_progress.newcomers(known, others, step)
        if self._start_steps[stage] > step - replica_progress.NEWCOMER_STEPS >= 0:
            new.add(self._me)
        return {peer: None if peer in new else listed.get(peer, 0.0) for peer in {*others, self._me}}

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round may take: `averaging.round_s`, in asynchronous runs at most ROUND_STEPS."""
        step_s, manifest_s = self._stage_states[stage].meter.step_s.value, self._averaging.round_s
        if self._config.synchronous or step_s is None:
            return manifest_s
        return min(manifest_s, max(MIN_ROUND_S, ROUND_STEPS * step_s))

    def peers_not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` whose contributions to `part` need not be waited for: the unreachable ones.

        In asynchronous runs also the others that are more than a step behind the part's, or have not reported yet.
        """
        known = self.gossip.known_progress(part.stage)
        not_awaited = replica_progress.unreachable_replicas(known, peers, loop_time())
        if not self._config.synchronous:
            step = part.number if part.what == "gradient" else part.number * self._averaging.every - MAX_REPORT_LAG
            not_awaited |= replica_progress.lagging_or_unheard_replicas(known, set(peers) - {self._me}, step)
        return not_awaited

    def numel_of(self, part: Part) -> int:
        """Returns a part's number of elements.

        Raises ProtocolError if there is no such part, Refused if its round is too far from this peer's own.
        """
        state, is_gradient = self._stage_states.get(part.stage), part.what == "gradient"
        of_step = part.number if is_gradient else part.number * self._averaging.every - 1
        if state is None or self._config.is_exact(of_step) != is_gradient:
            raise ProtocolError("bad-message", f"stage {part.stage} averages no {part.what} {part.number} here")
        step = self._stages.step_of(part.stage)
        own_number = step if is_gradient else step // self._averaging.every
        if abs(part.number - own_number) > (MAX_ROUNDS_APART if is_gradient else MAX_ROUNDS_APART * state.slices.count):
            raise Refused(f"round {part.number} is too far from this peer's round {own_number}")
        numel = self._stages.layout(part.stage).numel if is_gradient else state.slices.numel_of(part.number)
        cuts = cut_into_parts(numel)
        if part.part >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.number} has {len(cuts)} parts, not {part.part + 1}")
        return len(range(numel)[cuts[part.part]])

    # --- what exact steps and slice rounds ask, see RoundGroup and ExactStepGroup

    def live_others(self, stage: int) -> set[PeerId]:
        """Returns the ids of the stage's other replicas that are both listed and live."""
        known, listed = self.gossip.known_progress(stage), self.gossip.others_in_view(stage)
        return set(replica_progress.live_replicas(known, listed, loop_time()))

    async def run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round with the present members; returns its result within `round_s`, see Round."""
        deadline = loop_time() + self.round_s(stage)
        members = self.members(stage)
        return await Round(self.reducer, self._report, stage, what, number, weight, members, deadline).run(values)

    def record_exact_step(self, stage: int, tokens: float) -> None:
        """Corrects the planned size of the stage's next step after an exact step over `tokens` tokens."""
        meter = self._stage_states[stage].meter
        meter.size = meter.size.after_step(tokens)

    async def fetch_state(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Stops the stage's slice rounds, fetches its state as StateFetcher.fetch does, then drops its residuals.

        Raises Unavailable when no source has such a state; the residuals are then kept.
        """
        await self._stage_states[stage].slice_rounds.stop()
        fetched = await self._state.fetch(stage, sources, at_least)
        self.reducer.exchange.drop_stage(stage)
        return fetched

    # --- deciding

    def on_share_closed(self, stage: int) -> None:
        """Called after the device thread closed a share: gossips this and starts whatever is due, such as the round."""
        self._stage_states[stage].meter.on_share_closed(loop_time())
        self.gossip.tick()

    def on_microbatch_left(self, stage: int, in_hand: int) -> None:
        """Called when a training microbatch left; starts what is due then. in_hand: those still in work here."""
        self._in_hand = in_hand
        if self._should_hold(stage) and self._counts()[stage].tokens >= self._stage_states[stage].meter.quota_now:
            self._decide_and_start(stage)

    def is_awaiting_mean(self, stage: int) -> bool:
        """Returns whether origins wait now because a share closed here lacks its mean; see StepMeter."""
        own = self._counts()[stage]
        return own.open_step > own.step and self._should_hold(stage)

    def tokens_until_origins_wait(self, stage: int) -> int | None:
        """Returns how many tokens origins may still open before they must wait for a mean; None if they need not wait.

        It is quota - tokens of this replica's open share, or -tokens while its last share awaits its mean.
        """
        own = self._counts()[stage]
        if not self._should_hold(stage):
            return None
        return -own.tokens if own.open_step > own.step else self._stage_states[stage].meter.quota_now - own.tokens

    def on_stepped(self, stage: int, step: int, tokens: int) -> None:
        """Called after each optimizer step: updates meter and wire, counts local `tokens` for slice rounds, gossips."""
        state = self._stage_states[stage]
        state.meter.on_stepped(loop_time())
        if self._counts()[stage].open_step > step:
            state.meter.on_share_closed(loop_time())
        self._choose_gradient_wire(stage)
        if not self._config.is_exact(step - 1):
            state.meter.record_local_step(tokens)
            state.slice_rounds.record_local_step(tokens)
        self.gossip.tick()

    def _should_hold(self, stage: int) -> bool:
        """Returns whether origins wait for means now: in asynchronous runs with exact steps, if means come soon."""
        meter = self._stage_states[stage].meter
        if self._config.synchronous or not self._config.is_exact(self._stages.step_of(stage)):
            return False
        return meter.quota_now > 0 and meter.should_hold_origins(loop_time())

    def _choose_gradient_wire(self, stage: int) -> None:
        """Chooses the format of gradients again and reports a change; only in asynchronous runs with exact steps."""
        if self._config.synchronous or not self._config.is_exact(self._stages.step_of(stage)):
            return
        numel, members = sum(self._stages.layout(own).numel for own in self._stage_states), len(self.members(stage))
        uplink, step_s = self._listing.uplink(), self._stage_states[stage].meter.step_s.value
        section, exchange = self._averaging, self.reducer.exchange
        chosen = choose_gradient_wire(section.gradient_wire, numel, members, uplink, step_s, section.share_of_uplink)
        if chosen.name != exchange.gradient_wire:
            self._report(events.GradientWireChosen(chosen.name, chosen.reason))
        self.gradient_wire, exchange.gradient_wire = chosen, chosen.name

    def _decide_and_start(self, stage: int) -> None:
        """Updates the stage's meter and StepPolicy, and starts what `next_action` chooses; reports why it fetches."""
        now, state, own = loop_time(), self._stage_states[stage], self._counts()[stage]
        others = OtherReplicas(self.gossip.known_progress(stage), self.gossip.others_in_view(stage), self._leading_step)
        replicas, live = next_action.counting_replicas(now, others)
        state.meter.measure(now, own.tokens_counted)
        quota = state.meter.update_quota(self._me, {peer: last.direct.rate.per_second for peer, last in live.items()})
        waits = self._should_hold(stage)
        policy = next_action.step_policy(own.open_step, replicas, live, quota, self._config, by_device=not waits)
        self._stages.set_step_policy(stage, policy)
        behind_at, is_running = state.behind_at, state.task is not None and not state.task.done()
        takes_slices = not self._config.is_exact(own.step - 1)
        own_stage = OwnStage(
            own,
            quota,
            step_s=state.meter.expected_s,
            leaving=self._leaving,
            busy=is_running,
            slice_due=state.slice_rounds.next_due(own.step, own.agreed) if takes_slices else None,
            behind_since=behind_at[1] if behind_at and behind_at[0] == own.step < self._leading_step else None,
            diverged_from=replicas_to_fetch_from(self._lineages(stage), self._me, live),
            in_hand=self._in_hand if waits else 0,
        )
        action, state.reason = next_action.next_action(now, own_stage, others, self._config)
        match action.what:
            case "slice round":
                state.slice_rounds.begin(action.number, own.step)
                self._decide_and_start(stage)
            case "catch up":
                state.task = self._start(self._stages.catch_up(stage, action.number))
            case "step":
                state.task = self._start(self._stages.catch_up(stage, own.step + 1))
            case "replay":
                state.task = self._start(self._exact.replay(stage, action.number))
            case "step together":
                state.task = self._start(self._exact.step_together(stage, action.number))
            case "fetch":
                if action.sources:
                    self._report(events.StageDiverged(stage, own.step, ", ".join(action.sources)))
                else:
                    self._report(events.StageFellBehind(stage, own.step, action.number))
                fetch = self._exact.fetch_or_catch_up(stage, action.at_least, action.number, action.sources)
                state.task = self._start(fetch)

    async def _watch_other_stages(self) -> None:
        """In a synchronous run, records again and again how far the run's leading stage is, and who is behind it.

        Otherwise stages that begin from checkpoints of different steps would wait for one another forever.
        """
        while self._config.synchronous:
            await asyncio.sleep(LEADING_STEP_INTERVAL_S)
            of_run = self.bounds.plausible_of_run(self._listing.steps_of_run())
            self._leading_step = replica_progress.leading_step(of_run)
            for stage, state in self._stage_states.items():
                step = self._stages.step_of(stage)
                if step >= self._leading_step:
                    state.behind_at = None
                elif state.behind_at is None or state.behind_at[0] != step:
                    state.behind_at = (step, loop_time())

    def _counts(self) -> Mapping[int, ReplicaCounts]:
        """Returns how far this peer is with each stage of its span, by stage."""
        starts = self._start_steps
        return {
            p.stage: ReplicaCounts(
                p.step, p.open_step, p.tokens_in_share, p.tokens_counted, p.agreed, p.lineage, starts[p.stage]
            )
            for p in self._stages.progress()
        }

    def _lineages(self, stage: int) -> Mapping[int, int]:
        """Returns the stage's latest lineages (train.lineage), by the step at which each was agreed on."""
        return next(progress.lineages for progress in self._stages.progress() if progress.stage == stage)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts `work` as a task and returns that; reports TaskFailed if it ends with an error."""

        def report_failure(task: asyncio.Task[None]) -> None:
            """Reports the error with which the task ended, if any; cancelling is not an error."""
            if not task.cancelled() and (error := task.exception()) is not None:
                code = error.code if isinstance(error, AgoraError) else type(error).__name__
                self._report(events.TaskFailed("averaging", f"{code}: {error}"))

        task = asyncio.create_task(work)
        task.add_done_callback(report_failure)
        return task
