"""Turns samples into token ids with a mask of the supervised ones, cut to the context.

Knows: which part of a sample is supervised, tokenizers and templates. Must not know: files, packing, models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agora.data.chat_template import MarkedText, Span
from agora.data.conversations import Completion, Conversation, PlainText, Preference
from agora.data.model_tokenizer import ModelTokenizer
from agora.data.sample_file import PlacedSample
from agora.data.tokenizer import EncodedText

BATCH_CHARACTERS = 1 << 20
BATCH_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The token ids of one text [n], and which of them are supervised [n]; the first never is, as nothing predicts it.

    offsets: the first character of `text` that each token stands for, and the one after its last, [n, 2]. truncated:
    how many tokens were cut off at the end.
    """

    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    offsets: NDArray[np.int32]
    text: str
    truncated: int

    def spans(self) -> list[Span]:
        """Returns the (start, end) characters of the text for each run of supervised tokens, in order."""
        edges = np.flatnonzero(np.diff(self.supervised.astype(np.int8), prepend=0, append=0))
        runs = zip(edges[0::2], edges[1::2], strict=True)
        spans: list[Span] = []
        for first, last in runs:
            # tokens of two runs may share a character: then the second span begins where the first one ends
            start = max(int(self.offsets[first, 0]), spans[-1][1] if spans else 0)
            spans.append((start, max(start, int(self.offsets[last - 1, 1]))))
        return spans


TokenSample = tuple[TokenSequence, ...]
"""A sample as tokens: one sequence; of a preference two, the chosen and the rejected one."""


def tokenise(
    samples: Iterable[PlacedSample], tokenizer: ModelTokenizer, *, context: int | None, learn_all: bool
) -> Iterator[TokenSample]:
    """Yields each sample as tokens, in order; at most BATCH_SAMPLES or about BATCH_CHARACTERS are in memory.

    context: the most tokens of a sequence; longer ones lose their end; None for no limit. learn_all: every token is
    supervised, as for the objective lm, not only answers and completions. Raises DataError, which names the record, for
    a conversation that the template refuses.
    """
    batch: list[list[MarkedText]] = []
    characters = 0
    for placed in samples:
        batch.append(_texts_with_spans(placed, tokenizer, learn_all=learn_all))
        characters += sum(len(marked.text) for marked in batch[-1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_SAMPLES:
            yield from _encode(batch, tokenizer, context)
            batch, characters = [], 0
    yield from _encode(batch, tokenizer, context)


def _texts_with_spans(placed: PlacedSample, tokenizer: ModelTokenizer, *, learn_all: bool) -> list[MarkedText]:
    """Returns the text of a sample with its supervised spans, as a list of one; of a preference, both sides'."""
    match placed.sample:
        case Preference(chosen, rejected):
            sides: Sequence[PlainText | Completion | Conversation] = (chosen, rejected)
        case sample:
            sides = (sample,)
    return [_text_with_spans(side, placed.where, tokenizer, learn_all=learn_all) for side in sides]


def _text_with_spans(
    sample: PlainText | Completion | Conversation, where: str, tokenizer: ModelTokenizer, *, learn_all: bool
) -> MarkedText:
    """Returns a sample's text with its supervised spans; ends of turn are supervised, too.

    Of a conversation the answers are supervised, of a completion what follows the prompt, of plain text everything.
    learn_all: all of the text is.
    """
    match sample:
        case Conversation() if learn_all:
            text = tokenizer.template.render(sample, where)
            return MarkedText(text, ((0, len(text)),), True)
        case Conversation():
            return tokenizer.template.mark(sample, where)
        case Completion(prompt, completion):
            text, start = prompt + completion + tokenizer.end_of_turn, 0 if learn_all else len(prompt)
        case PlainText(document):
            text, start = document + tokenizer.end_of_turn if document else "", 0
    # a corpus has no special token at a document's beginning, see corpus.py
    return MarkedText(text, ((start, len(text)),), learn_all)


def _encode(
    batch: Sequence[Sequence[MarkedText]], tokenizer: ModelTokenizer, context: int | None
) -> Iterator[TokenSample]:
    """Yields the samples of a batch as tokens.

    Its texts are tokenised in two calls: with and without special tokens.
    """
    encoded: dict[bool, Iterator[EncodedText]] = {}
    for spells_specials in (False, True):
        texts = [marked.text for sample in batch for marked in sample if marked.spells_specials == spells_specials]
        encoded[spells_specials] = iter(
            tokenizer.tokenizer.encode_with_offsets(texts, add_special=not spells_specials) if texts else ()
        )
    for sample in batch:
        yield tuple(_supervise(marked, next(encoded[marked.spells_specials]), context) for marked in sample)


def _supervise(marked: MarkedText, encoded: EncodedText, context: int | None) -> TokenSequence:
    """Returns the sequence, cut to the context, with the tokens supervised that overlap a supervised span.

    Tokens that the tokenizer adds at the end are dropped: the text already ends with its end of turn.
    """
    kept = np.flatnonzero(~encoded.is_added)
    length = int(kept[-1]) + 1 if len(kept) else 0
    cut = length if context is None else min(length, context)
    starts, ends = encoded.offsets[:cut, 0], encoded.offsets[:cut, 1]
    supervised = np.zeros(cut, np.bool_)
    for start, end in marked.spans:
        supervised |= (starts < end) & (ends > start)
    supervised &= ~encoded.is_added[:cut]
    supervised[:1] = False
    return TokenSequence(encoded.ids[:cut], supervised, encoded.offsets[:cut], marked.text, length - cut)
