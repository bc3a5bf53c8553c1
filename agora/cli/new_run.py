"""`swarm new`: writes a manifest, from a preset or for a base model in a folder of this machine.

Knows: good values to begin with. Must not know: how layers are computed. Loads torch and transformers only for a base
model, whose files are then checked.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Final

from agora_protocol import manifest
from agora_protocol.base_config import parse_config, sizes_in
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import HfSection, Manifest

from agora.cli.console import USAGE, Failure, print_line

CONTEXT: Final = 1024
MICROBATCH: Final = 2
TARGET_TOKENS: Final = 16_384
OPTIMIZER: Final[dict[str, Any]] = {"learning_rate": 2e-5, "weight_decay": 0.0}
"""What differs from pretraining: small steps, and nothing that pulls trained weights towards 0."""
TOKENIZER: Final = "tokenizer.json"


def run(path: Path, preset: str | None, base_model: Path | None, name: str | None) -> None:
    """Writes the file `path`, which must be new, and prints how to go on. The arguments are flags of `swarm new`.

    name: None for one made of the file's. Raises Failure when the file exists or cannot be written, for a preset
    beside a base model and for a manifest that is not valid.
    """
    if base_model is not None and preset is not None:
        raise Failure("--preset and --base-model are two beginnings; give one of them", USAGE)
    if path.exists():
        raise Failure(f"{path} exists; choose another name, or remove it first")
    name = name or re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.stem)[:64] or "run"
    try:
        if base_model is not None:
            made = manifest_of_base_model(base_model, name)
        else:
            made = manifest.preset(preset or "tiny").replaced(name=name)
    except ManifestError as error:
        raise Failure(str(error), USAGE) from None
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made.to_toml())
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None
    flag = f" --base-model {shlex.quote(str(base_model))}" if base_model is not None else ""
    print_line(f"wrote {path}: edit it, then start the run with `agora-node join {path}{flag}`")


def manifest_of_base_model(folder: Path, name: str) -> Manifest:
    """Returns a manifest that continues to train, in all its parameters, the Hugging Face model in `folder`.

    Reads the weights files once, for their hashes. Raises Failure without a tokenizer in the folder, BaseModelError for
    missing or unreadable files, ManifestError for a config that cannot be trained, TuningMissing without transformers.
    """
    from agora.model.base_model import file_hash, read_config, tensor_list_hash, weight_files
    from agora.model.hf_family import HfFamily

    folder = folder.expanduser().absolute()
    text = read_config(folder)
    try:
        sizes = sizes_in(parse_config(text))
    except ValueError as error:
        raise ManifestError(f"{folder / 'config.json'} {error}; choose another model.") from None
    if not (folder / TOKENIZER).is_file():
        raise Failure(
            f"{folder} has no {TOKENIZER}, the tokenizer that the run's text is read with; write it there with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        )
    names = weight_files(folder)
    size = sum((folder / file).stat().st_size for file in names)
    print_line(f"reading {len(names)} weights files of {size / 1e6:,.1f} MB, for their hashes")
    context = min(CONTEXT, sizes.positions)
    tokens = MICROBATCH * context
    weights = tuple((file, file_hash(folder / file)) for file in names)
    values = {
        "name": name,
        "model": {"family": "hf", "config": text, "context": context, "weights": weights}
        | {"tensors_hash": tensor_list_hash(folder, names)},
        "stages": {"count": min(2, sizes.layers)},
        "schedule": {"microbatch": MICROBATCH},
        "optimizer": {**OPTIMIZER, "target_tokens": max(TARGET_TOKENS // tokens, 1) * tokens},
        "data": {"tokenizer": str(folder / TOKENIZER)},
    }
    made = Manifest.from_values(values, str(folder))
    if isinstance(made.model, HfSection):
        HfFamily(made.model).check_folder(folder)
    return made
