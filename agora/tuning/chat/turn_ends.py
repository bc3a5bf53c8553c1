"""Finds the tokens with which a model that was trained on samples ends its turn, so that generation can stop there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agora_protocol.errors import DataError

from agora.data.tokenizer import JsonTokenizer
from agora.tuning.chat.conversations import ChatMessage, Conversation
from agora.tuning.chat.model_tokenizer import ModelTokenizer

QUESTION, ANSWER = "Hello", "Good morning"
# A conversation to render, to see with which text a template ends an answer.
PROBE: Final = Conversation((ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)))


def turn_end_ids(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Returns the token ids at which generation can stop: those that end an answer in training, each once.

    The id that ends an answer in conversations comes first, then the one of completions. An end that neither begins
    with an added token nor is a single token is left out, because no one id stands for it; () without any.
    """
    found = (stop_token_id(tokenizer, text) for text in _turn_ends(tokenizer))
    return tuple(dict.fromkeys(number for number in found if number is not None))


def stop_token_id(tokenizer: ModelTokenizer, text: str) -> int | None:
    """Returns the first token id of `text` if generation can stop at it; None if not, and for an empty text.

    It can if that is an added token (such as <|im_end|>) or the only token of the text.
    """
    ids = [int(number) for number in tokenizer.tokenizer.encode([text])[0]] if text else []
    if not ids:
        return None
    added = tokenizer.tokenizer.added_ids if isinstance(tokenizer.tokenizer, JsonTokenizer) else frozenset()
    return ids[0] if ids[0] in added or len(ids) == 1 else None


def _turn_ends(tokenizer: ModelTokenizer) -> Iterator[str]:
    try:
        marked = tokenizer.template.mark(PROBE, "an example conversation")
        for start, end in marked.ranges[-1:]:
            yield marked.text[start:end].partition(ANSWER)[2]
    except DataError:
        pass  # the template refuses such a conversation: how it ends an answer is not known
    yield tokenizer.end_of_turn
