"""The data that a new run begins with: a corpus, or samples that are read once before the manifest is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from agora.cli.console import EXIT_USAGE, Failure, ProgressDisplay
from agora.cli.data_command import (
    LEFT_OUT,
    ROWS_OF_A_PAIR,
    ReadingChoice,
    escape,
    remark_lines,
    require_learnable,
    write_bad_report,
)
from agora.core.user_paths import expand_home
from agora.data.data_file import format_suffix, known_suffixes
from agora.data.text_sources import READERS
from agora.tuning.chat.data_survey import DataSurvey, survey
from agora.tuning.chat.model_tokenizer import ModelTokenizer, open_model_tokenizer
from agora.tuning.chat.sample_file import SampleFile, SampleFiles, open_samples
from agora.tuning.chat.sample_formats import Objective


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Data files to train on, and the counts of their samples and tokens.

    files: the files, with absolute paths.
    named: the absolute paths of what was named: files and folders.
    tokenizer: with which they were counted.
    chat_template: the source of the chosen template; "" for the model's own.
    found: the counts, for rows of context + 1 tokens, of which all but the first are targets.
    """

    files: SampleFiles
    named: tuple[Path, ...]
    tokenizer: ModelTokenizer
    chat_template: str
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
        formats = list(dict.fromkeys(file.reader.format.name for file in self.files.files))
        several = f" in {len(self.files.files)} files" if len(self.files.files) > 1 else ""
        unused = list(dict.fromkeys(name for file in self.files.files for name in file.unused_columns))
        lines = [
            f"data         {', '.join(formats)}, {found.samples:,} samples{several}, objective {self.objective}",
            f"rows         {self.rows:,} of {context:,} tokens{packing}; "
            f"{supervised:.1f} % of {found.tokens:,} tokens are supervised",
        ]
        if self.objective != "lm" and found.truncated_samples:
            lines.append(f"truncated    {found.truncated_samples:,} samples, {found.truncated_tokens:,} tokens")
        if found.left_out:
            lines.append(f"left out     {found.left_out:,} samples {LEFT_OUT[self.objective == 'dpo']}")
        lines += remark_lines(found, 13)
        if unused:
            lines.append(f"not used     the columns {', '.join(map(repr, unused))}")
        if self.objective != "lm":
            lines.append(f"template     {escape(self.tokenizer.template_name)}")
        lines += [f"remark       {escape(remark)}" for remark in self.tokenizer.remarks]
        return lines


def read_training_data(
    named: Sequence[Path], base_model: Path, reading: ReadingChoice, objective: Objective | None, context: int
) -> TrainingData:
    """Reads the whole data once, and counts its samples and tokens by the tokenizer in the folder `base_model`.

    objective: None for the format's usual one. context: number of targets of a row. Shows the progress, and what
    --skip-bad skipped. Raises InputError for malformed columns, DataError if a file is wrong, DiskError if it cannot be
    read, Failure if nothing in it can be learnt or, for lm, if a run cannot read it as a corpus.
    """
    paths = tuple(expand_home(path).absolute() for path in named)
    file = open_samples(paths, reading.rules(), objective)
    reading.check(file)
    if file.objective == "lm":
        if reading.skip_bad:
            raise Failure("--skip-bad is for samples, not for a corpus; leave it out", EXIT_USAGE)
        for each in file.files:
            _require_readable_corpus(each)
    template = reading.template(base_model)
    tokenizer = open_model_tokenizer(base_model, datetime.now(), template)
    with ProgressDisplay(f"reading {', '.join(str(path) for path in named)}") as display:
        found = survey(file, tokenizer, context, 0, lambda count: display.show(count, f"{count:,} samples read"))
    write_bad_report(reading.bad_report, found)
    require_learnable(file, found)
    if file.objective == "lm" and found.tokens <= context:
        raise Failure(
            f"{file.name} has {found.tokens:,} tokens, and a row has {context + 1:,}; add text, or choose another model"
        )
    return TrainingData(file, paths, tokenizer, template, found)


def _require_readable_corpus(file: SampleFile) -> None:
    if file.path.is_dir() or format_suffix(file.path) not in READERS:
        known = known_suffixes(READERS)
        raise Failure(f"{file.path} cannot be read as text to learn whole; convert it to {known}", EXIT_USAGE)
    if file.used_columns != {"text": "text"}:
        usual = file.reader.format.objectives[0]
        remedy = f"use --objective {usual}" if usual != "lm" else "rename its column to text"
        raise Failure(
            f"{file.path} is of the format {file.reader.format.name}, and --objective lm learns plain text, of .txt "
            f"files or of a column text; {remedy}",
            EXIT_USAGE,
        )
