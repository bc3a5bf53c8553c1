"""`swarm sample`: lets the current model of a run continue a text, and prints the result.

Loads
torch only once there are weights.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora.cli import console
from agora.cli.stage_sources import base_model_folder, find_stages, steps_by_stage
from agora.cli.text_sample import WholeModel, load_model

UNFINISHED: Final = "�"  # what decoding returns for the bytes of a character that is not complete yet
# Maximum number of replacement characters at a text's end that an incomplete character can cause.
MAX_UNFINISHED: Final = 3
MAX_SEED: Final = 2**31


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a text is sampled: at most `tokens` tokens, each from softmax(logits / temperature).

    seed: of the random draws; None for a random seed.
    """

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
    """Prints `prompt` and how the present model of the run `named_run` continues it; returns exit code DONE.

    The weights come from the swarm or from checkpoints, see find_stages, which explains named_run, directories and
    average. The text is printed as it is sampled, and then the number of tokens, the seconds and the seed on standard
    error; with `as_json`, all at the end in one object. base_model: see base_model_folder; ignored unless the run
    trains LoRA. Raises Failure if a stage has no weights (exit code 4) or the base model is missing, ExportError for
    damaged weights, InputError, ManifestError or DiskError for a run that is unknown or malformed, SettingsError or
    BaseModelError for a wrong base model, LocalError if the model cannot be built here.
    """
    sources = find_stages(named_run, directories, average=average)
    needs_base = sources.signed.manifest.model.has_reference
    folder = base_model_folder(base_model, directories) if needs_base else None
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
    return console.DONE


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
    """Does nothing: used instead of `_show` with --json."""
