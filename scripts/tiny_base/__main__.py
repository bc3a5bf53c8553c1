"""`./scripts/tiny-base DIR`: the command line of the tiny base model.

Loads torch only once the flags are right.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from benchmarks.children import terminable

from agora.cli import console

if TYPE_CHECKING:
    from tiny_base.model_folder import TinyBase

USUAL_S: Final = 90.0
SHOWN_LINES: Final = 6
MAX_SEED: Final = 2**31

app = console.new_app("Make a tiny base model to try tuning with.")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it appears when it is complete.")],
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seeds weights and order of the text.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Pretrain for so many steps; the same steps make the same files."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=86_400, help=f"Pretrain for so long; default {USUAL_S:.0f}.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Exactly one JSON object on standard output, all else on stderr.")
    ] = False,
) -> None:
    """Make a small Llama with a tokenizer of its own, pretrained on the source of Python's standard library.

    It takes two minutes on 2 cores and downloads nothing. DIR/data gets example data made of the library's docstrings:
    sft.jsonl, questions and answers, and dpo.jsonl, better and worse answers.

    \b
    Examples:
      ./scripts/tiny-base base
      ./scripts/tiny-base base --steps 500 --seed 1 --json
    """
    if steps is not None and seconds is not None:
        raise console.Failure("--steps and --seconds are two ends of pretraining; give one of them", console.EXIT_USAGE)
    place = folder.expanduser().absolute()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise console.Failure(f"{place} is not empty; name a new folder, or remove it first", console.EXIT_USAGE)
    try:
        made = _make_base(place, steps, USUAL_S if seconds is None else seconds, seed)
    except KeyboardInterrupt:
        console.print_to_stderr("stopped; nothing was written")
        raise typer.Exit(console.EXIT_FAILED) from None
    if as_json:
        console.print_json({"schema": 1, "folder": str(place), "seed": seed, **made.to_json()})
    for line in summary_lines(made, folder):
        (console.print_to_stderr if as_json else print)(line)


def _make_base(place: Path, steps: int | None, seconds: float, seed: int) -> TinyBase:
    with terminable():
        from agora.data import text_sources
        from tiny_base.model_folder import make_base
        from tiny_base.pretraining import Budget

        return make_base(place, text_sources.stdlib_files(), Budget(steps, seconds), seed)


def summary_lines(made: TinyBase, folder: Path) -> list[str]:
    """Returns what was made, for people. folder: as the command line names it."""
    done = made.pretrained
    examples = ", ".join(f"{name} with {count:,} records" for name, count in made.examples.items())
    data = shlex.quote(str(folder / "data" / next(iter(made.examples))))
    text = [line for line in made.text.expandtabs(4).splitlines() if line.strip()][:SHOWN_LINES]
    return [
        f"model        {made.parameters / 1e6:.1f} M parameters in two shards, {made.vocabulary:,} tokens",
        f"pretraining  {done.steps} steps of {done.tokens // done.steps:,} tokens in {done.seconds:.0f} s; "
        f"loss {done.first_loss:.3f} -> {done.last_loss:.3f}, held-out {done.heldout_loss:.3f}",
        f"data         {examples}",
        "text         what it writes by itself:",
        *(f"             | {''.join(sign if sign.isprintable() else '?' for sign in line)}" for line in text),
        f"next         swarm new run.toml --base-model {shlex.quote(str(folder))} --data {data}",
    ]


if __name__ == "__main__":
    console.run(app)
