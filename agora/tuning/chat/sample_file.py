"""Files of samples: found, opened and read, and checked by their hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora_protocol.errors import DataError, InputError

from agora.data.data_file import READ_ERRORS, format_suffix, known_suffixes, unreadable_data
from agora.data.record_files import READERS, data_files, read_records
from agora.data.tables import SPLITS_FILE, STATE_FILE
from agora.tuning.chat.conversations import (
    Sample,
    has_empty_answer,
)
from agora.tuning.chat.sample_formats import (
    Objective,
    ReadingCounts,
    ReadingRules,
    RecordReader,
    quote_names,
    recognise_format,
)

READ_BYTES: Final = 4 << 20
TRIED_RECORDS: Final = 1000  # with skip_bad, records by which a format is sought
SPLIT: Final = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample with the place of its record, `where`, for errors."""

    sample: Sample
    where: str


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A data file whose format is recognised. No file is held open.

    reader: turns the file's records into samples. present: the file's columns in the first record, null ones included.
    """

    path: Path
    reader: RecordReader
    present: tuple[str, ...]

    @property
    def used_columns(self) -> dict[str, str]:
        used = {name: column for name, column in self.reader.columns.items() if column in self.present}
        told = [name for name in (self.reader.verdict, *self.reader.train_columns) if name in self.present]
        return used | {name: name for name in told if name is not None}

    @property
    def unused_columns(self) -> list[str]:
        return [column for column in self.present if column not in self.used_columns.values()]


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The data files of a run, each with its format, which is recognised by its first record.

    objective: the training objective for them.
    """

    files: tuple[SampleFile, ...]
    objective: Objective
    rules: ReadingRules

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def name(self) -> str:
        """What errors call the files."""
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{more}"

    def samples(self, counts: ReadingCounts) -> Iterator[PlacedSample]:
        """Reads the files from their beginning and yields their samples in order; adds to `counts` what is left out.

        Raises DataError, which names the place, for the first malformed record, unless the rules skip these, and for a
        malformed file; DiskError if a file cannot be read, LocalError without the package that a format needs.
        """
        on_bad = counts.skip if self.rules.skip_bad else None
        for file in self.files:
            for record in read_records(file.path, file.reader.read_columns, on_bad):
                try:
                    if file.reader.is_bad_answer(record):
                        counts.labelled_bad += 1
                        continue
                    if file.reader.is_excluded(record):
                        counts.excluded += 1
                        continue
                    sample = file.reader.read(record)
                except DataError as error:
                    if on_bad is None:
                        raise
                    on_bad(error)
                    continue
                counts.empty_answers += has_empty_answer(sample)
                yield PlacedSample(sample, record.where)


def find_sample_files(named: Sequence[Path]) -> list[Path]:
    """Returns the data files and `datasets` folders that `named` means, in order: of another folder all files below it.

    Those are its files with a known suffix, sorted by path, without hidden ones. Raises DataError for a folder without
    any, and for one with files of several splits, such as train and test, by their names: all but one are not for
    training.
    """
    found: list[Path] = []
    for path in named:
        if path.is_dir() and not any((path / name).is_file() for name in (STATE_FILE, SPLITS_FILE)):
            found += _files_below(path)
        else:
            found.append(path)
    return found


def _files_below(folder: Path) -> list[Path]:
    inside = (path for path in folder.rglob("*") if format_suffix(path) in READERS and path.is_file())
    names = sorted(path.relative_to(folder) for path in inside)
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not shown:
        raise DataError(
            f"{folder} is neither a folder that `Dataset.save_to_disk` wrote, with a {STATE_FILE}, nor holds a "
            f"{known_suffixes(READERS)} file; give a file."
        )
    splits = {word for name in shown for word in SPLIT.findall(name.as_posix().lower())}
    if len(splits) > 1:
        raise DataError(
            f"{folder} holds files of the splits {quote_names(dict.fromkeys(sorted(splits)))}; give the files or the "
            "folder of one of them."
        )
    return [folder / name for name in shown]


def open_samples(named: Sequence[Path], rules: ReadingRules, objective: Objective | None = None) -> SampleFiles:
    """Recognises the format of each file by its first record, and returns the files ready to read.

    named: see find_sample_files. objective: None for the first file's default. Raises DataError for an empty file, an
    unknown suffix or format, and a malformed first record, DiskError if a file cannot be read, LocalError without the
    package that a format needs.
    """
    files: list[SampleFile] = []
    for path in find_sample_files(named):
        file = _open_file(path, rules, objective)
        objective = objective or file.reader.format.objectives[0]
        files.append(file)
    if objective is None:
        raise InputError("No data file is named; give one.")
    return SampleFiles(tuple(files), objective, rules)


def _open_file(path: Path, rules: ReadingRules, objective: Objective | None) -> SampleFile:
    problem: DataError | None = None

    def keep_first(error: DataError) -> None:
        nonlocal problem
        problem = problem or error

    for number, first in enumerate(read_records(path, None, keep_first if rules.skip_bad else None)):
        try:
            reader = recognise_format(first, rules, objective)
        except DataError as error:
            if not rules.skip_bad:
                raise
            keep_first(error)
        else:
            return SampleFile(path, reader, tuple(first.fields))
        if number >= TRIED_RECORDS:
            break
    raise problem or DataError(f"{path} holds no record; write one JSON object a line.")


def hash_samples(named: Sequence[Path]) -> str:
    """Returns the SHA-256, in hex, of the data files' content, one after another; see find_sample_files.

    Raises DiskError when a file cannot be read, DataError for a folder without data.
    """
    digest = hashlib.sha256()
    for path in find_sample_files(named):
        for file in data_files(path):
            try:
                with file.open("rb") as stream:
                    while block := stream.read(READ_BYTES):
                        digest.update(block)
            except READ_ERRORS as error:
                raise unreadable_data(file, error) from error
    return digest.hexdigest()


def check_samples(named: Sequence[Path], expected: str) -> None:
    """Raises DataError unless the samples have the SHA-256 `expected`; "" accepts any. Reads all of the data."""
    if expected and (found := hash_samples(named)) != expected:
        raise DataError(
            f"{named[0]} has the SHA-256 {found}, but the run trains on samples with {expected} ([data] samples_hash); "
            "copy the file from a peer that trains, or found a new run with yours."
        )
