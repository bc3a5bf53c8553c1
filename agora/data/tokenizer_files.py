"""Writes a run's tokenizer as the files of a Hugging Face model folder, with the ids that the run trained on.

Knows: tokenizer.json, tokenizer_config.json. Must not know: models, folders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """An exported tokenizer: content by file name. end_of_text: the id that ends a document; None when no id does."""

    files: dict[str, bytes]
    end_of_text: int | None


def tokenizer_files(source: str, vocabulary: int, context: int, base: Path | None = None) -> TokenizerFiles:
    """Makes tokenizer.json and tokenizer_config.json, as transformers reads them, for the tokenizer of a manifest.

    For "bytes", which has no file, it makes an equal byte-level tokenizer. context: the longest input in tokens. Raises
    what open_tokenizer raises.
    """
    tokenizer = open_tokenizer(source, vocabulary, base=base)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
        "clean_up_tokenization_spaces": False,
    }
    end_of_text: int | None = None
    if isinstance(tokenizer, JsonTokenizer):
        content = tokenizer.content
        if tokenizer.end_of_text is not None:
            config["eos_token"] = tokenizer.end_of_text
            end_of_text = int(tokenizer.separator[0])
    else:
        content = _json(byte_tokenizer())
        end_of_text = int(ByteTokenizer.separator[0])
    return TokenizerFiles({"tokenizer.json": content, "tokenizer_config.json": _json(config)}, end_of_text)


def byte_tokenizer() -> dict[str, Any]:
    """Returns the content of a tokenizer.json whose ids are the bytes of UTF-8: a byte-level BPE without merges.

    It has no special tokens: id 0 is the byte 0, and a special token with that id would need a spelling that text could
    contain.
    """
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": model,
    }


def _byte_characters() -> list[str]:
    """Returns the character by which byte-level tokenizers spell each byte (GPT-2's table).

    A visible byte is itself; the others are U+0100 and the characters after it.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _json(value: dict[str, Any]) -> bytes:
    """Returns `value` as the content of a JSON file."""
    return json.dumps(value, indent=2).encode() + b"\n"
