"""Keeps this peer's stages together with their replicas elsewhere: carries out what `next_action` decides.

Knows: step gossip, rounds, stages (through ReplicatedStages). Must not know: networks, optimizers, files, the view.
docs/averaging.md tells what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging import agreement, next_action
from agora.averaging.agreement import Counts
from agora.averaging.divergence import replicas_to_fetch_from
from agora.averaging.exact_steps import ExactSteps
from agora.averaging.exchange import Part, RoundConfig
from agora.averaging.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.averaging.next_action import ActionConfig, OtherReplicas, OwnStage
from agora.averaging.owner import Owner
from agora.averaging.partition import Members, Slices, cut_into_parts
from agora.averaging.quota import StepPace, StepSize
from agora.averaging.replicated_stages import ReplicatedStages, StateFetcher
from agora.averaging.rounds import Round, RoundResult
from agora.averaging.slice_rounds import SliceRounds
from agora.averaging.uplink_share import GradientWire, choose_gradient_wire
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import events
from agora.stepping import StepPolicy
from agora.swarm.conduct import Offence, ReportOffence

MOST_ROUNDS_APART: Final = 2
"""An owner refuses parts of a round that is farther from its own; of slices, that many covers of all of them."""
HEARD_LATE: Final = 2
"""Steps by which a replica's last report may lag behind a slice whose round it takes part in."""
STEPS_OF_ROUND: Final = 2.0
"""A gradient round of an asynchronous run may take as long as so many steps, but LEAST_ROUND_S at least."""
LEAST_ROUND_S: Final = 4.0
LOOK_S: Final = 5.0
"""Seconds between two looks at how far the other stages of a synchronous run are."""


class ReplicaListing(Protocol):
    """What this peer's view says. listed: the stage's replicas, with bandwidths in bytes per second, 0 when unknown."""

    def listed(self, stage: int) -> Mapping[PeerId, float]: ...
    def uplink(self) -> float | None:
        """Returns the measured rate of this peer's uplink in bytes per second, None while nothing waits for it."""

    def is_connected(self) -> bool:
        """Returns whether this peer has a connection to any other peer of the run now."""

    def steps_of_run(self) -> Collection[Collection[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""


@dataclass(slots=True)
class _StageTasks:
    """What a stage is doing. rounds: those of its slices. work: a running step, fetch or catch-up.

    behind: the step at which the stage fell behind the run's leading stage, and when.
    """

    slices: Slices
    rounds: SliceRounds
    pace: StepPace
    behind: tuple[int, float] | None = None
    work: asyncio.Task[None] | None = None
    reason: str = ""


class ReplicaGroup:
    """Gossips with the replicas of each own stage, and starts the steps, slice rounds and fetches that are due.

    `run` until cancelled; call `stepped`, on the loop, after every step of a stage.
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
        """report_offence: is called for a replica that contributes what none may."""
        self._averaging = averaging = signed.manifest.averaging
        self._config = config = ActionConfig.of(signed.manifest)
        self._me = me
        self._held = stages
        self._state = state
        self._listing = listing
        self._leading = 0
        self._in_hand = 0
        self._report = report
        self._report_offence = report_offence
        self._leaving = False
        self.owner = Owner(RoundConfig.of(signed, me), caller, self)
        self._exact = ExactSteps(me, config.synchronous, stages, self.owner, self, report)
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = StepGossip(
            me, stages.span, caller, listing, self._counts, self._decide_and_begin, interval_s=interval_s
        )
        self.gradient_wire = GradientWire(self.owner.exchange.gradient_wire, "")
        self._began = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._stages: dict[int, _StageTasks] = {}
        unit = signed.manifest.tokens_per_microbatch
        for stage in stages.span.stages:
            slices = Slices(stages.layout(stage).numel, averaging.fraction, signed.manifest.seed)
            rounds = SliceRounds(stage, slices, averaging.every, stages, self.owner, self, report)
            self._stages[stage] = _StageTasks(slices, rounds, StepPace(unit, StepSize(config.target_tokens)))
            stages.publish_policy(stage, StepPolicy(config.target_tokens, config.exact_steps))

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled; then cancels everything that is running."""
        watching = asyncio.create_task(self._watch_other_stages())
        try:
            await self.gossip.run()
        finally:
            tasks = [watching, *(state.work for state in self._stages.values() if state.work is not None)]
            for task in tasks:
                task.cancel()
            ends = [state.rounds.stop() for state in self._stages.values()]
            await asyncio.gather(*tasks, *ends, return_exceptions=True)
            await self.owner.close()

    async def leave(self, within_s: float) -> None:
        """Begins no step, fetch or slice round any more, and ends those that run: a state written from now on is final.

        They have `within_s` seconds; then they are cancelled.
        """
        self._leaving = True
        running = [state.work for state in self._stages.values() if state.work is not None]
        if running:
            _, late = await asyncio.wait(running, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # --- what other replicas and other rooms ask

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: list[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """Has the owner average a replica's values; a ProtocolError is reported as that peer's offence, and raised."""
        try:
            return await self.owner.contribute(peer, message, tensors, deadline)
        except ProtocolError as error:
            # Counted once for a round, however many parts are wrong: a peer that has restarted sends all of them again.
            occasion = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_offence(peer, Offence.BAD_AVERAGE, f"{error.code}: {error}", occasion)
            raise

    def missing_tokens(self, stage: int) -> int:
        """Returns how many tokens this replica and the live others together still lack for the step this peer is at."""
        own = self._counts()[stage]
        if own.part > own.step:
            return 0
        others = OtherReplicas(self.gossip.known(stage), self.gossip.others(stage))
        _, live = next_action.counting_replicas(loop_time(), others)
        return max(0, self._config.target_tokens - own.tokens - agreement.count_tokens(live, own.part))

    def reason(self, stage: int) -> str:
        """Returns, in words, the reason that `next_action` last gave for what the stage does or waits for."""
        return self._stages[stage].reason

    # --- the owner's view of rounds

    def members(self, stage: int) -> Members:
        """Returns the members of a stage's rounds, this peer included, with their bandwidths.

        Of exact steps in asynchronous runs, those that are behind are none: they replay the step.
        """
        listed, known, step = self._listing.listed(stage), self.gossip.known(stage), self._held.step_of(stage)
        others = agreement.round_members(known, self.gossip.others(stage), loop_time())
        if self._config.is_exact(step) and not self._config.synchronous:
            others -= agreement.lagging_replicas(known, others, step)
        new = agreement.newcomers(known, others, step)
        if self._began[stage] > step - agreement.NEWCOMER_STEPS >= 0:
            new.add(self._me)
        return {peer: None if peer in new else listed.get(peer, 0.0) for peer in {*others, self._me}}

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round may take: in asynchronous runs STEPS_OF_ROUND of the stage's usual steps.

        At least LEAST_ROUND_S; `averaging.round_s` at most, and before any step was measured.
        """
        step_s, most = self._stages[stage].pace.step_s.value, self._averaging.round_s
        if self._config.synchronous or step_s is None:
            return most
        return min(most, max(LEAST_ROUND_S, STEPS_OF_ROUND * step_s))

    def absent(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` that are silent, or to which a call failed after their last report.

        In asynchronous runs also those that are behind: newcomers that fetch a state or replay steps.
        """
        known = self.gossip.known(part.stage)
        absent = agreement.unreachable_replicas(known, peers, loop_time())
        if not self._config.synchronous:
            step = part.number if part.what == "gradient" else part.number * self._averaging.every - HEARD_LATE
            absent |= agreement.replicas_behind(known, set(peers) - {self._me}, step)
        return absent

    def numel_of(self, part: Part) -> int:
        """Returns a part's number of elements. Raises Refused if its round is far off, ProtocolError if unknown."""
        state, gradient = self._stages.get(part.stage), part.what == "gradient"
        of_step = part.number if gradient else part.number * self._averaging.every - 1
        if state is None or self._config.is_exact(of_step) != gradient:
            raise ProtocolError("bad-message", f"stage {part.stage} averages no {part.what} {part.number} here")
        step = self._held.step_of(part.stage)
        own_number = step if gradient else step // self._averaging.every
        most_apart = MOST_ROUNDS_APART if gradient else MOST_ROUNDS_APART * state.slices.count
        if abs(part.number - own_number) > most_apart:
            raise Refused(f"round {part.number} is too far from this peer's round {own_number}")
        numel = self._held.layout(part.stage).numel if gradient else state.slices.numel_of(part.number)
        cuts = cut_into_parts(numel)
        if part.part >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.number} has {len(cuts)} parts, not {part.part + 1}")
        return len(range(numel)[cuts[part.part]])

    # --- what an exact step asks and notes, see StepTakers

    def others(self, stage: int) -> set[PeerId]:
        """Returns the other replicas of a stage that are listed and live."""
        return set(agreement.live_replicas(self.gossip.known(stage), self.gossip.others(stage), loop_time()))

    async def run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round, with those who are members now, which ends `round_s` from now at the latest."""
        deadline = loop_time() + self.round_s(stage)
        members = self.members(stage)
        return await Round(self.owner, self._report, stage, what, number, weight, members, deadline).run(values)

    def note_exact_step(self, stage: int, tokens: float) -> None:
        """Notes that a step was taken along the whole mean of all `tokens`."""
        pace = self._stages[stage].pace
        pace.size = pace.size.after_step(tokens)

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """See StateFetcher. What earlier rounds have left is dropped, and those that are running are."""
        await self._stages[stage].rounds.stop()
        fetched = await self._state.fetch(stage, sources, at_least)
        self.owner.exchange.forget(stage)
        return fetched

    # --- deciding

    def part_closed(self, stage: int) -> None:
        """Gossips that this replica's part of a step is closed, and begins the round of its mean."""
        self._stages[stage].pace.part_closed(loop_time())
        self.gossip.tick()

    def microbatch_left(self, stage: int, in_hand: int) -> None:
        """Begins what is due now that a microbatch has left this peer, which has `in_hand` others in work."""
        self._in_hand = in_hand
        if self._waits_for_means(stage) and self._counts()[stage].tokens >= self._stages[stage].pace.quota_now:
            self._decide_and_begin(stage)

    def awaits_mean(self, stage: int) -> bool:
        """Returns whether the mean of a closed part is awaited here that usually comes soon, see StepPace."""
        own = self._counts()[stage]
        return own.part > own.step and self._waits_for_means(stage)

    def tokens_before_mean(self, stage: int) -> int | None:
        """Returns the tokens that this replica's part of a step lacks, below 0 once the next one has counted some.

        None where origins do not wait for the mean of the part.
        """
        own = self._counts()[stage]
        if not self._waits_for_means(stage):
            return None
        return -own.tokens if own.part > own.step else self._stages[stage].pace.quota_now - own.tokens

    def stepped(self, stage: int, step: int, tokens: int) -> None:
        """Gossips that the stage has taken its `step`-th step, and begins what is due. tokens: this replica's in it."""
        state = self._stages[stage]
        state.pace.stepped(loop_time())
        if self._counts()[stage].part > step:
            state.pace.part_closed(loop_time())
        self._choose_gradient_wire(stage)
        if not self._config.is_exact(step - 1):
            state.pace.note_local_step(tokens)
            state.rounds.note_step(tokens)
        self.gossip.tick()

    def _waits_for_means(self, stage: int) -> bool:
        """Returns whether the next step is exact, has other replicas, and its mean is waited for, see StepPace."""
        pace, is_exact = self._stages[stage].pace, self._config.is_exact(self._held.step_of(stage))
        return is_exact and not self._config.synchronous and pace.quota_now > 0 and pace.waits_for_mean(loop_time())

    def _choose_gradient_wire(self, stage: int) -> None:
        """Chooses anew in how many bits gradients are sent, after a step of a stage; synchronous runs send float32."""
        if self._config.synchronous or not self._config.is_exact(self._held.step_of(stage)):
            return
        numel, members = sum(self._held.layout(held).numel for held in self._stages), len(self.members(stage))
        uplink, step_s = self._listing.uplink(), self._stages[stage].pace.step_s.value
        section, exchange = self._averaging, self.owner.exchange
        chosen = choose_gradient_wire(section.gradient_wire, numel, members, uplink, step_s, section.share_of_uplink)
        if chosen.name != exchange.gradient_wire:
            self._report(events.GradientWireChosen(chosen.name, chosen.reason))
        self.gradient_wire, exchange.gradient_wire = chosen, chosen.name

    def _decide_and_begin(self, stage: int) -> None:
        """Publishes a new StepPolicy for the device thread, and starts the task for what `next_action` decides."""
        now, state, own = loop_time(), self._stages[stage], self._counts()[stage]
        others = OtherReplicas(self.gossip.known(stage), self.gossip.others(stage), self._leading)
        replicas, live = next_action.counting_replicas(now, others)
        state.pace.measure(now, own.counted)
        quota = state.pace.quota(self._me, {peer: last.reported.rate.value for peer, last in live.items()})
        state.pace.quota_now = quota if live else 0
        in_hand = self._in_hand if self._waits_for_means(stage) else None
        by_device = in_hand is None
        policy = next_action.step_policy(own.part, replicas, live, quota, self._config, by_device=by_device)
        self._held.publish_policy(stage, policy)
        behind_since = state.behind[1] if state.behind and state.behind[0] == own.step < self._leading else None
        busy = _is_running(state.work)
        right = replicas_to_fetch_from(self._lineages(stage), self._me, live)
        slice_due = None if self._config.is_exact(own.step - 1) else state.rounds.due(own.step, own.agreed)
        step_s = state.pace.expected_s
        own_stage = OwnStage(own, quota, step_s, self._leaving, busy, slice_due, behind_since, right, in_hand or 0)
        action, state.reason = next_action.next_action(now, own_stage, others, self._config)
        match action.what:
            case "slice round":
                state.rounds.begin(action.number, own.step)
                self._decide_and_begin(stage)
            case "follow":
                state.work = self._start(self._held.catch_up(stage, action.number))
            case "step":
                state.work = self._start(self._held.catch_up(stage, own.step + 1))
            case "replay":
                state.work = self._start(self._exact.replay(stage, action.number))
            case "step together":
                state.work = self._start(self._exact.step_together(stage, action.number))
            case "recover":
                if action.sources:
                    self._report(events.StageDiverged(stage, own.step, ", ".join(action.sources)))
                else:
                    self._report(events.StageFellBehind(stage, own.step, action.number))
                recovery = self._exact.recover(stage, action.at_least, action.number, action.sources)
                state.work = self._start(recovery)

    async def _watch_other_stages(self) -> None:
        """Notes, in a synchronous run, how far the run's furthest stage is, and since when each stage is behind it.

        Stages that begin from checkpoints of different steps would else wait for one another for ever.
        """
        while self._config.synchronous:
            await asyncio.sleep(LOOK_S)
            self._leading = agreement.leading_step(self._listing.steps_of_run())
            for stage, state in self._stages.items():
                step = self._held.step_of(stage)
                if step >= self._leading:
                    state.behind = None
                elif state.behind is None or state.behind[0] != step:
                    state.behind = (step, loop_time())

    def _counts(self) -> Mapping[int, Counts]:
        """Returns for each stage how far this peer is."""
        return {
            p.stage: Counts(
                p.step, p.part, p.tokens_in_part, p.tokens_counted, p.agreed, p.lineage, self._began[p.stage]
            )
            for p in self._held.progress()
        }

    def _lineages(self, stage: int) -> Mapping[int, int]:
        """Returns the lineages of a stage by the steps last agreed on."""
        return next(progress.lineages for progress in self._held.progress() if progress.stage == stage)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task and returns it; if it fails, TaskFailed is reported."""

        def report_failure(task: asyncio.Task[None]) -> None:
            """Called when the task has ended: reports the error it ended by as TaskFailed; cancelling is none."""
            if not task.cancelled() and (error := task.exception()) is not None:
                code = error.code if isinstance(error, AgoraError) else type(error).__name__
                self._report(events.TaskFailed("averaging", f"{code}: {error}"))

        task = asyncio.create_task(work)
        task.add_done_callback(report_failure)
        return task


def _is_running(task: asyncio.Task[None] | None) -> bool:
    """Returns whether a task was begun and has not ended."""
    return task is not None and not task.done()
