"""The tokenizer of a Hugging Face model folder with its chat template: opened for training, hashed, and exported.

Nothing in the folder is executed, except the chat template in its sandbox.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError, DiskError, ManifestError

from agora.core.hub_files import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from agora.core.user_paths import expand_home
from agora.data.data_file import HEAD, refuse_other_content
from agora.data.json_values import json_type
from agora.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    tokenizer_files,
    tokenizer_path,
)
from agora.tuning.chat.chat_template import (
    ANSWER,
    PLAIN_TEMPLATE,
    PROBE,
    TRAINING_TEMPLATES,
    ChatTemplate,
    training_templates,
    without_generation_blocks,
)

MORE_TEMPLATES: Final = "additional_chat_templates"  # a folder of named ones
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"  # of models that also see pictures
DEFAULT: Final = "default"  # the name of the template for conversations
CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions")
BYTES_END: Final = "\0"  # ends a turn for the byte tokenizer
NO_END: Final = "\n"  # ends a turn for a tokenizer without a token for that
# Pairs of texts that some tokenizers give the same ids, and what they do not tell apart then.
LIKE_TEXTS: Final = (
    ("capital letters and small ones", "Ab", "ab"),
    ("letters with accents and without", "\u00e9", "e"),
    ("a line break and a space", "a\nb", "a b"),
    ("one space and several", "a  b", "a b"),
    ("a space at the end and none", "a ", "a"),
)
# The date for templates that write it in training: all peers must render the same text, whenever they start. It is the
# date that Llama 3's own template writes if it is given no clock.
TRAINING_DATE: Final = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer with its chat template.

    end_of_turn: the text of the token that ends a completion or a document. name, template_name: what to call the
    tokenizer and the template in messages to a person. longest_context: the model's maximum context in tokens; None
    if the folder does not state it. remarks: what a person should know of the folder's files before they train.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    name: str
    template_name: str
    end_of_turn: str
    longest_context: int | None
    remarks: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        parts = ["agora tokenizer 1", self.tokenizer.fingerprint, self.template.fingerprint, self.end_of_turn]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def require_hash(self, expected: str) -> None:
        """Raises DataError unless `fingerprint` is `expected`; "" accepts any."""
        if expected and self.fingerprint != expected:
            raise DataError(
                f"The tokenizer of {self.name}, with {self.template_name}, has the SHA-256 {self.fingerprint}, but the "
                f"run was made with {expected} ([data] tokenizer_hash); copy tokenizer.json, tokenizer_config.json and "
                "chat_template.jinja from a peer that trains, or found a new run with yours."
            )


def open_training_tokenizer(
    source: str, vocabulary: int, base: Path | None = None, *, template: str = ""
) -> ModelTokenizer:
    """Opens the tokenizer that a manifest names, with its folder's chat template and TRAINING_DATE as the time.

    source: "bytes", or the path of a tokenizer.json or of its folder, relative to `base`. vocabulary: the model's
    number of ids; fewer than the tokenizer's are a ManifestError. template: [data] chat_template. Other errors:
    DiskError for an unreadable file, DataError or ManifestError for a malformed one, LocalError without the package
    tokenizers.
    """
    path = tokenizer_path(source, base)
    if path is not None and path.name != TOKENIZER_FILE:
        raise ManifestError(
            f"[data] tokenizer {source!r} is not a {TOKENIZER_FILE}, beside which the chat template would be looked "
            f"for; put the file into a folder of its own, as {TOKENIZER_FILE}."
        )
    folder = path.parent if path is not None else None
    tokenizer = open_model_tokenizer(folder, TRAINING_DATE, template, vocabulary)
    if tokenizer.tokenizer.vocabulary > vocabulary:
        raise ManifestError(
            f"Tokenizer {source!r} has token id {tokenizer.tokenizer.vocabulary - 1} but [model] vocabulary is "
            f"{vocabulary}; use the tokenizer of the base model."
        )
    return tokenizer


def open_model_tokenizer(
    folder: Path | None, now: datetime, template: str = "", vocabulary: int | None = None
) -> ModelTokenizer:
    """Opens the tokenizer of a model folder with its chat template; for None the byte tokenizer (byte 0 ends a turn).

    A folder without a chat template, and the byte tokenizer, get PLAIN_TEMPLATE; one with several templates of which
    none is the default gets one that raises TemplateProblem. template: source of another one. A turn ends with the
    eos_token of tokenizer_config.json or special_tokens_map.json, otherwise the tokenizer's end_of_text, otherwise a
    newline. now: the time for templates that write the date. vocabulary: how many ids the model has rows for, by
    default what config.json says. Raises DiskError for a missing tokenizer.json or an unreadable file, DataError or
    ManifestError for a malformed one, LocalError without the package tokenizers.
    """
    if folder is None:
        end = {"eos_token": BYTES_END}
        chosen = _choose_template(template, None, BYTES, end, now)
        return ModelTokenizer(ByteTokenizer(), chosen, BYTES, chosen.name, BYTES_END, None)
    if not (folder / TOKENIZER_FILE).is_file():
        raise DiskError(
            f"{folder} has no {TOKENIZER_FILE}; give the folder of a Hugging Face model, with the tokenizer as "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it."
        )
    model = _read_object(folder / CONFIG_FILE)
    rows = model.get("vocab_size") if vocabulary is None else vocabulary
    tokenizer = JsonTokenizer(folder / TOKENIZER_FILE, rows if type(rows) is int else None)
    special = _special_tokens(
        {**_read_object(folder / SPECIAL_TOKENS_FILE), **_read_object(folder / TOKENIZER_CONFIG_FILE)}
    )
    remarks = _token_remarks(folder, tokenizer, special)
    special.setdefault("eos_token", tokenizer.end_of_text or NO_END)
    longest = next((value for key in CONTEXT_KEYS if isinstance(value := model.get(key), int)), None)
    chosen = _choose_template(template, folder, str(folder), special, now)
    unknown = [repr(token) for token in chosen.tokens() if not tokenizer.has_token(token)]
    if unknown:
        remarks.append(
            f"{chosen.name} writes {', '.join(unknown)}, no token of tokenizer.json: it is learnt as ordinary text"
        )
    if not template:
        remarks += _template_remarks(folder)
    return ModelTokenizer(tokenizer, chosen, str(folder), chosen.name, special["eos_token"], longest, tuple(remarks))


def _token_remarks(folder: Path, tokenizer: JsonTokenizer, special: Mapping[str, str]) -> list[str]:
    remarks = []
    ids = tokenizer.encode([text for _, *pair in LIKE_TEXTS for text in pair])
    alike = [
        what
        for (what, *_), one, other in zip(LIKE_TEXTS, ids[::2], ids[1::2], strict=True)
        if one.tolist() == other.tolist()
    ]
    if alike:
        remarks.append(
            f"{TOKENIZER_FILE} has the same tokens for {'; '.join(alike)}: the model never learns the difference"
        )
    end = special.get("eos_token")
    if end is not None and not tokenizer.has_token(end):
        remarks.append(
            f"the eos_token {end!r} of {TOKENIZER_CONFIG_FILE} is no token of {TOKENIZER_FILE}: it is learnt "
            "as ordinary text"
        )
    added = _read_object(folder / TOKENIZER_CONFIG_FILE).get("added_tokens_decoder")
    entries = added.values() if isinstance(added, Mapping) else ()
    names = [entry.get("content") for entry in entries if isinstance(entry, Mapping)]
    if missing := [name for name in names if isinstance(name, str) and not tokenizer.has_token(name)]:
        remarks.append(
            f"{TOKENIZER_CONFIG_FILE} adds {', '.join(map(repr, missing[:5]))}, which {TOKENIZER_FILE} lacks and no "
            "run has; to have them, write the tokenizer again with save_pretrained of transformers"
        )
    return remarks


def _template_remarks(folder: Path) -> list[str]:
    templates = _folder_templates(folder)
    others = [repr(name) for name in templates if name != DEFAULT]
    remarks = []
    if DEFAULT in templates and others:
        remarks.append(f"its other templates are not used: {', '.join(others)}; choose one with --chat-template")
    settings = _read_object(folder / TOKENIZER_CONFIG_FILE).get("chat_template")
    if (folder / CHAT_TEMPLATE_FILE).is_file() and settings not in (None, templates[DEFAULT]):
        remarks.append(
            f"the template is that of {CHAT_TEMPLATE_FILE}; the other one, in {TOKENIZER_CONFIG_FILE}, is not used"
        )
    return remarks


def _choose_template(
    chosen: str, folder: Path | None, name: str, special: Mapping[str, str], now: datetime
) -> ChatTemplate:
    if chosen:
        return ChatTemplate(chosen, "the chosen chat template", special, now)
    templates = {} if folder is None else _folder_templates(folder)
    if DEFAULT in templates:
        return ChatTemplate(templates[DEFAULT], f"the chat template of {name}", special, now)
    if templates:
        names = ", ".join(map(repr, templates))
        missing = (
            f"{name} has several chat templates ({names}), and none is the default; choose one by its name with "
            "--chat-template."
        )
        return ChatTemplate(PLAIN_TEMPLATE, f"no template: {name} has only {names}", special, now, missing)
    return ChatTemplate(PLAIN_TEMPLATE, "the plain template", special, now)


def read_chat_template(chosen: str, folder: Path | None) -> str:
    """Returns the source of the template that --chat-template names.

    chosen: the name of a template for training, or of one of several templates in the model's folder, or a file.
    Raises DataError for a name that nothing has, and a file that is not text; DiskError if it cannot be read.
    """
    if chosen in training_templates():
        return _read_text_file(TRAINING_TEMPLATES / f"{chosen}.jinja")
    own = {} if folder is None else _folder_templates(folder)
    if chosen in own:
        return own[chosen]
    path = expand_home(chosen)
    if not path.is_file():
        names = ", ".join([*training_templates(), *own])
        raise DataError(f"--chat-template {chosen} is neither a file nor the name of a template; known are {names}.")
    return _read_text_file(path)


def _folder_templates(folder: Path) -> dict[str, str]:
    # By name, as transformers looks for them; with one name, it is DEFAULT.
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        found: Any = {DEFAULT: _read_text_file(folder / CHAT_TEMPLATE_FILE)}
    else:
        found = _read_object(folder / TOKENIZER_CONFIG_FILE).get("chat_template")
        if found is None:
            found = _read_object(folder / PROCESSOR_TEMPLATE_FILE).get("chat_template")
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, Mapping)}
    templates = found if isinstance(found, Mapping) else {} if found is None else {DEFAULT: found}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    templates = {**{path.stem: _read_text_file(path) for path in more}, **templates}
    if not all(isinstance(text, str) for name_and_text in templates.items() for text in name_and_text):
        raise DataError(f"The chat_template in {folder / TOKENIZER_CONFIG_FILE} is not text; correct it.")
    return templates


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    for name in ("bos_token", "eos_token"):
        if not isinstance(texts.get(name), str | bool | None):
            raise DataError(
                f"{name} in {TOKENIZER_CONFIG_FILE} or {SPECIAL_TOKENS_FILE} is {json_type(texts[name])}, "
                "not the text of a token; correct it."
            )
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text_file(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({str(error)[:200]!r}); fetch or write it again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object; fetch or write it again.")
    return value


def _read_text_file(path: Path) -> str:
    try:
        content = path.read_bytes()
        refuse_other_content(content[:HEAD], path)
        return content.decode()
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror or error}); correct its permissions.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; fetch or write it again.") from error


# --- the files of an export


# Files that belong to a model folder's tokenizer.json and are copied with it; any of them may be missing.
COPIED: Final = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE)


def pretrained_tokenizer_files(
    source: str,
    vocabulary: int,
    context: int,
    base: Path | None = None,
    *,
    learns_samples: bool,
    expected_hash: str = "",
    template: str = "",
) -> dict[str, bytes]:
    """Returns the tokenizer files that an export of a fine-tuned model needs: file name -> content. Writes nothing.

    If `source` is a tokenizer.json, the tokenizer's files in its folder are returned unchanged; what is missing there,
    and the files of any other source, tokenizer_files makes. Raises ManifestError for a tokenizer file that is
    malformed or has more ids than `vocabulary`, DiskError for a file that cannot be read, DataError for another
    malformed file or a tokenizer of another hash, LocalError without the package tokenizers.

    source: as in [data] tokenizer.
    vocabulary, context, base: see tokenizer_files.
    learns_samples: whether the run learns from samples; then "bytes", and a folder without a chat template, get the
    plain template, with which conversations were rendered.
    expected_hash: [data] tokenizer_hash; "": not checked.
    template: [data] chat_template, which is then the model's, without its generation blocks.
    """
    files, _ = tokenizer_files(source, vocabulary, context, base)
    if expected_hash:
        open_training_tokenizer(source, vocabulary, base, template=template).require_hash(expected_hash)
    path = tokenizer_path(source, base)
    folder = path.parent if path is not None and path.name == TOKENIZER_FILE else None
    if folder is not None:
        files |= {name: _read_content(folder / name) for name in COPIED if (folder / name).is_file()}
    if learns_samples and template:
        end_of_turn = open_model_tokenizer(folder, datetime.now()).end_of_turn
        usable = without_generation_blocks(template)
        files[CHAT_TEMPLATE_FILE] = (usable if folder is not None else _with_end_token(end_of_turn, usable)).encode()
    elif learns_samples and (folder is not None or source == BYTES) and not _has_template(files):
        end_of_turn = open_model_tokenizer(folder, datetime.now()).end_of_turn
        files[CHAT_TEMPLATE_FILE] = plain_template(end_of_turn).encode()
    return files


def plain_template(end_of_turn: str) -> str:
    """Returns the jinja2 source of PLAIN_TEMPLATE, with `end_of_turn` set as the text after each answer."""
    return _with_end_token(end_of_turn, PLAIN_TEMPLATE)


def _with_end_token(end_of_turn: str, source: str) -> str:
    return f"{{%- set eos_token = {json.dumps(end_of_turn, ensure_ascii=False)} -%}}\n{source}"


def _has_template(files: dict[str, bytes]) -> bool:
    settings: dict[str, Any] = json.loads(files[TOKENIZER_CONFIG_FILE])
    return CHAT_TEMPLATE_FILE in files or bool(settings.get("chat_template"))


def _read_content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        refuse_other_content(content[:HEAD], path)
        is_right = bool(content.decode()) if path.name == CHAT_TEMPLATE_FILE else isinstance(json.loads(content), dict)
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror or error}); correct its permissions.") from error
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        kind = "text" if path.name == CHAT_TEMPLATE_FILE else "a JSON object"
        raise DataError(f"{path} is not {kind}; fetch or write it again.")
    return content


# --- where generation stops


def turn_end_ids(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Returns the token ids at which generation can stop: those that end an answer in training, each once.

    The id that ends an answer in conversations comes first, then the one of completions. An end that neither begins
    with an added token nor is a single token is left out, because no one id stands for it; () without any.
    """
    found = (stop_token_id(tokenizer, text) for text in _turn_ends(tokenizer))
    return tuple(dict.fromkeys(number for number in found if number is not None))


def stop_token_id(tokenizer: ModelTokenizer, text: str) -> int | None:
    """The first token id of `text` if that is an added token (such as <|im_end|>) or the only one; else None."""
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
