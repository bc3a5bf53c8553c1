"""Renders a conversation with the tokenizer's chat template, and finds in the text what the model has to learn.

| template | the supervised text |
|---|---|
| has {% generation %} blocks | the content of those blocks |
| has none | for each answer, what follows the generation prompt until the end of the answer's turn |
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError, LocalError

from agora.tuning.chat.conversations import ChatMessage, Conversation

TUNING_EXTRA: Final = "install it with: pip install 'agora-swarm[tuning]'"
GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

TOKEN_LIKE: Final = re.compile(r"<\|[\w-]{1,40}\|>|<(?:start|end)_of_turn>")
END_GENERATION: Final = re.compile(r"\{%[-+]?\s*endgeneration\s*[-+]?%\}")
TRAINING_TEMPLATES: Final = Path(__file__).with_name("templates")
PASSED_ON: Final = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
SANDBOX: Final = Path(__file__).with_name("chat_sandbox.py")
QUESTION, ANSWER = "Hello", "Good morning"
# A conversation to render, to see with which text a template ends an answer.
PROBE: Final = Conversation((ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)))

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


class TemplateProblem(DataError):
    """A chat template that no record of the file can be blamed for; --skip-bad does not skip it."""


class ChatTemplate:
    """A Hugging Face chat template (source in jinja2) and the special tokens that it may write.

    The first `render` or `mark` starts a process that renders (chat_sandbox.py): it raises LocalError without jinja2,
    TemplateProblem for a malformed template. An end of turn that an answer has at its end already is left out, because
    the template writes it.

    name: what errors call the template.
    special_tokens: variable such as eos_token -> the token's text.
    now: the time given to templates that write the date; peers that train together must give the same.
    missing: what to say instead of rendering, if there is no template to render with.
    has_generation_blocks: whether the source has {% generation %}.
    """

    def __init__(
        self, source: str, name: str, special_tokens: Mapping[str, str], now: datetime, missing: str | None = None
    ) -> None:
        self._source = source
        self._missing = missing
        self._renderer: _Renderer | None = None
        self._ends: tuple[str, ...] | None = None
        self._lock = threading.Lock()
        self.name = name
        self._special_tokens = special_tokens
        self._now = now
        self.has_generation_blocks = GENERATION.search(source) is not None

    def mentions(self, name: str) -> bool:
        """Returns whether the source has `name` as a word, or writes whole messages: then it may write that field."""
        words = rf"\b{re.escape(name)}\b|\bmessages?\s*\|\s*tojson"
        return self._missing is not None or re.search(words, self._source) is not None

    def tokens(self) -> list[str]:
        """Returns what the source spells like special tokens, such as <|im_start|>, each once."""
        return list(dict.fromkeys(TOKEN_LIKE.findall(self._source)))

    @property
    def fingerprint(self) -> str:
        return json.dumps([self._source, sorted(self._special_tokens.items())])

    def render(self, conversation: Conversation, where: str) -> str:
        """Returns the whole conversation as text. Raises DataError, which names `where`, if the template refuses it."""
        conversation = self._without_ends(conversation)
        return self._render(conversation, [len(conversation.messages)], where)[0]

    def mark(self, conversation: Conversation, where: str) -> MarkedText:
        """Returns the conversation as text, with the range of characters of each supervised answer in it.

        With {% generation %} blocks, a range is what such a block wrote; otherwise it reaches from the end of the
        generation prompt to the end of the answer's turn. Raises DataError, which names `where`, if the template
        refuses the conversation, or if the answers' ranges cannot be determined.
        """
        return self._mark(self._without_ends(conversation), where)

    def _mark(self, conversation: Conversation, where: str) -> MarkedText:
        if self.has_generation_blocks:
            return self._mark_by_blocks(conversation, where)
        learnt = [index for index in range(len(conversation.messages)) if conversation.is_supervised(index)]
        counts = sorted({len(conversation.messages), *learnt, *(index + 1 for index in learnt)})
        texts = dict(zip(counts, self._render(conversation, counts, where), strict=True))
        text = texts[len(conversation.messages)]
        return MarkedText(text, tuple(self._answer_range(index, texts, text, where) for index in learnt), True)

    def _mark_by_blocks(self, conversation: Conversation, where: str) -> MarkedText:
        variables = [*map(_as_template_dict, conversation.messages), *conversation.tools]
        content = json.dumps(variables, ensure_ascii=False, default=str)
        mark = next(mark for number in itertools.count() if (mark := f"\ufdd0{number}\ufdd1") not in content)
        parts = self._render(conversation, [len(conversation.messages)], where, mark)[0].split(mark)
        ends = list(itertools.accumulate(map(len, parts)))
        blocks = list(zip(ends[0::2], ends[1::2], strict=False))  # every second part is the content of a block
        answers = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        learnt = [conversation.is_supervised(index) for index in answers]
        if not all(learnt):
            if len(blocks) != len(answers):
                raise TemplateProblem(
                    f"{where} excludes some answers from training, but {self.name} has {len(blocks)} generation "
                    f"blocks for {len(answers)} answers; use a template with one for each."
                )
            blocks = list(itertools.compress(blocks, learnt))
        return MarkedText("".join(parts), tuple(blocks), True)

    def _answer_range(self, index: int, texts: Mapping[int, str], text: str, where: str) -> CharRange:
        text_before, through = texts[index], texts[index + 1]
        if not through.startswith(text_before):
            reason, other_remedy = "it asks for an answer in another way than it writes one", ""
        elif not text.startswith(through):
            reason = "it writes earlier messages in another way when later ones follow"
            other_remedy = ", or write a record for each answer, with lists of messages as prompt and completion"
        else:
            return len(text_before), len(through)
        raise TemplateProblem(
            f"{where}, message {index + 1}: {self.name} cannot be masked, because {reason}; give a template for "
            f"training with --chat-template ({', '.join(training_templates())}, or a file with {{% generation %}} "
            f"blocks around its answers){other_remedy}."
        )

    def _without_ends(self, conversation: Conversation) -> Conversation:
        # Some files have the end of a turn in their answers; the template would write it a second time.
        answers = [message for message in conversation.messages if message.role == "assistant"]
        if not any(message.content.rstrip().endswith((">", "]", "\0")) for message in answers):
            return conversation
        ends = self._turn_ends()
        return replace(conversation, messages=tuple(_without_end(message, ends) for message in conversation.messages))

    def _turn_ends(self) -> tuple[str, ...]:
        if self._ends is None:
            ends = {self._special_tokens.get("eos_token", "").strip()}
            try:
                marked = self._mark(PROBE, "an example conversation")
                ends |= {marked.text[start:end].partition(ANSWER)[2].strip() for start, end in marked.ranges[-1:]}
            except DataError:
                pass  # the template refuses such a conversation: how it ends an answer is not known
            self._ends = tuple(sorted(filter(None, ends), key=len, reverse=True))
        return self._ends

    def _render(self, conversation: Conversation, counts: Sequence[int], where: str, mark: str = "") -> list[str]:
        if self._missing is not None:
            raise TemplateProblem(self._missing)
        messages = conversation.messages
        asks = [count < len(messages) and messages[count].role == "assistant" for count in counts]
        try:
            request = json.dumps(
                {
                    "messages": [_as_template_dict(message) for message in messages],
                    "tools": list(conversation.tools),
                    "prefixes": list(zip(counts, asks, strict=True)),
                    "mark": mark,
                },
                default=str,
            )
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} has values that are nested too deeply; remove the record.") from error
        with self._lock:
            if self._renderer is None:
                self._renderer = _Renderer(self._source, self.name, self._special_tokens, self._now)
            try:
                return self._renderer.ask(request, where)
            except TemplateProblem:
                self._renderer = None  # its process has ended
                raise


# The process that renders with one template. A request that passes its limits ends it.
class _Renderer:
    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str], now: datetime) -> None:
        self._name = name
        if importlib.util.find_spec("jinja2") is None:
            raise LocalError(f"Chat templates need the package jinja2; {TUNING_EXTRA}")
        # With what finds the packages, and without the environment's secrets.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={key: os.environ[key] for key in PASSED_ON if key in os.environ},
        )
        self._end = weakref.finalize(self, _end_process, self._process)
        opening = {"source": source, "special": dict(special_tokens), "now": now.isoformat()}
        self.ask(json.dumps(opening), name)

    def ask(self, request: str, where: str) -> list[str]:
        """Returns the answer's texts. Raises DataError if the template refuses the record `where`, TemplateProblem."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process was started without pipes")
        with contextlib.suppress(BrokenPipeError):  # it may have said why it ended
            stdin.write(request + "\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise self._ended(where)
        found: dict[str, Any] = json.loads(answer)
        if "texts" in found:
            texts: list[str] = found["texts"]
            return texts
        reason = f"{found['error'][:200]!r}"
        if found["kind"] == "record":
            raise DataError(f"{where}: {self._name} refuses it ({reason}); correct or remove the record.")
        self._end()
        if where == self._name:
            raise TemplateProblem(f"{self._name} is not a chat template ({reason}); correct it.")
        raise TemplateProblem(f"{where}: {self._name} cannot be used: {found['error'][:200]}; use another template.")

    def _ended(self, where: str) -> TemplateProblem:
        self._end()
        if self._process.returncode == -signal.SIGPROF:
            reason = "takes longer than 20 s of a processor"
        else:
            reason = f"needs too much memory, or ended its process ({self._process.returncode})"
        return TemplateProblem(f"{where}: {self._name} {reason}; use another template, or remove the record.")


def _end_process(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(timeout=1)  # at the end of its input it ends by itself
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _without_end(message: ChatMessage, ends: Sequence[str]) -> ChatMessage:
    content = message.content.rstrip()
    end = next((end for end in ends if content.endswith(end)), None)
    return message if end is None or message.role != "assistant" else replace(message, content=content[: -len(end)])


def _as_template_dict(message: ChatMessage) -> dict[str, Any]:
    return {**message.extra, "role": message.role, "content": message.content}


def training_templates() -> list[str]:
    """Returns the names of the chat templates for training that come with this package."""
    return sorted(path.stem for path in TRAINING_TEMPLATES.glob("*.jinja"))


def without_generation_blocks(source: str) -> str:
    """Returns a template that renders the same text without {% generation %}, which not every program knows."""
    without_ends = END_GENERATION.sub(lambda tag: tag[0].replace("endgeneration", "endif"), source)
    return GENERATION.sub(lambda tag: tag[0].replace("generation", "if true"), without_ends)


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
