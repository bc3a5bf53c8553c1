"""`swarm export`: writes the model of a run as a folder that Hugging Face's transformers loads.

Knows: where weights are on this machine (daemons, checkpoints), the order of the work, what is printed. Must not know:
how weights are checked and written (agora.state), or exported by a family (agora.model). Loads torch only once there is
something to export.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora_protocol.errors import InputError
from agora_protocol.manifest import Manifest, SignedManifest

from agora.cli import console
from agora.cli.console import STALLED, USAGE, Failure, ProgressDisplay, print_line
from agora.data.tokenizer import tokenizer_files
from agora.node import control_client, paths, runs
from agora.node.runs import RunReference
from agora.state.checkpoint import MOMENTS, WEIGHTS, newest_checkpoint
from agora.state.files import PUBLIC, FileDigest, check_export_place, fresh_folder, write_file, write_file_list
from agora.state.layout import AVERAGE
from agora.state.merged_model import ITEM_BYTES, SOURCE_BYTES, Dtype, ExportedTensor, StageFile, open_stages
from agora.state.model_card import ExportInWords, model_card

if TYPE_CHECKING:
    from agora.model import Family

COLLECT_SECONDS = 3600.0
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DTYPES: dict[Dtype, str] = {"float32": "float32", "bf16": "bfloat16"}
"""The dtypes of --dtype, and their names in transformers."""
SPARE_BYTES = 64 * 2**20
SOURCES = {"daemon": "the swarm, through a daemon of it", "checkpoints": "checkpoints of its peers"}


@dataclass(frozen=True, slots=True)
class Sources:
    """What an export reads: a weights file for every stage, and the signed manifest."""

    signed: SignedManifest
    kind: str  # "daemon" or "checkpoints", where the files came from
    average: bool  # whether the files hold the moving averages of the weights
    files: tuple[StageFile, ...]
    base: Path  # the folder that the paths in the manifest begin in


def run(
    wanted: str,
    out: Path,
    directories: Sequence[Path] = (),
    *,
    average: bool = True,
    dtype: str = "float32",
    shard_size: str = "5GB",
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Exports the run `wanted` to `out` and returns the exit code; the other arguments are flags of `swarm export`."""
    started = time.monotonic()
    shard_bytes = parse_size(shard_size)
    known_dtype = next((name for name in DTYPES if name == dtype), None)
    if known_dtype is None:
        raise Failure(f"--dtype {dtype} is unknown; use {' or '.join(DTYPES)}", USAGE)
    place = check_export_place(out, replace=force)
    with _sigterm_as_interrupt():
        sources = find_stages(wanted, directories, average=average)
        written, parameters = _export(sources, place, known_dtype, shard_bytes)
    sizes = {name: file.size for name, file in sorted(written.items())}
    result = _summary(sources, known_dtype) | {"out": str(place), "parameters": parameters}
    result |= {"bytes": sum(sizes.values()), "files": sizes, "seconds": round(time.monotonic() - started, 3)}
    (console.print_json if as_json else _print_result)(result)
    return console.DONE


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Within the `with`, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that nothing half written stays."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_size(text: str) -> int:
    """Returns the bytes of "5GB" or "200 MB". Raises Failure for any other text."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]B)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise Failure(f"--shard-size {text} is no size; write it as 5GB or 200MB", USAGE)
    return int(float(match[1]) * UNITS[match[2]])


def _export(sources: Sources, place: Path, dtype: Dtype, shard_bytes: int) -> tuple[dict[str, FileDigest], int]:
    """Checks all weights, then writes the folder. Returns every file's size and hash, and the number of parameters."""
    from agora.model import family_of

    manifest = sources.signed.manifest
    family = family_of(manifest.model)
    with open_stages(sources.signed.run_id, sources.files, exported_tensors(manifest, family)) as model:
        texts = _other_files(sources, family, model.numel, DTYPES[dtype])
        size = SOURCE_BYTES * model.numel
        with ProgressDisplay("checking", size) as bar:
            model.check(bar.advance)
        with fresh_folder(place, ITEM_BYTES[dtype] * model.numel + SPARE_BYTES) as folder:
            with ProgressDisplay(f"writing {place}", size) as bar:
                written = model.write(folder, dtype, shard_bytes, bar.advance)
            written |= {name: write_file(folder / name, [content], PUBLIC) for name, content in texts.items()}
            write_file_list(folder, _summary(sources, dtype), written)
    return written, model.numel


def exported_tensors(manifest: Manifest, family: Family) -> dict[int, list[ExportedTensor]]:
    """Returns the tensors that are exported from each stage of the run."""
    stages = range(manifest.stage_count)
    return {stage: family.exported_tensors(manifest.layers_of(stage), manifest.seed) for stage in stages}


def _other_files(sources: Sources, family: Family, parameters: int, dtype: str) -> dict[str, bytes]:
    """Returns the files beside the shards by name: tokenizer, configs, card, manifest. dtype: as transformers says."""
    manifest = sources.signed.manifest
    model = manifest.model
    files, end_of_text = tokenizer_files(manifest.data.tokenizer, model.vocabulary, model.context, sources.base)
    steps = {file.stage: file.step for file in sources.files}
    words = ExportInWords(parameters, dtype, SOURCES[sources.kind], sources.average)
    card = model_card(manifest, family.describe(), steps, words)
    configs = family.config_files(dtype, end_of_text)
    return {
        **files,
        **{name: json.dumps(value, indent=2).encode() + b"\n" for name, value in configs.items()},
        "README.md": card.encode() + b"\n",
        "run.toml": sources.signed.to_toml().encode(),
    }


def _summary(sources: Sources, dtype: str) -> dict[str, Any]:
    """Returns the fields that export.json and --json have in common: run, source, weights, dtype, steps by stage."""
    return {
        "schema": 1,
        "run_id": sources.signed.run_id,
        "name": sources.signed.manifest.name,
        "from": sources.kind,
        "average": sources.average,
        "dtype": dtype,
        "stages": steps_by_stage(sources),
    }


def steps_by_stage(sources: Sources) -> list[dict[str, int]]:
    """Returns for each stage its number and the step of its weights, as --json shows them."""
    return [{"stage": file.stage, "step": file.step} for file in sources.files]


def _print_result(result: Mapping[str, Any]) -> None:
    """Prints the result for people, in four lines."""
    shards = sum(name.endswith(".safetensors") for name in result["files"])
    stages = ", ".join(f"{stage['stage']} at step {stage['step']}" for stage in result["stages"])
    print(f"exported  {result['name']} ({result['run_id'][:12]}) to {result['out']}")
    print(
        f"weights   {result['parameters']:,} parameters, {result['dtype']}, {result['bytes'] / 1e6:,.1f} MB in "
        f"{len(result['files'])} files, {shards} of them shards; "
        f"{'their moving average' if result['average'] else 'of the last step'}"
    )
    print(f"stages    {stages}, from {SOURCES[result['from']]}")
    print(f"load      AutoModelForCausalLM.from_pretrained({result['out']!r})")


def find_stages(run: str, directories: Sequence[Path], *, average: bool, ask_daemons: bool = True) -> Sources:
    """Returns the weights of every stage: collected by a running daemon of the run, else the newest checkpoints.

    run: a name, run id, manifest file or invite. directories: data directories, or folders of them; without any, the
    default one and those beside a manifest file. average: prefers the moving averages of the weights, which most runs
    keep. ask_daemons: if not, only checkpoints are read. Raises Failure with exit code 4 when a stage has none.
    """
    homes = [home for directory in directories for home in _homes_in(directory)]
    if not directories:
        homes = [paths.home_at(), *(_homes_below(Path(run).parent) if Path(run).is_file() else ())]
    reference = _resolve(run, homes)
    daemons = [entry for entry in paths.daemons() if ask_daemons and reference.is_of(entry)]
    homes = list(dict.fromkeys([*homes, *(paths.Home(Path(entry.root)) for entry in daemons)]))
    signed = _find_signed_manifest(reference, homes, daemons)
    average = average and signed.manifest.optimizer.average_decay > 0
    reasons = []
    for entry in daemons:
        try:
            files = _collect_stages(entry, signed.manifest.stage_count, average)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused) as error:
            reasons.append(f"the daemon in {entry.root} could not collect the stages: {error}")
            print_line(f"{reasons[-1]}; looking for checkpoints")
            continue
        return Sources(signed, "daemon", average, files, reference.base)
    reasons = reasons or ["no daemon of this run answers on this machine"]
    files = _newest_checkpoints(signed, homes, reasons, average)
    return Sources(signed, "checkpoints", average, files, reference.base)


def _homes_in(directory: Path) -> list[paths.Home]:
    """Returns `directory` if it is a data directory, else those in it: `swarm demo --dir` keeps one for each peer."""
    home = paths.home_at(directory)
    if home.runs.is_dir():
        return [home]
    return _homes_below(home.root) or [home]


def _homes_below(folder: Path) -> list[paths.Home]:
    """Returns the data directories in `folder`, sorted by name."""
    return [paths.Home(runs.parent) for runs in sorted(folder.glob("*/runs"))]


def _resolve(run: str, homes: Sequence[paths.Home]) -> RunReference:
    """Returns the run that `run` means in the first data directory that knows it. Raises InputError if none does."""
    for home in homes[:-1]:
        with contextlib.suppress(InputError):
            return runs.resolve(run, home)
    return runs.resolve(run, homes[-1])


def _find_signed_manifest(
    reference: RunReference, homes: Sequence[paths.Home], daemons: Sequence[paths.Entry]
) -> SignedManifest:
    """Returns the run's signed manifest: that of `reference`, else the one stored in a data directory of `homes`.

    A draft is the run of the first of `daemons`. Raises Failure for a draft without a daemon and for a manifest that is
    in no data directory, ManifestError or DiskError for a stored one that is malformed or cannot be read.
    """
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


def _collect_stages(entry: paths.Entry, count: int, average: bool) -> tuple[StageFile, ...]:
    """Has a daemon fetch every stage's weights from the swarm. Raises DaemonUnreachable or DaemonRefused."""
    with ProgressDisplay(f"the daemon in {entry.root} collects {count} stages from the swarm"):
        answer = control_client.ask(Path(entry.socket), "collect", timeout_s=COLLECT_SECONDS, average=average)
    try:
        steps, files = answer["steps"], answer["files"]
        return tuple(StageFile(stage, int(steps[str(stage)]), Path(files[str(stage)])) for stage in range(count))
    except (KeyError, TypeError, ValueError):
        raise control_client.DaemonRefused("bad-answer", "its answer does not name a file for every stage") from None


def _newest_checkpoints(
    signed: SignedManifest, homes: Sequence[paths.Home], reasons: Sequence[str], average: bool
) -> tuple[StageFile, ...]:
    """Returns the newest whole checkpoint of every stage. Raises Failure, with `reasons`, when a stage has none."""
    run, count, files = signed.run_id, signed.manifest.stage_count, dict[int, StageFile]()
    name, prefix = (MOMENTS, f"{AVERAGE}.") if average else (WEIGHTS, "")
    for stage, home in itertools.product(range(count), homes):
        newest = newest_checkpoint(home.checkpoints(run), run, stage, lambda error: print_line(f"passed over: {error}"))
        if newest is not None and (stage not in files or newest.step > files[stage].step):
            files[stage] = StageFile(stage, newest.step, newest.path / name, prefix)
    missing = [str(stage) for stage in range(count) if stage not in files]
    if missing:
        stages, places = ", ".join(missing), ", ".join(str(home.root) for home in homes)
        raise Failure(
            f"stage {stages} is missing: {'; '.join(reasons)}; no whole checkpoint of it is in {places}; export while "
            "`agora-node join RUN` runs here, or name the data directories of those who held it with --dir DIR",
            STALLED,
        )
    return tuple(files[stage] for stage in range(count))
