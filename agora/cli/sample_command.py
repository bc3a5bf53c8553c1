"""`swarm sample`: loads the whole model of a run, lets it continue a text, and prints the result.

Loads torch only once there are weights. What a demo shows of its model is made here, too.
"""

from __future__ import annotations

import itertools
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple

from agora_protocol.errors import AgoraError

from agora.cli import console
from agora.cli.console import Failure, print_to_stderr
from agora.cli.export_command import exported_tensors
from agora.cli.stage_sources import StageSources, base_model_folder, find_stages, steps_by_stage
from agora.core.user_paths import expand_home
from agora.data.tokenizer import Tokenizer, open_tokenizer
from agora.state.export_tensors import open_stages

if TYPE_CHECKING:
    from agora.model import StageModule

UNFINISHED: Final = "�"  # what decoding returns for the bytes of a character that is not complete yet
# Maximum number of replacement characters at a text's end that an incomplete character can cause.
MAX_UNFINISHED: Final = 3
MAX_SEED: Final = 2**31
LINES: Final = 3
LINE_CHARACTERS: Final = 72
MAX_TOKENS: Final = 240


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Each token is drawn from softmax(logits / temperature). seed: None for a random one."""

    tokens: int = 200
    temperature: float = 0.8
    seed: int | None = None


def run(
    named_run: str,
    prompt: str,
    directories: Sequence[Path] = (),
    *,
    sampling: SamplingOptions,
    average: bool = True,
    base_model: Path | None = None,
    as_json: bool = False,
) -> int:
    """Prints the text as it is sampled, then tokens, seconds and seed on standard error. Raises Failure for wrong flags
    and what find_stages and load_model raise.
    """
    sources = find_stages(named_run, directories, average=average)
    needs_base = sources.signed.manifest.model.has_reference
    folder = base_model_folder(base_model, directories, sources.known) if needs_base else None
    seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
    began = time.monotonic()
    show = _ignore if as_json else _show
    model = load_model(sources, folder)
    show(prompt)
    text = ""
    token_ids: list[int] = []
    for piece in _generate(model, prompt, sampling, seed, token_ids):
        show(piece)
        text += piece
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        about = {"schema": 1, "run_id": sources.signed.run_id, "name": sources.signed.manifest.name}
        about |= {"from": sources.kind, "average": sources.average, "stages": steps_by_stage(sources)}
        console.print_json(
            about | {"prompt": prompt, "text": text, "tokens": len(token_ids), "seed": seed, "seconds": seconds}
        )
    else:
        print(flush=True)
        console.print_to_stderr(f"{len(token_ids)} tokens in {seconds:.1f} s; --seed {seed} draws them again")
    return console.EXIT_DONE


def _generate(
    model: WholeModel, prompt: str, sampling: SamplingOptions, seed: int, token_ids: list[int]
) -> Iterator[str]:
    from agora.model.generation import continue_ids

    separator = model.tokenizer.separator.tolist()
    begin = model.tokenizer.encode([prompt])[0].tolist() or separator
    drawn = continue_ids(model.stage, begin, context=model.context, seed=seed, temperature=sampling.temperature)
    of_document = itertools.takewhile(lambda token: [token] != separator, drawn)
    yield from decode_pieces(itertools.islice(of_document, sampling.tokens), model.tokenizer.decode, token_ids)


def decode_pieces(ids: Iterator[int], decode: Callable[[Sequence[int]], str], token_ids: list[int]) -> Iterator[str]:
    """Yields, for each token id of `ids`, the characters that it completes, possibly "", and appends it to `token_ids`.

    At the end yields once more: the rest of the text, U+FFFD for a character that stays incomplete, or "". token_ids:
    must be empty at the beginning. decode: returns the text of all token ids so far.
    """
    shown = 0
    for token in ids:
        token_ids.append(token)
        text = decode(token_ids)
        whole = text.rstrip(UNFINISHED) if len(text) - len(text.rstrip(UNFINISHED)) <= MAX_UNFINISHED else text
        yield whole[shown:]
        shown = max(shown, len(whole))
    yield decode(token_ids)[shown:]


def _show(text: str) -> None:
    console.print_to_stdout(text, end="")


def _ignore(_: str) -> None:
    pass


def begin_loading() -> None:
    """On a daemon thread: torch takes seconds."""
    Thread(target=import_module, args=("agora.model.generation",), daemon=True).start()


def try_sample(manifest: Path, seed: int, base_model: Path | None = None) -> list[str]:
    """Up to LINES lines from the checkpoints beside the manifest; [], with the reason printed, where that is
    impossible.
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
    """Sets torch to one thread for the whole process. Raises Failure without a base model that is needed, ExportError
    for damaged weights, ManifestError for a wrong tokenizer.
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
    tokenizer = open_tokenizer(sources.find_tokenizer(base_model), manifest.model.vocabulary, base=sources.base)
    family = family_of(manifest.model)
    with open_stages(sources.signed.run_id, sources.files, exported_tensors(manifest, family)) as merged:
        merged.check()
        layers = range(manifest.model.layers)
        stage = family.load_stage(layers, manifest.seed, merged.read_weights(), base_model)
    stage.eval()  # dropout is for training
    return WholeModel(stage, tokenizer, manifest.model.context)


def sample_lines(sources: StageSources, seed: int, base_model: Path | None = None) -> list[str]:
    """Up to LINES lines at the beginning of a document, cut to LINE_CHARACTERS. Raises what load_model raises."""
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
    for line in text.splitlines():
        shown = "".join(letter if letter.isprintable() else "?" for letter in line.expandtabs(4))
        cut = shown[:LINE_CHARACTERS].rstrip()
        if cut.strip(" ?"):
            yield cut


def lines_of_model(sample: Sequence[str], steps: int, directory: Path | None) -> list[str]:
    heading = f"text          what the model writes after {steps} steps; spelling comes first, sense much later:"
    file = "demo/run.toml" if directory is None else str(expand_home(directory).absolute() / "run.toml")
    command = _swarm_command("export", file, "--out", "model")
    if directory is None:
        command = f"{command}  # after a demo with --dir demo; this one is not kept"
    return [*([heading] if sample else []), *(f"              | {line}" for line in sample), f"export        {command}"]


def _swarm_command(*arguments: str) -> str:
    program = Path(sys.argv[0]).absolute()  # the reader's PATH may not have it
    words = [str(program)] if program.name == "swarm" else [sys.executable, "-m", "agora.cli.main_swarm"]
    return shlex.join([*words, *arguments])
