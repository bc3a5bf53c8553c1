"""`swarm export`: writes the model of a run as a folder that Hugging Face's transformers loads, or peft.

| the run trains            | kind    | what is written                                              |
|---------------------------|---------|--------------------------------------------------------------|
| all parameters            | model   | the model                                                    |
| LoRA                      | adapter | the matrices of LoRA, to be loaded onto the base model       |
| LoRA, with --merge        | merged  | the base model with the matrices of LoRA added to its own    |

With --gguf, a model is one file for llama.cpp in place of its shards. With --push, the folder is also published on the
Hugging Face Hub. Loads torch only once there is something to export.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora_protocol.amendments import manifest_at
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import ADAPTER_FILE

from agora.cli import console
from agora.cli.console import EXIT_USAGE, Failure, ProgressDisplay, print_to_stderr
from agora.cli.stage_sources import FoundRun, StageSources, base_model_folder, collect_stages, find_run, steps_by_stage
from agora.data.tokenizer import tokenizer_files
from agora.node import daemon_registry, paths
from agora.node.control import control_client
from agora.node.run_files import KnownFiles
from agora.state.export_tensors import (
    ITEM_BYTES,
    SOURCE_BYTES,
    Dtype,
    ExportedTensor,
    OpenStages,
    ReportBytes,
    TensorBlocks,
    check_finite,
    open_stages,
    write_shards,
    write_weights_file,
)
from agora.state.files import PUBLIC, FileDigest, fresh_folder, resolve_export_folder, write_file, write_file_list
from agora.state.gguf_file import check_can_write_gguf, write_gguf
from agora.state.hub_publish import Repository, check_can_publish, open_repository, publish_folder
from agora.state.model_card import ExportDescription, Kind, model_card
from agora.swarm.amendments import describe_changes
from agora.tuning.chat.model_tokenizer import open_training_tokenizer, pretrained_tokenizer_files, turn_end_ids

if TYPE_CHECKING:
    from agora.model import Family

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# The dtypes of --dtype, and their names in transformers.
DTYPES: dict[Dtype, str] = {"float32": "float32", "bf16": "bfloat16"}
SPARE_BYTES = 64 * 2**20  # of free disk, for the files other than weights
SHARD_SIZE = "5GB"
GGUF_FILE = "model.gguf"
ABOUT = frozenset({"README.md", "run.toml", "amendments"})  # a GGUF file has the configs and the tokenizer in it
MODELFILE, FROM_GGUF = "Modelfile", f"FROM ./{GGUF_FILE}\n".encode()  # for `ollama create`
STATUS_TIMEOUT_S = 5.0
SUFFIXES: dict[Kind, str] = {"model": "", "adapter": ", as an adapter", "merged": ", merged into its base model"}
LOADERS: dict[Kind, str] = {
    "model": "AutoModelForCausalLM.from_pretrained({})",
    "adapter": "PeftModel.from_pretrained(base, {}), with the base model as base",
    "merged": "AutoModelForCausalLM.from_pretrained({})",
}
SOURCES = {"daemon": "the swarm, through a daemon of it", "checkpoints": "checkpoints of its peers"}


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """What an export writes. shard_bytes: largest weights file; an adapter is one file of any size. base_model: for
    "merged" only. gguf: whether the weights are a file for llama.cpp.
    """

    folder: Path
    kind: Kind
    dtype: Dtype
    shard_bytes: int
    base_model: Path | None
    gguf: bool = False


def run(
    named_run: str,
    out: Path | None,
    directories: Sequence[Path] = (),
    *,
    push: str | None = None,
    private: bool = False,
    gguf: bool = False,
    average: bool = True,
    dtype: str = "float32",
    shard_size: str | None = None,
    merge: bool = False,
    base_model: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> int:
    """The weights come from where find_run and collect_stages find them. Raises Failure for wrong flags, and with exit
    code 4 when a stage has no weights; ExportError for damaged ones, DiskError if `out` cannot be written, PublishError
    if `push` cannot be published to, and what find_run raises.

    out: None to keep nothing here. push: ORG/NAME on the Hub, None for none. private: of a repository that is new.
    """
    started = time.monotonic()
    shard_bytes = parse_size(SHARD_SIZE if shard_size is None else shard_size)
    known_dtype = next((name for name in DTYPES if name == dtype), None)
    if known_dtype is None:
        raise Failure(f"--dtype {dtype} is unknown; use {' or '.join(DTYPES)}", EXIT_USAGE)
    if base_model is not None and not merge:
        raise Failure("--base-model names the model that --merge adds an adapter to; give both, or neither", EXIT_USAGE)
    if out is None and push is None:
        raise Failure("give --out DIR, --push ORG/NAME, or both", EXIT_USAGE)
    if push is not None:
        check_can_publish(push)
    elif private:
        raise Failure("--private is for a repository that --push makes; give both, or neither", EXIT_USAGE)
    with _sigterm_as_interrupt(), contextlib.ExitStack() as stack:
        kept_folder = resolve_export_folder(out, replace=force) if out is not None else None
        found = find_run(named_run, directories)
        out_folder = kept_folder or _temporary_folder(found, stack)
        kind = choose_kind(found.signed.manifest, merge)
        base_folder = _require_base_model(base_model, directories, found.known_files()) if kind == "merged" else None
        if kind == "adapter" and gguf:
            raise Failure("--gguf writes a whole model; give --merge --base-model DIR with it", EXIT_USAGE)
        if gguf:
            check_can_write_gguf()
        if (kind == "adapter" or gguf) and shard_size is not None:
            print_to_stderr("the weights are one file; --shard-size has no effect")
        target = ExportTarget(out_folder, kind, known_dtype, shard_bytes, base_folder, gguf)
        repository = open_repository(push, found.signed.run_id, private=private) if push is not None else None
        sources = collect_stages(found, average=average)
        written, parameters = _export(sources, target)
        pushed = _push(out_folder, repository, sources) if repository is not None else None
    sizes = {name: file.size for name, file in sorted(written.items())}
    result = _summary(sources, target) | {"out": str(kept_folder) if kept_folder else None, "parameters": parameters}
    result |= {"pushed": pushed} if pushed is not None else {}
    result |= {"bytes": sum(sizes.values()), "files": sizes, "seconds": round(time.monotonic() - started, 3)}
    (console.print_json if as_json else _print_result)(result)
    return console.EXIT_DONE


def _temporary_folder(found: FoundRun, stack: contextlib.ExitStack) -> Path:
    # Not where temporary files go: those places are often small. Some home has at least the run's manifest.
    home = next((home for home in found.homes if home.root.is_dir()), paths.home_at())
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".push-", dir=home.root))) / "export"


def _push(folder: Path, repository: Repository, sources: StageSources) -> dict[str, str]:
    steps = sorted({file.step for file in sources.files})
    message = f"{sources.signed.manifest.name} at step {' to '.join(str(step) for step in (steps[0], *steps[1:][-1:]))}"
    with ProgressDisplay(f"publishing {repository.repo}"):
        return {"repo": repository.repo, "commit": publish_folder(folder, repository, message)}


def choose_kind(manifest: Manifest, merge: bool) -> Kind:
    """Raises Failure for `merge` of a run without LoRA."""
    if manifest.model.has_reference:
        return "merged" if merge else "adapter"
    if merge:
        raise Failure(
            f"{manifest.name} trains all parameters, so there is no adapter to merge, and what it exports is a whole "
            "model; leave --merge out",
            EXIT_USAGE,
        )
    return "model"


def _require_base_model(flag: Path | None, directories: Sequence[Path], known: KnownFiles) -> Path:
    folder = base_model_folder(flag, directories, known)
    if folder is None:
        raise Failure("--merge adds the adapter to its base model; name that model's folder with --base-model DIR")
    if not folder.is_dir():
        raise Failure(f"--base-model {folder} is not a folder; name the one that has the base model's files")
    return folder


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_size(text: str) -> int:
    """Bytes of "5GB" or "0.2 mb", KB = 1000. Raises Failure for 0 and any other text."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]B)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise Failure(f"--shard-size {text} is not a size; write it as 5GB or 200MB", EXIT_USAGE)
    return int(float(match[1]) * UNITS[match[2]])


def _export(sources: StageSources, target: ExportTarget) -> tuple[dict[str, FileDigest], int]:
    from agora.model import family_of

    manifest = sources.signed.manifest
    family = family_of(manifest.model)
    with open_stages(sources.signed.run_id, sources.files, exported_tensors(manifest, family)) as stages:
        tensors = _tensors_to_write(stages, family, target)
        parameters = sum(tensor.numel for tensor in tensors)
        texts = _other_files(sources, family, parameters, target)
        with ProgressDisplay("checking", SOURCE_BYTES * stages.numel) as bar:
            stages.check(bar.advance)
        size = SOURCE_BYTES * parameters
        if target.kind == "merged":
            with ProgressDisplay("checking what is merged", size) as bar:
                check_finite(tensors, bar.advance)
        with fresh_folder(target.folder, ITEM_BYTES[target.dtype] * parameters + SPARE_BYTES) as folder:
            with ProgressDisplay(f"writing {target.folder}", size) as bar:
                if target.gguf:
                    made = write_gguf(folder / GGUF_FILE, tensors, texts, manifest.name, target.dtype, bar.advance)
                    written = {GGUF_FILE: made}
                    texts = {name: text for name, text in texts.items() if name in ABOUT} | {MODELFILE: FROM_GGUF}
                else:
                    written = _write_weights(folder, tensors, target, bar.advance)
            written |= {name: write_file(folder / name, [content], PUBLIC) for name, content in texts.items()}
            write_file_list(folder, _summary(sources, target), written)
    return written, parameters


def _tensors_to_write(stages: OpenStages, family: Family, target: ExportTarget) -> list[TensorBlocks]:
    if target.base_model is None:
        return stages.converted_tensors()
    with ProgressDisplay(f"hashing the base model in {target.base_model}"):
        return family.merged_tensors(target.base_model, stages.read_tensor)


def _write_weights(
    folder: Path, tensors: Sequence[TensorBlocks], target: ExportTarget, report: ReportBytes
) -> dict[str, FileDigest]:
    if target.kind == "adapter":
        return {ADAPTER_FILE: write_weights_file(folder / ADAPTER_FILE, tensors, target.dtype, report)}
    return write_shards(folder, tensors, target.dtype, target.shard_bytes, report)


def exported_tensors(manifest: Manifest, family: Family) -> dict[int, list[ExportedTensor]]:
    """Returns, by stage, the tensors that an export contains of the stage: names, shapes and how each is converted."""
    stages = range(manifest.stage_count)
    return {stage: family.exported_tensors(manifest.layers_of(stage), manifest.seed) for stage in stages}


def _other_files(sources: StageSources, family: Family, parameters: int, target: ExportTarget) -> dict[str, bytes]:
    manifest = sources.signed.manifest
    described = family.describe()
    dtype = DTYPES[target.dtype]
    source = sources.find_tokenizer(target.base_model)
    tokenizer = source, manifest.model.vocabulary, manifest.model.context, sources.base
    end_of_text: int | None = None  # a base model's own config has it
    if described.is_pretrained:
        learns_samples = manifest.objective.kind != "lm"
        expected = manifest.data.tokenizer_hash
        files = pretrained_tokenizer_files(
            *tokenizer,
            learns_samples=learns_samples,
            expected_hash=expected,
            template=manifest.data.chat_template,
        )
    else:
        files, end_of_text = tokenizer_files(*tokenizer)
    turn_ends = learnt_turn_ends(manifest, source)
    if target.base_model is None:
        configs = family.config_files(dtype, end_of_text, turn_ends)
    else:
        configs = family.merged_config_files(target.base_model, dtype, turn_ends)
    steps = {file.stage: file.step for file in sources.files}
    metrics = _fetch_metrics(sources.daemon)
    changes = tuple(
        f"from step {each.amendment.from_step}: {describe_changes(each.amendment)}" for each in sources.amendments
    )
    source_words = SOURCES[sources.kind]
    amended = manifest_at(manifest, [each.amendment for each in sources.amendments], max(steps.values(), default=0))
    exported = ExportDescription(
        parameters,
        dtype,
        source_words,
        sources.average,
        target.kind,
        metrics,
        changes,
        target.gguf,
        codec=amended.boundary.codec,
    )
    sealed = "".join(f"{each.sealed.hex()}\n" for each in sources.amendments).encode()
    return {
        **files,
        **{name: json.dumps(value, indent=2).encode() + b"\n" for name, value in configs.items()},
        "README.md": model_card(manifest, described, steps, exported).encode() + b"\n",
        "run.toml": sources.signed.to_toml().encode(),
        **({"amendments": sealed} if sealed else {}),
    }


def learnt_turn_ends(manifest: Manifest, tokenizer: str) -> tuple[int, ...]:
    """Ids of the tokens that end an answer; () for a run on plain text. tokenizer: "bytes", or its path here."""
    if manifest.objective.kind == "lm":
        return ()
    template = manifest.data.chat_template
    return turn_end_ids(open_training_tokenizer(tokenizer, manifest.model.vocabulary, template=template))


def _fetch_metrics(daemon: daemon_registry.DaemonEntry | None) -> dict[str, float]:
    if daemon is None:
        return {}
    try:
        status = control_client.ask(Path(daemon.socket), "status", timeout_s=STATUS_TIMEOUT_S)
        reported = {"training loss": status["loss"], **status["tuning"]}
    except (control_client.DaemonUnreachable, control_client.DaemonRefused, KeyError, TypeError):
        return {}
    return {name: float(value) for name, value in reported.items() if isinstance(value, (int, float))}


def _summary(sources: StageSources, target: ExportTarget) -> dict[str, Any]:
    return {
        "schema": 1,
        "run_id": sources.signed.run_id,
        "name": sources.signed.manifest.name,
        "kind": target.kind,
        "from": sources.kind,
        "average": sources.average,
        "dtype": target.dtype,
        **({"gguf": True} if target.gguf else {}),
        "stages": steps_by_stage(sources),
    }


def _print_result(result: Mapping[str, Any]) -> None:
    pushed, out = result.get("pushed"), result["out"] or result["pushed"]["repo"]
    shards = sum(name.endswith((".safetensors", ".gguf")) for name in result["files"])
    stages = ", ".join(f"{stage['stage']} at step {stage['step']}" for stage in result["stages"])
    console.print_to_stdout(f"exported  {result['name']} ({result['run_id'][:12]}) to {out}{SUFFIXES[result['kind']]}")
    console.print_to_stdout(
        f"weights   {result['parameters']:,} parameters, {result['dtype']}, {result['bytes'] / 1e6:,.1f} MB in "
        f"{len(result['files'])} files, {shards} of them with weights; "
        f"{'their moving average' if result['average'] else 'of the last step'}"
    )
    console.print_to_stdout(f"stages    {stages}, from {SOURCES[result['from']]}")
    if pushed:
        console.print_to_stdout(f"published {pushed['commit']}")
    load = f"llama-cli -m {out}/{GGUF_FILE}" if result.get("gguf") else LOADERS[result["kind"]].format(repr(out))
    console.print_to_stdout(f"load      {load}")
