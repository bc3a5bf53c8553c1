"""Turns samples into token ids with a mask of the supervised ones, cut to the context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agora.data.tokenizer import EncodedText
from agora.tuning.chat.chat_template import CharRange, MarkedText
from agora.tuning.chat.conversations import Completion, Conversation, PlainText, Preference
from agora.tuning.chat.model_tokenizer import ModelTokenizer
from agora.tuning.chat.sample_file import PlacedSample

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
    samples: Iterable[PlacedSample], tokenizer: ModelTokenizer, *, context: int | None, supervise_all: bool
) -> Iterator[TokenSample]:
    """Tokenises samples and yields each as a TokenSample, in order, also those without a supervised token.

    context: the maximum number of tokens of a sequence; longer ones lose their end; None for no limit. supervise_all:
    every token but the first is supervised, as for the objective lm. Raises DataError for a malformed template, a
    conversation that the template refuses, and answers that cannot be found in the text; LocalError without jinja2.
    """
    batch: list[list[MarkedText]] = []
    characters = 0
    for placed in samples:
        batch.append(_mark_texts(placed, tokenizer, supervise_all=supervise_all))
        characters += sum(len(marked.text) for marked in batch[-1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_SAMPLES:
            yield from _encode(batch, tokenizer, context)
            batch = []
            characters = 0
    yield from _encode(batch, tokenizer, context)


def _mark_texts(placed: PlacedSample, tokenizer: ModelTokenizer, *, supervise_all: bool) -> list[MarkedText]:
    match placed.sample:
        case Preference(chosen, rejected):
            sides: Sequence[PlainText | Completion | Conversation] = (chosen, rejected)
        case sample:
            sides = (sample,)
    return [_mark_text(side, placed.where, tokenizer, supervise_all=supervise_all) for side in sides]


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
            text = prompt + completion + tokenizer.end_of_turn
            start = 0 if supervise_all else len(prompt)
        case PlainText(document):
            text = document + tokenizer.end_of_turn if document else ""
            start = 0
    # a corpus has no special token at a document's beginning, see corpus.py
    return MarkedText(text, ((start, len(text)),), supervise_all)


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
        yield tuple(_supervise(marked, next(encoded[marked.has_special_tokens]), context) for marked in sample)


def _supervise(marked: MarkedText, encoded: EncodedText, context: int | None) -> TokenSequence:
    # The first token, and special tokens that the tokenizer added, are never supervised.
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
