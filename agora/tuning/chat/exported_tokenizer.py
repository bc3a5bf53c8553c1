"""Returns the tokenizer's files of an export: those of the base model's folder with its chat template, or new ones."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError, DiskError

from agora.data.tokenizer import BYTES, TOKENIZER_FILE, tokenizer_files, tokenizer_path
from agora.tuning.chat.chat_template import PLAIN_TEMPLATE
from agora.tuning.chat.data_hashes import check_tokenizer
from agora.tuning.chat.model_tokenizer import (
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    open_model_tokenizer,
    open_training_tokenizer,
)

# Files that belong to a model folder's tokenizer.json and are copied with it; any of them may be missing.
COPIED: Final = (SETTINGS_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)


def pretrained_tokenizer_files(
    source: str,
    vocabulary: int,
    context: int,
    base: Path | None = None,
    *,
    learns_samples: bool,
    expected_hash: str = "",
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
    """
    files, _ = tokenizer_files(source, vocabulary, context, base)
    if expected_hash:
        check_tokenizer(open_training_tokenizer(source, vocabulary, base), expected_hash)
    path = tokenizer_path(source, base)
    folder = path.parent if path is not None and path.name == TOKENIZER_FILE else None
    if folder is not None:
        files |= {name: _read_content(folder / name) for name in COPIED if (folder / name).is_file()}
    if learns_samples and (folder is not None or source == BYTES) and not _has_template(files):
        end_of_turn = open_model_tokenizer(folder, datetime.now()).end_of_turn
        files[TEMPLATE_FILE] = plain_template(end_of_turn).encode()
    return files


def plain_template(end_of_turn: str) -> str:
    """Returns the jinja2 source of PLAIN_TEMPLATE, with `end_of_turn` set as the text after each answer."""
    return f"{{%- set eos_token = {json.dumps(end_of_turn, ensure_ascii=False)} -%}}\n{PLAIN_TEMPLATE}"


def _has_template(files: dict[str, bytes]) -> bool:
    settings: dict[str, Any] = json.loads(files[SETTINGS_FILE])
    return TEMPLATE_FILE in files or bool(settings.get("chat_template"))


def _read_content(path: Path) -> bytes:
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
