"""Loads the whole model of a run to write text; makes what a demo shows of it: some lines, and the export command.

Loads torch
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

from agora.cli.console import Failure, print_to_stderr
from agora.cli.export import exported_tensors
from agora.cli.stage_sources import StageSources, find_stages
from agora.data.tokenizer import Tokenizer, open_tokenizer
from agora.state.merged_model import open_stages

if TYPE_CHECKING:
    from agora.model import StageModule

LINES: Final = 3
LINE_CHARACTERS: Final = 72
MAX_TOKENS: Final = 240


def begin_loading() -> None:
    """Starts a daemon thread that imports the modules needed for sampling, mainly torch; does not wait for it.

    The import takes seconds.
    """
    Thread(target=import_module, args=("agora.model.generation",), daemon=True).start()


def try_sample(manifest: Path, seed: int, base_model: Path | None = None) -> list[str]:
    """Returns up to LINES lines of text sampled from the model whose checkpoints are next to the file `manifest`.

    Takes the moving averages of the weights. base_model: the folder of the base model, needed for a run that trains
    LoRA. If sampling is impossible, prints why and returns [].
    """
    try:
        sources = find_stages(str(manifest), [manifest.parent], average=True, ask_daemons=False)
        return sample_lines(sources, seed, base_model)
    except (AgoraError, Failure, OSError, RuntimeError) as error:  # RuntimeError is torch's
        print_to_stderr(f"the model's text cannot be shown: {error}")
        return []


class WholeModel(NamedTuple):
    """The whole model of a run, loaded as one stage over all layers, with its tokenizer.

    context: maximum number of tokens that the model attends to.
    """

    stage: StageModule
    tokenizer: Tokenizer
    context: int


def load_model(sources: StageSources, base_model: Path | None = None) -> WholeModel:
    """Checks and loads the weights in `sources` as one model over all layers, for sampling, with its tokenizer.

    Sets torch to one thread for the whole process. base_model: the folder of the base model, needed for a run that
    trains LoRA, of which `sources` has only the LoRA matrices. Raises Failure if it is needed and None, ExportError for
    damaged weights, ManifestError for a wrong tokenizer, DiskError if its file cannot be read, LocalError if this
    machine lacks a package or cannot make the frozen weights.
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
    """Loads the model, and returns up to LINES lines, none blank, that it writes at the beginning of a document.

    Lines are cut to LINE_CHARACTERS. At most MAX_TOKENS tokens are sampled, which may hold fewer lines. The same
    sources and seed give the same lines. Raises every AgoraError of load_model, such as ExportError for damaged
    weights, and Failure if a base model is needed and None.
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
    """Yields the lines of `text`, each cut to LINE_CHARACTERS, with "?" for unprintable characters and tabs expanded.

    Removes spaces at the end. Skips lines that are then empty or only spaces and "?".
    """
    for line in text.splitlines():
        shown = "".join(letter if letter.isprintable() else "?" for letter in line.expandtabs(4))
        cut = shown[:LINE_CHARACTERS].rstrip()
        if cut.strip(" ?"):
            yield cut


def lines_of_model(sample: Sequence[str], steps: int, directory: Path | None) -> list[str]:
    """Returns the lines that a demo prints about its model: `sample` under a heading, and the command to export it.

    sample: lines that the model wrote; if empty, the heading is left out. steps: how many were trained. directory: that
    of --dir, None when nothing of the run is kept.
    """
    heading = f"text          what the model writes after {steps} steps; spelling comes first, sense much later:"
    file = "demo/run.toml" if directory is None else str(directory.expanduser().absolute() / "run.toml")
    command = _swarm_command("export", file, "--out", "model")
    if directory is None:
        command = f"{command}  # after a demo with --dir demo; this one is not kept"
    return [*([heading] if sample else []), *(f"              | {line}" for line in sample), f"export        {command}"]


def _swarm_command(*arguments: str) -> str:
    # It begins with the full path of `swarm` if this process was started as that program, otherwise with the path of
    # the Python interpreter and `-m agora.cli.main_swarm`.
    program = Path(sys.argv[0]).absolute()
    words = [str(program)] if program.name == "swarm" else [sys.executable, "-m", "agora.cli.main_swarm"]
    return shlex.join([*words, *arguments])
