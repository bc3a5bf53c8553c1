"""Where an export's stages come from: a daemon of the run on this machine, else the checkpoints on its disks.

Knows: data directories, the registry of daemons, what to ask them. Must not know: what is made of the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora.cli.console import STALLED, Failure, say
from agora.cli.progress import ProgressDisplay
from agora.node import control_client, paths

if TYPE_CHECKING:
    from agora_protocol.manifest import SignedManifest

    from agora.node.runs import RunReference
    from agora.state.export import StageFile

COLLECT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Sources:
    """A file for every stage; `kind` is "daemon" or "checkpoints". `base`: where the manifest's paths begin."""

    signed: SignedManifest
    kind: str
    files: tuple[StageFile, ...]
    base: Path


@dataclass(frozen=True, slots=True)
class _Machine:
    """What of this run is on this machine."""

    reference: RunReference
    homes: tuple[paths.Home, ...]
    daemons: tuple[paths.Entry, ...]


def find(run: str, directories: Sequence[Path]) -> Sources:
    """A file for every stage of RUN, the newest there is. Failure with exit code 4 when one is missing."""
    machine = _look(run, directories)
    signed = _manifest(machine)
    count, reasons = signed.manifest.stage_count, []
    for entry in machine.daemons:
        try:
            files = _collected(entry, count)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused) as error:
            reasons.append(f"the daemon in {entry.root} could not collect the stages: {error}")
            say(f"{reasons[-1]}; looking for checkpoints")
            continue
        return Sources(signed, "daemon", files, machine.reference.base)
    files = _checkpoints(signed, machine.homes, reasons or ["no daemon of this run answers on this machine"])
    return Sources(signed, "checkpoints", files, machine.reference.base)


def _look(run: str, directories: Sequence[Path]) -> _Machine:
    homes = [home for directory in directories for home in _homes_in(directory)] or [paths.default_home()]
    reference = _resolved(run, homes)
    daemons = tuple(entry for entry in paths.daemons() if reference.is_of(entry))
    all_homes = dict.fromkeys([*homes, *(paths.Home(Path(entry.root)) for entry in daemons)])
    return _Machine(reference, tuple(all_homes), daemons)


def _homes_in(directory: Path) -> list[paths.Home]:
    """The data directory, or those in it: `swarm demo --dir` keeps one for each peer."""
    home = paths.home_at(directory)
    if home.runs.is_dir():
        return [home]
    return [paths.Home(runs.parent) for runs in sorted(home.root.glob("*/runs"))] or [home]


def _resolved(run: str, homes: Sequence[paths.Home]) -> RunReference:
    """What RUN means; a name may be known in any of the data directories."""
    from agora_protocol.errors import InputError

    from agora.node import runs

    for home in homes[:-1]:
        try:
            return runs.resolve(run, home)
        except InputError:
            continue
    return runs.resolve(run, homes[-1])


def _manifest(machine: _Machine) -> SignedManifest:
    from agora.node import runs

    reference = machine.reference
    if reference.signed is not None:
        return reference.signed
    run = reference.run or next((entry.run for entry in machine.daemons), "")
    if not run:
        raise Failure(f"{reference.file} is not signed, so nobody has trained it; start it with `agora-node join`")
    for home in machine.homes:
        if (path := home.manifest(run)).is_file():
            signed = runs.from_file(path, home).signed
            if signed is not None and signed.run_id == run:
                return signed
    raise Failure(
        f"this machine has not joined run {run[:12]}; export where a daemon of it runs, or name its data directory "
        "with --dir DIR",
        STALLED,
    )


def _collected(entry: paths.Entry, count: int) -> tuple[StageFile, ...]:
    """What a daemon has fetched from the replicas of every stage."""
    with ProgressDisplay(f"the daemon in {entry.root} collects {count} stages from the swarm"):
        answer = control_client.ask(Path(entry.socket), "collect", timeout_s=COLLECT_SECONDS)
    return tuple(_file_of(stage, answer) for stage in range(count))


def _file_of(stage: int, answer: Mapping[str, Any]) -> StageFile:
    from agora.state.export import StageFile

    try:
        return StageFile(stage, int(answer["steps"][str(stage)]), Path(answer["files"][str(stage)]))
    except (KeyError, TypeError, ValueError):
        raise control_client.DaemonRefused("bad-answer", f"its answer says nothing of stage {stage}") from None


def _checkpoints(signed: SignedManifest, homes: Sequence[paths.Home], reasons: Sequence[str]) -> tuple[StageFile, ...]:
    """The newest whole checkpoint of every stage."""
    found = [_newest(signed.run_id, stage, homes) for stage in range(signed.manifest.stage_count)]
    missing = [str(stage) for stage, file in enumerate(found) if file is None]
    if missing:
        stages, places = ", ".join(missing), ", ".join(str(home.root) for home in homes)
        raise Failure(
            f"stage {stages} is missing: {'; '.join(reasons)}; no whole checkpoint of it is in {places}; export while "
            "`agora-node join RUN` runs here, or name the data directories of those who held it with --dir DIR",
            STALLED,
        )
    return tuple(file for file in found if file is not None)


def _newest(run: str, stage: int, homes: Sequence[paths.Home]) -> StageFile | None:
    from agora.state.checkpoint import WEIGHTS, newest_checkpoint
    from agora.state.export import StageFile

    found = None
    for home in homes:
        checkpoint = newest_checkpoint(home.checkpoints(run), run, stage, lambda error: say(f"passed over: {error}"))
        if checkpoint is not None and (found is None or checkpoint.step > found.step):
            found = StageFile(stage, checkpoint.step, checkpoint.path / WEIGHTS)
    return found
