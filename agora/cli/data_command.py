"""`swarm data`: shows what a data file was recognised as, three samples with marked supervised parts, and lengths.

What a file contains is escaped before a terminal sees it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from agora_protocol.manifest_model import ADAPTER_FILE

from agora.cli import console
from agora.cli.console import EXIT_USAGE, Failure
from agora.core.hub_files import ADAPTER_CONFIG_FILE
from agora.tuning.chat.chat_template import split_supervised
from agora.tuning.chat.data_survey import DataSurvey, survey
from agora.tuning.chat.hub_data import fetch_data_set
from agora.tuning.chat.model_tokenizer import ModelTokenizer, open_model_tokenizer, read_chat_template
from agora.tuning.chat.sample_file import SampleFile, SampleFiles, open_samples
from agora.tuning.chat.sample_formats import (
    MESSAGE_FIELDS,
    OBJECTIVES,
    Objective,
    ReadingRules,
    parse_columns,
    parse_roles,
)
from agora.tuning.chat.supervision import TokenSequence

if TYPE_CHECKING:
    from rich.text import Text

ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, "adapter_model.bin")
SHOWN_SAMPLES: Final = 3
USUAL_CONTEXT: Final = 1024
BAR: Final = 40  # characters
SHOWN_HEAD, SHOWN_TAIL, SHOWN_PARTS = 400, 200, 16  # characters of a part's beginning and end; parts of a sample
STYLE: Final = "bold green"
MARKS: Final = ("[[", "]]")  # around supervised parts where there is no colour
SIDES: Final = {1: ("",), 2: (", chosen", ", rejected")}

Part = tuple[str, bool]  # A piece of a sample's text, and whether its tokens are supervised (are targets of the loss)
ROWS_OF_A_PAIR: Final = 2
SHOWN_PROBLEMS: Final = 20
LEFT_OUT: Final = (
    "without a supervised token within the context",
    "without a supervised token, or without a difference, within the context",
)
STANDARD_INPUT: Final = "-"
ROLE_ORDERS: Final = ("turns", "any")
TOO_LONG: Final = ("cut", "drop")


@dataclass(frozen=True, slots=True)
class ReadingChoice:
    """The flags of `swarm data` and `swarm new` that say how data is read; None for one that was not given.

    columns: which column of the file has which part of a sample, such as "prompt=question,completion=answer".
    roles: such as "customer=user,agent=assistant".
    role_order: one of ROLE_ORDERS.
    too_long: one of TOO_LONG.
    chat_template: a file, or the name of a template.
    bad_report: a file to write, with a line for each malformed record that was skipped.
    """

    columns: str | None = None
    roles: str | None = None
    role_order: str | None = None
    skip_bad: bool = False
    too_long: str | None = None
    chat_template: str | None = None
    bad_report: Path | None = None

    def rules(self) -> ReadingRules:
        """Returns the rules that the flags ask for. Raises Failure and InputError for wrong ones."""
        for flag, value, known in (("role-order", self.role_order, ROLE_ORDERS), ("too-long", self.too_long, TOO_LONG)):
            if value is not None and value not in known:
                raise Failure(f"--{flag} is {' or '.join(known)}", EXIT_USAGE)
        if self.bad_report is not None and not self.skip_bad:
            raise Failure("--bad-report is about what --skip-bad skips; add that", EXIT_USAGE)
        return ReadingRules(
            parse_columns(self.columns) if self.columns else {},
            parse_roles(self.roles) if self.roles else {},
            self.role_order == "any",
            self.skip_bad,
            self.too_long == "drop",
        )

    def template(self, base_model: Path | None) -> str:
        """Returns the source of the chosen chat template; "" for the model's own."""
        return read_chat_template(self.chat_template, base_model) if self.chat_template else ""

    def check(self, files: SampleFiles) -> None:
        """Raises Failure for flags that have no effect on these files: what they ask for would not happen."""
        has_messages = any(each.reader.format.may_have_messages for each in files.files)
        about_messages = {"--roles": self.roles, "--role-order": self.role_order}
        about_messages |= {f"--columns {name}": files.rules.columns.get(name) for name in MESSAGE_FIELDS}
        formats = [each.reader.format.name for each in files.files]
        for flags, matters, what in (
            (about_messages, has_messages, f"is about messages, and {files.name} has none (format: {formats[0]})"),
            ({"--too-long": self.too_long}, files.objective != "lm", "is for samples, not for text learnt whole"),
            ({"--chat-template": self.chat_template}, set(formats) != {"text"}, "is for samples, not for plain text"),
        ):
            for flag, value in flags.items():
                if value and not matters:
                    raise Failure(f"{flag} {what}; leave it out", EXIT_USAGE)


USUAL_READING: Final = ReadingChoice()


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The flags of `swarm data`; None for one that was not given.

    files: the data files to show, or folders of them.
    base_model: the folder with the tokenizer; None for the built-in one.
    objective: what is trained, one of OBJECTIVES.
    context: in tokens.
    """

    files: tuple[Path, ...]
    base_model: Path | None = None
    objective: str | None = None
    context: int | None = None
    reading: ReadingChoice = USUAL_READING


def run(options: DataOptions, *, as_json: bool) -> int:
    """Prints the survey of a data file. Raises Failure and InputError for wrong flags, DataError, DiskError."""
    objective = check_objective(options.objective)
    rules = options.reading.rules()
    tokenizer = open_model_tokenizer(options.base_model, datetime.now(), options.reading.template(options.base_model))
    context = _choose_context(options.context, tokenizer)
    file = open_samples(options.files, rules, objective)
    options.reading.check(file)
    with console.ProgressDisplay("reading samples") as display:
        found = survey(
            file, tokenizer, context, SHOWN_SAMPLES, lambda count: display.show(count, f"{count:,} samples read")
        )
    write_bad_report(options.reading.bad_report, found)
    if as_json:
        console.print_json(survey_fields(file, tokenizer, found))
    else:
        _print_survey(file, tokenizer, found)
    require_learnable(file, found)
    return console.EXIT_DONE


def require_learnable(file: SampleFiles, found: DataSurvey) -> None:
    """Raises Failure if no sample has a supervised token within the context."""
    if not found.supervised:
        raise Failure(
            f"{file.name} has nothing to learn: none of its {found.samples:,} samples has a supervised token among its "
            f"first {found.context + 1:,}; look at it with `swarm data`"
        )


def write_bad_report(path: Path | None, found: DataSurvey) -> None:
    """Writes a line for each malformed record to the file `path`, if one is given; shows the first ones otherwise."""
    problems = found.counts.problems
    if path is None:
        for problem in problems[:SHOWN_PROBLEMS]:
            console.print_to_stderr(f"skipped      {problem}")
        if len(problems) > SHOWN_PROBLEMS:
            more = len(problems) - SHOWN_PROBLEMS
            console.print_to_stderr(f"skipped      {more:,} more; --bad-report FILE writes all of them")
        return
    try:
        path.write_text("".join(f"{problem}\n" for problem in problems), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None
    console.print_to_stderr(f"skipped      {len(problems):,} malformed records, listed in {path}")


@contextlib.contextmanager
def local_files(named: Sequence[Path], kept_input: Path | None = None) -> Iterator[tuple[Path, ...]]:
    """Yields the data files: `-` is standard input, which is copied to a file, ORG/NAME a data set of the Hub.

    kept_input: the new file for standard input; None for one that is removed at the end. Raises Failure if the file
    exists or if `-` is named twice, DataError or LocalError if a data set cannot be fetched.
    """
    if sum(str(path) == STANDARD_INPUT for path in named) > 1:
        raise Failure("standard input (-) is named twice; leave one out", EXIT_USAGE)
    with contextlib.ExitStack() as closing:
        found: list[Path] = []
        for path in named:
            if str(path) != STANDARD_INPUT:
                found += fetch_data_set(path) or (path,)
            elif kept_input is not None:
                found.append(_copy_input(kept_input))
            else:
                folder = closing.enter_context(_temporary_folder())
                found.append(_copy_input(Path(folder, "standard-input.json")))
        yield tuple(found)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="agora-data-")
    except OSError as error:
        reason = error.strerror or error
        raise Failure(
            f"cannot make a temporary folder for standard input ({reason}); set TMPDIR to one that can be written, or "
            "write the data to a file and name that"
        ) from None


def _copy_input(target: Path) -> Path:
    try:
        with target.open("xb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        raise Failure(f"cannot write standard input to {target} ({error.strerror}); remove or rename it") from None
    return target


def _choose_context(chosen: int | None, tokenizer: ModelTokenizer) -> int:
    longest = tokenizer.longest_context
    if chosen is None:
        return min(USUAL_CONTEXT, longest or USUAL_CONTEXT)
    if longest is not None and chosen > longest:
        raise console.Failure(
            f"--context {chosen} is more than the {longest} tokens that {tokenizer.name} was made for; lower it",
            console.EXIT_USAGE,
        )
    return chosen


def survey_fields(file: SampleFiles, tokenizer: ModelTokenizer, found: DataSurvey) -> dict[str, Any]:
    """Returns the JSON object that `swarm data --json` prints: format, columns, counts, lengths, samples shown.

    "file", "format" and the columns are those of the first file; "files" has all of them.
    """
    low, median, high, most = _quantiles(found)
    files = [
        {
            "file": str(each.path),
            "format": each.reader.format.name,
            "columns": each.used_columns,
            "unused_columns": each.unused_columns,
        }
        for each in file.files
    ]
    return {
        "schema": 1,
        **files[0],
        "files": files,
        "objective": found.objective,
        "tokenizer": tokenizer.name,
        "template": tokenizer.template_name,
        "adapter_left_out": bool(adapter_lines(Path(tokenizer.name), "")),
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
        "too_long": found.counts.too_long,
        "labelled_bad": found.counts.labelled_bad,
        "duplicates": found.duplicates,
        "empty_answers": found.counts.empty_answers,
        "excluded": found.counts.excluded,
        "unknown_tokens": found.unknown,
        "changed_messages": {role: count for role, count in found.counts.changed.items() if count},
        "unwritten_fields": dict(found.counts.unwritten),
        "remarks": list(tokenizer.remarks),
        "skipped": found.counts.problems,
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
        lines.append(f"left out   {_count_with_noun(found.left_out, 'sample')} {LEFT_OUT[found.objective == 'dpo']}")
    lines += remark_lines(found, 11)
    if found.rows is None:
        lines.append("packing    none: the two sides of a preference are computed together")
    elif found.efficiency is not None:
        lines.append(f"packing    {_count_with_noun(found.rows, 'sequence')}, {100 * found.efficiency:.1f} % full")
    return lines


def remark_lines(found: DataSurvey, width: int) -> list[str]:
    """Returns a line for each count that is not 0 of what was left out while reading, duplicates, empty answers.

    width: characters of the names at the lines' beginnings.
    """
    counts = found.counts
    counted = (
        ("too long", counts.too_long, "longer than the context, left out"),
        ("bad", counts.labelled_bad, "labelled bad, left out: only good answers are learnt"),
        ("excluded", counts.excluded, "excluded by a column that says not to learn them"),
        ("malformed", len(counts.problems), "malformed, left out"),
        ("duplicates", found.duplicates, "equal to an earlier one, learnt each time"),
        ("empty", counts.empty_answers, "with an empty answer, learnt as they are"),
    )
    lines = [f"{name:<{width}}{_count_with_noun(count, 'sample')} {what}" for name, count, what in counted if count]
    if found.unknown:
        tokens = _count_with_noun(found.unknown, "token")
        lines.append(f"{'unknown':<{width}}{tokens} for text that the tokenizer has no token for")
    if changed := [_count_with_noun(count, f"{role} message") for role, count in counts.changed.items() if count]:
        lines.append(f"{'changed':<{width}}{', '.join(changed)} by the template: their text is not there as it is")
    if counts.unwritten:
        fields = [f"{escape(repr(name)[:60])} of {count:,}" for name, count in counts.unwritten.most_common(8)]
        lines.append(f"{'unwritten':<{width}}the template does not write the fields {', '.join(fields)} messages")
    return lines


def heading_lines(file: SampleFiles, tokenizer: ModelTokenizer) -> list[str]:
    """Returns the lines to print before the shown samples: formats, columns, objective, tokenizer, template."""
    formats = dict.fromkeys(map(format_words, file.files))
    lines = (
        []
        if len(file.files) == 1
        else [f"files      {len(file.files)}, the first is {escape(file.files[0].path.name)}"]
    )
    return [
        *lines,
        *(f"format     {words}" for words in formats),
        f"objective  {file.objective}",
        f"tokenizer  {escape(tokenizer.name)}, conversations by {escape(tokenizer.template_name)}",
        *(f"remark     {escape(remark)}" for remark in tokenizer.remarks),
        *adapter_lines(Path(tokenizer.name), "adapter    "),
    ]


def adapter_lines(folder: Path, heading: str) -> list[str]:
    """Returns what to say of a PEFT adapter in a base model's folder, which transformers would load and a run does not;
    [] without one.
    """
    if not any((folder / name).is_file() for name in ADAPTER_FILES):
        return []
    return [
        f"{heading}{escape(str(folder))} has a PEFT adapter beside the base model; it is not loaded, the base model "
        f"alone is trained. To go on from the adapter: swarm new --adapter {escape(str(folder))}"
    ]


def format_words(file: SampleFile) -> str:
    """Returns the format of a file and its columns in words, also those that are not used."""
    named = [name if name == column else f"{name} from {column!r}" for name, column in file.used_columns.items()]
    unused = f"; not used: {', '.join(map(repr, file.unused_columns))}" if file.unused_columns else ""
    return f"{file.reader.format.name}, by the columns {', '.join(named)}{unused}"


def _count_with_noun(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _quantiles(found: DataSurvey) -> tuple[int, int, int, int]:
    # Each is the length of a sample, never a mean of two.
    if not found.samples:
        return 0, 0, 0, 0
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


def _print_survey(file: SampleFiles, tokenizer: ModelTokenizer, found: DataSurvey) -> None:
    from rich.console import Console
    from rich.text import Text

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding than UTF-8
    terminal = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    # A terminal may have no colours, such as one whose TERM is dumb.
    has_colour = terminal.color_system is not None and not terminal.no_color
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
        shown = escape(_shorten(part))
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


def escape(text: str) -> str:
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def check_objective(text: str | None) -> Objective | None:
    if text is None:
        return None
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise Failure(f"--objective is {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}", EXIT_USAGE)
