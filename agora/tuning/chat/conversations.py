"""What a sample is before it becomes text: plain text, a completion, a conversation, a preference.

| after | may follow |
|---|---|
| the beginning | system, user |
| system | user |
| user | assistant |
| assistant | user, tool |
| tool | tool, assistant |

With `any_order` these rules do not hold.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from agora_protocol.errors import DataError

from agora.data.json_values import KeyTwice, json_type, parse_json
from agora.data.record_files import check_text

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
# Fields of a message that say whether it is learnt, in lower case: of axolotl, of OpenAI's and Mistral's files, of
# ms-swift, and what people call them elsewhere.
TRAIN_KEYS: Final = (
    *("train", "weight", "training", "loss"),
    *("loss_weight", "loss_scale", "loss_mask", "trainable", "train_on_turn"),
)
# Those of them that only answers may have.
ANSWER_TRAIN_KEYS: Final = ("train", "training", "trainable", "train_on_turn")
# Fields that say it of parts of a message.
PART_TRAIN_KEYS: Final = ("train_detail", "training_detail")
YES: Final = ("true", "yes", "1")
NO: Final = ("false", "no", "0")
GOOD: Final = ("good", "desirable", "chosen", "accepted")
BAD: Final = ("bad", "undesirable", "rejected")


@dataclass(frozen=True, slots=True)
class MessageRules:
    """How a run reads messages. roles: spelling in the file -> role, in addition to ROLES.

    role_key, content_key: the fields of a message that hold its role and text; None: ROLE_KEYS, CONTENT_KEYS.
    any_order: whether roles may follow each other as they like; FOLLOWERS then does not hold.
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    role_key: str | None = None
    content_key: str | None = None
    any_order: bool = False


USUAL_RULES: Final = MessageRules()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. is_trainable: False if one of its TRAIN_KEYS excludes it from training.

    extra: the message's other fields, which only templates read, such as tool_calls.
    """

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


def has_empty_answer(sample: Sample) -> bool:
    """Returns whether something that would be learnt is blank: a text, a completion, an answer that calls no tool."""
    match sample:
        case PlainText(text):
            return not text.strip()
        case Completion(completion=completion):
            return not completion.strip()
        case Preference(chosen, rejected):
            return has_empty_answer(chosen) or has_empty_answer(rejected)
        case Conversation(messages):
            learnt = (message for index, message in enumerate(messages) if sample.is_supervised(index))
            return any(not message.content.strip() and not message.extra for message in learnt)


def parse_json_text(value: object, where: str) -> object:
    """Returns the list or object that a text such as a csv field spells in JSON; everything else as it is.

    Raises DataError, which names `where`, for an object with a key twice.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except KeyTwice as error:
            raise DataError(f"{where} {error}") from None
        except (ValueError, RecursionError):
            return value
    return value


def parse_message_text(value: object, where: str, rules: MessageRules = USUAL_RULES) -> object:
    """Returns the messages, or the one message, that a text spells in JSON; everything else, also other JSON, as it
    is. Raises DataError, which names `where`, for a message with a key twice.
    """
    try:
        parsed = parse_json_text(value, where)
    except DataError:
        # Another text may be an answer in JSON, or code that looks like it, and is learnt as it is.
        with contextlib.suppress(ValueError, RecursionError):
            if _is_chat(json.loads(str(value)), rules):
                raise
        return value
    return parsed if _is_chat(parsed, rules) else value


def _is_chat(parsed: object, rules: MessageRules) -> bool:
    items = parsed if isinstance(parsed, list) else [parsed]
    roles = (rules.role_key,) if rules.role_key else ROLE_KEYS
    return bool(items) and all(isinstance(item, Mapping) and any(key in item for key in roles) for item in items)


def read_messages(value: object, where: str, rules: MessageRules = USUAL_RULES) -> tuple[ChatMessage, ...]:
    """Returns the messages of a list of {role, content} or {from, value}, or of one such object; () for an empty list.

    value: or the JSON text of such a list. Their order is not checked. Raises DataError, which names `where` and the
    message's number, for malformed ones.
    """
    value = parse_json_text(value, where)
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise DataError(f'{where} is {json_type(value)}; write a list such as [{{"role": "user", "content": "..."}}].')
    return tuple(_read_message(item, f"{where}, message {number},", rules) for number, item in enumerate(items, 1))


def check_order(messages: Sequence[ChatMessage], where: str, rules: MessageRules = USUAL_RULES) -> None:
    """Raises DataError, which names `where`, unless the roles follow FOLLOWERS and end with an answer.

    In any order, unless there is an answer.
    """
    if rules.any_order:
        if not any(message.role == "assistant" for message in messages):
            raise DataError(f"{where} has no message of the assistant; add its answer or remove the record.")
        return
    previous: Role | None = None
    for number, message in enumerate(messages, 1):
        if message.role not in FOLLOWERS[previous]:
            after = f"after {previous!r}" if previous else "at the beginning"
            expected = _join_quoted(FOLLOWERS[previous])
            raise DataError(
                f"{where}, message {number}, has role {message.role!r} {after}, where {expected} is expected: a system "
                "message may come first, then user and assistant take turns; correct or remove it, or give "
                "--role-order any."
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
            value = parse_json(value) if value.strip() else []
        except KeyTwice as error:
            raise DataError(f"{where} {error}") from None
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


def _read_message(item: object, where: str, rules: MessageRules) -> ChatMessage:
    if not isinstance(item, Mapping):
        raise DataError(f'{where} is {json_type(item)}; write an object such as {{"role": "user", "content": "..."}}.')
    fields = without_nulls(item)
    role_key, content_key = (
        own or next((key for key in keys if key in fields), keys[0])
        for own, keys in ((rules.role_key, ROLE_KEYS), (rules.content_key, CONTENT_KEYS))
    )
    role = _read_role(fields, role_key, where, rules)
    if content_key in fields:
        content = _read_message_text(fields[content_key], where)
    elif role == "assistant" and fields.get("tool_calls"):
        content = ""
    else:
        names = _join_quoted([rules.content_key] if rules.content_key else CONTENT_KEYS)
        raise DataError(
            f"{where} has no field {names}; add its text or remove the record, or name the field with --columns "
            "content=NAME."
        )
    is_trainable = _read_is_trainable(fields, role, where)
    read = {role_key, content_key, *(key for key in fields if key.lower() in TRAIN_KEYS)}
    return ChatMessage(role, content, is_trainable, {key: value for key, value in fields.items() if key not in read})


def _read_role(fields: Mapping[str, Any], key: str, where: str, rules: MessageRules) -> Role:
    if key not in fields:
        names = _join_quoted([rules.role_key] if rules.role_key else ROLE_KEYS)
        raise DataError(f"{where} has no field {names}; name the field that holds the role with --columns role=NAME.")
    spelling = fields[key]
    word = spelling.strip().lower() if isinstance(spelling, str) else ""
    role = rules.roles.get(word) or ROLES.get(word)
    if role is None:
        raise DataError(
            f"{where} has the unknown role {spelling!r:.80}; known are {_join_quoted(ROLES)}; map it, for example with "
            f"--roles {word if word.isidentifier() else 'NAME'}=user."
        )
    return role


def read_yes_or_no(value: object) -> bool | None:
    """Returns what true, 1, 1.0, "true", "yes", "1" or "1.0" and their opposites mean; None for everything else."""
    if isinstance(value, str):
        word = value.strip().lower()
        with contextlib.suppress(ValueError):
            value = float(word)
        if word in YES or word in NO:
            return word in YES
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def read_label(value: object) -> bool | None:
    """Returns whether a label calls an answer good: as read_yes_or_no, by words of GOOD and BAD, and -1 for bad."""
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in GOOD or word in BAD:
        return word in GOOD
    return False if value in (-1, "-1") else read_yes_or_no(value)


def _read_is_trainable(fields: Mapping[str, Any], role: Role, where: str) -> bool:
    for key in PART_TRAIN_KEYS:
        if key in fields:
            raise DataError(f"{where} has {key!r}, but a message is learnt whole or not at all; remove that field.")
    is_trainable = True
    for key in fields:
        if key.lower() not in TRAIN_KEYS:
            continue
        said = read_yes_or_no(fields[key])
        if said is None:
            raise DataError(
                f"{where} has {key!r} {fields[key]!r:.40}, but a message is learnt whole or not at all; write 1 or "
                "true, or 0 or false."
            )
        if said and key.lower() in ANSWER_TRAIN_KEYS and role != "assistant":
            raise DataError(
                f"{where} has {key!r} {fields[key]!r:.40}, but only answers of the assistant are learnt; remove that "
                "field."
            )
        is_trainable &= said
    return is_trainable


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
