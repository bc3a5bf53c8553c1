"""Keeps the state of this peer's stages: fills them at the start, writes checkpoints, gives copies to joining peers.

Knows: the rest of this package, and as interfaces the stages and their holders: the daemon passes in train.Compute and
swarm.View. Must not know: how training goes on, who carries calls, or what a checkpoint's files look like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agora_protocol.errors import DiskError, NotMyStage, Unavailable
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import GetChunk, GetState

from agora.calls import Caller, Reply
from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.state import rules
from agora.state.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import Layout, StageState
from agora.state.snapshot import Snapshots
from agora.state.transfer import StateFetch
from agora.swarm.conduct import ReportOffence
from agora.threads import run_in_thread

FETCH_S: Final = 1800.0  # seconds that fetching one state may take
PATIENCE_S: Final = 300.0  # seconds that a joining peer without a checkpoint looks for new sources when all have failed
ANSWERS_S: Final = 10.0  # seconds that a joiner waits for all replicas to say whether they have taken a step
RETRY_S: Final = 2.0  # seconds until sources are looked for again


class KeptStages(Protocol):
    """Interface of the stages of this peer's span, whose state can be read and replaced while they train."""

    @property
    def span(self) -> Span: ...
    def layout(self, stage: int) -> Layout: ...
    async def load_state(self, state: StageState) -> None:
        """Replaces the weights, moments and step of `state`'s stage, and drops its gradient sum.

        Running microbatches go on: their gradients count for the new step. Raises ProtocolError for a state that cannot
        be loaded; nothing has changed then.
        """

    async def export_state(self, stage: int) -> StageState:
        """Returns a copy of the stage's weights and moments after its last step, all of the same step."""


ClaimedSteps = Callable[[int], Mapping[PeerId, int]]
"""Takes a stage; returns, by peer, the number of optimizer steps that each peer holding it claims to have taken."""


class AskSteps(Protocol):
    """Interface: asks peers directly how many optimizer steps they have taken at a stage.

    Returns the steps by peer, of those that answered.
    """

    async def __call__(self, stage: int, peers: Collection[PeerId]) -> Mapping[PeerId, int]: ...


async def ask_nobody(stage: int, peers: Collection[PeerId]) -> Mapping[PeerId, int]:
    """Returns 0 steps for every peer and asks none of them: an AskSteps for callers that trust the directory."""
    return dict.fromkeys(peers, 0)


class StageHolders(NamedTuple):
    """How a StateKeeper learns which peers hold a stage and which step they have reached.

    me: this peer. serving: returns the claimed steps of the peers that serve the stage. claimants: also of those that
    are joining and may give a checkpoint. Both may include this peer. ask: asks peers directly, since what they have
    published may be older than their first step.
    """

    me: PeerId
    serving: ClaimedSteps
    claimants: ClaimedSteps
    ask: AskSteps = ask_nobody


class StateKeeper:
    """Fills the stages of one span with their state, writes their checkpoints, and gives copies to joining peers.

    The owner calls `find_checkpoints`, then `fill_stages`, then `run` in a task that it cancels at the end. `answer`
    may be called all the time: before a stage is filled, it gives the checkpoint that was found.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        stages: KeptStages,
        holders: StageHolders,
        caller: Caller,
        report: Report,
        report_offence: ReportOffence,
        on_written: Callable[[int, int], None] = lambda stage, step: None,
    ) -> None:
        """folder: below it lie the checkpoints. on_written(stage, step): called after each checkpoint was written."""
        self.make_room: Callable[[int, int], None] = lambda _stage, _nbytes: None
        """The owner may set it: it is called in a thread with stage and bytes before a checkpoint is written, and
        raises DiskError when there is no room for it."""
        self._on_written = on_written
        self._run_id = manifest.run_id
        self._manifest = manifest
        self._folder = folder
        self._stages = stages
        self._holders = holders
        self._caller = caller
        self._report = report
        self._report_offence = report_offence
        self._found_checkpoints: dict[int, Checkpoint] = {}
        self._filled_stages: set[int] = set()
        self._checkpoint_steps: dict[int, int] = {}  # the step of each stage's last checkpoint
        self._due_stages: set[int] = set()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._snapshots = Snapshots(self._export, lambda stage: stages.layout(stage).nbytes)

    # --- filling the stages

    async def find_checkpoints(self) -> tuple[int, ...]:
        """Finds and remembers each stage's newest intact checkpoint on this disk; reports damaged ones.

        Returns their steps in stage order, 0 for none.
        """

        def find_newest(stage: int) -> Checkpoint | None:
            """Returns the newest intact checkpoint of the stage or None, and reports the damaged ones that it skips."""
            return newest_checkpoint(
                self._folder, self._run_id, stage, lambda error: self._report(events.CheckpointDamaged(str(error)))
            )

        stages = self._stages.span.stages
        newest = await run_in_thread(lambda: [find_newest(stage) for stage in stages])
        self._found_checkpoints = {checkpoint.stage: checkpoint for checkpoint in newest if checkpoint is not None}
        return tuple(checkpoint.step if checkpoint is not None else 0 for checkpoint in newest)

    async def fill_stages(self) -> str:
        """Loads or fetches the state of each stage as rules.choose_start decides; returns in words where each is from.

        Raises Unavailable when a stage without an own checkpoint must be fetched and no peer gives it.
        """
        sources = [f"stage {stage}: {await self._fill_stage(stage)}" for stage in self._stages.span.stages]
        self._found_checkpoints.clear()
        return "; ".join(sources)

    async def _fill_stage(self, stage: int) -> str:
        """Fills one stage as rules.choose_start decides; if fetching fails, loads this peer's checkpoint.

        Reports that failure. Returns where its state is from, in words. Raises Unavailable as `fill_stages` does.
        """
        own = self._found_checkpoints.get(stage)
        decision = rules.choose_start(own.step if own else None, self._offers(stage), rules.LAG_LIMIT)
        if decision.action == "keep initial weights":
            decision = await self._ask_whether_a_step_was_taken(stage, decision)
        if decision.action == "fetch":
            patience_s = PATIENCE_S if own is None else 0.0
            try:
                return await self.fetch(stage, decision.sources, decision.at_least, patience_s)
            except Unavailable as error:
                if own is None:
                    raise
                decision = rules.choose_start(own.step, {}, rules.LAG_LIMIT)
                self._report(events.TaskFailed("fetch state", f"{error}; this peer's checkpoint is used"))
        if own is not None and decision.action == "load":
            layout = self._stages.layout(stage)
            await self._stages.load_state(await run_in_thread(lambda: read_checkpoint(own, layout)))
            self._checkpoint_steps[stage] = own.step
        self._filled_stages.add(stage)
        return decision.reason

    async def _ask_whether_a_step_was_taken(self, stage: int, decision: rules.StartDecision) -> rules.StartDecision:
        """Asks the replicas that serve the stage whether they have taken a step; returns what to do then.

        decision: to keep the seed's weights; it is returned if all that answer have taken none. Waits until each has
        answered or stopped serving, but at most ANSWERS_S once some have answered. While none has answered it waits
        PATIENCE_S and then raises Unavailable: they may have taken steps, and then the seed's weights would be wrong.
        """
        started_at, answers = loop_time(), dict[PeerId, int]()
        while silent := [p for p in self._holders.serving(stage) if p != self._holders.me and p not in answers]:
            answers |= await self._holders.ask(stage, silent)
            if any(answers.values()):
                bound = rules.plausibility_bound(answers.values(), rules.LAG_LIMIT)
                plausible = {peer: step for peer, step in answers.items() if step <= bound}
                return rules.choose_start(None, plausible, rules.LAG_LIMIT)
            waited_s = loop_time() - started_at
            if answers and waited_s > ANSWERS_S:
                break
            if waited_s > PATIENCE_S:
                raise Unavailable(stage, [f"{', '.join(silent)} serve it and do not say whether a step was taken"])
            if not answers.keys() >= set(silent):
                await asyncio.sleep(RETRY_S)
        return decision

    def _offers(self, stage: int) -> dict[PeerId, int]:
        """Returns the claimed steps, by peer, of the other peers that serve the stage or join with a checkpoint of it.

        Peers whose claimed step is implausibly high are left out.
        """
        bound = self._highest_plausible_step(stage)
        claimed = self._holders.claimants(stage)
        return {peer: step for peer, step in claimed.items() if peer != self._holders.me and step <= bound}

    def _highest_plausible_step(self, stage: int) -> float:
        """Returns the highest step that another replica can plausibly claim, by the claims of those serving the stage.

        Infinite while fewer than two others serve it, see plausibility_bound.
        """
        serving = [step for peer, step in self._holders.serving(stage).items() if peer != self._holders.me]
        return rules.plausibility_bound(serving, rules.LAG_LIMIT)

    # --- fetching

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int, patience_s: float = 0.0) -> str:
        """Fetches a stage's state from replicas of one lineage, loads it, and reports StateFetched.

        Returns a phrase about the transfer.
        at_least: the lowest step to accept; a higher one is used when most peers offer much later steps, see
        lowest_step_to_fetch. Raises Unavailable when all sources fail, `patience_s` or more after the beginning.
        """
        started_at = loop_time()
        fetch = StateFetch(
            self._caller,
            stage,
            self._stages.layout(stage),
            self._report_offence,
            highest_plausible_step=lambda: self._highest_plausible_step(stage),
        )
        at_least = rules.lowest_step_to_fetch(at_least, self._offers(stage).values())
        state = await self._run_fetch(fetch, stage, sources, at_least, patience_s)
        await self._stages.load_state(state)
        self._filled_stages.add(stage)
        self._checkpoint_steps[stage] = state.step
        seconds, size = loop_time() - started_at, state.layout.nbytes
        self._report(events.StateFetched(stage, state.step, size, seconds, fetch.schedule.refetched))
        return f"fetched step {state.step}, {size / 1e6:.1f} MB in {seconds:.1f} s"

    async def _run_fetch(
        self, fetch: StateFetch, stage: int, sources: Sequence[PeerId], at_least: int, patience_s: float
    ) -> StageState:
        """Runs `fetch` and returns the state.

        When all sources fail, reports it, waits RETRY_S and tries the peers known by then.
        Raises Unavailable when a run fails later than `patience_s` after the first began.
        """
        started_at = loop_time()
        while True:
            try:
                return await fetch.run(sources, deadline=started_at + FETCH_S, at_least=at_least)
            except Unavailable as error:
                if loop_time() >= started_at + patience_s:
                    raise
                self._report(events.TaskFailed("fetch state", f"{error}; it is tried again"))
            await asyncio.sleep(RETRY_S)
            sources = rules.most_advanced_first(self._offers(stage)) or sources

    # --- giving copies to other peers

    async def answer(self, request: GetState | GetChunk) -> Reply:
        """Returns the answer to a peer that fetches this peer's state: a snapshot's index, or one chunk.

        Raises NotMyStage for a stage that is not held here, Busy when snapshots in use take all room, Refused for a
        chunk of a dropped snapshot, ProtocolError for a chunk that the snapshot does not have.
        """
        if isinstance(request, GetChunk):
            return await self._snapshots.get_chunk(request)
        if request.stage not in self._stages.span:
            span = self._stages.span
            raise NotMyStage(f"this peer holds stages {span}, not {request.stage}; read the directory again")
        return await self._snapshots.get_state(request)

    async def _export(self, stage: int) -> StageState | None:
        """Returns the state to give to others: a copy of the stage, or before it is filled its checkpoint.

        None if the stage is not filled and had no checkpoint.
        """
        if stage in self._filled_stages:
            return await self._stages.export_state(stage)
        own = self._found_checkpoints.get(stage)
        if own is None:
            return None
        layout = self._stages.layout(stage)
        return await run_in_thread(lambda: read_checkpoint(own, layout))

    # --- writing checkpoints

    def on_stepped(self, stage: int, step: int) -> None:
        """Called after each step of a stage: if a checkpoint is due at `step`, wakes `run`, which writes it."""
        if rules.is_checkpoint_due(step, self._manifest.checkpoint.every, self._checkpoint_steps.get(stage, 0)):
            self._checkpoint_steps[stage] = step
            self._due_stages.add(stage)
            self._wake.set()

    async def run(self) -> None:
        """Writes the checkpoints that `on_stepped` finds due until cancelled; drops idle snapshots before each."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._snapshots.drop_idle()
            while self._due_stages:
                await self._write(self._due_stages.pop())

    async def write_checkpoints(self) -> None:
        """Writes a checkpoint of every filled stage now, due or not; called when this peer leaves."""
        for stage in self._filled_stages:
            await self._write(stage)

    async def _write(self, stage: int) -> None:
        """Writes a checkpoint of the stage as it is now, after any write that is running; removes old ones.

        Reports CheckpointWritten and calls on_written, or reports a DiskError as DiskTrouble.
        """
        keep, started_at = self._manifest.checkpoint.keep, loop_time()
        try:
            async with self._writing:
                state = await self._stages.export_state(stage)
                await run_in_thread(lambda: self.make_room(stage, state.layout.nbytes))
                await run_in_thread(lambda: write_checkpoint(self._folder, self._run_id, state, keep=keep))
        except DiskError as error:
            self._report(events.DiskTrouble(str(self._folder), str(error)))
            return
        self._report(events.CheckpointWritten(stage, state.step, state.layout.nbytes, loop_time() - started_at))
        self._on_written(stage, state.step)
