"""Returns the tokenizer's files of an export: those of the base model's folder with its chat template, or new ones.

Knows: the names of those files, the plain chat template. Must not know: weights, samples, where an export is written.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError, DiskError

from agora.data.chat_template import PLAIN_TEMPLATE
from agora.data.data_hashes import check_tokenizer
from agora.data.model_tokenizer import (
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    open_model_tokenizer,
    open_training_tokenizer,
)
from agora.data.tokenizer import BYTES, TOKENIZER_FILE, tokenizer_files, tokenizer_path

COPIED: Final = (SETTINGS_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)
"""Files that belong to a model folder's tokenizer.json and are copied with it; any of them may be missing."""


def pretrained_tokenizer_files(
    source: str,
    vocabulary: int,
    context: int,
    base: Path | None = None,
    *,
    learns_samples: bool,
    expected_hash: str = "",
) -> dict[str, bytes]:
    """Returns the tokenizer files of a run that begins with a trained model: file name -> content.

    source: as in [data] tokenizer; vocabulary, context, base: see tokenizer_files. The files in the folder of a
    tokenizer.json are returned unchanged; for any other source they are made by tokenizer_files. learns_samples:
    whether the run learns from samples; then a tokenizer without a chat template gets the plain one, with which its
    conversations were rendered. expected_hash: [data] tokenizer_hash, "" for none. Raises what open_tokenizer raises,
    DiskError and DataError for a file that cannot be read or is malformed, DataError for a tokenizer that is not the
    run's.
    """
    files, _ = tokenizer_files(source, vocabulary, context, base)
    if expected_hash:
        check_tokenizer(open_training_tokenizer(source, vocabulary, base), expected_hash)
    place = tokenizer_path(source, base)
    folder = place.parent if place is not None and place.name == TOKENIZER_FILE else None
    if folder is not None:
        files |= {name: _read_content(folder / name) for name in COPIED if (folder / name).is_file()}
    if learns_samples and (folder is not None or source == BYTES) and not _has_template(files):
        end_of_turn = open_model_tokenizer(folder, datetime.now()).end_of_turn
        files[TEMPLATE_FILE] = plain_template(end_of_turn).encode()
    return files


def plain_template(end_of_turn: str) -> str:
    """Returns the source of the plain chat template that writes `end_of_turn` after each answer, as a jinja2 text."""
    return f"{{%- set eos_token = {json.dumps(end_of_turn, ensure_ascii=False)} -%}}\n{PLAIN_TEMPLATE}"


def _has_template(files: dict[str, bytes]) -> bool:
    """Returns whether the files have a chat template: in a file of its own, or in tokenizer_config.json."""
    settings: dict[str, Any] = json.loads(files[SETTINGS_FILE])
    return TEMPLATE_FILE in files or bool(settings.get("chat_template"))


def _read_content(path: Path) -> bytes:
    """Returns a file's content, checked by its name: a template must be text and not empty, others a JSON object.

    Raises DiskError if it cannot be read, DataError if it is something else.
    """
    try:
        content = path.read_bytes()
        is_right = bool(content.decode()) if path.name == TEMPLATE_FILE else isinstance(json.loads(content), dict)
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror or error}); correct its permissions.") from error
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        kind = "text" if path.name == TEMPLATE_FILE else "a JSON object"
        raise DataError(f"{path} is not {kind}; fetch or write it again.")
    return content
