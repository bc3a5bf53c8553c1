"""Keeps this peer's stages together with their replicas elsewhere: carries out what `next_action` decides.

Knows: step gossip, rounds, stages (through ReplicatedStages). Must not know: networks, optimizers, files, the view.
docs/averaging.md tells what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging import agreement, next_action
from agora.averaging.agreement import Counts
from agora.averaging.divergence import replicas_to_fetch_from
from agora.averaging.exact_steps import ExactSteps
from agora.averaging.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.averaging.kinds import Part, RoundConfig
from agora.averaging.next_action import ActionConfig, OtherReplicas, OwnStage
from agora.averaging.owner import Owner
from agora.averaging.partition import Slices, cut_into_parts
from agora.averaging.plausibility import Newcomer
from agora.averaging.quota import StepPace, StepSize
from agora.averaging.replicated_stages import ReplicatedStages, StateFetcher
from agora.averaging.rounds import Round, RoundResult
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import events
from agora.stepping import StepPolicy
from agora.swarm.conduct import Offence, ReportOffence

MOST_ROUNDS_APART: Final = 2
"""An owner refuses parts of a round that is farther from its own."""
STEPS_OF_ROUND: Final = 2.0
"""A gradient round of an asynchronous run may take as long as so many steps, but LEAST_ROUND_S at least."""
LEAST_ROUND_S: Final = 4.0
LOOK_S: Final = 5.0
"""Seconds between two looks at how far the other stages of a synchronous run are."""


class ReplicaListing(Protocol):
    """What this peer's view says. listed: the stage's replicas, with bandwidths in bytes per second, 0 when unknown."""

    def listed(self, stage: int) -> Mapping[PeerId, float]: ...
    def steps_of_run(self) -> Collection[Collection[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""


@dataclass(slots=True)
class _StageTasks:
    """What a stage is doing. tokens: counted since the last slice round, its weight in the next one.

    slice_task: the running slice round. work: a running step, fetch or catch-up. behind: the step at which the stage
    fell behind the run's leading stage, and when.
    """

    slices: Slices
    newcomer: Newcomer
    pace: StepPace
    tokens: int = 0
    last_slice_round: int = -1
    slice_due: int | None = None
    behind: tuple[int, float] | None = None
    slice_task: asyncio.Task[None] | None = None
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
        self._report = report
        self._report_offence = report_offence
        self._leaving = False
        self.owner = Owner(RoundConfig.of(signed, me), caller, self)
        self._exact = ExactSteps(me, config.synchronous, stages, state, self.owner, self, report)
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = StepGossip(
            me, stages.span, caller, listing.listed, self._counts, self._decide_and_begin, interval_s=interval_s
        )
        self._stages: dict[int, _StageTasks] = {}
        unit = signed.manifest.tokens_per_microbatch
        for stage in stages.span.stages:
            slices = Slices(stages.layout(stage).numel, averaging.fraction, signed.manifest.seed)
            newcomer = Newcomer(counts=stage not in state.fetched or config.is_exact(stages.step_of(stage)))
            self._stages[stage] = _StageTasks(slices, newcomer, StepPace(unit, StepSize(config.target_tokens)))
            stages.publish_policy(stage, StepPolicy(config.target_tokens, config.exact_steps))

    async def run(self) -> None:
        """Gossips, steps and averages until cancelled; then cancels everything that is running."""
        watching = asyncio.create_task(self._watch_other_stages())
        try:
            await self.gossip.run()
        finally:
            tasks = [watching, *(t for s in self._stages.values() for t in (s.slice_task, s.work) if t is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.owner.close()

    def leave(self) -> None:
        """Sets a flag: no step, fetch or slice round begins any more; a state written from now on is final."""
        self._leaving = True

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
        _, live = next_action.counting_replicas(loop_time(), own.part, others, self._config)
        return max(0, self._config.target_tokens - own.tokens - agreement.count_tokens(live, own.part))

    def reason(self, stage: int) -> str:
        """Returns, in words, the reason that `next_action` last gave for what the stage does or waits for."""
        return self._stages[stage].reason

    # --- the owner's view of rounds

    def members(self, stage: int, what: str) -> Mapping[PeerId, float]:
        """Returns the members of a stage's rounds, this peer included, with their bandwidths.

        Of rounds of weights: the listed replicas that are reachable. Of gradients: all that belong to an exact step.
        """
        listed, known, now = self._listing.listed(stage), self.gossip.known(stage), loop_time()
        others = self.gossip.others(stage)
        if what == "gradient":
            others = agreement.exact_members(known, others, now)
        else:
            others -= agreement.unreachable_replicas(known, others, now)
        return {peer: listed.get(peer, 0.0) for peer in {*others, self._me}}

    def round_s(self, stage: int, what: str) -> float:
        """Returns the seconds that a round may take: in asynchronous runs STEPS_OF_ROUND of the stage's usual steps.

        At least LEAST_ROUND_S; `averaging.round_s` at most, for weights, and before any step was measured.
        """
        step_s, most = self._stages[stage].pace.step_s.value, self._averaging.round_s
        if what == "weights" or self._config.synchronous or step_s is None:
            return most
        return min(most, max(LEAST_ROUND_S, STEPS_OF_ROUND * step_s))

    def absent(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` that are silent, or to which a call failed after their last report.

        For a gradient of an asynchronous run also those that are behind: newcomers that fetch a state or replay steps.
        """
        known = self.gossip.known(part.stage)
        absent = agreement.unreachable_replicas(known, peers, loop_time())
        if part.what == "gradient" and not self._config.synchronous:
            absent |= agreement.replicas_behind(known, set(peers) - {self._me}, part.number)
        return absent

    def numel_of(self, part: Part) -> int:
        """Returns a part's number of elements. Raises Refused if its round is far off, ProtocolError if unknown."""
        state, gradient = self._stages.get(part.stage), part.what == "gradient"
        if state is None or (gradient and not self._config.is_exact(part.number)):
            raise ProtocolError("bad-message", f"stage {part.stage} averages no {part.what} here")
        step = self._held.step_of(part.stage)
        own_number = step if gradient else step // self._averaging.every
        if abs(part.number - own_number) > MOST_ROUNDS_APART:
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

    def weight(self, stage: int, tokens: int) -> float:
        """Returns what values behind so many tokens weigh: 0 while this replica is a newcomer."""
        return float(tokens if self._stages[stage].newcomer.counts else 0)

    async def run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round, with those who are members now, which ends `round_s` from now at the latest."""
        deadline = loop_time() + self.round_s(stage, what)
        members = self.members(stage, what)
        return await Round(self.owner, self._report, stage, what, number, weight, members, deadline).run(values)

    def note_exact_step(self, stage: int, tokens: float) -> None:
        """Notes that a step was taken along the whole mean of all `tokens`: this replica is what the others are."""
        state = self._stages[stage]
        state.newcomer = Newcomer()
        state.pace.size = state.pace.size.after_step(tokens)

    def note_fetched(self, stage: int) -> None:
        """Notes that the state came from another replica: a newcomer, unless steps are exact, and so is the state."""
        state, is_exact = self._stages[stage], self._config.is_exact(self._held.step_of(stage))
        state.newcomer = Newcomer(counts=is_exact)
        for kind in self.owner.kinds.values():
            kind.forget(stage)

    # --- deciding

    def part_closed(self, stage: int) -> None:
        """Gossips that this replica's part of a step is closed, and begins the round of its mean."""
        self.gossip.tick()

    def stepped(self, stage: int, step: int, tokens: int) -> None:
        """Gossips that the stage has taken its `step`-th step; after every `every`-th one a slice round begins.

        tokens: this replica's in the step, added to its weight in that round. None begins while another runs.
        """
        state = self._stages[stage]
        state.pace.stepped(loop_time())
        state.tokens = min(state.tokens + tokens, int(self.owner.config.max_weight))
        number, rest = divmod(step, self._averaging.every)
        if rest == 0 and number > state.last_slice_round and not _is_running(state.slice_task):
            state.slice_due = number
        self.gossip.tick()
        state.slice_due = None

    def _decide_and_begin(self, stage: int) -> None:
        """Publishes a new StepPolicy for the device thread, and starts the task for what `next_action` decides."""
        now, state, own = loop_time(), self._stages[stage], self._counts()[stage]
        others = OtherReplicas(self.gossip.known(stage), self.gossip.others(stage), self._leading)
        replicas, live = next_action.counting_replicas(now, own.part, others, self._config)
        state.pace.measure(now, own.counted)
        quota = state.pace.quota(self._me, {peer: last.reported.rate.value for peer, last in live.items()})
        self._held.publish_policy(stage, next_action.step_policy(own.part, replicas, live, quota, self._config))
        behind_since = state.behind[1] if state.behind and state.behind[0] == own.step < self._leading else None
        busy, step_s = _is_running(state.work), state.pace.step_s.value or 0.0
        right = replicas_to_fetch_from(self._lineages(stage), self._me, live) if self._config.is_exact(own.step) else ()
        own_stage = OwnStage(own, quota, step_s, self._leaving, busy, state.slice_due, behind_since, right)
        action, state.reason = next_action.next_action(now, own_stage, others, self._config)
        match action.what:
            case "slice round":
                state.slice_due = None
                state.slice_task = self._start(self._slice_rounds(stage, action.number))
                self._decide_and_begin(stage)
            case "follow":
                state.work = self._start(self._held.catch_up(stage, action.number))
            case "step":  # the device looks for due steps after each of its jobs
                state.work = self._start(self._held.catch_up(stage, own.step))
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
            p.stage: Counts(p.step, p.part, p.tokens_in_part, p.tokens_counted, p.lineage)
            for p in self._held.progress()
        }

    def _lineages(self, stage: int) -> Mapping[int, int]:
        """Returns the lineages of a stage after its last steps, by step."""
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

    # --- acting

    async def _slice_rounds(self, stage: int, number: int) -> None:
        """Takes part in slice round `number`, and then at once in a later one for which others may be waiting."""
        while True:
            await self._slice_round(stage, number)
            due = self._held.step_of(stage) // self._averaging.every
            newest = max(due, self.owner.newest(stage, "weights"))
            if newest <= number:
                return
            number = newest

    async def _slice_round(self, stage: int, number: int) -> None:
        """Averages slice `number` of the weights, weighted by the tokens since the last round, and takes it in.

        A newcomer's weight is 0. Parts that failed stay as they are; after a round without any it may cease to be one.
        """
        state = self._stages[stage]
        state.last_slice_round, blocks = number, state.slices.blocks(number)
        weight, state.tokens = self.weight(stage, state.tokens), 0
        values, _ = await self._held.snapshot_blocks(stage, blocks)
        result = await self.run_round(stage, "weights", number, values, weight)
        averaged = result.averaged_blocks()
        if len(averaged):
            delta, snapshot = (flat.view(-1, SLICE_BLOCK)[averaged].flatten() for flat in (result.answer, values))
            await self._held.apply_average(stage, blocks[averaged], delta, snapshot, self._averaging.rule)
        if not result.failed_parts:
            distances = result.distance, result.distance_others, result.members
            state.newcomer = state.newcomer.after_round(*distances, cover=state.slices.count)


def _is_running(task: asyncio.Task[None] | None) -> bool:
    """Returns whether a task was begun and has not ended."""
    return task is not None and not task.done()
