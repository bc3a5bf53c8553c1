"""Opens a data file: recognises its format by the first record, and reads its samples one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import DataError

from agora.data.record_files import read_records
from agora.tuning.chat.conversations import Sample
from agora.tuning.chat.record_formats import Objective, RecordReader, recognise_format


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample with the place of its record, `where`, for errors."""

    sample: Sample
    where: str


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A data file whose format is recognised. No file is held open.

    reader: turns the file's records into samples. objective: the training objective for them. present: the file's
    columns in the first record, null ones included.
    """

    path: Path
    reader: RecordReader
    objective: Objective
    present: tuple[str, ...]

    @property
    def used_columns(self) -> dict[str, str]:
        return {name: column for name, column in self.reader.columns.items() if column in self.present}

    def samples(self) -> Iterator[PlacedSample]:
        """Reads the file from its beginning and yields its samples in order.

        Raises DataError, which names the place, for the first malformed record or a malformed file, DiskError if the
        file cannot be read, LocalError without the package that the format needs.
        """
        for record in read_records(self.path, frozenset(self.reader.columns.values())):
            yield PlacedSample(self.reader.read(record), record.where)


def open_samples(path: Path, mapped: Mapping[str, str], objective: Objective | None = None) -> SampleFile:
    """Recognises the format of a file or `datasets` folder by its first record, and returns the file ready to read.

    Later records are not checked before `SampleFile.samples` reads them. mapped: format's column -> file's column,
    where the names differ. objective: None for the format's default. Raises DataError for an empty file, an unknown
    suffix or format, and a malformed first record, DiskError if the file cannot be read, LocalError without the package
    that the format needs.
    """
    first = next(read_records(path), None)
    if first is None:
        raise DataError(f"{path} holds no record; write one JSON object a line.")
    reader = recognise_format(first, mapped, objective)
    return SampleFile(path, reader, objective or reader.format.objectives[0], tuple(first.fields))
