"""The weights of every stage of the run as files on this machine: those held here, the others from their replicas.

Knows: the compute, the view, the transfer of states, one folder. Must not know: who asks, or what the files are for.

One stage at a time is in memory, with its moments, which come along with the weights. The folder is there with all of
its files or not at all; each collection replaces the one before.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agora_protocol.errors import Busy, DiskError, LocalError, Unavailable
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest, SignedManifest

from agora.calls import Caller
from agora.model import parameter_shapes
from agora.node.threads import run_in_thread
from agora.state.export import SOURCE_BYTES, StageFile
from agora.state.files import remove_folder, sync_folder
from agora.state.layout import Layout, StageState, lay_out
from agora.state.transfer import Lied, StateFetch
from agora.state.weights import write_weights
from agora.swarm.view import View

COLLECT_SECONDS = 3500.0
RETRY_MS = 1000
SPARE_BYTES = 64 * 2**20


class Held(Protocol):
    """The stages held here, as Compute has them."""

    @property
    def span(self) -> Span:
        """Which they are."""

    async def export_state(self, stage: int) -> StageState:
        """A consistent copy of one of them."""


class Collector:
    """One for each daemon; `folder` is its own. `close` as the daemon leaves."""

    def __init__(
        self, signed: SignedManifest, folder: Path, held: Held, view: Callable[[], View], caller: Caller, lied: Lied
    ) -> None:
        self._signed = signed
        self._folder = folder
        self._held = held
        self._view = view
        self._caller = caller
        self._lied = lied
        self._work: asyncio.Task[list[StageFile]] | None = None
        self._closed = False

    async def collect(self) -> list[StageFile]:
        """A file for every stage, in order; ends, and leaves nothing, when the awaiting task is cancelled.

        Raises Busy while another collection is under way, Unavailable for a stage that nobody can give, DiskError, and
        LocalError when the daemon leaves.
        """
        if self._closed:
            raise LocalError("this daemon is leaving; ask another one of the run")
        if self._work is not None:
            raise Busy("the stages are being collected for somebody else; ask again when that is done", RETRY_MS)
        self._work = asyncio.create_task(self._collect(), name="collect")
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._closed:
                raise LocalError("this daemon is leaving, and has not collected all stages; ask another one") from None
            raise
        finally:
            self._work = None

    def close(self) -> None:
        """Ends a collection that is under way; there will be no other."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()

    async def _collect(self) -> list[StageFile]:
        deadline = asyncio.get_running_loop().time() + COLLECT_SECONDS
        layouts = await run_in_thread(lambda: _layouts(self._signed.manifest))
        for stage in range(len(layouts)):
            if stage not in self._held.span and not self._sources(stage):
                raise _nobody(stage, [])
        fresh = self._folder.with_name(f".{self._folder.name}-{secrets.token_hex(8)}")
        try:
            await run_in_thread(lambda: self._make(fresh, sum(SOURCE_BYTES * layout.numel for layout in layouts)))
            steps = [await self._write(fresh, stage, layout, deadline) for stage, layout in enumerate(layouts)]
            await run_in_thread(lambda: self._put_in_place(fresh))
        finally:
            await run_in_thread(lambda: remove_folder(fresh))
        return [StageFile(stage, step, _file(self._folder, stage)) for stage, step in enumerate(steps)]

    async def _write(self, folder: Path, stage: int, layout: Layout, deadline: float) -> int:
        """Writes one stage's file; the step it is of."""
        if stage in self._held.span:
            state = await self._held.export_state(stage)
        else:
            state = await self._fetch(stage, layout.numel, deadline)
        about = {"run": self._signed.run_id, "stage": str(stage), "step": str(state.step)}
        await run_in_thread(lambda: write_weights(_file(folder, stage), layout.named(state.weights), about))
        return state.step

    async def _fetch(self, stage: int, numel: int, deadline: float) -> StageState:
        """From the replicas there are, and when these fail from those that have come meanwhile."""
        fetch = StateFetch(self._caller, stage, numel, lied=self._lied)
        asked: set[PeerId] = set()
        reasons: tuple[str, ...] = ()
        while sources := [peer for peer in self._sources(stage) if peer not in asked]:
            asked.update(sources)
            try:
                return await fetch.run(sources, deadline=deadline)
            except Unavailable as error:
                reasons += error.reasons
        raise _nobody(stage, reasons)

    def _sources(self, stage: int) -> list[PeerId]:
        """Who serves the stage, the furthest first."""
        replicas = sorted(self._view().replicas(stage), key=lambda seen: -seen.step_of(stage))
        return [seen.peer for seen in replicas]

    # --- the folder, off the loop

    def _make(self, fresh: Path, need_bytes: int) -> None:
        """An empty folder, and room for the files; what earlier collections have left is gone."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in [self._folder, *self._folder.parent.glob(f".{self._folder.name}-*")]:
                remove_folder(old)
            free = shutil.disk_usage(self._folder.parent).free
            fresh.mkdir(mode=0o700)
        except OSError as error:
            raise DiskError(f"Cannot make {fresh} ({error.strerror or error}); free some space.") from error
        if free < need_bytes + SPARE_BYTES:
            raise DiskError(
                f"The weights of all stages need {need_bytes / 1e9:.1f} GB in {self._folder.parent}, and "
                f"{free / 1e9:.1f} are free; free some space."
            )

    def _put_in_place(self, fresh: Path) -> None:
        try:
            fresh.rename(self._folder)
            sync_folder(self._folder.parent)
        except OSError as error:
            raise DiskError(f"Cannot write {self._folder} ({error.strerror or error}); free some space.") from error


def _layouts(manifest: Manifest) -> list[Layout]:
    """Where the tensors of each stage lie, held or not; from the manifest alone, no stage is built."""
    count, found = manifest.stage_count, []
    for stage in range(count):
        shapes = parameter_shapes(manifest.model, manifest.layers_of(stage), stage, count)
        found.append(lay_out(shapes.items()))
    return found


def _file(folder: Path, stage: int) -> Path:
    return folder / f"stage-{stage}.safetensors"


def _nobody(stage: int, reasons: Sequence[str]) -> Unavailable:
    what = f"start a peer with `agora-node join RUN --stages {stage}`, or export from a checkpoint of it"
    return Unavailable(stage, [*(reasons or ["no peer of the swarm serves it"]), what])
