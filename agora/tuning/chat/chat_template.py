"""Renders a conversation with the tokenizer's chat template, and finds in the text what the model has to learn.

| template | the supervised text |
|---|---|
| has {% generation %} blocks | the content of those blocks |
| has none | for each answer, what follows the generation prompt until the end of the answer's turn |
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from agora_protocol.errors import DataError, LocalError

from agora.tuning.chat.conversations import ChatMessage, Conversation

if TYPE_CHECKING:
    from jinja2 import Template

TUNING_EXTRA: Final = "install it with: pip install 'agora-swarm[tuning]'"
GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

CharRange = tuple[int, int]  # A range of characters in a text, not of stages: the first one, and the one after the last

# The template for tokenizers that have none: "User: ...", a newline, "Assistant: ..." and the end of turn.
PLAIN_TEMPLATE: Final = """\
{%- for message in messages -%}
{%- if message.role == 'tool' or message.tool_calls -%}
{{ raise_exception('the plain template has no form for tools') }}
{%- endif -%}
{{- '' if loop.first else '\n' -}}
{{- message.role | capitalize + ': ' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\nAssistant: ' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text and its supervised ranges of characters: ascending, not overlapping.

    has_special_tokens: True if the text already contains the special tokens it needs, such as <s>, so that the
    tokenizer must not add one at the beginning.
    """

    text: str
    ranges: tuple[CharRange, ...]
    has_special_tokens: bool


class ChatTemplate:
    """A Hugging Face chat template (source in jinja2) and the special tokens that it may write.

    The first `render` or `mark` compiles the source: it raises LocalError without jinja2, DataError for a malformed
    template.

    name: what errors call the template.
    special_tokens: variable such as eos_token -> the token's text.
    now: the time given to templates that write the date; peers that train together must give the same.
    has_generation_blocks: whether the source has {% generation %}.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str], now: datetime) -> None:
        self._source = source
        self._name = name
        self._special_tokens = special_tokens
        self._now = now
        self.has_generation_blocks = GENERATION.search(source) is not None

    @property
    def fingerprint(self) -> str:
        return json.dumps([self._source, sorted(self._special_tokens.items())])

    def render(self, conversation: Conversation, where: str) -> str:
        """Raises DataError, which names `where`, if the template refuses it."""
        return self._render(conversation, len(conversation.messages), where)

    def mark(self, conversation: Conversation, where: str) -> MarkedText:
        """Returns the conversation as text, with the range of characters of each supervised answer in it.

        With {% generation %} blocks, a range is what such a block wrote; otherwise it reaches from the end of the
        generation prompt to the end of the answer's turn. Raises DataError, which names `where`, if the template
        refuses the conversation, or if the answers' ranges cannot be determined.
        """
        if self.has_generation_blocks:
            return self._mark_by_blocks(conversation, where)
        text = self.render(conversation, where)
        learnt = [index for index in range(len(conversation.messages)) if conversation.is_supervised(index)]
        return MarkedText(text, tuple(self._answer_range(conversation, index, text, where) for index in learnt), True)

    def _mark_by_blocks(self, conversation: Conversation, where: str) -> MarkedText:
        variables = [*map(_as_template_dict, conversation.messages), *conversation.tools]
        content = json.dumps(variables, ensure_ascii=False, default=str)
        mark = next(mark for number in itertools.count() if (mark := f"\ufdd0{number}\ufdd1") not in content)
        parts = self._render(conversation, len(conversation.messages), where, mark).split(mark)
        ends = list(itertools.accumulate(map(len, parts)))
        blocks = list(zip(ends[0::2], ends[1::2], strict=False))  # every second part is the content of a block
        answers = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        learnt = [conversation.is_supervised(index) for index in answers]
        if not all(learnt):
            if len(blocks) != len(answers):
                raise DataError(
                    f"{where} excludes some answers from training, but {self._name} has {len(blocks)} generation "
                    f"blocks for {len(answers)} answers; use a template with one for each."
                )
            blocks = list(itertools.compress(blocks, learnt))
        return MarkedText("".join(parts), tuple(blocks), True)

    def _answer_range(self, conversation: Conversation, index: int, text: str, where: str) -> CharRange:
        text_before = self._render(conversation, index, where)
        through = self._render(conversation, index + 1, where)
        if not through.startswith(text_before):
            reason, other_remedy = "it asks for an answer in another way than it writes one", ""
        elif not text.startswith(through):
            reason = "it writes earlier messages in another way when later ones follow"
            other_remedy = ", or write a record for each answer, with lists of messages as prompt and completion"
        else:
            return len(text_before), len(through)
        raise DataError(
            f"{where}, message {index + 1}: {self._name} cannot be masked, because {reason}; put {{% generation %}} "
            f"blocks around the template's answers{other_remedy}."
        )

    def _render(self, conversation: Conversation, count: int, where: str, mark: str = "") -> str:
        template = self._compiled
        from agora.tuning.chat import chat_sandbox

        messages = conversation.messages
        asks = count < len(messages) and messages[count].role == "assistant"
        variables: dict[str, Any] = {**self._special_tokens, chat_sandbox.GENERATION_MARK: mark}
        try:
            return template.render(
                variables,
                messages=[_as_template_dict(message) for message in messages[:count]],
                tools=list(conversation.tools) or None,
                add_generation_prompt=asks,
            )
        except chat_sandbox.TEMPLATE_ERRORS as error:
            problem = f"{where}: {self._name} refuses it ({str(error)[:200]!r}); correct or remove the record."
            raise DataError(problem) from error

    @cached_property
    def _compiled(self) -> Template:
        try:
            from agora.tuning.chat import chat_sandbox
        except ImportError as error:
            raise LocalError(f"Chat templates need the package jinja2; {TUNING_EXTRA}") from error
        try:
            return chat_sandbox.compile_template(self._source, self._now)
        except chat_sandbox.TEMPLATE_ERRORS as error:
            problem = f"{self._name} is not a chat template ({str(error)[:200]!r}); correct it."
            raise DataError(problem) from error


def _as_template_dict(message: ChatMessage) -> dict[str, Any]:
    return {**message.extra, "role": message.role, "content": message.content}


def split_supervised(text: str, ranges: Sequence[CharRange]) -> Iterator[tuple[str, bool]]:
    """Cuts the whole text at the ends of `ranges`; yields (part, whether it is in a range) in order, no empty parts.

    ranges: the supervised ranges of characters, ascending, not overlapping.
    """
    position = 0
    for start, end in ranges:
        parts = (text[position:start], False), (text[start:end], True)
        yield from ((part, is_supervised) for part, is_supervised in parts if part)
        position = end
    if position < len(text):
        yield text[position:], False
