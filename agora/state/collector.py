"""Collects the weights of every stage of the run as files on this machine: those held here, the others from replicas.

One stage at a time is in memory. Each collection has a numbered folder, which is there with all of its files or not at
all. The folder before it stays too: an export may still read it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from agora_protocol.errors import Busy, DiskError, LocalError, Unavailable
from agora_protocol.ids import PeerId

from agora.core.calls import PeerCaller
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import SyncChangeRule
from agora.core.tasks import run_in_thread
from agora.state.export_tensors import SOURCE_BYTES, StageFile
from agora.state.files import fresh_path, make_folder, put_in_place, replace_tensors
from agora.state.keeper import ClaimedSteps, StageStates
from agora.state.layout import Layout, StageState
from agora.state.rules import LAG_LIMIT, most_advanced_first, plausibility_bound
from agora.state.state_fetch import StateFetch
from agora.swarm.peer_score import ReportViolation

COLLECTION_TIMEOUT_S: Final = 3500.0
RETRY_MS: Final = 1000
SPARE_BYTES: Final = 64 * 2**20  # what must stay free on the disk


class StageCollector:
    """Writes the weights of all stages as files in `folder`: copies the held stages, fetches the others from replicas.

    Refuses a second collection while one runs. `close` cancels the running collection and refuses all later ones. The
    files stay in their folder of `folder` until the second collection after them begins.
    """

    def __init__(
        self,
        live: LiveManifest,
        folder: Path,
        layouts: Callable[[], Sequence[Layout]],
        stages: StageStates,
        serving: ClaimedSteps,
        peer_caller: PeerCaller,
        report_violation: ReportViolation,
    ) -> None:
        """layouts: returns the layout of each stage of the run, in stage order; it is called in a thread.

        serving: returns the peers that serve a stage, with their claimed steps.
        """
        self._run = live.core.run_id
        self._live_manifest = live
        self._folder = folder
        self._layouts = layouts
        self._stages = stages
        self._serving = serving
        self._peer_caller = peer_caller
        self._report_violation = report_violation
        self._task: asyncio.Task[list[StageFile]] | None = None
        self._closed = False

    async def collect(self, *, average: bool = False) -> list[StageFile]:
        """Writes a weight file for every stage, and returns them in stage order.

        average: the moving averages of the weights; in a run that keeps none the plain ones. Raises Busy while another
        collection runs, Unavailable for a stage that no peer gives within COLLECTION_TIMEOUT_S, DiskError, and
        LocalError when `close` was called. After a failure the last collection is still there.
        """
        if self._closed:
            raise LocalError("This daemon is leaving; ask another one of the run.")
        if self._task is not None:
            raise Busy("the stages are being collected for somebody else; ask again when that is done", RETRY_MS)
        self._task = asyncio.create_task(self._collect(average), name="collect")
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._closed:
                raise LocalError("This daemon is leaving, and has not collected all stages; ask another one.") from None
            raise
        finally:
            self._task = None

    def close(self) -> None:
        """Cancels a running collection without waiting for its end, and makes later ones raise LocalError."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _collect(self, average: bool) -> list[StageFile]:
        deadline = loop_time() + COLLECTION_TIMEOUT_S
        layouts = await run_in_thread(self._layouts)
        for stage in range(len(layouts)):
            if stage not in self._stages.span and not self._serving(stage):
                raise _unavailable(stage, [])
        target, *outdated = self._next_folder()
        fresh = fresh_path(target)
        need_bytes = sum(SOURCE_BYTES * layout.numel for layout in layouts) + SPARE_BYTES

        def prepare() -> None:
            for old in outdated:
                if old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
                else:  # of an earlier version
                    old.unlink(missing_ok=True)
            make_folder(fresh, need_bytes)

        try:
            await run_in_thread(prepare)
            files = [
                await self._write_stage(fresh, stage, layout, average, deadline) for stage, layout in enumerate(layouts)
            ]
            await run_in_thread(lambda: put_in_place(fresh, target))
        except OSError as error:
            raise DiskError(f"Cannot write {self._folder} ({error.strerror or error}); free some space.") from error
        finally:
            await run_in_thread(lambda: shutil.rmtree(fresh, ignore_errors=True))
        return [replace(file, path=target / file.path.name) for file in files]

    def _next_folder(self) -> tuple[Path, ...]:
        # Returns where the next collection goes, then what is in the way: all but the last collection.
        found = list(self._folder.iterdir()) if self._folder.is_dir() else []
        numbers = sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())
        last = str(numbers[-1]) if numbers else ""
        target = self._folder / str(numbers[-1] + 1 if numbers else 1)
        return target, *(path for path in found if path.name != last)

    async def _write_stage(self, folder: Path, stage: int, layout: Layout, average: bool, deadline: float) -> StageFile:
        if stage in self._stages.span:
            state, is_compared = await self._stages.export_state(stage), True
        else:
            state, is_compared = await self._fetch(stage, layout, deadline)
        metadata = {"run": self._run, "stage": str(stage), "step": str(state.step)}
        path = folder / f"stage-{stage}.safetensors"
        weights = state.averaged_weights if average else state.weights
        await run_in_thread(lambda: replace_tensors(path, layout.views(weights), metadata))
        return StageFile(stage, state.step, path, is_compared=is_compared)

    async def _fetch(self, stage: int, layout: Layout, deadline: float) -> tuple[StageState, bool]:
        fetch = StateFetch(
            self._peer_caller,
            stage,
            layout,
            self._report_violation,
            SyncChangeRule.of_run(self._live_manifest),
            highest_plausible_step=lambda: plausibility_bound(self._serving(stage).values(), LAG_LIMIT),
        )
        asked: set[PeerId] = set()  # peers that come while the others fail are asked as well, and nobody twice
        reasons: tuple[str, ...] = ()
        while sources := [peer for peer in most_advanced_first(self._serving(stage)) if peer not in asked]:
            asked.update(sources)
            try:
                state = await fetch.run(sources, deadline=deadline)
            except Unavailable as error:
                reasons += error.reasons
                continue
            return state, fetch.is_compared
        raise _unavailable(stage, reasons)


def _unavailable(stage: int, reasons: Sequence[str]) -> Unavailable:
    advice = f"start a peer with `agora-node join RUN --stages {stage}`, or export from a checkpoint of it"
    return Unavailable(stage, [*(reasons or ["no peer of the swarm serves it"]), advice])
