"""`swarm data`: shows what a data file was recognised as, three samples with marked supervised parts, and lengths.

What a file contains is escaped before a terminal sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agora.cli import console
from agora.cli.console import USAGE, Failure, ProgressDisplay
from agora.data.text_sources import READERS
from agora.tuning.chat.chat_template import split_supervised
from agora.tuning.chat.data_survey import DataSurvey, survey
from agora.tuning.chat.model_tokenizer import ModelTokenizer, open_model_tokenizer
from agora.tuning.chat.sample_file import OBJECTIVES, Objective, SampleFile, open_samples, parse_columns
from agora.tuning.chat.supervision import TokenSequence, tokenise

if TYPE_CHECKING:
    from rich.text import Text

SHOWN_SAMPLES: Final = 3
USUAL_CONTEXT: Final = 1024
BAR: Final = 40  # characters
SHOWN_HEAD, SHOWN_TAIL, SHOWN_PARTS = 400, 200, 16  # characters of a part's beginning and end; parts of a sample
STYLE: Final = "bold green"
MARKS: Final = ("[[", "]]")  # around supervised parts where there is no colour
SIDES: Final = {1: ("",), 2: (", chosen", ", rejected")}

Part = tuple[str, bool]  # A piece of a sample's text, and whether its tokens are supervised (are targets of the loss)
ROWS_OF_A_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The flags of `swarm data`; None: not given. columns: such as "prompt=question,completion=answer"."""

    file: Path
    base_model: Path | None
    columns: str | None
    objective: str | None
    context: int | None


def run(options: DataOptions, *, as_json: bool) -> int:
    """Prints the survey of a data file. Raises Failure and InputError for wrong flags, DataError, DiskError."""
    objective = check_objective(options.objective)
    file = open_samples(options.file, parse_columns(options.columns) if options.columns else {}, objective)
    tokenizer = open_model_tokenizer(options.base_model, datetime.now())
    context = _choose_context(options.context, tokenizer)
    is_lm = file.objective == "lm"
    with console.ProgressDisplay("reading samples") as display:
        samples = tokenise(file.samples(), tokenizer, context=None if is_lm else context + 1, supervise_all=is_lm)
        found = survey(
            samples,
            file.objective,
            context,
            SHOWN_SAMPLES,
            lambda count: display.show(count, f"{count:,} samples read"),
        )
    if as_json:
        console.print_json(survey_fields(file, tokenizer, found))
    else:
        _print_survey(file, tokenizer, found)
    return console.DONE


def _choose_context(chosen: int | None, tokenizer: ModelTokenizer) -> int:
    longest = tokenizer.longest_context
    if chosen is None:
        return min(USUAL_CONTEXT, longest or USUAL_CONTEXT)
    if longest is not None and chosen > longest:
        raise console.Failure(
            f"--context {chosen} is more than the {longest} tokens that {tokenizer.name} was made for; lower it",
            console.USAGE,
        )
    return chosen


def survey_fields(file: SampleFile, tokenizer: ModelTokenizer, found: DataSurvey) -> dict[str, Any]:
    low, median, high, most = _quantiles(found)
    return {
        "schema": 1,
        "file": str(file.path),
        "format": file.reader.format.name,
        "columns": file.used_columns,
        "unused_columns": _unused_columns(file),
        "objective": found.objective,
        "tokenizer": tokenizer.name,
        "template": tokenizer.template_name,
        "context": found.context,
        "samples": found.samples,
        "tokens": {"kept": found.tokens, "supervised": found.supervised},
        "lengths": {
            "least": low,
            "median": median,
            "p95": high,
            "most": most,
            "histogram": [{"first": b.first, "last": b.last, "count": b.count} for b in found.histogram()],
        },
        "truncated": {"samples": found.truncated_samples, "tokens": found.truncated_tokens},
        "left_out": found.left_out,
        "packing": None if found.rows is None else {"sequences": found.rows, "efficiency": found.efficiency},
        "shown": [
            [
                [{"text": text, "supervised": is_supervised} for text, is_supervised in _split_by_supervision(side)]
                for side in sample
            ]
            for sample in found.shown
        ],
    }


def summary_lines(found: DataSurvey) -> list[str]:
    """Returns the lines to print after the shown samples: numbers of samples and tokens, lengths, cuts, packing."""
    low, median, high, most = _quantiles(found)
    supervised = found.supervised / found.tokens if found.tokens else 0.0
    lines = [
        f"samples    {found.samples:,}",
        f"tokens     {found.tokens:,}, {100 * supervised:.1f} % of them supervised",
        f"lengths    {low:,} to {most:,} tokens, median {median:,}, 95 % at most {high:,}",
        *_histogram_lines(found, "\u2588" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"),
    ]
    if found.objective == "lm":
        lines.append(
            f"context    {found.context:,} tokens; documents are cut where a sequence is full, none is truncated"
        )
    else:
        lines.append(
            f"context    {found.context:,} tokens; {_count_with_noun(found.truncated_samples, 'sample')} truncated, "
            f"losing {_count_with_noun(found.truncated_tokens, 'token')}"
        )
    if found.left_out:
        lines.append(
            f"left out   {_count_with_noun(found.left_out, 'sample')} without a supervised token within the context"
        )
    if found.rows is None:
        lines.append("packing    none: the two sides of a preference are computed together")
    elif found.efficiency is not None:
        lines.append(f"packing    {_count_with_noun(found.rows, 'sequence')}, {100 * found.efficiency:.1f} % full")
    return lines


def heading_lines(file: SampleFile, tokenizer: ModelTokenizer) -> list[str]:
    named = [name if name == column else f"{name} from {column!r}" for name, column in file.used_columns.items()]
    unused = f"; not used: {', '.join(map(repr, _unused_columns(file)))}" if _unused_columns(file) else ""
    return [
        f"format     {file.reader.format.name}, by the columns {', '.join(named)}{unused}",
        f"objective  {file.objective}",
        f"tokenizer  {_escape(tokenizer.name)}, conversations by {_escape(tokenizer.template_name)}",
    ]


def _count_with_noun(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _unused_columns(file: SampleFile) -> list[str]:
    return [column for column in file.present if column not in file.used_columns.values()]


def _quantiles(found: DataSurvey) -> tuple[int, int, int, int]:
    # Each is the length of a sample, never a mean of two.
    low, median, high, most = np.quantile(found.lengths, (0, 0.5, 0.95, 1), method="higher").tolist()
    return low, median, high, most


def _histogram_lines(found: DataSurvey, bar_character: str) -> Iterator[str]:
    bins = found.histogram()
    highest = max((each.count for each in bins), default=1)
    for each in bins:
        bar = bar_character * max(1, round(BAR * each.count / highest)) if each.count else ""
        yield f"{each.first:>9,} to {each.last:>9,}  {bar:<{BAR}}  {each.count:,}"


def _split_by_supervision(sequence: TokenSequence) -> list[Part]:
    end = int(sequence.offsets[-1, 1]) if len(sequence.ids) else 0
    return list(
        split_supervised(sequence.text[:end] if sequence.truncated else sequence.text, sequence.supervised_ranges())
    )


def _print_survey(file: SampleFile, tokenizer: ModelTokenizer, found: DataSurvey) -> None:
    from rich.console import Console
    from rich.text import Text

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding than UTF-8
    terminal = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    has_colour = terminal.is_terminal and not terminal.no_color
    for line in heading_lines(file, tokenizer):
        terminal.print(Text(line))
    for number, sample in enumerate(found.shown, 1):
        for side, sequence in zip(SIDES[len(sample)], sample, strict=True):
            size = len(sequence.ids)
            cut = sequence.truncated
            truncated = f", the last {cut:,} of {size + cut:,} truncated" if cut else ""
            terminal.print(Text(f"\nsample {number}{side}: {size:,} tokens{truncated}"))
            terminal.print(_render_sequence(sequence, has_colour=has_colour))
    terminal.print(Text(f"\nsupervised is what stands {'in this colour' if has_colour else 'in [[ ]]'}", STYLE))
    for line in summary_lines(found):
        terminal.print(Text(line))


def _render_sequence(sequence: TokenSequence, *, has_colour: bool) -> Text:
    from rich.text import Text

    text = Text()
    parts = _split_by_supervision(sequence)
    for part, is_supervised in parts[:SHOWN_PARTS]:
        shown = _escape(_shorten(part))
        if is_supervised and not has_colour:
            shown = shown.join(MARKS)
        text.append(shown, STYLE if is_supervised else "")
    if len(parts) > SHOWN_PARTS:
        text.append(f"\n... and {len(parts) - SHOWN_PARTS} parts more")
    return text


def _shorten(text: str) -> str:
    if len(text) <= SHOWN_HEAD + SHOWN_TAIL:
        return text
    left_out = len(text) - SHOWN_HEAD - SHOWN_TAIL
    return f"{text[:SHOWN_HEAD]} ... {left_out:,} characters ... {text[-SHOWN_TAIL:]}"


def _escape(text: str) -> str:
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


# --- the data that a run begins with


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A data file to train on, and its counts for rows of context + 1 tokens. columns: (name in the format, in the
    file).
    """

    path: Path
    format: str
    columns: tuple[tuple[str, str], ...]
    found: DataSurvey

    @property
    def objective(self) -> Objective:
        return self.found.objective

    @property
    def trainable_samples(self) -> int:
        return self.found.samples - self.found.left_out

    @property
    def rows(self) -> int:
        return ROWS_OF_A_PAIR * self.trainable_samples if self.found.rows is None else self.found.rows

    def summary_lines(self, context: int) -> list[str]:
        found = self.found
        supervised = 100 * found.supervised / found.tokens
        packing = "" if found.efficiency is None else f", {100 * found.efficiency:.1f} % full"
        lines = [
            f"data         {self.format}, {found.samples:,} samples, objective {self.objective}",
            f"rows         {self.rows:,} of {context:,} tokens{packing}; "
            f"{supervised:.1f} % of {found.tokens:,} tokens are supervised",
        ]
        if self.objective != "lm" and found.truncated_samples:
            lines.append(f"truncated    {found.truncated_samples:,} samples, {found.truncated_tokens:,} tokens")
        if found.left_out:
            lines.append(f"left out     {found.left_out:,} samples without a supervised token within the context")
        return lines


def check_objective(text: str | None) -> Objective | None:
    if text is None:
        return None
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise Failure(f"--objective is {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}", USAGE)


def read_training_data(
    path: Path, base_model: Path, columns: str | None, objective: Objective | None, context: int
) -> TrainingData:
    """Reads the whole data file once and shows the progress. columns: the value of --columns. Raises InputError,
    DataError, DiskError.
    """
    mapped = parse_columns(columns) if columns else {}
    file = open_samples(path.expanduser().absolute(), mapped, objective)
    is_lm = file.objective == "lm"
    if is_lm:
        _require_readable_corpus(file)
    tokenizer = open_model_tokenizer(base_model, datetime.now())
    with ProgressDisplay(f"reading {path}") as display:
        samples = tokenise(file.samples(), tokenizer, context=None if is_lm else context + 1, supervise_all=is_lm)
        found = survey(
            samples, file.objective, context, 0, lambda count: display.show(count, f"{count:,} samples read")
        )
    data = TrainingData(file.path, file.reader.format.name, tuple(mapped.items()), found)
    if not found.supervised:
        raise Failure(
            f"{path} has nothing to learn: none of its {found.samples:,} samples has a supervised token among its "
            f"first {context + 1:,}; look at it with `swarm data`"
        )
    return data


def _require_readable_corpus(file: SampleFile) -> None:
    if file.path.is_dir() or file.path.suffix not in READERS:
        known = " or ".join(", ".join(READERS).rsplit(", ", 1))
        raise Failure(f"{file.path} cannot be read as text to learn whole; convert it to {known}", USAGE)
    if file.used_columns != {"text": "text"}:
        usual = file.reader.format.objectives[0]
        remedy = f"use --objective {usual}" if usual != "lm" else "rename its column to text"
        raise Failure(
            f"{file.path} is of the format {file.reader.format.name}, and --objective lm learns plain text, of .txt "
            f"files or of a column text; {remedy}",
            USAGE,
        )
