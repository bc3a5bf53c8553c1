"""`swarm export`: writes the model of a run as a folder that Hugging Face's transformers loads.

Knows: the order of the work, and what is printed. Must not know: how stages are found (export_sources), checked and
written (agora.state), or exported by a family (agora.model). Loads torch only once there is something to export.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora.cli import console
from agora.cli.console import USAGE, Failure, ProgressDisplay

if TYPE_CHECKING:
    from agora.cli.export_sources import Sources
    from agora.model import Family
    from agora.state.files import FileDigest
    from agora.state.merged_model import Dtype

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DTYPES: dict[Dtype, str] = {"float32": "float32", "bf16": "bfloat16"}
"""The dtypes of --dtype, and their names in transformers."""
SPARE_BYTES = 64 * 2**20
SOURCES = {"daemon": "the swarm, through a daemon of it", "checkpoints": "checkpoints of its peers"}


def run(
    wanted: str,
    out: Path,
    directories: Sequence[Path] = (),
    *,
    dtype: str = "float32",
    shard_size: str = "5GB",
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Finds, checks and writes the model of the run `wanted`; the other arguments are the flags of `swarm export`.

    Returns the exit code. Raises Failure or AgoraError with what to do.
    """
    from agora.cli.export_sources import find_stages
    from agora.state.files import check_export_place

    started = time.monotonic()
    shard_bytes = parse_size(shard_size)
    known_dtype = next((name for name in DTYPES if name == dtype), None)
    if known_dtype is None:
        raise Failure(f"--dtype {dtype} is unknown; use {' or '.join(DTYPES)}", USAGE)
    place = check_export_place(out, replace=force)
    with _sigterm_as_interrupt():
        sources = find_stages(wanted, directories)
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
    from agora.state.files import PUBLIC, fresh_folder, write_file, write_file_list
    from agora.state.merged_model import ITEM_BYTES, SOURCE_BYTES, open_stages

    manifest = sources.signed.manifest
    family = family_of(manifest.model)
    stages = range(manifest.stage_count)
    tensors = {stage: family.exported_tensors(manifest.layers_of(stage), manifest.seed) for stage in stages}
    with open_stages(sources.signed.run_id, sources.files, tensors) as model:
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


def _other_files(sources: Sources, family: Family, parameters: int, dtype: str) -> dict[str, bytes]:
    """Returns the content of the files beside the shards, by name: tokenizer, configs, README.md, run.toml.

    dtype: as transformers calls it.
    """
    from agora.data.tokenizer import tokenizer_files
    from agora.state.model_card import model_card

    manifest = sources.signed.manifest
    model = manifest.model
    files, end_of_text = tokenizer_files(manifest.data.tokenizer, model.vocabulary, model.context, sources.base)
    steps = {file.stage: file.step for file in sources.files}
    card = model_card(manifest, family.describe(), steps, parameters, dtype, SOURCES[sources.kind])
    configs = family.config_files(dtype, end_of_text)
    return {
        **files,
        **{name: json.dumps(value, indent=2).encode() + b"\n" for name, value in configs.items()},
        "README.md": card.encode() + b"\n",
        "run.toml": sources.signed.to_toml().encode(),
    }


def _summary(sources: Sources, dtype: str) -> dict[str, Any]:
    """Returns the fields that export.json and --json have in common: run, name, source, dtype, steps by stage."""
    return {
        "schema": 1,
        "run_id": sources.signed.run_id,
        "name": sources.signed.manifest.name,
        "from": sources.kind,
        "dtype": dtype,
        "stages": [{"stage": file.stage, "step": file.step} for file in sources.files],
    }


def _print_result(result: Mapping[str, Any]) -> None:
    """Prints the result for people, in four lines."""
    shards = sum(name.endswith(".safetensors") for name in result["files"])
    stages = ", ".join(f"{stage['stage']} at step {stage['step']}" for stage in result["stages"])
    print(f"exported  {result['name']} ({result['run_id'][:12]}) to {result['out']}")
    print(
        f"weights   {result['parameters']:,} parameters, {result['dtype']}, {result['bytes'] / 1e6:,.1f} MB in "
        f"{len(result['files'])} files, {shards} of them shards"
    )
    print(f"stages    {stages}, from {SOURCES[result['from']]}")
    print(f"load      AutoModelForCausalLM.from_pretrained({result['out']!r})")
