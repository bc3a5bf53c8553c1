"""Finds the weights of all stages of a run, and the folder of its base model, for the commands that use the model."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agora_protocol.amendments import SealedAmendment
from agora_protocol.errors import DiskError, InputError, LocalError
from agora_protocol.manifest import SignedManifest

from agora.cli.console import EXIT_STALLED, Failure, ProgressDisplay, print_to_stderr
from agora.core.live_manifest import LiveManifest
from agora.data.local_files import LocalFiles
from agora.node import daemon_registry, paths, run_files, runs, settings
from agora.node.control import control_client
from agora.node.run_files import KnownFiles
from agora.node.runs import RunReference
from agora.state.checkpoint import MOMENTS, WEIGHTS, end_checkpoint, newest_checkpoint
from agora.state.export_tensors import StageFile
from agora.state.layout import AVERAGE
from agora.tuning.base.hub import absolute_name

NOTHING_KNOWN = KnownFiles()
COLLECTION_TIMEOUT_S = 3600.0  # for a daemon to fetch the weights of all stages


@dataclass(frozen=True, slots=True)
class StageSources:
    """A weights file for every stage, and the signed manifest. average: whether they are moving averages. base: where
    relative paths of the manifest start. daemon: that collected them, None for checkpoints. amendments: those that
    count and are known here.
    """

    signed: SignedManifest
    kind: str
    average: bool
    files: tuple[StageFile, ...]
    base: Path
    daemon: daemon_registry.DaemonEntry | None = None
    places: tuple[Path, ...] = ()
    known: KnownFiles = NOTHING_KNOWN
    amendments: tuple[SealedAmendment, ...] = ()

    def find_tokenizer(self, base_model: Path | None) -> str:
        """Returns a path of this machine for [data] tokenizer, or "bytes". Raises DiskError if it is nowhere."""
        source = self.signed.manifest.data.tokenizer
        noted = filter(None, (self.known.tokenizer, self.known.base_model))
        try:
            return LocalFiles((*self.places, *noted), self.base, base_model).find_tokenizer(source)
        except LocalError:
            raise DiskError(
                f"Cannot read the tokenizer file {source}: it is not on this machine; say where it is: "
                "AGORA_DATA=FILE, or the folder of the base model in AGORA_BASE_MODEL."
            ) from None


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run that this machine knows. homes: data directories that may have checkpoints. daemons: this machine's, of the
    run.
    """

    signed: SignedManifest
    homes: tuple[paths.Home, ...]
    daemons: tuple[daemon_registry.DaemonEntry, ...]
    base: Path

    def known_files(self) -> KnownFiles:
        """What its daemons on this machine have noted, as far as it is still there."""
        known = [run_files.remembered_files(home, self.signed.run_id) for home in self.homes]
        tokenizers, models = [one.tokenizer for one in known], [one.base_model for one in known]
        return KnownFiles(next(filter(None, tokenizers), None), next(filter(None, models), None))


def find_stages(run: str, directories: Sequence[Path], *, average: bool, ask_daemons: bool = True) -> StageSources:
    """Returns what collect_stages finds of the run that find_run finds; raises what both raise."""
    return collect_stages(find_run(run, directories, ask_daemons=ask_daemons), average=average)


def find_run(run: str, directories: Sequence[Path], *, ask_daemons: bool = True) -> FoundRun:
    """Returns the run that `run` names: its signed manifest, the data directories to look in, and its daemons here.

    run: a name, run id, manifest file or invite. directories: data directories, or folders of data directories; if
    empty, the default one and those next to a manifest file. The data directories of the daemons are added.
    ask_daemons: whether to look for daemons. Raises InputError or Failure for a run that this machine does not know,
    ManifestError or DiskError for a manifest that is malformed or cannot be read.
    """
    homes = [home for directory in directories for home in _homes_in(directory)]
    if not directories:
        homes = [paths.home_at(), *(_homes_below(Path(run).parent) if Path(run).is_file() else ())]
    reference = _resolve(run, homes)
    daemons = tuple(entry for entry in daemon_registry.find_running_daemons() if ask_daemons and reference.is_of(entry))
    homes = list(dict.fromkeys([*homes, *(paths.Home(Path(entry.root)) for entry in daemons)]))
    return FoundRun(_find_signed_manifest(reference, homes, daemons), tuple(homes), daemons, reference.base)


def collect_stages(found: FoundRun, *, average: bool) -> StageSources:
    """See _collect. The sources know where this machine has the manifest's files: by its settings, or from a daemon."""
    chosen = settings.load(found.homes[0].root / "agora.toml", {})
    model = chosen.named_base_model
    places = chosen.data_places if model is None or not model.is_dir() else (*chosen.data_places, model)
    amendments = run_files.amendments_on_disk(found.homes, found.signed, time.time()).chain
    collected = _collect(found, average=average)
    return replace(collected, places=places, known=found.known_files(), amendments=amendments)


def _collect(found: FoundRun, *, average: bool) -> StageSources:
    signed = found.signed
    reasons: list[str] = []
    if at_end := _end_checkpoints(signed, found.homes, average and signed.manifest.optimizer.average_decay > 0):
        steps = " and ".join(f"{step:,}" for step in sorted({file.step for file in at_end}))
        print_to_stderr(f"the run has ended: its state of step {steps} is taken, as it was kept at the end")
        is_average = average and signed.manifest.optimizer.average_decay > 0
        return StageSources(signed, "checkpoints", is_average, at_end, found.base)
    average = average and signed.manifest.optimizer.average_decay > 0
    for entry in found.daemons:
        try:
            files = _ask_to_collect(entry, signed.manifest.stage_count, average)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused) as error:
            reasons.append(f"the daemon in {entry.root} could not collect the stages: {error}")
            print_to_stderr(f"{reasons[-1]}; looking for checkpoints")
            continue
        return StageSources(signed, "daemon", average, files, found.base, entry)
    reasons = reasons or ["no daemon of this run answers on this machine"]
    files = _newest_checkpoints(signed, found.homes, reasons, average)
    return StageSources(signed, "checkpoints", average, files, found.base)


def _homes_in(directory: Path) -> list[paths.Home]:
    # Returns `directory` alone if it is a data directory; otherwise the data directories in it, if there are any.
    # `swarm demo --dir` makes such a folder, with a data directory for each peer.
    home = paths.home_at(directory)
    if home.runs.is_dir():
        return [home]
    return _homes_below(home.root) or [home]


def _homes_below(folder: Path) -> list[paths.Home]:
    return [paths.Home(runs_folder.parent) for runs_folder in sorted(folder.glob("*/runs"))]


def _resolve(run: str, homes: Sequence[paths.Home]) -> RunReference:
    for home in homes[:-1]:
        with contextlib.suppress(InputError):
            return runs.resolve(run, home)
    return runs.resolve(run, homes[-1])


def _find_signed_manifest(
    reference: RunReference, homes: Sequence[paths.Home], daemons: Sequence[daemon_registry.DaemonEntry]
) -> SignedManifest:
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
        f"this machine has not joined run {run[:12]}; run this command where a daemon of it runs, or name "
        "its data directory with --dir DIR",
        EXIT_STALLED,
    )


def _ask_to_collect(entry: daemon_registry.DaemonEntry, stage_count: int, average: bool) -> tuple[StageFile, ...]:
    with ProgressDisplay(f"the daemon in {entry.root} collects {stage_count} stages from the swarm"):
        answer = control_client.ask(Path(entry.socket), "collect", timeout_s=COLLECTION_TIMEOUT_S, average=average)
    try:
        steps, files = answer["steps"], answer["files"]
        for stage in answer.get("uncompared", []):
            print_to_stderr(f"stage {int(stage)} came from one peer: it could be compared with no other's")
        return tuple(StageFile(stage, int(steps[str(stage)]), Path(files[str(stage)])) for stage in range(stage_count))
    except (KeyError, TypeError, ValueError):
        raise control_client.DaemonRefused("bad-answer", "its answer does not name a file for every stage") from None


def _end_checkpoints(signed: SignedManifest, homes: Sequence[paths.Home], average: bool) -> tuple[StageFile, ...]:
    chain = run_files.amendments_on_disk(homes, signed, time.time()).chain
    end_step = LiveManifest(signed.manifest, chain).total_steps
    name, prefix = (MOMENTS, f"{AVERAGE}.") if average else (WEIGHTS, "")
    files = []
    for stage in range(signed.manifest.stage_count):
        kept = [end_checkpoint(home.checkpoints(signed.run_id), signed.run_id, stage, end_step) for home in homes]
        first = min((found for found in kept if found is not None), key=lambda found: found.step, default=None)
        if first is None:
            return ()
        files.append(StageFile(stage, first.step, first.path / name, prefix))
    return tuple(files)


def _newest_checkpoints(
    signed: SignedManifest, homes: Sequence[paths.Home], reasons: Sequence[str], average: bool
) -> tuple[StageFile, ...]:
    run = signed.run_id
    count = signed.manifest.stage_count
    files: dict[int, StageFile] = {}
    name, prefix = (MOMENTS, f"{AVERAGE}.") if average else (WEIGHTS, "")
    for stage, home in itertools.product(range(count), homes):
        newest = newest_checkpoint(
            home.checkpoints(run), run, stage, lambda error: print_to_stderr(f"passed over: {error}")
        )
        if newest is not None and (stage not in files or newest.step > files[stage].step):
            files[stage] = StageFile(stage, newest.step, newest.path / name, prefix)
    missing = [str(stage) for stage in range(count) if stage not in files]
    if missing:
        places = ", ".join(str(home.root) for home in homes)
        raise Failure(
            f"stage {', '.join(missing)} is missing: {'; '.join(reasons)}; no whole checkpoint of it is in {places}; "
            "run this command while `agora-node join RUN` runs here, or name the data directories of those who held it "
            "with --dir DIR",
            EXIT_STALLED,
        )
    return tuple(files[stage] for stage in range(count))


def steps_by_stage(sources: StageSources) -> list[dict[str, int]]:
    return [{"stage": file.stage, "step": file.step} for file in sources.files]


def base_model_folder(flag: Path | None, directories: Sequence[Path], known: KnownFiles = NOTHING_KNOWN) -> Path | None:
    """From the flag, the environment, agora.toml, or what a daemon of the run has noted; a model of the Hub is fetched.
    Raises SettingsError, BaseModelError.
    """
    home = paths.home_at(next(iter(directories), None))
    flags = {"base_model": absolute_name(flag) if flag else None}
    chosen = settings.load(home.root / "agora.toml", flags)
    chosen = chosen.with_fetched_base_model(lambda where: print_to_stderr(f"hub          {where}"))
    return chosen.named_base_model or known.base_model
