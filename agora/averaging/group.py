"""Keeps this peer's stages together with their replicas elsewhere: carries out what `next_action` decides.

Knows: step gossip, rounds, stages (through ReplicatedStages). Must not know: networks, optimizers, files, the view.
docs/averaging.md tells what the rounds are for, and what follows when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId, Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.averaging import agreement, next_action
from agora.averaging.gossip import INTERVAL_S, SYNCHRONOUS_INTERVAL_S, StepGossip
from agora.averaging.kinds import Part, RoundConfig
from agora.averaging.next_action import ActionConfig, OtherReplicas, OwnStage
from agora.averaging.owner import Owner
from agora.averaging.partition import Slices, cut_into_parts
from agora.averaging.plausibility import Newcomer
from agora.averaging.rounds import Round, RoundResult
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import events
from agora.stepping import StepPolicy
from agora.swarm.conduct import Offence, ReportOffence

MOST_ROUNDS_APART: Final = 2
"""An owner refuses parts of a round that is farther from its own."""
FETCH_AGAIN_S: Final = 1.0
FETCH_TRIES: Final = 3
"""After so many failed fetches of a step that nobody has, the least peer id takes it with the parts that it has."""
LOOK_S: Final = 5.0
"""Seconds between two looks at how far the other stages of a synchronous run are."""


class ReplicatedStages(Protocol):
    """The stages of this peer's span (train.Compute). Each method raises NotMyStage for a stage that is not held.

    step_of: returns the optimizer steps taken. publish_policy: replaces what decides when the stage steps by itself.
    """

    @property
    def span(self) -> Span: ...
    def layout(self, stage: int) -> Any:
        """Returns a description of the stage's flat weights; `numel` is their number of elements."""

    def progress(self) -> Sequence[Any]:
        """Returns for each stage its number `stage`, `step`, and `tokens_in_step`."""

    def step_of(self, stage: int) -> int: ...
    def publish_policy(self, stage: int, policy: StepPolicy) -> None: ...
    async def snapshot_blocks(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, int]:
        """Returns a flat copy of the weights in `blocks`, and the number of steps they have taken."""

    async def apply_average(self, stage: int, blocks: NDArray[Any], delta: Tensor, snapshot: Tensor, rule: Any) -> None:
        """Changes the weights in `blocks` by an average, which is snapshot + delta, as `rule` says."""

    async def catch_up(self, stage: int, step: int) -> None:
        """Follows the others to `step`: one behind, it steps along its sum; else it drops that. Takes a due step."""

    async def take_mean_gradient(self, stage: int) -> Any:
        """Returns this replica's share of the next step, a train.MeanGradient; only `step_with_gradient` takes it."""

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes step `number` along the mean gradient over all replicas' `tokens`; with 0 tokens it is only counted."""


class StateFetcher(Protocol):
    """Fetches states from other replicas (state.StateKeeper). fetched: the stages whose state came from others."""

    fetched: set[int]

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by one of at least `at_least` steps. Raises Unavailable when no source has one."""


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
        interval_s = SYNCHRONOUS_INTERVAL_S if config.synchronous else INTERVAL_S
        self.gossip = StepGossip(
            me, stages.span, caller, listing.listed, self._counts, self._decide_and_begin, interval_s=interval_s
        )
        self._stages: dict[int, _StageTasks] = {}
        for stage in stages.span.stages:
            slices = Slices(stages.layout(stage).numel, averaging.fraction, signed.manifest.seed)
            newcomer = Newcomer(counts=config.synchronous or stage not in state.fetched)
            self._stages[stage] = _StageTasks(slices, newcomer)
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
        step, tokens = self._counts()[stage]
        others = OtherReplicas(self.gossip.known(stage), self.gossip.others(stage))
        _, live = next_action.counting_replicas(loop_time(), step, others, self._config)
        return max(0, self._config.target_tokens - tokens - agreement.count_tokens(live, step))

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

    def unreachable(self, stage: int, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` that are silent, or to which a call failed after their last report."""
        return agreement.unreachable_replicas(self.gossip.known(stage), peers, loop_time())

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

    # --- deciding

    def stepped(self, stage: int, step: int, tokens: int) -> None:
        """Gossips that the stage has taken its `step`-th step; after every `every`-th one a slice round begins.

        tokens: this replica's in the step, added to its weight in that round. None begins while another runs.
        """
        state = self._stages[stage]
        state.tokens = min(state.tokens + tokens, int(self.owner.config.max_weight))
        number, rest = divmod(step, self._averaging.every)
        if rest == 0 and number > state.last_slice_round and not _is_running(state.slice_task):
            state.slice_due = number
        self.gossip.tick()
        state.slice_due = None

    def _decide_and_begin(self, stage: int) -> None:
        """Publishes a new StepPolicy for the device thread, and starts the task for what `next_action` decides."""
        now, state = loop_time(), self._stages[stage]
        step, tokens = self._counts()[stage]
        others = OtherReplicas(self.gossip.known(stage), self.gossip.others(stage), self._leading)
        replicas, live = next_action.counting_replicas(now, step, others, self._config)
        target = self._config.target_tokens
        to_go, alone = agreement.tokens_to_go(live, step, target), not replicas
        self._held.publish_policy(stage, StepPolicy(target, self._config.exact_steps, step, to_go, alone))
        behind_since = state.behind[1] if state.behind and state.behind[0] == step < self._leading else None
        own = OwnStage(step, tokens, self._leaving, _is_running(state.work), state.slice_due, behind_since)
        action, state.reason = next_action.next_action(now, own, others, self._config)
        match action.what:
            case "slice round":
                state.slice_due = None
                state.slice_task = self._start(self._slice_rounds(stage, action.number))
                self._decide_and_begin(stage)
            case "follow":
                state.work = self._start(self._held.catch_up(stage, action.number))
            case "step":  # the device looks for due steps after each of its jobs
                state.work = self._start(self._held.catch_up(stage, step))
            case "step together":
                state.work = self._start(self._step_together(stage, action.number))
            case "recover":
                self._report(events.StageFellBehind(stage, step, action.number))
                state.work = self._start(self._recover(stage, action.at_least, action.number))

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

    def _counts(self) -> Mapping[int, tuple[int, int]]:
        """Returns for each stage the steps taken and the tokens counted since."""
        return {progress.stage: (progress.step, progress.tokens_in_step) for progress in self._held.progress()}

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
        weight, state.tokens = float(state.tokens if state.newcomer.counts else 0), 0
        values, _ = await self._held.snapshot_blocks(stage, blocks)
        result = await self._run_round(stage, "weights", number, values, weight)
        averaged = result.averaged_blocks()
        if len(averaged):
            delta, snapshot = (flat.view(-1, SLICE_BLOCK)[averaged].flatten() for flat in (result.answer, values))
            await self._held.apply_average(stage, blocks[averaged], delta, snapshot, self._averaging.rule)
        if not result.failed_parts:
            distances = result.distance, result.distance_others, result.members
            state.newcomer = state.newcomer.after_round(*distances, cover=state.slices.count)

    async def _step_together(self, stage: int, step: int) -> None:
        """Takes exact step `step` along the mean gradient of a round; a newcomer's gradient has weight 0 in it.

        With failed parts a synchronous stage fetches the state of a replica that has taken the step. If none has, and
        in asynchronous runs, its own gradient stands for them. The latter only count a step whose gradient is unusable.
        """
        share = await self._held.take_mean_gradient(stage)
        if share.step != step:
            return
        weight = float(share.tokens if self._stages[stage].newcomer.counts else 0)
        result = await self._run_round(stage, "gradient", step, share.values, weight)
        if result.failed_parts and self._config.synchronous and await self._fetch_step(stage, step + 1):
            return
        tokens = max(share.tokens, round(result.weight))
        try:
            await self._held.step_with_gradient(stage, step, result.answer, tokens)
        except ProtocolError:
            if self._config.synchronous:
                raise
            # The step counts, but changes nothing.
            await self._held.step_with_gradient(stage, step, share.values, tokens=0)

    async def _run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round, with those who are members now, which ends at most `round_s` from now."""
        deadline = loop_time() + self._averaging.round_s
        members = self.members(stage, what)
        return await Round(self.owner, self._report, stage, what, number, weight, members, deadline).run(values)

    async def _fetch_step(self, stage: int, at_least: int) -> bool:
        """Fetches the state of a replica that has taken `at_least` steps, trying again; returns whether one gave it.

        False when all others are silent or have left, or when none has taken the step after FETCH_TRIES and this peer
        has the least id: then it takes the step, and the others fetch it.
        """
        tries = 0
        while others := sorted(self.members(stage, "gradient").keys() - {self._me}):
            tries += 1
            try:
                await self._state.fetch(stage, others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if self._me < others[0] and tries >= FETCH_TRIES:
                return False
            await asyncio.sleep(FETCH_AGAIN_S)
        return False

    async def _recover(self, stage: int, at_least: int, reached: int) -> None:
        """Fetches the others' state of `at_least` steps, which in an asynchronous run makes this peer a newcomer again.

        If nobody gives it, a synchronous stage waits a second; an asynchronous one goes on at `reached` as it is.
        """
        try:
            await self._state.fetch(stage, sorted(self.gossip.others(stage)), at_least)
            self._stages[stage].newcomer = Newcomer(counts=self._config.synchronous)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            if self._config.synchronous:
                await asyncio.sleep(FETCH_AGAIN_S)
            else:
                await self._held.catch_up(stage, reached)


def _is_running(task: asyncio.Task[None] | None) -> bool:
    """Returns whether a task was begun and has not ended."""
    return task is not None and not task.done()
