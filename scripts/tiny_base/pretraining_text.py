"""The text that the tiny model is pretrained on: source files, and some conversations made of their paragraphs.

The conversations teach what follows the tokens of a turn, and nothing about the questions in the example data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from tiny_base.stdlib_docs import SourceText
from tiny_base.turn_tokenizer import END_OF_TEXT, render_turns

FILES_PER_CONVERSATION: Final = 4
MAX_EXCHANGES: Final = 16
PARAGRAPH_CHARACTERS: Final = range(20, 401)
BLANK_LINES: Final = re.compile(r"\n\s*\n")


def documents(sources: Sequence[SourceText]) -> Iterator[str]:
    """Yields each source file, and a conversation after FILES_PER_CONVERSATION of them; each ends with END_OF_TEXT."""
    for number, source in enumerate(sources, 1):
        yield source.text + END_OF_TEXT
        if number % FILES_PER_CONVERSATION == 0 and (turns := conversation(source.text)):
            yield turns + END_OF_TEXT


def conversation(text: str) -> str:
    """Returns up to MAX_EXCHANGES exchanges, in each of which a paragraph of the text is answered by the next one."""
    fitting = [part.strip() for part in BLANK_LINES.split(text) if len(part.strip()) in PARAGRAPH_CHARACTERS]
    exchanges = zip(fitting[0::2], fitting[1::2], strict=False)
    return "".join(render_turns(*pair) for pair, _ in zip(exchanges, range(MAX_EXCHANGES), strict=False))
