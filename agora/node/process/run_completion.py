"""What a daemon does once its run is over: reports it, exports the result, then serves, leaves or goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agora_protocol.ids import PeerId

from agora.core.clock import loop_time
from agora.node.peer.local_peer import LocalPeer
from agora.node.settings import Settings
from agora.node.span.loaded_span import LoadedSpan
from agora.observe import events
from agora.state.files import EXPORT_INDEX
from agora.swarm.view import View

# Seconds between two looks whether the run has ended, and whether others still need its state.
LOOK_INTERVAL_S: Final = 1.0
# Seconds from the run's end until a daemon may leave. Until then its records show the last steps: the others must read
# them before the stage has no peer.
LEAVE_DELAY_S: Final = 15.0
# Seconds without a fetch after which those that fetched are taken to have all of the state.
FETCH_IDLE_TIMEOUT_S: Final = 15.0
# Seconds for which a leaving daemon keeps its stages for the exporting peer, if nobody fetches them. An export fetches
# the stages one by one, so this daemon's may come late.
MAX_SERVE_S: Final = 600.0
# Seconds before each attempt to export: a peer may be moving or restarting.
EXPORT_RETRY_DELAYS_S: Final = (0.0, 15.0, 60.0, 300.0)
EXPORT_TIMEOUT_S: Final = 3600.0
KILL_DELAY_S: Final = 1.0  # seconds that a terminated export has for removing what it has half written

ExportState = Literal["none", "exporting", "exported", "failed"]


@dataclass(frozen=True, slots=True)
class ExportStatus:
    """Where the result of the run lies on this machine. why: what has failed, and what to do."""

    state: ExportState = "none"
    folder: str = ""
    why: str = ""


def choose_exporter(view: View, founder: PeerId) -> PeerId | None:
    """Returns which peer exports the result, the same one for all who see this view; None if nobody can.

    It is the founder, who wants it; if he does not serve, the first peer of stage 0, since that has the tokenizer.
    """
    seen = view.peers.get(founder)
    if seen is not None and seen.state == "serving":
        return founder
    return min((replica.peer for replica in view.replicas(0)), default=None)


def may_leave(since_end_s: float, since_last_fetch_s: float | None, *, is_needed: bool) -> bool:
    """Returns whether a daemon that leaves at the end may do so now, some seconds after it.

    since_last_fetch_s: since another peer fetched a part of the state held here; None if none has since the end.
    is_needed: whether another peer is to export, and this one's state may be a part of that.
    """
    if since_end_s < LEAVE_DELAY_S:
        return False
    if since_last_fetch_s is not None:
        return since_last_fetch_s >= FETCH_IDLE_TIMEOUT_S
    return not is_needed or since_end_s >= MAX_SERVE_S


class RunCompletion:
    """Waits until the run is over, and does what the owner has chosen for that.

    result: where the export lies, or why there is none.
    """

    def __init__(
        self, local_peer: LocalPeer, held_span: Callable[[], LoadedSpan | None], leave: Callable[[str], None]
    ) -> None:
        """held_span: returns the held span, None while none is. leave: makes the daemon leave, with a reason."""
        self.result = ExportStatus()
        self._local_peer = local_peer
        self._held_span = held_span
        self._leave = leave

    async def run(self) -> None:
        """Until cancelled: waits until every stage has taken all steps, then does what the owner chose.

        Begins again if an amendment extends the run.
        """
        while True:
            while not self._has_ended():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_INTERVAL_S)
            live = self._local_peer.live
            await self._do_what_follows(total_steps := live.total_steps)
            while live.total_steps <= total_steps:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_INTERVAL_S)
            self.result = ExportStatus()
            text = f"an amendment has the run go on until it has taken {live.total_steps:,} steps"
            self._local_peer.context.report_event(events.StateChanged("serving", text))

    def _has_ended(self) -> bool:
        local_peer, loaded = self._local_peer, self._held_span()
        if loaded is None:
            return False
        return loaded.run_end.has_ended(local_peer.view, loaded.own_steps)

    async def _do_what_follows(self, total_steps: int) -> None:
        local_peer, settings = self._local_peer, self._local_peer.context.settings
        ended_at = loop_time()
        chosen = choose_exporter(local_peer.view, local_peer.signed.founder)
        is_chosen = chosen in (None, local_peer.context.me)
        exports = is_chosen if settings.export_at_end == "auto" else settings.export_at_end == "always"
        reason = f"the run has taken its {total_steps:,} steps, and the state at the end is kept"
        follows = {
            "serve": "it serves the result and trains no more",
            "leave": "it leaves when nobody fetches the result from it any more",
            "go-on": "it goes on at the lowest learning rate, as at_end says",
        }[settings.at_end_in_force]
        follows += "; it exports the result now" if exports else "; `swarm export` writes the result"
        local_peer.context.report_event(events.StateChanged("completed", f"{reason}: {follows}"))
        if exports:
            await self._export(total_steps)
        if settings.at_end_in_force == "leave":
            await self._wait_for_others(ended_at, None if is_chosen else chosen)
            self._leave(reason)

    async def _wait_for_others(self, ended_at: float, exporter: PeerId | None) -> None:
        while True:
            loaded, now = self._held_span(), loop_time()
            fetched_at = loaded.keeper.last_given_at if loaded is not None else None
            since_last_fetch_s = now - fetched_at if fetched_at is not None and fetched_at >= ended_at else None
            seen = self._local_peer.view.peers.get(exporter) if exporter is not None else None
            is_needed = seen is not None and seen.state == "serving"
            if may_leave(now - ended_at, since_last_fetch_s, is_needed=is_needed):
                return
            await asyncio.sleep(LOOK_INTERVAL_S)

    # --- the export

    async def _export(self, total_steps: int) -> None:
        context, run = self._local_peer.context, self._local_peer.signed.run_id
        folder = context.home.result(run)
        if not _is_exported(folder, total_steps):
            self.result = ExportStatus("exporting", str(folder))
            for pause_s in EXPORT_RETRY_DELAYS_S:
                await asyncio.sleep(pause_s)
                why = await _try_export(run, context.home.root, folder, _environment(context.settings))
                if not why:
                    break
            else:
                why += f"; `swarm export {run[:12]} --dir {context.home.root} --out FOLDER` tries again"
                self.result = ExportStatus("failed", why=why)
                context.report_event(events.TaskFailed("export", why))
                return
        self.result = ExportStatus("exported", str(folder))
        context.report_event(events.ResultExported(str(folder)))


def _is_exported(folder: Path, total_steps: int) -> bool:
    # An export of an earlier end, before an amendment, is replaced.
    try:
        stages = json.loads((folder / EXPORT_INDEX).read_text())["stages"]
        return min(int(stage["step"]) for stage in stages) >= total_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _environment(settings: Settings) -> Mapping[str, str]:
    # What the flags of `join` have said is known to this process only.
    told = {"AGORA_BASE_MODEL": settings.base_model, "AGORA_DATA": os.pathsep.join(settings.data)}
    return {**os.environ, **{name: value for name, value in told.items() if value}}


async def _try_export(run: str, root: Path, folder: Path, environment: Mapping[str, str]) -> str:
    # Returns "", or why nothing was exported. In a process of its own: it loads and writes the whole model.
    command = [sys.executable, "-m", "agora.cli.main_swarm", "export", run]
    command += ["--dir", str(root), "--out", str(folder), "--force", "--json"]
    quiet = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=quiet, stdout=quiet, stderr=asyncio.subprocess.PIPE, env=environment
        )
    except OSError as error:
        return f"no process could be started for it ({error.strerror})"
    try:
        async with asyncio.timeout(EXPORT_TIMEOUT_S):
            _, said = await process.communicate()
    except TimeoutError:
        return f"it took more than {EXPORT_TIMEOUT_S / 60:.0f} minutes"
    finally:
        await _end(process)
    if process.returncode == 0:
        return ""
    lines = [line.removeprefix("error: ") for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"its process ended with exit code {process.returncode}"


async def _end(process: asyncio.subprocess.Process) -> None:
    for end in (process.terminate, process.kill):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                end()
                await asyncio.wait_for(process.wait(), KILL_DELAY_S)
