"""The formats of samples: recognised by the columns of the first record; how a record of each becomes a sample.

A new format is a row of FORMATS and the function that reads it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from agora_protocol.errors import DataError, InputError
from agora_protocol.manifest_sections import DataSection

from agora.data.record_files import RawRecord, check_text
from agora.tuning.chat.conversations import (
    USUAL_RULES,
    ChatMessage,
    Completion,
    Conversation,
    MessageRules,
    PlainText,
    Preference,
    Role,
    Sample,
    check_order,
    parse_json_text,
    parse_message_text,
    read_label,
    read_messages,
    read_tools,
    read_yes_or_no,
)

Objective = Literal["lm", "sft", "dpo"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
SHOWN_COLUMNS: Final = 20  # maximum number of columns that an error names
MESSAGE_FIELDS: Final = ("role", "content")  # of a message, not of a record; --columns may name them too
# Columns that say whether the one answer of a record is good or bad: of TRL, of LLaMA-Factory, and other spellings.
KTO_LABELS: Final = ("label", "kto_tag", "desirable", "is_desirable")
# Columns that say whether a record is learnt.
TRAIN_COLUMNS: Final = ("weight", "sample_weight", "loss_weight", "train", "trainable")


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """How the records of files become samples. It is part of the manifest: every peer must make the same rows.

    columns: format's name of a column -> the file's name of it. roles: spelling of a role -> role.
    any_order: see MessageRules. skip_bad: malformed records are left out, and counted, instead of ending the reading.
    drop_long: samples that are longer than the context are left out instead of cut.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    any_order: bool = False
    skip_bad: bool = False
    drop_long: bool = False

    @property
    def messages(self) -> MessageRules:
        return MessageRules(self.roles, self.columns.get("role"), self.columns.get("content"), self.any_order)

    @classmethod
    def of_manifest(cls, data: DataSection) -> ReadingRules:
        """Returns the rules in a manifest's [data]. Raises InputError for a role or a column that does not exist."""
        columns, roles = (",".join(f"{name}={value}" for name, value in pairs) for pairs in (data.columns, data.roles))
        return cls(
            parse_columns(columns) if columns else {},
            parse_roles(roles) if roles else {},
            data.role_order == "any",
            data.skip_bad,
            data.too_long == "drop",
        )


@dataclass(slots=True)
class ReadingCounts:
    """What became of records while they were read. problems: a sentence for each malformed record that was left out."""

    problems: list[str] = field(default_factory=list)
    labelled_bad: int = 0  # records left out because their answer is labelled bad
    excluded: int = 0  # records left out because one of TRAIN_COLUMNS says so
    too_long: int = 0  # samples left out because they are longer than the context
    empty_answers: int = 0  # samples with a blank answer, which are learnt all the same
    unwritten: Counter[str] = field(default_factory=Counter)  # fields of conversations that the template does not write
    changed: Counter[Role] = field(default_factory=Counter)  # messages that the template changes or leaves out

    def skip(self, error: DataError) -> None:
        """Counts a malformed record that is left out."""
        self.problems.append(str(error))


@dataclass(frozen=True, slots=True)
class FormatRecord:
    """One record of a data file."""

    values: Mapping[str, Any]  # by the format's names of the columns
    where: str  # the record's place in its file, for errors
    rules: MessageRules = USUAL_RULES

    def text(self, name: str) -> str:
        """Returns the text of a column; "" if it is missing or null. Raises DataError for another type."""
        value = self.values.get(name)
        return "" if value is None else check_text(value, self.place(name))

    def messages(self, name: str) -> tuple[ChatMessage, ...]:
        """Returns the messages of a required column. Raises DataError if malformed; their order is not checked."""
        return read_messages(self.values[name], self.place(name), self.rules)

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
    read: Callable[[FormatRecord], Sample]  # turns the columns of a record into a sample
    objectives: tuple[Objective, ...] = ("sft", "lm")  # that can use such samples; the first one is the default
    optional: tuple[str, ...] = ()  # names of columns
    may_have_messages: bool = True  # whether a column of it may be a list of messages

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Turns the records of one file into samples of one format.

    columns: the format's name of a column -> the file's name of it. Other columns of the file are ignored.
    verdict: the file's column that says whether an answer is good; None if the first record has none.
    no_verdicts: those of KTO_LABELS that say something else in this file, by the first record.
    """

    format: RecordFormat
    columns: Mapping[str, str]
    rules: MessageRules = USUAL_RULES
    verdict: str | None = None
    no_verdicts: tuple[str, ...] = ()

    @property
    def read_columns(self) -> frozenset[str]:
        return frozenset(self.columns.values()) | frozenset(KTO_LABELS) | frozenset(self.train_columns)

    @property
    def train_columns(self) -> tuple[str, ...]:
        """Those of TRAIN_COLUMNS that are heeded: none for plain text, whose columns say many things."""
        if self.format.required == ("text",):
            return ()
        return tuple(name for name in TRAIN_COLUMNS if name not in self.columns.values())

    def is_excluded(self, record: RawRecord) -> bool:
        """Returns whether one of TRAIN_COLUMNS says not to learn the record. Raises DataError if it says how much."""
        is_excluded = False
        for name in self.train_columns:
            value = record.fields.get(name)
            said = read_yes_or_no(value)
            if said is None and value not in (None, ""):
                raise DataError(
                    f"{record.where}: {name} is {value!r:.40}, but a sample is learnt whole or not at all; write 1 or "
                    "true, or 0 or false, or rename the column if it says something else."
                )
            is_excluded |= said is False
        return is_excluded

    def is_bad_answer(self, record: RawRecord) -> bool:
        """Returns whether the record's answer is labelled bad. Raises DataError if the label cannot be read.

        Raises DataError also for a bad answer in a file whose first record has no label: nobody chose what to do then.
        """
        if self.verdict is not None:
            said = read_label(record.fields.get(self.verdict))
            if said is None:
                raise DataError(
                    f"{record.where}: {self.verdict} is {record.fields.get(self.verdict)!r:.40}, which is neither true "
                    "nor false; correct or remove the record."
                )
            return not said
        for name in KTO_LABELS:
            value = record.fields.get(name)
            if name not in (*self.no_verdicts, *self.columns.values()) and read_label(value) is False:
                raise DataError(
                    f"{record.where} has {name} {str(value).lower():.40}, so its answer is bad, but the first record "
                    f"has no {name}; give each record one, or remove this one."
                )
        return False

    def read(self, record: RawRecord) -> Sample:
        """Raises DataError, which names the record's place, if it is malformed."""
        values = {name: record.fields.get(column) for name, column in self.columns.items()}
        for name in self.format.required:
            if values[name] is None:
                kind = "null in" if self.columns[name] in record.fields else "missing from"
                raise DataError(
                    f"{record.where}: column {self.columns[name]!r} is {kind} this record (present: "
                    f"{quote_names(record.fields)}); add it, or remove the record."
                )
        try:
            return self.format.read(FormatRecord(values, record.where, self.rules))
        except RecursionError as error:
            raise DataError(f"{record.where} has values that are nested too deeply; remove the record.") from error


def parse_columns(text: str) -> dict[str, str]:
    """Parses --columns, such as "prompt=question,completion=answer": returns format's column -> file's column.

    Raises InputError if it is malformed, or names a column twice or one that no format has.
    """
    known = sorted({name for kind in FORMATS for name in kind.columns} | set(MESSAGE_FIELDS))
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


def parse_roles(text: str) -> dict[str, Role]:
    """Parses --roles, such as "customer=user,agent=assistant": returns the spelling, in lower case -> role.

    Raises InputError if it is malformed, or names a spelling twice or a role that does not exist.
    """
    roles: dict[str, Role] = {}
    for part in text.split(","):
        spelling, equals, role = (word.strip() for word in part.partition("="))
        if not (spelling and equals and role):
            raise InputError(f"--roles has {part!r}; write it like customer=user,agent=assistant.")
        known = next((known for known in get_args(Role) if known == role), None)
        if known is None:
            raise InputError(f"--roles gives {spelling!r} the role {role!r}; roles are {', '.join(get_args(Role))}.")
        if spelling.lower() in roles:
            raise InputError(f"--roles names {spelling!r} twice; leave one out.")
        roles[spelling.lower()] = known
    return roles


def recognise_format(first: RawRecord, rules: ReadingRules, objective: Objective | None) -> RecordReader:
    """Recognises a file's format by its first record, and returns the reader for the file's records.

    The format is the first of FORMATS whose required columns the record has, not null, which has all columns that
    `rules.columns` names, and which serves the objective, if one is given. Raises DataError if no format fits, which
    names the missing column or the objective that would fit, and for answers that are labelled good or bad, if no
    objective is given.
    """
    mapped = {name: column for name, column in rules.columns.items() if name not in MESSAGE_FIELDS}
    for name, column in mapped.items():
        if first.fields.get(column) is None:
            raise DataError(
                f"{first.where} has no column {column!r}, which --columns gives for {name!r} (present: "
                f"{quote_names(first.fields)}); correct --columns."
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
    own = [name for name in KTO_LABELS if name not in columns.values()]
    said = {name: read_label(first.fields.get(name)) for name in own}
    has_verdicts = "dpo" not in chosen.objectives and chosen.required != ("text",)
    verdict = next((name for name in own if said[name] is not None), None) if has_verdicts else None
    others = (name for name in own if said[name] is None and first.fields.get(name) not in (None, ""))
    if verdict is not None and objective is None:
        raise DataError(
            f"{first.where} is of the format KTO: {verdict!r} says whether its answer is good or bad, which cannot be "
            "learnt yet. With --objective sft those labelled true are learnt and the others left out; or give pairs "
            f"(columns prompt, chosen, rejected), or rename {verdict!r} if it says something else."
        )
    return RecordReader(chosen, columns, rules.messages, verdict, tuple(others) if has_verdicts else KTO_LABELS)


def _present_columns(first: RawRecord, mapped: Mapping[str, str]) -> set[str]:
    own = {column for column, value in first.fields.items() if value is not None}
    return (own - set(mapped.values())) | set(mapped)


def _unknown_format_error(
    first: RawRecord, present: set[str], mapped: Mapping[str, str], objective: Objective | None
) -> DataError:
    candidates = [kind for kind in FORMATS if set(mapped) <= set(kind.columns)]
    if mapped and not candidates:
        return DataError(
            f"No format has all of the columns {quote_names(mapped)} that --columns names; see docs/use/data.md."
        )
    serving = [kind for kind in candidates if objective in (None, *kind.objectives)] or candidates
    # by the fraction of the format's columns that is there, so that one of two counts more than one of three
    nearest = max(serving, key=lambda kind: len(present.intersection(kind.required)) / len(kind.required))
    missing = [name for name in nearest.required if name not in present]
    columns = quote_names(first.fields)
    named = present.union(first.fields)
    if whole := next((kind for kind in serving if named.issuperset(kind.required)), None):
        nulls = " and ".join(repr(name) for name in whole.required if name not in present)
        return DataError(
            f"{first.where} has columns of no known format: {nulls} is null, and a file's format is recognised by its "
            "first record; fill it in, or remove the record."
        )
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


def quote_names(names: Mapping[str, Any]) -> str:
    # Quoted with escapes: a file's text must not control a terminal.
    shown = [f"{name!r:.60}" for name in list(names)[:SHOWN_COLUMNS]]
    return ", ".join(shown + (["..."] if len(names) > SHOWN_COLUMNS else [])) or "none"


def _make_conversation(messages: Sequence[ChatMessage], row: FormatRecord, prompt_messages: int = 0) -> Conversation:
    check_order(messages, row.where, row.rules)
    return Conversation(tuple(messages), prompt_messages, row.tools())


def _with_system(messages: Sequence[ChatMessage], row: FormatRecord) -> list[ChatMessage]:
    system = row.text("system")
    nothing_to_add = not system or (len(messages) > 0 and messages[0].role == "system")
    return list(messages) if nothing_to_add else [ChatMessage("system", system), *messages]


def _read_chat(row: FormatRecord) -> Sample:
    return _make_conversation(_with_system(row.messages("messages"), row), row)


def _read_sharegpt(row: FormatRecord) -> Sample:
    return _make_conversation(_with_system(row.messages("conversations"), row), row)


def _read_alpaca(row: FormatRecord) -> Sample:
    turns = [*_alpaca_prompt(row), ChatMessage("assistant", row.text("output"))]
    return _make_conversation(turns, row)


def _read_alpaca_preference(row: FormatRecord) -> Sample:
    return _make_chat_preference(_alpaca_prompt(row), row)


def _read_sharegpt_preference(row: FormatRecord) -> Sample:
    return _make_chat_preference(_with_system(row.messages("conversations"), row), row)


def _make_chat_preference(prompt: Sequence[ChatMessage], row: FormatRecord) -> Sample:
    sides = []
    for name in ("chosen", "rejected"):
        value = parse_message_text(row.values[name], row.place(name), row.rules)
        answer = (ChatMessage("assistant", row.text(name)),) if isinstance(value, str) else row.messages(name)
        sides.append(_make_conversation([*prompt, *answer], row, len(prompt)))
    return _make_preference(row, *sides)


def _alpaca_prompt(row: FormatRecord) -> list[ChatMessage]:
    history = parse_json_text(row.values.get("history") or [], row.place("history"))
    turns: list[ChatMessage] = []
    for number, pair in enumerate(history if isinstance(history, list) else [history], 1):
        where = f"{row.place('history')}, pair {number},"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where} is not [question, answer]; correct or remove the record.")
        earlier, reply = (check_text(text, where) for text in pair)
        turns += [ChatMessage("user", earlier), ChatMessage("assistant", reply)]
    turns.append(ChatMessage("user", _with_input(row.text("instruction"), row)))
    return _with_system(turns, row)


def _with_input(question: str, row: FormatRecord) -> str:
    return "\n".join(text for text in (question, row.text("input")) if text)


def _read_completion(row: FormatRecord) -> Sample:
    return _read_answer(row, "completion")


def _read_preference(row: FormatRecord) -> Sample:
    return _make_preference(row, _read_answer(row, "chosen"), _read_answer(row, "rejected"))


def _read_answer(row: FormatRecord, column: str) -> Completion | Conversation:
    # In a conversation the prompt is not supervised. Many files repeat the prompt at an answer's beginning.
    prompt, answer = (
        value if isinstance(value, list | Mapping) else row.text(name)
        for name in ("prompt", column)
        for value in (parse_message_text(row.values[name], row.place(name), row.rules),)
    )
    if isinstance(prompt, str):
        prompt = _with_input(prompt, row)
        if isinstance(answer, str) and not row.text("system"):
            return Completion(prompt, answer)
    elif row.text("input"):
        raise DataError(f"{row.place('input')} has no place beside a list of messages; add it to a message.")
    alone = (ChatMessage("user", prompt),) if isinstance(prompt, str) else row.messages("prompt")
    asked = tuple(_with_system(alone, row))
    reply = (ChatMessage("assistant", answer),) if isinstance(answer, str) else row.messages(column)
    repeated = next((messages for messages in (asked, alone) if reply[: len(messages)] == messages), ())
    reply = reply[len(repeated) :]
    if not reply:
        raise DataError(f"{row.place(column)} has no answer after the prompt; add it or remove the record.")
    return _make_conversation([*asked, *reply], row, len(asked))


def _read_implicit_preference(row: FormatRecord) -> Sample:
    chosen, rejected = (
        parse_message_text(row.values[name], row.place(name), row.rules) for name in ("chosen", "rejected")
    )
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt = _common_words(row.text("chosen"), row.text("rejected"))
        if not prompt:
            raise _no_shared_prompt_error(row)
        start = len(prompt)
        return _make_preference(row, Completion(prompt, chosen[start:]), Completion(prompt, rejected[start:]))
    first, second = (tuple(_with_system(row.messages(name), row)) for name in ("chosen", "rejected"))
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


def _no_shared_prompt_error(row: FormatRecord) -> DataError:
    return DataError(
        f"{row.where}: chosen and rejected do not begin with the same prompt; add a column 'prompt', or name it with "
        "--columns prompt=NAME."
    )


def _make_preference(
    row: FormatRecord, chosen: Completion | Conversation, rejected: Completion | Conversation
) -> Preference:
    if chosen == rejected:
        raise DataError(f"{row.where}: chosen and rejected are equal, which says nothing; remove the record.")
    if type(chosen) is not type(rejected):
        raise DataError(f"{row.where}: of chosen and rejected one is text, one messages; write both in the same form.")
    return Preference(chosen, rejected)


# The formats, in the order in which they are tried: those with the most specific columns come first.
FORMATS: Final = (
    RecordFormat(
        "preference", ("prompt", "chosen", "rejected"), _read_preference, ("dpo",), ("input", "system", "tools")
    ),
    RecordFormat(
        "Alpaca preference",
        ("instruction", "chosen", "rejected"),
        _read_alpaca_preference,
        ("dpo",),
        ("input", "system", "history"),
        may_have_messages=False,
    ),
    RecordFormat(
        "ShareGPT preference",
        ("conversations", "chosen", "rejected"),
        _read_sharegpt_preference,
        ("dpo",),
        ("system", "tools"),
    ),
    RecordFormat(
        "implicit preference", ("chosen", "rejected"), _read_implicit_preference, ("dpo",), ("system", "tools")
    ),
    RecordFormat("chat", ("messages",), _read_chat, optional=("system", "tools")),
    RecordFormat("ShareGPT", ("conversations",), _read_sharegpt, optional=("system", "tools")),
    RecordFormat(
        "prompt and completion", ("prompt", "completion"), _read_completion, optional=("input", "system", "tools")
    ),
    RecordFormat(
        "Alpaca",
        ("instruction", "output"),
        _read_alpaca,
        optional=("input", "system", "history"),
        may_have_messages=False,
    ),
    RecordFormat("text", ("text",), lambda row: PlainText(row.text("text")), ("lm", "sft"), may_have_messages=False),
)
