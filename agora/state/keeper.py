"""Keeps the state of this peer's stages: fills them at the start, writes checkpoints, gives copies to joining peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agora_protocol.errors import DiskError, NotMyStage, Unavailable
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import GetChunk, GetSketches, GetState

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import SyncChangeRule
from agora.core.tasks import run_in_thread
from agora.observe import events
from agora.observe.events import Report
from agora.state import rules
from agora.state.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import Layout, StageState
from agora.state.snapshot import SnapshotServer
from agora.state.state_fetch import StateFetch
from agora.swarm.peer_score import ReportViolation

FETCH_TIMEOUT_S: Final = 1800.0  # seconds that fetching one state may take
SOURCES_TIMEOUT_S: Final = (
    300.0  # seconds that a joiner without a checkpoint looks for new sources when all have failed
)
ANSWERS_TIMEOUT_S: Final = 10.0  # seconds that a joiner waits for all replicas to answer whether they have taken a step
# Seconds in which the last peer that offered a stage may come back, before it counts as lost.
LAST_HOLDER_TIMEOUT_S: Final = 120.0
RETRY_INTERVAL_S: Final = 2.0  # seconds between two attempts to find a source


class StageStates(Protocol):
    """Protocol: the stages of this peer's span; their states can be read and replaced while they train."""

    @property
    def span(self) -> Span:
        """The stages that this peer holds."""

    def layout(self, stage: int) -> Layout:
        """Returns the layout of a held stage's state, with the optimizer's moments."""

    def step_of(self, stage: int) -> int:
        """Returns how many optimizer steps a held stage has taken."""

    async def draw_initial_weights(self, stage: int) -> None:
        """Gives a held stage the weights with which the run began: until then, or a load_state, it has none."""

    async def load_state(self, state: StageState) -> None:
        """Replaces the weights, moments and step of `state`'s stage, and drops the stage's gradient sum.

        Running microbatches go on, and their gradients count for the new step. Raises ProtocolError for a state that
        cannot be loaded; nothing has changed then.
        """

    async def export_state(self, stage: int) -> StageState:
        """Returns a copy of the stage's weights and optimizer moments after its last step, all of the same step."""


# Takes a stage; returns, by peer, the number of optimizer steps that each peer holding it claims to have taken.
ClaimedSteps = Callable[[int], Mapping[PeerId, int]]


# Takes a stage and peers; asks these directly, and returns the optimizer steps of those that answered.
AskSteps = Callable[[int, Collection[PeerId]], Awaitable[Mapping[PeerId, int]]]


class StageHolders(NamedTuple):
    """How a StateKeeper learns which peers hold a stage and which step they have reached.

    The results of `serving` and `claimants` may include this peer.
    """

    me: PeerId  # this peer
    serving: ClaimedSteps  # takes a stage, returns peer -> claimed step of the peers that serve it
    claimants: ClaimedSteps  # like `serving`, with the peers that are joining and may give a checkpoint
    ask: AskSteps  # asks peers directly: what a peer has published may be older than its first step


class StateKeeper:
    """Fills the stages of one span with their state, writes the stages' checkpoints, gives copies to joining peers.

    To fill a stage is to give it its first state: a checkpoint, a copy from a replica, or the seed's weights. The owner
    calls `find_checkpoints`, then `fill_stages`, then `run` in a task that is cancelled at the end, and `on_stepped`
    after each step; `fetch` replaces the state of a stage that fell behind. `answer` may be called all the time: before
    a stage is filled, it gives the checkpoint that was found.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        stages: StageStates,
        holders: StageHolders,
        peer_caller: PeerCaller,
        report: Report,
        report_violation: ReportViolation,
        on_written: Callable[[int, int], None] = lambda stage, step: None,
        make_room: Callable[[int, int], None] = lambda stage, nbytes: None,
        live: LiveManifest | None = None,
    ) -> None:
        """folder: below it lie the checkpoints. on_written(stage, step): called after each checkpoint was written.

        make_room(stage, nbytes): called in a thread before one is written; raises DiskError when there is no room.
        live: the manifest in force at each step; None: the signed one at every step.
        """
        self._live_manifest = live or LiveManifest(manifest)
        self._make_room = make_room
        self._on_written = on_written
        self._run_id = manifest.run_id
        self._folder = folder
        self._stages = stages
        self._holders = holders
        self._peer_caller = peer_caller
        self._report = report
        self._report_violation = report_violation
        self._found_checkpoints: dict[int, Checkpoint] = {}
        self._filled_stages: set[int] = set()
        self._checkpoint_steps: dict[int, int] = {}  # of each stage, the step from which its next checkpoint is counted
        self._due_stages: set[int] = set()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._snapshots = SnapshotServer(
            self._read_state_to_give, lambda stage: stages.layout(stage).nbytes, self._step_to_give
        )

    # --- filling the stages

    async def find_checkpoints(self) -> tuple[int, ...]:
        """Finds, for each stage of the span, the newest intact checkpoint on this disk; loads nothing.

        Returns their steps in stage order, 0 for a stage without one. Reports damaged ones as CheckpointDamaged.
        """

        def find_newest(stage: int) -> Checkpoint | None:
            return newest_checkpoint(
                self._folder, self._run_id, stage, lambda error: self._report(events.CheckpointDamaged(str(error)))
            )

        stages = self._stages.span.stages
        newest = await run_in_thread(lambda: [find_newest(stage) for stage in stages])
        self._found_checkpoints = {checkpoint.stage: checkpoint for checkpoint in newest if checkpoint is not None}
        return tuple(checkpoint.step if checkpoint is not None else 0 for checkpoint in newest)

    async def fill_stages(self) -> str:
        """Loads or fetches each stage's state, or keeps its initial weights, as rules.choose_start decides.

        Returns in words where each state is from. Raises Unavailable for a stage without a checkpoint on this disk, if
        peers offer it and none gives it, or if its replicas do not answer whether they have taken a step. Raises
        CheckpointError when a checkpoint does not fit.
        """
        sources = [f"stage {stage}: {await self._fill_stage(stage)}" for stage in self._stages.span.stages]
        self._found_checkpoints.clear()
        return "; ".join(sources)

    async def _fill_stage(self, stage: int) -> str:
        checkpoint = self._found_checkpoints.get(stage)
        decision = rules.choose_start(checkpoint.step if checkpoint else None, self._offers(stage), rules.LAG_LIMIT)
        if decision.action == "keep initial weights":
            decision = await self._ask_whether_a_step_was_taken(stage, decision)
        if decision.action == "fetch":
            timeout_s = SOURCES_TIMEOUT_S if checkpoint is None else 0.0
            try:
                return await self.fetch(stage, decision.sources, decision.at_least, timeout_s)
            except Unavailable as error:
                if checkpoint is None and self._offers(stage):
                    raise
                decision = rules.choose_start(checkpoint.step if checkpoint else None, {}, rules.LAG_LIMIT)
                instead = "this peer's checkpoint is used" if checkpoint else "the stage keeps its initial weights"
                self._report(events.TaskFailed("fetch state", f"{error}; {instead}"))
        if checkpoint is not None and decision.action == "load":
            layout = self._stages.layout(stage)
            await self._stages.load_state(await run_in_thread(lambda: read_checkpoint(checkpoint, layout)))
            self._checkpoint_steps[stage] = checkpoint.step
        else:
            await self._stages.draw_initial_weights(stage)
        self._filled_stages.add(stage)
        return decision.reason

    async def _ask_whether_a_step_was_taken(self, stage: int, decision: rules.StartDecision) -> rules.StartDecision:
        # What peers publish may be older than their first step, and two replicas with other weights at step 0 would
        # never agree. So the seed's weights are kept only once a replica has said that it has taken no step.
        started_at, answers = loop_time(), dict[PeerId, int]()
        while silent := [p for p in self._holders.serving(stage) if p != self._holders.me and p not in answers]:
            answers |= await self._holders.ask(stage, silent)
            if any(answers.values()):
                bound = rules.plausibility_bound(answers.values(), rules.LAG_LIMIT)
                plausible = {peer: step for peer, step in answers.items() if step <= bound}
                return rules.choose_start(None, plausible, rules.LAG_LIMIT)
            waited_s = loop_time() - started_at
            if answers and waited_s > ANSWERS_TIMEOUT_S:
                break
            if waited_s > SOURCES_TIMEOUT_S:
                raise Unavailable(stage, [f"{', '.join(silent)} serve it and do not say whether a step was taken"])
            if not answers.keys() >= set(silent):
                await asyncio.sleep(RETRY_INTERVAL_S)
        return decision

    def _offers(self, stage: int) -> dict[PeerId, int]:
        bound = self._highest_plausible_step(stage)
        claimed = self._holders.claimants(stage)
        return {peer: step for peer, step in claimed.items() if peer != self._holders.me and step <= bound}

    def _highest_plausible_step(self, stage: int) -> float:
        serving = [step for peer, step in self._holders.serving(stage).items() if peer != self._holders.me]
        return rules.plausibility_bound(serving, rules.LAG_LIMIT)

    # --- fetching

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int, timeout_s: float = 0.0) -> str:
        """Fetches a stage's state from replicas and loads it; returns step, size and time in words.

        The stage then counts as filled, and its next checkpoint is due from the fetched step on. sources: the best
        first. at_least: the lowest step to accept; a higher one is used when most peers offer much later steps, see
        lowest_step_to_fetch. timeout_s: seconds for which a failed fetch is tried again, from the peers that offer the
        stage at that time. If it is not 0, and no peer offers the stage any more, the fetch goes on for
        LAST_HOLDER_TIMEOUT_S. Raises Unavailable after that, and ProtocolError for a fetched state that cannot be
        loaded.
        """
        started_at = loop_time()
        fetch = StateFetch(
            self._peer_caller,
            stage,
            self._stages.layout(stage),
            self._report_violation,
            SyncChangeRule.of_run(self._live_manifest),
            highest_plausible_step=lambda: self._highest_plausible_step(stage),
        )
        at_least = rules.lowest_step_to_fetch(at_least, self._offers(stage).values())
        state = await self._run_fetch(fetch, stage, sources, at_least, timeout_s)
        await self._stages.load_state(state)
        self._filled_stages.add(stage)
        self._checkpoint_steps[stage] = state.step
        seconds, size = loop_time() - started_at, state.layout.nbytes
        self._report(events.StateFetched(stage, state.step, size, seconds, fetch.schedule.refetched))
        if not fetch.is_compared:
            self._report(events.StateNotCompared(stage, state.step))
        compared = "" if fetch.is_compared else ", of one source: nothing was compared"
        return f"fetched step {state.step}, {size / 1e6:.1f} MB in {seconds:.1f} s{compared}"

    async def _run_fetch(
        self, fetch: StateFetch, stage: int, sources: Sequence[PeerId], at_least: int, timeout_s: float
    ) -> StageState:
        started_at = last_offered_at = loop_time()
        while True:
            try:
                return await fetch.run(sources, deadline=started_at + FETCH_TIMEOUT_S, at_least=at_least)
            except Unavailable as error:
                now, is_offered = loop_time(), bool(self._offers(stage))
                if sources or is_offered:
                    last_offered_at = now
                if now >= (
                    started_at + timeout_s if is_offered or not timeout_s else last_offered_at + LAST_HOLDER_TIMEOUT_S
                ):
                    raise
                self._report(events.TaskFailed("fetch state", f"{error}; it is tried again"))
            await asyncio.sleep(RETRY_INTERVAL_S)
            sources = rules.most_advanced_first(self._offers(stage))

    # --- giving copies to other peers

    @property
    def last_given_at(self) -> float | None:
        """When another peer was last given a part of a state, on the loop's clock; None if none ever was."""
        return self._snapshots.last_given_at

    async def answer(self, request: GetState | GetChunk | GetSketches, requester: PeerId) -> Reply:
        """Answers a peer that fetches this peer's state: with an index, of size 0 without a state, a chunk or sketches.

        Raises NotMyStage for a stage that is not held here, Busy when snapshots in use take all room, Refused for a
        chunk of a dropped snapshot and for a step far ahead, ProtocolError for a chunk that the snapshot does not have.
        """
        if isinstance(request, GetChunk):
            return await self._snapshots.get_chunk(request)
        if isinstance(request, GetSketches):
            return await self._snapshots.get_sketches(request, requester)
        if request.stage not in self._stages.span:
            span = self._stages.span
            raise NotMyStage(f"this peer holds stages {span}, not {request.stage}; read the directory again")
        return await self._snapshots.get_state(request, requester)

    def _step_to_give(self, stage: int) -> int:
        if stage in self._filled_stages:
            return self._stages.step_of(stage)
        checkpoint = self._found_checkpoints.get(stage)
        return checkpoint.step if checkpoint else 0

    async def _read_state_to_give(self, stage: int) -> StageState | None:
        if stage in self._filled_stages:
            return await self._stages.export_state(stage)
        checkpoint = self._found_checkpoints.get(stage)
        if checkpoint is None:
            return None
        layout = self._stages.layout(stage)
        return await run_in_thread(lambda: read_checkpoint(checkpoint, layout))

    # --- writing checkpoints

    def on_stepped(self, stage: int, step: int) -> None:
        """If a checkpoint is due at `step`, by the manifest or as the run's last, makes `run` write it soon.

        It does not wait. Call it after each step. The checkpoint is of the step that the stage has reached when `run`
        writes it.
        """
        live, last = self._live_manifest, self._checkpoint_steps.get(stage, 0)
        if rules.is_checkpoint_due(step, live.at(step).checkpoint.every, last, live.total_steps):
            self._checkpoint_steps[stage] = step
            self._due_stages.add(stage)
            self._wake.set()

    async def run(self) -> None:
        """Writes the checkpoints that `on_stepped` finds due, until cancelled; drops idle snapshots when it wakes."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._snapshots.drop_idle()
            while self._due_stages:
                await self._write(self._due_stages.pop())

    async def write_checkpoints(self) -> None:
        """Writes a checkpoint of every filled stage now, due or not. A DiskError is reported, not raised."""
        for stage in sorted(self._filled_stages):
            await self._write(stage)

    async def _write(self, stage: int) -> None:
        folder, run, started_at = self._folder, self._run_id, loop_time()
        try:
            async with self._writing:
                state = await self._stages.export_state(stage)
                await run_in_thread(lambda: self._make_room(stage, state.layout.nbytes))
                keep = self._live_manifest.at(state.step).checkpoint.keep
                end = self._live_manifest.total_steps
                await run_in_thread(lambda: write_checkpoint(folder, run, state, keep=keep, end_step=end))
        except DiskError as error:
            self._report(events.DiskTrouble(str(self._folder), str(error)))
            return
        self._report(events.CheckpointWritten(stage, state.step, state.layout.nbytes, loop_time() - started_at))
        self._on_written(stage, state.step)
