"""What a sample is before it becomes text: plain text, a completion, a conversation, a preference.

| after | may follow |
|---|---|
| the beginning | system, user |
| system | user |
| user | assistant |
| assistant | user, tool |
| tool | tool, assistant |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from agora_protocol.errors import DataError

from agora.data.record_files import check_text, json_type

Role = Literal["system", "user", "assistant", "tool"]

# Spelling of a role in a record -> the role that it stands for.
ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "ipython": "tool",
}

# The roles that may follow a role; None: the beginning.
FOLLOWERS: Final[Mapping[Role | None, tuple[Role, ...]]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}

ROLE_KEYS: Final = ("role", "from")
CONTENT_KEYS: Final = ("content", "value")
TRAIN_KEYS: Final = ("train", "weight")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """is_trainable: False for "train": false or "weight": 0. extra: other fields, which only templates read."""

    role: Role
    content: str
    is_trainable: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document; all of it is supervised."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion, both taken literally, without a template. Only the completion is supervised."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template renders; the trainable answers after the first `prompt_messages` are supervised.

    tools: descriptions (JSON schemas) of the functions that the assistant may call, for the template.
    """

    messages: tuple[ChatMessage, ...]
    prompt_messages: int = 0
    tools: tuple[Any, ...] = ()

    def is_supervised(self, index: int) -> bool:
        """Returns whether the model is trained on message `index`: a trainable answer after the prompt messages."""
        message = self.messages[index]
        return index >= self.prompt_messages and message.role == "assistant" and message.is_trainable


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, the preferred and the rejected one. Both sides include the prompt."""

    chosen: Completion | Conversation
    rejected: Completion | Conversation


Sample = PlainText | Completion | Conversation | Preference


def read_messages(value: object, where: str) -> tuple[ChatMessage, ...]:
    """Of {role, content} or {from, value}; their order is not checked. Raises DataError, which names `where`."""
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise DataError(f'{where} is {json_type(value)}; write a list such as [{{"role": "user", "content": "..."}}].')
    return tuple(_read_message(item, f"{where}, message {number},") for number, item in enumerate(items, 1))


def check_order(messages: Sequence[ChatMessage], where: str) -> None:
    """Raises DataError, which names `where`, unless the roles follow FOLLOWERS and end with an answer."""
    previous: Role | None = None
    for number, message in enumerate(messages, 1):
        if message.role not in FOLLOWERS[previous]:
            after = f"after {previous!r}" if previous else "at the beginning"
            expected = _join_quoted(FOLLOWERS[previous])
            raise DataError(
                f"{where}, message {number}, has role {message.role!r} {after}, where {expected} is expected: a system "
                "message may come first, then user and assistant take turns; correct or remove it."
            )
        previous = message.role
    if previous != "assistant":
        last = f"ends with role {previous!r}" if previous else "has no message"
        raise DataError(f"{where} {last}, but the last must be the assistant's; add its answer or remove the record.")


def read_tools(value: object, where: str) -> tuple[Any, ...]:
    """A list of JSON schemas or its JSON text; nulls are removed, items not checked. Raises DataError, which names
    `where`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON; write a list of JSON schemas.") from error
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where} is {json_type(value)}; write a list of JSON schemas.")
    return tuple(without_nulls(item) for item in value)


def without_nulls(value: Any) -> Any:
    """Parquet files have null fields: there every object has the fields of all others. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _read_message(item: object, where: str) -> ChatMessage:
    if not isinstance(item, Mapping):
        raise DataError(f'{where} is {json_type(item)}; write an object such as {{"role": "user", "content": "..."}}.')
    fields = without_nulls(item)
    role_key, content_key = (
        next((key for key in keys if key in fields), keys[0]) for keys in (ROLE_KEYS, CONTENT_KEYS)
    )
    spelling = fields.get(role_key)
    if not isinstance(spelling, str) or spelling.strip().lower() not in ROLES:
        problem = f"has the unknown role {spelling!r:.80}" if role_key in fields else "has no field 'role' or 'from'"
        raise DataError(f"{where} {problem}; known are {_join_quoted(ROLES)}.")
    role = ROLES[spelling.strip().lower()]
    if content_key in fields:
        content = _read_message_text(fields[content_key], where)
    elif role == "assistant" and fields.get("tool_calls"):
        content = ""
    else:
        raise DataError(f"{where} has no field 'content' or 'value'; add its text or remove the record.")
    is_trainable = all(fields.get(key, True) not in (False, 0) for key in TRAIN_KEYS)
    read = {role_key, content_key, *TRAIN_KEYS}
    return ChatMessage(role, content, is_trainable, {key: value for key, value in fields.items() if key not in read})


def _read_message_text(value: object, where: str) -> str:
    if not isinstance(value, list):
        return check_text(value, f"{where} content")
    texts: list[str] = []
    for part in value:
        fields = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {}
        if fields.get("type") != "text":
            kind = f"{fields.get('type')!r:.80}"
            raise DataError(f"{where} holds a part of type {kind}, but only text can be learnt; remove the record.")
        texts.append(check_text(fields.get("text"), f"{where} content"))
    return "".join(texts)


def _join_quoted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return " or ".join(", ".join(map(repr, names)).rsplit(", ", 1))
