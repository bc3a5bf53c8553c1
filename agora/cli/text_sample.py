"""Loads the whole model of a run to write text; makes what a demo shows of it: some lines, and the export command.

Knows: the weights that an export would read, the tokenizer. Must not know: how a model computes, daemons. Loads torch
only to sample.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple

from agora_protocol.errors import AgoraError

from agora.cli.console import Failure, print_line
from agora.cli.export import exported_tensors
from agora.cli.stage_sources import StageSources, find_stages
from agora.data.tokenizer import Tokenizer, open_tokenizer
from agora.state.merged_model import open_stages

if TYPE_CHECKING:
    from agora.model import Stage

LINES: Final = 3
LINE_CHARACTERS: Final = 72
MAX_TOKENS: Final = 240


def begin_loading() -> None:
    """Starts a thread that imports what sampling needs, mainly torch, which takes seconds; does not wait for it."""
    Thread(target=import_module, args=("agora.model.generation",), daemon=True).start()


def try_sample(manifest: Path, seed: int, base_model: Path | None = None) -> list[str]:
    """Returns up to LINES lines of text written by the model whose checkpoints are next to the file `manifest`.

    base_model: as for load_model. If that is impossible, prints why and returns [].
    """
    try:
        sources = find_stages(str(manifest), [manifest.parent], average=True, ask_daemons=False)
        return sample_lines(sources, seed, base_model)
    except (AgoraError, Failure, OSError, RuntimeError) as error:  # RuntimeError is torch's
        print_line(f"the model's text cannot be shown: {error}")
        return []


class WholeModel(NamedTuple):
    """The model of a run as one stage, with its tokenizer. context: the most tokens that it attends to. Immutable."""

    stage: Stage
    tokenizer: Tokenizer
    context: int


def load_model(sources: StageSources, base_model: Path | None = None) -> WholeModel:
    """Returns the run's model as one stage over all layers, with its tokenizer; sets torch to one thread.

    base_model: the folder of the base model, which runs that train LoRA need: `sources` has only their LoRA matrices.
    Raises Failure without it, ExportError for damaged weights, and what open_tokenizer and Family.load_stage raise.
    """
    import torch

    from agora.model import family_of

    torch.set_num_threads(1)  # several threads mostly wait for each other in products of one sequence
    manifest = sources.signed.manifest
    if base_model is None and manifest.model.has_reference:
        raise Failure(
            f"{manifest.name} trains LoRA on top of a base model, so sampling needs that too; name its folder with "
            "--base-model DIR"
        )
    tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=sources.base)
    family = family_of(manifest.model)
    with open_stages(sources.signed.run_id, sources.files, exported_tensors(manifest, family)) as merged:
        merged.check()
        layers = range(manifest.model.layers)
        stage = family.load_stage(layers, manifest.seed, merged.read_weights(), base_model)
    stage.eval()  # dropout is for training
    return WholeModel(stage, tokenizer, manifest.model.context)


def sample_lines(sources: StageSources, seed: int, base_model: Path | None = None) -> list[str]:
    """Returns up to LINES lines, none blank, that the model writes at the beginning of a document.

    Lines are cut to LINE_CHARACTERS. At most MAX_TOKENS tokens are sampled, which may hold fewer lines. The same
    sources and seed give the same lines. Raises what load_model raises.
    """
    from agora.model.generation import continue_ids

    stage, tokenizer, context = load_model(sources, base_model)
    drawn = continue_ids(stage, tokenizer.separator.tolist(), context=context, seed=seed)
    ids: list[int] = []
    lines: list[str] = []
    for token in itertools.islice(drawn, MAX_TOKENS):
        ids.append(token)
        lines = list(printable_lines(tokenizer.decode(ids)))
        if len(lines) > LINES:  # so that the last one shown is whole
            break
    return lines[:LINES]


def printable_lines(text: str) -> Iterator[str]:
    """Yields the lines of `text` that are not blank, cut to LINE_CHARACTERS, with "?" for unprintable characters."""
    for line in text.splitlines():
        shown = "".join(letter if letter.isprintable() else "?" for letter in line.expandtabs(4))
        if shown.strip(" ?"):
            yield shown[:LINE_CHARACTERS].rstrip()


def lines_of_model(sample: Sequence[str], steps: int, directory: Path | None) -> list[str]:
    """Returns the lines that a demo prints about its model: the sampled lines, and the command that exports it.

    directory: that of --dir, None when nothing of the run is kept.
    """
    heading = f"text          what the model writes after {steps} steps; spelling comes first, sense much later:"
    file = "demo/run.toml" if directory is None else str(directory.expanduser().absolute() / "run.toml")
    command = _command("export", file, "--out", "model")
    if directory is None:
        command = f"{command}  # after a demo with --dir demo; this one is not kept"
    return [*([heading] if sample else []), *(f"              | {line}" for line in sample), f"export        {command}"]


def _command(*arguments: str) -> str:
    """Returns a shell command line `swarm ARGUMENTS`, with the path by which this process was started."""
    program = Path(sys.argv[0]).absolute()
    words = [str(program)] if program.name == "swarm" else [sys.executable, "-m", "agora.cli.main_swarm"]
    return shlex.join([*words, *arguments])
