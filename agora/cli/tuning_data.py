"""Surveys the data of a run that begins with a base model, before anything is trained: format, samples, rows.

It
counts what `swarm data` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from agora.cli.console import USAGE, Failure, ProgressDisplay
from agora.data.text_sources import READERS
from agora.tuning.chat.data_survey import DataSurvey, survey
from agora.tuning.chat.model_tokenizer import open_model_tokenizer
from agora.tuning.chat.sample_file import OBJECTIVES, Objective, SampleFile, open_samples, parse_columns
from agora.tuning.chat.supervision import tokenise

ROWS_OF_A_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A data file to train on, and the counts of its samples and tokens.

    path: absolute.
    format: the name of the recognised format.
    columns: pairs of a column's name in the format and its name in the file, as --columns gives them.
    found: the counts, for rows of context + 1 tokens, of which all but the first are targets.
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
        """Returns the counts as lines for people: format, rows, and what was truncated or left out, if anything was.

        context: the number of tokens of a row.
        """
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
    """Returns the objective that `text`, the value of --objective, names; None if it was not given.

    Raises Failure for an unknown one.
    """
    if text is None:
        return None
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise Failure(f"--objective is {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}", USAGE)


def read_training_data(
    path: Path, base_model: Path, columns: str | None, objective: Objective | None, context: int
) -> TrainingData:
    """Reads the whole data file once, and counts its samples and tokens by the tokenizer in the folder `base_model`.

    columns: the value of --columns. objective: None for the format's usual one. context: number of targets of a row.
    Shows the progress. Raises InputError for malformed columns, DataError if the file is wrong, DiskError if it cannot
    be read, Failure if nothing in it can be learnt or, for lm, if a run cannot read it as a corpus.
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
