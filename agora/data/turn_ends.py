"""Finds the tokens by which a model that learns samples ends its turn, so that generation can stop at them.

Knows: chat templates, tokenizers. Must not know: models, files of an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agora_protocol.errors import DataError

from agora.data.conversations import ChatMessage, Conversation
from agora.data.model_tokenizer import ModelTokenizer
from agora.data.tokenizer import JsonTokenizer

QUESTION, ANSWER = "Hello", "Good morning"
PROBE: Final = Conversation((ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)))
"""A conversation to see by what a template ends an answer."""


def turn_end_ids(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Returns the ids that end an answer, as training renders it: of conversations first, then of completions.

    Only single tokens are told, because only those can stop a generation; () where turns end by none.
    """
    found = (first_end_id(tokenizer, text) for text in _turn_ends(tokenizer))
    return tuple(dict.fromkeys(number for number in found if number is not None))


def first_end_id(tokenizer: ModelTokenizer, text: str) -> int | None:
    """Returns the id that `text` begins with, if it is a token of its own, added to the vocabulary, or all of it."""
    ids = [int(number) for number in tokenizer.tokenizer.encode([text])[0]] if text else []
    if not ids:
        return None
    added = tokenizer.tokenizer.added_ids if isinstance(tokenizer.tokenizer, JsonTokenizer) else frozenset()
    return ids[0] if ids[0] in added or len(ids) == 1 else None


def _turn_ends(tokenizer: ModelTokenizer) -> Iterator[str]:
    """Yields the texts that training supervises after an answer in a conversation, and after a completion."""
    try:
        marked = tokenizer.template.mark(PROBE, "an example conversation")
        for start, end in marked.spans[-1:]:
            yield marked.text[start:end].partition(ANSWER)[2]
    except DataError:
        pass  # the template refuses such a conversation; what it is trained on is not known here
    yield tokenizer.end_of_turn
