"""What lasts of this peer's training: where its stages start from, checkpoints on the way, copies for those who join.

Knows: the state room, the compute, the view, the directory. Must not know: how training goes on, or what files look
like.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agora_protocol.errors import AgoraError, Busy, DiskError, NotMyStage, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.messages import GetChunk, GetSlice, GetState
from agora_protocol.records import Cut

from agora.averaging.slices import Slices
from agora.calls import Caller
from agora.node.threads import run_in_thread
from agora.observe import events
from agora.observe.events import Report
from agora.state.checkpoint import Checkpoint, CheckpointError, newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import ELEMENT_BYTES, Flat, StageState
from agora.state.missed import chunk_blocks, fetch_slices, give_slice
from agora.state.rules import checkpoint_due, choose_start, choose_writer, cut_step, missed_rounds, most_believed
from agora.state.snapshot import Given, Snapshots
from agora.state.transfer import StateFetch, TransferProgress, TransferTerms
from agora.swarm.membership import Membership
from agora.train.compute import Compute

FETCH_S = 1800.0
SLICES_S = 120.0
PATIENCE_S, AGAIN_S = 300.0, 2.0
"""A newcomer whose sources are all gone keeps what it has, and asks again."""
CUT_LIFETIME_S = 600.0
RETRY_MS = 500


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """Whose state, of which run, and where its checkpoints are."""

    me: PeerId
    incarnation: int
    run: RunId
    manifest: Manifest
    folder: Path


class Keeper:
    """One for each daemon. `find` looks at the disk, `start` fills the stages; then `run`, told of each step."""

    def __init__(
        self,
        config: KeeperConfig,
        compute: Compute,
        membership: Membership,
        caller: Caller,
        report: Report,
        *,
        publish: Callable[[Cut, float], Awaitable[object]],
        strike: Callable[[PeerId, ProtocolError], None],
    ) -> None:
        self._config = config
        self._compute = compute
        self._membership = membership
        self._caller = caller
        self._report = report
        self._publish = publish
        self._strike = strike
        self._found: dict[int, Checkpoint] = {}
        self._started: set[int] = set()
        self._doubted: set[int] = set()
        self._last: dict[int, int] = {}
        self._due: set[int] = set()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._snapshots = Snapshots(self._export, asyncio.get_running_loop().time)
        self._slices = {stage: self._slices_of(stage) for stage in compute.span.stages}
        self.fetched_bytes = 0
        self.fetched: set[int] = set()

    @property
    def span(self) -> Span:
        """The stages kept."""
        return self._compute.span

    def _slices_of(self, stage: int) -> Slices:
        manifest = self._config.manifest
        return Slices(self._compute.layout(stage).numel, manifest.averaging.fraction, manifest.seed)

    # --- starting

    async def find(self) -> tuple[int, ...]:
        """Looks for this peer's own checkpoints; the step of each stage of the span, 0 where there is none."""
        config = self._config

        def look() -> dict[int, Checkpoint]:
            found = {}
            for stage in self.span.stages:
                checkpoint = newest_checkpoint(config.folder, config.run, stage, self._damaged)
                if checkpoint is not None:
                    found[stage] = checkpoint
            return found

        self._found = await run_in_thread(look)
        return tuple(self._found[stage].step if stage in self._found else 0 for stage in self.span.stages)

    def _damaged(self, error: CheckpointError) -> None:
        self._report(events.CheckpointDamaged(str(error)))

    async def start(self) -> str:
        """Fills every stage from the newest state there is; says in words from where."""
        said = [f"stage {stage}: {await self._start_stage(stage)}" for stage in self.span.stages]
        self._found.clear()
        return "; ".join(said)

    async def _start_stage(self, stage: int) -> str:
        own = self._found.get(stage)
        choice = choose_start(own.step if own else None, self._offers(stage), max_lag=self._max_lag)
        if choice.kind == "peers":
            try:
                return await self.fetch(stage, choice.sources, choice.step, PATIENCE_S if own is None else 0.0)
            except Unavailable as error:
                if own is None:
                    raise
                choice = choose_start(own.step, {}, max_lag=self._max_lag)
                self._report(events.TaskFailed("fetch state", f"{error}; the own checkpoint is used"))
        if own is not None and choice.kind == "own":
            await self._load_own(own)
        self._started.add(stage)
        return choice.reason

    async def _load_own(self, own: Checkpoint) -> None:
        layout = self._compute.layout(own.stage)
        await self._compute.load_state(await run_in_thread(lambda: read_checkpoint(own, layout)))
        self._last[own.stage] = own.step

    def _offers(self, stage: int) -> Mapping[PeerId, int]:
        """How far the others are that hold this stage, or have a checkpoint of it and are joining as well; without
        those that cannot be where they say.
        """
        view, most = self._membership.view, self._most_believed(stage)
        said = {p.peer: p.step_of(stage) for p in view.claimants(stage) if p.peer != self._config.me}
        return {peer: step for peer, step in said.items() if step <= most}

    def _most_believed(self, stage: int) -> float:
        serving = [p.step_of(stage) for p in self._membership.view.replicas(stage) if p.peer != self._config.me]
        return most_believed(serving, self._max_lag)

    @property
    def _max_lag(self) -> int:
        """Steps behind the newest at which a state is not worth fetching: two covers of the averaging."""
        averaging = self._config.manifest.averaging
        return max(100, round(2 * averaging.every / averaging.fraction))

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int, patience_s: float = 0.0) -> str:
        """Fetches a stage's state from replicas, and then what they averaged meanwhile. Raises Unavailable, when for
        `patience_s` nobody could go on with it.

        In synchronous runs the state is left as it came: only as such is it exact.
        """
        began = asyncio.get_running_loop().time()
        seen = TransferProgress(0, 0, 0, 0)

        def progress(now: TransferProgress) -> None:
            nonlocal seen
            self.fetched_bytes += now.bytes_here - seen.bytes_here
            seen = now

        numel = self._compute.layout(stage).numel
        exact = self._config.manifest.schedule.kind == "synchronous"
        terms = TransferTerms(max_lag=0) if exact else TransferTerms()
        most = partial(self._most_believed, stage)
        fetch = StateFetch(self._caller, stage, numel, terms=terms, most=most, progress=progress, lied=self._strike)
        usual = statistics.median_low(self._offers(stage).values() or [0])
        at_least = max(at_least, usual - self._config.manifest.averaging.every)
        state = await self._arrived(fetch, stage, sources, at_least, patience_s)
        while exact and state.step < fetch.newest:  # chunks of an earlier step, whose source went away
            state = await self._arrived(fetch, stage, sources, fetch.newest, patience_s)
        await self._compute.load_state(state)
        self._started.add(stage)
        self.trust(stage)
        self._last[stage] = state.step
        self.fetched.add(stage)
        missed = 0 if exact else await self._fetch_missed(stage, state.step, sources)
        seconds = asyncio.get_running_loop().time() - began
        size = ELEMENT_BYTES * state.numel
        self._report(events.StateFetched(stage, state.step, size, seconds, seen.fetched_again))
        return f"fetched step {state.step}, {size / 1e6:.1f} MB in {seconds:.1f} s, and {missed} slices averaged since"

    async def _arrived(
        self, fetch: StateFetch, stage: int, sources: Sequence[PeerId], at_least: int, patience_s: float
    ) -> StageState:
        """What `fetch` brings; where all sources fail, it goes on from those that are there by then."""
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await fetch.run(sources, deadline=began + FETCH_S, at_least=at_least)
            except Unavailable as error:
                if asyncio.get_running_loop().time() >= began + patience_s:
                    raise
                self._report(events.TaskFailed("fetch state", f"{error}; it goes on when somebody has it"))
            await asyncio.sleep(AGAIN_S)
            offers = self._offers(stage)
            sources = sorted(offers, key=lambda peer: (-offers[peer], peer)) or sources

    async def _fetch_missed(self, stage: int, step: int, sources: Sequence[PeerId]) -> int:
        """The slices that the others have averaged since `step`, as one of them has them now; how many came."""
        newest = max(self._offers(stage).values(), default=step)
        slices = self._slices[stage]
        rounds = missed_rounds(step, newest, self._config.manifest.averaging.every, slices.count)
        sizes = {number: slices.numel_of(number) for number in rounds}
        deadline = asyncio.get_running_loop().time() + SLICES_S
        left = await fetch_slices(
            self._caller, stage, sources, sizes, lambda *it: self._put(stage, *it), deadline=deadline, lied=self._strike
        )
        await self._compute.catch_up(stage, newest)
        return len(sizes) - len(left)

    async def _put(self, stage: int, number: int, values: Flat, step: int) -> None:
        await self._compute.replace_blocks(stage, self._slices[stage].blocks(number), values)

    # --- giving

    def doubt(self, stage: int) -> None:
        """Gives no state of the stage from now on, until it is fetched from somebody else or trusted again."""
        self._doubted.add(stage)
        self._snapshots.forget(stage)

    def trust(self, stage: int) -> None:
        """Gives the stage's state again, as it is now."""
        self._doubted.discard(stage)
        self._snapshots.forget(stage)

    async def give(self, request: GetState | GetChunk | GetSlice) -> Given:
        """Answers a joiner. Raises Busy while this peer has nothing yet, NotMyStage, Refused, ProtocolError."""
        if isinstance(request, GetChunk):
            return await self._snapshots.get_chunk(request)
        if request.stage not in self.span:
            raise NotMyStage(f"this peer holds stages {self.span}, not {request.stage}; read the directory again")
        self._refuse_doubted(request.stage)
        if isinstance(request, GetState):
            given = await self._snapshots.get_state(request)
            self._refuse_doubted(request.stage)  # the copy may have waited behind the step that is doubted
            return given
        if request.stage not in self._started:
            raise Busy("this peer is still joining; ask another", RETRY_MS)
        blocks = chunk_blocks(self._slices[request.stage].blocks(request.round), request.chunk)
        values, step = await self._compute.snapshot_blocks(request.stage, blocks)
        return give_slice(values.numpy(), step)

    def _refuse_doubted(self, stage: int) -> None:
        if stage in self._doubted:
            raise Refused("this peer is not sure of being what the other replicas are; ask another")

    async def _export(self, stage: int) -> StageState | None:
        """A copy of what the stage has learnt; while joining, of the checkpoint that was found."""
        if stage in self._started:
            return await self._compute.export_state(stage)
        own = self._found.get(stage)
        if own is None:
            return None
        layout = self._compute.layout(stage)
        return await run_in_thread(lambda: read_checkpoint(own, layout))

    # --- writing

    def stepped(self, stage: int, step: int) -> None:
        """A stage has taken a step; `run` writes a checkpoint when one is due."""
        if checkpoint_due(step, self._config.manifest.checkpoint.every, self._last.get(stage, 0)):
            self._last[stage] = step
            self._due.add(stage)
            self._wake.set()

    async def run(self) -> None:
        """Writes what is due until cancelled. A full disk costs the checkpoint and nothing else."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._snapshots.sweep()
            while self._due:
                await self._write(self._due.pop(), cut=True)

    async def write_all(self) -> None:
        """A checkpoint of every stage, as this peer leaves."""
        for stage in self._started:
            await self._write(stage, cut=False)

    async def _write(self, stage: int, *, cut: bool) -> None:
        config, began = self._config, asyncio.get_running_loop().time()
        layout, keep = self._compute.layout(stage), config.manifest.checkpoint.keep
        try:
            async with self._writing:
                state = await self._compute.export_state(stage)
                written = await run_in_thread(
                    lambda: write_checkpoint(config.folder, config.run, state, layout, keep=keep)
                )
        except DiskError as error:
            self._report(events.DiskTrouble(str(config.folder), str(error)))
            return
        mine = cut and self._speaks_for(stage, written.step)
        seconds = asyncio.get_running_loop().time() - began
        self._report(events.CheckpointWritten(stage, written.step, written.size, seconds, mine))
        if mine:
            await self._tell_cut(written)

    def _speaks_for(self, stage: int, step: int) -> bool:
        members = {seen.peer for seen in self._membership.view.replicas(stage)} | {self._config.me}
        number = cut_step(step, self._config.manifest.checkpoint.every)
        return choose_writer(self._config.run, stage, number, members) == self._config.me

    async def _tell_cut(self, written: Checkpoint) -> None:
        config, stage = self._config, written.stage
        cut = Cut(config.me, Span(stage, stage), config.incarnation, written.step, written.snapshot, written.size)
        try:
            await self._publish(cut, CUT_LIFETIME_S)
        except AgoraError as error:
            self._report(events.DirectoryTrouble("publish", f"{error.code}: {error}"))
