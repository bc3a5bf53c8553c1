"""Finds the weights of every stage for an export: from a daemon of the run on this machine, else from checkpoints.

Knows: data directories, the registry of daemons, their control sockets. Must not know: what is made of the files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import InputError
from agora_protocol.manifest import SignedManifest

from agora.cli.console import STALLED, Failure, ProgressDisplay, print_line
from agora.node import control_client, paths, runs
from agora.node.runs import RunReference
from agora.state.checkpoint import WEIGHTS, newest_checkpoint
from agora.state.merged_model import StageFile

COLLECT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Sources:
    """What an export reads: a weights file for every stage, and the signed manifest.

    kind: "daemon" or "checkpoints", where the files came from. base: the folder that the manifest's paths begin in.
    """

    signed: SignedManifest
    kind: str
    files: tuple[StageFile, ...]
    base: Path


def find_stages(run: str, directories: Sequence[Path]) -> Sources:
    """Returns the weights of every stage: collected by a running daemon of the run, else the newest checkpoints.

    run: a name, run id, manifest file or invite. directories: data directories, or folders of them. Raises Failure with
    exit code 4 when a stage has none.
    """
    homes = [home for directory in directories for home in _homes_in(directory)] or [paths.home_at()]
    reference = _resolve(run, homes)
    daemons = [entry for entry in paths.daemons() if reference.is_of(entry)]
    homes = list(dict.fromkeys([*homes, *(paths.Home(Path(entry.root)) for entry in daemons)]))
    signed = _manifest(reference, homes, daemons)
    reasons = []
    for entry in daemons:
        try:
            files = _collect_stages(entry, signed.manifest.stage_count)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused) as error:
            reasons.append(f"the daemon in {entry.root} could not collect the stages: {error}")
            print_line(f"{reasons[-1]}; looking for checkpoints")
            continue
        return Sources(signed, "daemon", files, reference.base)
    reasons = reasons or ["no daemon of this run answers on this machine"]
    return Sources(signed, "checkpoints", _newest_checkpoints(signed, homes, reasons), reference.base)


def _homes_in(directory: Path) -> list[paths.Home]:
    """Returns `directory` if it is a data directory, else those in it: `swarm demo --dir` keeps one for each peer."""
    home = paths.home_at(directory)
    if home.runs.is_dir():
        return [home]
    return [paths.Home(runs.parent) for runs in sorted(home.root.glob("*/runs"))] or [home]


def _resolve(run: str, homes: Sequence[paths.Home]) -> RunReference:
    """Returns the run that `run` means in the first data directory that knows it. Raises InputError if none does."""
    for home in homes[:-1]:
        with contextlib.suppress(InputError):
            return runs.resolve(run, home)
    return runs.resolve(run, homes[-1])


def _manifest(reference: RunReference, homes: Sequence[paths.Home], daemons: Sequence[paths.Entry]) -> SignedManifest:
    """Returns the signed manifest of the run. Raises Failure if it is not signed or not on this machine."""
    if reference.signed is not None:
        return reference.signed
    run = reference.run or next((entry.run for entry in daemons), "")
    if not run:
        raise Failure(f"{reference.file} is not signed, so nobody has trained it; start it with `agora-node join`")
    for home in homes:
        if (path := home.manifest(run)).is_file():
            signed = runs.from_file(path, home).signed
            if signed is not None and signed.run_id == run:
                return signed
    raise Failure(
        f"this machine has not joined run {run[:12]}; export where a daemon of it runs, or name its data directory "
        "with --dir DIR",
        STALLED,
    )


def _collect_stages(entry: paths.Entry, count: int) -> tuple[StageFile, ...]:
    """Has a daemon fetch every stage's weights from the swarm. Raises DaemonUnreachable or DaemonRefused."""
    with ProgressDisplay(f"the daemon in {entry.root} collects {count} stages from the swarm"):
        answer = control_client.ask(Path(entry.socket), "collect", timeout_s=COLLECT_SECONDS)
    try:
        steps, files = answer["steps"], answer["files"]
        return tuple(StageFile(stage, int(steps[str(stage)]), Path(files[str(stage)])) for stage in range(count))
    except (KeyError, TypeError, ValueError):
        raise control_client.DaemonRefused("bad-answer", "its answer does not name a file for every stage") from None


def _newest_checkpoints(
    signed: SignedManifest, homes: Sequence[paths.Home], reasons: Sequence[str]
) -> tuple[StageFile, ...]:
    """Returns the newest whole checkpoint of every stage. Raises Failure, with `reasons`, when a stage has none."""
    run, count, files = signed.run_id, signed.manifest.stage_count, dict[int, StageFile]()
    for stage, home in itertools.product(range(count), homes):
        newest = newest_checkpoint(home.checkpoints(run), run, stage, lambda error: print_line(f"passed over: {error}"))
        if newest is not None and (stage not in files or newest.step > files[stage].step):
            files[stage] = StageFile(stage, newest.step, newest.path / WEIGHTS)
    missing = [str(stage) for stage in range(count) if stage not in files]
    if missing:
        stages, places = ", ".join(missing), ", ".join(str(home.root) for home in homes)
        raise Failure(
            f"stage {stages} is missing: {'; '.join(reasons)}; no whole checkpoint of it is in {places}; export while "
            "`agora-node join RUN` runs here, or name the data directories of those who held it with --dir DIR",
            STALLED,
        )
    return tuple(files[stage] for stage in range(count))
