"""Turns samples into token ids with a mask of the supervised ones, cut to the context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from agora_protocol.errors import DataError
from numpy.typing import NDArray

from agora.data.tokenizer import EncodedText
from agora.tuning.chat.chat_template import CharRange, ChatTemplate, MarkedText, TemplateProblem
from agora.tuning.chat.conversations import Completion, Conversation, PlainText, Preference, Sample
from agora.tuning.chat.model_tokenizer import ModelTokenizer
from agora.tuning.chat.sample_file import PlacedSample, SampleFiles
from agora.tuning.chat.sample_formats import ReadingCounts

BATCH_CHARACTERS = 1 << 20  # characters and samples after which a batch is tokenised
BATCH_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenised text of n tokens; the first token is never supervised, because nothing predicts it."""

    ids: NDArray[np.int32]  # [n]
    supervised: NDArray[np.bool_]  # [n]
    # [n, 2]: the index of the first character of `text` that a token stands for, and the index after its last one.
    offsets: NDArray[np.int32]
    text: str  # the whole text, also what was truncated
    truncated: int  # how many tokens were cut off at the end

    def supervised_ranges(self) -> list[CharRange]:
        """Returns the range of characters of each maximal sequence of supervised tokens; ascending, not overlapping."""
        edges = np.flatnonzero(np.diff(self.supervised.astype(np.int8), prepend=0, append=0))
        ranges: list[CharRange] = []
        for first, last in zip(edges[0::2], edges[1::2], strict=True):
            # tokens of two sequences may share a character: then the second range begins where the first one ends
            start = max(int(self.offsets[first, 0]), ranges[-1][1] if ranges else 0)
            ranges.append((start, max(start, int(self.offsets[last - 1, 1]))))
        return ranges


# A sample as tokens: one sequence; of a preference two, the chosen and the rejected one.
TokenSample = tuple[TokenSequence, ...]


def tokenise(
    file: SampleFiles, counts: ReadingCounts, tokenizer: ModelTokenizer, context: int
) -> Iterator[TokenSample]:
    """Reads and tokenises the samples of files; yields each as a TokenSample, in order, also if nothing is supervised.

    counts: is increased by what the files' rules leave out. context: the maximum number of tokens of a sequence;
    longer ones lose their end, or are left out. The objective lm has no such limit, and every token but the first is
    supervised. Raises DataError for malformed records and conversations that the template refuses, unless the rules
    skip these; TemplateProblem for a template that cannot be used; LocalError without jinja2.
    """
    is_lm = file.objective == "lm"
    found = encode_samples(_marked(file, counts, tokenizer), tokenizer, context=None if is_lm else context)
    for sample in found:
        if file.rules.drop_long and any(part.truncated for part in sample):
            counts.too_long += 1
        else:
            yield sample


def _marked(file: SampleFiles, counts: ReadingCounts, tokenizer: ModelTokenizer) -> Iterator[list[MarkedText]]:
    for placed in file.samples(counts):
        try:
            marked = mark_sample(placed, tokenizer, supervise_all=file.objective == "lm")
            for side, text in zip(_sides(placed.sample), marked, strict=True):
                if isinstance(side, Conversation):
                    _count_unwritten(side, text.text, tokenizer.template, placed.where, counts)
        except TemplateProblem:
            raise
        except DataError as error:
            if not file.rules.skip_bad:
                raise
            counts.skip(error)
        else:
            yield marked


def _count_unwritten(
    conversation: Conversation, text: str, template: ChatTemplate, where: str, counts: ReadingCounts
) -> None:
    if conversation.tools and not template.mentions("tools"):
        counts.unwritten["tools"] += 1
    for number, message in enumerate(conversation.messages, 1):
        counts.changed[message.role] += message.content.strip() not in text
        for name, value in message.extra.items():
            if template.mentions(name) or (isinstance(value, str) and value in text):
                continue
            if name == "tool_calls" and not message.content.strip() and conversation.is_supervised(number - 1):
                raise DataError(
                    f"{where}, message {number}, has only tool_calls, and {template.name} does not write them, so an "
                    "empty answer would be learnt; give a template that does with --chat-template, or remove the "
                    "record."
                )
            counts.unwritten[name] += 1


def encode_samples(
    samples: Iterable[list[MarkedText]], tokenizer: ModelTokenizer, *, context: int | None
) -> Iterator[TokenSample]:
    """Tokenises the texts of each sample. context: the maximum number of tokens of a sequence; None for no limit."""
    batch: list[list[MarkedText]] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += sum(len(marked.text) for marked in batch[-1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_SAMPLES:
            yield from _encode(batch, tokenizer, context)
            batch = []
            characters = 0
    yield from _encode(batch, tokenizer, context)


def mark_sample(placed: PlacedSample, tokenizer: ModelTokenizer, *, supervise_all: bool) -> list[MarkedText]:
    """Returns the text of a sample with its supervised ranges; of a preference two, the chosen and the rejected one."""
    sides = _sides(placed.sample)
    return [_mark_text(side, placed.where, tokenizer, supervise_all=supervise_all) for side in sides]


def _sides(sample: Sample) -> Sequence[PlainText | Completion | Conversation]:
    return (sample.chosen, sample.rejected) if isinstance(sample, Preference) else (sample,)


def _mark_text(
    sample: PlainText | Completion | Conversation, where: str, tokenizer: ModelTokenizer, *, supervise_all: bool
) -> MarkedText:
    match sample:
        case Conversation() if supervise_all:
            text = tokenizer.template.render(sample, where)
            return MarkedText(text, ((0, len(text)),), True)
        case Conversation():
            return tokenizer.template.mark(sample, where)
        case Completion(prompt, completion):
            text = prompt + _with_end(completion, tokenizer.end_of_turn)
            start = 0 if supervise_all else len(prompt)
        case PlainText(document):
            text = _with_end(document, tokenizer.end_of_turn) if document else ""
            start = 0
    # a corpus has no special token at a document's beginning, see corpus.py
    return MarkedText(text, ((start, len(text)),), supervise_all)


def _with_end(text: str, end: str) -> str:
    # Many files have the end already; twice it would teach the model to write it twice.
    is_there = text.rstrip().endswith(end.strip()) if end.strip() else text.endswith(end)
    return text if is_there else text + end


def _encode(
    batch: Sequence[Sequence[MarkedText]], tokenizer: ModelTokenizer, context: int | None
) -> Iterator[TokenSample]:
    encoded: dict[bool, Iterator[EncodedText]] = {}
    for has_them in (False, True):
        texts = [marked.text for sample in batch for marked in sample if marked.has_special_tokens == has_them]
        encoded[has_them] = iter(
            tokenizer.tokenizer.encode_with_offsets(texts, add_special=not has_them) if texts else ()
        )
    for sample in batch:
        sides = [_supervise(marked, next(encoded[marked.has_special_tokens]), context) for marked in sample]
        if len(sides) > 1 and np.array_equal(sides[0].ids, sides[1].ids):
            # What made the better answer better was cut off, or the template left it out: nothing is supervised.
            sides = [replace(side, supervised=np.zeros_like(side.supervised)) for side in sides]
        yield tuple(sides)


def _supervise(marked: MarkedText, encoded: EncodedText, context: int | None) -> TokenSequence:
    # The first token, and special tokens that the tokenizer added, are never supervised.
    encoded = _without_second_beginning(encoded)
    kept = np.flatnonzero(~encoded.is_added)
    length = int(kept[-1]) + 1 if len(kept) else 0
    cut = length if context is None else min(length, context)
    starts = encoded.offsets[:cut, 0]
    ends = encoded.offsets[:cut, 1]
    supervised = np.zeros(cut, np.bool_)
    for start, end in marked.ranges:
        supervised |= (starts < end) & (ends > start)
    supervised &= ~encoded.is_added[:cut]
    supervised[:1] = False
    return TokenSequence(encoded.ids[:cut], supervised, encoded.offsets[:cut], marked.text, length - cut)


def _without_second_beginning(encoded: EncodedText) -> EncodedText:
    # A text that begins with the token that the tokenizer adds, such as <s>, has it once.
    written = np.flatnonzero(~encoded.is_added)
    start = int(written[0]) if len(written) else 0
    if not start or encoded.ids[start - 1] != encoded.ids[start]:
        return encoded
    return EncodedText(encoded.ids[start:], encoded.offsets[start:], encoded.is_added[start:])
