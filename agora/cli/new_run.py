"""`swarm new`: writes a manifest, from a preset or for a base model of this machine or of the Hub.

Knows: the flags, the file. Must not know: which values are good ones (presets, tuning_manifest). Loads torch and
transformers only for a base model.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from agora_protocol import manifest
from agora_protocol.errors import ManifestError

from agora.cli.console import USAGE, Failure, print_json, print_line
from agora.cli.tuning_manifest import TuningChoice, manifest_of_base_model
from agora.data.tokenizer import BYTES
from agora.state.hub_models import fetch_model, hub_id_of

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
    """Writes a manifest to the new file `path`, and prints a summary and the next command. The arguments are flags.

    name: the run's name, None to make it of the file's. as_json: prints one JSON object instead. Raises Failure when
    the file exists or cannot be written, for both a preset and a base model, for a choice without a base model, and for
    an invalid manifest; BaseModelError for a base model that cannot be fetched or read.
    """
    if base_model is not None and preset is not None:
        raise Failure("--preset and --base-model are two beginnings; give one of them", USAGE)
    if base_model is None and choice != NOTHING_CHOSEN:
        raise Failure("--data and what is learnt of it are for a base model; give one with --base-model DIR", USAGE)
    if path.exists():
        raise Failure(f"{path} exists; choose another name, or remove it first")
    name = name or re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.stem)[:64] or "run"
    found: list[str] = []
    try:
        if base_model is not None:
            folder, base_model = _find_base_model(base_model)
            tuning = manifest_of_base_model(folder, name, choice)
            made, found = tuning.manifest, tuning.summary_lines()
        else:
            made = manifest.preset(preset or "tiny").with_values(name=name)
            found = _tokenizer_lines(made)
    except ManifestError as error:
        raise Failure(str(error), USAGE) from None
    _write_manifest(path, made)
    flag = f" --base-model {shlex.quote(str(base_model))}" if base_model is not None else ""
    next_command = f"agora-node join {shlex.quote(str(path))}{flag}"
    if as_json:
        print_json({"schema": 1, "manifest": str(path), "name": name, "summary": found, "next": next_command})
        return
    for line in found:
        print_line(line)
    print_line(f"wrote {path}: edit it, then start the run with `{next_command}`")


def _write_manifest(path: Path, made: manifest.Manifest) -> None:
    """Writes the manifest to the new file `path`. Raises Failure when that cannot be done."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made.to_toml())
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None


def _tokenizer_lines(made: manifest.Manifest) -> list[str]:
    """Returns a line for people about a preset's tokenizer; [] if bytes use the whole vocabulary, or it is a file."""
    if made.data.tokenizer != BYTES or made.model.vocabulary == BYTE_VALUES:
        return []
    return [
        f"tokenizer    bytes, which need no file; for the vocabulary of {made.model.vocabulary:,} name a "
        "tokenizer.json, or its folder, in [data] tokenizer"
    ]


def _find_base_model(named: Path) -> tuple[Path, Path]:
    """Returns the base model's folder, and the name of the same model for the next command.

    A model of the Hub is fetched first; its name then contains the commit. Raises BaseModelError.
    """
    wanted = hub_id_of(named)
    if wanted is None:
        return named, named
    print_line(f"fetching {wanted} from the Hugging Face Hub, unless it is here: config, tokenizer, safetensors files")
    found = fetch_model(wanted)
    print_line(f"hub          {found.name} is in {found.folder}")
    return found.folder, Path(str(found.name))
