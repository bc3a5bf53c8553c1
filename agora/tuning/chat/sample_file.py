"""A data file of samples: the format recognised by the columns of its first record, its samples read, its hash checked.

A new format is a row of FORMATS and the function that reads it.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from agora_protocol.errors import DataError, InputError

from agora.data.record_files import RawRecord, check_text, data_files, read_records, unreadable_data
from agora.tuning.chat.conversations import (
    ChatMessage,
    Completion,
    Conversation,
    PlainText,
    Preference,
    Sample,
    check_order,
    read_messages,
    read_tools,
)

Objective = Literal["lm", "sft", "dpo"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
SHOWN_COLUMNS: Final = 20  # maximum number of columns that an error names


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One record of a data file."""

    values: Mapping[str, Any]  # by the format's names of the columns
    where: str  # the record's place in its file, for errors

    def text(self, name: str) -> str:
        """Returns the text of a column; "" if it is missing or null. Raises DataError for another type."""
        value = self.values.get(name)
        return "" if value is None else check_text(value, self.place(name))

    def messages(self, name: str) -> tuple[ChatMessage, ...]:
        return read_messages(self.values[name], self.place(name))

    def tools(self) -> tuple[Any, ...]:
        value = self.values.get("tools")
        return () if value is None else read_tools(value, self.place("tools"))

    def place(self, name: str) -> str:
        """Returns "WHERE: NAME", the place of a column in the file, for error sentences."""
        return f"{self.where}: {name}"


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """A format of data files, such as Alpaca."""

    name: str  # what errors and `swarm data` call the format
    required: tuple[str, ...]  # names of columns
    read: Callable[[FormatRow], Sample]  # turns the columns of a record into a sample
    objectives: tuple[Objective, ...] = ("sft", "lm")  # that can use such samples; the first one is the default
    optional: tuple[str, ...] = ()  # names of columns

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Turns a file's records into samples. columns: the format's name of a column -> the file's."""

    format: RecordFormat
    columns: Mapping[str, str]

    def read(self, record: RawRecord) -> Sample:
        """Raises DataError, which names the record's place, if it is malformed."""
        values = {name: record.fields.get(column) for name, column in self.columns.items()}
        for name in self.format.required:
            if values[name] is None:
                kind = "null in" if self.columns[name] in record.fields else "missing from"
                raise DataError(
                    f"{record.where}: column {self.columns[name]!r} is {kind} this record (present: "
                    f"{_quote_names(record.fields)}); add it, or remove the record."
                )
        try:
            return self.format.read(FormatRow(values, record.where))
        except RecursionError as error:
            raise DataError(f"{record.where} has values that are nested too deeply; remove the record.") from error


def parse_columns(text: str) -> dict[str, str]:
    """Parses --columns, such as "prompt=question,completion=answer": returns format's column -> file's column.

    Raises InputError if it is malformed, or names a column twice or one that no format has.
    """
    known = sorted({name for kind in FORMATS for name in kind.columns})
    columns: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = (word.strip() for word in part.partition("="))
        if not (name and equals and column):
            raise InputError(f"--columns has {part!r}; write it like prompt=question,completion=answer.")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise InputError(f"--columns names {name!r}, which no format has; {hint}")
        if name in columns:
            raise InputError(f"--columns names {name!r} twice; leave one out.")
        columns[name] = column
    return columns


def recognise_format(first: RawRecord, mapped: Mapping[str, str], objective: Objective | None) -> RecordReader:
    """Recognises a file's format by its first record, and returns the reader for the file's records.

    The format is the first of FORMATS whose required columns the record has, not null, which has all columns that
    `mapped` names, and which serves the objective, if one is given. mapped: format's column -> file's column, from
    --columns. Raises DataError if no format fits, which names the missing column or the objective that would fit.
    """
    for name, column in mapped.items():
        if first.fields.get(column) is None:
            raise DataError(
                f"{first.where} has no column {column!r}, which --columns gives for {name!r} (present: "
                f"{_quote_names(first.fields)}); correct --columns."
            )
    present = _present_columns(first, mapped)
    fitting = [kind for kind in FORMATS if present.issuperset(kind.required) and set(mapped) <= set(kind.columns)]
    if not fitting:
        raise _unknown_format_error(first, present, mapped, objective)
    chosen = next((kind for kind in fitting if objective in (None, *kind.objectives)), None)
    if chosen is None:
        raise _other_objective_error(first, fitting[0], objective)
    # a file's column that --columns maps is not read under its own name as well
    read = [name for name in chosen.columns if name in mapped or name not in mapped.values()]
    columns = {name: mapped.get(name, name) for name in read}
    return RecordReader(chosen, columns)


def _present_columns(first: RawRecord, mapped: Mapping[str, str]) -> set[str]:
    own = {column for column, value in first.fields.items() if value is not None}
    return (own - set(mapped.values())) | set(mapped)


def _unknown_format_error(
    first: RawRecord, present: set[str], mapped: Mapping[str, str], objective: Objective | None
) -> DataError:
    candidates = [kind for kind in FORMATS if set(mapped) <= set(kind.columns)]
    if mapped and not candidates:
        return DataError(
            f"No format has all of the columns {_quote_names(mapped)} that --columns names; see docs/use/data.md."
        )
    serving = [kind for kind in candidates if objective in (None, *kind.objectives)] or candidates
    # by the fraction of the format's columns that is there, so that one of two counts more than one of three
    nearest = max(serving, key=lambda kind: len(present.intersection(kind.required)) / len(kind.required))
    missing = [name for name in nearest.required if name not in present]
    columns = _quote_names(first.fields)
    if len(missing) == len(nearest.required):
        formats = "; ".join(f"{kind.name}: {', '.join(kind.required)}" for kind in FORMATS)
        return DataError(
            f"{first.where} has columns of no known format (present: {columns}; known are {formats}); rename them, or "
            "map them like --columns prompt=NAME,completion=NAME."
        )
    given = "".join(f"{name}={column}," for name, column in mapped.items())
    mapping = given + ",".join(f"{name}=NAME" for name in missing)
    return DataError(
        f"{first.where} has no column {' and '.join(map(repr, missing))}, which the format {nearest.name} needs "
        f"(present: {columns}); rename the one that holds it, or give --columns {mapping}."
    )


def _other_objective_error(first: RawRecord, kind: RecordFormat, objective: Objective | None) -> DataError:
    other = (
        "or learn the better answers alone with --columns prompt=prompt,completion=chosen"
        if kind.name == "preference"
        else "or give a file with two answers to each prompt (columns prompt, chosen, rejected)"
        if objective == "dpo"
        else "or give another file"
    )
    return DataError(
        f"{first.where} is of the format {kind.name}, which the objective {objective} cannot learn from; "
        f"use --objective {kind.objectives[0]}, {other}."
    )


def _quote_names(names: Mapping[str, Any]) -> str:
    # Quoted with escapes: a file's text must not control a terminal.
    shown = [f"{name!r:.60}" for name in list(names)[:SHOWN_COLUMNS]]
    return ", ".join(shown + (["..."] if len(names) > SHOWN_COLUMNS else [])) or "none"


def _make_conversation(messages: Sequence[ChatMessage], row: FormatRow, prompt_messages: int = 0) -> Conversation:
    check_order(messages, row.where)
    return Conversation(tuple(messages), prompt_messages, row.tools())


def _with_system(messages: Sequence[ChatMessage], row: FormatRow) -> list[ChatMessage]:
    system = row.text("system")
    nothing_to_add = not system or (len(messages) > 0 and messages[0].role == "system")
    return list(messages) if nothing_to_add else [ChatMessage("system", system), *messages]


def _read_chat(row: FormatRow) -> Sample:
    return _make_conversation(row.messages("messages"), row)


def _read_sharegpt(row: FormatRow) -> Sample:
    return _make_conversation(_with_system(row.messages("conversations"), row), row)


def _read_alpaca(row: FormatRow) -> Sample:
    history = row.values.get("history") or []
    turns: list[ChatMessage] = []
    for number, pair in enumerate(history if isinstance(history, list) else [history], 1):
        where = f"{row.place('history')}, pair {number},"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where} is not [question, answer]; correct or remove the record.")
        earlier, reply = (check_text(text, where) for text in pair)
        turns += [ChatMessage("user", earlier), ChatMessage("assistant", reply)]
    question = "\n".join(text for text in (row.text("instruction"), row.text("input")) if text)
    turns += [ChatMessage("user", question), ChatMessage("assistant", row.text("output"))]
    return _make_conversation(_with_system(turns, row), row)


def _read_completion(row: FormatRow) -> Sample:
    return _read_answer(row, "completion")


def _read_preference(row: FormatRow) -> Sample:
    return _make_preference(row, _read_answer(row, "chosen"), _read_answer(row, "rejected"))


def _read_answer(row: FormatRow, column: str) -> Completion | Conversation:
    # In a conversation the prompt is not supervised. Many files repeat the prompt at an answer's beginning.
    prompt, answer = (
        value if isinstance(value := row.values[name], list | Mapping) else row.text(name)
        for name in ("prompt", column)
    )
    if isinstance(prompt, str) and isinstance(answer, str):
        return Completion(prompt, answer)
    asked = (ChatMessage("user", prompt),) if isinstance(prompt, str) else row.messages("prompt")
    reply = (ChatMessage("assistant", answer),) if isinstance(answer, str) else row.messages(column)
    if reply[: len(asked)] == asked:
        reply = reply[len(asked) :]
    if not reply:
        raise DataError(f"{row.place(column)} has no answer after the prompt; add it or remove the record.")
    return _make_conversation([*asked, *reply], row, len(asked))


def _read_implicit_preference(row: FormatRow) -> Sample:
    chosen, rejected = row.values["chosen"], row.values["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt = _common_words(row.text("chosen"), row.text("rejected"))
        if not prompt:
            raise _no_shared_prompt_error(row)
        start = len(prompt)
        return _make_preference(row, Completion(prompt, chosen[start:]), Completion(prompt, rejected[start:]))
    first, second = row.messages("chosen"), row.messages("rejected")
    # The last message of each side is its answer, also if one side is the beginning of the other.
    shared = min(_common_prefix_length(first, second), len(first) - 1, len(second) - 1)
    if shared < 1:
        raise _no_shared_prompt_error(row)
    return _make_preference(row, _make_conversation(first, row, shared), _make_conversation(second, row, shared))


def _common_words(first: str, second: str) -> str:
    # Whole words: a prompt that ends within one would have other tokens than in a text that goes on.
    shared = first[: _common_prefix_length(first, second)]
    end = next((index for index in range(len(shared) - 1, -1, -1) if shared[index].isspace()), 0)
    return shared[:end]


def _common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _no_shared_prompt_error(row: FormatRow) -> DataError:
    return DataError(
        f"{row.where}: chosen and rejected do not begin with the same prompt; add a column 'prompt', or name it with "
        "--columns prompt=NAME."
    )


def _make_preference(
    row: FormatRow, chosen: Completion | Conversation, rejected: Completion | Conversation
) -> Preference:
    if chosen == rejected:
        raise DataError(f"{row.where}: chosen and rejected are equal, which says nothing; remove the record.")
    if type(chosen) is not type(rejected):
        raise DataError(f"{row.where}: of chosen and rejected one is text, one messages; write both in the same form.")
    return Preference(chosen, rejected)


# The formats, in the order in which they are tried: those with the most specific columns come first.
FORMATS: Final = (
    RecordFormat("preference", ("prompt", "chosen", "rejected"), _read_preference, ("dpo",), ("tools",)),
    RecordFormat("implicit preference", ("chosen", "rejected"), _read_implicit_preference, ("dpo",), ("tools",)),
    RecordFormat("chat", ("messages",), _read_chat, optional=("tools",)),
    RecordFormat("ShareGPT", ("conversations",), _read_sharegpt, optional=("system", "tools")),
    RecordFormat("prompt and completion", ("prompt", "completion"), _read_completion, optional=("tools",)),
    RecordFormat("Alpaca", ("instruction", "output"), _read_alpaca, optional=("input", "system", "history")),
    RecordFormat("text", ("text",), lambda row: PlainText(row.text("text")), ("lm", "sft")),
)


# --- the file


READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample with the place of its record, `where`, for errors."""

    sample: Sample
    where: str


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A data file whose format is recognised; not held open. present: the first record's columns, null ones too."""

    path: Path
    reader: RecordReader
    objective: Objective
    present: tuple[str, ...]

    @property
    def used_columns(self) -> dict[str, str]:
        return {name: column for name, column in self.reader.columns.items() if column in self.present}

    def samples(self) -> Iterator[PlacedSample]:
        """Raises DataError, with the place, for the first malformed record, DiskError, LocalError without a package."""
        for record in read_records(self.path, frozenset(self.reader.columns.values())):
            yield PlacedSample(self.reader.read(record), record.where)


def open_samples(path: Path, mapped: Mapping[str, str], objective: Objective | None = None) -> SampleFile:
    """Recognises the format of a file or `datasets` folder by its first record, and returns the file ready to read.

    mapped: format's column -> file's column, where the names differ. objective: None for the format's default. Raises
    DataError for an empty file, an unknown suffix or format, and a malformed first record, DiskError if the file cannot
    be read, LocalError without the package that the format needs.
    """
    first = next(read_records(path), None)
    if first is None:
        raise DataError(f"{path} holds no record; write one JSON object a line.")
    reader = recognise_format(first, mapped, objective)
    return SampleFile(path, reader, objective or reader.format.objectives[0], tuple(first.fields))


def hash_samples(path: Path) -> str:
    """SHA-256 in hex; of a `datasets` folder that of its files in order. Raises DiskError, DataError for any other
    folder.
    """
    digest = hashlib.sha256()
    for file in data_files(path):
        try:
            with file.open("rb") as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise unreadable_data(file, error) from error
    return digest.hexdigest()


def check_samples(path: Path, expected: str) -> None:
    """Raises DataError unless the samples have the SHA-256 `expected`; "" accepts any. Reads all of the data."""
    if expected and (found := hash_samples(path)) != expected:
        raise DataError(
            f"{path} has the SHA-256 {found}, but the run trains on samples with {expected} ([data] samples_hash); "
            "copy the file from a peer that trains, or found a new run with yours."
        )
