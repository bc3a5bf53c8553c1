"""`swarm new`: writes a manifest, from a preset or for a base model of this machine or of the Hub.

Loads torch and
transformers only for a base model.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from agora_protocol import manifest
from agora_protocol.errors import ManifestError

from agora.cli.console import USAGE, Failure, print_json, print_to_stderr
from agora.cli.tuning_manifest import TuningChoice, manifest_of_base_model
from agora.data.tokenizer import BYTES
from agora.tuning.base.hub import fetch_model, hub_id_of

NOTHING_CHOSEN = TuningChoice()
BYTE_VALUES = 256


def run(
    path: Path,
    preset: str | None,
    base_model: Path | None,
    name: str | None,
    choice: TuningChoice = NOTHING_CHOSEN,
    *,
    as_json: bool = False,
) -> None:
    """Writes a manifest, from a preset or for a base model, to the new file `path`; prints what to do next.

    Prints a summary of the manifest too. preset: None for tiny, unless there is a base model. base_model: a folder, or
    a model of the Hub, which is fetched. name: the run's name, None for the file's name, without characters that a name
    cannot have. choice: how the base model is trained. as_json: prints one JSON object instead. Raises Failure when the
    file exists or cannot be written, for a preset together with a base model, for a choice without a base model, and
    for an invalid manifest; for a base model also BaseModelError, TuningMissing and, for the data file, DataError or
    DiskError.
    """
    if base_model is not None and preset is not None:
        raise Failure("--preset and --base-model exclude each other; give one of them", USAGE)
    if base_model is None and choice != NOTHING_CHOSEN:
        raise Failure("--data and what is learnt of it are for a base model; give one with --base-model DIR", USAGE)
    if path.exists():
        raise Failure(f"{path} exists; choose another name, or remove it first")
    name = name or re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.stem)[:64] or "run"
    try:
        if base_model is not None:
            folder, base_model = _find_base_model(base_model)
            tuning = manifest_of_base_model(folder, name, choice)
            made = tuning.manifest
            summary = tuning.summary_lines()
        else:
            made = manifest.preset(preset or "tiny").with_values(name=name)
            summary = _tokenizer_lines(made)
    except ManifestError as error:
        raise Failure(str(error), USAGE) from None
    _write_manifest(path, made)
    flag = f" --base-model {shlex.quote(str(base_model))}" if base_model is not None else ""
    next_command = f"agora-node join {shlex.quote(str(path))}{flag}"
    if as_json:
        print_json({"schema": 1, "manifest": str(path), "name": name, "summary": summary, "next": next_command})
        return
    for line in summary:
        print_to_stderr(line)
    print_to_stderr(f"wrote {path}: edit it, then start the run with `{next_command}`")


def _write_manifest(path: Path, made: manifest.Manifest) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made.to_toml())
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None


def _tokenizer_lines(made: manifest.Manifest) -> list[str]:
    # Returns a line that says how to name a tokenizer if the manifest has the byte tokenizer; otherwise [].
    if made.data.tokenizer != BYTES or made.model.vocabulary == BYTE_VALUES:
        return []
    return [
        f"tokenizer    bytes, which need no file; for the vocabulary of {made.model.vocabulary:,} name a "
        "tokenizer.json, or its folder, in [data] tokenizer"
    ]


def _find_base_model(named: Path) -> tuple[Path, Path]:
    hub_id = hub_id_of(named)
    if hub_id is None:
        return named, named
    print_to_stderr(
        f"fetching {hub_id} from the Hugging Face Hub, unless it is here: config, tokenizer, safetensors files"
    )
    found = fetch_model(hub_id)
    print_to_stderr(f"hub          {found.hub_id} is in {found.folder}")
    return found.folder, Path(str(found.hub_id))
