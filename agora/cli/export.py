"""`swarm export`: the result of a run as a folder that Hugging Face's transformers loads.

Knows: the order of things, and what it prints. Must not know: how stages are found (export_sources), checked and
written (agora.state), or named (agora.model.hf); loads torch only once there is something to export.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora.cli import console, export_sources
from agora.cli.console import USAGE, Failure
from agora.cli.export_sources import Sources
from agora.cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

    from agora.state.export import Dtype, Merge, Part
    from agora.state.files import FileDigest

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DTYPES: dict[str, str] = {"float32": "float32", "bf16": "bfloat16"}
SPARE_BYTES = 64 * 2**20
SOURCES = {"daemon": "the swarm, through a daemon of it", "checkpoints": "checkpoints of its peers"}


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for."""

    run: str
    out: Path
    directories: tuple[Path, ...]
    dtype: str
    shard_size: str
    force: bool


def run(wish: Wish, *, as_json: bool) -> int:
    """Finds, checks and writes; the exit code. Failure and AgoraError say what is wrong."""
    from agora.state.folder import place_for

    began = time.monotonic()
    shard_bytes = size_of(wish.shard_size)
    if wish.dtype not in DTYPES:
        raise Failure(f"--dtype {wish.dtype} is unknown; use {' or '.join(DTYPES)}", USAGE)
    place = place_for(wish.out, replace=wish.force)
    with _terminated_as_interrupted():
        sources = export_sources.find(wish.run, wish.directories)
        written, parameters = _export(sources, place, wish.dtype, shard_bytes)
    value = _result(sources, place, wish.dtype, parameters, written)
    value["seconds"] = round(time.monotonic() - began, 3)
    if as_json:
        console.print_json(value)
    else:
        _print(value)
    return console.DONE


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that nothing half written stays; a second one ends it at once."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def size_of(text: str) -> int:
    """Bytes of "5GB", "200 MB". Raises Failure."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]B)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise Failure(f"--shard-size {text} is no size; write it as 5GB or 200MB", USAGE)
    return int(float(match[1]) * UNITS[match[2]])


def _export(sources: Sources, place: Path, dtype: str, shard_bytes: int) -> tuple[dict[str, FileDigest], int]:
    """Everything is checked before the first byte is written; what was written, and the number of parameters."""
    from agora.state.export import ITEM_BYTES, SOURCE_BYTES, Merge
    from agora.state.folder import fresh_folder, write_list, write_text

    wire: Dtype = "bf16" if dtype == "bf16" else "float32"
    manifest = sources.signed.manifest
    with Merge(sources.signed.run_id, sources.files, parts_of(manifest)) as merge:
        texts = _texts(sources, merge, dtype)
        size = SOURCE_BYTES * merge.numel
        with ProgressDisplay("checking", size) as bar:
            merge.check(bar.advance)
        with fresh_folder(place, ITEM_BYTES[wire] * merge.numel + SPARE_BYTES) as folder:
            with ProgressDisplay(f"writing {place}", size) as bar:
                written = merge.write(folder, wire, shard_bytes, bar.advance)
            written |= {name: write_text(folder / name, content) for name, content in texts.items()}
            write_list(folder, _about(sources, dtype), written)
    return written, merge.numel


def parts_of(manifest: Manifest) -> list[Part]:
    """Every tensor of the run's model, in the order of its stages."""
    from agora.model import hf, parameter_shapes
    from agora.state.export import Part

    count, unfolding = manifest.stage_count, hf.Unfolding(manifest.model, manifest.seed)
    return [
        Part(stage, name, hf.tensor_name(name), unfolding.shape(name, shape), shape, unfolding.of(name))
        for stage in range(count)
        for name, shape in parameter_shapes(manifest.model, manifest.layers_of(stage), stage, count).items()
    ]


def _texts(sources: Sources, merge: Merge, dtype: str) -> dict[str, bytes]:
    """Every file that is no shard, by name."""
    from agora.data.tokenizer_files import tokenizer_files
    from agora.model import hf
    from agora.state.card import model_card

    manifest = sources.signed.manifest
    tokenizer = tokenizer_files(
        manifest.data.tokenizer, manifest.model.vocabulary, manifest.model.context, sources.base
    )
    steps = {file.stage: file.step for file in sources.files}
    card = model_card(manifest, steps, merge.numel, DTYPES[dtype], SOURCES[sources.kind])
    return tokenizer.files | {
        "config.json": _json(hf.config(manifest.model, DTYPES[dtype], tokenizer.end_of_text)),
        "generation_config.json": _json(hf.generation_config(tokenizer.end_of_text)),
        "README.md": card.encode() + b"\n",
        "run.toml": sources.signed.to_toml().encode(),
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _about(sources: Sources, dtype: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "run_id": sources.signed.run_id,
        "name": sources.signed.manifest.name,
        "from": sources.kind,
        "dtype": dtype,
        "stages": [{"stage": file.stage, "step": file.step} for file in sources.files],
    }


def _result(
    sources: Sources, place: Path, dtype: str, parameters: int, written: dict[str, FileDigest]
) -> dict[str, Any]:
    sizes = {name: file.size for name, file in sorted(written.items())}
    about = _about(sources, dtype)
    return about | {"out": str(place), "parameters": parameters, "bytes": sum(sizes.values()), "files": sizes}


def _print(value: dict[str, Any]) -> None:
    shards = sum(name.endswith(".safetensors") for name in value["files"])
    for line in [
        f"exported  {value['name']} ({value['run_id'][:12]}) to {value['out']}",
        f"weights   {value['parameters']:,} parameters, {value['dtype']}, {value['bytes'] / 1e6:,.1f} MB in "
        f"{len(value['files'])} files, {shards} of them shards",
        f"stages    {_steps(value['stages'])}, from {SOURCES[value['from']]}",
        f"load      AutoModelForCausalLM.from_pretrained({value['out']!r})",
    ]:
        print(line)


def _steps(stages: Sequence[dict[str, int]]) -> str:
    return ", ".join(f"{stage['stage']} at step {stage['step']}" for stage in stages)
